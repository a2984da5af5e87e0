"""Inspection: events, stall explanations, and descriptions of runs, worlds and servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardwell_server.coordinator.inspection.events import EventKind, EventLog
from shardwell_server.coordinator.storage.records import KEPT_EVENTS, Change, Put
from shardwell_wire.errors import InvalidRequestError, WorldError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, config, unit


async def test_watch_yields_kept_events_then_new_ones() -> None:
    log = EventLog(wall_clock=lambda: 7.25)
    for index in range(KEPT_EVENTS + 10):
        log.add(EventKind.STEP_COMMITTED, str(index), run="r")
    log.add(EventKind.STEP_COMMITTED, "another run's", run="other")
    log.add(EventKind.SERVER_LOST, "the cluster's")
    watch = log.watch("r", None)
    past = [await anext(watch) for _ in range(KEPT_EVENTS)]
    assert [event.message for event in past[:2]] == ["11", "12"]
    assert past[-1].kind == "server_lost"
    assert past[0].time.ToNanoseconds() == 7_250_000_000
    pending = asyncio.create_task(anext(watch))
    await asyncio.sleep(0)
    log.add(EventKind.TRAINER_JOINED, "not this", run="other")
    log.add(EventKind.TRAINER_JOINED, "this", run="r")
    assert (await pending).message == "this"
    await watch.aclose()
    assert not log._watchers


async def test_rare_events_are_kept_after_many_steps() -> None:
    log = EventLog()
    log.add(EventKind.STEP_COMMITTED, "0", run="r")
    log.add(EventKind.SERVER_LOST, "s1")
    for index in range(1, 3 * KEPT_EVENTS):
        log.add(EventKind.STEP_COMMITTED, str(index), run="r")
    shown = [event.message async for event in log.watch("", 0.05)]
    assert shown[0] == "s1"
    assert shown[1:] == [str(index) for index in range(2 * KEPT_EVENTS, 3 * KEPT_EVENTS)]
    for index in range(3 * KEPT_EVENTS):
        log.add(EventKind.LEASE_EXPIRED, str(index), run="r")
    assert len(log.kept()) == 2 * KEPT_EVENTS


async def test_watch_ends_after_its_duration_and_drops_the_oldest_events_of_a_slow_watcher() -> None:
    log = EventLog()
    watch = log.watch("", 0.05)
    log.add(EventKind.RUN_CREATED, "first")
    assert (await anext(watch)).message == "first"
    for index in range(2 * KEPT_EVENTS):
        log.add(EventKind.RUN_CREATED, str(index))
    rest = [event.message async for event in watch]
    assert rest == [str(index) for index in range(KEPT_EVENTS, 2 * KEPT_EVENTS)]


async def test_events_of_a_run_are_in_order(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await b.leave()
    await a.finish(0, wait_s=5)
    await a.finish(0, wait_s=5)
    await a.commit(0, wait_s=5)
    await cluster.call("DeleteRun", run="r", force=True)
    watch = cluster.servicer.WatchEvents(
        coordinator_pb2.WatchEventsRequest(run="r", duration_s=0.01),
        None,
    )
    kinds = [event.kind async for event in watch if event.run == "r"]
    assert kinds == [
        "run_created",
        "trainer_joined",
        "trainer_joined",
        "run_started",
        "unit_placed",
        "unit_published",
        "trainer_left",
        "work_leased",
        "step_committed",
        "run_deleted",
    ]
    with pytest.raises(InvalidRequestError, match="duration_s is -1"):
        async for _ in cluster.servicer.WatchEvents(
            coordinator_pb2.WatchEventsRequest(duration_s=-1),
            None,
        ):
            pass


async def test_events_survive_a_restart_and_routine_events_do_not(cluster: Harness) -> None:
    await cluster.team_with_unit("a", "b")
    before = cluster.events()
    assert {"run_created", "unit_published"} <= {kind for kind, _ in before}
    for _ in range(2):
        await cluster.restart()
        after = cluster.events()
        kept = [event for event in before if event[0] not in ("unit_placed", "unit_published")]
        assert after[: len(kept)] == kept and after[len(kept)][0] == "coordinator_started"
        before = after
    times = [event.time.ToNanoseconds() for event in cluster.state.events.kept()]
    assert times == sorted(times)


async def test_events_are_stored_with_other_writes_only(cluster: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    writes: list[list[str]] = []
    """The tables of each write that change."""
    store = cluster.state.storage._store
    write = store.write

    def note(changes: Sequence[Change]) -> None:
        changed = [each for each in changes if (each.rows if isinstance(each, Put) else each.keys)]
        writes.append([each.table for each in changed])
        write(changes)

    monkeypatch.setattr(store, "write", note)
    cluster.state.events.add(EventKind.SERVER_LOST, "s9")
    await cluster.settle()
    assert not writes, "an event alone is not written"
    for step in range(2):
        for trainer in (a, b):
            await trainer.finish(step)
        await asyncio.gather(a.commit(step, wait_s=5), b.commit(step, wait_s=5))
        await cluster.settle()
    assert [each.count("events") for each in writes] == [2, *[0] * (len(writes) - 1)], "the first write stores it"
    commits = [each for each in writes if "commits" in each]
    assert commits == [["commits", "commits"]] * 2, "a commit writes its record, and forgets an old one"


async def test_stored_events_are_bounded(cluster: Harness) -> None:
    for index in range(KEPT_EVENTS + 5):
        cluster.state.events.add(EventKind.LEASE_EXPIRED, str(index))
    await cluster.restart()
    await cluster.restart()
    assert len(cluster.state.storage._store.rows("events")) == KEPT_EVENTS
    assert len(cluster.events()) == KEPT_EVENTS


def test_every_kind_of_event_is_documented() -> None:
    source = Path(__file__).parents[3] / "server/shardwell_server/coordinator/inspection/events.py"
    text = source.read_text()
    assert all(f'= "{kind.value}"' in text for kind in EventKind)


async def test_stall_names_the_phase_and_what_the_run_waits_for(cluster: Harness) -> None:

    async def stall() -> coordinator_pb2.ExplainStallResponse:
        return await cluster.call("ExplainStall", run="r")

    await cluster.try_join("a", incarnation="a")
    cluster.clock.now += 3
    waiting = await stall()
    assert (waiting.phase, waiting.phase_s) == ("starting", 3)
    assert list(waiting.waiting_for) == [
        "1 of 2 trainers have joined: 1 more must join",
        "trainer 'a' on host h has joined",
    ]
    b = await cluster.join("b", config=config(World(dp=2)))
    a = await cluster.join("a", incarnation="a")
    await cluster.publish_unit([a, b])
    await a.finish(0)
    cluster.clock.now += 2
    working = await stall()
    assert (working.step, working.phase, working.phase_s) == (0, "working", 2)
    assert list(working.waiting_for) == [
        "rank 1: trainer 'b' on host h has been computing step 0 for 2.0 s (last request 2.0 s ago)"
    ]
    await b.leave()
    await cluster.settle()
    (vacant,) = (await stall()).waiting_for
    assert vacant.startswith("rank 1: vacant for 0.0 s: trainer 'b' is gone; its work is leased to the first trainer")
    await a.finish(0, wait_s=5)
    await a.finish(0, wait_s=5)
    await cluster.settle()
    proposing = await stall()
    assert proposing.phase == "awaiting commit"
    assert list(proposing.waiting_for) == ["step proposal of rank 0: trainer 'a' has not called optimizer.step()"]
    await a.leave()
    idle = await stall()
    assert idle.phase == "idle"
    assert idle.waiting_for[0].startswith("no trainers: all have left or are gone. 0 steps are committed")


async def test_long_stall_explanation_is_truncated(cluster: Harness) -> None:
    await cluster.publish_unit(await cluster.team("a", dp=200))
    lines = (await cluster.call("ExplainStall", run="r")).waiting_for
    assert len(lines) == 64
    assert lines[-1] == "... and 137 more"


async def test_world_is_described_without_a_run(cluster: Harness) -> None:
    world = World(dp=2, tp=2, pp=2)
    described = await cluster.call("DescribeWorld", world=world.to_proto(), num_layers=4)
    assert described.world_size == 8
    assert [
        rank_assignment.rank_assignment.coordinates.global_rank for rank_assignment in described.rank_assignments
    ] == list(range(8))
    assert list(described.rank_assignments[0].rank_assignment.groups[1].global_ranks) == [0, 2]
    assert described.rank_assignments[0].rank_assignment.next_stage == 1
    assert not described.rank_assignments[0].rank_assignment.HasField("previous_stage")
    with pytest.raises(WorldError, match="3 layers cannot be split"):
        await cluster.call("DescribeWorld", world=world.to_proto(), num_layers=3)
    with pytest.raises(InvalidRequestError, match="name either a run or a world"):
        await cluster.call("DescribeWorld")
    with pytest.raises(InvalidRequestError, match="too large to be listed"):
        await cluster.call("DescribeWorld", world=World(dp=1 << 16).to_proto())


async def test_runs_are_summarized(cluster: Harness) -> None:
    a, b = await cluster.team("a", "b")
    await cluster.publish_unit([a, b], "u", (15, 17))
    (run,) = (await cluster.call("ListRuns")).runs
    assert (run.run, run.live_trainer_count, run.unit_count) == ("r", 2, 1)
    assert run.parameter_bytes == 15 * 17 * 4
    assert not run.HasField("last_commit")
    await b.leave()
    described = await cluster.call("DescribeRun", run="r")
    assert [(at.trainer, at.live, list(at.global_ranks)) for at in described.trainers] == [
        ("a", True, [0]),
        ("b", False, [1]),
    ]
    assert [(work.trainer, work.state) for work in described.work] == [
        ("a", coordinator_pb2.WORK_STATE_LEASED),
        ("", coordinator_pb2.WORK_STATE_VACANT),
    ]
    rank_assignments = (await cluster.call("DescribeWorld", run="r")).rank_assignments
    assert [(rank_assignment.trainer, rank_assignment.host) for rank_assignment in rank_assignments] == [
        ("a", "h"),
        ("", ""),
    ]


@pytest.mark.harness(min_servers=3)
async def test_stall_of_a_run_without_weights_says_what_they_wait_for(cluster: Harness) -> None:

    async def stall() -> tuple[str, list[str]]:
        answer = await cluster.call("ExplainStall", run="r")
        return answer.phase, list(answer.waiting_for)

    a, _ = await cluster.team("a", "b")
    phase, lines = await stall()
    assert phase == "declaring"
    assert lines == [
        "the run waits for shard servers: 2 of 3 are live; start more (shardwell-server shard --coordinator "
        "HOST:PORT), or lower --min-servers",
        "trainer 'a' on host h has joined",
        "trainer 'b' on host h has joined",
    ]
    await cluster.add_server("s2")
    assert (await stall())[1][0] == "no unit is declared: no trainer has called fully_shard or auto_wrap yet"
    declared = await a.declare(unit("u", (64,)))
    assert (await stall())[1][0] == "the initial values of 1 units are not complete: the first is 'u'"
    await a.publish("u", declared.epoch)
    assert (await stall())[0] == "working"


async def health(cluster: Harness) -> tuple[str, coordinator_pb2.RunHealth]:
    """Returns the status of the run in lower case, and the run's health."""
    (found,) = (await cluster.call("DescribeCluster", run="r")).runs
    listed = (await cluster.call("ListRuns")).runs[0]
    assert found.summary == listed
    return coordinator_pb2.RunStatus.Name(listed.status).removeprefix("RUN_STATUS_").lower(), found


