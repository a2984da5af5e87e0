"""Settings of a coordinator and of a run.

Signals, shared calls and background tasks for one asyncio event loop. Not thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.errors import InvalidRequestError, RunMismatchError, WorldError
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World, checked_groups
from shardwell_wire.v1 import coordinator_pb2

MAX_LAYERS = 1 << 16

MAX_BACKUPS = 4
"""Most backups of a shard."""

MAX_RUNS = 4096
"""Most runs that exist at once."""

MAX_UNITS = 1 << 16
"""Most units of a run."""

MAX_GROUP_MEMBERS = 1 << 20
"""Most group members listed for one trainer's ranks. A longer list does not fit a message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a coordinator."""

    lease_s: float = 10.0
    """Lease of a trainer or shard server in seconds. The lease expires after this much silence."""
    min_servers: int = 1
    """Live shard servers required before the first unit of a run is placed."""
    min_shard_bytes: int = 2 << 20
    """Smallest shard in bytes into which a unit is cut. Each shard has requests of its own in every step, which take a
    trainer and a server longer than the bytes of a smaller shard on one host or a fast network."""
    checkpoint_roots: CheckpointRoots = field(default_factory=CheckpointRoots)
    """The folders below which checkpoints are opened."""
    restart_wait_s: float = 20.0
    """Seconds that a run with a checkpoint waits for the restart of a server that has left its only copies of shards,
    before it goes back to the checkpoint. A run without a checkpoint waits without a limit."""
    insecure: str = ""
    """What the coordinator lacks although it listens on a network, for ``shardwell servers``. Empty: nothing."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s={self.lease_s!r}: expected 0.1 to 3600 seconds")
        if not self.restart_wait_s >= 0:
            raise ValueError(f"restart_wait_s={self.restart_wait_s!r}: expected at least 0 seconds")
        if self.min_servers < 1:
            raise ValueError(f"min_servers={self.min_servers!r}: expected at least 1")
        if self.min_shard_bytes < 1:
            raise ValueError(f"min_shard_bytes={self.min_shard_bytes!r}: expected at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """Settings of a run. They are fixed when the run is created, except ``backups``."""

    world: World
    seed: int
    min_trainers: int
    """Trainers that must join before the first step. At least 1."""
    num_layers: int
    """Number of layers of the model. 0: unknown."""
    backups: int = 0
    """Copies of every shard that other servers keep. May change while the run exists."""
    reduction_groups: tuple[int, ...] = ()
    """The order in which gradients are added; see Note: [Reduction groups] in ``sum_order.py``."""
    consistency: Consistency = SYNCHRONOUS
    """When gradients are applied."""

    @classmethod
    def from_proto(cls, config: coordinator_pb2.RunConfig, *, world_size: int) -> RunSettings:
        """Decodes and checks the settings that a trainer asks for.

        Args:
            config: The settings in the request.
            world_size: Number of trainers that the launcher started. 0: unknown.

        Raises:
            WorldError: The world is invalid, or does not fit the number of trainers or layers, or the reduction groups.
        """
        world = World.from_proto(config.world)
        world.check_fits(world_size=world_size)
        check_layers(world, config.num_layers)
        min_trainers = config.min_trainers or world.size
        if min_trainers > world.size:
            raise WorldError(f"min_trainers={min_trainers}: expected 1 to {world.size}, the size of {world}")
        if min_trainers % world.replica_size:
            raise WorldError(
                f"min_trainers={min_trainers}: {world} needs a multiple of {world.replica_size} trainers, because "
                f"tp * pp = {world.replica_size} of them compute one dp rank together"
            )
        ranks_per_trainer = -(-world.size // min_trainers)
        group_members = ranks_per_trainer * (world.dp + world.tp + world.pp)
        if group_members > MAX_GROUP_MEMBERS:
            raise WorldError(
                f"{world} with min_trainers={min_trainers} gives one trainer {ranks_per_trainer} ranks "
                f"with {group_members} group members, more than the limit of {MAX_GROUP_MEMBERS}: raise min_trainers"
            )
        check_backups(config.backups)
        consistency = Consistency.from_proto(config)
        if consistency.asynchronous:
            _check_asynchronous(consistency, world, config)
        return cls(
            world=world,
            seed=config.seed,
            min_trainers=min_trainers,
            num_layers=config.num_layers,
            backups=config.backups,
            reduction_groups=checked_groups(world.dp, config.reduction_groups),
            consistency=consistency,
        )

    def to_proto(self) -> coordinator_pb2.RunConfig:
        return coordinator_pb2.RunConfig(
            world=self.world.to_proto(),
            seed=self.seed,
            min_trainers=self.min_trainers,
            num_layers=self.num_layers,
            backups=self.backups or None,
            reduction_groups=self.reduction_groups,
            **self.consistency.to_fields(),
        )

    def require_same(self, run: str, requested: RunSettings) -> None:
        """Raises RunMismatchError if a trainer requests other settings than the run has."""
        for name in ("world", "seed", "min_trainers", "num_layers", "reduction_groups", "consistency"):
            ours, theirs = getattr(self, name), getattr(requested, name)
            if ours != theirs and not (name == "num_layers" and 0 in (ours, theirs)):
                raise RunMismatchError(
                    f"run {run!r} has {name}={ours}, but this trainer asks for {name}={theirs}: "
                    "use the value of the run, or another run name",
                    run=run,
                    name=name,
                    expected=ours,
                    actual=theirs,
                )


def _check_asynchronous(consistency: Consistency, world: World, config: coordinator_pb2.RunConfig) -> None:
    """Raises InvalidRequestError if a run has a setting that only synchronous runs can have."""
    for reason, what in (
        (world.replica_size > 1, f"{world}, but needs tp=1 and pp=1"),
        (
            config.reduction_groups,
            f"reduction_groups={tuple(config.reduction_groups)}, but the gradient of each rank is applied by itself",
        ),
    ):
        if reason:
            raise InvalidRequestError(f"consistency={consistency}: the run has {what} in this mode. Use SYNCHRONOUS")


def check_backups(backups: int) -> None:
    """Raises InvalidRequestError if a run cannot have this number of backups."""
    if backups > MAX_BACKUPS:
        raise InvalidRequestError(f"backups={backups}: expected 0 to {MAX_BACKUPS}")


def check_layers(world: World, num_layers: int) -> None:
    """Raises WorldError if the layers cannot be split over the pipeline stages of a world. 0: unknown, not checked."""
    if num_layers > MAX_LAYERS:
        raise WorldError(f"num_layers={num_layers}: expected at most {MAX_LAYERS}")
    world.check_fits(num_layers=num_layers)


logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Signal:
    """Wakes all waiters when some state changes. Each waiter then checks its own condition."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all waiters."""
        self._event.set()
        self._event = asyncio.Event()

    def next_change(self) -> asyncio.Event:
        """Returns an event that is set by the next ``notify``.

        Take the event before checking the condition: a change that happens during the check then sets the event.
        """
        return self._event

    async def wait(self, timeout_s: float | None = None) -> None:
        """Returns at the next ``notify``, or after ``timeout_s``."""
        # asyncio.wait_for of Python 3.11 loses a cancellation that comes together with ``notify``.
        event = self._event
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return


