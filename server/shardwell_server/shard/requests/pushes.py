"""Which contribution is accepted, which is dropped, and how one is received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from shardwell_server.shard.concurrency import uninterrupted
from shardwell_server.shard.memory.budget import IncomingBuffer
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.contributions import Contribution
from shardwell_server.shard.state.runs import Run
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_server.shard.transports.gradient_buffers import GradientBuffer
from shardwell_wire import codec
from shardwell_wire.errors import InvalidRequestError, StaleEpochError, StepStateError, VersionGoneError
from shardwell_wire.layout import Segment
from shardwell_wire.stream_plan import StreamPlan
from shardwell_wire.v1 import common_pb2, shard_pb2


class ContributionMemory(Protocol):
    """Where a gradient lies, laid out like its shard."""

    @property
    def buffer(self) -> torch.Tensor:
        """uint8. [stop_bytes - start_bytes]"""
        ...

    def keep(self) -> torch.Tensor:
        """It becomes a contribution: the buffer stays as it is until ``give_back``."""
        ...

    def give_back(self) -> None:
        """The contribution is used up or void."""
        ...


class Push:
    """One push to one shard.

    Args:
        store: Of the server.
        run: The run.
        shard: The shard.
        header: What the push says of itself.
    """

    def __init__(self, store: ShardStore, run: Run, shard: UnitShard, header: shard_pb2.ReduceScatterHeader) -> None:
        self._store, self._run, self._shard, self._header = store, run, shard, header
        self._step, self._epoch = header.context.step, header.context.epoch
        self._dp_rank, self._attempt, self._part = header.dp_rank, header.attempt, header.part
        self._what = f"gradient of {shard.what}, rank {self._dp_rank}, attempt {self._attempt}, part {self._part}"

    async def receive(self, incoming: IncomingStream, wait_s: float) -> bool:
        """Receives the gradient; returns whether it was here already.

        Nothing is kept of a stream that is broken, unwanted, or replaced by a newer one.

        Args:
            incoming: The stream.
            wait_s: How long to wait for room to receive it into.

        Raises:
            InvalidRequestError: The push does not fit the shard, or the stream is broken.
            StaleEpochError: Its lease or attempt is over, or a newer stream took its place.
            VersionGoneError: The step is committed.
            StepStateError: The step is prepared or has not begun, or an earlier part is missing.
            CapacityError: There was no room to receive it.
        """
        self._check_form()
        self._check_wanted()
        if self._is_here():
            return await self._acknowledge(incoming)
        memory, shard = self._store.memory, self._shard

        async def take() -> bool:
            # What is held of the rank stays until this stream is complete; then one of the two goes.
            room = memory.incoming(shard.size_bytes, shard.contribution_cover, wait_s=wait_s, what=self._what)
            async with room as received:
                checksum = await self._receive(incoming, received)
                return await self._hand_over(received, checksum)

        return await self._shard.streams.replace(self._dp_rank, (self._epoch, self._attempt), self._what, take)

    async def adopt(self, gradient_buffer: GradientBuffer) -> bool:
        """Takes the gradient that lies in a gradient buffer; returns whether it was here already.

        Raises:
            InvalidRequestError, StaleEpochError, VersionGoneError, StepStateError: As ``receive``.
            StepStateError: Also if the gradient buffer is a contribution already.
            ConflictError: Its transport is closed.
        """
        self._check_form()
        if self._header.wire_dtype:
            raise InvalidRequestError(
                f"{self._what}: in a gradient buffer gradients lie as they are stored, not encoded"
            )
        self._check_wanted()
        return await self._hand_over(gradient_buffer, None)

    async def _receive(self, incoming: IncomingStream, received: IncomingBuffer) -> int:
        shard, memory = self._shard, codec.memory_at(received.buffer.data_ptr(), self._shard.size_bytes)
        if not self._header.wire_dtype:
            return await incoming.into(self._targets(memory), self._what)
        # Not beside the values: pushes that hold room for those and wait for more could wait for each other.
        plan = self._plan()
        checksum = await incoming.into([memory[len(memory) - plan.size_bytes :]], self._what)
        await self._store.in_thread(lambda: plan.decode_in_place(memory, shard.start_bytes))
        return checksum

    async def _hand_over(self, source: ContributionMemory, checksum: int | None) -> bool:
        duplicate = await self._run.alone(lambda: self._accept(source, checksum))
        if self._shard.seems_complete:
            self._run.soon(lambda: self._shard.reduce_ahead(self._store.in_thread))
        return duplicate

    def _check_form(self) -> None:
        shard, indices = self._shard, list(self._header.parameter_indices)
        check_wire_dtype(self._header.wire_dtype)
        shard.check_rank(self._dp_rank)
        shard.check_range(self._header.start_bytes, self._header.stop_bytes)
        if sorted(set(indices)) != indices or (indices and indices[-1] >= len(shard.layout.parameters)):
            raise InvalidRequestError(
                f"{shard.what}: parameter_indices {indices[:10]} must rise and be below {len(shard.layout.parameters)}"
            )
        dropped = list(self._header.dropped_indices)
        if sorted(set(dropped)) != dropped or (dropped and dropped[-1] >= len(shard.layout.parameters)):
            raise InvalidRequestError(
                f"{shard.what}: dropped_indices {dropped[:10]} must rise and be below {len(shard.layout.parameters)}"
            )

    def _check_wanted(self) -> None:
        shard, step = self._shard, self._step
        self._run.fences.check_epoch(self._dp_rank, self._epoch)
        if shard.version is None:
            raise StepStateError(f"{shard.what} has no published values yet")
        if step < shard.version:
            raise VersionGoneError(f"step {step} of {shard.what} is committed: it is at version {shard.version}")
        if step > shard.version:
            raise StepStateError(f"{shard.what} is at version {shard.version}: too early for a gradient of step {step}")
        oldest = max(
            self._run.fences.attempt(self._dp_rank, step),
            shard.contributions.attempt(self._dp_rank),
        )
        if self._attempt < oldest:
            raise StaleEpochError(f"{self._what}: the attempt is over, attempt {oldest} has begun")

    def _is_here(self) -> bool:
        have = self._shard.contributions.part_count(self._dp_rank, self._epoch, self._attempt)
        if self._part < have:
            return True
        prepared = self._run.prepared
        if prepared is not None and prepared.step == self._step:
            raise StepStateError(f"{self._what}: step {self._step} is prepared, its gradients are complete")
        if self._part > have:
            raise StepStateError(f"{self._what}: part {have} is missing before it")
        return False

    async def _acknowledge(self, incoming: IncomingStream) -> bool:
        # Only its checksum is wanted: two that differ betray a computation that cannot be reproduced.
        self._count_duplicate(await incoming.checksum(self._plan().size_bytes, self._what))
        return True

    async def _accept(self, source: ContributionMemory, checksum: int | None) -> bool:
        """Takes a complete push if it is still wanted; returns whether it was here already."""
        self._check_wanted()
        if self._is_here():
            self._count_duplicate(checksum)
            return True
        shard, contributions = self._shard, self._shard.contributions
        if isinstance(source, GradientBuffer):
            source.check(shard)  # here and not earlier: its transport may have been closed while this waited
        views = shard.views(source.buffer)
        chosen = [shard.segment_of[segment.parameter_index] for segment in self._packed]
        shard.forget_reduced()
        if self._part == 0:
            # Of an older attempt, or of another lease: parts that two trainers pushed are never added up.
            contributions.drop(self._dp_rank)
            first = Contribution(self._epoch, self._attempt, source.keep(), views, source.give_back, set(chosen))
            contributions.by_rank[self._dp_rank] = first
            if (kept := shard.kept.of(self._dp_rank, but=self._dropped_segments)) is not None:
                await uninterrupted(self._store.in_thread(lambda: first.compute_add_kept(kept)))
            self._note_accepted(first, checksum)
        else:
            contributions.by_rank[self._dp_rank].drop(self._dropped_segments)
            await uninterrupted(self._add(contributions.by_rank[self._dp_rank], views, chosen, checksum))
        return False

    async def _add(
        self, held: Contribution, views: Sequence[torch.Tensor], chosen: Sequence[int], checksum: int | None
    ) -> None:
        await self._store.in_thread(lambda: held.compute_add(views, chosen))
        self._note_accepted(held, checksum)

    def _note_accepted(self, contribution: Contribution, checksum: int | None) -> None:
        contribution.checksums.append(checksum)

    def _count_duplicate(self, checksum: int | None) -> None:
        self._run.duplicate_count += 1
        held = self._shard.contributions.by_rank.get(self._dp_rank)
        if held is None or self._part >= held.part_count:
            return
        first = held.checksums[self._part]
        if first is not None and checksum is not None and first != checksum:
            self._run.differing_duplicate_count += 1

    @property
    def _packed(self) -> list[Segment]:
        """The parts of parameters that are pushed, in the order of the stream."""
        return self._shard.plans.segments(tuple(self._header.parameter_indices))

    @property
    def _dropped_segments(self) -> set[int]:
        """Segments whose earlier gradients the push drops."""
        segment_of = self._shard.segment_of
        return {segment_of[index] for index in self._header.dropped_indices if index in segment_of}

    def _plan(self) -> StreamPlan:
        return self._shard.plans.plan(tuple(self._header.parameter_indices), self._header.wire_dtype)

    def _targets(self, memory: memoryview) -> list[memoryview]:
        start = self._shard.start_bytes
        return [memory[segment.start_bytes - start : segment.stop_bytes - start] for segment in self._packed]


def check_wire_dtype(wire_dtype: int) -> None:
    """Raises InvalidRequestError unless there is such a wire dtype."""
    if wire_dtype not in common_pb2.WireDtype.values():
        raise InvalidRequestError(f"wire_dtype {wire_dtype} is not known: it may be {common_pb2.WireDtype.keys()}")
