"""Converts the state of a shard to the tensors of a checkpoint's file, and back for any other range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from shardwell_server.shard.unit.partitions import TrainerState
from shardwell_server.shard.unit.portable_state import PartState, ShardState, elementwise_state
from shardwell_wire.checkpoints.format import AVERAGE, KEPT_GRADIENT, TRAINER_STATE, VALUES, Part, Piece
from shardwell_wire.checkpoints.reading import Checkpoint, NoteRead, StoredPiece, entries_of, read_elements
from shardwell_wire.checkpoints.reading import pieces_of as stored_pieces
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.errors import CorruptDataError, UnitMismatchError
from shardwell_wire.model.layout import DTYPE_NAMES, DTYPE_NUMBERS, Parameter, Segment, UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS
from shardwell_wire.model.topology import part_in
from shardwell_wire.v1 import shard_pb2

# ---- from a shard ----


def pieces_of(state: ShardState) -> Iterator[tuple[Piece, torch.Tensor]]:
    """Yields the tensors of a shard, each with its name in the file."""
    for part in state.parts:
        name = state.layout.parameters[part.parameter_index].key
        is_elementwise, start, stop = elementwise_state(part.algorithm), part.start_element, part.stop_element
        for label, tensor in part.tensors().items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            if is_elementwise.get(label, True):
                yield Piece(name, label, start, stop, dtype, (tensor.numel(),)), tensor
            else:
                yield Piece(name, label, start, stop, dtype, tuple(tensor.shape), "whole"), tensor
    for partition in state.partitions:
        for spec, data, segment in partition.located(state.layout):
            start, stop, shape = segment.start_element, segment.stop_element, tuple(spec.shape)
            is_elements = shape == (stop - start,) and not spec.is_number
            piece = Piece(
                state.layout.parameters[spec.parameter_index].key,
                f"{TRAINER_STATE}{spec.name}",
                start,
                stop,
                DTYPE_NAMES[spec.dtype],
                shape,
                "elements" if is_elements else "number" if spec.is_number else "whole",
            )
            yield piece, data


def parts_of(state: ShardState) -> list[Part]:
    """Returns how the optimizer has updated each segment of a shard. Empty for buffers."""
    if state.layout.holds_buffers:
        return []
    return [
        Part(
            state.layout.parameters[part.parameter_index].key,
            part.start_element,
            part.stop_element,
            part.algorithm,
            part.step_count,
        )
        for part in state.parts
    ]


# ---- from a checkpoint ----


def describe_shard(
    checkpoint: Checkpoint, layout: UnitLayout, start_bytes: int, stop_bytes: int, dp: int
) -> ShardState:
    """Returns what a checkpoint contains of a range of a unit, with tensors on the meta device.

    Raises:
        CorruptDataError: The checkpoint lacks something, or contradicts itself.
    """
    segments = layout.segments(start_bytes, stop_bytes)
    return ShardState(
        layout=layout,
        start_bytes=start_bytes,
        stop_bytes=stop_bytes,
        dp=dp,
        parts=[_describe_part(checkpoint, layout, segment, dp) for segment in segments],
        averages_begun=checkpoint.averages_begun,
        partitions=list(_describe_partitions(checkpoint, layout, start_bytes, stop_bytes, dp)),
    )


def fill_shard(checkpoint: Checkpoint, state: ShardState, note_read: NoteRead) -> None:
    """Reads everything that ``describe_shard`` has described into the tensors of ``state``. Blocks.

    Raises:
        CorruptDataError: A tensor is damaged or incomplete. The message names the file.
        ShardwellError: See ``Storage``.
    """
    for part in state.parts:
        parameter = state.layout.parameters[part.parameter_index]
        for label, tensor in part.tensors().items():
            _fill(checkpoint, parameter, label, part.start_element, part.stop_element, tensor, note_read)
    for partition in state.partitions:
        for spec, data, inside in partition.located(state.layout):
            parameter, label = state.layout.parameters[spec.parameter_index], f"{TRAINER_STATE}{spec.name}"
            _fill(checkpoint, parameter, label, inside.start_element, inside.stop_element, data, note_read)


def _describe_part(checkpoint: Checkpoint, layout: UnitLayout, segment: Segment, dp: int) -> PartState:
    parameter, start, stop = layout.parameters[segment.parameter_index], segment.start_element, segment.stop_element
    entries = entries_of(checkpoint, parameter, start, stop)
    algorithm, step_count = _updates(checkpoint, entries)
    state, kept, average = {}, {}, None
    for label in _labels(checkpoint, entries):
        if label == VALUES or label.startswith(TRAINER_STATE):
            continue
        if label.startswith(KEPT_GRADIENT) and not _has_contributors(checkpoint, parameter, layout, dp):
            continue
        if (tensor := _meta(checkpoint, parameter, label, start, stop)) is None:
            continue
        if label == AVERAGE:
            average = tensor
        elif label.startswith(KEPT_GRADIENT):
            kept[int(label.removeprefix(KEPT_GRADIENT))] = tensor
        elif label in elementwise_state(algorithm):
            state[label] = tensor
    values = torch.empty(stop - start, dtype=getattr(torch, parameter.dtype), device="meta")
    return PartState(
        parameter_index=segment.parameter_index,
        start_element=start,
        stop_element=stop,
        values=values,
        algorithm=algorithm,
        step_count=step_count,
        state=state,
        average=average,
        kept=kept,
    )


def _has_contributors(checkpoint: Checkpoint, parameter: Parameter, layout: UnitLayout, dp: int) -> bool:
    """True if the numbers of contributions mean the same in a checkpoint: the contributors are equally many."""
    names = {parameter.name, *parameter.aliases}
    counts = {(unit.cp, len(unit.pp_ranks)) for unit in checkpoint.units if not names.isdisjoint(unit.index_by_name)}
    return checkpoint.manifest.world.dp == dp and counts == {(layout.cp, len(layout.pp_ranks))}


def _labels(checkpoint: Checkpoint, entries: Sequence[Parameter]) -> list[str]:
    """Returns what is stored of a parameter's entries, sorted."""
    return sorted({label for entry in entries for label in checkpoint.states(entry.key)})


