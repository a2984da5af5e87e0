"""Loss scaling gives the scales, the skipped steps and the weights of torch's GradScaler."""

from __future__ import annotations

import copy
import math
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.cluster import join_options
from tests.support.reference import ADAMW, sha256

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, INTERVAL = 8, 2
OVERFLOWS = {(1, 1), (4, 0)}
"""(step, dp_rank) pairs whose scaled loss overflows."""


_building = threading.Lock()
"""Held while a model is built, because trainers in threads share torch's generator."""


def build() -> nn.Sequential:
    with _building:
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(7, 61), nn.Tanh(), nn.Linear(61, 53), nn.Tanh(), nn.Linear(53, 1))


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, float]:
    """Returns the inputs and the factor of the loss."""
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 * step + dp_rank))
    return values, 1e38 if (step, dp_rank) in OVERFLOWS else 1.0


def loss_of(model: nn.Module, values: torch.Tensor, factor: float) -> torch.Tensor:
    loss: torch.Tensor = model(values).square().mean() * factor
    return loss


@dataclass
class Outcome:
    scales: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def plain(dp: int, clip: float | None = None, *, fused: bool = True, **options: Any) -> Outcome:
    """Trains with plain torch and adds the gradients of the ranks in order."""
    model, outcome = build(), Outcome()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False, **ADAMW)
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL, **options)
    for step in range(STEPS):
        sums = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        for dp_rank in range(dp):
            scaler.scale(loss_of(model, *batch(step, dp_rank))).backward()
            for parameter, total in sums.items():
                assert parameter.grad is not None
                total.add_(parameter.grad)
                parameter.grad = None
        for parameter, total in sums.items():
            parameter.grad = total / dp
        if clip is not None:
            scaler.unscale_(optimizer)
            outcome.norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        outcome.scales.append(scaler.get_scale())
    outcome.state = model.state_dict()
    return outcome


def on_servers(model: nn.Module) -> shardwell.optim.ShardedOptimizer:
    return shardwell.optim.AdamW(model.parameters(), **ADAMW)


def on_trainers(model: nn.Module) -> shardwell.optim.ShardedOptimizer:
    return shardwell.ClientSide(model.parameters(), torch.optim.AdamW, foreach=False, **ADAMW)


