"""The committed state of a shard in a form that does not depend on how the unit is cut into shards.

Checkpoints, copies of shards and relocations exchange this state. ``export`` returns views of a shard's memory.
``begin_import`` returns the memory of a reserved shard, which the caller fills, for example from a stream.
``VersionCapture`` keeps the state of one version while a checkpoint writes it.

Note: [Absent is not zero]
    A part without a gradient so far has no optimizer state, and its first update differs from an update with state of
    zeros (SGD's first momentum is the gradient itself). An absent tensor is therefore missing from ``PartState.state``.

Note: [Copies for checkpoints]
    A checkpoint reads the memory of the shards while training goes on. An update changes values and optimizer state in
    place, so it calls ``before_update`` for each shard first. Whatever is not written yet is then copied, tensor by
    tensor, into unreserved memory. If there is none, the update waits until the tensor is written: memory stays within
    the budget. An update waits at most ``MAX_WAIT_S`` in all; then the checkpoint is given up, because training comes
    first. Usually nothing is copied: a checkpoint begins right after an update and is written before the next one.

    Tensors are copied as a whole, not by block. Updates write to every block of a tensor anyway, and their arithmetic
    would have to be interrupted between blocks.

    The writing thread reads windows of a few MiB under a lock, into a buffer of its own. The lock is never held while
    a window is written, so slow storage delays nobody who needs the lock.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from shardwell_server.shard.arithmetic.shard_optimizer import RestoredPart
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.unit.partitions import TrainerState
from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.checkpoints.format import AVERAGE, KEPT_GRADIENT, TRAINER_STATE, VALUES
from shardwell_wire.errors import CapacityError, InvalidRequestError, ShardwellError, StepStateError, UnavailableError
from shardwell_wire.model.layout import DTYPE_NAMES, DTYPE_NUMBERS, UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS, StateShape
from shardwell_wire.model.topology import check_state_tensor, state_places, state_size
from shardwell_wire.v1 import shard_pb2

_ELEMENTWISE = (StateShape.PARAMETER, StateShape.VECTOR)


def elementwise_state(algorithm: str | None) -> dict[str, bool]:
    """Returns, for each state tensor of an optimizer, whether it has one element per value and is cut like them."""
    state = OPTIMIZERS[algorithm].state if algorithm is not None else ()
    return {tensor.name: tensor.shape in _ELEMENTWISE for tensor in state}


@dataclass(frozen=True, kw_only=True)
class PartState:
    """The committed state of one part of a parameter: all of the parameter, or what is inside a range."""

    parameter_index: int
    """Layout index of the parameter."""
    start_element: int
    """Start of the part's half-open range in the flattened parameter."""
    stop_element: int
    """End of the range."""
    values: torch.Tensor
    """[stop_element - start_element]"""
    algorithm: str | None = None
    """The optimizer of the last update. None: the part has had no update."""
    step_count: int = 0
    """Number of updates by this optimizer."""
    state: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """State tensors by torch's names. Element-wise tensors are flat, like ``values``; scalars have no dims; factored
    tensors have their own shape. See Note: [Absent is not zero]."""
    average: torch.Tensor | None = None
    """Moving average, like ``values``. None: the part has none."""
    kept: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """Gradients kept for another optimizer's step, each like ``values``, by ``UnitLayout.contributor``."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all tensors, by their names in checkpoints."""
        found = {VALUES: self.values, **self.state}
        if self.average is not None:
            found[AVERAGE] = self.average
        return found | {f"{KEPT_GRADIENT}{rank}": gradient for rank, gradient in sorted(self.kept.items())}


