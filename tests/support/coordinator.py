"""A coordinator without sockets: tests call its servicer directly and move its clock."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.rpcs.servicer import CoordinatorServicer
from shardwell_server.coordinator.servers.cluster import ServerState
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.signals import BackgroundTasks
from shardwell_server.coordinator.storage.database import Database
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_wire.model.names import check_names
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.fake_shards import DirectCalls, FakeShard

SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0.0, "maximize": 0.0}


class Clock:
    """A monotonic clock that tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class _Call:
    """The call of an rpc with a deadline of ``limit_s``, on a cluster without a key."""

    caller = None

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def remaining_s(self, wanted_s: float | None = None) -> float:
        return self._limit_s if wanted_s is None else min(wanted_s, self._limit_s)

    def sees(self, run: str) -> bool:
        return True


class Trainer:
    """A trainer without a model. Its rpcs have ``wait_s=0`` by default."""

    def __init__(self, rpcs: Rpcs, joined: coordinator_pb2.JoinResponse, run: str) -> None:
        self.rpcs, self.joined, self.run = rpcs, joined, run
        self.name, self.epoch, self.run_id = joined.trainer, joined.epoch, joined.run_id
        self.items = {item.global_rank: item for item in joined.work.items}
        self.version = joined.work.step
        self._named: dict[int, coordinator_pb2.ItemName] = {}
        """The item that the trainer computed from each version."""
        self._note(joined.work)
        self.ranks = [rank_assignment.coordinates.global_rank for rank_assignment in joined.rank_assignments]
        self.cp = joined.config.world.cp

    def _note(self, work: coordinator_pb2.StepWork) -> None:
        for item in work.items:
            self._named[work.step] = coordinator_pb2.ItemName(dp_rank=item.dp_rank, number=item.number)

    def context(self, step: int, epoch: int | None = None, request_id: str = "") -> common_pb2.RequestContext:
        return common_pb2.RequestContext(
            run=self.run,
            run_id=self.run_id,
            epoch=self.epoch if epoch is None else epoch,
            step=step,
            request_id=request_id,
        )

    def finished(self, parts: dict[int, int] | None = None) -> list[coordinator_pb2.FinishedItem]:
        return [finished_item(item, parts) for item in self.items.values()]

    async def declare(self, unit: common_pb2.UnitSpec) -> coordinator_pb2.DeclareUnitResponse:
        return await self.rpcs.call("DeclareUnit", context=self.context(0), trainer=self.name, unit=unit)

    async def publish(self, unit: str, epoch: int) -> coordinator_pb2.PublishInitialUnitResponse:
        return await self.rpcs.call("PublishInitialUnit", context=self.context(0, epoch), trainer=self.name, unit=unit)

    async def finish(
        self,
        step: int,
        items: Sequence[coordinator_pb2.FinishedItem] | None = None,
        *,
        accept_work: bool = True,
        wait_s: float = 0.0,
        parts: dict[int, int] | None = None,
        allow_gradient_differences: bool = False,
    ) -> coordinator_pb2.FinishWorkResponse:
        """Finishes the given items, by default all of its items. Adds newly leased items to its items."""
        response: coordinator_pb2.FinishWorkResponse = await self.rpcs.call(
            "FinishWork",
            context=self.context(step),
            trainer=self.name,
            items=self.finished(parts) if items is None else items,
            accept_work=accept_work,
            wait_s=wait_s,
            allow_gradient_differences=allow_gradient_differences,
        )
        self.items.update({item.global_rank: item for item in response.work.items})
        self._note(response.work)
        return response

    async def commit(self, step: int, *, wait_s: float = 0.0, **changes: Any) -> coordinator_pb2.CommitStepResponse:
        fields: dict[str, Any] = {"optimizer": optimizer(), "clip_coefficient": 1.0, "item": self._named.get(step)}
        response: coordinator_pb2.CommitStepResponse = await self.rpcs.call(
            "CommitStep", context=self.context(step), trainer=self.name, wait_s=wait_s, **(fields | changes)
        )
        if response.committed:
            self.items = {item.global_rank: item for item in response.next_work.items}
            self._note(response.next_work)
        return response

    async def prepare(
        self, step: int, *, norm_type: float = 0.0, wait_s: float = 5.0, **changes: Any
    ) -> coordinator_pb2.PrepareGradientsResponse:
        return await self.rpcs.call(
            "PrepareGradients",
            context=self.context(step),
            trainer=self.name,
            norm_type=norm_type,
            item=self._named.get(step),
            wait_s=wait_s,
            **changes,
        )

    async def try_reset(
        self, step: int, rank: int, *, request_id: str = "", wait_s: float = 5.0
    ) -> coordinator_pb2.ResetWorkResponse:
        return await self.rpcs.call(
            "ResetWork",
            context=self.context(step, self.items[rank].epoch, request_id),
            trainer=self.name,
            global_rank=rank,
            item_number=self.items[rank].number,
            wait_s=wait_s,
        )

    async def reset(self, step: int, rank: int, *, request_id: str = "") -> coordinator_pb2.WorkItem:
        response = await self.try_reset(step, rank, request_id=request_id)
        self.items[rank] = response.item
        return response.item

    async def heartbeat(self, **fields: Any) -> coordinator_pb2.HeartbeatResponse:
        name = {"run": self.run, "run_id": self.run_id, "trainer": self.name, "epoch": self.epoch}
        return await self.rpcs.call("Heartbeat", **name, **fields)

    async def leave(self, **fields: Any) -> None:
        name = {"run": self.run, "run_id": self.run_id, "trainer": self.name, "epoch": self.epoch}
        await self.rpcs.call("Leave", **name, **fields)


