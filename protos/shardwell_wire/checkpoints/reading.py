"""Reads checkpoints by key (``Parameter.key``) and element range, over all files, and checks what it reads.

A run of another grid divides parameters differently: tensor parallelism stores parts of them. ``read_elements`` finds
all of it by the name of the parameter and the place of the elements in the whole tensor.

Note: [Contents in errors]
    A file in the place of a checkpoint's file may be something else, which the user who named the folder must not read.
    Until the checksum of a manifest or a header has been compared, errors therefore have no bytes and no numbers from
    the file, and the number of bytes to read is checked before they are read. Whoever made a file with the right
    checksum knew what it contains.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import xxhash

from shardwell_wire.checkpoints.format import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    VALUES,
    FileIndex,
    FileRecord,
    Part,
    Piece,
    PlacedPiece,
    checksum_of,
    header_size,
)
from shardwell_wire.checkpoints.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest
from shardwell_wire.checkpoints.storage import Storage, open_storage
from shardwell_wire.errors import CorruptDataError, NotFoundError, UnitMismatchError
from shardwell_wire.model.layout import Parameter, common_runs, with_model_names

ByteRun = tuple[int, int, int]
"""First byte in the target, first byte in the tensor, and number of bytes."""


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A tensor of a checkpoint and its place."""

    file: FileRecord
    placed: PlacedPiece

    @property
    def piece(self) -> Piece:
        return self.placed.piece