def _updates(checkpoint: Checkpoint, entries: Sequence[Parameter]) -> tuple[str | None, int]:
    """Returns the algorithm that has updated the entries of a parameter, and how often."""
    found = {(part.algorithm, part.step_count) for entry in entries for part in checkpoint.parts(entry.key)}
    name = entries[0].name if entries else ""
    if len(found) > 1:
        raise CorruptDataError(
            f"{checkpoint.url}: parts of parameter {name!r} were updated differently: {sorted(map(str, found))}",
            parameter=name,
        )
    algorithm, step_count = found.pop() if found else (None, 0)
    if algorithm is not None and algorithm not in OPTIMIZERS:
        raise CorruptDataError(
            f"{checkpoint.url}: parameter {name!r} was updated by optimizer {algorithm!r}, which this version of the "
            "software does not have",
            parameter=name,
        )
    return algorithm, step_count


def _describe_partitions(
    checkpoint: Checkpoint, layout: UnitLayout, start_bytes: int, stop_bytes: int, dp: int
) -> Iterator[TrainerState]:
    for dp_rank in range(dp):
        start, stop = part_in(layout.size_bytes, dp, dp_rank, start_bytes, stop_bytes)
        tensors, data = [], []
        for segment in layout.segments(start, stop) if start < stop else ():
            parameter = layout.parameters[segment.parameter_index]
            first, last = segment.start_element, segment.stop_element
            for label in _labels(checkpoint, entries_of(checkpoint, parameter, first, last)):
                found = _find(checkpoint, parameter, label, first, last) if label.startswith(TRAINER_STATE) else []
                if not found:
                    continue
                piece = found[0][1].piece
                shape = (last - first,) if piece.kind == "elements" else piece.shape
                tensors.append(
                    shard_pb2.StateTensor(
                        parameter_index=segment.parameter_index,
                        name=label.removeprefix(TRAINER_STATE),
                        dtype=DTYPE_NUMBERS[piece.dtype],
                        shape=shape,
                        is_number=piece.kind == "number",
                    )
                )
                size_bytes = math.prod(shape) * piece.item_size
                data.append(torch.empty(size_bytes, dtype=torch.uint8, device="meta"))
        if tensors:
            yield TrainerState(dp_rank=dp_rank, start_bytes=start, stop_bytes=stop, tensors=tensors, data=data)


