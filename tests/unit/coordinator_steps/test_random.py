"""Random deaths, returns and resets of trainers, server errors and coordinator restarts: every step is committed."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from shardwell_wire.errors import (
    DuplicateError,
    StaleEpochError,
    StepStateError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.model.topology import World
from tests.support.coordinator import Harness, Trainer

ONE_EACH, GRID = World(dp=3), World(dp=2, tp=2)


class TrainerProcess:
    """A trainer process that makes one rpc at a time, and may die between any two rpcs."""

    def __init__(self, cluster: Harness, trainer: Trainer) -> None:
        self.cluster, self.trainer = cluster, trainer
        self.step = trainer.joined.committed_step
        self.all_finished = False
        self.wait_s = 0.02
        """Longest wait of an rpc. Most random events find nothing to wait for."""

    async def act(self, chance: random.Random) -> None:
        if not self.all_finished:
            response = await self.trainer.finish(self.step, wait_s=self.wait_s)
            self.all_finished = response.all_finished
        elif chance.random() < 0.1 and self.trainer.items:
            await self.reset(chance.choice(sorted(self.trainer.items)))
        else:
            response = await self.trainer.commit(self.step, wait_s=self.wait_s)
            if response.committed:
                self.step, self.all_finished = response.next_work.step, False
            elif any("vacant" in line for line in response.waiting_for):
                # All items were finished. Then one was reset and its trainer died, so another trainer must compute it.
                self.all_finished = False

    async def reset(self, rank: int) -> None:
        self.all_finished = False
        await self.trainer.reset(self.step, rank, request_id=str(random.random()))


class History:
    """A random history of one run, with one trainer more than ranks."""

    def __init__(self, cluster: Harness, seed: int, world: World) -> None:
        self.cluster, self.chance, self.world = cluster, random.Random(seed), world
        self.names = "abcdefgh"[: world.size + 1]
        self.processes: dict[str, TrainerProcess] = {}
        self.epochs: dict[tuple[str, int], set[int]] = {}

    async def begin(self) -> None:
        trainers = await self.cluster.team(*self.names[:-1], world=self.world)
        await self.cluster.publish_unit(trainers)
        self.processes = {trainer.name: TrainerProcess(self.cluster, trainer) for trainer in trainers}

    async def execute_event(self) -> None:
        """Executes one random event: mostly the next rpc of a trainer."""
        what = self.chance.random()
        if what < 0.03:
            await self.cluster.restart()
        elif what < 0.07 and len(self.processes) > 1:
            del self.processes[self.chance.choice(sorted(self.processes))]
        elif what < 0.12:
            await self.cluster.pass_time(12, *(process.trainer for process in self.processes.values()))
        elif what < 0.17:
            await self.join_again(self.chance.choice(self.names))
        elif what < 0.22:
            self.fail_for_a_while(self.chance.choice(sorted(self.cluster.shards)))
        elif self.processes:
            # The trainers of a replica get work only if all of them wait for it.
            count = 1 if self.world.replica_size == 1 else self.chance.randint(1, len(self.processes))
            await self.advance(*self.chance.sample(sorted(self.processes), count))

    async def advance(self, *names: str) -> None:
        """Lets trainers make their next rpc, all at once."""
        await asyncio.gather(*map(self._advance, names))

    async def _advance(self, name: str) -> None:
        process = self.processes[name]
        try:
            await process.act(self.chance)
        except UnavailableError:
            return
        except VersionGoneError:
            # The reset came too late: the step is committed with the former attempt.
            process.all_finished = True
        except StepStateError as error:
            assert "has not finished" in str(error)
            process.all_finished = False
        except StaleEpochError:
            # Another trainer of the replica was lost, so the item was revoked before it was reset.
            if process.trainer.epoch != self.cluster.state.runs["r"].members.by_name[name].epoch:
                raise
            process.all_finished = False

    async def join_again(self, name: str, wait_s: float = 0.02) -> None:
        if name in self.processes:
            return
        try:
            joined = await self.cluster.try_join(name, wait_s=wait_s, config=self.config)
        except DuplicateError:
            return
        if joined.started:
            self.processes[name] = TrainerProcess(self.cluster, Trainer(self.cluster, joined, "r"))

    @property
    def config(self) -> Any:
        return self.cluster.state.runs["r"].settings.to_proto()

    def fail_for_a_while(self, name: str) -> None:
        left = self.chance.randint(1, 3)

        def fail(rpc_name: str, request: Any) -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                raise UnavailableError("fake: temporary failure")

        self.cluster.shards[name].fail = fail

    def check(self) -> None:
        """Asserts that every server applied every step once and in order."""
        for shard in self.cluster.shards.values():
            steps = [update.context.step for update in shard.runs["r"].updates]
            assert steps == list(range(len(steps)))
        run = self.cluster.state.runs["r"]
        assert {*run.work.steps[0].items} == set(range(self.world.dp))
        for item in run.work.steps[0].items.values():
            assert item.epoch <= run.changes.last_epoch
            assert len(set(item.trainers)) == self.world.replica_size
            assert item.state.is_finished == (not item.unfinished)
        places = {(name, place) for replica in run.owners.replicas for place, name in enumerate(replica)}
        assert len(places) == len({name for name, _ in places}), "a trainer has one place in all its dp ranks"


@pytest.mark.parametrize("world", [ONE_EACH, GRID], ids=str)
@pytest.mark.parametrize("seed", range(8))
async def test_random_history_commits_every_step_once(cluster: Harness, seed: int, world: World) -> None:
    history = History(cluster, seed, world)
    await history.begin()
    for _ in range(120):
        await history.execute_event()
        history.check()
    # Without further failures, and with all trainers back, the run must make progress.
    await cluster.pass_time(12, *(process.trainer for process in history.processes.values()))
    if world.replica_size > 1:
        # All at once: a trainer waits in Join until its replica is complete.
        absent = [name for name in history.names if name not in history.processes]
        missing = absent[: world.size - len(history.processes)]
        await asyncio.gather(*(history.join_again(name, wait_s=5.0) for name in missing))
    target = cluster.state.runs["r"].committed_step + 3
    for turn in range(400):
        if cluster.state.runs["r"].committed_step >= target:
            break
        if world.replica_size == 1:
            for name in list(history.processes):
                await history.advance(name)
            continue
        # A replica gets work while all its trainers wait, which they do not within 20 ms on a busy machine.
        for process in history.processes.values():
            process.wait_s = min(1.0, 0.02 * 1.1**turn)
        await history.advance(*history.processes)
    stall = await cluster.call("ExplainStall", run="r")
    assert cluster.state.runs["r"].committed_step >= target, stall
    await cluster.settle()
    history.check()


async def test_stale_trainer_stays_rejected(cluster: Harness) -> None:
    history = History(cluster, 0, ONE_EACH)
    await history.begin()
    stale, run = history.processes.pop("a"), cluster.state.runs["r"]
    await cluster.pass_time(12, *(process.trainer for process in history.processes.values()))
    while run.started and run.work.steps[0].items[0].first_trainer == "a":
        await history.advance("b")
    for _ in range(60):
        await history.execute_event()
        with pytest.raises(StaleEpochError):
            await stale.act(history.chance)
