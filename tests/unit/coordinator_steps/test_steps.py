"""The steps of a run: proposals, the manifest, and the commit."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from shardwell_server.coordinator.steps.committed_steps import CommittedSteps, UpdateTime
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire.errors import (
    CapacityError,
    ConflictError,
    HyperparameterMismatchError,
    IncompleteStepError,
    InvalidRequestError,
    NonFiniteError,
    StepRestartedError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.coordinator import SGD, Harness, Trainer, optimizer, proposers, take_step
from tests.support.fake_shards import fail_times


async def test_step_is_committed_after_all_work_is_finished(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
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


async def test_step_is_not_committed_while_a_server_lacks_memory_for_the_update(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
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
        await cluster.settle()
        other = optimizer()
        other.groups[0].hyperparameters.update(changed)
        await asyncio.gather(*(trainer.commit(step, wait_s=5, optimizer=other) for trainer in (a, b)))
        asked = cluster.shards["s1"].calls["PrepareUpdate"] - before
        assert asked == (1 if "momentum" in changed else 0), "PrepareStep has allocated memory for the last optimizer"


async def test_manifest_contains_the_parts_of_every_rank(cluster: Harness) -> None:
    seen: list[Any] = []
    for shard in cluster.shards.values():
        shard.fail = lambda rpc_name, request: seen.append(request) if rpc_name == "PrepareStep" else None
    a, b = await cluster.team_with_unit("a", "b")
    await a.finish(0, parts={0: 3})
    await b.finish(0, parts={})
    await a.commit(0, wait_s=5, unit_order=[0], clip_coefficient=0.5)
    assert [[(rank.dp_rank, [unit.part_count for unit in rank.units]) for rank in at.ranks] for at in seen] == [
        [(0, [3]), (1, [])]
    ] * 2
    assert {at.dp for at in seen} == {2}


async def test_manifest_contains_only_units_of_the_server(cluster: Harness) -> None:
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


async def test_different_hyperparameters_are_rejected_by_name(cluster: Harness) -> None:
    a, b = trainers = await cluster.team_with_unit("a", "b")
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
async def test_invalid_proposals_are_rejected(cluster: Harness, fields: dict[str, Any], message: str) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    for trainer in trainers:
        await trainer.finish(0)
    with pytest.raises(InvalidRequestError, match=message):
        await trainers[0].commit(0, **fields)
    assert (await trainers[0].commit(0, wait_s=5)).committed


async def test_change_of_the_optimizer_is_rejected(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    await take_step(trainers, 0)
    for trainer in trainers:
        await trainer.finish(1)
    lion = optimizer()
    lion.groups[0].algorithm = "lion"
    lion.groups[0].hyperparameters.clear()
    lion.groups[0].hyperparameters.update(lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.0, maximize=0.0)
    with pytest.raises(ConflictError, match=r"parameter 'u\.0' already has 'sgd' state.*with 'lion', start a new run"):
        await trainers[0].commit(1, optimizer=lion)


async def test_commit_before_finish_is_rejected(cluster: Harness) -> None:
    a, _ = await cluster.team_with_unit("a", "b")
    with pytest.raises(StepRestartedError, match="has not finished the work of rank 0"):
        await a.commit(0)
    with pytest.raises(StepStateError, match="step 1 of run 'r' has not started: step 0 is in flight"):
        await a.commit(1)


async def test_slow_trainer_continues_after_the_commit(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    spare = await cluster.join("spare")
    for step in range(2):
        await take_step([a, b], step)
    assert (await spare.finish(0, wait_s=1)).all_finished
    answer = await spare.commit(0)
    assert answer.committed
    assert (answer.version, answer.next_work.step) == (1, 2)
    with pytest.raises(VersionGoneError, match="step 0 is committed"):
        await cluster.call("ResetWork", context=a.context(0, a.items[0].epoch), trainer="a", global_rank=0)


async def test_loss_of_a_trainer_keeps_a_prepared_step_whose_item_was_restarted(cluster: Harness) -> None:
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


async def test_rejected_proposal_is_not_committed_later(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    cluster.shards["s0"].fail = fail_times("PrepareStep", 1, NonFiniteError("bad"))
    await b.finish(0)
    await a.finish(0, wait_s=1)
    with pytest.raises(NonFiniteError):
        await a.commit(0, wait_s=5)
    with pytest.raises(HyperparameterMismatchError):
        await b.commit(0, optimizer=optimizer(lr=7.0))
    assert proposers(cluster) == {"a"}


async def test_missing_contribution_fails_the_commit_by_name(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    cluster.shards["s0"].missing = {1}
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    with pytest.raises(IncompleteStepError, match=r"server 's0': PrepareStep: unit 'u': rank \[1\] missing"):
        await trainers[0].commit(0, wait_s=5)
    assert not cluster.shards["s1"].runs["r"].updates


async def test_commit_with_an_unpublished_unit_is_rejected(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    await trainers[1].declare(common_pb2.UnitSpec(name="forgotten"))
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    with pytest.raises(StepStateError, match="unit 'forgotten' has no initial values"):
        await trainers[0].commit(0, wait_s=5)


async def test_tracked_state_of_the_leader_is_stored(cluster: Harness) -> None:
    def state(**tracked: str) -> coordinator_pb2.RunState:
        return coordinator_pb2.RunState(tracked_json=tracked)

    a, b = trainers = await cluster.team_with_unit("a", "b")
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


async def test_positions_of_streams_are_stored_and_leased(cluster: Harness) -> None:
    def positions(trainer: Trainer) -> dict[int, str]:
        return {rank: item.data_position for rank, item in trainer.items.items()}

    def reports(trainer: Trainer, position: str) -> list[coordinator_pb2.FinishedItem]:
        found = trainer.finished()
        for report in found:
            report.data_position = position and f"{position} {report.global_rank}"
        return found

    a, b = trainers = await cluster.team_with_unit("a", "b")
    assert positions(a) == {0: ""}
    with pytest.raises(InvalidRequestError, match="the position of a stream of samples has 40002 bytes"):
        await a.finish(0, reports(a, "x" * 40_000))
    for step, position in enumerate(["one", "", "two"]):
        for trainer in trainers:
            await trainer.finish(step, reports(trainer, position))
        await b.commit(step)
        answer = await a.commit(step, wait_s=5)
        assert not answer.state.data_positions, "items have them"
        await b.commit(step)
        assert (positions(a), positions(b)) == ({0: f"{position or 'one'} 0"}, {1: f"{position or 'one'} 1"})
    await cluster.restart()
    assert (await a.reset(3, 0)).data_position == "two 0"
    assert not (await cluster.join("c")).joined.state.data_positions


async def test_tracked_state_at_the_end_of_an_iteration_stands_beside_that_of_its_commit(cluster: Harness) -> None:
    def state(step: int, at: str) -> coordinator_pb2.RunState:
        return coordinator_pb2.RunState(step=step, tracked_json={"scheduler": at})

    a, b = trainers = await cluster.team_with_unit("a", "b")
    for step in range(2):
        await asyncio.gather(*(trainer.finish(step) for trainer in trainers))
        await asyncio.gather(*(trainer.commit(step, wait_s=5, state=state(step, "commit")) for trainer in trainers))
        stored = (await cluster.try_join()).state
        assert (stored.tracked_json, stored.ended_tracked_json) == ({"scheduler": "commit"}, {})
        await a.heartbeat(ended_iteration=state(step, f"end of {step}"))
        for late in (1 - step, step, step + 1):  # of another step, or repeated
            await b.heartbeat(ended_iteration=state(late, "late"))
        stored = (await cluster.try_join()).state
        assert (stored.tracked_json, stored.ended_tracked_json) == (
            {"scheduler": "commit"},
            {"scheduler": f"end of {step}"},
        )
    await cluster.restart()
    assert (await cluster.try_join()).state == stored, "it is durable"


async def test_tracked_state_at_the_end_of_an_iteration_is_stored_again_after_a_failure(
    cluster: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    at_commit = coordinator_pb2.RunState(step=0, tracked_json={"scheduler": "commit"})
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await asyncio.gather(*(trainer.commit(0, wait_s=5, state=at_commit) for trainer in trainers))
    save, failures = cluster.state.storage.save_state, [UnavailableError("the store is away")]
    is_saved = asyncio.Event()

    async def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        await save(*arguments)
        is_saved.set()

    monkeypatch.setattr(cluster.state.storage, "save_state", fail_once)
    await trainers[0].heartbeat(ended_iteration=coordinator_pb2.RunState(step=0, tracked_json={"scheduler": "end"}))
    async with asyncio.timeout(5):
        await is_saved.wait()
    await cluster.restart()
    assert (await cluster.try_join()).state.ended_tracked_json == {"scheduler": "end"}


async def test_late_trainer_passes_the_committed_step_without_its_norm(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    await take_step(trainers, 0, clip_coefficient=0.5)
    late = await cluster.join("late")
    assert (await late.commit(0)).committed
    with pytest.raises(HyperparameterMismatchError, match="lr of parameter group 0"):
        await late.commit(0, optimizer=optimizer(lr=0.7))


async def test_all_hyperparameters_reach_the_servers(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")
    await take_step(trainers, 0, optimizer=optimizer(momentum=0.9), unit_order=[0], clip_coefficient=0.125)
    await cluster.settle()
    (update,) = cluster.shards["s0"].runs["r"].updates
    assert dict(update.optimizer.groups[0].hyperparameters) == SGD | {"momentum": 0.9}
    assert (update.clip_coefficient, list(update.unit_order)) == (0.125, [0])


async def test_trainers_learn_which_item_was_finished_last(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await a.finish(0)
    cluster.clock.now += 3.0
    assert (await b.finish(0, wait_s=1)).last_finished == coordinator_pb2.LastFinishedItem(
        global_rank=1, trainer="b", late_s=3.0
    )
    assert (await a.finish(0, wait_s=1)).last_finished.late_s == 3.0


async def test_nobody_is_last_if_one_trainer_finishes_all_items(cluster: Harness) -> None:
    (a,) = await cluster.team_with_unit("a", dp=2)
    first, second = a.finished()
    await a.finish(0, [first])
    cluster.clock.now += 3.0
    response = await a.finish(0, [first, second], wait_s=1)
    assert response.all_finished
    assert not response.HasField("last_finished")


async def test_commit_reports_the_update_of_the_step_before(cluster: Harness) -> None:
    trainers = await cluster.team_with_unit("a", "b")

    def take_time(rpc_name: str, request: Any) -> None:
        if rpc_name == "Update" and request.context.step == 1:
            cluster.clock.now += 7.0

    cluster.shards["s1"].fail = take_time
    assert not (await take_step(trainers, 0)).HasField("previous_update")
    await cluster.settle()
    assert (await take_step(trainers, 1)).previous_update.duration_s == 0.0
    await cluster.settle()
    response = await take_step(trainers, 2)
    assert response.previous_update.duration_s == 7.0
    assert response.record_s == 0.0, "the clock stood still"


def test_slowest_update_of_a_step_is_known_until_the_next_one_ends() -> None:
    commits, servers = CommittedSteps(), [("s1", "process"), ("s2", "process"), ("s3", "process")]
    for step, started_s in ((0, 10.0), (1, 20.0)):
        record = CommitRecord(
            step=step, time=0.0, leader="", optimizer=b"", clip_coefficient=1.0, unit_order=(), grad_norm=0.0
        )
        commits.append(record, None, servers, started_s)
        assert commits.update_before(step + 1) is None
        for server_id, duration_s in (("s1", 1.0), ("s2", 5.0), ("s3", 3.0)):
            commits.finish_update(server_id, commits.pending_updates[server_id], started_s + duration_s + step)
        assert commits.update_before(1) == UpdateTime(0, "s2", 5.0)
    assert commits.update_before(2) == UpdateTime(1, "s2", 6.0)
