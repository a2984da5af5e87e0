"""Measures what a step of many units costs one shard server: ``python -m benchmarks.server_steps``.

One process plays the server, its trainers and the coordinator's requests. The times are those of the server's work for
``ReduceBatch`` over the ``shm`` transport, for the reductions, ``PrepareStep`` and ``Update``. They do not contain the
transfer of messages. The shards can be taken up by another process of the server, as in a cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.report import summarize, to_table
from benchmarks.server_optimizer import to_step
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.requests import steps
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_server.shard.requests.replication import Replicator
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.transports import batch_requests
from shardwell_server.shard.transports.server_transport import ServerTransports
from shardwell_server.shard.transports.shm_transport import ShmSession, ShmTransport
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner
from shardwell_wire.host.shared_memory import session_name
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.optimizers import OPTIMIZERS
from shardwell_wire.v1 import common_pb2, shard_pb2

RUN = RunIdentity("benchmark", "0123456789abcdef")
OWNER = FolderOwner(server_id=f"benchmark-{os.getpid()}", coordinator="none")
SMALL = (Parameter("weight", (64, 64), "float32"), Parameter("bias", (64,), "float32"))
"""Units are ``Linear(64, 64)``."""
BATCH = 32
"""Parts of a ``ReduceBatch``."""


@dataclass
class Times:
    """CPU milliseconds per step, by activity."""

    push: list[float] = field(default_factory=list)
    """All ranks together."""
    reduce: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)


class Server:
    """A shard server without rpcs, with one run.

    Args:
        store: The server's shards.
        unit_count: Number of units.
        dp: Number of data ranks.
        algorithm: The optimizer.
        parameters: Parameters of each unit.
    """

    def __init__(
        self, store: ShardStore, unit_count: int, dp: int, algorithm: str, parameters: Sequence[Parameter]
    ) -> None:
        self._store, self._dp = store, dp
        self._offered = ServerTransports("benchmark")
        self._replicator = Replicator(store, GrpcPeers())
        self._optimizer = to_step(algorithm)
        self._layouts = [UnitLayout(f"unit{number}", tuple(parameters)) for number in range(unit_count)]
        del self._optimizer.units[:]
        for number in range(unit_count):
            self._optimizer.units.add(unit_index=number, group_indices=[0] * len(parameters))

    @property
    def _run(self) -> HostedRun:
        return self._store.runs[RUN.run_id]

    async def begin(self, shared: SharedMemory, stack: AsyncExitStack) -> None:
        """Publishes the initial values, and opens a session and gradient buffers for each rank.

        Args:
            shared: The server's shared memory.
            stack: Closes the sessions.
        """
        for index, layout in enumerate(self._layouts):
            size_bytes = layout.size_bytes
            spec = ShardSpec(run=RUN, layout=layout, index=index, start_bytes=0, stop_bytes=size_bytes, dp=self._dp)
            shard = self._store.reserve(spec)
            room = self._store.memory.incoming(size_bytes, shard.initial_quota, wait_s=1.0, what=shard.what)
            with await room as received:
                received.buffer.view(torch.float32).normal_()
                shard.values.accept_initial(0, received)
            self._run.publish(layout.unit, 0)
        self._offered.add(shm := ShmTransport(shared, self._store.memory))
        self._batches = []
        for rank in range(self._dp):
            opened = await stack.enter_async_context(shm.open(RUN, None))
            name = session_name(opened.transport_id, (shared.folder / opened.shm.file).read_bytes())
            self._batches += self._make_batches(rank, name, shm.session(name, RUN))

    def _make_batches(self, rank: int, name: str, session: ShmSession) -> list[shard_pb2.ReduceBatchRequest]:
        common = shard_pb2.ReduceScatterHeader(
            context=common_pb2.RequestContext(run=RUN.name, run_id=RUN.run_id), dp_rank=rank
        )
        batches = []
        for number, shard in enumerate(self._run.published):
            if number % BATCH == 0:
                batches.append(
                    shard_pb2.ReduceBatchRequest(run=RUN.name, run_id=RUN.run_id, transport_id=name, common=common)
                )
            buffer_id, buffer = session.open_gradient_buffer(shard, shard.gradient.quota)
            buffer.buffer.view(torch.float32).normal_()
            header = shard_pb2.ReduceScatterHeader(
                unit=shard.unit,
                parameter_indices=range(len(shard.layout.parameters)),
                start_bytes=shard.start_bytes,
                stop_bytes=shard.stop_bytes,
            )
            batches[-1].parts.add(header=header, gradient_buffer_id=buffer_id)
        return batches

    async def _push(self, batches: Sequence[shard_pb2.ReduceBatchRequest]) -> None:
        for batch in batches:
            response = await batch_requests.reduce_batch(self._store, self._offered, batch, 10.0, "benchmark")
            assert all(result.adopted for result in response.results), response

    async def step(self, step: int, times: Times) -> None:
        """Runs one step."""

        # The mean is measured by itself: a push would start it in the background.
        async def reduce() -> None:
            while self._run.complete:
                await asyncio.sleep(0)

        batches = [shard_pb2.ReduceBatchRequest.FromString(batch.SerializeToString()) for batch in self._batches]
        for batch in batches:
            batch.common.context.step = step
        context = common_pb2.RequestContext(step=step)
        parts = [common_pb2.UnitParts(unit_index=index, part_count=1) for index in range(len(self._layouts))]
        ranks = [shard_pb2.RankManifest(dp_rank=rank, units=parts) for rank in range(self._dp)]
        prepare = shard_pb2.PrepareStepRequest(context=context, ranks=ranks, dp=self._dp, optimizer=self._optimizer)
        update = shard_pb2.UpdateRequest(context=context, optimizer=self._optimizer, clip_coefficient=1.0)
        times.push.append(await _cpu_ms(lambda: self._push(batches)))
        times.reduce.append(await _cpu_ms(reduce))
        run = self._run

        async def prepare_step() -> None:
            async with run.exclusively():
                await steps.prepare(run, prepare, self._replicator)

        async def update_step() -> None:
            async with run.exclusively():
                await steps.update(run, update)

        times.prepare.append(await _cpu_ms(prepare_step))
        times.update.append(await _cpu_ms(update_step))


async def _cpu_ms(work: Callable[[], Awaitable[object]]) -> float:
    started = time.process_time()
    await work()
    return (time.process_time() - started) * 1e3


def block(width: int) -> list[Parameter]:
    """Returns the parameters of a transformer block with an MLP of four times its width."""
    shapes = {
        "attention_norm": (width,),
        "qkv": (3 * width, width),
        "projection": (width, width),
        "mlp_norm": (width,),
        "mlp.0": (4 * width, width),
        "mlp.2": (width, 4 * width),
    }
    names = [
        (f"{name}.{kind}", shape[:1] if kind == "bias" else shape)
        for name, shape in shapes.items()
        for kind in ("weight", "bias")
    ]
    return [Parameter(name, shape, "float32") for name, shape in names]


async def measure(server: Server, shared: SharedMemory, step_count: int) -> Times:
    """Returns the times of steps after a few that allocate memory."""
    times = Times()
    async with AsyncExitStack() as stack:
        await server.begin(shared, stack)
        for step in range(5):
            await server.step(step, Times())
        gc.collect()
        for step in range(5, 5 + step_count):
            await server.step(step, times)
    return times


def main(argv: Sequence[str] | None = None) -> None:
    """Prints CPU milliseconds per step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--optimizers", nargs="+", choices=sorted(OPTIMIZERS), default=["sgd", "adamw"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, help="units are transformer blocks of this width, not Linear(64, 64)")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    parameters = SMALL if options.width is None else block(options.width)
    size_bytes = UnitLayout("unit", tuple(parameters)).size_bytes
    rows = []
    for unit_count in options.units:
        for dp in options.dp:
            for algorithm in options.optimizers:
                with (
                    ThreadPoolExecutor(1) as threads,
                    TemporaryDirectory(dir=DEFAULT_DIRECTORY) as directory,  # each server starts without shards
                    closing(SharedMemory(Path(directory), OWNER)) as shared,
                ):
                    store = ShardStore((1 << 30) + 40 * unit_count * size_bytes, threads, shared)
                    server = Server(store, unit_count, dp, algorithm, parameters)
                    times = asyncio.run(measure(server, shared, options.steps))
                medians = [summarize(found).median for found in (times.push, times.reduce, times.prepare, times.update)]
                per_unit = sum(medians) / unit_count * 1e3
                rows.append([unit_count, dp, algorithm, *(f"{each:.2f}" for each in medians), f"{per_unit:.0f}"])
    head = ["units", "ranks", "optimizer", "push, ms", "reduce, ms", "prepare, ms", "update, ms", "us per unit"]
    print(to_table(head, [list(map(str, row)) for row in rows]))


if __name__ == "__main__":
    main()
