"""Several clippings in one step match torch: each changes the gradient that the one before has left."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.optimizer_parity import OddModel, compare_weights
from tests.support.processes import run_ranks

INF = math.inf
Calls = Sequence[tuple[Any, ...]]
"""("norm", max_norm, norm_type) and ("value", clip_value)."""

SEQUENCES: dict[str, Calls] = {
    "norm, then log": [("norm", 0.3), ("norm", INF)],
    "log, norm, then log": [("norm", INF), ("norm", 0.3), ("norm", INF)],
    "norm, then a smaller norm": [("norm", 0.3), ("norm", 0.1)],
    "norm, then a larger norm": [("norm", 0.3), ("norm", 1.0)],
    "norm, then norms of other types": [("norm", 0.3), ("norm", 0.2, 1.0), ("norm", 0.01, INF), ("norm", INF, 3.0)],
    "value, then norm": [("value", 2e-3), ("norm", 0.02), ("norm", INF)],
    "norm, then value, then norm": [("norm", 0.3), ("value", 2e-3), ("norm", 0.05, 1.0), ("norm", INF)],
    "value, then norm of infinity": [("value", 2e-3), ("norm", INF, INF), ("norm", 1e-3, INF), ("norm", INF, INF)],
    "norm, value, norm, value": [("norm", 0.3), ("value", 2e-3), ("norm", 0.02), ("value", 5e-4), ("norm", INF, 1.0)],
}

MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "servers": lambda parameters: shardwell.optim.SGD(parameters, lr=0.5),
    "trainers": lambda parameters: shardwell.ClientSide(parameters, torch.optim.SGD, lr=0.5),
    "combined": lambda parameters: shardwell.optim.Combined([shardwell.optim.SGD(parameters, lr=0.5)]),
}


@pytest.fixture
def session(cluster_of_three: shardwell.LocalCluster) -> Iterator[shardwell.Session]:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as joined:
        yield joined


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(5, 101, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(x, use_rare=number % 2 == 0)
    return loss


def clip_plain(model: nn.Module, calls: Calls) -> list[float]:
    """Clips with torch in fp64; returns the norms. In fp32, torch's sums of thousands of elements are less exact."""
    with_gradient = [each for each in model.parameters() if each.grad is not None and each.numel()]
    doubles = [nn.Parameter(torch.empty_like(each, dtype=torch.float64)) for each in with_gradient]
    for each, double in zip(with_gradient, doubles, strict=True):
        assert each.grad is not None
        double.grad = each.grad.double()
    norms = []
    for kind, *arguments in calls:
        if kind == "norm":
            norms.append(nn.utils.clip_grad_norm_(doubles, *arguments).item())
        else:
            nn.utils.clip_grad_value_(doubles, *arguments)
    for each, double in zip(with_gradient, doubles, strict=True):
        assert double.grad is not None
        each.grad = double.grad.float()
    return norms


def clip(optimizer: Any, calls: Calls) -> list[float]:
    norms = []
    for kind, *arguments in calls:
        if kind == "norm":
            norms.append(optimizer.clip_grad_norm_(*arguments).item())
        else:
            optimizer.clip_grad_value_(*arguments)
    return norms


def plain_step(model: nn.Module, calls: Calls, number: int = 0) -> list[float]:
    """Takes a step with plain SGD; returns the norms."""
    model.zero_grad()
    loss_of(model, number).backward()
    norms = clip_plain(model, calls)
    torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()
    return norms


def assert_close(model: nn.Module, plain: nn.Module) -> None:
    """Norms are fp64 at both, but one rounding of an element may differ."""
    found = shardwell.full_state_dict(model)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("where", MAKERS)
