"""Decides which pushed gradients become contributions, and receives them."""

from __future__ import annotations

from functools import cached_property, partial

from shardwell_server.shard.memory.budget import IncomingBuffer
from shardwell_server.shard.requests.client_streams import IncomingStream, ReceivedStream
from shardwell_server.shard.state.runs import HostedRun, reduce_shards
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.contributions import ContributionMemory, Contributions
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire import fault_points
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.encoding.streams import StreamPlan
from shardwell_wire.encoding.wire_dtypes import check_wire_dtype
from shardwell_wire.errors import InvalidRequestError, StaleEpochError, StepStateError, VersionGoneError
from shardwell_wire.v1 import shard_pb2


class Push:
    """One part of a contribution that a trainer pushes to one shard. Used on the event loop.

    Args:
        run: Run that the push belongs to.
        shard: Shard that the push belongs to.
        header: The push's header.

    Raises:
        InvalidRequestError: Trainers of the pipeline rank do not hold the unit.
    """

    def __init__(
        self, store: ShardStore, run: HostedRun, shard: UnitShard, header: shard_pb2.ReduceScatterHeader
    ) -> None:
        self._store, self._run, self._shard, self._header = store, run, shard, header
        self._step, self._epoch = header.context.step, header.context.epoch
        self._dp_rank, self._attempt, self._part = header.dp_rank, header.attempt, header.part
        self._epochs = {each.dp_rank: each.epoch for each in header.summed} or {self._dp_rank: self._epoch}
        """Epochs of the ranks whose gradients the push contains, by rank."""
        self._contributor = self._contributor_of(self._dp_rank)

    @cached_property
    def _what(self) -> str:
        """Names the push in errors."""
        shard, who = self._shard, self._shard.spec.name_of(self._contributor)
        return f"gradient of {shard.what}, {who}, attempt {self._attempt}, part {self._part}"

    async def receive(self, incoming: IncomingStream, wait_s: float) -> bool:
        """Receives the gradient from a stream; returns True if the part had been accepted before.

        A stream that is broken, rejected or replaced by a newer stream has no effect.

        Args:
            wait_s: Seconds to wait for an update that is due, and for memory.

        Raises:
            InvalidRequestError: The push does not fit the shard, or the stream is broken.
            StaleEpochError: The lease or attempt is over, or a newer stream replaced this one.
            VersionGoneError: The step is committed.
            StepStateError: The step is prepared or has not begun, or an earlier part is missing.
            CapacityError: No memory became free in time; for a copy of a work item, no memory is free.
        """
        self._check_header()
        await self.await_due_update(wait_s)
        self._check_current()
        if self._is_duplicate():
            # Only the checksum is needed. A differing checksum shows that the computation is not reproducible.
            self._count_duplicate(await incoming.checksum(self._plan().size_bytes, self._what))
            return True
        shard, what = self._shard, self._what
        async with shard.streams.replace(self._contributor, (self._epoch, self._attempt), what):
            # The rank's earlier contribution stays until this stream is complete; then one of the two is dropped.
            with await self._acquire(wait_s) as received:
                checksum = await self._receive(incoming, received)
                async with self._run.exclusively():
                    return await self.accept(received, checksum)

    async def adopt(self, source: ContributionMemory, wait_s: float) -> bool:
        """Makes memory that a trainer wrote a contribution without a copy; returns as ``receive`` does.

        Args:
            wait_s: Seconds to wait for an update that is due.

        Raises:
            InvalidRequestError, StaleEpochError, VersionGoneError, StepStateError: As ``receive``.
            StepStateError: The memory already holds a contribution.
            ConflictError: The transport session that the memory belongs to is closed.
        """
        self.check_adoption()
        await self.await_due_update(wait_s)
        self._check_current()
        async with self._run.exclusively():
            return await self.accept(source, None)

    def check_adoption(self) -> None:
        """Raises InvalidRequestError if the push of a trainer's memory does not fit the shard."""
        self._check_header()
        if self._header.wire_dtype:
            raise InvalidRequestError(
                f"{self._what}: wire_dtype is {self._header.wire_dtype}, but a shared gradient buffer holds gradients "
                "in the dtype of their parameters: leave wire_dtype unset"
            )

    def copy_at_once(self, stream: ReceivedStream) -> IncomingBuffer | None:
        """Copies a stream that has arrived as a whole, for ``accept``. Release the buffer unless it is claimed.

        Returns:
            The copy. None: ``receive`` must receive the stream, because that has to wait, to decode, to add, or to end
            another stream.

        Raises:
            InvalidRequestError: The push does not fit the shard, or the stream is broken.
        """
        self._check_header()
        header, shard = self._header, self._shard
        if header.part or header.copy or header.wire_dtype or shard.streams or self._is_update_due:
            return None
        received = self._store.memory.incoming_at_once(shard.size_bytes, shard.gradient.quota)
        if received is not None:
            try:
                stream.copy_into(self._targets(self._memory_of(received)), self._what)
            except BaseException:
                received.release()
                raise
        return received

    async def await_due_update(self, wait_s: float) -> None:
        """Waits for the update to the version that the push refers to, if this server has prepared that update.

        The servers apply a committed update at different times. A trainer that has read the new version elsewhere may
        push to a unit that it has not gathered, such as a unit of buffers, before this server has updated it.
        """
        if self._is_update_due:
            await self._shard.values.wait_for(self._step, wait_s)

    @property
    def _is_update_due(self) -> bool:
        version = self._shard.version
        return version is not None and self._step == version + 1 and self._run.is_prepared(version)

    async def _acquire(self, wait_s: float) -> IncomingBuffer:
        memory, shard = self._store.memory, self._shard
        if self._header.copy:
            return memory.incoming_spare(shard.size_bytes, self._what)
        return await memory.incoming(shard.size_bytes, shard.gradient.quota, wait_s=wait_s, what=self._what)

    def _memory_of(self, received: IncomingBuffer) -> memoryview:
        return chunk_streams.memory_at(received.buffer.data_ptr(), self._shard.size_bytes, received.buffer)

    async def _receive(self, incoming: IncomingStream, received: IncomingBuffer) -> int:
        shard, memory = self._shard, self._memory_of(received)
        if not self._header.wire_dtype:
            return await incoming.into(self._targets(memory), self._what)
        # Encoded bytes are received into the end of the same buffer and decoded in place. With two buffers per push,
        # pushes that hold one buffer and wait for another could deadlock.
        plan = self._plan()
        checksum = await incoming.into([memory[len(memory) - plan.size_bytes :]], self._what)
        try:
            await self._store.memory.in_thread(lambda: plan.decode_in_place(memory, shard.start_bytes))
        except ValueError as error:
            raise InvalidRequestError(f"{self._what}: {error}") from error
        return checksum

    # ---- checks ----

    def _check_header(self) -> None:
        shard = self._shard
        check_wire_dtype(self._header.wire_dtype)
        shard.gradient.check_rank(self._dp_rank)
        shard.check_range(self._header.start_bytes, self._header.stop_bytes)
        shard.numbers_of("parameter_indices", tuple(self._header.parameter_indices))
        shard.numbers_of("dropped_indices", tuple(self._header.dropped_indices))
        if self._header.summed:
            shard.gradient.check_sum(self._header)

    def _check_current(self) -> None:
        shard, step = self._shard, self._step
        self._store.lease.check()
        shard.check_primary()
        for rank, epoch in self._epochs.items():
            self._run.fences.check_epoch(rank, epoch)
        if shard.version is None:
            raise StepStateError(f"{shard.what} has no published values yet")
        expected = self._run.version_of(self._dp_rank, shard)
        assert expected is not None
        if step < expected:
            raise VersionGoneError(
                f"gradient of step {step} of {shard.what}: the step is committed, the unit has version {expected}"
            )
        if step > expected:
            raise StepStateError(
                f"gradient of step {step} of {shard.what} is too early: the unit is at version {expected}"
            )
        for rank in self._epochs:
            # A newer attempt is known from a fence, or from one of its contributions that arrived first.
            oldest = max(self._run.fences.attempt(rank, step), self._contributions.attempt(self._contributor_of(rank)))
            if self._attempt < oldest:
                raise StaleEpochError(f"{self._what}: rank {rank} has begun attempt {oldest}")

    def _contributor_of(self, dp_rank: int) -> int:
        return self._shard.layout.contributor(dp_rank, self._header.pp_rank, self._header.cp_rank)

    @property
    def _contributions(self) -> Contributions:
        """The contributions that the push belongs to."""
        return self._shard.gradient.contributions_of(self._contributor, self._attempt, copy=self._header.copy)

    def _is_duplicate(self) -> bool:
        counts = [
            self._contributions.part_count(self._contributor_of(rank), epoch, self._attempt)
            for rank, epoch in self._epochs.items()
        ]
        accepted = min(counts)
        self._check_same_sum(accepted, max(counts))
        if self._part < accepted:
            return True
        if self._run.is_closed_to(self._dp_rank, self._step):
            if not self._run.counts(self._dp_rank, self._attempt):
                raise StaleEpochError(f"{self._what}: another trainer's copy of this work item counts")
            raise StepStateError(f"{self._what}: step {self._step} is prepared and accepts no more gradients")
        if self._part > accepted:
            raise StepStateError(f"{self._what}: part {accepted} must be pushed first")
        return False

    def _check_same_sum(self, least: int, most: int) -> None:
        """Raises unless all parts of the ranks in one attempt are their own gradients, or the sum of the same ranks.

        Args:
            least: Smallest number of accepted parts of a rank in the push.
            most: Largest number.
        """
        if not most:
            return
        former = self._contributions.by_rank.get(self._contributor)
        ranks = {each.dp_rank for each in self._header.summed}
        if least != most or former is None or former.summed.keys() != ranks:
            raise StepStateError(
                f"{self._what}: in one attempt, gradients are added to those of other ranks either before they are "
                f"pushed or on the server. The push names the sum of ranks {sorted(ranks)}, and the server has one of "
                f"{sorted(former.summed) if former is not None else 'other ranks'}",
                sum="other",
            )

    # ---- accepting ----

    async def accept(self, source: ContributionMemory, checksum: int | None) -> bool:
        """Accepts a complete part unless it is stale; returns True if the part had been accepted before.

        Call within ``HostedRun.exclusively``, after ``copy_at_once``, or ``check_adoption`` and ``await_due_update``.

        Args:
            checksum: Checksum of the part's stream. None: a trainer wrote the memory.
        """
        self._check_current()
        duplicate = self._is_duplicate()
        if duplicate:
            self._count_duplicate(checksum)
        else:
            source.check_adoptable(self._shard)  # the transport session may have closed while this push waited
            await self._shard.gradient.add_part(self._header, source, checksum)
            if checksum is None:
                self._store.traffic.adopted_bytes += self._shard.size_bytes
            else:
                self._store.traffic.streamed_bytes += self._plan().size_bytes
            fault_points.reach("server.push.accepted", dp_rank=self._dp_rank, part=self._part)
        if self._shard.gradient.seems_complete:
            reduce_soon(self._store, self._run, self._shard)
        return duplicate

    def _count_duplicate(self, checksum: int | None) -> None:
        contribution = self._contributions.by_rank.get(self._contributor)
        self._run.count_duplicate(differs=contribution is not None and contribution.part_differs(self._part, checksum))

    # ---- the stream ----

    def _plan(self) -> StreamPlan:
        return self._shard.plans.plan(tuple(self._header.parameter_indices), self._header.wire_dtype)

    def _targets(self, memory: memoryview) -> list[memoryview]:
        start, segments = self._shard.start_bytes, self._shard.plans.segments(tuple(self._header.parameter_indices))
        return [memory[segment.start_bytes - start : segment.stop_bytes - start] for segment in segments]


