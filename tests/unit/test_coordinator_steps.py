"""The steps of a run: work items, proposals, norms, the commit, and failures."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    HyperparameterMismatchError,
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    ShardwellError,
    StaleEpochError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.coordinator import SGD, Harness, Trainer, finished_item, harness, optimizer, run_async
from tests.support.fake_shards import fail_times


async def team_with_unit(cluster: Harness, *names: str, **options: Any) -> list[Trainer]:
    trainers = await cluster.team(*names, **options)
    await cluster.publish_unit(trainers)
    return trainers


def proposers(cluster: Harness) -> set[str]:
    """Returns the trainers that have proposed the step in flight."""
    step = cluster.state.runs["r"].step
    assert step is not None
    return set(step.proposals)


async def take_step(trainers: list[Trainer], step: int, **changes: Any) -> coordinator_pb2.CommitStepResponse:
    for trainer in trainers:
        await trainer.finish(step)
    responses = [await trainer.commit(step, wait_s=5, **changes) for trainer in trainers]
    assert all(response.committed for response in responses)
    return responses[0]


def test_step_is_committed_after_all_work_is_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            assert list((await a.finish(0)).waiting_for) == ["rank 1: trainer 'b' is computing it"]
            assert (await b.finish(0, wait_s=1)).all_finished
            assert (await a.finish(0, wait_s=1)).all_finished
            assert list((await b.commit(0)).waiting_for) == [
                "step proposal of rank 0: trainer 'a' has not called optimizer.step()"
            ]
            first, second = await asyncio.gather(a.commit(0, wait_s=5), b.commit(0, wait_s=5))
            assert first.committed
            assert second.committed
            assert first.version == second.version == 1
            # One unit on two servers. Each server reports a partial square sum of 4.0.
            assert first.grad_norm == math.sqrt(8.0)
            assert [item.global_rank for item in first.next_work.items] == [0]
            assert first.next_work.step == 1
            await cluster.settle()
            for shard in cluster.shards.values():
                (update,) = shard.runs["r"].updates
                assert update.context.step == 0
                assert update.optimizer == optimizer()
                assert update.clip_coefficient == 1.0
                assert shard.calls["PrepareStep"] == 1
            (description,) = [await cluster.call("DescribeRun", run="r")]
            assert description.optimizer == optimizer()
            assert description.grad_norm == first.grad_norm
            assert description.summary.committed_step == 1

    run_async(scenario())


def test_step_is_not_committed_while_a_server_lacks_memory_for_the_update(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            for trainer in trainers:
                await trainer.finish(0)
            cluster.shards["s1"].fail = fail_times("PrepareUpdate", 1, CapacityError("no memory for adam"))
            with pytest.raises(CapacityError, match=r"server 's1': PrepareUpdate: no memory for adam"):
                await a.commit(0, wait_s=5)
            assert not cluster.state.runs["r"].commits.records
            assert all(shard.calls["Update"] == 0 for shard in cluster.shards.values())
            assert (await a.commit(0, wait_s=5)).committed
            await cluster.settle()
            for step, changed in ((1, {}), (2, {"lr": 0.5}), (3, {"momentum": 0.5})):
                before = cluster.shards["s1"].calls["PrepareUpdate"]
                for trainer in trainers:
                    await trainer.finish(step)
                other = optimizer()
                other.groups[0].hyperparameters.update(changed)
                await asyncio.gather(*(trainer.commit(step, wait_s=5, optimizer=other) for trainer in (a, b)))
                asked = cluster.shards["s1"].calls["PrepareUpdate"] - before
                assert asked == (1 if "momentum" in changed else 0), (
                    "PrepareStep has allocated memory for the last optimizer"
                )

    run_async(scenario())


def test_manifest_contains_the_parts_of_every_rank(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            seen: list[Any] = []
            for shard in cluster.shards.values():
                shard.fail = lambda rpc_name, request: seen.append(request) if rpc_name == "PrepareStep" else None
            a, b = await team_with_unit(cluster, "a", "b")
            await a.finish(0, parts={0: 3})
            await b.finish(0, parts={})
            await a.commit(0, wait_s=5, unit_order=[0], clip_coefficient=0.5)
            assert [[(rank.dp_rank, [unit.part_count for unit in rank.units]) for rank in at.ranks] for at in seen] == [
                [(0, [3]), (1, [])]
            ] * 2
            assert {at.dp for at in seen} == {2}

    run_async(scenario())


def test_manifest_contains_only_units_of_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await cluster.team("a", "b")
            for name in ("u", "v"):
                await cluster.publish_unit([a, b], name, (8, 8))
            await asyncio.gather(*(trainer.finish(0, parts={0: 1, 1: 2}) for trainer in (a, b)))
            await a.commit(0, wait_s=5, optimizer=common_pb2.OptimizerStep(algorithm="sgd"))
            manifests = [shard.manifests[0].ranks[0].units for shard in cluster.shards.values()]
            assert [[(unit.unit_index, unit.part_count) for unit in units] for units in manifests] == [
                [(0, 1)],
                [(1, 2)],
            ]

    run_async(scenario())


def test_norm_is_computed_once_and_does_not_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
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
            await a.commit(0, wait_s=5, clip_coefficient=0.25)
            late = await b.prepare(0, norm_type=math.inf)
            assert (late.grad_norm, late.other_norm) == (math.sqrt(8.0), 2.0), (
                "a slow trainer gets the norm after the commit"
            )
            with pytest.raises(HyperparameterMismatchError, match=r"clip coefficient is 0\.25 at rank 0"):
                await b.commit(0)

    run_async(scenario())


def test_norm_sums_the_partials_exactly(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            cluster.shards["s0"].square_partials = [1e32, 1.0]
            cluster.shards["s1"].square_partials = [-1e32, 3.0]
            trainers = await team_with_unit(cluster, "a", "b")
            assert (await take_step(trainers, 0)).grad_norm == 2.0

    run_async(scenario())


def test_prepare_waits_until_every_server_has_updated(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            cluster.shards["s1"].fail = fail_times("Update", 5, UnavailableError("busy"))
            trainers = await team_with_unit(cluster, "a", "b")
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

    run_async(scenario())


def test_different_hyperparameters_are_rejected_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            for trainer in trainers:
                await trainer.finish(0)
            early = asyncio.create_task(b.commit(0, wait_s=5, optimizer=optimizer(lr=0.2)))
            await asyncio.sleep(0)
            assert (await a.commit(0, wait_s=5)).committed, "the proposal of the lowest rank is committed"
            expected = (
                r"lr of parameter group 0 is 0.1 at rank 0 \(trainer 'a'\), whose proposal is committed, but 0.2 at "
                r"rank 1 \(trainer 'b'\)"
            )
            with pytest.raises(HyperparameterMismatchError, match=expected):
                await early
            with pytest.raises(HyperparameterMismatchError, match=expected):
                await b.commit(0, optimizer=optimizer(lr=0.2))
            assert (await b.commit(0)).committed

    run_async(scenario())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": optimizer(lr=math.nan)}, "lr=nan is not finite"),
        ({"optimizer": optimizer("sdg")}, "optimizer 'sdg' is not known"),
        (
            {"optimizer": optimizer(groups=(0, 0))},
            "unit 'u' has 1 parameters, but optimizer.units has group indices for 2",
        ),
        ({"optimizer": optimizer(groups=(3,))}, "names parameter group 3"),
        ({"clip_coefficient": math.nan}, "clip_coefficient is nan"),
        ({"clip_coefficient": -1.0}, "clip_coefficient is -1"),
        ({"unit_order": [0, 0]}, "unit_order contains a unit index twice"),
        ({"unit_order": [7]}, "unit_order contains unit index 7, but the run has 1 units"),
    ],
)
def test_invalid_proposals_are_rejected(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            for trainer in trainers:
                await trainer.finish(0)
            with pytest.raises(InvalidRequestError, match=message):
                await trainers[0].commit(0, **fields)
            assert (await trainers[0].commit(0, wait_s=5)).committed

    run_async(scenario())


def test_change_of_the_optimizer_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            await take_step(trainers, 0)
            for trainer in trainers:
                await trainer.finish(1)
            lion = optimizer()
            lion.groups[0].algorithm = "lion"
            lion.groups[0].hyperparameters.clear()
            lion.groups[0].hyperparameters.update(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, maximize=0.0)
            with pytest.raises(
                ConflictError, match=r"parameter 'u\.0' already has 'sgd' state.*with 'lion', start a new run"
            ):
                await trainers[0].commit(1, optimizer=lion)

    run_async(scenario())


def test_commit_before_finish_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await team_with_unit(cluster, "a", "b")
            with pytest.raises(StepRestartedError, match="has not finished the work of rank 0"):
                await a.commit(0)
            with pytest.raises(StepStateError, match="step 1 of run 'r' has not started: step 0 is in flight"):
                await a.commit(1)

    run_async(scenario())


def test_slow_trainer_continues_after_the_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            spare = await cluster.join("spare")
            for step in range(2):
                await take_step([a, b], step)
            assert (await spare.finish(0, wait_s=1)).all_finished
            answer = await spare.commit(0)
            assert answer.committed
            assert (answer.version, answer.next_work.step) == (1, 2)
            with pytest.raises(VersionGoneError, match="step 0 is committed"):
                await cluster.call("ResetWork", context=a.context(0, a.items[0].epoch), trainer="a", global_rank=0)

    run_async(scenario())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"global_rank": 9}, InvalidRequestError, "rank 9 does not exist"),
        ({"global_rank": 0}, InvalidRequestError, "a rank is reported twice"),
        ({"epoch": 99}, StepStateError, "but the item was leased to 'a'"),
        ({"attempt": 5}, StepStateError, "attempt 5, but the item was leased to 'a'"),
        ({"units": [common_pb2.UnitParts(unit_index=3)]}, InvalidRequestError, "unit index 3, but the run has 1 units"),
        ({"units": [common_pb2.UnitParts(unit_index=0)] * 2}, InvalidRequestError, "reports a unit index twice"),
    ],
)
def test_invalid_report_is_rejected_as_a_whole(
    tmp_path: Path, change: dict[str, Any], error: type[ShardwellError], message: str
) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = await team_with_unit(cluster, "a", "b", dp=4)
            good, bad = a.finished()
            for name, value in change.items():
                bad.ClearField(name)
                bad.MergeFrom(coordinator_pb2.FinishedItem(**{name: value}))
            with pytest.raises(error, match=message):
                await a.finish(0, [good, bad])
            states = {work.state for work in (await cluster.call("DescribeRun", run="r")).work}
            assert states == {coordinator_pb2.WORK_STATE_LEASED}

    run_async(scenario())


def test_report_of_a_former_attempt_has_no_effect_and_is_answered_with_the_restarted_items(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            reports = a.finished()
            await a.finish(0, reports)
            run = cluster.state.runs["r"]
            run.restart_step()
            unfenced = await a.finish(0, reports)
            assert not unfenced.HasField("work"), "servers have not fenced the former attempts"
            cluster.coordinator.trainers.start_fencing(run)
            for trainer in (a, b):
                answer = await trainer.finish(0, accept_work=False, wait_s=5)
                assert [(item.epoch, item.attempt) for item in answer.work.items] == [
                    (trainer.items[item.global_rank].epoch, 1) for item in answer.work.items
                ]
                assert not answer.all_finished
            fences = [shard.runs["r"].attempts for shard in cluster.shards.values()]
            assert all(found == {0: 1, 1: 1} for found in fences)

    run_async(scenario())


def test_report_of_another_trainers_work_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            with pytest.raises(StepStateError, match="the item was leased to 'b'"):
                await a.finish(0, b.finished())
            await a.finish(0)
            with pytest.raises(StepStateError, match="was finished before with parts"):
                await a.finish(0, parts={0: 2})

    run_async(scenario())


def test_item_of_a_lost_trainer_is_leased_after_fencing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            fenced_at: list[int] = []
            for shard in cluster.shards.values():
                shard.fail = lambda rpc_name, request: (
                    fenced_at.append(request.ranks[0].epoch) if rpc_name == "Fence" else None
                )
            lost_epoch = b.items[1].epoch
            waiting = asyncio.create_task(a.finish(0, wait_s=5))
            await asyncio.sleep(0)
            await cluster.pass_time(11, a)
            response = await waiting
            (item,) = response.work.items
            assert item.global_rank == 1
            assert len(fenced_at) == 2
            assert all(lost_epoch < epoch <= item.epoch for epoch in fenced_at)
            with pytest.raises(StaleEpochError):
                await b.finish(0)
            assert (await a.finish(0, wait_s=1)).all_finished
            committed = await a.commit(0, wait_s=5)
            assert sorted(item.global_rank for item in committed.next_work.items) == [0, 1], (
                "one trainer computes both ranks until another joins"
            )

    run_async(scenario())


def test_item_leased_in_a_lost_response_is_returned_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            own = a.finished()
            await b.leave()
            await cluster.settle()
            first = await a.finish(0, own)
            assert first.work.items[0].global_rank == 1
            assert (await a.finish(0, own)).work == first.work

    run_async(scenario())


def test_spares_get_vacant_items_first_and_one_each(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b", dp=4)
            spare = await cluster.join("c", run="r", config=a.joined.config)
            run = cluster.state.runs["r"]
            rank_assignments = run.rank_assignments
            rank_assignments.update({rank: "b" for rank, owner in rank_assignments.items() if owner == "c"})
            polls = [asyncio.create_task(trainer.finish(0, wait_s=5)) for trainer in (a, spare)]
            await cluster.until(lambda: set(run.members.waiting_for_work) == {"a", "c"}, "both wait for work")
            await b.leave()
            responses = await asyncio.gather(*polls)
            assert [[item.global_rank for item in response.work.items] for response in responses] == [[3], [2]]

    run_async(scenario())


def test_trainer_that_rejects_reassigned_work_gets_no_items(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            await asyncio.gather(a.finish(0, accept_work=False), b.finish(0, accept_work=False))
            await b.leave()
            committed = await a.commit(0, wait_s=5)
            assert [item.global_rank for item in committed.next_work.items] == [0]
            await cluster.settle()
            response = await a.finish(1, accept_work=False)
            assert not response.HasField("work")
            assert list(response.waiting_for) == ["rank 1: vacant, because trainer 'b' is gone"]
            reborn = await cluster.join("b", wait_s=1)
            assert sorted(reborn.items) == [1]
            await reborn.finish(1, accept_work=False)
            assert (await a.finish(1, accept_work=False, wait_s=1)).all_finished

    run_async(scenario())


def test_commit_continues_when_the_leader_dies(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            await asyncio.gather(a.finish(0), b.finish(0))
            waiting = asyncio.create_task(b.commit(0, wait_s=5, optimizer=optimizer(lr=0.5)))
            await cluster.until(lambda: "b" in proposers(cluster), "b waits for the commit")
            assert not waiting.done()
            await cluster.pass_time(11, b)
            assert (await waiting).committed
            assert cluster.shards["s0"].runs["r"].updates[0].optimizer == optimizer(lr=0.5)

    run_async(scenario())


def test_proposal_of_a_dead_leader_is_committed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            await a.finish(0)
            assert not (await a.commit(0)).committed
            await a.leave()
            await cluster.settle()
            assert (await b.finish(0, wait_s=1)).all_finished
            with pytest.raises(HyperparameterMismatchError):
                await b.commit(0, wait_s=5, optimizer=optimizer(lr=0.5))
            assert (await b.commit(0, wait_s=5)).committed

    run_async(scenario())


def test_reset_raises_the_attempt_and_invalidates_the_preparation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            attempts = (await b.prepare(0)).attempts
            item = await a.reset(0, 0, request_id="once")
            assert item.attempt == 1
            assert (await a.reset(0, 0, request_id="once")).attempt == 1, "a retry starts no further attempt"
            assert (await a.reset(0, 0, request_id="twice")).attempt == 2
            assert cluster.shards["s0"].runs["r"].attempts == {0: 2}
            assert not (await b.finish(0)).all_finished
            with pytest.raises(StepRestartedError, match="clips step 0 by an outdated gradient norm"):
                await b.commit(0, clip_coefficient=1.0, norm_attempts=attempts)
            assert not (await b.commit(0, clip_coefficient=1.0)).committed, (
                "b gives no norm_attempts, so its clip coefficient is not checked for an outdated norm"
            )
            outdated = await a.finish(0, [finished_item(item)])
            assert [(work.global_rank, work.attempt) for work in outdated.work.items] == [(0, 2)]
            await a.finish(0)
            assert (await a.commit(0, wait_s=5)).committed
            prepared = cluster.shards["s0"].calls["PrepareStep"]
            assert prepared == 2

    run_async(scenario())


def test_waiting_commit_survives_a_reset_of_another_rank(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            await b.reset(0, 1)
            waiting = asyncio.create_task(a.commit(0, wait_s=5))
            await cluster.until(lambda: "a" in proposers(cluster), "a waits for the commit")
            await b.reset(0, 1)
            await b.finish(0)
            assert (await waiting).committed

    run_async(scenario())


def test_work_of_a_lost_trainer_is_leased_with_a_higher_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            await b.leave()
            await cluster.settle()
            again = await cluster.join("b", wait_s=5)
            assert [(rank, item.attempt) for rank, item in again.items.items()] == [(1, 1)]
            assert cluster.shards["s0"].runs["r"].attempts == {1: 1}, (
                "servers drop the parts that the former process pushed"
            )
            await again.leave()
            await cluster.settle()
            response = await a.finish(0, wait_s=5)
            assert [(item.global_rank, item.attempt) for item in response.work.items] == [(1, 2)]

    run_async(scenario())


def test_waiting_norm_and_reset_name_the_server(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, _ = trainers = await team_with_unit(cluster, "a", "b")
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

    run_async(scenario())


def test_finished_work_of_a_lost_trainer_keeps_its_attempt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            await b.leave()
            await cluster.settle()
            assert (await a.commit(0, wait_s=5)).committed
            assert cluster.shards["s0"].manifests[0].ranks[1].attempt == 0

    run_async(scenario())


def test_loss_of_a_trainer_keeps_a_prepared_step_whose_item_was_restarted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, former = await cluster.team("a", "b")
            await former.leave()  # no server has shards yet, so none is fenced
            b = await cluster.join("b", wait_s=1)
            await cluster.publish_unit([a, b])
            assert [item.attempt for item in b.finished()] == [1]
            await asyncio.gather(a.finish(0), b.finish(0))
            shard = cluster.shards["s0"]
            await cluster.until(lambda: shard.runs["r"].prepared is not None, "PrepareStep")
            await b.leave()
            await cluster.until(lambda: bool(shard.calls["Fence"]), "Fence")
            assert shard.runs["r"].prepared is not None
            assert (await a.commit(0, wait_s=5)).committed

    run_async(scenario())


def test_reset_does_not_disturb_the_update_of_the_previous_step(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            cluster.shards["s1"].fail = fail_times("Update", 3, UnavailableError("busy"))
            await take_step(trainers, 0)
            assert (await a.reset(1, 0)).attempt == 1
            await asyncio.gather(a.finish(1), b.finish(1))
            assert (await a.commit(1, wait_s=5)).committed
            await cluster.settle()
            for shard in cluster.shards.values():
                assert [update.context.step for update in shard.runs["r"].updates] == [0, 1]

    run_async(scenario())


def test_reset_of_another_trainers_rank_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            with pytest.raises(StaleEpochError, match="'b' has epoch"):
                await cluster.call("ResetWork", context=a.context(0, b.items[1].epoch), trainer="a", global_rank=1)
            with pytest.raises(StaleEpochError):
                await cluster.call("ResetWork", context=a.context(0, a.items[0].epoch - 1), trainer="a", global_rank=0)
            with pytest.raises(InvalidRequestError, match="rank 2 does not exist"):
                await cluster.call("ResetWork", context=a.context(0, 1), trainer="a", global_rank=2)

    run_async(scenario())


def test_non_finite_gradient_fails_the_step_until_a_reset(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            error = NonFiniteError("gradient of 'u.0' of rank 1 is not finite")
            cluster.shards["s1"].fail = fail_times("PrepareStep", 1, error)
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            for attempt in (a.prepare(0), b.prepare(0), a.commit(0, wait_s=5), b.commit(0, wait_s=5)):
                with pytest.raises(
                    NonFiniteError, match=r"server .s1.: PrepareStep: gradient of .* of rank 1 is not finite"
                ):
                    await attempt
            assert cluster.shards["s1"].calls["PrepareStep"] == 1
            assert cluster.events()[-1][0] == "step_failed"
            assert "cannot be committed" in (await cluster.call("ExplainStall", run="r")).waiting_for[0]
            await b.reset(0, 1)
            await b.finish(0)
            waiting = await b.commit(0, wait_s=0.05)
            assert not waiting.committed, "the proposal for the failed attempt is invalid"
            assert (await a.commit(0, wait_s=5)).committed

    run_async(scenario())


def test_non_finite_gradient_skips_the_step_with_skip_non_finite(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
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

    run_async(scenario())


def test_gradients_are_reduced_once_after_all_work_is_finished(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            await b.finish(0)
            await cluster.settle()
            assert cluster.shards["s0"].calls["PrepareStep"] == 0
            assert (await a.finish(0, wait_s=1)).all_finished
            await cluster.settle()
            assert cluster.shards["s0"].calls["PrepareStep"] == 1
            assert not (await b.commit(0)).committed
            assert (await a.commit(0, wait_s=5)).committed
            assert cluster.shards["s0"].calls["PrepareStep"] == 1

    run_async(scenario())


def test_failed_early_preparation_is_retried_by_the_commit(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            (a,) = await team_with_unit(cluster, "a")
            cluster.shards["s0"].fail = fail_times("PrepareStep", 1, StepStateError("not now"))
            await a.finish(0, wait_s=1)
            await cluster.settle()
            assert cluster.shards["s0"].calls["PrepareStep"] == 1
            assert (await a.commit(0, wait_s=5)).committed
            assert cluster.shards["s0"].calls["PrepareStep"] == 2

    run_async(scenario())


def test_norm_requested_during_the_commit_does_not_prepare_the_next_step(tmp_path: Path) -> None:
    """The next step has no finished contributions yet, so servers must not prepare it."""

    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
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
            with pytest.raises(VersionGoneError, match="its norms are no longer kept"):
                await b.prepare(0, norm_type=3.0)
            assert (await committing).committed
            await cluster.settle()
            assert {manifest.context.step for shard in cluster.shards.values() for manifest in shard.manifests} == {0}

    run_async(scenario())


def test_reset_during_the_previous_update_cancels_the_preparation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path, num_shards=1) as cluster:
            (shard,) = cluster.shards.values()
            trainers = await team_with_unit(cluster, "a", "b")
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
    from shardwell_server.coordinator.runs.gradient_norms import PreparedGradients

    prepared = PreparedGradients.combine([shard_pb2.UnitNorm(square_partials=[4.0], power_partials=[1e5])], 1e-3)
    assert prepared.grad_norm == 2.0
    assert prepared.other_norm is not None
    assert prepared.other_norm.value == math.inf


def test_rejected_proposal_is_not_committed_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = await team_with_unit(cluster, "a", "b")
            cluster.shards["s0"].fail = fail_times("PrepareStep", 1, NonFiniteError("bad"))
            await b.finish(0)
            await a.finish(0, wait_s=1)
            with pytest.raises(NonFiniteError):
                await a.commit(0, wait_s=5)
            with pytest.raises(HyperparameterMismatchError):
                await b.commit(0, optimizer=optimizer(lr=7.0))
            assert proposers(cluster) == {"a"}

    run_async(scenario())


def test_reset_recomputes_a_dead_trainers_non_finite_gradient(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
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

    run_async(scenario())


def test_missing_contribution_fails_the_commit_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            cluster.shards["s0"].missing = {1}
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            with pytest.raises(IncompleteStepError, match=r"server 's0': PrepareStep: unit 'u': rank \[1\] missing"):
                await trainers[0].commit(0, wait_s=5)
            assert not cluster.shards["s1"].runs["r"].updates

    run_async(scenario())


def test_failure_of_a_reset_attempt_is_ignored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            restarted = False

            def fail(rpc_name: str, request: Any) -> None:
                if rpc_name == "PrepareStep" and request.ranks[1].attempt == 0:
                    raise IncompleteStepError("rank 1 is missing") if restarted else UnavailableError("busy")

            cluster.shards["s1"].fail = fail
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            committing = asyncio.create_task(a.commit(0, wait_s=5))
            await cluster.until(lambda: cluster.shards["s1"].calls["PrepareStep"] > 0, "the first attempt to prepare")
            await b.reset(0, 1)
            restarted = True
            await b.finish(0)
            assert (await committing).committed

    run_async(scenario())


def test_commit_with_an_unpublished_unit_is_rejected(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            await trainers[1].declare(common_pb2.UnitSpec(name="forgotten"))
            await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
            with pytest.raises(StepStateError, match="unit 'forgotten' has no initial values"):
                await trainers[0].commit(0, wait_s=5)

    run_async(scenario())


def test_tracked_state_of_the_leader_is_stored(tmp_path: Path) -> None:
    def state(**tracked: str) -> coordinator_pb2.RunState:
        return coordinator_pb2.RunState(tracked_json=tracked)

    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            a, b = trainers = await team_with_unit(cluster, "a", "b")
            for step in range(3):
                await asyncio.gather(*(trainer.finish(step) for trainer in trainers))
                await b.commit(step, state=state(scheduler="no"))
                answer = await a.commit(step, wait_s=5, state=state(scheduler=f"at {step}"))
                assert answer.committed
                assert not answer.state.tracked_json, "trainers keep their own tracked objects"
                await b.commit(step)
            joined = await cluster.join("c")
            assert joined.joined.state.step == 2
            assert joined.joined.state.tracked_json == {"scheduler": "at 2"}
            await cluster.restart()
            again = await cluster.try_join("d")
            assert again.state == joined.joined.state

    run_async(scenario())


def test_late_trainer_passes_the_committed_step_without_its_norm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            await take_step(trainers, 0, clip_coefficient=0.5)
            late = await cluster.join("late")
            assert (await late.commit(0)).committed
            with pytest.raises(HyperparameterMismatchError, match="lr of parameter group 0"):
                await late.commit(0, optimizer=optimizer(lr=0.7))

    run_async(scenario())


def test_all_hyperparameters_reach_the_servers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with harness(tmp_path) as cluster:
            trainers = await team_with_unit(cluster, "a", "b")
            await take_step(trainers, 0, optimizer=optimizer(momentum=0.9), unit_order=[0], clip_coefficient=0.125)
            await cluster.settle()
            (update,) = cluster.shards["s0"].runs["r"].updates
            assert dict(update.optimizer.groups[0].hyperparameters) == SGD | {"momentum": 0.9}
            assert (update.clip_coefficient, list(update.unit_order)) == (0.125, [0])

    run_async(scenario())