async def test_status_follows_a_run_to_its_end_and_survives_a_restart(cluster: Harness) -> None:
    await cluster.try_join("a", incarnation="a")
    assert (await health(cluster))[0] == "waiting", "one trainer is missing"
    a, b = await cluster.join("a", incarnation="a"), await cluster.join("b")
    a = await cluster.join("a", incarnation="a")
    assert (await health(cluster))[0] == "waiting", "no unit has values"
    await cluster.publish_unit([a, b])
    assert (await health(cluster))[0] == "running"
    for trainer in (a, b):
        await trainer.finish(0)
    await asyncio.gather(a.commit(0, wait_s=5), b.commit(0, wait_s=5))
    status, at = await health(cluster)
    assert (status, at.summary.committed_step, list(at.problems)) == ("running", 1, [])
    assert at.stall == await cluster.call("ExplainStall", run="r")
    await b.leave()
    await a.leave()
    assert (await health(cluster))[0] == "idle"
    again = await cluster.join("a")
    await again.leave(ended_step=0)
    assert (await health(cluster))[0] == "idle", "the loop ended before the last commit"
    again = await cluster.join("a")
    await again.leave(ended_step=1)
    for _ in range(2):
        status, at = await health(cluster)
        assert (status, at.summary.created_by, at.summary.created_on) == ("finished", "a", "h")
        await cluster.restart_all()


