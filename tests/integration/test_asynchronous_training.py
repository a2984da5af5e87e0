"""Training in asynchronous runs. Each test sets the order of the commits, so that plain PyTorch can repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import shardwell
from shardwell.command import cli, inspect_tables
from shardwell.data_plane.fetch import Fetches, Gather
from shardwell.data_plane.shard import RemoteUnit
from shardwell.module.unit import Unit
from shardwell.transport.service_client import CoordinatorClient, StandingRpc
from shardwell.weights.pinned_version import PinnedVersion
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.v1 import coordinator_pb2

RATE, MAX_NORM = 0.5, 0.1
NUM_STEPS = 4


def net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3))


def loss_of(model: nn.Module, number: int, dp_rank: int) -> torch.Tensor:
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + dp_rank))
    loss: torch.Tensor = model(batch).square().mean()
    return loss


@dataclass
class Trainer:
    """A trainer whose items the test computes and commits one by one."""

    session: shardwell.Session
    computed: list[tuple[int, int]] = field(default_factory=list)
    """Number and data rank of each computed item."""
    norms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model: Any = net()
        for layer in (self.model[0], self.model[2]):
            shardwell.fully_shard(layer, self.session)
        shardwell.fully_shard(self.model, self.session)
        self.optimizer = shardwell.optim.SGD(self.model.parameters(), lr=RATE)
        self._phases = self._train()

    def _train(self) -> Iterator[None]:
        """Yields after each item is computed, and after it is committed."""
        for step in self.session.steps(NUM_STEPS):
            for number, dp_rank in step.batches(lambda number, dp_rank: (number, dp_rank)):
                self.computed.append((number, dp_rank))
                loss_of(self.model, number, dp_rank).backward()
            yield
            self.norms.append(float(self.optimizer.clip_grad_norm_(MAX_NORM)))
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield

    def compute(self) -> None:
        next(self._phases)

    commit = compute

    def take_item(self) -> None:
        self.compute()
        self.commit()

    def train(self) -> None:
        """Trains until the loop ends."""
        for _ in self._phases:
            pass


class Plain:
    """The same training with plain PyTorch."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, fused=True)
        self.norms: list[float] = []

    def gradient(self, number: int, dp_rank: int) -> list[torch.Tensor]:
        """Returns the gradient of an item at the current weights."""
        loss_of(self.model, number, dp_rank).backward()
        found = [parameter.grad for parameter in self.model.parameters()]
        self.optimizer.zero_grad()
        return [gradient for gradient in found if gradient is not None]

    def apply(self, gradients: list[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        self.norms.append(float(nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take_item(self, number: int, dp_rank: int) -> None:
        self.apply(self.gradient(number, dp_rank))

    def assert_close_to(self, trainer: Trainer) -> None:
        """The norms are added in another order, so the clipped gradients may differ in the last bit."""
        for name, value in shardwell.full_state_dict(trainer.model).items():
            torch.testing.assert_close(value, self.model.state_dict()[name], rtol=0, atol=1e-7, msg=name)


def join(
    cluster: shardwell.LocalCluster,
    run: str,
    rank: int | None,
    transports: str = "shm,socket",
    *,
    checkpoint_dir: Path | None = None,
    resume: str | None = None,
    **transfers: Any,
) -> shardwell.Session:
    return shardwell.join(
        cluster.address,
        run=run,
        world=shardwell.World(dp=2),
        global_rank=rank,
        consistency=shardwell.ASYNCHRONOUS,
        checkpoint_dir=None if checkpoint_dir is None else str(checkpoint_dir),
        resume=resume,
        transfers=shardwell.TransferOptions(transports=transports, **transfers),
        waits=shardwell.WaitOptions(wait_limit_s=60),
    )


@pytest.fixture(params=["shm", "socket", "grpc"])
def trainers(cluster: shardwell.LocalCluster, run_name: str, request: pytest.FixtureRequest) -> Iterator[list[Trainer]]:
    """Two trainers of an asynchronous run, one for each data rank."""
    transports = f"{request.param},socket"
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        sessions = pool.map(lambda rank: join(cluster, run_name, rank, transports), range(2))
        yield [Trainer(stack.enter_context(session)) for session in sessions]


def test_an_item_reads_one_version_while_others_are_committed(trainers: list[Trainer]) -> None:
    a, b = trainers
    plain = Plain()
    at_start = plain.gradient(0, 1)
    a.take_item()
    a.take_item()
    b.compute()
    a.take_item()
    b.commit()
    for number in range(3):
        plain.take_item(number, 0)
    plain.apply(at_start)
    plain.assert_close_to(b)
    assert a.norms + b.norms == pytest.approx(plain.norms, rel=1e-6), "each norm is that of one item's gradient"
    assert (a.session.step, b.session.step) == (3, 4)
    b.take_item()
    plain.take_item(1, 1)
    plain.assert_close_to(b)
    assert b.session.report().staleness == {0: 1}, "the first step after join is not measured"
    a.take_item()
    assert a.session.report().staleness == {0: 2, 2: 1}


@pytest.mark.parametrize("ema", [False, True])
def test_state_dict_of_a_trainer_without_work_has_one_version_while_others_commit(
    trainers: list[Trainer], ema: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server keeps the version of its last step, and the other trainer replaces it."""
    a, b = trainers
    if ema:
        a.optimizer.ema_decay = b.optimizer.ema_decay = 0.5
    a.train()
    b.take_item()
    before = shardwell.full_state_dict(a.model, ema=ema)
    owner, name = (Unit, "gather_average") if ema else (PinnedVersion, "read")
    original, read_count = getattr(owner, name), 0

    def read(self: Any, *arguments: Any) -> Any:
        nonlocal read_count
        read_count += 1
        if read_count == 2:
            b.take_item()  # between the reads of two units
        return original(self, *arguments)

    with monkeypatch.context() as disturbed:
        disturbed.setattr(owner, name, read)
        found = shardwell.full_state_dict(a.model, ema=ema)
    after = shardwell.full_state_dict(a.model, ema=ema)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    # A pinned version outlives the commit. Averages exist for the newest version only: they are read again, unless the
    # server applies the commit after the read.
    versions = (before, after) if ema else (before,)
    assert any(all(torch.equal(value, version[key]) for key, value in found.items()) for version in versions)


def test_run_command_shows_the_item_and_the_version_of_each_rank(
    trainers: list[Trainer], cluster: shardwell.LocalCluster, run_name: str
) -> None:
    a, b = trainers
    b.compute()
    a.take_item()
    a.take_item()
    with closing(CoordinatorClient(cluster.address)) as client:
        response = client.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run_name))
    console = Console(file=StringIO(), width=150)
    console.print(inspect_tables.run(response))
    assert isinstance(console.file, StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert ["consistency", "ASYNCHRONOUS"] in lines
    heading = next(number for number, line in enumerate(lines) if line[:4] == ["WORK", "ITEM", "OF", "RANK"])
    assert [line[:6] for line in lines[heading + 1 : heading + 3]] == [
        ["0", "0", "2", "2", "0", "leased"],
        ["1", "1", "0", "0", "2", "finished"],
    ]


def test_a_read_that_a_commit_has_broken_is_repeated(trainers: list[Trainer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A server moves the version that an item reads, while it is being sent."""
    a, b = trainers
    plain, gather, broken = Plain(), Fetches.gather, set[tuple[Any, ...]]()
    b.take_item()

    def break_once(self: Fetches, unit: RemoteUnit, version: int, *arguments: Any, **options: Any) -> Future[int]:
        if (key := (unit.index, version)) in broken:
            return gather(self, unit, version, *arguments, **options)
        broken.add(key)
        failed = Gather(self.stats, options.get("alternative"))
        failed.fail(VersionGoneError("being overwritten"))
        return failed

    monkeypatch.setattr(Fetches, "gather", break_once)
    a.take_item()
    assert broken, "a has gathered its weights"
    assert a.computed == [(0, 0)], "the item is not computed again"
    at_start = plain.gradient(0, 0)
    plain.take_item(0, 1)
    plain.apply(at_start)
    plain.assert_close_to(a)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_an_item_reads_the_encoding_of_its_own_version(
    cluster: shardwell.LocalCluster, run_name: str, dtype: str
) -> None:
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        sessions = pool.map(lambda rank: join(cluster, run_name, rank, gather_dtype=dtype), range(2))
        a, b = [Trainer(stack.enter_context(session)) for session in sessions]
        first = {name: value.clone() for name, value in gathered(b).items()}
        a.take_item()
        a.take_item()
        with torch.no_grad():
            stale, newest = gathered(b), gathered(a)
        assert all(torch.equal(stale[name], first[name]) for name in first), "version 0, encoded again"
        assert not any(torch.equal(stale[name], newest[name]) for name in first if name.endswith("weight"))
        b.compute()
        b.commit()
        assert b.session.report().staleness == {}, "the first step after join is not measured"
        assert [(a.session.step, b.session.step)] == [(2, 3)]


def gathered(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Returns the weights with which a trainer computes its current item."""
    found = {}
    for name, module in (("first", trainer.model[0]), ("second", trainer.model[2])):
        module.unshard()
        found |= {f"{name}.{key}": value.detach().clone() for key, value in module.named_parameters()}
        module.reshard()
    return found


def test_a_new_run_continues_with_the_items_of_a_checkpoint(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path
) -> None:
    plain = Plain()
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        sessions = pool.map(lambda rank: join(cluster, run_name, rank, checkpoint_dir=tmp_path), range(2))
        a, b = [Trainer(stack.enter_context(session)) for session in sessions]
        at_start = plain.gradient(0, 1)
        a.take_item()
        a.take_item()
        b.take_item()
        a.session.save_checkpoint(wait=True)
    for number in range(2):
        plain.take_item(number, 0)
    plain.apply(at_start)
    (saved,) = RunFolder.of(tmp_path, run_name).entries()
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        sessions = pool.map(lambda rank: join(cluster, f"{run_name}-2", rank, resume=saved.url), range(2))
        c, d = [Trainer(stack.enter_context(session)) for session in sessions]
        plain.assert_close_to(c)
        late = plain.gradient(2, 0)
        d.take_item()
        c.take_item()
        plain.take_item(1, 1)
        plain.apply(late)
        plain.assert_close_to(c)
        assert (c.computed, d.computed) == ([(2, 0)], [(1, 1)])
        c.train()
        d.train()
        assert (c.computed[1:], d.computed[1:]) == ([(3, 0)], [(2, 1), (3, 1)]), "until the end of the loop"


def test_readers_and_exports_have_one_version(
    trainers: list[Trainer],
    cluster: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The shards cannot be mapped. Nobody waits whether a session has ended, as after other refusals.
    monkeypatch.setattr(StandingRpc, "broke_within", None)
    a, b = trainers
    plain, model = Plain(), net()
    b.compute()
    for number in range(2):
        a.take_item()
        plain.take_item(number, 0)
    with shardwell.attach(cluster.address, run=run_name) as reader:
        assert reader.follow(model) == 2
    assert cli.main(["export", run_name, str(tmp_path / "out"), "--address", cluster.address]) == 0
    exported = load_file(next(tmp_path.rglob("*.safetensors")))
    for state in (model.state_dict(), exported):
        for name, value in plain.model.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-7)


def test_every_item_is_computed_once(trainers: list[Trainer]) -> None:
    a, b = trainers
    for trainer in (a, b, b, a, b, b, a, a):
        trainer.take_item()
    assert a.computed == [(number, 0) for number in range(NUM_STEPS)]
    assert b.computed == [(number, 1) for number in range(NUM_STEPS)]
    assert a.session.step == 2 * NUM_STEPS


def test_items_of_a_trainer_that_left_are_computed_by_another_one(trainers: list[Trainer]) -> None:
    a, b = trainers
    plain = Plain()
    a.take_item()
    b.compute()
    b.session.close()
    a.take_item()
    for _ in range(4):
        a.take_item()
    assert a.computed == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (2, 0)], "the lowest number first, its own rank last"
    for number, dp_rank in a.computed:
        plain.take_item(number, dp_rank)
    plain.assert_close_to(a)


def test_spare_computes_the_items_of_a_lost_trainer_and_none_beyond_the_loop(
    cluster: shardwell.LocalCluster, run_name: str
) -> None:
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        a, b = map(Trainer, pool.map(lambda rank: join(cluster, run_name, rank), range(2)))
        spare = Trainer(stack.enter_context(join(cluster, run_name, None)))
        waiting = pool.submit(spare.train)
        a.train()
        a.session.close()
        b.take_item()
        b.take_item()
        b.session.close()
        waiting.result(timeout=60)
        assert spare.computed == [(2, 1), (3, 1)]
        assert spare.session.step == 2 * NUM_STEPS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world": shardwell.World(dp=1, tp=2)}, r"world=World\(dp=1, tp=2"),
        ({"transfers": shardwell.TransferOptions(host_cache_bytes=1)}, "host_cache_bytes=1"),
        ({"transfers": shardwell.TransferOptions(node_group="gloo")}, "node_group='gloo'"),
        *(
            ({"transfers": shardwell.TransferOptions(gradient_reduction=route)}, f"gradient_reduction={route!r}")
            for route in ("hierarchical", "allreduce", "adaptive")
        ),
        ({"reduction_groups": (2, 2), "world": shardwell.World(dp=4)}, r"reduction_groups=\(2, 2\)"),
        (
            {"transfers": shardwell.TransferOptions(push_dtype="int8", push_error_feedback=True)},
            "push_error_feedback=True",
        ),
    ],
)
def test_options_that_contradict_the_mode_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(shardwell.UsageError, match=rf"consistency=BOUNDED_STALENESS\(3\) contradicts {message}"):
        shardwell.join("localhost:1", consistency=shardwell.BOUNDED_STALENESS(3), **options)


def test_mode_is_read_from_the_environment(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SHARDWELL_CONSISTENCY", "BOUNDED_STALENESS(2)")
        with shardwell.join(cluster.address, run=run_name) as session:
            assert session.consistency == shardwell.BOUNDED_STALENESS(2)
        patched.setenv("SHARDWELL_CONSISTENCY", "SOMETIMES")
        with pytest.raises(shardwell.UsageError, match="SHARDWELL_CONSISTENCY: consistency='SOMETIMES': expected"):
            shardwell.join(cluster.address, run=run_name)


def test_uses_that_need_a_synchronous_run_are_rejected(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with shardwell.join(cluster.address, run=run_name, consistency=shardwell.ASYNCHRONOUS) as session:
        model = net()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=RATE)
        with pytest.raises(shardwell.UsageError, match=r"track\(scheduler\) in a run with consistency=ASYNCHRONOUS"):
            session.track(scheduler=object())
        with pytest.raises(shardwell.UsageError, match=r"steps\(optimizer_steps=2\)"):
            next(session.steps(2, optimizer_steps=2))
        loss_of(model, 0, 0).backward()
        with pytest.raises(shardwell.UsageError, match=r"inside `for batch in step.batches\(...\)`"):
            optimizer.step()
