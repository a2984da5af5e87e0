"""The shards of other servers that a relay relays: cached versions, and gradients that are added.

Note: [Versions of a cached shard]
    The file has the format of a server's own segments: a head with the version, then the bytes. It is marked as
    changing as soon as the owner sends the next version. Versions only rise: a trainer that is late gets
    VersionGoneError, because readers of a newer version would not notice that the memory had changed in between.

    A version is fetched in a task of its own. A trainer that stops waiting does not end it, since others may wait too.

Note: [Sums at a relay]
    A gradient waits at the relay until those of all ranks of its reduction group are there. The relay adds them in the
    run's order and pushes one sum, which counts for each of the ranks. If a rank does not come, each gradient is pushed
    as it is. Both give the same bits, because the servers add in the same order, so nothing is void.

    A rank does not come if its last transport has ended, if its trainer has said that it skips the step, or if it is
    later than ``PATIENCE_S``. The relay then waits for no gradient of the group in this step any more. After step 0,
    the relay waits only for ranks that it has heard of: a trainer that has just found this relay may still build its
    model, or may have pushed a part of the step to the servers. If a rank is late in ``MAX_MISSED`` consecutive steps,
    the relay waits for it again only after its trainer has opened a transport, or has said which step it skips.

    The relay keeps nothing: it answers a push when the owner of the shard has answered. If the relay dies before, the
    trainer pushes to the owner. The owner refuses the gradient of a rank that it already has in a sum, and the trainer
    starts another attempt at its work item.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import xxhash

from shardwell_server.shard.memory.budget import Grant
from shardwell_server.shard.memory.mapped_memory import ShardFile
from shardwell_server.shard.requests.peers import Owners
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import ContributionMemory
from shardwell_wire import fault_points
from shardwell_wire.encoding import value_deltas
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.streams import InVector, RangePlans, StreamPlan
from shardwell_wire.encoding.wire_dtypes import WireDtype
from shardwell_wire.errors import (
    CorruptDataError,
    DeadlineError,
    InvalidRequestError,
    UnavailableError,
    VersionGoneError,
)
from shardwell_wire.host.shared_memory import UPDATING
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.sum_order import Scratch, SumOrder
from shardwell_wire.v1 import shard_pb2

_ASK_S = 1.0
"""How long an owner waits for a version before it is asked again."""
_PAUSE_S = 0.1
"""Pause before an owner that is unavailable is asked again. Its shard may get another owner meanwhile."""
_MEMORY_WAIT_S = 10.0


class CachedShard:
    """One version of a shard in shared memory. Used on the event loop. See Note: [Versions of a cached shard].

    Args:
        request: Names the shard and the wire dtype, for Gather.
        plan: How the stream of the shard is decoded. None: the values travel as they are stored.
        grant: The memory's grant in the server's budget.
        owners: Reads from the owner of the shard.
    """

    def __init__(
        self,
        run: RunIdentity,
        request: shard_pb2.GatherRequest,
        plan: StreamPlan | None,
        file: ShardFile,
        grant: Grant,
        store: ShardStore,
        owners: Owners,
    ) -> None:
        self._run, self._request, self._plan, self.file, self._grant = run, request, plan, file, grant
        self._store, self._owners = store, owners
        self._what = f"unit {request.unit!r} of run {run.name!r}"
        self._newest = -1
        self._fetch: tuple[int, asyncio.Task[None]] | None = None
        """The version that is being fetched, and the task."""
        self._received: shard_pb2.ReadRelayedResponse | None = None
        """What was received for the version in the file, until a trainer gets this answer."""

    @property
    def wire_dtype(self) -> WireDtype:
        """The dtype in which float32 values travel to the relay."""
        return self._request.wire_dtype

    @property
    def size_bytes(self) -> int:
        """Size of the shard."""
        return self.file.buffer.numel()

    async def read(self, version: int, wait_s: float, *, accepts_deltas: bool) -> shard_pb2.ReadRelayedResponse:
        """Waits until the file shows a version; fetches it if it is missing.

        Args:
            version: The version.
            wait_s: The longest wait. The answer then says that the version is not present.
            accepts_deltas: Whether the owner may send deltas against the version in the file.

        Raises:
            VersionGoneError: The file has a newer version.
            ShardwellError: The error of the owner.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        while self.file.shown != version:
            if self._newest > version:
                raise VersionGoneError(
                    f"version {version} of {self._what} was replaced by a newer one at the relay: the step was "
                    "committed without this trainer",
                    unit=self._request.unit,
                    version=version,
                )
            if self._fetch is None:
                self._fetch = version, asyncio.ensure_future(self._fetch_version(version, accepts_deltas))
            fetched, fetch = self._fetch
            left_s = deadline - asyncio.get_running_loop().time()
            done, _ = await asyncio.wait({fetch}, timeout=max(0.0, left_s))
            if not done or fetch.cancelled():
                return shard_pb2.ReadRelayedResponse()
            error = fetch.exception()
            if error is not None and fetched == version:
                if isinstance(error, DeadlineError | UnavailableError):  # another attempt may succeed
                    return shard_pb2.ReadRelayedResponse()
                raise error
        received, self._received = self._received, None
        return received or shard_pb2.ReadRelayedResponse(present=True)

    def close(self) -> None:
        """Frees the memory. Trainers that have mapped the file keep its last version."""
        if self._fetch is not None:
            self._fetch[1].cancel()
        self.file.shared.unlink()
        self._grant.memory.note_shared(-self._grant.size_bytes)
        self._grant.release()

    async def _fetch_version(self, version: int, accepts_deltas: bool) -> None:
        try:
            await self._receive(version, accepts_deltas)
        except UnavailableError:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self._fetch = None

    async def _receive(self, version: int, accepts_deltas: bool) -> None:
        request = shard_pb2.GatherRequest()
        request.CopyFrom(self._request)
        request.version, request.wait_s = version, _ASK_S

        def begin(place: memoryview) -> memoryview:
            self._received = None
            self._newest = max(self._newest, version)
            self.file.show(UPDATING)
            fault_points.reach("relay.fetch.middle", unit=request.unit)
            return place

        if self._plan is None:
            received_bytes = await self._owners.gather(self._run, request, lambda _: begin(self._in_file()))
            self._received = shard_pb2.ReadRelayedResponse(present=True, received_bytes=received_bytes)
        else:
            self._received = await self._receive_encoded(self._plan, request, begin, accepts_deltas)
        self.file.show(version)

    def _in_file(self) -> memoryview:
        return memory_at(self.file.buffer.data_ptr(), self.size_bytes, self.file.buffer)

    async def _receive_encoded(
        self,
        plan: StreamPlan,
        request: shard_pb2.GatherRequest,
        begin: Callable[[memoryview], memoryview],
        accepts_deltas: bool,
    ) -> shard_pb2.ReadRelayedResponse:
        """Receives a stream, or deltas against the version in the file, and decodes the stream into the file."""
        memory, former, start = self._store.memory, self.file.shown, request.start_bytes
        values = InVector(self._in_file(), start)
        takes_deltas = accepts_deltas and self.wire_dtype in value_deltas.WIRE_DTYPES
        buffer = await memory.acquire(plan.size_bytes, _MEMORY_WAIT_S, f"{self._what}, to receive it")
        stream, deltas = memory_at(buffer.data_ptr(), plan.size_bytes, buffer), None
        announced = shard_pb2.StreamDeltas()

        def place(header: shard_pb2.GatherHeader) -> memoryview:
            nonlocal deltas
            announced.CopyFrom(header.deltas)
            size_bytes = sum(announced.sizes_bytes)
            if not size_bytes:
                return begin(stream)
            if size_bytes >= plan.size_bytes or not request.base.HasField("version"):
                raise CorruptDataError(f"{self._what}: the owner announces deltas of {size_bytes} bytes")
            deltas = bytearray(size_bytes)
            return begin(memoryview(deltas))

        try:
            if takes_deltas:
                request.base.SetInParent()
                if former != UPDATING:  # encoding decoded values again gives the same stream
                    await self._store.memory.in_thread(lambda: plan.encode(values, stream))
                    request.base.version, request.base.checksum = former, xxhash.xxh3_64_intdigest(stream)
            received_bytes = await self._owners.gather(self._run, request, place)

            def decode() -> None:
                if deltas is not None:
                    value_deltas.apply_all(announced, memoryview(deltas), stream, self._what)
                plan.decode(stream, values)

            await self._store.memory.in_thread(decode)
        finally:
            memory.release_buffer(buffer)
        stream_bytes = plan.size_bytes if takes_deltas else 0
        return shard_pb2.ReadRelayedResponse(present=True, received_bytes=received_bytes, stream_bytes=stream_bytes)


logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Longest wait for the other ranks of a group."""

MAX_MISSED = 3
"""Consecutive steps in which a rank did not come, after which the relay does not wait for its group."""

_SLICE_NUMEL = 1 << 17
"""Elements that are added together, while they are in the cache."""
_LEAST_ITEM_BYTES = 4
"""Servers add 16-bit gradients in float32 and round once, so their sums are not made here."""

Key = tuple[str, int, int, int, tuple[int, ...]]
"""Unit, first byte of the shard, step, attempt, and the ranks of the group."""


class RelayedShard:
    """A shard of a server, as far as its gradients are relayed. What a shared gradient buffer needs of a shard.

    Args:
        start_bytes: First byte of the shard in the flat vector.
        stop_bytes: End of the shard.
    """

    def __init__(
        self, run: RunIdentity, layout: UnitLayout, start_bytes: int, stop_bytes: int, order: SumOrder
    ) -> None:
        self.layout, self.start_bytes, self.stop_bytes, self.order = layout, start_bytes, stop_bytes, order
        self.size_bytes = stop_bytes - start_bytes
        self.what = f"unit {layout.unit!r} of run {run.name!r}, bytes [{start_bytes}, {stop_bytes})"
        self.plans = RangePlans(layout, start_bytes, stop_bytes)

    def views(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """See ``UnitShard.views``. A relay needs none."""
        return ()

    def pieces(self, memory: torch.Tensor, indices: tuple[int, ...]) -> list[memoryview]:
        """Returns the gradients of some parameters in memory that is laid out like the shard."""
        view, start = memory_at(memory.data_ptr(), self.size_bytes, memory), self.start_bytes
        return [view[at.start_bytes - start : at.stop_bytes - start] for at in self.plans.segments(indices)]

    def check(self, header: shard_pb2.ReduceScatterHeader) -> None:
        """Raises InvalidRequestError if a push does not fit the shard."""
        indices, count = list(header.parameter_indices), len(self.layout.parameters)
        if (header.start_bytes, header.stop_bytes) != (self.start_bytes, self.stop_bytes):
            raise InvalidRequestError(f"{self.what}: the push is for [{header.start_bytes}, {header.stop_bytes})")
        if indices != sorted(set(indices)) or (indices and indices[-1] >= count):
            raise InvalidRequestError(
                f"{self.what}: parameter_indices are {indices[:10]}, expected strictly rising numbers below {count}"
            )
        if header.wire_dtype or header.summed:
            raise InvalidRequestError(f"{self.what}: a relay adds gradients as stored, of one rank each")


@dataclass(eq=False, slots=True)
class RelayedGradient:
    """A gradient that a trainer has left in a shared gradient buffer."""

    header: shard_pb2.ReduceScatterHeader
    shard: RelayedShard
    buffer: ContributionMemory
    pushed: asyncio.Future[shard_pb2.ReduceGradientBufferResponse] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The answer for the trainer."""