class Checkpoint:
    """A complete checkpoint. Methods may be called from any thread.

    Opening it reads the manifest and the headers of all files, and checks that they agree and that all values are
    there. Tensors are checked when they are read.

    Args:
        storage: Storage of the checkpoint's folder.

    Attributes:
        manifest: Run, step, units and files.
        units: The units, in which the names in the model are aliases.
        files: The tensors of each file.

    Raises:
        NotFoundError: There is no checkpoint, or a file is missing.
        CorruptDataError: The manifest or a header is damaged; the message names the file.
        ShardwellError: See ``Storage``.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.manifest = read_manifest(storage)
        self.files: Mapping[str, FileIndex] = {
            file.name: read_index(storage, self.manifest, file) for file in self.manifest.files
        }
        self._pieces: dict[str, dict[str, list[StoredPiece]]] = defaultdict(lambda: defaultdict(list))
        self._parts: dict[str, list[Part]] = defaultdict(list)
        for file in self.manifest.files:
            for placed in self.files[file.name].pieces:
                self._pieces[placed.piece.parameter][placed.piece.state].append(StoredPiece(file, placed))
            for part in self.files[file.name].parts:
                self._parts[part.parameter].append(part)
        self.units = with_model_names(self.manifest.units)
        self._by_key = {each.key: each for unit in self.manifest.units for each in unit.parameters}
        self._by_name: dict[str, list[Parameter]] = defaultdict(list)
        for each in {each.key: each for unit in self.units for each in unit.parameters}.values():
            if each.numel or not each.is_part:
                for name in (each.name, *each.aliases):
                    self._by_name[name].append(each)
        self._check_agreement()

    @classmethod
    def open(cls, url: str | Path) -> Checkpoint:
        """Opens the checkpoint in a folder, a path or URL."""
        return cls(open_storage(url))

    @property
    def url(self) -> str:
        """The checkpoint's folder."""
        return self._storage.url

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Parameters, their parts and buffers by ``Parameter.key``, in the order of the units."""
        return self._by_key

    @property
    def averages_begun(self) -> bool:
        """True if a step has updated moving averages."""
        return any(file.averages_begun for file in self.files.values())

    def states(self, parameter: str) -> Sequence[str]:
        """Returns what is stored of a parameter, such as ``values`` and ``exp_avg``, sorted."""
        self._require(parameter)
        return sorted(self._pieces[parameter]) if parameter in self._pieces else []

    def parts(self, parameter: str) -> Sequence[Part]:
        """Returns how the optimizer has updated a parameter, by element range in order."""
        self._require(parameter)
        return sorted(self._parts.get(parameter, ()), key=lambda part: part.start)

    def pieces(self, parameter: str, state: str, start: int = 0, stop: int | None = None) -> Sequence[StoredPiece]:
        """Returns the tensors that belong to some elements of a parameter, in order. Empty if there are none.

        Args:
            parameter: Key of the parameter or buffer.
            state: As in ``Piece.state``.
            start: First element of the flattened parameter.
            stop: End of the elements, exclusive. None: the parameter's end.
        """
        stop = self._require(parameter).numel if stop is None else stop
        found = self._pieces.get(parameter, {}).get(state, ())
        return [each for each in found if each.piece.start < stop and start < each.piece.stop]

    def entries(self, name: str) -> Sequence[Parameter]:
        """Returns the entries of a parameter or buffer by name or alias: itself, or all parts that have elements.

        Empty if the checkpoint has no tensor of this name.
        """
        return self._by_name.get(name, ())

    def _require(self, parameter: str) -> Parameter:
        if parameter not in self._by_key:
            raise NotFoundError(f"{self.url} has no parameter or buffer {parameter!r}", parameter=parameter)
        return self._by_key[parameter]

    # ---- reading ----

    def read(self, stored: StoredPiece, start: int | None = None, stop: int | None = None) -> bytearray:
        """Reads a tensor, or some elements of it. Reads all its bytes to compare the checksum.

        Args:
            stored: The tensor.
            start: First element of the flattened parameter. None: the tensor's first.
            stop: End of the elements, exclusive. None: the tensor's end.

        Raises:
            CorruptDataError: The checksum differs; the message names the file and the tensor.
        """
        piece = stored.piece
        first, last = 0, piece.size_bytes
        if start is not None or stop is not None:
            assert piece.kind == "elements", f"{piece.name!r} cannot be cut"
            first = ((piece.start if start is None else start) - piece.start) * piece.item_size
            last = ((piece.stop if stop is None else stop) - piece.start) * piece.item_size
        target = bytearray(last - first)
        self.read_into(stored, memoryview(target), first)
        return target

    def read_into(self, stored: StoredPiece, target: Any, offset_bytes: int = 0) -> None:
        """Reads bytes of a tensor into writable memory, and compares the checksum of the whole tensor.

        Args:
            target: Writable contiguous buffer.
            offset_bytes: Position in the tensor of the first byte of ``target``.

        Raises:
            CorruptDataError: The checksum differs, or the file ends early. ``target`` then has undefined bytes.
        """
        size = memoryview(target).nbytes
        _read_piece(self._storage, stored, target, [(0, offset_bytes, size)] if size else ())

    def copy_into(self, stored: StoredPiece, target: Any, runs: Iterable[ByteRun]) -> None:
        """Reads ranges of a tensor into writable memory, and compares the checksum of the whole tensor.

        Reads one window of the file at a time, whatever the size of the tensor.

        Args:
            target: Writable contiguous buffer.
            runs: The ranges, in rising order. Must not be outside of the tensor.

        Raises:
            CorruptDataError: As ``read_into``.
        """
        _read_piece(self._storage, stored, target, runs)

    # ---- checks ----

    def _check_agreement(self) -> None:
        """Raises CorruptDataError unless the tensors fit the units of the manifest, and all values are there."""
        if unknown := sorted((self._pieces.keys() | self._parts.keys()) - self._by_key.keys()):
            raise CorruptDataError(f"{self.url}: a file has a tensor of {unknown[0][:200]!r}, which no unit contains")
        for name, parameter in self._by_key.items():
            by_state = self._pieces.get(name, {})
            for state, stored in by_state.items():
                stored.sort(key=lambda each: (each.piece.start, each.piece.stop))
                self._check_pieces(parameter, state, [each.piece for each in stored])
            covered = sum(each.piece.stop - each.piece.start for each in by_state.get(VALUES, ()))
            if covered != parameter.numel:
                raise CorruptDataError(
                    f"{self.url} has {covered} of the {parameter.numel} values of {name!r}: a file is missing from the "
                    "manifest",
                    parameter=name,
                )

    def _check_pieces(self, parameter: Parameter, state: str, pieces: Sequence[Piece]) -> None:
        position = 0
        for piece in pieces:
            if piece.start < position or piece.stop > parameter.numel:
                raise CorruptDataError(
                    f"{self.url}: {piece.name!r} overlaps another tensor, or is longer than the {parameter.numel} "
                    "elements of the parameter",
                    tensor=piece.name,
                )
            if state == VALUES and (piece.dtype != parameter.dtype or piece.kind != "elements"):
                raise CorruptDataError(
                    f"{self.url}: {piece.name!r} has dtype {piece.dtype}, expected {parameter.dtype}", tensor=piece.name
                )
            position = piece.stop


def read_manifest(storage: Storage) -> Manifest:
    """Returns the manifest of the checkpoint in a folder.

    Raises:
        NotFoundError: The folder has no manifest, so it contains no complete checkpoint.
        CorruptDataError: The manifest is damaged, too large, or of a newer version.
    """
    where = storage.where(MANIFEST_NAME)
    try:
        size = storage.size(MANIFEST_NAME)
    except NotFoundError as error:
        raise NotFoundError(
            f"{storage.url} contains no complete checkpoint: {MANIFEST_NAME} is missing", path=storage.url
        ) from error
    if size > MAX_MANIFEST_BYTES:
        raise CorruptDataError(f"{where} has {size} bytes, more than the limit of {MAX_MANIFEST_BYTES}")
    return Manifest.from_bytes(storage.read(MANIFEST_NAME, 0, size), where)


def check_size(storage: Storage, file: FileRecord) -> None:
    """Raises unless a file of a checkpoint exists with its size.

    Raises:
        NotFoundError: The file is missing.
        CorruptDataError: The file was truncated or extended.
    """
    where = storage.where(file.name)
    try:
        size = storage.size(file.name)
    except NotFoundError as error:
        raise NotFoundError(f"{where} is missing from the checkpoint", path=where, file=file.name) from error
    if size != file.size_bytes:
        kind = "truncated" if size < file.size_bytes else "too long"
        raise CorruptDataError(f"{where} is {kind}: {size} bytes, expected {file.size_bytes}", file=file.name)


def read_index(storage: Storage, manifest: Manifest, file: FileRecord) -> FileIndex:
    """Reads and checks the header of one file. Raises as ``Checkpoint``."""
    where = storage.where(file.name)
    check_size(storage, file)
    if file.header_bytes > LENGTH_BYTES + MAX_HEADER_BYTES:
        raise CorruptDataError(f"the header of {where} is longer than the limit of {MAX_HEADER_BYTES} bytes")
    header = storage.read(file.name, 0, file.header_bytes)
    if header_size(header[:LENGTH_BYTES], file.size_bytes, where) != file.header_bytes:
        raise CorruptDataError(f"the header of {where} is damaged: its length differs from the manifest's")
    if checksum_of(header) != file.header_xxh3_64:
        raise CorruptDataError(
            f"the header of {where} is damaged: its checksum differs from the manifest's",
            file=file.name,
        )
    index = FileIndex.parse(header, file.size_bytes, where)
    if (index.run_id, index.step) != (manifest.run_id, manifest.step):
        raise CorruptDataError(
            f"{where} belongs to step {index.step} of run {index.run_id}, the manifest to step {manifest.step} of run "
            f"{manifest.run_id}",
            file=file.name,
        )
    return index


def verify_piece(storage: Storage, stored: StoredPiece) -> None:
    """Compares the checksum of a tensor. Raises as ``Checkpoint.read``."""
    _read_piece(storage, stored, b"", ())


def _read_piece(storage: Storage, stored: StoredPiece, target: Any, runs: Iterable[ByteRun]) -> None:
    view = memoryview(target).cast("B") if memoryview(target).nbytes else memoryview(b"")
    size, hasher = stored.piece.size_bytes, xxhash.xxh3_64()
    waiting, pending = iter(runs), list[ByteRun]()
    for start in range(0, size, storage.window_bytes):
        stop = min(start + storage.window_bytes, size)
        place = stored.placed.start_bytes
        window = storage.read(stored.file.name, place + start, place + stop)
        if len(window) != stop - start:
            raise _damaged(storage, stored, "the file ends early")
        hasher.update(window)
        pending = _copy_window(memoryview(window), start, view, chain(pending, waiting))
    assert not pending, f"{stored.piece.name!r} has {size} bytes"
    if hasher.hexdigest() != stored.placed.checksum:
        raise _damaged(storage, stored, "its checksum differs from the header's")


def _copy_window(window: memoryview, start: int, target: memoryview, runs: Iterable[ByteRun]) -> list[ByteRun]:
    """Copies the runs inside a window of a tensor that starts at byte ``start``. Returns the first run after it."""
    stop = start + window.nbytes
    for to, first, count in runs:
        here = max(0, min(count, stop - first))
        if here:
            target[to : to + here] = window[first - start : first - start + here]
        if here < count:
            return [(to + here, first + here, count - here)]
    return []


def _damaged(storage: Storage, stored: StoredPiece, reason: str) -> CorruptDataError:
    return CorruptDataError(
        f"tensor {stored.piece.name!r} in {storage.where(stored.file.name)} is damaged: {reason}",
        file=stored.file.name,
        tensor=stored.piece.name,
    )


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
