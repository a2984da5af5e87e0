"""Fault tests of restarted steps: the coordinator restarts all work items at some instant, as after a lost server.

The weights, buffers, tracked objects and losses must be those of a run that was not disturbed, bit by bit.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server import in_process
from shardwell_server.coordinator import command, coordinator
from shardwell_wire import fault_points
from shardwell_wire.errors import StepRestartedError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import join_options
from tests.support.reference import sha256

DP, STEPS, RESTARTED = 2, 5, 2

Disturb = Callable[[], None]


@pytest.fixture
def restart_step(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Returns a function that restarts the work items of the only run, and fences their former attempts."""
    coordinators: list[coordinator.Coordinator] = []

    class Observed(coordinator.Coordinator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            coordinators.append(self)

    monkeypatch.setattr(command, "Coordinator", Observed)

    async def restart() -> None:
        (of,) = coordinators
        (run,) = of.state.runs.values()
        run.work.restart()
        await of.state.save(run)
        of.trainers.items.start_fencing(run)

    with shardwell.testing.in_process_cluster(num_shards=2, dp=DP):
        yield lambda: asyncio.run_coroutine_threadsafe(restart(), in_process._shared_loop()).result(20.0)


class Net(nn.Module):
    """Has dropout, batch statistics, and a hook in the middle of its backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Linear(11, 3)
        self.on_backward: Disturb | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        if (hook := self.on_backward) is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: hook())
        loss: torch.Tensor = self.last(hidden).square().mean()
        return loss


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(9, 7, generator=torch.Generator().manual_seed(100 * step + rank))


def train(
    at: str, disturb: Disturb, *, clip: bool = True, **options: Any
) -> tuple[dict[int, set[str]], dict[str, Any], list[Any]]:
    """Trains and disturbs step ``RESTARTED`` once; returns hashes by version, scheduler state and losses."""
    pending = [disturb]

    def once(*_: Any) -> None:
        if pending and session.step == RESTARTED:
            pending.pop()()

    losses: dict[tuple[int, int], float] = {}
    states: dict[int, set[str]] = {}
    with ExitStack() as stack:
        session = stack.enter_context(shardwell.join(**join_options(wait_limit_s=60, **options)))
        model = Net()
        shardwell.fully_shard(model.first, session, name="first")
        shardwell.fully_shard(model, session, name="rest")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        session.track(scheduler=scheduler)
        if at.startswith("client."):
            stack.enter_context(fault_points.armed(at, once, nth=RESTARTED + 1))
        for step in session.steps(STEPS):
            for number, x in enumerate(step.batches(batch)):
                model.on_backward = once if at == f"backward {number}" else None
                loss = model(x)
                loss.backward()
                losses[step.number, step.global_ranks[-1]] = loss.item()
                if at == f"after batch {number}":
                    once()
            if at == "after batches":
                once()
            if clip:
                optimizer.clip_grad_norm_(0.1)
            if at == "after clip":
                once()
            optimizer.step()
            optimizer.zero_grad()
            state = {**shardwell.full_state_dict(model), **dict(model.named_buffers())}
            states.setdefault(session.step, set()).add(sha256(state))  # also in an iteration without effect
            scheduler.step()
        assert session.step == STEPS
        assert not pending or at == "never"
        return states, scheduler.state_dict(), sorted(losses.items())


INSTANTS = [
    "backward 0",
    "backward 1",
    "after batch 0",
    "after batch 1",
    "client.finish_work.before",
    "client.finish_work.after",
    "after batches",
    "after clip",
    "client.commit.before",
]


FEEDBACK = {"push_dtype": "lowrank-4", "push_error_feedback": True}


@pytest.mark.parametrize("instants, options", [(INSTANTS, {}), (["backward 1", "client.commit.before"], FEEDBACK)])
def test_restarted_step_gives_the_same_bits(
    restart_step: Disturb, instants: list[str], options: dict[str, Any]
) -> None:
    expected = train("never", restart_step, run="undisturbed", **options)
    delete("undisturbed")
    for at in instants:
        assert train(at, restart_step, run="disturbed", **options) == expected, at
        delete("disturbed")


def delete(run: str) -> None:
    """Deletes a run, so that ``restart_step`` finds one run only."""
    with closing(CoordinatorClient(os.environ["SHARDWELL_ADDRESS"])) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run, force=True), timeout_s=20.0)


def test_plain_loop_is_told_to_compute_the_step_again(restart_step: Disturb) -> None:
    def plain(run: str, disturbed: bool) -> str:
        with shardwell.join(run=run, world=shardwell.World(dp=1), **join_options(wait_limit_s=60)) as session:
            model = Net()
            shardwell.fully_shard(model, session, name="all")
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
            for step in range(STEPS):
                repeats = 0
                while session.step == step:
                    torch.manual_seed(step)
                    model(batch(step, 0)).backward()
                    if disturbed and step == RESTARTED and not repeats:
                        restart_step()
                    try:
                        optimizer.step()
                    except StepRestartedError as error:
                        assert "run the forward and the backward of the step again" in str(error)
                        repeats += 1
                assert repeats == (disturbed and step == RESTARTED)
            return sha256({**shardwell.full_state_dict(model), **dict(model.named_buffers())})

    expected = plain("undisturbed", disturbed=False)
    delete("undisturbed")
    assert plain("disturbed", disturbed=True) == expected
