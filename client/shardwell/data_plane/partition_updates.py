"""How a trainer updates partitions: read ahead of the arithmetic, each by the best way there is, and staged behind
it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait

from shardwell.data_plane.daemon_threads import DaemonThreads
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.traffic import RemoteUnit
from shardwell.transport.partitions import (
    CachedPartition,
    PartitionLocation,
    PartitionSegment,
    describe_state,
    read_partition,
    read_request,
    stage_header,
    stage_partition,
)
from shardwell.transport.staging_buffer import StagingBuffer, StagingBufferPart
from shardwell_wire.errors import CapacityError, ConflictError
from shardwell_wire.partitions import part_in
from shardwell_wire.v1 import common_pb2

logger = logging.getLogger(__name__)

_AHEAD_COUNT, _BEHIND_COUNT = 3, 3
"""Parts of partitions that are being read while another is updated, and that are being staged. They bound the
memory."""

MakeContext = Callable[[], common_pb2.RequestContext]


class RemotePartition:
    """The part of one data rank's partition of a unit that one server owns, as this trainer reaches it.

    Where the server shares memory it is updated there, and nothing stays here. Otherwise values and state that this
    trainer staged are kept, so that the next step fetches the gradient only; the server says whether they are still
    what it has.

    Args:
        unit_index: Of the unit.
        place: Not empty.
        shard: The shard that it lies in.
        timeout_s: How long reading or staging it may take.
    """

    def __init__(self, unit_index: int, place: PartitionLocation, shard: RemoteShard, timeout_s: float) -> None:
        self.unit_index = unit_index
        self._place, self._shard, self._timeout_s = place, shard, timeout_s
        self._staging_buffer = StagingBuffer(place)
        self._held: CachedPartition | None = None

    @property
    def held_bytes(self) -> int:
        """What is kept here until the next step."""
        return 0 if self._held is None else self._held.part.kept_bytes

    @property
    def _shares_memory(self) -> bool:
        return self._shard.server.shm is not None and self._shard.window is not None

    def read(self, context: common_pb2.RequestContext) -> PartitionSegment:
        """The partition of a prepared step, to be changed in place; raises as ``read_partition`` does."""
        held, self._held = self._held, None  # it is about to be changed
        if self._shares_memory:
            try:
                return self._open_staging_buffer(context)
            except (CapacityError, ConflictError, OSError) as error:
                _raise_unless_about_memory(error)
                logger.info("partition of unit %r is streamed: %s", self._place.layout.unit, error)
        return self._shard.server.by_rpc(
            lambda client: read_partition(client, self._place, context, timeout_s=self._timeout_s, held=held)
        )

    def bytes_to_keep(self, part: PartitionSegment) -> int:
        """What ``stage`` can keep of a part."""
        return 0 if self._shares_memory else part.kept_bytes

    def stage(self, make_context: MakeContext, part: PartitionSegment, *, keep: bool) -> None:
        """Sends new values and state; raises as ``stage_partition`` does.

        Args:
            make_context: Makes the context of a request.
            part: What ``read`` returned, changed.
            keep: Whether values and state stay here until the next step.
        """
        if isinstance(part, StagingBufferPart) and self._stage_staging_buffer(make_context(), part):
            return
        context = make_context()
        self._shard.server.by_rpc(
            lambda client: stage_partition(
                client, self._place, context, part, timeout_s=self._timeout_s, share_state=self._shares_memory
            )
        )
        if keep and not self._shares_memory:
            self._held = CachedPartition(context.request_id, part)
            part.gradients = {}

    def _open_staging_buffer(self, context: common_pb2.RequestContext) -> StagingBufferPart:
        window, place = self._shard.window, self._place
        assert window is not None
        request, limit_s = read_request(place, context), self._timeout_s
        answer = self._shard.server.through_shm(
            lambda transport: transport.open_staging_buffer(request, timeout_s=limit_s, retry_for_s=limit_s)
        )
        first = self._shard.start_bytes
        values = window.bytes[place.start_bytes - first : place.stop_bytes - first]
        part = self._staging_buffer.lay_out(answer, values)
        window.check(answer.header.version)
        return part

    def _stage_staging_buffer(self, context: common_pb2.RequestContext, part: StagingBufferPart) -> bool:
        """Stages what lies on the staging buffer; False if it has to be streamed."""
        state = describe_state(self._place, part)
        if not part.lay_back(state):
            return False
        header, limit_s = stage_header(self._place, context, part, state), self._timeout_s
        try:
            self._shard.server.through_shm(
                lambda transport: transport.stage_staging_buffer(
                    header, part.staging_buffer, timeout_s=limit_s, retry_for_s=limit_s
                )
            )
        except ConflictError as error:
            _raise_unless_about_memory(error)
            logger.info("partition of unit %r is streamed: %s", self._place.layout.unit, error)
            return False
        return True


class PartitionUpdates:
    """Updates the partitions of data ranks, unit by unit.

    Args:
        dp: Logical data ranks.
        timeout_s: How long reading or staging one part may take.
    """

    def __init__(self, dp: int, timeout_s: float) -> None:
        self._dp, self._timeout_s = dp, timeout_s
        self._threads = DaemonThreads(_AHEAD_COUNT + _BEHIND_COUNT, "shardwell-partition")
        self._partitions: dict[tuple[int, int, int], RemotePartition] = {}

    def run(
        self,
        units: Iterable[RemoteUnit],
        dp_rank: int,
        make_context: MakeContext,
        update: Callable[[int, PartitionSegment], None],
        *,
        keep_bytes: float,
    ) -> None:
        """Reads, updates and stages a data rank's partitions.

        Args:
            units: All of the run.
            dp_rank: Whose partitions.
            make_context: Makes the context of a request; raises if there shall be no more of them.
            update: Is given a unit's index and a part of its partition, to be changed in place. Called in this thread.
            keep_bytes: How much values and state may stay here until the next step, of all data ranks together.

        Raises:
            ShardwellError: See ``read_partition`` and ``stage_partition``; some partitions may be staged.
        """
        todo = iter(self._partitions_of(units, dp_rank))
        reads: deque[tuple[RemotePartition, Future[PartitionSegment]]] = deque()
        stagings: deque[Future[None]] = deque()
        kept: dict[RemotePartition, int] = {}

        def read_next() -> None:
            if (piece := next(todo, None)) is not None:
                reads.append((piece, self._threads.submit(piece.read, make_context())))

        try:
            for _ in range(_AHEAD_COUNT):
                read_next()
            while reads:
                piece, reading = reads[0]
                part = reading.result()
                reads.popleft()
                read_next()
                update(piece.unit_index, part)
                if len(stagings) == _BEHIND_COUNT:
                    stagings.popleft().result()
                # What is being staged counts before it is held.
                total = sum(max(other.held_bytes, kept.get(other, 0)) for other in self._partitions.values())
                size = piece.bytes_to_keep(part)
                kept[piece] = size if total + size <= keep_bytes else 0
                stagings.append(self._threads.submit(piece.stage, make_context, part, keep=kept[piece] > 0))
            for staging in stagings:
                staging.result()
        except Exception:
            wait(stagings)
            wait([reading for _, reading in reads])
            raise
        except BaseException:  # such as Ctrl-C, which must not wait for servers: what they still answer is nobody's
            self.forget()
            raise

    def forget(self) -> None:
        """Keeps nothing until the next step."""
        self._partitions.clear()

    def close(self) -> None:
        """Stops the threads; what is under way ends when the servers' connections are closed."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def join(self, limit_s: float) -> None:
        """After ``close``: waits until nothing is under way, for so long at the most."""
        self._threads.join(limit_s)

    def _partitions_of(self, units: Iterable[RemoteUnit], dp_rank: int) -> Sequence[RemotePartition]:
        found = []
        for unit in units:
            for shard in unit.shards:
                start, stop = part_in(unit.layout.size_bytes, self._dp, dp_rank, shard.start_bytes, shard.stop_bytes)
                key = unit.index, shard.start_bytes, dp_rank
                if start < stop and key not in self._partitions:
                    place = PartitionLocation(unit.layout, dp_rank, start, stop)
                    self._partitions[key] = RemotePartition(unit.index, place, shard, self._timeout_s)
                if start < stop:
                    found.append(self._partitions[key])
        return found


def _raise_unless_about_memory(error: Exception) -> None:
    """Raises an error that another way to the server would meet too, such as a step that is not prepared."""
    if isinstance(error, ConflictError) and type(error) is not ConflictError:
        raise error
