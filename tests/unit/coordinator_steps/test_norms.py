"""Norms, early preparation and gradients that are not finite."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from shardwell_wire.errors import (
    HyperparameterMismatchError,
    InvalidRequestError,
    NonFiniteError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.coordinator import Harness, harness, optimizer, run_async, take_step, unit
from tests.support.fake_shards import fail_times


async def test_norm_is_computed_once_and_does_not_commit(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    with pytest.raises(StepRestartedError, match="has not finished the work of rank 0"):
        await a.prepare(0)
    await a.finish(0)
    waiting = asyncio.create_task(a.prepare(0))
    await asyncio.sleep(0)
    await b.finish(0)
    norms = await asyncio.gather(waiting, b.prepare(0))
    assert [norm.grad_norm for norm in norms] == [math.sqrt(8.0)] * 2
    assert all(shard.calls["PrepareStep"] == 1 for shard in cluster.shards.values())
    assert (await b.prepare(0, norm_type=math.inf)).other_norm == 2.0
    assert all(shard.calls["PrepareStep"] == 2 for shard in cluster.shards.values())
    assert not cluster.state.runs["r"].commits.records
    assert (await a.prepare(0, norm_type=math.inf, norm_bound=0.5)).other_norm == 0.5
    assert (await b.prepare(0, norm_type=math.inf)).other_norm == 2.0
    assert all(shard.calls["PrepareStep"] == 3 for shard in cluster.shards.values()), "known norms are kept"
    await a.commit(0, wait_s=5, clip_coefficient=0.25)
    for bound, norm in ((0.0, 2.0), (0.5, 0.5)):
        late = await b.prepare(0, norm_type=math.inf, norm_bound=bound)
        assert (late.grad_norm, late.other_norm) == (math.sqrt(8.0), norm), (
            "a slow trainer gets the norms after the commit"
        )
    with pytest.raises(VersionGoneError, match=r"no trainer asked for its norm of type 3\.0 before"):
        await b.prepare(0, norm_type=3.0)
    for wrong in ({"norm_type": 0.0}, {"norm_type": 1.0, "norm_bound": -1.0}):
        with pytest.raises(InvalidRequestError, match="norm_bound is"):
            await b.prepare(0, **{"norm_bound": 1.0} | wrong)
    with pytest.raises(HyperparameterMismatchError, match=r"clip coefficient is 0\.25 at rank 0"):
        await b.commit(0)


async def test_restart_between_the_norms_of_two_stages_with_several_optimizers(cluster: Harness) -> None:
    """A stage that has its norm repeats its step proposal only, which names the stage's units once more."""
    stages = await cluster.team("a", "b", world=World(dp=1, pp=2))
    for index in range(4):
        spec = unit(f"u{index}", (64, 64))
        spec.pp_ranks.append(index // 2)
        declared = await stages[index // 2].declare(spec)
        await stages[index // 2].publish(spec.name, declared.epoch)
    units = [{"unit_indices": [2 * stage], "kept_unit_indices": [2 * stage + 1]} for stage in range(2)]
    await asyncio.gather(*(each.finish(0, wait_s=5) for each in stages))
    norms = await asyncio.gather(*(each.prepare(0, **of) for each, of in zip(stages, units, strict=True)))
    expected = norms[0].grad_norm
    assert 0 < expected == norms[1].grad_norm
    await cluster.restart()
    await asyncio.gather(*(each.finish(0, wait_s=5) for each in stages))
    late = asyncio.create_task(stages[1].prepare(0, **units[1], wait_s=1))
    await asyncio.sleep(0)
    proposals = [alternating(each, norms[0].attempts) for each in range(2)]
    early = asyncio.create_task(stages[0].commit(0, wait_s=5, **proposals[0]))
    assert (await late).prepared
    assert (await late).grad_norm == expected
    assert (await stages[1].commit(0, wait_s=5, **proposals[1])).grad_norm == expected
    assert (await early).committed


def alternating(stage: int, norm_attempts: int) -> dict[str, Any]:
    """Returns the proposal of a stage with two units. Another optimizer will use the gradient of the second one."""
    step = optimizer()
    del step.units[:]
    step.units.extend(
        common_pb2.UnitGroups(unit_index=2 * stage + place, group_indices=[group])
        for place, group in enumerate((0, KEPT_GROUP))
    )
    return {"optimizer": step, "clip_coefficient": 0.5, "norm_attempts": norm_attempts, "unit_order": [2 * stage]}


async def test_norm_sums_the_partials_exactly(cluster: Harness) -> None:
    cluster.shards["s0"].square_partials = [1e32, 1.0]
    cluster.shards["s1"].square_partials = [-1e32, 3.0]
    trainers = await cluster.team_with_unit("a", "b")
    assert (await take_step(trainers, 0)).grad_norm == 2.0


async def test_prepare_waits_until_every_server_has_updated(cluster: Harness) -> None:
    cluster.shards["s1"].fail = fail_times("Update", 5, UnavailableError("busy"))
    trainers = await cluster.team_with_unit("a", "b")
    await take_step(trainers, 0)
    for trainer in trainers:
        await trainer.finish(1)
    stall = await cluster.call("ExplainStall", run="r")
    assert stall.phase == "updating"
    assert "server 's1': Update of step 0 not acknowledged" in stall.waiting_for[0]
    assert "busy" in stall.waiting_for[0]
    assert (await trainers[0].commit(1, wait_s=10)).committed
    await cluster.settle()
    for shard in cluster.shards.values():
        assert [update.context.step for update in shard.runs["r"].updates] == [0, 1]


async def test_waiting_norm_and_reset_name_the_server(cluster: Harness) -> None:
    a, _ = trainers = await cluster.team_with_unit("a", "b")
    await a.finish(0)
    waiting = await a.prepare(0, wait_s=0.05)
    assert not waiting.prepared
    assert any("rank 1: trainer 'b'" in line for line in waiting.waiting_for), waiting
    busy = True

    def fail(rpc_name: str, request: Any) -> None:
        if busy and rpc_name in ("PrepareStep", "Fence"):
            raise UnavailableError("busy")

    cluster.shards["s1"].fail = fail
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    waiting = await a.prepare(0, wait_s=0.05)
    assert not waiting.prepared
    assert any("servers 's0', 's1': reducing" in line for line in waiting.waiting_for), waiting
    answer = await a.try_reset(0, 0, request_id="once", wait_s=0.05)
    assert not answer.HasField("item")
    assert "servers 's0', 's1': they drop the contributions of the former attempt" in answer.waiting_for
    busy = False
    assert (await a.reset(0, 0, request_id="once")).attempt == 1
    await a.finish(0)
    assert (await a.prepare(0)).prepared


async def test_non_finite_gradient_fails_the_step_until_a_reset(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    error = NonFiniteError("gradient of 'u.0' of rank 1 is not finite")
    cluster.shards["s1"].fail = fail_times("PrepareStep", 1, error)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    for attempt in (a.prepare(0), b.prepare(0), a.commit(0, wait_s=5), b.commit(0, wait_s=5)):
        with pytest.raises(NonFiniteError, match=r"server .s1.: PrepareStep: gradient of .* of rank 1 is not finite"):
            await attempt
    assert cluster.shards["s1"].calls["PrepareStep"] == 1
    assert cluster.events()[-1][0] == "step_failed"
    assert "cannot be committed" in (await cluster.call("ExplainStall", run="r")).waiting_for[0]
    await b.reset(0, 1)
    await b.finish(0)
    waiting = await b.commit(0, wait_s=0.05)
    assert not waiting.committed, "the proposal for the failed attempt is invalid"
    assert (await a.commit(0, wait_s=5)).committed


async def test_non_finite_gradient_skips_the_step_with_skip_non_finite(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    error = NonFiniteError("bad")
    cluster.shards["s1"].fail = fail_times("PrepareStep", 1, error)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    scaled = optimizer()
    scaled.skip_non_finite = True
    with pytest.raises(NonFiniteError):
        await a.prepare(0)
    first = await a.commit(0, wait_s=5, optimizer=scaled)
    assert (first.committed, first.skipped, first.grad_norm) == (True, True, math.inf)
    assert (await b.prepare(0)).grad_norm == math.inf, "the norm is requested after the commit"
    with pytest.raises(HyperparameterMismatchError, match=r"skip_non_finite is True at .* but False"):
        await b.commit(0, wait_s=5)
    assert (await b.commit(0, wait_s=5, optimizer=scaled)).skipped
    assert [manifest.skip for manifest in cluster.shards["s1"].manifests] == [True]
    await take_step(trainers, 1, optimizer=scaled)
    assert not (await b.commit(1, optimizer=scaled)).skipped


async def test_gradients_are_reduced_once_after_all_work_is_finished(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await b.finish(0)
    await cluster.settle()
    assert cluster.shards["s0"].calls["PrepareStep"] == 0
    assert (await a.finish(0, wait_s=1)).all_finished
    await cluster.settle()
    assert cluster.shards["s0"].calls["PrepareStep"] == 1
    assert not (await b.commit(0)).committed
    assert (await a.commit(0, wait_s=5)).committed
    assert cluster.shards["s0"].calls["PrepareStep"] == 1


async def test_failed_early_preparation_is_retried_by_the_commit(cluster: Harness) -> None:
    (a,) = await cluster.team_with_unit("a")
    cluster.shards["s0"].fail = fail_times("PrepareStep", 1, StepStateError("not now"))
    await a.finish(0, wait_s=1)
    await cluster.settle()
    assert cluster.shards["s0"].calls["PrepareStep"] == 1
    assert (await a.commit(0, wait_s=5)).committed
    assert cluster.shards["s0"].calls["PrepareStep"] == 2


async def test_norm_requested_during_the_commit_does_not_prepare_the_next_step(cluster: Harness) -> None:
    """The next step has no finished contributions yet, so servers must not prepare it."""
    a, b = await cluster.team_with_unit("a", "b")
    for trainer in (a, b):
        await trainer.finish(0)
    await cluster.settle()
    written, resume, save = asyncio.Event(), asyncio.Event(), cluster.state.storage.save_commit

    async def save_slowly(*arguments: Any) -> None:
        await save(*arguments)
        written.set()
        await resume.wait()

    cluster.state.storage.save_commit = save_slowly
    committing = asyncio.create_task(a.commit(0, wait_s=5))
    # The commit record is stored, but the commit is not finished.
    await written.wait()
    resume.set()
    with pytest.raises(VersionGoneError, match=r"no trainer asked for its norm of type 3\.0"):
        await b.prepare(0, norm_type=3.0)
    assert (await committing).committed
    await cluster.settle()
    assert {manifest.context.step for shard in cluster.shards.values() for manifest in shard.manifests} == {0}


def test_reset_during_the_previous_update_cancels_the_preparation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            (shard,) = cluster.shards.values()
            trainers = await cluster.team_with_unit("a", "b")
            b = trainers[1]
            shard.fail = lambda rpc, _: fail_update(rpc)
            await take_step(trainers, 0)
            for trainer in trainers:
                await trainer.finish(1)
            resetting = asyncio.create_task(b.reset(1, 1))
            await cluster.until(lambda: cluster.events()[-1][0] == "work_reset", "the new attempt")
            shard.fail = lambda *_: None
            await resetting
            await cluster.settle()
            assert [manifest.context.step for manifest in shard.manifests] == [0]
            await b.finish(1, wait_s=1)
            await cluster.settle()
            assert shard.manifests[-1].ranks[1].attempt == 1

    def fail_update(rpc: str) -> None:
        if rpc == "Update":
            raise UnavailableError("not yet")

    run_async(scenario())


def test_norm_may_be_infinite_if_its_norm_type_is_near_0() -> None:
    from shardwell_server.coordinator.steps.proposals import NormKind, PreparedGradients

    kind = NormKind(1e-3)
    prepared = PreparedGradients.combine([shard_pb2.UnitNorm(square_partials=[4.0], power_partials=[1e5])], kind)
    assert prepared.grad_norm == 2.0
    assert prepared.find(kind) == math.inf


async def test_reset_recomputes_a_dead_trainers_non_finite_gradient(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
    cluster.shards["s1"].fail = fail_times("PrepareStep", 1, NonFiniteError("bad"))
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    with pytest.raises(NonFiniteError):
        await a.commit(0, wait_s=5)
    await b.leave()
    await cluster.settle()
    await cluster.join("b")
    await a.reset(0, 0)
    await cluster.settle()
    response = await a.finish(0)
    (item,) = response.work.items
    assert item.global_rank == 1
    assert item.attempt > 0
    assert (await a.finish(0, wait_s=1)).all_finished
    assert (await a.commit(0, wait_s=5)).committed