def sharded(
    address: str,
    run: str,
    dp: int,
    *,
    make: Callable[[nn.Module], shardwell.optim.ShardedOptimizer] = on_servers,
    clip: float | None = None,
    steps: int = STEPS,
    **join: Any,
) -> Outcome:
    outcome = Outcome()
    with shardwell.join(
        address, run=run, world=shardwell.World(dp=dp), **join_options(wait_limit_s=60, **join)
    ) as session:
        model = build()
        for layer in model[::2]:
            shardwell.fully_shard(layer, session)
        shardwell.fully_shard(model, session)
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        scaler = shardwell.amp.GradScaler(growth_interval=INTERVAL)
        session.track(scaler=scaler)
        for step in session.steps(steps):
            for values, factor in step.batches(batch):
                scaler.scale(loss_of(model, values, factor)).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                outcome.norms.append(optimizer.clip_grad_norm_(clip).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            outcome.scales.append(scaler.get_scale())
        outcome.state = shardwell.full_state_dict(model)
    return outcome


@pytest.mark.parametrize("transports", ["shm,grpc", "grpc"])
@pytest.mark.parametrize("dp", [1, 2])
def test_scales_skipped_steps_and_weights_match_torch(
    cluster_of_three: shardwell.LocalCluster, dp: int, transports: str
) -> None:
    expected = plain(dp)
    changes = {after / before for before, after in pairwise(expected.scales)}
    assert changes == {0.5, 1.0, 2.0}, "the scale neither grew nor shrank"
    got = sharded(cluster_of_three.address, uuid.uuid4().hex, dp, min_trainers=1, transports=transports)
    assert got.scales == expected.scales
    assert sha256(got.state) == sha256(expected.state)


def test_client_side_optimizer_skips_the_same_steps(cluster_of_three: shardwell.LocalCluster) -> None:
    expected = plain(2, fused=False)
    got = sharded(cluster_of_three.address, uuid.uuid4().hex, 2, make=on_trainers, min_trainers=1)
    assert got.scales == expected.scales
    assert sha256(got.state) == sha256(expected.state)


def test_every_trainer_skips_when_one_overflows(cluster_of_three: shardwell.LocalCluster) -> None:
    expected, run = plain(2), uuid.uuid4().hex
    with ThreadPoolExecutor(2) as trainers:
        pending = [trainers.submit(sharded, cluster_of_three.address, run, 2, global_rank=rank) for rank in range(2)]
        outcomes = [each.result(timeout=100) for each in pending]
    assert [outcome.scales for outcome in outcomes] == [expected.scales] * 2
    assert [sha256(outcome.state) for outcome in outcomes] == [sha256(expected.state)] * 2


def test_clipping_uses_the_norm_of_the_unscaled_gradient(cluster_of_three: shardwell.LocalCluster) -> None:
    expected = plain(2, clip=0.1)
    got = sharded(cluster_of_three.address, uuid.uuid4().hex, 2, clip=0.1, min_trainers=1)
    assert got.scales == expected.scales
    assert [math.isfinite(norm) for norm in got.norms] == [math.isfinite(norm) for norm in expected.norms]
    finite = [pair for pair in zip(got.norms, expected.norms, strict=True) if math.isfinite(pair[0])]
    assert len(finite) == STEPS - len(OVERFLOWS)
    assert any(norm > 0.1 for norm, _ in finite), "nothing was clipped"
    for norm, other in finite:
        assert norm == pytest.approx(other, rel=1e-5)
    for name, value in expected.state.items():
        torch.testing.assert_close(got.state[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("until", [2, 3])
def test_late_trainer_continues_with_the_scale_of_the_run(cluster_of_three: shardwell.LocalCluster, until: int) -> None:
    """With ``until=2`` the trainer joins right after a skipped step."""
    expected, run = plain(2), uuid.uuid4().hex
    first = sharded(cluster_of_three.address, run, 2, min_trainers=1, steps=until)
    second = sharded(cluster_of_three.address, run, 2, min_trainers=1)
    assert first.scales == expected.scales[:until]
    assert second.scales == expected.scales[until:]
    assert sha256(second.state) == sha256(expected.state)


def test_float16_matches_a_manual_loop(cluster_of_three: shardwell.LocalCluster) -> None:
    """Masters are fp32, the copy that computes is fp16, and gradients vanish without a scale."""
    small, policy = 2.0**-20, shardwell.MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)
    master, moved = build(), False
    optimizer = torch.optim.AdamW(master.parameters(), fused=True, **ADAMW)
    reference, expected = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=INTERVAL), []
    for step in range(STEPS):
        low = copy.deepcopy(master).half()
        output = low(batch(step, 0)[0].half()).float()
        reference.scale(output.square().mean() * small).backward()
        for parameter, computing in zip(master.parameters(), low.parameters(), strict=True):
            assert computing.grad is not None
            parameter.grad = computing.grad.float()
            moved |= bool(parameter.grad.any())
        reference.step(optimizer)
        reference.update()
        expected.append(reference.get_scale())
    assert moved
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(build(), session, mp_policy=policy)
        sharded_optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
        scaler, got = shardwell.amp.GradScaler(init_scale=2.0**20, growth_interval=INTERVAL), []
        for step in range(STEPS):
            scaler.scale(model(batch(step, 0)[0]).square().mean() * small).backward()
            scaler.step(sharded_optimizer)
            scaler.update()
            sharded_optimizer.zero_grad()
            got.append(scaler.get_scale())
        state = shardwell.full_state_dict(model)
    assert got == expected
    assert sha256(state) == sha256(master.state_dict())


@pytest.fixture
def session(cluster_of_three: shardwell.LocalCluster) -> Iterator[shardwell.Session]:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as joined:
        yield joined


@pytest.fixture
def local(session: shardwell.Session) -> tuple[nn.Module, shardwell.optim.AdamW]:
    """Returns a small model and its optimizer in a run with one trainer."""
    torch.manual_seed(1)
    model = shardwell.fully_shard(nn.Linear(3, 2), session)
    return model, shardwell.optim.AdamW(model.parameters(), **ADAMW)


def test_repeated_calls_raise_as_in_torch(local: tuple[nn.Module, shardwell.optim.AdamW]) -> None:
    model, optimizer = local
    scaler = shardwell.amp.GradScaler()
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called on this optimizer since the last update"):
        scaler.unscale_(optimizer)
    with pytest.raises(shardwell.UsageError, match="takes no closure"):
        scaler.step(optimizer, lambda: None)
    scaler.step(optimizer)
    assert not optimizer.skipped
    with pytest.raises(RuntimeError, match="already been called since the last update"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="being called after step"):
        scaler.unscale_(optimizer)
    scaler.update()


def test_zero_grad_after_unscale_resets_the_step(local: tuple[nn.Module, shardwell.optim.AdamW]) -> None:
    model, optimizer = local
    scaler = shardwell.amp.GradScaler()
    scaler.unscale_(optimizer)
    optimizer.zero_grad()
    (model(torch.ones(1, 3)).sum() * math.nan).backward()
    with pytest.raises(shardwell.NonFiniteError):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()


def test_disabled_scaler_does_nothing(local: tuple[nn.Module, shardwell.optim.AdamW]) -> None:
    model, optimizer = local
    scaler = shardwell.amp.GradScaler(enabled=False)
    loss = model(torch.ones(1, 3)).sum()
    assert scaler.scale(loss) is loss
    assert (scaler.is_enabled(), scaler.get_scale(), scaler.state_dict()) == (False, 1.0, {})
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_scaler_state_is_interchangeable_with_torch(session: shardwell.Session) -> None:
    ours, theirs = shardwell.amp.GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu")
    session.track(scaler=ours)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 8.0
    assert theirs.state_dict() == ours.state_dict()
    assert isinstance(ours, torch.amp.GradScaler)


def test_local_optimizer_skips_an_overflow_as_in_torch() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    scaler, optimizer = shardwell.amp.GradScaler(), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 3)).sum() * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert scaler.get_scale() == 2.0**15


def test_trainers_that_disagree_about_scaling_are_rejected(cluster_of_three: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex

    def train(rank: int) -> str:
        with shardwell.join(
            cluster_of_three.address,
            run=run,
            world=shardwell.World(dp=2),
            global_rank=rank,
            waits=shardwell.WaitOptions(wait_limit_s=3),
        ) as session:
            model = shardwell.fully_shard(nn.Linear(3, 2), session)
            optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
            scaler = shardwell.amp.GradScaler(init_scale=1.0, enabled=rank == 0)
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            try:
                scaler.step(optimizer)
            except shardwell.ShardwellError as error:
                return f"{type(error).__name__}: {error}"
            return "stepped"

    with ThreadPoolExecutor(2) as trainers:
        results = [each.result(timeout=60) for each in [trainers.submit(train, rank) for rank in range(2)]]
    assert results[0] == "stepped"
    assert "HyperparameterMismatchError: skip_non_finite" in results[1]
