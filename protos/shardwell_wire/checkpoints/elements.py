"""Reads elements of a model's parameters from a checkpoint, however the checkpoint divides the parameters into parts.

A run of another grid divides them differently: tensor parallelism stores parts of parameters. All of it is found by the
name of the parameter and the place of the elements in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardwell_wire.boxes import common_runs
from shardwell_wire.checkpoints.format import Piece
from shardwell_wire.checkpoints.reading import Checkpoint, StoredPiece
from shardwell_wire.errors import UnitMismatchError
from shardwell_wire.layout import Parameter

NoteRead = Callable[[int], None]
"""Called with the number of bytes that were read."""


def require_same_tensor(parameter: Parameter, stored: Parameter | None, where: str) -> None:
    """Compares a parameter or buffer of a model with the entry of a checkpoint that has its name.

    Args:
        parameter: The parameter, or one of its parts.
        stored: An entry of the checkpoint. None: it has no entry of this name.
        where: The checkpoint, for messages.

    Raises:
        UnitMismatchError: There is no entry, or one of another tensor.
    """
    advice = "resume with the model that the checkpoint was saved with"
    if stored is None:
        raise UnitMismatchError(
            f"{parameter.name!r} is not in checkpoint {where}: {advice}, whose parameters and buffers have the same "
            "names",
            parameter=parameter.name,
        )
    ours, theirs = (parameter.dtype, parameter.box.whole), (stored.dtype, stored.box.whole)
    if ours != theirs:
        raise UnitMismatchError(
            f"{parameter.name!r} is a {ours[0]} tensor of shape {ours[1]} in the model, but a {theirs[0]} tensor of "
            f"shape {theirs[1]} in checkpoint {where}: {advice}",
            parameter=parameter.name,
            expected=theirs,
            actual=ours,
        )


def entries_of(checkpoint: Checkpoint, parameter: Parameter, start: int, stop: int) -> list[Parameter]:
    """Returns the entries of a checkpoint that contain some elements of a parameter or of its part.

    Args:
        checkpoint: The checkpoint.
        parameter: The parameter, or one of its parts, of a run that may have another grid.
        start: First element of the flattened ``parameter``.
        stop: End of the elements, exclusive.

    Raises:
        UnitMismatchError: The checkpoint lacks the parameter, or has another tensor of this name.
    """
    names = (parameter.name, *parameter.aliases)
    found = next((entries for name in names if (entries := checkpoint.entries(name))), ())
    require_same_tensor(parameter, found[0] if found else None, checkpoint.url)
    return [each for each in found if next(_runs(parameter, (start, stop), each, (0, each.numel)), None) is not None]


def pieces_of(
    checkpoint: Checkpoint, parameter: Parameter, state: str, start: int, stop: int
) -> Iterator[tuple[Parameter, StoredPiece]]:
    """Yields the tensors of a checkpoint that contain a state of some elements, each with its entry.

    Arguments and errors as ``entries_of``; ``state`` as in ``Piece.state``.
    """
    for entry in entries_of(checkpoint, parameter, start, stop):
        for stored in checkpoint.pieces(entry.key, state):
            limits = (stored.piece.start, stored.piece.stop)
            if next(_runs(parameter, (start, stop), entry, limits), None) is not None:
                yield entry, stored


def read_elements(
    checkpoint: Checkpoint,
    parameter: Parameter,
    found: Sequence[tuple[Parameter, StoredPiece]],
    elements: tuple[int, int],
    target: Any,
    note_read: NoteRead = lambda _: None,
) -> int:
    """Reads some elements of a state that has one entry per element of the parameter.

    Args:
        checkpoint: The checkpoint.
        parameter: The parameter, or one of its parts.
        found: Result of ``pieces_of``.
        elements: Half-open range of elements of the flattened ``parameter``.
        target: Writable memory of these elements. Elements that the checkpoint lacks are left as they are.
        note_read: Called for each tensor.

    Returns:
        The number of elements that were read.

    Raises:
        CorruptDataError: A tensor is damaged; the message names the file. ``target`` then has undefined bytes.
    """
    total = 0
    for entry, stored in found:
        piece, count = stored.piece, [0]
        runs = _byte_runs(_runs(parameter, elements, entry, (piece.start, piece.stop)), elements[0], piece, count)
        checkpoint.copy_into(stored, target, runs)
        note_read(count[0] * piece.item_size)
        total += count[0]
    return total


def _byte_runs(
    runs: Iterator[tuple[int, int, int]], our_start: int, piece: Piece, count: list[int]
) -> Iterator[tuple[int, int, int]]:
    """Converts runs of elements to runs of bytes in the target and in the tensor. Adds the elements to ``count[0]``."""
    size = piece.item_size
    for ours, theirs, length in runs:
        count[0] += length
        yield (ours - our_start) * size, (theirs - piece.start) * size, length * size


def _runs(
    parameter: Parameter, elements: tuple[int, int], entry: Parameter, limits: tuple[int, int]
) -> Iterator[tuple[int, int, int]]:
    return common_runs(parameter.box, elements, entry.box, limits)