@dataclass(frozen=True, kw_only=True)
class ShardState:
    """The committed state of a range of a unit."""

    layout: UnitLayout
    start_bytes: int
    """Start of the half-open range in the unit's flat vector."""
    stop_bytes: int
    """End of the range."""
    dp: int
    """Number of logical data ranks."""
    parts: Sequence[PartState]
    """In layout order: one for each segment of the range."""
    averages_begun: bool = False
    """True once a step has updated moving averages."""
    partitions: Sequence[TrainerState] = ()
    """By dp rank. Ranks without state are not listed."""

    @property
    def size_bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the name and the content of every tensor, in an order that depends on the names only."""
        for part in self.parts:
            name = self.layout.parameters[part.parameter_index].name
            in_order = replace(part, state=dict(sorted(part.state.items())))
            for label, tensor in in_order.tensors().items():
                yield f"{name}|{label}|{part.start_element}:{part.stop_element}", tensor
        for partition in sorted(self.partitions, key=lambda partition: (partition.dp_rank, partition.start_bytes)):
            for spec, data in zip(partition.tensors, partition.data, strict=True):
                name = self.layout.parameters[spec.parameter_index].name
                yield f"{name}|{TRAINER_STATE}{spec.name}|rank {partition.dp_rank}", data


# ---- in messages ----


def write_content(state: ShardState, header: shard_pb2.ReceiveShardStateHeader) -> None:
    """Describes a state in the header of a stream that has its tensors in the order of ``ShardState.tensors``."""
    for part in state.parts:
        header.parts.add(
            algorithm=part.algorithm or "",
            step_count=part.step_count,
            state=[
                shard_pb2.StateTensor(
                    parameter_index=part.parameter_index,
                    name=name,
                    dtype=DTYPE_NUMBERS[str(tensor.dtype).removeprefix("torch.")],
                    shape=tensor.shape,
                )
                for name, tensor in sorted(part.state.items())
            ],
            has_average=part.average is not None,
            kept_contributors=sorted(part.kept),
        )
    header.averages_begun = state.averages_begun
    for partition in sorted(state.partitions, key=lambda partition: partition.dp_rank):
        header.partitions.add(dp_rank=partition.dp_rank, state=partition.tensors)


def read_content(shard: UnitShard, header: shard_pb2.ReceiveShardStateHeader) -> ShardState:
    """Returns the state that a header describes, with tensors on the meta device.

    Raises:
        InvalidRequestError: The header does not fit the shard.
    """
    if len(header.parts) != len(shard.segments):
        raise InvalidRequestError(
            f"{shard.what} has {len(shard.segments)} parts here, the header describes {len(header.parts)}"
        )
    parts = []
    for segment, content in zip(shard.segments, header.parts, strict=True):
        dtype = getattr(torch, shard.layout.parameters[segment.parameter_index].dtype)
        values = torch.empty(segment.stop_element - segment.start_element, dtype=dtype, device="meta")
        known = OPTIMIZERS.get(content.algorithm)
        names = {tensor.name for tensor in known.state} if known is not None else set()
        if (content.algorithm and known is None) or not names.issuperset(tensor.name for tensor in content.state):
            raise InvalidRequestError(
                f"{shard.what}: the state of optimizer {content.algorithm!r} has tensors that this server does not know"
            )
        parts.append(
            PartState(
                parameter_index=segment.parameter_index,
                start_element=segment.start_element,
                stop_element=segment.stop_element,
                values=values,
                algorithm=content.algorithm or None,
                step_count=content.step_count,
                state={tensor.name: _meta(tensor, shard.what) for tensor in content.state},
                average=values if content.has_average else None,
                kept=dict.fromkeys(content.kept_contributors, values),
            )
        )
    ranks = [partition.dp_rank for partition in header.partitions]
    if sorted(set(ranks)) != ranks or (ranks and ranks[-1] >= shard.dp):
        raise InvalidRequestError(
            f"{shard.what}: the header has partitions of ranks {ranks[:10]}, expected strictly rising ranks below "
            f"{shard.dp}"
        )
    partitions = []
    for partition in header.partitions:
        for tensor in partition.state:
            check_state_tensor(tensor, shard.what)
        data = [torch.empty(state_size(tensor), dtype=torch.uint8, device="meta") for tensor in partition.state]
        partitions.append(_trainer_state(shard, partition.dp_rank, partition.state, data))
    return _state_of(shard, parts, partitions, averages_begun=header.averages_begun)


def _meta(tensor: shard_pb2.StateTensor, what: str) -> torch.Tensor:
    check_state_tensor(tensor, what)
    return torch.empty(tuple(tensor.shape), dtype=getattr(torch, DTYPE_NAMES[tensor.dtype]), device="meta")


# ---- shards ----


def export(shard: UnitShard) -> ShardState:
    """Returns the committed state of a published shard, as views of its memory.

    The views are valid until the next update of the shard: hold ``shard.unchanging``, or call it within
    ``HostedRun.exclusively``.

    Raises:
        StepStateError: The shard has no values yet, or its update has failed and is being repeated.
    """
    if shard.version is None or shard.values.live is None or shard.values.updating:
        raise StepStateError(f"{shard.what} has no complete version now", unit=shard.unit)
    optimizer, parts = shard.optimizer, []
    for number, (segment, values) in enumerate(zip(shard.segments, shard.views(shard.values.live.buffer), strict=True)):
        own = RestoredPart() if optimizer is None else optimizer.part(number)
        # Only state with one element per value can be cut where the values are cut.
        is_elementwise = elementwise_state(own.algorithm)
        parts.append(
            PartState(
                parameter_index=segment.parameter_index,
                start_element=segment.start_element,
                stop_element=segment.stop_element,
                values=values,
                algorithm=own.algorithm,
                step_count=own.step_count,
                state={key: value.view(-1) if is_elementwise[key] else value for key, value in own.state.items()},
                average=None if own.average is None else own.average.view(-1),
                kept=shard.gradient.kept.of_segment(number),
            )
        )
    partitions = []
    for rank, state in sorted(shard.partitions.states.items()):
        ranges, _ = state_places(state.tensors)
        data = [state.data[low:high] for low, high in ranges]
        partitions.append(_trainer_state(shard, rank, state.tensors, data))
    averages_begun = optimizer is not None and optimizer.averages.has_started
    return _state_of(shard, parts, partitions, averages_begun=averages_begun)


def _trainer_state(
    shard: UnitShard, dp_rank: int, tensors: Sequence[shard_pb2.StateTensor], data: Sequence[torch.Tensor]
) -> TrainerState:
    start, stop = shard.partitions.bounds(dp_rank)
    return TrainerState(dp_rank=dp_rank, start_bytes=start, stop_bytes=stop, tensors=list(tensors), data=data)


def _state_of(
    shard: UnitShard, parts: Sequence[PartState], partitions: Sequence[TrainerState], *, averages_begun: bool
) -> ShardState:
    return ShardState(
        layout=shard.layout,
        start_bytes=shard.start_bytes,
        stop_bytes=shard.stop_bytes,
        dp=shard.dp,
        parts=parts,
        averages_begun=averages_begun,
        partitions=partitions,
    )


def begin_import(shard: UnitShard, description: ShardState) -> ShardState:
    """Allocates the memory of a reserved shard for a state. The shard stays unpublished until ``finish_import``.

    Args:
        shard: A shard without values.
        description: State of the shard's range. Its tensors may be on the meta device: only their sizes are read.

    Returns:
        The shard's own memory in the form of ``description``: fill every tensor.

    Raises:
        StepStateError: The shard has a version already.
        InvalidRequestError: The state does not belong to the shard.
        CapacityError: There is no memory for the state.
    """
    if shard.version is not None:
        raise StepStateError(f"{shard.what} is at version {shard.version} already", unit=shard.unit)
    _check_fits(shard, description)
    shard.allocate_values()
    assert shard.values.live is not None
    views = shard.views(shard.values.live.buffer)
    restored = shard.allocate_optimizer(
        [RestoredPart(part.algorithm, part.step_count, part.state, part.average) for part in description.parts],
        averages_begun=description.averages_begun,
    )
    kept = shard.gradient.kept.allocate(
        {
            rank: {number for number, part in enumerate(description.parts) if rank in part.kept}
            for rank in sorted({rank for part in description.parts for rank in part.kept})
        }
    )
    parts = [
        replace(
            part,
            values=views[number],
            state={key: value.view(part.state[key].shape) for key, value in restored[number].state.items()},
            average=None if part.average is None else _flat(restored[number].average),
            kept={rank: kept[rank][number] for rank in part.kept},
        )
        for number, part in enumerate(description.parts)
    ]
    partitions = [
        replace(state, data=shard.partitions.allocate_restored(state.dp_rank, state.tensors))
        for state in description.partitions
    ]
    shard.note_optimizer()
    return replace(description, parts=parts, partitions=partitions)


def finish_import(shard: UnitShard, version: int) -> None:
    """Publishes the state that was imported as a version of the shard."""
    shard.values.publish_version(version)
    shard.record()


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(-1)


def _check_fits(shard: UnitShard, state: ShardState) -> None:
    own = (shard.layout, shard.start_bytes, shard.stop_bytes, shard.dp)
    if own != (state.layout, state.start_bytes, state.stop_bytes, state.dp):
        raise InvalidRequestError(
            f"the state of [{state.start_bytes}, {state.stop_bytes}) of unit {state.layout.unit!r} with dp {state.dp} "
            f"does not fit {shard.what}, [{shard.start_bytes}, {shard.stop_bytes}) with dp {shard.dp}",
            unit=shard.unit,
        )
    ranges = [(segment.parameter_index, segment.start_element, segment.stop_element) for segment in shard.segments]
    if [(part.parameter_index, part.start_element, part.stop_element) for part in state.parts] != ranges:
        raise InvalidRequestError(f"the state of {shard.what} lacks a part of a parameter", unit=shard.unit)
    for partition in state.partitions:
        if (partition.start_bytes, partition.stop_bytes) != shard.partitions.bounds(partition.dp_rank):
            raise InvalidRequestError(
                f"the state of data rank {partition.dp_rank} covers [{partition.start_bytes}, {partition.stop_bytes}), "
                f"expected {shard.partitions.bounds(partition.dp_rank)} for {shard.what}",
                unit=shard.unit,
            )


MAX_WAIT_S = 5.0
"""Longest time in seconds that updates wait for one checkpoint."""

_SMALL_BYTES = 64 << 10
"""Tensors up to this size are copied when the capture begins, which costs less than tracking them."""


class CapturedShard:
    """The tensors of one shard in one version.

    Args:
        tensors: Its tensors. Each contiguous, on the CPU.
        memory: Unreserved memory for copies.
    """

    def __init__(self, shard: UnitShard, tensors: Iterable[torch.Tensor], memory: Memory) -> None:
        self.shard = shard
        self.wanted = False
        """True if an update waits for the shard."""
        self.written = asyncio.Event()
        """Set when everything is written, or the capture has ended."""
        self._tensors: list[torch.Tensor | None] = [_bytes_of(tensor) for tensor in tensors]
        """Bytes of each tensor. None: written. uint8. [nbytes]"""
        self._is_live = [tensor is not None and tensor.numel() > _SMALL_BYTES for tensor in self._tensors]
        """Whether each tensor is memory of the shard, which an update will change."""
        for number, tensor in enumerate(self._tensors):
            if tensor is not None and not self._is_live[number]:
                self._tensors[number] = tensor.clone()
        self._copies: dict[int, torch.Tensor] = {}
        """Copies in unreserved memory, by number."""
        self._memory = memory
        self._lock = threading.Lock()
        self._loop = asyncio.get_running_loop()
        if all(tensor is None for tensor in self._tensors):
            self.written.set()

    # ---- in the writing thread ----

    def compute_read(self, number: int, start: int, target: torch.Tensor) -> bool:
        """Copies some bytes of a tensor.

        Args:
            start: Position of the first byte.
            target: Where to copy them to. uint8. [size]

        Returns:
            False if the tensor is gone, because the capture has ended.
        """
        with self._lock:
            source = self._tensors[number]
            if source is None:
                return False
            target.copy_(source[start : start + target.numel()])
            return True

    def compute_note_written(self, number: int) -> None:
        """Releases a tensor that is written."""
        with self._lock:
            self._tensors[number] = None
            copy = self._copies.pop(number, None)
            complete = all(tensor is None for tensor in self._tensors)
        if copy is not None:
            self._loop.call_soon_threadsafe(self._memory.release_buffer, copy)
        if complete:
            self._loop.call_soon_threadsafe(self.written.set)

    # ---- on the event loop ----

    async def detach(self) -> bool:
        """Copies what is not written yet. Returns False if memory was short for a part of it."""
        copies, is_short = {}, False
        for number, tensor in enumerate(self._tensors):
            if tensor is None or not self._is_live[number] or number in self._copies:
                continue
            if (copy := self._memory.try_acquire(tensor.numel())) is not None:
                copies[number] = copy
            else:
                is_short = True

        def compute() -> None:
            for number, copy in copies.items():
                self._compute_copy(number, copy)

        if copies:
            await self._memory.in_thread(compute)
        return not is_short

    def _compute_copy(self, number: int, copy: torch.Tensor) -> None:
        with self._lock:
            source = self._tensors[number]
            if source is not None:
                copy.copy_(source)
                self._tensors[number] = self._copies[number] = copy
                return
        self._loop.call_soon_threadsafe(self._memory.release_buffer, copy)

    def end(self) -> None:
        """Releases everything. The writing thread reads nothing of the shard any more."""
        with self._lock:
            self._tensors = [None] * len(self._tensors)
            copies, self._copies = self._copies, {}
        for copy in copies.values():
            self._memory.release_buffer(copy)
        self.written.set()


class VersionCapture:
    """The primary shards of a run in one version. See Note: [Copies for checkpoints].

    Args:
        shards: The captured shards, in the order in which they should be written.
    """

    def __init__(self, version: int, shards: Sequence[CapturedShard]) -> None:
        self.version, self.shards = version, tuple(shards)
        self.failure: ShardwellError | None = None
        """Why the capture ended early."""
        self._by_shard = {id(captured.shard): captured for captured in shards}
        self._waited_s = 0.0

    def needs(self, shard: UnitShard) -> bool:
        """True if a captured shard is not written yet."""
        captured = self._by_shard.get(id(shard))
        return captured is not None and not captured.written.is_set()

    async def before_update(self, shard: UnitShard) -> None:
        """Makes sure that an update of a shard changes nothing that is not written. Runs before the update."""
        captured = self._by_shard.get(id(shard))
        if captured is None or captured.written.is_set() or await captured.detach():
            return
        captured.wanted, loop = True, asyncio.get_running_loop()
        started = loop.time()
        try:
            async with asyncio.timeout(max(0.0, MAX_WAIT_S - self._waited_s)):
                await captured.written.wait()
        except TimeoutError:
            self.fail(
                CapacityError(
                    f"{shard.what} could not be written before its next update, and there is no memory for a copy: "
                    "raise --memory-budget, or use faster storage"
                )
            )
        finally:
            self._waited_s += loop.time() - started

    def note_removed(self, shard: UnitShard) -> None:
        """Ends the capture if it needs a shard that is about to be dropped."""
        captured = self._by_shard.get(id(shard))
        if captured is not None and not captured.written.is_set():
            self.fail(UnavailableError(f"{shard.what} left this server while the checkpoint was written"))

    def fail(self, why: ShardwellError) -> None:
        """Ends the capture. The writing thread stops."""
        if self.failure is None:
            self.failure = why
        self.end()

    def end(self) -> None:
        """Releases all memory, because everything is written or the checkpoint was given up."""
        for captured in self.shards:
            captured.end()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the bytes of a tensor; None if it has none."""
    assert tensor.is_contiguous(), "state tensors are contiguous"
    return tensor.detach().reshape(-1).view(torch.uint8) if tensor.numel() else None
