"""A backup's side of a step: it receives from its primary what the update of the step needs.

See Note: [When a backup has a step] in ``replication.py``. Nothing here takes the lock of a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from shardwell_server.shard.memory.budget import BufferQuota, IncomingBuffer
from shardwell_server.shard.requests.backups import check_in_sync, find_backup, open_replica
from shardwell_server.shard.requests.peers import tensor_memory
from shardwell_server.shard.requests.streams import IncomingStream
from shardwell_server.shard.state.contributions import Contribution
from shardwell_server.shard.state.partitions import StagedPartition
from shardwell_server.shard.state.replication import Replica
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.store import ShardStore
from shardwell_server.shard.state.unit_shard import UnitShard
from shardwell_wire.errors import InvalidRequestError, NotFoundError
from shardwell_wire.layout import Segment
from shardwell_wire.partitions import state_places
from shardwell_wire.shared_files import file_size, open_in_folder, opened, server_folder
from shardwell_wire.v1 import shard_pb2

_REPLICATED_EPOCH = 0
"""Epoch of contributions and partitions that the primary sent: it has checked the leases."""

_GRADIENT = shard_pb2.STEP_CONTENT_GRADIENT
_CONTRIBUTIONS = shard_pb2.STEP_CONTENT_CONTRIBUTIONS
_PARTITIONS = shard_pb2.STEP_CONTENT_PARTITIONS


async def receive_step(
    store: ShardStore, header: shard_pb2.ReplicateStepHeader, incoming: IncomingStream, wait_s: float
) -> shard_pb2.ReplicateStepResponse:
    """Receives a part of what the update of a step needs. A broken stream has no effect.

    Raises:
        ShardwellError: As ``find_backup``.
        DeadlineError: The backup has not reached the version that the step reads.
        StepStateError: The backup is out of sync.
        StaleEpochError: Content of a later generation has arrived.
        InvalidRequestError: The header does not fit the shard, or the stream is broken.
        CapacityError: There is no memory.
    """
    run = store.exact_run(header.context)
    shard, step = find_backup(run, header.target), header.context.step
    if header.content not in (_GRADIENT, _CONTRIBUTIONS, _PARTITIONS):
        raise InvalidRequestError(f"content is {header.content}, expected a StepContent")
    check_in_sync(shard)
    await shard.values.wait_for(step, wait_s)
    order = (header.target.placement, header.generation)
    what = f"step {step} of the backup of {shard.what}"

    async def receive() -> None:
        open_replica(run, shard, header, step)
        if header.content == _GRADIENT:
            await _receive_gradient(store, run, shard, header, incoming, what)
        elif header.content == _CONTRIBUTIONS:
            await _receive_contributions(store, run, shard, header, incoming, what)
        else:
            await _receive_partitions(store, run, shard, header, incoming, what)

    # A retry ends the stream that it replaces. Different contents of one generation arrive concurrently.
    await shard.streams.replace(f"replica {header.content}", order, what, receive)
    return shard_pb2.ReplicateStepResponse(generation=header.generation)


def _accept(run: HostedRun, shard: UnitShard, header: shard_pb2.ReplicateStepHeader) -> Replica:
    """Checks again, after a stream was received, that its content is still wanted. Raises as ``open_replica``."""
    replica = open_replica(run, shard, header, header.context.step)
    replica.confirmed = False
    return replica


def _numbers(shard: UnitShard, indices: Sequence[int], what: str) -> list[int]:
    """Returns the segments of parameters. Raises InvalidRequestError if one is unknown or the order is wrong."""
    found = [shard.segment_of[index] for index in indices if index in shard.segment_of]
    if len(found) != len(indices) or sorted(set(found)) != found:
        raise InvalidRequestError(
            f"{what}: parameter indices are {list(indices)[:10]}, expected strictly rising indices of parameters in "
            "the shard"
        )
    return found


async def _receive_gradient(
    store: ShardStore,
    run: HostedRun,
    shard: UnitShard,
    header: shard_pb2.ReplicateStepHeader,
    incoming: IncomingStream,
    what: str,
) -> None:
    numbers = _numbers(shard, header.gradient_indices, what)
    buffer, views = shard.mean.acquire(numbers, shard.acquire_mean_file)
    try:
        memory = [tensor_memory(view) for view in views]
        await incoming.into([] if header.path else memory, what)
        if header.path:
            starts = [shard.segments[number].start_bytes - shard.start_bytes for number in numbers]
            await store.in_thread(partial(_read_file, header.path, shard.size_bytes, starts, memory))
        replica = _accept(run, shard, header)
    except BaseException:
        shard.mean.release(buffer)
        raise
    shard.mean.set(buffer, numbers)
    replica.contents.add(_GRADIENT)


def _read_file(path: str, size_bytes: int, starts: Sequence[int], memory: Sequence[memoryview]) -> None:
    """Copies ranges of a file of another server's shared memory. See Note: [Trust between users].

    The primary may write the next gradient into the file meanwhile. It then ignores the acknowledgement of this one.

    Raises:
        NotFoundError: The file is not on this host, or is not trusted.
    """
    try:
        server_folder(path)
        with opened(open_in_folder(path, size_bytes=file_size(size_bytes))) as descriptor:
            for start, target in zip(starts, memory, strict=True):
                done = 0
                while done < len(target):
                    count = os.preadv(descriptor, [target[done:]], start + done)
                    if not count:
                        raise OSError(f"it ends at byte {start + done}")
                    done += count
    except OSError as error:
        raise NotFoundError(f"cannot read {path!r}, a file of the primary's server: {error}") from error


def _check_contributor(shard: UnitShard, contributor: int) -> None:
    if contributor >= shard.max_contributions:
        raise InvalidRequestError(
            f"contributor is {contributor}, but {shard.what} has {shard.max_contributions} contributors"
        )


async def _receive_contributions(
    store: ShardStore,
    run: HostedRun,
    shard: UnitShard,
    header: shard_pb2.ReplicateStepHeader,
    incoming: IncomingStream,
    what: str,
) -> None:
    received: list[tuple[int, Contribution]] = []
    memory: list[memoryview] = []
    with ExitStack() as undo:
        for sent in header.contributions:
            _check_contributor(shard, sent.contributor)
            numbers = _numbers(shard, sent.parameter_indices, what)
            grant = store.memory.grant(shard.size_bytes, shard.contribution_quota, what)
            incoming_buffer = IncomingBuffer(grant.acquire_buffer(shard.size_bytes), grant)
            undo.callback(incoming_buffer.release)
            buffer, release = incoming_buffer.buffer, incoming_buffer.release
            views = shard.views(buffer)
            contribution = Contribution(_REPLICATED_EPOCH, 0, buffer, views, release, set(numbers))
            received.append((sent.contributor, contribution))
            memory += [tensor_memory(views[number]) for number in numbers]
        await incoming.into(memory, what)
        replica = _accept(run, shard, header)
        shard.contributions.clear()
        for contributor, contribution in received:
            shard.contributions.add(contributor, contribution)
        replica.contents.add(_CONTRIBUTIONS)
        undo.pop_all()


async def _receive_partitions(
    store: ShardStore,
    run: HostedRun,
    shard: UnitShard,
    header: shard_pb2.ReplicateStepHeader,
    incoming: IncomingStream,
    what: str,
) -> None:
    staged: list[tuple[int, StagedPartition]] = []
    memory: list[memoryview] = []
    with ExitStack() as undo:
        for sent in header.partitions:
            shard.check_rank(sent.dp_rank)
            segments = shard.layout.packed_segments(sent.parameter_indices, *shard.partitions.bounds(sent.dp_rank))
            if [segment.parameter_index for segment in segments] != list(sent.parameter_indices):
                raise InvalidRequestError(f"{what}: a parameter is not in the partition of data rank {sent.dp_rank}")
            partition = _allocate_partition(store, shard, segments, sent, what)
            undo.callback(partition.release)
            undo.callback(shard.partitions.free_unsettled, partition.state)
            staged.append((sent.dp_rank, partition))
            memory += [tensor_memory(values) for values in partition.values]
            memory += partition.state.pieces
        await incoming.into(memory, what)
        replica = _accept(run, shard, header)
        shard.partitions.invalidate()
        for rank, partition in staged:
            shard.partitions.stage(rank, partition)
        replica.contents.add(_PARTITIONS)
        undo.pop_all()


def _allocate_partition(
    store: ShardStore,
    shard: UnitShard,
    segments: Sequence[Segment],
    sent: shard_pb2.ReplicatedPartition,
    what: str,
) -> StagedPartition:
    sizes = [segment.size_bytes for segment in segments]
    grant = store.memory.grant(sum(sizes) + state_places(sent.state)[1], BufferQuota(0), what)
    buffer = IncomingBuffer(grant.acquire_buffer(sum(sizes)), grant)
    try:
        state = shard.partitions.allocate_state(sent.state, sent.request_id, share=True)
    except BaseException:
        buffer.release()
        raise
    values = torch.split(buffer.buffer, sizes)
    return StagedPartition(_REPLICATED_EPOCH, segments, values, state, buffer.release)