def _meta(checkpoint: Checkpoint, parameter: Parameter, label: str, start: int, stop: int) -> torch.Tensor | None:
    """Returns a state of some elements of a parameter on the meta device. None: the checkpoint has none of it."""
    found = _find(checkpoint, parameter, label, start, stop)
    if not found:
        return None
    piece = found[0][1].piece
    shape = (stop - start,) if piece.kind == "elements" else piece.shape
    return torch.empty(shape, dtype=getattr(torch, piece.dtype), device="meta")


def _find(
    checkpoint: Checkpoint, parameter: Parameter, label: str, start: int, stop: int
) -> list[tuple[Parameter, StoredPiece]]:
    """Returns the tensors that contain a state of some elements of a parameter, each with its entry.

    Raises:
        UnitMismatchError: The state belongs to a part of the parameter as a whole, and this run has other parts, other
            servers, or other data ranks.
    """
    found = list(stored_pieces(checkpoint, parameter, label, start, stop))
    for entry, stored in found:
        piece = stored.piece
        if piece.kind != "whole" or not piece.shape:
            continue
        what = f"the state {label!r} of {parameter.name!r} in checkpoint {checkpoint.url} belongs to"
        if entry.box != parameter.box:
            raise UnitMismatchError(
                f"{what} a part of shape {entry.shape} as a whole, and this run has a part of shape "
                f"{parameter.shape}: resume with the tensor parallelism of the checkpoint",
                parameter=parameter.name,
            )
        if (piece.start, piece.stop) != (start, stop):
            raise UnitMismatchError(
                f"{what} elements [{piece.start}, {piece.stop}) as a whole, and this run has elements "
                f"[{start}, {stop}) on one server and data rank: resume with as many servers and data ranks as the "
                "checkpoint was saved with",
                parameter=parameter.name,
            )
    return found


def _fill(
    checkpoint: Checkpoint,
    parameter: Parameter,
    label: str,
    start: int,
    stop: int,
    target: torch.Tensor,
    note_read: NoteRead,
) -> None:
    """Reads a state of some elements of a parameter."""
    found = _find(checkpoint, parameter, label, start, stop)
    memory = memory_at(target.data_ptr(), target.nbytes, target)
    # State that has no element per value cannot be cut, so it must be the same in all parts.
    if found and found[0][1].piece.kind != "elements":
        _read_whole(checkpoint, found[0][1], memory)
        if any(checkpoint.read(stored) != bytes(memory) for _, stored in found[1:]):
            raise UnitMismatchError(
                f"the state {label!r} of {parameter.name!r} in checkpoint {checkpoint.url} differs between parts of "
                "the parameter, and this run divides the parameter into other parts: resume with as many servers and "
                "data ranks as the checkpoint was saved with",
                parameter=parameter.name,
            )
        note_read(target.nbytes)
        return
    count = read_elements(checkpoint, parameter, found, (start, stop), memory, note_read)
    if count != stop - start:
        raise CorruptDataError(
            f"{checkpoint.url}: {label} of parameter {parameter.name!r} is incomplete: {count} of the {stop - start} "
            f"elements [{start}, {stop})",
            parameter=parameter.name,
        )


def _read_whole(checkpoint: Checkpoint, stored: StoredPiece, memory: memoryview) -> None:
    if stored.piece.size_bytes != memory.nbytes:
        raise CorruptDataError(
            f"{checkpoint.url}: {stored.piece.name!r} has {stored.piece.size_bytes} bytes, expected {memory.nbytes}"
        )
    checkpoint.read_into(stored, memory)