class _Missed(NamedTuple):
    """Ranks of a group that were late."""

    step: int
    """The last step in which they were."""
    step_count: int
    """Number of such steps in a row."""
    ranks: set[int]
    """The ranks that were late in the last step."""


class RelayedSums:
    """The gradients of one run that wait at this relay. Used on the event loop. See Note: [Sums at a relay].

    Args:
        owners: Pushes to the owners of shards.
    """

    def __init__(self, run: RunIdentity, store: ShardStore, owners: Owners) -> None:
        self._run, self._store, self._owners = run, store, owners
        self._present: dict[int, int] = {}
        """Number of transports by rank whose gradients come. 0: the last one has ended."""
        self._heard = set[int]()
        """Ranks that have pushed a gradient, or have skipped a step, since their first transport was opened."""
        self._waiting: dict[Key, dict[int, RelayedGradient]] = {}
        self._separate: dict[tuple[int, ...], int] = {}
        """The last step in which no sum is made, by group."""
        self._missed: dict[tuple[int, ...], _Missed] = {}
        """Ranks that did not come, by group."""
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self, rank: int) -> None:
        """Called when a transport opens over which the gradients of a rank come."""
        self._present[rank] = self._present.get(rank, 0) + 1

    def leave(self, rank: int) -> None:
        """Called when such a transport has ended."""
        self._present[rank] -= 1
        if not self._present[rank]:
            self._heard.discard(rank)
            self._push_alone([key for key in self._waiting if rank in key[-1]])

    def skip(self, group: tuple[int, ...], step: int, rank: int | None = None) -> None:
        """Makes no sum of a group until the end of a step. ``rank``: the rank whose trainer says so."""
        if rank is not None:
            self._heard.add(rank)
            for late in [late for late, missed in self._missed.items() if rank in missed.ranks]:
                del self._missed[late]
        self._separate[group] = max(step, self._separate.get(group, -1))
        self._push_alone([key for key in self._waiting if key[-1] == group and key[2] <= step])

    async def push(self, gradient: RelayedGradient, group: tuple[int, ...]) -> shard_pb2.ReduceGradientBufferResponse:
        """Pushes a gradient, or the sum of its group; returns the answer for the trainer.

        Args:
            group: The ranks of its group, in ascending order.

        Raises:
            ShardwellError: The error of the owner.
        """
        header, shard = gradient.header, gradient.shard
        shard.check(header)
        step, rank = header.context.step, header.dp_rank
        key = header.unit, shard.start_bytes, step, header.attempt, group
        if rank in group and rank not in self._heard:
            self.skip(group, step if step > 0 else -1, rank)  # others may have pushed without it in this step
        waiting = self._waiting.get(key, {})
        if not self._may_sum(shard, header, group) or rank in waiting:
            return await self._push_one(gradient)
        self._waiting[key] = waiting
        waiting[rank] = gradient
        if len(waiting) == len(group):
            del self._waiting[key]
            self._start(self._push_sum(shard, waiting))
        patience = asyncio.get_running_loop().call_later(PATIENCE_S, self._lose_patience, key, gradient)
        try:
            return await asyncio.shield(gradient.pushed)
        finally:
            patience.cancel()
            if self._waiting.get(key, {}).get(rank) is gradient:  # the trainer waits no longer
                del self._waiting[key][rank]
                if not self._waiting[key]:
                    del self._waiting[key]

    def close(self) -> None:
        """Ends the pushes in progress: no trainer is left."""
        for task in self._tasks:
            task.cancel()

    def _may_sum(self, shard: RelayedShard, header: shard_pb2.ReduceScatterHeader, group: tuple[int, ...]) -> bool:
        if header.dp_rank not in group or len(group) < 2 or not shard.order.is_group(group):
            return False
        if header.part or header.dropped_indices or header.copy or not header.parameter_indices:
            return False
        parameters = shard.layout.parameters
        if any(parameters[index].item_size < _LEAST_ITEM_BYTES for index in header.parameter_indices):
            return False
        step, missed = header.context.step, self._missed.get(group)
        if any(self._present.get(rank) == 0 or (step > 0 and rank not in self._heard) for rank in group):
            return False
        return self._separate.get(group, -1) < step and (missed is None or missed.step_count < MAX_MISSED)

    def _lose_patience(self, key: Key, gradient: RelayedGradient) -> None:
        if self._waiting.get(key, {}).get(gradient.header.dp_rank) is not gradient:
            return
        group, step = key[-1], key[2]
        ranks = {rank for rank in group if rank not in self._waiting[key]}
        last = self._missed.get(group)
        count = last.step_count + 1 if last is not None and last.step == step - 1 else 1
        self._missed[group] = _Missed(step, count, ranks)
        if count == MAX_MISSED:
            logger.warning(
                "ranks %s of run %r: ranks %s did not push their gradients through this relay in %d consecutive steps; "
                "all of them are pushed to the servers one by one until a trainer of these ranks joins the run again",
                list(group),
                self._run.name,
                sorted(ranks),
                MAX_MISSED,
            )
        self.skip(group, step)

    def _push_alone(self, keys: list[Key]) -> None:
        """Stops waiting for the other ranks of some gradients."""
        for key in keys:
            for gradient in self._waiting.pop(key).values():
                self._start(self._answer_one(gradient))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_one(self, gradient: RelayedGradient) -> None:
        try:
            _answer(gradient, await self._push_one(gradient))
        except BaseException as error:
            _fail(gradient, error)

    async def _push_one(self, gradient: RelayedGradient) -> shard_pb2.ReduceGradientBufferResponse:
        """Pushes a gradient as it is."""
        indices = tuple(gradient.header.parameter_indices)
        pieces = gradient.shard.pieces(gradient.buffer.buffer, indices)
        answer = await self._owners.push(self._run, gradient.header, pieces)
        size_bytes = sum(map(len, pieces))
        return shard_pb2.ReduceGradientBufferResponse(
            duplicate=answer.duplicate, version=answer.version, pushed_bytes=size_bytes
        )

    async def _push_sum(self, shard: RelayedShard, gradients: dict[int, RelayedGradient]) -> None:
        """Adds the gradients of all ranks of a group, pushes the sum, and answers all ranks."""
        try:
            in_order = [gradients[rank] for rank in sorted(gradients)]
            header = shard_pb2.ReduceScatterHeader()
            header.CopyFrom(in_order[0].header)
            if header.context.request_id:  # the trainer may push its own gradient under this id
                header.context.request_id += ".sum"
            indices = tuple(sorted({index for each in in_order for index in each.header.parameter_indices}))
            header.parameter_indices[:] = indices
            for each in in_order:
                own, context = each.header, each.header.context
                header.summed.add(dp_rank=own.dp_rank, epoch=context.epoch, lease_proof=context.lease_proof)
            buffer = await self._store.memory.acquire(shard.size_bytes, _MEMORY_WAIT_S, f"{shard.what}, a sum")
            try:
                await self._store.memory.in_thread(lambda: _compute_sum(shard, in_order, indices, buffer))
                fault_points.reach("relay.sum.before", unit=header.unit)
                pieces = shard.pieces(buffer, indices)
                answer = await self._owners.push(self._run, header, pieces)
                fault_points.reach("relay.sum.after", unit=header.unit)
            finally:
                self._store.memory.release_buffer(buffer)
            pushed_bytes, turn = sum(map(len, pieces)), zlib.crc32(f"{header.unit} {shard.start_bytes}".encode())
            counted = in_order[turn % len(in_order)].header.dp_rank  # each rank counts some of the shards
            for rank, gradient in gradients.items():
                response = shard_pb2.ReduceGradientBufferResponse(
                    duplicate=answer.duplicate,
                    version=answer.version,
                    summed_dp_ranks=sorted(gradients),
                    pushed_bytes=pushed_bytes if rank == counted else 0,
                )
                _answer(gradient, response)
        except BaseException as error:
            for gradient in gradients.values():
                _fail(gradient, error)


