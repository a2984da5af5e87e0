"""Client-side optimizers match the same optimizer on whole parameters, even when a trainer dies."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.processes import TrainerProcess
from tests.support.reference import sha256, train_plain
from tests.support.trainer import train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 5


class Momentum(torch.optim.Optimizer):
    """Custom optimizer with a tensor, a Python number and a flag as state, and a tuple as setting."""

    def __init__(self, params: Any, lr: float, mix: tuple[float, float] = (0.7, 0.3)) -> None:
        super().__init__(params, {"lr": lr, "mix": mix})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(average=torch.zeros_like(parameter), count=0, warm=False, scale=1.0)
                state["count"] += 1
                state["scale"] *= 0.9
                state["warm"] = state["count"] > 2
                keep, take = group["mix"]
                state["average"].mul_(keep).add_(parameter.grad, alpha=take)
                rate = group["lr"] * state["scale"] * (2.0 if state["warm"] else 1.0)
                parameter.data.add_(state["average"], alpha=-rate)


MAKERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "Rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "ASGD": (torch.optim.ASGD, {"lr": 1e-2, "t0": 2}),
    "Adam": (torch.optim.Adam, {"lr": 3e-3, "betas": (0.9, 0.95), "amsgrad": True}),
    "Adam foreach": (torch.optim.Adam, {"lr": 3e-3, "foreach": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
    "own": (Momentum, {"lr": 1e-2}),
}


@pytest.fixture(scope="module")
def clusters(
    cluster_of_one: shardwell.LocalCluster, cluster_with_short_leases: shardwell.LocalCluster
) -> dict[int, shardwell.LocalCluster]:
    """Returns clusters by number of shard servers."""
    return {1: cluster_of_one, 3: cluster_with_short_leases}


def on_trainers(name: str) -> Callable[[Iterable[nn.Parameter]], shardwell.ClientSide]:
    optimizer_class, options = MAKERS[name]
    return lambda parameters: shardwell.ClientSide(parameters, optimizer_class, **options)


def plain(name: str, dp: int, steps: int = STEPS) -> dict[str, torch.Tensor]:
    model = transformer.build()
    optimizer_class, options = MAKERS[name]
    train_plain(model, optimizer_class(model.parameters(), **options), transformer.batch, dp=dp, steps=steps)
    return model.state_dict()


def joined(cluster: shardwell.LocalCluster, *, dp: int = 1, transports: str | None = None) -> shardwell.Session:
    world = shardwell.World(dp=dp)
    return shardwell.join(
        cluster.address,
        run=uuid.uuid4().hex,
        world=world,
        min_trainers=1,
        **join_options(transports=transports),
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(("num_servers", "dp"), [(1, 1), (3, 2)])
def test_weights_match_the_optimizer_on_whole_parameters(
    clusters: dict[int, shardwell.LocalCluster], name: str, num_servers: int, dp: int
) -> None:
    with joined(clusters[num_servers], dp=dp) as session:
        _, state = train(session, steps=STEPS, make_optimizer=on_trainers(name))
    expected = plain(name, dp)
    assert [key for key in expected if not torch.equal(expected[key], state[key])] == []


@pytest.mark.parametrize("keep_bytes", [float("inf"), 40_000, 0])
def test_weights_match_over_grpc_for_any_keep_bytes(
    clusters: dict[int, shardwell.LocalCluster], keep_bytes: float
) -> None:
    optimizer_class, options = MAKERS["own"]

    def make(parameters: Iterable[nn.Parameter]) -> shardwell.ClientSide:
        return shardwell.ClientSide(parameters, optimizer_class, keep_bytes=keep_bytes, **options)

    with joined(clusters[3], dp=2, transports="grpc") as session:
        _, state = train(session, steps=STEPS, make_optimizer=make)
    expected = plain("own", 2)
    assert [key for key in expected if not torch.equal(expected[key], state[key])] == []


def train_in_two_processes(cluster: shardwell.LocalCluster, *options: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs two trainers and returns their results; the options apply to the one with rank 1."""
    run, common = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS, "--client-side", "Rprop")
    with (
        TrainerProcess(cluster.address, run, *common, "--global-rank", 1, *options) as other,
        TrainerProcess(cluster.address, run, *common, "--global-rank", 0) as first,
    ):
        return first.finish(), other.finish()


@pytest.fixture(scope="module")
def rprop_hash() -> str:
    model = transformer.build()
    train_plain(model, torch.optim.Rprop(model.parameters()), transformer.batch, dp=2, steps=STEPS)
    return sha256(model.state_dict())


@pytest.mark.parametrize(
    ("transports", "death"),
    [
        ("shm,grpc", ("--kill-at-step", 2)),
        ("shm,grpc", ("--kill-in-update", 2)),
        ("grpc", ("--kill-in-update", 2, "--after", 7)),
    ],
)
def test_partitions_of_a_killed_trainer_are_updated_by_the_other(
    clusters: dict[int, shardwell.LocalCluster], rprop_hash: str, death: tuple[object, ...], transports: str
) -> None:
    """A kill in the update leaves some partitions staged, some half staged and some only prefetched."""
    first, other = train_in_two_processes(clusters[3], *death, "--transports", transports)
    assert other["returncode"] == -9, other
    assert first.get("sha256") == rprop_hash, first


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 3))