@pytest.mark.parametrize("calls", SEQUENCES.values(), ids=SEQUENCES)
def test_several_clippings_match_torch(session: shardwell.Session, where: str, calls: Calls) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizer = MAKERS[where](model.parameters())
    for number in range(2):
        expected = plain_step(plain, calls, number)
        loss_of(model, number).backward()
        assert clip(optimizer, calls) == pytest.approx(expected, rel=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        assert_close(model, plain)


@pytest.mark.parametrize("where", ["servers", "trainers"])
def test_clamping_twice_has_the_bits_of_torch(session: shardwell.Session, where: str) -> None:
    model, plain, calls = shardwell.fully_shard(OddModel(), session), OddModel(), [("value", 1e-3), ("value", 0.01)]
    optimizer = MAKERS[where](model.parameters())
    for number, own in enumerate((calls, calls[::-1])):
        plain_step(plain, own, number)
        loss_of(model, number).backward()
        clip(optimizer, own)
        optimizer.step()
    compare_weights(model, plain)


def test_logging_the_norm_changes_no_bit(cluster_of_three: shardwell.LocalCluster) -> None:
    states = []
    for calls in (
        [("norm", 0.3)],
        [("norm", INF), ("norm", INF, 1.0), ("norm", 0.3), ("norm", INF), ("norm", INF, 3.0)],
    ):
        with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
            model = shardwell.fully_shard(OddModel(), session)
            optimizer = MAKERS["servers"](model.parameters())
            loss_of(model, 0).backward()
            clip(optimizer, calls)
            optimizer.step()
            states.append(shardwell.full_state_dict(model))
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name


@pytest.mark.parametrize("calls", [[("norm", 0.3)], [("value", 1e-3)]], ids=["norm", "value"])
def test_backward_after_clipping_is_refused(session: shardwell.Session, calls: Calls) -> None:
    """In torch the second gradient would be added to the clipped first one."""
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizer = MAKERS["servers"](model.parameters())
    loss_of(model, 0).backward()
    clip(optimizer, calls)
    with pytest.raises(shardwell.UsageError, match=r"finished by optimizer.clip_grad_norm_\(\), clip_grad_value_\(\)"):
        loss_of(model, 1).backward()
    optimizer.step()
    plain_step(plain, calls)
    assert_close(model, plain)


def test_clamping_in_the_loop_over_batches_clamps_the_mean(cluster_of_three: shardwell.LocalCluster) -> None:
    """The trainer computes the batches of two ranks. A backward after the call would have no effect on it."""
    plain, calls = OddModel(), [("value", 1e-3)]
    world = {"world": shardwell.World(2), "min_trainers": 1}
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex, **world) as session:
        model = shardwell.fully_shard(OddModel(), session)
        optimizer = MAKERS["servers"](model.parameters())
        for step in session.steps(2):
            for rank in step.batches(lambda _, rank: rank):
                loss_of(model, 2 * step.number + rank).backward()
                clip(optimizer, calls)
                with pytest.raises(shardwell.UsageError, match=r"a backward ran after the work of step"):
                    loss_of(model, 0).backward()
            optimizer.step()
            plain.zero_grad()
            (sum(loss_of(plain, 2 * step.number + rank) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
            clip_plain(plain, calls)
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
        assert_close(model, plain)


@pytest.mark.parametrize("unscale", ["before", "after"])
@pytest.mark.parametrize("where", ["servers", "trainers"])
def test_clippings_of_scaled_losses_match_torch(session: shardwell.Session, where: str, unscale: str) -> None:
    """If ``unscale_`` is not called, ``GradScaler.step`` divides the clipped gradient by the scale, as in torch."""
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    scale = 3.0 if unscale == "after" else 1.0
    calls: Calls = [("value", 2e-3 * scale), ("norm", 0.02 * scale), ("norm", INF, 1.0)]
    optimizers = MAKERS[where](model.parameters()), torch.optim.SGD(plain.parameters(), lr=0.5)
    scalers = shardwell.amp.GradScaler(init_scale=3.0), torch.amp.GradScaler("cpu", init_scale=3.0)
    norms = []
    for each, optimizer, scaler in zip((model, plain), optimizers, scalers, strict=True):
        scaler.scale(loss_of(each, 0)).backward()
        if unscale == "before":
            scaler.unscale_(optimizer)
        norms.append(clip_plain(plain, calls) if each is plain else clip(optimizer, calls))
        scaler.step(optimizer)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert_close(model, plain)


def test_clipping_starts_afresh_in_the_next_step(session: shardwell.Session) -> None:
    """Also after ``zero_grad``, and after a step that is completed by the next forward."""
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizer = MAKERS["servers"](model.parameters())
    loss_of(model, 5).backward()
    clip(optimizer, [("value", 1e-4), ("norm", 1e-4)])
    optimizer.zero_grad()
    for number, calls in enumerate((SEQUENCES["value, then norm"], [], [("norm", 0.3)])):
        plain_step(plain, calls, number)
        loss_of(model, number).backward()
        clip(optimizer, calls)
        optimizer.step()
        optimizer.zero_grad()
    assert_close(model, plain)


@pytest.mark.parametrize("consistency", [shardwell.ASYNCHRONOUS, shardwell.BOUNDED_STALENESS(1)])
def test_clippings_of_asynchronous_items_match_torch(
    cluster_of_three: shardwell.LocalCluster, consistency: Any
) -> None:
    """A single trainer computes one item after the other, as a synchronous run does."""
    plain, calls = OddModel(), SEQUENCES["norm, then value, then norm"]
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex, consistency=consistency) as session:
        model = shardwell.fully_shard(OddModel(), session)
        optimizer = MAKERS["servers"](model.parameters())
        for step in session.steps(3):
            for number in step.batches(lambda number, _: number):
                loss_of(model, number).backward()
            norms = clip(optimizer, calls)
            optimizer.step()
            assert norms == pytest.approx(plain_step(plain, calls, step.number), rel=1e-6)
        assert_close(model, plain)


# ---- several ranks ----


def rank_worker(rank: int, address: str, run: str, logging_rank: int) -> None:
    """Clips on both ranks. One of them logs the norm before and after."""
    world, waits = shardwell.World(2), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
        optimizer = MAKERS["servers"](model.parameters())
        reference = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(3):
            loss_of(model, 10 * step + rank).backward()
            norms = clip(optimizer, [("norm", INF)] if rank == logging_rank else [])
            norms += clip(optimizer, [("norm", 0.3), ("norm", 0.05, 1.0)])
            norms += clip(optimizer, [("norm", INF)] if rank == logging_rank else [])
            optimizer.step()
            optimizer.zero_grad()
            reference.zero_grad()
            (sum(loss_of(plain, 10 * step + each) for each in range(2)) / 2).backward()  # type: ignore[union-attr]
            expected = clip_plain(plain, [("norm", INF), ("norm", 0.3), ("norm", 0.05, 1.0)])
            if rank == logging_rank:
                expected += clip_plain(plain, [("norm", INF)])
            reference.step()
            assert norms == pytest.approx(expected if rank == logging_rank else expected[1:], rel=1e-6)
        assert_close(model, plain)


@pytest.mark.parametrize("logging_rank", [0, 1])
def test_one_rank_may_log_the_norm(cluster_of_three: shardwell.LocalCluster, run_name: str, logging_rank: int) -> None:
    run_ranks(rank_worker, cluster_of_three.address, run_name, logging_rank)


def other_norm_worker(rank: int, address: str, run: str) -> None:
    """Rank 1 asks for a norm that nobody else asks for, after the leader has committed the step."""
    world, waits = shardwell.World(2), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        model = shardwell.fully_shard(OddModel(), session)
        optimizer = MAKERS["servers"](model.parameters())
        for number in range(3):
            loss_of(model, number).backward()
            optimizer.clip_grad_norm_(0.3)
            if rank == 1:
                with shardwell.attach(address, run=run) as reader:
                    reader.wait_for(number + 1, 60.0)
                assert math.isnan(optimizer.clip_grad_norm_(INF, 3.0))
                assert optimizer.clip_grad_norm_(INF) <= 0.3
            optimizer.step()


def test_norm_that_is_not_known_after_the_commit_is_nan(
    cluster_of_three: shardwell.LocalCluster, run_name: str
) -> None:
    run_ranks(other_norm_worker, cluster_of_three.address, run_name)


def disagreeing_worker(rank: int, address: str, run: str) -> None:
    world, waits = shardwell.World(2), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        model = shardwell.fully_shard(OddModel(), session)
        optimizer = MAKERS["servers"](model.parameters())
        loss_of(model, rank).backward()
        optimizer.clip_grad_norm_(0.3)
        if rank == 1:
            optimizer.clip_grad_norm_(0.1)
            with pytest.raises(
                shardwell.HyperparameterMismatchError, match=r"clip coefficient is .* at rank 0"
            ) as raised:
                optimizer.step()
            assert "at rank 1" in str(raised.value)
            assert 'call clip_grad_norm_(float("inf")), which changes nothing' in str(raised.value)
        else:
            optimizer.step()


def test_ranks_that_clip_differently_are_refused(cluster_of_three: shardwell.LocalCluster, run_name: str) -> None:
    run_ranks(disagreeing_worker, cluster_of_three.address, run_name)


def layer(stage: int) -> nn.Linear:
    torch.manual_seed(stage)
    return nn.Linear(101, 41)


def grid_worker(rank: int, address: str, run: str, tp: int, pp: int) -> None:
    """Every stage has a model of its own. The norms are over those of all stages."""
    world, waits = shardwell.World(1, tp, pp), shardwell.WaitOptions(wait_limit_s=60)
    calls = SEQUENCES["norm, value, norm, value"]
    x = torch.ones(3, 101)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        stage = session.pp_rank or 0
        model = shardwell.fully_shard(layer(stage), session, name=f"stage-{stage}")
        optimizer, plain = shardwell.optim.SGD(model.parameters(), lr=0.5), nn.ModuleList(map(layer, range(pp)))
        for _ in session.steps(2):
            model(x).square().mean().backward()
            norms = clip(optimizer, calls)
            if rank == tp * pp - 1:
                optimizer.clip_grad_norm_(INF)
            optimizer.step()
            optimizer.zero_grad()
            plain.zero_grad()
            for each in plain:
                each(x).square().mean().backward()
            assert norms == pytest.approx(clip_plain(plain, calls), rel=1e-6)
            torch.optim.SGD(plain.parameters(), lr=0.5).step()
        assert_close(model, plain[stage])


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1)])
def test_clippings_are_over_all_trainers_of_a_replica(
    cluster_of_three: shardwell.LocalCluster, run_name: str, tp: int, pp: int
) -> None:
    run_ranks(grid_worker, cluster_of_three.address, run_name, tp, pp, count=tp * pp)


def test_each_of_several_optimizers_clips_its_own_gradient(session: shardwell.Session) -> None:
    calls = SEQUENCES["norm, then value, then norm"]
    models = [shardwell.fully_shard(layer(number), session, name=f"{number}") for number in range(2)]
    optimizers = [shardwell.optim.SGD(model.parameters(), lr=0.5) for model in models]
    plain, x = [layer(number) for number in range(2)], torch.ones(3, 101)
    for number in (0, 1, 1, 0):
        models[number](x).square().mean().backward()
        norms = clip(optimizers[number], calls)
        optimizers[number].step()
        optimizers[number].zero_grad()
        plain[number].zero_grad()
        plain[number](x).square().mean().backward()
        assert norms == pytest.approx(clip_plain(plain[number], calls), rel=1e-6)
        torch.optim.SGD(plain[number].parameters(), lr=0.5).step()
    for model, expected in zip(models, plain, strict=True):
        assert_close(model, expected)