class Rpcs:
    """Calls rpcs of a coordinator by name."""

    async def call(self, rpc_name: str, **fields: Any) -> Any:
        raise NotImplementedError

    async def join(
        self, trainer: str = "", *, run: str = "r", wait_s: float = 0.0, incarnation: str = "", **fields: Any
    ) -> Trainer:
        joined = await self.try_join(trainer, run=run, wait_s=wait_s, incarnation=incarnation, **fields)
        return Trainer(self, joined, run)

    async def try_join(
        self, trainer: str = "", *, run: str = "r", wait_s: float = 0.0, incarnation: str = "", **fields: Any
    ) -> coordinator_pb2.JoinResponse:
        fields.setdefault("config", config(World(dp=2)))
        fields.setdefault("host", "h")
        return await self.call(
            "Join", run=run, trainer=trainer, wait_s=wait_s, incarnation=incarnation or uuid.uuid4().hex, **fields
        )

    async def team(
        self,
        *names: str,
        dp: int | None = None,
        world: World | None = None,
        processes: Mapping[str, str] | None = None,
        **options: Any,
    ) -> list[Trainer]:
        """Joins trainers to a new run and returns them. The run has started.

        Args:
            names: Names of the trainers.
            dp: Size of the data axis. None: one rank per trainer.
            world: The grid, instead of ``dp``.
            processes: Process identities by name.
            options: Options of the run.
        """
        world = world or World(dp=dp or len(names))
        settings = config(world, min_trainers=len(names), **options)
        incarnations = [uuid.uuid4().hex for _ in names]
        for name, incarnation in zip(names, incarnations, strict=True):
            await self.try_join(name, incarnation=incarnation, config=settings, process=(processes or {}).get(name, ""))
        return [
            await self.join(name, incarnation=incarnation, config=settings)
            for name, incarnation in zip(names, incarnations, strict=True)
        ]

    async def team_with_unit(self, *names: str, **options: Any) -> list[Trainer]:
        """As ``team``, with a unit that is published."""
        trainers = await self.team(*names, **options)
        await self.publish_unit(trainers)
        return trainers

    async def publish_unit(self, trainers: Sequence[Trainer], name: str = "u", *shapes: tuple[int, ...]) -> None:
        """Declares a unit in every trainer and publishes it."""
        spec = unit(name, *(shapes or ((64, 64),)))
        spec.cp = trainers[0].cp
        for trainer in trainers:
            declared = await trainer.declare(spec)
            if declared.initialize:
                await trainer.publish(name, declared.epoch)