def reduce_soon(store: ShardStore, run: HostedRun, shard: UnitShard) -> None:
    """Computes the mean of a shard in the background, because all contributions seem to have arrived.

    Shards that are complete before the background work begins are reduced together. The contributions are kept. A later
    part, or the drop of a contribution, discards the mean.
    """
    run.complete.append(shard)
    if len(run.complete) == 1:
        run.schedule(partial(_reduce_complete, store, run))


async def _reduce_complete(store: ShardStore, run: HostedRun) -> None:
    shards = [shard for shard in dict.fromkeys(run.complete) if shard.gradient.seems_complete]
    run.complete.clear()
    await reduce_shards(shards)
    for shard in shards:
        if any(backup.shares_host for backup in shard.backups.in_sync):
            await shard.gradient.share_mean()
        store.when_reduced(run, shard)


def check_leases(store: ShardStore, header: shard_pb2.ReduceScatterHeader) -> None:
    """Raises AccessError unless a push proves the leases on all ranks whose gradients it contains."""
    store.check_lease(header.context, header.dp_rank)
    for summed in header.summed:
        store.check_summed(header.context.run_id, summed)


async def push(
    store: ShardStore, header: shard_pb2.ReduceScatterHeader, incoming: IncomingStream, wait_s: float
) -> shard_pb2.ReduceScatterResponse:
    """Receives one part of a contribution from a stream; raises as ``Push.receive`` does.

    Raises:
        AccessError: The sender does not prove the lease on the rank.
        DuplicateError: The request id was used for another request.
        NotFoundError: This server does not hold the run or the unit.
    """
    check_leases(store, header)
    store.requests.check_content("ReduceScatter", header.context, header)
    run = store.exact_run(header.context)
    shard = run.primary(header.unit, header.start_bytes, header.stop_bytes)
    duplicate = await Push(store, run, shard, header).receive(incoming, wait_s)
    return shard_pb2.ReduceScatterResponse(duplicate=duplicate, version=header.context.step)