def test_groups_scheduler_and_unused_parameters_match_torch(clusters: dict[int, shardwell.LocalCluster]) -> None:
    """The state of a parameter without a gradient does not advance. Group settings change between steps."""

    def run(model: Any, make: Any, finish: Any) -> None:
        groups = [
            {"params": list(model[0].parameters()), "lr": 1e-2, "weight_decay": 0.1},
            {"params": list(model[2].parameters())},
        ]
        optimizer = make(groups)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for number in range(6):
            x = torch.full((4, 17), 0.1 * number)
            (model[0](x) if number in (1, 2) else model(x)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            optimizer.param_groups[1]["weight_decay"] = 0.01 * number
        finish(model)

    results: list[dict[str, torch.Tensor]] = []
    run(small_model(), lambda groups: torch.optim.Adam(groups, lr=1e-3), lambda m: results.append(m.state_dict()))
    with joined(clusters[3]) as session:
        model = small_model()
        shardwell.fully_shard(model[0], session)
        shardwell.fully_shard(model, session)
        run(
            model,
            lambda groups: shardwell.ClientSide(groups, torch.optim.Adam, lr=1e-3),
            lambda m: results.append(shardwell.full_state_dict(m)),
        )
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_clipping_uses_the_norm_over_all_servers(clusters: dict[int, shardwell.LocalCluster]) -> None:
    hashes = []
    for cluster in clusters.values():
        with joined(cluster, dp=2) as session:
            state = train(session, steps=3, clip=0.05, make_optimizer=on_trainers("SGD"))[1]
            hashes.append(sha256(state))
    assert hashes[0] == hashes[1]
    unclipped = plain("SGD", 2, steps=3)
    assert not torch.equal(state["blocks.0.up.weight"], unclipped["blocks.0.up.weight"])
    model = transformer.build()
    optimizer_class, options = MAKERS["SGD"]

    class Clipped(optimizer_class):  # type: ignore[misc, valid-type]
        def step(self, closure: Any = None) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            super().step()

    train_plain(model, Clipped(model.parameters(), **options), transformer.batch, dp=2, steps=3)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, state[name], rtol=1e-5, atol=1e-6), name


# Errors.


@pytest.fixture
def sharded(clusters: dict[int, shardwell.LocalCluster]) -> Iterator[tuple[shardwell.Session, nn.Sequential]]:
    with joined(clusters[3]) as session:
        model = small_model()
        shardwell.fully_shard(model, session)
        yield session, model


def test_optimizer_that_needs_a_closure_is_rejected(sharded: tuple[shardwell.Session, nn.Sequential]) -> None:
    with pytest.raises(shardwell.UsageError, match=r"LBFGS.step needs a closure"):
        shardwell.ClientSide(sharded[1].parameters(), torch.optim.LBFGS, lr=0.1)


def test_unsharded_parameters_are_rejected() -> None:
    with pytest.raises(shardwell.UsageError, match="got no sharded parameter"):
        shardwell.ClientSide(small_model().parameters(), torch.optim.SGD, lr=0.1)


def test_optimizer_state_of_unsupported_type_is_rejected(sharded: tuple[shardwell.Session, nn.Sequential]) -> None:
    class Remembers(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["seen"] = ["a list"]

    _, model = sharded
    optimizer = shardwell.ClientSide(model.parameters(), Remembers, lr=0.1)
    model(torch.ones(4, 17)).sum().backward()
    with pytest.raises(
        shardwell.UsageError, match=r"parameter '.*0\.weight': its optimizer state 'seen' has type list"
    ):
        optimizer.step()


def test_non_finite_values_change_nothing(sharded: tuple[shardwell.Session, nn.Sequential]) -> None:
    session, model = sharded
    before = shardwell.full_state_dict(model)
    optimizer = shardwell.ClientSide(model.parameters(), torch.optim.SGD, lr=3e38)
    model(torch.ones(4, 17)).sum().backward()
    with pytest.raises(shardwell.NonFiniteError, match=r"new value of parameter .* has NaN or infinity"):
        optimizer.step()
    after = shardwell.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    for group in optimizer.param_groups:
        group["lr"] = 0.5
    optimizer.step()
    assert session.step == 1


@pytest.mark.parametrize("error", [shardwell.StaleEpochError, shardwell.StepStateError])
@pytest.mark.parametrize("failures", [2, 1000])
def test_partitions_that_were_leased_anew_or_whose_gradient_changed_are_asked_for_again(
    sharded: tuple[shardwell.Session, nn.Sequential],
    monkeypatch: pytest.MonkeyPatch,
    error: type[shardwell.ShardwellError],
    failures: int,
) -> None:
    session, model = sharded
    update, count = session.store.update_partitions, 0

    def fail(*arguments: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        if count <= failures:
            raise error("the partition is not this trainer's any more")
        update(*arguments, **options)

    monkeypatch.setattr(session.store, "update_partitions", fail)
    optimizer = shardwell.ClientSide(model.parameters(), torch.optim.SGD, lr=0.1)
    model(torch.ones(4, 17)).sum().backward()
    if failures < 1000:
        optimizer.step()
        assert (session.step, count) == (1, failures + 1)
    else:
        with pytest.raises(error, match="not this trainer's any more"):
            optimizer.step()
        assert (session.step, count) == (0, 21), "the number of attempts is limited"


def test_changing_the_optimizer_of_a_run_is_rejected(sharded: tuple[shardwell.Session, nn.Sequential]) -> None:
    _, model = sharded
    model(torch.ones(4, 17)).sum().backward()
    shardwell.ClientSide(model.parameters(), torch.optim.SGD, lr=0.1).step()
    model(torch.ones(4, 17)).sum().backward()
    for other in (
        shardwell.ClientSide(model.parameters(), torch.optim.Rprop, lr=0.1),
        shardwell.optim.SGD(model.parameters(), lr=0.1),
    ):
        with pytest.raises(shardwell.ConflictError, match="already has 'trainer/SGD' state in this run"):
            other.step()