class Harness(Rpcs):
    """A coordinator that can be restarted, with fake shard servers ``s0``, ``s1`` and so on."""

    def __init__(self, directory: Path, num_shards: int, settings: Settings) -> None:
        self.directory, self.settings, self.clock = directory, settings, Clock()
        self.shards = {f"s{index}": FakeShard() for index in range(num_shards)}
        self.addresses = {name: f"{name}:1" for name in self.shards}
        self._calls = DirectCalls({self.addresses[name]: shard for name, shard in self.shards.items()})
        self.limit_s = 5.0
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        storage = Storage(Database(self.directory))
        self._stack.callback(storage.close)
        self.coordinator = await Coordinator.load(
            self.settings, storage, self._calls, clock=self.clock, wall_clock=lambda: 1e9 + self.clock()
        )
        self.state = self.coordinator.state
        self.servicer = CoordinatorServicer(self.coordinator)
        await self._stack.enter_async_context(self.coordinator.running())

    async def stop(self) -> None:
        self.state.stop()
        await self._stack.aclose()

    async def restart(self) -> None:
        """Replaces the coordinator by a new process with the same stored state."""
        await self.stop()
        await self.start()

    async def restart_all(self) -> None:
        """As ``restart``, and all shard servers register again."""
        await self.restart()
        for name in self.shards:
            await self.register(name)

    async def add_server(self, name: str) -> None:
        """Adds a fake server and registers it."""
        self.addresses[name], self.shards[name] = f"{name}:1", FakeShard()
        self._calls.shards[self.addresses[name]] = self.shards[name]
        await self.register(name)

    async def register(self, name: str, incarnation: str = "1") -> int:
        response = await self.call(
            "RegisterServer",
            server_id=name,
            address=self.addresses[name],
            budget_bytes=self.shards[name].budget_bytes,
            incarnation=incarnation,
        )
        return int(response.epoch)

    def stream(self, rpc_name: str, **fields: Any) -> AsyncIterator[Any]:
        """Calls an rpc that returns a stream. The iterator is closed when its task is cancelled."""
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        request = getattr(coordinator_pb2, service.methods_by_name[rpc_name].input_type.name)(**fields)
        messages: AsyncIterator[Any] = getattr(self.servicer, rpc_name)(request, _Call(self.limit_s))
        return messages

    async def call(self, rpc_name: str, **fields: Any) -> Any:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        request = getattr(coordinator_pb2, service.methods_by_name[rpc_name].input_type.name)(**fields)
        check_names(request)  # as every request of the real server
        return await getattr(self.servicer, rpc_name)(request, _Call(self.limit_s))

    def events(self) -> list[tuple[str, str]]:
        return [(event.kind, event.message) for event in self.state.events.kept()]

    async def pass_time(self, seconds: float, *alive: Trainer) -> None:
        """Advances the clock. Only the trainers in ``alive`` and all servers renew their leases."""
        self.clock.now += seconds
        for trainer in alive:
            await trainer.heartbeat()
        self.state.cluster.renew_all()
        self.coordinator.expire()

    async def settle(self) -> None:
        """Waits until background work is done. Fails if it does not end."""
        await asyncio.sleep(0)  # lets tasks that were just created start
        await self.until(
            lambda: (
                not any(
                    run.commits.pending_updates or run.calls.fencing.in_flight or run.calls.preparing.in_flight
                    for run in self.state.runs.values()
                )
            ),
            "the end of updates, fences and preparations",
        )

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits until a condition is true. Fails with ``what`` after the deadline."""
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for {what}"
            await asyncio.sleep(0.001)


@asynccontextmanager
async def harness(directory: Path, *, num_shards: int = 2, **settings: Any) -> AsyncIterator[Harness]:
    """Runs a coordinator with registered servers."""
    running = Harness(directory, num_shards, Settings(**({"min_shard_bytes": 4096} | settings)))
    with no_background_failures():
        await running.start()
        try:
            for name in running.shards:
                await running.register(name)
            yield running
        finally:
            await running.stop()


@contextmanager
def no_background_failures() -> Iterator[None]:
    """Fails if a background task of the coordinator fails. Such a failure only appears in the log."""
    log, records = logging.getLogger(BackgroundTasks.__module__), SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(records)
    handler.setLevel(logging.ERROR)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    assert records.empty(), records.get().getMessage()


def run_async(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def config(
    world: World,
    *,
    min_trainers: int = 0,
    seed: int = 0,
    num_layers: int = 0,
    consistency: Consistency = SYNCHRONOUS,
) -> coordinator_pb2.RunConfig:
    return coordinator_pb2.RunConfig(
        world=world.to_proto(),
        min_trainers=min_trainers,
        seed=seed,
        num_layers=num_layers,
        **consistency.to_fields(),
    )


def unit(name: str, *shapes: tuple[int, ...], dtype: int = common_pb2.DTYPE_FLOAT32) -> common_pb2.UnitSpec:
    return common_pb2.UnitSpec(
        name=name,
        parameters=[
            common_pb2.ParameterSpec(name=f"{name}.{index}", shape=shape, dtype=dtype)
            for index, shape in enumerate(shapes)
        ],
    )


def optimizer(algorithm: str = "sgd", groups: Sequence[int] = (0,), **changes: float) -> common_pb2.OptimizerStep:
    return common_pb2.OptimizerStep(
        algorithm=algorithm,
        groups=[common_pb2.ParameterGroup(hyperparameters=SGD | changes)],
        units=[common_pb2.UnitGroups(unit_index=0, group_indices=groups)],
    )


def buffers(name: str, *names: str) -> common_pb2.UnitSpec:
    """Returns a unit of buffers with one element each."""
    parameters = [common_pb2.ParameterSpec(name=each, shape=[1], dtype=common_pb2.DTYPE_INT64) for each in names]
    return common_pb2.UnitSpec(name=name, parameters=parameters, kind=common_pb2.UNIT_KIND_BUFFERS)


def finished_item(item: coordinator_pb2.WorkItem, parts: dict[int, int] | None = None) -> coordinator_pb2.FinishedItem:
    return coordinator_pb2.FinishedItem(
        global_rank=item.global_rank,
        epoch=item.epoch,
        attempt=item.attempt,
        copy=item.copy,
        number=item.number,
        units=[
            common_pb2.UnitParts(unit_index=unit_index, part_count=count)
            for unit_index, count in ({0: 1} if parts is None else parts).items()
        ],
    )


def proposers(cluster: Harness) -> set[str]:
    """Returns the trainers that have proposed the step in flight."""
    (step,) = cluster.state.runs["r"].work.steps
    return set(step.proposals)


async def take_step(trainers: list[Trainer], step: int, **changes: Any) -> coordinator_pb2.CommitStepResponse:
    for trainer in trainers:
        await trainer.finish(step)
    responses = [await trainer.commit(step, wait_s=5, **changes) for trainer in trainers]
    assert all(response.committed for response in responses)
    return responses[0]


async def until_lost(cluster: Harness, *names: str) -> None:
    """Expires leases, and returns when the coordinator counts the servers as lost."""
    cluster.coordinator.expire()
    states = cluster.state.cluster.servers
    await cluster.until(lambda: all(states[name].state is ServerState.LOST for name in names), f"the loss of {names}")
