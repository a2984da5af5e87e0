"""Whatever a trainer does when its run goes back to a checkpoint on fewer servers, it joins again and goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.processes import local_cluster
from shardwell_wire import fault_points
from tests.support.cluster import events, join_options, wait_until
from tests.support.reference import one_thread, sha256

STEPS, LOSS_AT, EVERY = 12, 6, 4
"""The run goes back from step 6 to the checkpoint of step 4."""

KINDS: dict[str, dict[str, Any]] = {
    "socket": {"transports": "socket"},
    "grpc": {"transports": "grpc"},
    "deltas": {"gather_dtype": "bfloat16", "delta_cache_bytes": 1 << 28, "transports": "socket"},
    "buffers": {"transports": "socket"},
    "client-side": {"transports": "socket"},
    "asynchronous": {"transports": "socket", "consistency": shardwell.ASYNCHRONOUS},
}


class Net(nn.Module):
    """Calls ``between`` once, between the forwards of two units."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.norm = nn.BatchNorm1d(64) if kind == "buffers" else nn.Identity()
        self.between: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x))
            if number == 0 and self.between is not None:
                between, self.between = self.between, None
                between()
        return self.norm(x)


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(number))


def make_model(kind: str) -> Net:
    torch.manual_seed(0)
    return Net(kind)


def make_optimizer(kind: str, model: nn.Module) -> Any:
    if kind == "client-side":
        return shardwell.ClientSide(model.parameters(), torch.optim.AdamW, lr=1e-2)
    return shardwell.optim.AdamW(model.parameters(), lr=1e-2)


def shard(model: Net, session: shardwell.Session, between: Callable[[], None] = lambda: None) -> None:
    shardwell.fully_shard(model.blocks[0], session, name="first")
    between()
    for number in (1, 2):
        shardwell.fully_shard(model.blocks[number], session, name=f"block{number}")
    shardwell.fully_shard(model, session, name="rest")


def train(
    session: shardwell.Session, kind: str, model: Net, stop: int, at_step: Callable[[int], None] = lambda step: None
) -> None:
    optimizer = make_optimizer(kind, model)
    for step in session.steps(stop):
        at_step(step.number)
        for x in step.batches(batch):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def parameters(model: nn.Module) -> str:
    return sha256({name: value for name, value in shardwell.full_state_dict(model).items() if "norm" not in name})


@cache
@one_thread()
def undisturbed(kind: str) -> dict[int, str]:
    """Returns the hash of the parameters of each version, of a run that loses nothing."""
    found: dict[int, str] = {}
    with shardwell.testing.in_process_cluster(3):
        session, model = shardwell.join(**join_options(**KINDS[kind], prefetch_bytes=0)), make_model(kind)
        shard(model, session)

        def note(version: int) -> None:
            found[version] = parameters(model)

        train(session, kind, model, STEPS, note)
        note(STEPS)
    return found


class Lossy:
    """A cluster of three servers, of which one is lost for good. The load takes seconds."""

    def __init__(self, cluster: shardwell.LocalCluster, folder: Path) -> None:
        self.cluster, self._folder = cluster, folder

    def join(self, kind: str) -> shardwell.Session:
        options = join_options(**KINDS[kind], prefetch_bytes=0, wait_limit_s=60.0)
        return shardwell.join(
            self.cluster.address, run="r", checkpoint_dir=str(self._folder), checkpoint_every=EVERY, **options
        )

    def happened(self, kind: str) -> bool:
        return any(event.kind == kind for event in events(self.cluster.address, "r"))

    def lose(self, until: str = "") -> None:
        """Loses a server, and returns at once or after an event."""
        wait_until(lambda: self.happened("checkpoint_saved"), "a checkpoint")
        self.cluster.shards[2].kill()
        if until:
            wait_until(lambda: self.happened(until), until, timeout_s=60.0)


@contextmanager
def lossy_cluster(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[Lossy]:
    slow = fault_points.Fault(point="server.load.middle", action="delay", delay_s=0.3)
    for name, value in fault_points.environment(slow).items():
        monkeypatch.setenv(name, value)
    cluster = shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096, lease_s=2.0)
    cluster._coordinator_options += local_cluster._options(**options)
    with one_thread(), cluster:
        yield Lossy(cluster, folder / "checkpoints")


@pytest.fixture
def lossy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lossy]:
    """The servers have no shared memory: what a server has is gone with its process."""
    environment = local_cluster._server_environment

    def without_shared_memory(variables: Collection[str] = ()) -> dict[str, str]:
        return {**environment(variables), "SHARDWELL_SHM_DIR": "none"}

    monkeypatch.setattr(local_cluster, "_server_environment", without_shared_memory)
    with lossy_cluster(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def leaving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lossy]:
    """A server leaves its shards on the host, and is awaited for a moment before the run goes back."""
    with lossy_cluster(tmp_path, monkeypatch, restart_wait_s=1.0) as made:
        yield made


LOST, LOADING = "", "run_loading"
"""When the trainer goes on after the loss: at once, or when the load has begun."""


@pytest.mark.parametrize(
    ("kind", "until"),
    [*((kind, LOST) for kind in KINDS), ("socket", LOADING), ("deltas", LOADING), ("buffers", LOADING)],
)
def test_a_gather_that_waits_for_the_lost_server_or_for_the_load(kind: str, until: str, lossy: Lossy) -> None:
    check_gather(kind, until, lossy)


@pytest.mark.parametrize("kind", ["socket", "client-side"])
def test_a_gather_that_waits_for_the_restart_of_a_server(kind: str, leaving: Lossy) -> None:
    check_gather(kind, LOST, leaving)


def check_gather(kind: str, until: str, lossy: Lossy) -> None:
    """Loses the server between the gathers of two units."""
    expected = undisturbed(kind)
    with lossy.join(kind) as session:
        model = make_model(kind)
        shard(model, session)

        def at_step(number: int) -> None:
            if number == LOSS_AT and not lossy.happened("run_loading"):
                model.between = partial(lossy.lose, until)

        train(session, kind, model, STEPS, at_step)
        assert lossy.happened("rolled_back")
        assert parameters(model) == expected[STEPS]


@pytest.mark.parametrize(("kind", "until"), [("socket", LOST), ("buffers", LOADING)])
def test_a_trainer_that_shards_its_model(kind: str, until: str, lossy: Lossy) -> None:
    expected = undisturbed(kind)
    with lossy.join(kind) as session:
        model = make_model(kind)
        shard(model, session)
        train(session, kind, model, LOSS_AT)
    with lossy.join(kind) as session:
        model = make_model(kind)
        shard(model, session, partial(lossy.lose, until))
        train(session, kind, model, STEPS)
        assert lossy.happened("rolled_back")
        assert parameters(model) == expected[STEPS]


@pytest.mark.parametrize("until", [LOST, LOADING, "rolled_back"])
def test_a_state_dict_has_one_version(until: str, lossy: Lossy, tmp_path: Path) -> None:
    expected, states = undisturbed("socket"), list[str]()
    with lossy.join("socket") as session:
        model = make_model("socket")
        shard(model, session)

        def at_step(number: int) -> None:
            if number == LOSS_AT and not states:
                lossy.lose(until)
                states.append(parameters(model))
                shardwell.save_safetensors(model, tmp_path / "export")
                session.save_checkpoint()

        train(session, "socket", model, STEPS, at_step)
        assert lossy.happened("rolled_back")
        assert states == [expected[EVERY]]
        assert parameters(model) == expected[STEPS]
