"""Reads and writes the safetensors file format piece by piece, without holding whole tensors.

Writes checkpoints in the formats of other libraries, from values that arrive one after another.

Reads checkpoints of runs by name and element range, without a cluster and without the model's code.

>>> checkpoint = shardwell.open_checkpoint("checkpoints/gpt/step-000000042-6fd1c0a2")
>>> checkpoint.read("blocks.0.proj.weight")
>>> checkpoint.read("blocks.0.proj.weight", "exp_avg", start=0, stop=1000)
>>> model.load_state_dict(checkpoint.state_dict())

docs/checkpoints.md specifies the format.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwell_wire.checkpoints import format as safetensors_header
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import (
    AVERAGE,
    KEPT_GRADIENT,
    LENGTH_BYTES,
    RESIDUAL,
    TRAINER_STATE,
    VALUES,
    Piece,
    header_size,
    parse_header,
)
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.checkpoints.opening import open_storage
from shardwell_wire.checkpoints.reading import Checkpoint
from shardwell_wire.errors import CorruptDataError, NotFoundError, UsageError
from shardwell_wire.model.layout import Parameter

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
"""File names in a model's folder, as in Hugging Face's libraries."""

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by the format's names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int
    """Position in the file."""

    def read(self, runs: Iterable[tuple[int, int]]) -> bytes:
        """Reads some elements.

        Args:
            runs: ``(first element, number of elements)`` in the flattened tensor.

        Raises:
            CorruptDataError: The file was truncated.
            OSError: The file cannot be read.
        """
        size, parts = self.dtype.itemsize, []
        with self.path.open("rb", buffering=0) as file:
            for first, count in runs:
                file.seek(self.start_bytes + first * size)
                part = file.read(count * size)
                if len(part) != count * size:
                    raise CorruptDataError(f"{self.path} ends in the middle of tensor {self.name!r}")
                parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def find_tensors(path: str | Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a checkpoint by name. Reads headers only.

    Args:
        path: A safetensors file, an index of several (``*.index.json``), or a folder with either.

    Raises:
        NotFoundError: There is no such file.
        CorruptDataError: A file is not a safetensors file or is truncated, or the index contradicts the files.
    """
    path = Path(path)
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise NotFoundError(f"no safetensors file or index at {path}", path=path)
    return _of_index(path) if path.name.endswith(".json") else read_header(path)


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE_NAME, INDEX_NAME):
        if (folder / name).is_file():
            return folder / name
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        found = ", ".join(file.name for file in files[:5]) or "none"
        raise NotFoundError(
            f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}, and not exactly one other safetensors file "
            f"({found}): pass the file or the index",
            path=folder,
        )
    return files[0]