def _answer(gradient: RelayedGradient, response: shard_pb2.ReduceGradientBufferResponse) -> None:
    if not gradient.pushed.done():
        gradient.pushed.set_result(response)


def _fail(gradient: RelayedGradient, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        gradient.pushed.cancel()
    elif not gradient.pushed.done():
        gradient.pushed.set_exception(error)
        gradient.pushed.exception()  # its trainer may be gone


def _compute_sum(
    shard: RelayedShard, gradients: list[RelayedGradient], indices: tuple[int, ...], out: torch.Tensor
) -> None:
    """Adds gradients in the run's order into memory laid out like the shard."""
    scratch = Scratch()
    for segment in shard.plans.segments(indices):
        here = slice(segment.start_bytes - shard.start_bytes, segment.stop_bytes - shard.start_bytes)
        dtype = getattr(torch, shard.layout.parameters[segment.parameter_index].dtype)
        terms = [
            (each.header.dp_rank, each.buffer.buffer[here].view(dtype))
            for each in gradients
            if segment.parameter_index in each.header.parameter_indices
        ]
        total = out[here].view(dtype)
        for start in range(0, total.numel(), _SLICE_NUMEL):
            part = slice(start, start + _SLICE_NUMEL)
            added = shard.order.add([(rank, term[part]) for rank, term in terms], total[part], scratch)
            if len(terms) == 1:
                total[part].copy_(added)
