"""A coordinator and shard servers as simulated processes, built from the real cores."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.rpcs.servicer import CoordinatorServicer
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.storage.database import Database
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_server.shard.process.registration import Registration
from shardwell_server.shard.requests.inspection import ServerProcess
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_server.shard.servicer import ShardServicer
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.transports.server_transport import ServerTransports
from shardwell_server.shard.unit.portable_state import export
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2, shard_pb2
from tests.simulation.environment import DISK, running
from tests.simulation.host_memory import HostMemory, SimulatedSharedMemory
from tests.simulation.loop import Process, VirtualLoop

COORDINATOR = "coordinator:1"
COORDINATOR_SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
SHARD_SERVICE = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
LEASE_S = 2.0
DRAIN_S, LONG_DRAIN_S = 3.0, 30.0
"""Grace time of a stop, and that of a server whose shards end with its process. It is longer than any fault."""
BUDGET_BYTES = 64 << 20


class Node:
    """Something that runs as one process at a time, and can be started again.

    Args:
        name: Name of the node.
        loop: The event loop.
    """

    def __init__(self, name: str, loop: VirtualLoop) -> None:
        self.name, self.loop = name, loop
        self.starts = 0
        self.when_failed: Callable[[ShardwellError], None] = lambda error: None
        """Called when the process ends with an error."""
        self.process: Process = None  # type: ignore[assignment]

    def start(self) -> None:
        """Starts the process."""
        self.starts += 1
        process = self.process = Process(self.name, self.loop, self.identity)
        environment, identity = running(), process.identity
        process.when_dead.append(lambda: environment.network.lose(process))
        process.when_dead.append(lambda: environment.ended.add(identity))
        process.start(self._run())

    async def _run(self) -> None:
        try:
            await self.main()
        except ShardwellError as error:
            self.when_failed(error)
        self.process.kill()

    @property
    def identity(self) -> str:
        """Identity of the newest process."""
        return f"simulated/{self.name}/{self.starts}"

    async def main(self) -> None:
        """What the process does."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self.process is not None and not self.process.dead


class CoordinatorNode(Node):
    """The coordinator. Its disk outlives its processes."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__("coordinator", loop)
        self.coordinator: Coordinator | None = None
        self.clock_offset_s = 0.0
        """Error of the wall clock."""

    async def main(self) -> None:
        loop = asyncio.get_running_loop()
        storage, calls = Storage(Database(DISK)), ShardCalls()
        settings = Settings(lease_s=LEASE_S, min_servers=2, min_shard_bytes=4096)
        self.coordinator = await Coordinator.load(
            settings, storage, calls, clock=loop.time, wall_clock=lambda: 1e9 + loop.time() + self.clock_offset_s
        )
        servicer = CoordinatorServicer(self.coordinator)
        async with self.coordinator.running():
            running().network.listen(COORDINATOR, self.process, COORDINATOR_SERVICE, servicer)
            await storage.lost.wait()


class ServerNode(Node):
    """A shard server.

    Args:
        name: Name of the node.
        loop: The event loop.
        host: Shared memory of its host, from which a restarted process takes up shards. None: shards end with their
            process.
    """

    def __init__(self, name: str, loop: VirtualLoop, host: HostMemory | None = None) -> None:
        super().__init__(name, loop)
        self._host = host
        self.address = f"{name}:1"
        running().network.register_name(self.address, name)
        self.store: ShardStore | None = None
        self.incarnation = ""
        self._asked_to_stop = asyncio.Event()

    @property
    def is_restartable(self) -> bool:
        """True if a restarted process takes up the shards of the former one."""
        return self._host is not None

    def lose_host(self) -> None:
        """Ends the process together with the memory of its host."""
        self.process.kill()
        self._host = HostMemory()

    @property
    def is_stopping(self) -> bool:
        """True if the process was asked to stop."""
        return self._asked_to_stop.is_set()

    def ask_to_stop(self) -> None:
        """Stops the process as SIGTERM does: it drains, then ends and leaves the shards that it still has."""
        self._asked_to_stop.set()

    def start(self) -> None:
        self._asked_to_stop = asyncio.Event()
        super().start()
        self.process.when_killed.append(self._keep_memory)

    def _keep_memory(self) -> None:
        self._host = self._host and self._host.copy()

    async def main(self) -> None:
        shared = None if self._host is None else SimulatedSharedMemory(self._host)
        store = self.store = ShardStore(BUDGET_BYTES, ThreadPoolExecutor(2), shared)
        registration = Registration(COORDINATOR, self.name, store)
        self.incarnation = registration.incarnation
        servicer = ShardServicer(
            ServerProcess(self.name, registration.incarnation),
            store,
            registration.term,
            ServerTransports(self.name),
            GrpcPeers(),
        )
        running().network.listen(self.address, self.process, SHARD_SERVICE, servicer)
        async with registration.running(self.address) as task:
            asked = asyncio.ensure_future(self._asked_to_stop.wait())
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            asked.cancel()
            if task.done():
                await task
            await registration.drain(DRAIN_S if self.is_restartable else LONG_DRAIN_S)

    def shards(self) -> list[UnitShard]:
        """Returns the shards that the server holds."""
        return (
            [] if self.store is None else [shard for run in self.store.runs.values() for shard in run.shards.values()]
        )

    def versions(self) -> dict[tuple[str, int], int | None]:
        """Returns the version of each shard, by unit name and first byte."""
        return {(shard.unit, shard.start_bytes): shard.version for shard in self.shards()}

    def states(self) -> list[tuple[UnitShard, dict[str, bytes]]]:
        """Returns the published shards, with the bytes of their values and optimizer state by label."""
        return [
            (shard, {label: tensor.detach().numpy().tobytes() for label, tensor in export(shard).tensors()})
            for shard in self.shards()
            if shard.version is not None
        ]