class SharedCall(Generic[Result]):
    """Runs at most one call at a time. Concurrent callers share its result or exception.

    Cancelling one caller does not cancel the call.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[Result] | None = None

    @property
    def in_flight(self) -> bool:
        """True while a call is running."""
        return self._task is not None and not self._task.done()

    async def __call__(self, start: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Awaits the running call, or starts ``start()`` if no call is running."""
        return await asyncio.shield(self.start(start))

    def start(self, start: Callable[[], Coroutine[Any, Any, Result]]) -> asyncio.Task[Result]:
        """Starts ``start()`` in the background if no call is running. Returns the running call."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(start())
            self._task.add_done_callback(_retrieve_exception)
        return self._task

    def cancel(self) -> None:
        """Cancels the call in flight, if there is one."""
        if self._task is not None:
            self._task.cancel()


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Marks the exception as retrieved. asyncio would warn if all waiters were cancelled before the task failed."""
    if not task.cancelled():
        task.exception()


class BackgroundTasks:
    """Tasks that run until ``close``. A failure is logged and does not affect the other tasks.

    (``asyncio.TaskGroup`` would cancel all tasks when one fails.)
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task. After ``close``, the work is dropped, as if the process had been killed before it.

        No caller relies on the work then: its process is about to end, and what must happen nevertheless is durable
        before a task is started.
        """
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task failed", exc_info=error)

    async def close(self) -> None:
        """Cancels every task and waits until all have ended."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def poll(changed: Signal, check: Callable[[], Awaitable[Result | None]], wait_s: float) -> Result | None:
    """Calls ``check`` now and after every change until it returns a result.

    Args:
        changed: Signal that is notified when the outcome of ``check`` may have changed.
        check: Returns the result, or None if there is none yet. It is cancelled when ``wait_s`` is over.
        wait_s: Longest time to wait in seconds. 0: check once.

    Returns:
        The result, or None if there was none within ``wait_s``.
    """
    try:
        async with asyncio.timeout(wait_s) as limit:
            while True:
                change = changed.next_change()
                if (result := await check()) is not None:
                    return result
                await change.wait()
    except TimeoutError:
        if not limit.expired():
            raise  # raised by ``check`` itself
        return None