async def test_run_without_progress_is_stalled(cluster: Harness) -> None:
    a, b = await cluster.team_with_unit("a", "b")
    await cluster.pass_time(590, a, b)
    assert (await health(cluster))[0] == "running", "the first step may compile the model"
    await cluster.pass_time(20, a, b)
    status, at = await health(cluster)
    assert status == "stalled"
    assert list(at.problems) == ["no progress in step 0: `shardwell stall r` says what it waits for"]
    for trainer in (a, b):
        await trainer.finish(0)
    await asyncio.gather(a.commit(0, wait_s=5), b.commit(0, wait_s=5))
    assert (await health(cluster))[0] == "running"


async def test_advice_about_an_ended_server_works(cluster: Harness) -> None:
    await cluster.team_with_unit("a", "b")
    assert not (await cluster.call("DescribeCluster")).problems
    await cluster.add_server("s2")
    cluster.state.cluster.servers["s2"].mark_stopped(keeps_copies=True)
    (problem,) = (await cluster.call("DescribeCluster")).problems
    advice = "server 's2' at s2:1 has ended: start it again under its id, or remove it from the list (`shardwell "
    assert problem == f"{advice}forget-server s2`)"
    await cluster.call("ForgetServer", server_id="s2")
    assert not (await cluster.call("DescribeCluster")).problems


async def test_missing_backups_and_lost_shards_are_problems(cluster: Harness) -> None:
    await cluster.team_with_unit("a", "b")
    await cluster.call("SetBackups", run="r", backups=1)
    shards = len((await cluster.call("ListUnits", run="r")).units[0].shards)
    _, at = await health(cluster)
    assert at.summary.missing_backup_count == shards
    assert "missing or not in sync" in at.problems[0]
    cluster.state.cluster.servers["s1"].mark_lost()
    status, at = await health(cluster)
    assert status == "stalled" and "server 's1' at s1:1 has sent no heartbeat" in at.problems[0]
