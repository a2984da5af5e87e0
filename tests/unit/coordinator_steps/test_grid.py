"""Work items of worlds with cp * tp * pp > 1: a replica computes them together, and is the unit of failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shardwell_wire.errors import StaleEpochError, StepRestartedError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer, config, finished_item, unit
from tests.unit.coordinator_ranks.test_connections import keep

WORLDS = [
    World(dp=2, tp=2),
    World(dp=2, pp=2),
    World(dp=2, tp=2, pp=2),
    World(dp=4, pp=2),
    World(dp=2, cp=2),
    World(dp=2, cp=2, pp=2),
]
WORLD = World(dp=2, tp=2)
NAMES = "abcdefgh"

Items = dict[int, tuple[int, int, int]]


async def grid(cluster: Harness, world: World = WORLD, names: Sequence[str] = "") -> list[Trainer]:
    """Returns the trainers of a run, in the order of their names, with one unit for each coordinate of a replica."""
    trainers = await cluster.team(*(names or NAMES[: world.size]), world=world)
    for index in range(world.replica_size):
        await cluster.publish_unit(trainers, f"u{index}")
    return trainers


def step_of(cluster: Harness) -> Any:
    return cluster.state.runs["r"].work.steps[0]


def work(response: Any) -> Items:
    """Returns (dp rank, epoch, attempt) of each item in a response, by global rank."""
    items = response.work.items if hasattr(response, "work") else response.next_work.items
    return {item.global_rank: (item.dp_rank, item.epoch, item.attempt) for item in items}


def states(cluster: Harness) -> list[str]:
    return [item.state.name for item in step_of(cluster).items.values()]


async def all_accept(trainers: Sequence[Trainer], step: int) -> None:
    """Lets the trainers ask for work, so that the coordinator knows that they compute any item. Finishes nothing."""
    for trainer in trainers:
        await trainer.finish(step, [])


async def wait_for_work(cluster: Harness, trainers: Sequence[Trainer], step: int) -> list[asyncio.Task[Any]]:
    """Finishes the items of trainers, which then wait for the end of the step or for work."""
    polls = [asyncio.create_task(trainer.finish(step, wait_s=5)) for trainer in trainers]
    names = {trainer.name for trainer in trainers}
    waiting = cluster.state.runs["r"].members.waiting_for_work
    await cluster.until(lambda: names <= set(waiting), "the trainers wait for work")
    return polls


async def next_work(trainers: Sequence[Trainer], step: int) -> list[list[int]]:
    """Finishes the items of trainers. Returns the ranks of the items that each of them gets next."""
    answers = await asyncio.gather(*(trainer.finish(step, wait_s=5) for trainer in trainers))
    return [sorted(work(answer)) for answer in answers]


async def commit(cluster: Harness, trainers: Sequence[Trainer], step: int) -> None:
    finished = await asyncio.gather(*(trainer.finish(step, wait_s=5) for trainer in trainers))
    assert all(answer.all_finished for answer in finished), finished
    committed = await asyncio.gather(*(trainer.commit(step, wait_s=5) for trainer in trainers))
    assert all(answer.committed for answer in committed), committed
    await cluster.settle()


def described(response: Any) -> list[tuple[list[int], str, str]]:
    return [(list(at.dp_ranks), "".join(at.trainers), "".join(at.missing)) for at in response.replicas]


@pytest.mark.parametrize("world", WORLDS, ids=str)
async def test_each_trainer_gets_its_coordinate_of_one_item_per_dp_rank(cluster: Harness, world: World) -> None:
    trainers = await grid(cluster, world)
    leases: dict[int, set[tuple[int, int, int]]] = {}
    for trainer in trainers:
        ((rank, item),) = trainer.items.items()
        assert trainer.ranks == [rank]
        assert item.dp_rank == world.coordinates(rank).dp_rank
        assert item.replica_epoch == trainer.joined.replica_epoch > 0
        leases.setdefault(item.dp_rank, set()).add((item.epoch, item.attempt, item.replica_epoch))
    assert all(len(found) == 1 for found in leases.values()), "one epoch and one attempt per item"
    assert len(leases) == len(set.union(*leases.values())) == world.dp
    assert sorted(step_of(cluster).items) == list(range(world.dp))


@pytest.mark.parametrize("world", WORLDS, ids=str)
async def test_item_is_finished_when_all_members_are_and_its_manifest_has_the_parts_of_all(
    cluster: Harness, world: World
) -> None:
    trainers = await grid(cluster, world)
    places = [world.replica_ranks(0).index(trainer.ranks[0] % world.replica_size) for trainer in trainers]
    for trainer, place in zip(trainers, places, strict=True):
        assert not (await trainer.finish(0, parts={place: place + 1})).all_finished or trainer is trainers[-1]
    await asyncio.gather(*(trainer.commit(0, wait_s=5) for trainer in trainers))
    await cluster.settle()
    for shard in cluster.shards.values():
        (manifest,) = shard.manifests
        owned = {unit.index for unit in shard.runs["r"].primaries}
        expected = {place: place + 1 for place in range(world.replica_size) if place in owned}
        assert len(manifest.ranks) == world.dp
        for rank in manifest.ranks:
            assert {unit.unit_index: unit.part_count for unit in rank.units} == expected
        assert [update.context.step for update in shard.runs["r"].updates] == [0]


async def test_unit_that_several_members_push_is_in_the_manifest_once(cluster: Harness) -> None:
    trainers = await grid(cluster)
    await asyncio.gather(*(trainer.finish(0, parts={0: 1}) for trainer in trainers))
    await commit(cluster, trainers, 0)
    (manifest,) = cluster.shards["s0"].manifests
    assert [[(unit.unit_index, unit.part_count) for unit in rank.units] for rank in manifest.ranks] == [
        [(0, 1)],
        [(0, 1)],
    ]


@pytest.mark.harness(num_shards=1)
async def test_unit_that_stages_share_is_in_the_manifest_once_per_stage(cluster: Harness) -> None:
    world = World(dp=2, tp=2, pp=2)
    trainers = await cluster.team(*NAMES, world=world)
    spec = unit("u", (64, 64))
    spec.pp_ranks.extend((0, 1))
    for trainer in trainers:
        declared = await trainer.declare(spec)
        assert declared.initialize == (trainer is trainers[0]), "the first stage sends the initial values"
        if declared.initialize:
            await trainer.publish("u", declared.epoch)
    for trainer in trainers:
        at = world.coordinates(trainer.ranks[0])
        await trainer.finish(0, parts={0: 1 + at.pp_rank} if at.tp_rank == 0 else {})
    await asyncio.gather(*(trainer.commit(0, wait_s=5) for trainer in trainers))
    (manifest,) = cluster.shards["s0"].manifests
    parts = [[(part.pp_rank, part.part_count) for part in rank.units] for rank in manifest.ranks]
    assert parts == [[(0, 1), (1, 2)]] * 2


@pytest.mark.parametrize("lost", ["first", "last"])
@pytest.mark.parametrize("moment", ["nobody finished", "lost one finished", "survivor finished"])
@pytest.mark.parametrize("world", WORLDS, ids=str)
async def test_waiting_replica_takes_over_the_item_of_a_broken_one(
    cluster: Harness, world: World, moment: str, lost: str
) -> None:
    trainers = await grid(cluster, world)
    await all_accept(trainers, 0)
    size = world.replica_size
    broken, helpers, rest = trainers[:size], trainers[size : 2 * size], trainers[2 * size :]
    gone = broken[0 if lost == "first" else -1]
    survivors = [trainer for trainer in broken if trainer is not gone]
    before = {trainer.name: trainer.finished() for trainer in broken}
    if moment != "nobody finished":
        await (gone if moment == "lost one finished" else survivors[0]).finish(0)
    polls = await wait_for_work(cluster, helpers, 0)
    await gone.leave()
    answers = [work(await poll) for poll in polls]
    ranks = sorted(rank for at in answers for rank in at)
    assert ranks == sorted(world.replica_ranks(0)), "each helper gets its own coordinate"
    ((dp_rank, epoch, attempt),) = {lease for at in answers for lease in at.values()}
    assert (dp_rank, attempt) == (0, 1)
    assert epoch > before[gone.name][0].epoch
    for helper, at in zip(helpers, answers, strict=True):
        ((rank, _),) = at.items()
        own = world.coordinates(helper.ranks[0])
        assert world.coordinates(rank) == replace(own, global_rank=rank, dp_rank=0)
        assert helper.items[rank].replica_epoch == helper.joined.replica_epoch, "their own replica's"
    for shard in cluster.shards.values():
        assert shard.runs["r"].attempts[0] == 1, "parts of the former attempt are dropped, of all members"
    for survivor in survivors:
        late = await survivor.finish(0, before[survivor.name], accept_work=False)
        assert not late.all_finished and not late.HasField("work"), "reports of the former lease have no effect"
        with pytest.raises(StaleEpochError):
            await survivor.reset(0, survivor.ranks[0])
    for trainer in rest:
        await trainer.finish(0)
    await commit(cluster, helpers, 0)
    manifest = cluster.shards["s0"].manifests[-1]
    assert [rank.attempt for rank in manifest.ranks] == [1] + [0] * (world.dp - 1)
    begun = step_of(cluster).items[0].trainers
    assert gone.name not in begun and len(set(begun)) == size, "at the next step, a complete replica has it"


async def test_finished_item_of_a_broken_replica_counts(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await all_accept(trainers, 0)
    await asyncio.gather(a.finish(0), b.finish(0))
    await b.leave()
    await cluster.settle()
    assert states(cluster) == ["ORPHANED", "LEASED"], "the first is finished without b"
    await commit(cluster, [a, c, d], 0)
    assert cluster.shards["s0"].manifests[0].ranks[0].attempt == 0
    assert [item.trainers for item in step_of(cluster).items.values()] == [("c", "d"), ("c", "d")]


async def test_reset_after_a_finished_item_lost_a_trainer_gives_it_to_another_replica(cluster: Harness) -> None:
    *_, b, c, d = trainers = await grid(cluster)
    await all_accept(trainers, 0)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await b.leave()
    await c.reset(0, 2)
    await cluster.settle()
    assert states(cluster) == ["VACANT", "LEASED"]
    with pytest.raises(StepRestartedError):
        await d.commit(0)
    assert work(await d.finish(0, wait_s=5)).keys() == {3}, "its peer has reset the item"
    assert await next_work([c, d], 0) == [[0], [1]]
    await commit(cluster, [c, d], 0)


async def test_reset_by_one_member_restarts_the_item_for_all(cluster: Harness) -> None:
    a, b, c, d = await grid(cluster)
    await a.finish(0)
    epoch = a.items[0].epoch
    restarted = await b.reset(0, 1)
    assert (restarted.global_rank, restarted.epoch, restarted.attempt) == (1, epoch, 1)
    again = await a.finish(0, wait_s=5)
    assert work(again) == {0: (0, epoch, 1)}, "its report of the former attempt is void"
    assert cluster.shards["s0"].runs["r"].attempts == {0: 1}
    assert states(cluster) == ["LEASED", "LEASED"]
    await asyncio.gather(*(trainer.finish(0) for trainer in (a, b, c, d)))
    assert states(cluster) == ["FINISHED", "FINISHED"]


async def test_members_that_give_up_the_same_attempt_restart_the_item_once(cluster: Harness) -> None:
    a, b, *_ = await grid(cluster)

    async def give_up(trainer: Trainer, rank: int, attempt: int) -> int:
        response = await cluster.call(
            "ResetWork",
            context=trainer.context(0, trainer.items[rank].epoch),
            trainer=trainer.name,
            global_rank=rank,
            attempt=attempt,
            wait_s=5,
        )
        assert response.item.global_rank == rank
        return int(response.item.attempt)

    assert await give_up(a, 0, 0) == 1
    assert await give_up(b, 1, 0) == 1, "the peer has begun a new attempt already"
    assert await give_up(b, 1, 1) == 2


async def test_lost_server_restarts_the_item_for_all_members(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await asyncio.gather(*(trainer.finish(0) for trainer in (a, b, c)))
    run = cluster.state.runs["r"]
    run.work.restart()
    cluster.coordinator.trainers.items.start_fencing(run)
    for trainer in (a, b, c):
        ((_, _, attempt),) = work(await trainer.finish(0, wait_s=5)).values()
        assert attempt == 1
    d.items = {3: (await d.finish(0, [])).work.items[0]}
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    assert states(cluster) == ["FINISHED", "FINISHED"]


async def test_lost_trainer_that_returns_makes_its_replica_complete(cluster: Harness) -> None:
    world = World(tp=2)
    a, b = await grid(cluster, world)
    former = a.joined.replica_epoch
    assert former == b.joined.replica_epoch
    await all_accept([a, b], 0)
    await b.leave()
    await cluster.settle()
    assert cluster.state.runs["r"].owners.replica_epoch_of("a") > former, "what a had set up with b is void"
    asked = asyncio.create_task(a.finish(0, [], wait_s=5))
    again = await cluster.join("b", config=config(world), wait_s=5)
    assert again.ranks == [1]
    ((rank, (_, epoch, attempt)),) = work(await asked).items()
    assert (rank, attempt) == (0, 1)
    assert (again.items[1].epoch, again.items[1].attempt) == (epoch, 1)
    assert again.joined.replica_epoch == a.items[0].replica_epoch == again.items[1].replica_epoch > former + 1
    await commit(cluster, [a, again], 0)


@pytest.mark.parametrize("other", ["d", "spare"])
async def test_trainer_of_a_plain_loop_waits_in_join_until_its_replica_is_complete(
    cluster: Harness, other: str
) -> None:
    a, b, c, d = trainers = await grid(cluster)
    for trainer in trainers:
        await trainer.finish(0, [], accept_work=False)
    await asyncio.gather(c.leave(), d.leave())
    await cluster.settle()
    again = await cluster.try_join("c", config=config(WORLD), incarnation="c2")
    assert not again.started
    assert again.waiting_for[0] == (
        "trainer 'c' on host h cannot start before its replica is complete: it waits for trainer 'd'"
    )
    joins = [asyncio.create_task(cluster.join("c", config=config(WORLD), incarnation="c2", wait_s=5))]
    joins.append(asyncio.create_task(cluster.join(other, config=config(WORLD), wait_s=5)))
    replica = await asyncio.gather(*joins)
    assert [(at.name, list(at.items)) for at in replica] == [("c", [2]), (other, [3])]
    assert len({at.joined.replica_epoch for at in replica}) == 1
    await asyncio.gather(*(at.finish(0, accept_work=False) for at in (a, b, *replica)))
    await commit(cluster, [a, b, *replica], 0)


async def test_spare_waits_in_join_until_a_coordinate_is_free(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await all_accept(trainers, 0)
    full = await cluster.try_join("s", config=config(WORLD), incarnation="spare")
    assert not full.started
    assert "is a spare until a rank is free" in full.waiting_for[0]
    joining = asyncio.create_task(cluster.join("s", config=config(WORLD), incarnation="spare", wait_s=5))
    await cluster.until(lambda: bool(cluster.state.runs["r"].members.by_name["s"].rpcs_in_progress), "the poll")
    await c.leave()
    spare = await joining
    assert spare.ranks == [2]
    assert not spare.items, "the other replica may compute its item until it asks for work"
    assert spare.joined.replica_epoch > d.joined.replica_epoch
    polls = [asyncio.create_task(trainer.finish(0, [], wait_s=5)) for trainer in (spare, d)]
    leases = [work(await poll) for poll in polls]
    assert [list(lease) for lease in leases] == [[2], [3]]
    await asyncio.gather(a.finish(0), b.finish(0))
    await commit(cluster, [a, b, spare, d], 0)
    assert [item.trainers for item in step_of(cluster).items.values()] == [("a", "b"), ("s", "d")]
    returned = await cluster.try_join("c", config=config(WORLD))
    assert not returned.started, "its place is taken: it is a spare now"


async def test_spare_gets_the_place_of_a_silent_trainer(cluster: Harness) -> None:
    a, b, _, d = await grid(cluster)
    joining = asyncio.create_task(cluster.join("s", config=config(WORLD), wait_s=5))
    await cluster.until(lambda: "s" in cluster.state.runs["r"].members.by_name, "the spare")
    await asyncio.sleep(0)
    await cluster.pass_time(11, a, b, d)
    assert (await joining).ranks == [2]


async def test_expired_lease_is_revoked_only_if_a_complete_replica_or_a_spare_can_take_over(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await all_accept(trainers, 0)
    polls = await wait_for_work(cluster, [a], 0)
    await cluster.pass_time(11, a, c, d)
    assert states(cluster) == ["LEASED", "LEASED"], "only a waits, which cannot compute the item without b"
    await c.finish(0)
    await d.finish(0)
    await b.finish(0)
    assert (await polls[0]).all_finished, "b was only suspended"
    await commit(cluster, trainers, 0)
    polls = await wait_for_work(cluster, [c, d], 1)
    await cluster.pass_time(11, a, c, d)
    assert [list(work(await poll)) for poll in polls] == [[0], [1]]


@pytest.mark.parametrize("phase", ["computing", "one finished", "all finished", "proposed", "peer proposed"])
async def test_suspended_trainer_of_the_only_replica_goes_on_where_it_was(cluster: Harness, phase: str) -> None:
    a, b = await grid(cluster, World(tp=2))
    epochs = (a.items[0].epoch, a.joined.replica_epoch)
    phases = ["computing", "one finished", "all finished", "proposed", "peer proposed"]
    for current in phases[: phases.index(phase) + 1]:
        if current == "one finished":
            await a.finish(0)
        elif current == "all finished":
            await b.finish(0)
        elif current.endswith("proposed"):
            assert not (await (b if phase == "proposed" else a).commit(0)).committed
    await cluster.pass_time(11, a)
    asked = asyncio.create_task(a.finish(0, wait_s=5))
    if phases.index(phase) >= 2:
        assert (await asked).all_finished
        assert (await a.commit(0, wait_s=5 if phase == "proposed" else 0)).committed == (phase == "proposed")
    if phase == "peer proposed":
        (line,) = (await cluster.call("ExplainStall", run="r")).waiting_for
        assert line.endswith(": trainer 'b' (its lease expired) has not called optimizer.step()")
    await cluster.pass_time(60, a)
    await b.finish(0)
    assert (await asked).all_finished
    await commit(cluster, [a, b], 0)
    assert all(shard.calls["Fence"] == 0 for shard in cluster.shards.values()), "nobody was fenced"
    run = cluster.state.runs["r"]
    assert (a.items[0].epoch, run.owners.replica_epoch_of("b")) == epochs


async def test_expired_leader_is_revoked_when_another_one_has_proposed_in_its_place(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers))
    await cluster.pass_time(11, a, c, d)
    assert not (await a.commit(0)).committed
    assert cluster.state.runs["r"].members.by_name["b"].expired
    assert (await d.commit(0, wait_s=5)).committed
    with pytest.raises(StaleEpochError):
        await b.commit(0)
    await cluster.settle()
    await asyncio.gather(a.commit(0), c.commit(0))


@pytest.mark.parametrize("proposed", ["all others", "the other replica"])
@pytest.mark.parametrize("joins", ["spare", "b"])
async def test_step_is_committed_without_a_leader_that_joined_after_its_item_was_finished(
    cluster: Harness, joins: str, proposed: str
) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await asyncio.gather(*(trainer.finish(0, accept_work=False) for trainer in trainers))
    if proposed == "all others":
        assert not (await a.commit(0)).committed
    assert not (await c.commit(0)).committed
    await b.leave()
    new = await cluster.join(joins, config=config(WORLD), wait_s=5)
    assert new.ranks == [1] and not new.items
    assert (await d.commit(0, wait_s=1)).committed, "the new trainer waits for its replica, and proposes nothing"
    await cluster.settle()
    for trainer in (a, c, new):
        await trainer.commit(0)
    assert [sorted(trainer.items) for trainer in (a, new, c, d)] == [[0], [1], [2], [3]]
    await asyncio.gather(*(trainer.finish(1, accept_work=False) for trainer in (a, new, c, d)))
    await asyncio.gather(c.commit(1), d.commit(1))
    assert cluster.state.runs["r"].work.leaders(cluster.state.runs["r"].work.steps[0]) == ["a", new.name], (
        "at the next step, it leads again"
    )


async def test_trainer_that_lost_its_item_learns_which_peer_was_lost(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await all_accept(trainers, 0)
    await b.leave()
    await cluster.settle()
    with pytest.raises(StaleEpochError) as vacant:
        await a.reset(0, 0)
    item = step_of(cluster).items[0]
    assert vacant.value.data == {
        "step": "0",
        "global_rank": "0",
        "dp_rank": "0",
        "epoch": str(item.epoch),
        "attempt": "1",
        "lost_trainer": "b",
        "lost_rank": "1",
    }
    assert str(vacant.value) == (
        f"trainer 'a' no longer has rank 0 of step 0 under epoch {a.items[0].epoch}: trainer 'b' (rank 1) of "
        f"its replica was lost, so dp rank 0 (ranks 0, 1) waits for a complete replica, under epoch "
        f"{item.epoch}, attempt 1"
    )
    assert await next_work([c, d], 0) == [[0], [1]]
    with pytest.raises(StaleEpochError, match="was leased anew, to 'c', 'd', under epoch") as leased:
        await a.reset(0, 0)
    assert (leased.value.data["lost_trainer"], leased.value.data["epoch"]) == ("b", str(item.epoch))


async def test_reset_item_stays_with_a_member_whose_lease_has_only_expired(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await cluster.pass_time(11, a, c, d)
    item = await a.reset(0, a.ranks[0])
    assert states(cluster) == ["LEASED", "LEASED"]
    assert work(await b.finish(0)) == {b.ranks[0]: (0, item.epoch, item.attempt)}, "b was only suspended"
    await commit(cluster, trainers, 0)


async def test_fewer_replicas_than_dp_ranks_play_several_items(cluster: Harness) -> None:
    world = World(dp=4, tp=2)
    a, b = await grid(cluster, world, "ab")
    assert a.ranks == [0, 2, 4, 6]
    assert b.ranks == [1, 3, 5, 7]
    assert {item.replica_epoch for trainer in (a, b) for item in trainer.items.values()} == {a.joined.replica_epoch}
    joins = [
        asyncio.create_task(cluster.join(name, config=config(world, min_trainers=2), wait_s=5)) for name in ("d", "c")
    ]
    c, d = sorted(await asyncio.gather(*joins), key=lambda trainer: trainer.name)
    assert (c.ranks, d.ranks) == ([4, 6], [5, 7]), "two spares form a replica, which takes half of the dp ranks"
    assert c.joined.replica_epoch == d.joined.replica_epoch != a.joined.replica_epoch
    assert not c.items, "a and b keep the items of this step"
    await asyncio.gather(a.finish(0), b.finish(0))
    for trainer in (c, d):
        await trainer.finish(0)
    await commit(cluster, [a, b, c, d], 0)
    assert [sorted(trainer.items) for trainer in (a, b, c, d)] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    await d.leave()
    await cluster.settle()
    assert states(cluster) == ["LEASED", "LEASED", "VACANT", "VACANT"]
    assert await next_work([a, b], 1) == [[4], [5]], "one item at a time"
    assert await next_work([a, b], 1) == [[6], [7]]
    await commit(cluster, [a, b], 1)
    assert [sorted(trainer.items) for trainer in (a, b)] == [[0, 2, 4, 6], [1, 3, 5, 7]]


async def test_restarted_coordinator_knows_leases_replica_epochs_and_vacant_items(cluster: Harness) -> None:
    a, b, c, d = trainers = await grid(cluster)
    await b.leave()
    await cluster.settle()
    run = cluster.state.runs["r"]
    epochs, leased = dict(run.owners.replica_epochs), c.items[2].epoch
    await cluster.restart()
    run = cluster.state.runs["r"]
    assert run.owners.replica_epochs == epochs
    assert states(cluster) == ["VACANT", "LEASED"]
    assert step_of(cluster).items[1].epoch == leased
    assert step_of(cluster).items[0].attempt == 2
    await all_accept([c, d], 0)
    await cluster.settle()
    again = await cluster.join("b", config=config(WORLD), wait_s=5)
    assert again.ranks == [1] and not again.items
    await cluster.restart()
    assert states(cluster) == ["VACANT", "LEASED"], "vacant, although all its former trainers are present"
    await cluster.settle()
    polls = [asyncio.create_task(trainer.finish(0, [], wait_s=5)) for trainer in (a, again)]
    assert [list(work(await poll)) for poll in polls] == [[0], [1]]
    await asyncio.gather(*(trainer.finish(0) for trainer in trainers if trainer is not b))
    await commit(cluster, [a, again, c, d], 0)


async def test_restarted_coordinator_commits_a_step_whose_work_is_reported_again(cluster: Harness) -> None:
    trainers = await grid(cluster, World(dp=2, pp=2))
    for place, trainer in zip((0, 1, 0, 1), trainers, strict=True):
        await trainer.finish(0, parts={place: 1 + place})
    assert (await trainers[0].finish(0, parts={0: 1}, wait_s=5)).all_finished
    await cluster.restart()
    reports = zip((0, 1, 0, 1), trainers, strict=True)
    await asyncio.gather(*(each.finish(0, parts={place: 1 + place}, wait_s=5) for place, each in reports))
    assert all(answer.committed for answer in await asyncio.gather(*(each.commit(0, wait_s=5) for each in trainers)))
    units = cluster.shards["s0"].manifests[-1].ranks[0].units
    assert [(unit.unit_index, unit.part_count) for unit in units] == [(0, 1), (1, 2)]


async def test_membership_stream_tells_a_new_replica_epoch(cluster: Harness) -> None:
    a, b, c, _ = await grid(cluster)
    streams = {trainer.name: await keep(cluster, trainer) for trainer in (a, c)}
    assert streams["a"].received[0].replica_epoch == a.joined.replica_epoch
    await b.leave()
    await cluster.until(lambda: len(streams["a"].received) == 2, "the new epoch")
    assert streams["a"].received[1].replica_epoch > a.joined.replica_epoch
    assert len(streams["c"].received) == 1, "its replica is unchanged"
    for stream in streams.values():
        await stream.break_()


async def test_replicas_and_missing_trainers_are_described(cluster: Harness) -> None:
    a, *_, d = await grid(cluster)
    assert described(await cluster.call("DescribeWorld", run="r")) == [([0], "ab", ""), ([1], "cd", "")]
    await d.leave()
    await cluster.settle()
    assert described(await cluster.call("DescribeWorld", run="r")) == [([0], "ab", ""), ([1], "cd", "d")]
    await a.finish(0)
    lines = (await cluster.call("ExplainStall", run="r")).waiting_for
    assert len(lines) == 2
    assert lines[0].startswith("rank 1: trainer 'b' on host h has been computing step 0")
    assert lines[1].startswith("dp rank 1 (ranks 2, 3): vacant for ")
    assert "its replica lacks trainer 'd' (rank 3); the work is leased to" in lines[1]
    waiting = (await a.finish(0)).waiting_for
    assert list(waiting) == [
        "rank 1: trainer 'b' is computing it",
        "dp rank 1 (ranks 2, 3): vacant, because trainer 'd' (rank 3) of its replica is gone",
    ]
    listed = (await cluster.call("DescribeRun", run="r")).work
    assert {(at.item.global_rank, at.trainer, at.state) for at in listed} == {
        (0, "a", coordinator_pb2.WORK_STATE_FINISHED),
        (1, "b", coordinator_pb2.WORK_STATE_LEASED),
        (2, "", coordinator_pb2.WORK_STATE_VACANT),
        (3, "", coordinator_pb2.WORK_STATE_VACANT),
    }


async def test_requested_ranks_that_one_trainer_would_play_are_rejected(cluster: Harness) -> None:
    settings_of_run = config(World(dp=2, tp=2), min_trainers=2)
    await cluster.try_join("a", config=settings_of_run, global_rank=3)
    with pytest.raises(Exception, match="already requested rank 1"):
        await cluster.try_join("b", config=settings_of_run, global_rank=1)
    b = await cluster.join("b", config=settings_of_run, global_rank=2)
    assert b.ranks == [0, 2]


async def test_report_for_the_rank_of_a_peer_is_rejected(cluster: Harness) -> None:
    a, b, *_ = await grid(cluster)
    with pytest.raises(Exception, match="was leased to 'b'"):
        await a.finish(0, [finished_item(b.items[1])])