def _of_index(path: Path) -> dict[str, StoredTensor]:
    try:
        places = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {name: path.parent / file for name, file in places.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(
            f"{path} is not an index of safetensors files: expected a JSON object with a weight_map"
        ) from error
    headers: dict[Path, dict[str, StoredTensor]] = {}
    for file in dict.fromkeys(files.values()):
        if not file.is_file():
            raise NotFoundError(f"{path} refers to {file.name}, which does not exist", path=file)
        headers[file] = read_header(file)
    for name, file in files.items():
        if name not in headers[file]:
            raise CorruptDataError(f"{path} refers to tensor {name!r} in {file.name}, which does not contain it")
    return {name: headers[file][name] for name, file in files.items()}


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of one file by name.

    Raises:
        CorruptDataError: The file is not a safetensors file, or is truncated.
    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        header = start + file.read(header_size(start, size_bytes, str(path)) - LENGTH_BYTES)
    entries, _ = parse_header(header, size_bytes, str(path))
    return {
        name: StoredTensor(path, name, DTYPES[entry.dtype], entry.shape, entry.start_bytes)
        for name, entry in entries.items()
    }


def is_storable(dtype: torch.dtype) -> bool:
    """Returns whether the format supports a dtype."""
    return dtype in _NAMES


def make_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file. The bytes of the tensors follow in the same order.

    Args:
        tensors: Dtype and shape by name.
        metadata: Additional strings.
    """
    stored = {name: (_NAMES[dtype], shape) for name, (dtype, shape) in tensors.items()}
    return safetensors_header.make_header(stored, metadata)


Values = Iterator[tuple[str, torch.Tensor]]

_EXPORTED_FILE = re.compile(rf"model-\d{{5}}-of-\d{{5}}\.safetensors|{re.escape(SINGLE_NAME)}|{re.escape(INDEX_NAME)}")


def write_safetensors(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Values,
    *,
    max_shard_bytes: int,
    metadata: Mapping[str, str],
) -> list[Path]:
    """Writes ``model.safetensors``, or several files with an index, as Hugging Face's libraries do.

    Args:
        folder: Created if it does not exist. Files of an earlier export are removed.
        tensors: Names and tensors with the right shapes and dtypes. Their memory is not read.
        values: The same names in the same order, with values.
        max_shard_bytes: Largest size of the tensors in one file. A larger tensor gets its own file.
        metadata: Additional strings for the headers of the files.

    Returns:
        The files with tensors.

    Raises:
        UsageError: The format does not support a dtype, or ``max_shard_bytes`` is not positive.
        OSError: The files cannot be written. The folder is unchanged.
    """
    if max_shard_bytes < 1:
        raise UsageError(f"max_shard_bytes is {max_shard_bytes}: expected at least 1")
    for name, tensor in tensors.items():
        if not is_storable(tensor.dtype):
            raise UsageError(
                f"{name!r} has dtype {tensor.dtype}, which safetensors files do not support", parameter=name
            )
    files = _cut(tensors, max_shard_bytes)
    with staged(folder, markers=(INDEX_NAME, SINGLE_NAME), is_exported=_is_exported) as stage:
        for file in files:
            _write(stage / file.name, file.tensors, values, {"format": "pt", **metadata})
        if len(files) > 1:
            (stage / INDEX_NAME).write_text(json.dumps(_index(files), indent=2, sort_keys=True) + "\n")
    return [folder / file.name for file in files]


def write_dcp(folder: Path, tensors: Mapping[str, Any], values: Values) -> None:
    """Writes a ``torch.distributed.checkpoint``. Arguments and OSError as in ``write_safetensors``.

    ``tensors`` may be a nested state dict with other values, too; see ``dcp_writing.write_checkpoint``.
    """
    from shardwell.weights.dcp import write_checkpoint

    with staged(folder, markers=(".metadata",), is_exported=lambda name: name.endswith(".distcp")) as stage:
        write_checkpoint(stage, tensors, values)


def total_bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    """Returns the size of all values."""
    return sum(map(_size_bytes, tensors.values()))


@contextmanager
def staged(folder: Path, *, markers: Collection[str], is_exported: Callable[[str], bool]) -> Iterator[Path]:
    """Yields a folder on the same disk; files written to it are moved into ``folder`` when all are complete.

    A reader of ``folder`` finds a marker only if every file of one export is present, also after a crash. If the block
    raises, for example because the disk is full, ``folder`` does not change.

    Args:
        folder: Destination of the files. Created if it does not exist.
        markers: Files without which readers do not recognise the checkpoint. They are removed first and moved last.
        is_exported: Returns whether a file name belongs to an earlier export. Such files are removed.
    """
    existed = folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        yield stage
        _sync(stage)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        if not existed:
            folder.rmdir()
        raise
    names = {path.name for path in stage.iterdir()}
    for marker in markers:
        (folder / marker).unlink(missing_ok=True)
    for path in folder.iterdir():
        if path.is_file() and path.name not in names and is_exported(path.name):
            path.unlink()
    for name in sorted(names, key=lambda name: (name in markers, name)):
        (stage / name).replace(folder / name)
    stage.rmdir()
    _sync(folder)


def _sync(folder: Path) -> None:
    """Makes the files of a folder and the folder itself durable."""
    for path in (*folder.iterdir(), folder):
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _is_exported(name: str) -> bool:
    return _EXPORTED_FILE.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    tensors: Mapping[str, torch.Tensor]


def _size_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _cut(tensors: Mapping[str, torch.Tensor], max_bytes: int) -> list[_File]:
    """Distributes tensors over files, in order."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = max_bytes
    for name, tensor in tensors.items():
        size = _size_bytes(tensor)
        if size > room and parts[-1]:
            parts.append({})
            room = max_bytes
        parts[-1][name] = tensor
        room -= size
    if len(parts) == 1:
        return [_File(SINGLE_NAME, parts[0])]
    count = len(parts)
    return [_File(f"model-{number:05}-of-{count:05}.safetensors", part) for number, part in enumerate(parts, 1)]


def _index(files: Sequence[_File]) -> dict[str, Any]:
    weight_map = {name: file.name for file in files for name in file.tensors}
    return {"metadata": {"total_size": sum(total_bytes(file.tensors) for file in files)}, "weight_map": weight_map}


def _write(path: Path, tensors: Mapping[str, torch.Tensor], values: Values, metadata: Mapping[str, str]) -> None:
    """Writes one file with the next values, which belong to ``tensors``."""
    described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with path.open("wb") as file:
        file.write(make_header(described, metadata))
        for expected in tensors:
            name, value = next(values)
            assert name == expected
            file.write(memory_of(value))
            del value  # before the next unit is gathered


def memory_of(value: torch.Tensor) -> memoryview:
    """Returns a view of a tensor's bytes, which is valid as long as the tensor."""
    flat = value.contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


_NO_OPTIMIZER_STATE = (VALUES, AVERAGE, KEPT_GRADIENT, RESIDUAL)


def open_checkpoint(url: str | Path, *, run: str | None = None) -> CheckpointReader:
    """Opens a checkpoint. Reads the manifest and the headers of all files.

    Args:
        url: Path or URL of the checkpoint's folder. With ``run``, of the folder of all runs, as in
            ``join(checkpoint_dir=)``.
        run: Name of the run whose newest complete checkpoint is opened.

    Raises:
        NotFoundError: There is no complete checkpoint, or a file is missing.
        CorruptDataError: The manifest or a header is damaged.
        UnavailableError: The storage cannot be reached.
    """
    if run is not None:
        entry = RunFolder.of(url, run).newest()
        if entry is None:
            raise NotFoundError(f"{url} contains no complete checkpoint of run {run!r}", run=run)
        url = entry.url
    return CheckpointReader(Checkpoint(open_storage(url)))


class CheckpointReader:
    """An open checkpoint. Created by ``open_checkpoint``.

    Every read compares the checksums of the tensors that it touches. Methods may be called from any thread.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, list[Parameter]] = {}
        """Entries of each parameter or buffer by name: one, or the parts that have elements."""
        for unit in self.manifest.units:
            for parameter in unit.parameters:
                if parameter.numel or not parameter.is_part:
                    self._parts.setdefault(parameter.name, []).append(parameter)

    @property
    def manifest(self) -> Manifest:
        """The manifest: world, seed, commit records, tracked state, units and files."""
        return self._checkpoint.manifest

    @property
    def url(self) -> str:
        """Path or URL of the checkpoint's folder."""
        return self._checkpoint.url

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.manifest.run

    @property
    def step(self) -> int:
        """Number of committed steps."""
        return self.manifest.step

    @property
    def parameters(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all parameters by name, in the order of the units. Tied parameters have their first name."""
        return self._shapes(holds_buffers=False)

    @property
    def buffers(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the persistent buffers by name."""
        return self._shapes(holds_buffers=True)

    def _shapes(self, *, holds_buffers: bool) -> dict[str, tuple[int, ...]]:
        units = [unit for unit in self.manifest.units if unit.holds_buffers == holds_buffers]
        return {parameter.name: parameter.box.whole for unit in units for parameter in unit.parameters}

    def states(self, name: str) -> Sequence[str]:
        """Returns what is stored of a parameter, such as ``values``, ``ema`` and ``exp_avg``, sorted.

        State that no step has created yet is absent, which differs from zeros.
        """
        return self._checkpoint.states(self._entries(name)[0].key)

    def _entries(self, name: str) -> Sequence[Parameter]:
        """Returns the entries of a parameter. A key, such as ``NAME@0,8``, names one part."""
        if name in self._parts:
            return self._parts[name]
        if name in self._checkpoint.parameters:
            return [self._checkpoint.parameters[name]]
        raise NotFoundError(f"{self.url} has no parameter or buffer {name!r}", parameter=name)

    def optimizer(self, name: str) -> tuple[str | None, int]:
        """Returns the optimizer that updated a parameter last, and the number of its updates.

        The optimizer is None before the first update.
        """
        parts = [part for part in self._checkpoint.parts(self._entries(name)[0].key) if part.algorithm is not None]
        return (parts[0].algorithm, parts[0].step_count) if parts else (None, 0)

    def read(
        self, name: str, state: str = VALUES, *, start: int | None = None, stop: int | None = None
    ) -> torch.Tensor:
        """Reads values or state of a parameter or buffer, joined over all files and all parts.

        Args:
            name: Name of the parameter or buffer in the run. ``NAME@OFFSET,OFFSET`` is one part of a parameter that
                tensor parallelism splits.
            state: ``values``, ``ema``, or a name from ``states``.
            start: First element of the flattened parameter. None: the first.
            stop: End of the elements, exclusive. None: the end.

        Returns:
            A tensor on the CPU. Without a range: of the parameter's shape, or the state's own shape if it does not
            consist of elements (such as ``step``). With a range: flat. [stop - start]

        Raises:
            NotFoundError: The checkpoint has no such parameter or state.
            CorruptDataError: The checksum of a tensor differs; the message names the file and the tensor.
            ValueError: The range is not within the parameter, the state does not consist of elements, or each part has
                a state of its own.
        """
        entries, stored_states = self._entries(name), self.states(name)
        shape = entries[0].box.whole if name == entries[0].name else entries[0].shape
        numel = math.prod(shape)
        first, last = 0 if start is None else start, numel if stop is None else stop
        if not 0 <= first <= last <= numel:
            raise ValueError(f"elements [{first}, {last}) of {name!r}: it has {numel}")
        if state not in stored_states and (state != VALUES or numel):  # no file has a part of an empty one
            raise NotFoundError(
                f"{self.url} has no {state!r} of {name!r}, only {', '.join(stored_states) or 'nothing'}", parameter=name
            )
        some = self._checkpoint.pieces(entries[0].key, state)[:1]
        if some and some[0].piece.kind != "elements":
            if start is not None or stop is not None:
                raise ValueError(f"{state!r} of {name!r} does not consist of elements: read it without a range")
            self._require_common(name, entries, some[0].piece)
            return _tensor(self._checkpoint.read(some[0]), some[0].piece.dtype).view(some[0].piece.shape)
        dtype = some[0].piece.dtype if some else entries[0].dtype
        if name != entries[0].name or not entries[0].is_part:
            flat = self._read_elements(entries[0].key, state, first, last, dtype)
        else:
            flat = self._join(entries, state, dtype).view(-1)[first:last]
        return flat if start is not None or stop is not None else flat.view(shape)

    def _require_common(self, name: str, entries: Sequence[Parameter], piece: Piece) -> None:
        """Raises ValueError unless a state that does not consist of elements belongs to all parts together."""
        if len(entries) > 1 and piece.shape:
            raise ValueError(
                f"each part of {name!r} has a {piece.state!r} of its own, of shape {piece.shape}: read it by the name "
                f"of the part, one of {', '.join(repr(entry.key) for entry in entries)}"
            )

    def _join(self, parts: Sequence[Parameter], state: str, dtype: str) -> torch.Tensor:
        """Reads all parts of a parameter. [shape of the whole]"""
        whole = torch.empty(parts[0].box.whole, dtype=getattr(torch, dtype))
        for part in parts:
            whole[part.box.slices] = self._read_elements(part.key, state, 0, part.numel, dtype).view(part.shape)
        missing = whole.numel() - sum(part.numel for part in parts)
        if missing:
            raise CorruptDataError(
                f"{self.url} lacks {missing} of the {whole.numel()} elements of {parts[0].name!r}",
                parameter=parts[0].name,
            )
        return whole

    def _read_elements(self, key: str, state: str, first: int, last: int, dtype: str) -> torch.Tensor:
        flat, done = torch.empty(last - first, dtype=getattr(torch, dtype)), first
        for stored in self._checkpoint.pieces(key, state, first, last):
            piece = stored.piece
            low, high = max(first, piece.start), min(last, piece.stop)
            if low != done or piece.dtype != dtype:
                break
            target = flat[low - first : high - first].view(torch.uint8).numpy()
            self._checkpoint.read_into(stored, target, (low - piece.start) * piece.item_size)
            done = high
        if done != last:
            raise CorruptDataError(
                f"{self.url} has {state!r} of {key!r} only up to element {done} of [{first}, {last})", parameter=key
            )
        return flat

    def optimizer_state(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the whole optimizer state of a parameter by torch's names. Empty before the first update."""
        names = [state for state in self.states(name) if not state.startswith(_NO_OPTIMIZER_STATE)]
        return {state.removeprefix(TRAINER_STATE): self.read(name, state) for state in names}

    def optimizer_tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Returns the optimizer state of a parameter on the meta device, by its names in the checkpoint."""
        entries, found = self._entries(name), {}
        shape = entries[0].box.whole
        for state in self.states(name):
            if not state.startswith(_NO_OPTIMIZER_STATE):
                piece = self._checkpoint.pieces(entries[0].key, state)[0].piece
                if piece.kind != "elements":
                    self._require_common(name, entries, piece)
                own = shape if piece.kind == "elements" else piece.shape
                found[state] = torch.empty(own, dtype=getattr(torch, piece.dtype), device="meta")
        return found

    def state_dict(self, *, ema: bool = False) -> dict[str, torch.Tensor]:
        """Returns all parameters and persistent buffers by name.

        Args:
            ema: Return moving averages instead of values where there are any.
        """
        return {
            name: self.read(name, AVERAGE if ema and AVERAGE in self.states(name) else VALUES) for name in self._parts
        }


def _tensor(data: bytearray, dtype: str) -> torch.Tensor:
    return torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0, dtype=getattr(torch, dtype))
