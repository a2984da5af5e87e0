"""Reads and writes a ``torch.distributed.checkpoint``, one tensor at a time and in one process.

torch writes the file ``.metadata`` with Python's object serialization, which can name any function to be called. This
module follows the same instructions, but creates inert records instead of objects, and accepts only the records that
torch writes.

Imported on use, because importing ``torch.distributed.checkpoint`` is slow.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from shardwell.weights.weight_files import Values, staged
from shardwell_wire.errors import CorruptDataError, NotFoundError

METADATA_NAME = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""Larger files are refused."""


EntryPath = tuple[Any, ...]
"""Path in the nested state dict, such as ``("optim", "state", "layer.weight", "exp_avg")``."""


@dataclass(frozen=True, slots=True)
class DcpItem:
    """Where bytes of an entry are stored."""

    path: str
    """Name of the file in the checkpoint's folder."""
    offset_bytes: int
    length_bytes: int


@dataclass(frozen=True, slots=True)
class DcpChunk:
    """A box of a tensor in a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: DcpItem


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Sequence[DcpChunk]


class DcpReader:
    """An open checkpoint of ``torch.distributed.checkpoint``, by the paths of its nested state dict.

    Args:
        folder: The checkpoint's folder.

    Raises:
        NotFoundError: There is no checkpoint.
        CorruptDataError: Its metadata is damaged.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: Mapping[EntryPath, DcpTensor]
        """Descriptions of all tensors."""
        self.values: Mapping[EntryPath, DcpItem]
        """Places of all entries that are not tensors."""
        self.tensors, self.values = _read_metadata(self.folder)

    def tensor(self, path: EntryPath) -> torch.Tensor:
        """Reads a tensor and joins its chunks.

        Raises:
            CorruptDataError: A chunk is damaged, or elements are missing.
        """
        described = self.tensors[path]
        whole, covered = torch.empty(described.shape, dtype=described.dtype), 0
        for chunk in described.chunks:
            values = self._load(chunk.item, path)
            if not isinstance(values, torch.Tensor) or (values.dtype, tuple(values.shape)) != (
                described.dtype,
                chunk.sizes,
            ):
                raise CorruptDataError(
                    f"{self.folder / chunk.item.path}: the chunk of {_text(path)} at {chunk.offsets} is not a tensor "
                    f"of {described.dtype} {chunk.sizes}"
                )
            box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box].copy_(values)
            covered += values.numel()
        if covered < math.prod(described.shape):
            raise CorruptDataError(f"{self.folder} has {covered} of the {whole.numel()} elements of {_text(path)}")
        return whole

    def value(self, path: EntryPath) -> Any:
        """Reads an entry that is not a tensor: numbers, text, tuples, lists and maps of them.

        Raises:
            CorruptDataError: It is damaged, or has an object of another class.
        """
        return self._load(self.values[path], path)

    def _load(self, item: DcpItem, path: EntryPath) -> Any:
        file_path = self.folder / item.path
        try:
            with file_path.open("rb") as file:
                file.seek(item.offset_bytes)
                data = file.read(min(item.length_bytes, max(0, file_path.stat().st_size - item.offset_bytes)))
        except FileNotFoundError as error:
            raise NotFoundError(f"{file_path} is missing, which contains {_text(path)}", path=file_path) from error
        if len(data) < item.length_bytes:
            raise CorruptDataError(f"{file_path} ends in the middle of {_text(path)}")
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # torch raises whatever its parsers raise
            raise CorruptDataError(
                f"{_text(path)} in {file_path} cannot be read: {str(error).splitlines()[0] if str(error) else error!r}"
            ) from error


def _text(path: EntryPath) -> str:
    return ".".join(map(str, path))


# ---- writing ----


class _StreamingPlanner(DefaultSavePlanner):
    """Takes each tensor from an iterator when the writer needs it.

    Args:
        values: Names and tensors, in the order of the state dict.
    """

    def __init__(self, values: Values) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the value of an item. Called once per item, in the order of the plan."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        name, value = next(self._values)
        assert name == write_item.index.fqn, f"the next value is {name}, expected {write_item.index.fqn}"
        return value


def write_dcp(folder: Path, state: Mapping[str, Any], values: Values) -> None:
    """Writes a checkpoint with the library's own writer. Its files appear together.

    Args:
        folder: Created if it does not exist. Files of an earlier export are removed.
        state: The state dict, which may be nested. Tensors have the right shapes and dtypes. Their memory is not read.
        values: The tensors in the same order, with values, by name. Names of nested tensors are joined with dots.

    Raises:
        OSError: The files cannot be written. The folder is unchanged.
    """
    with staged(folder, markers=(METADATA_NAME,), is_exported=lambda name: name.endswith(".distcp")) as stage:
        _write(stage, {name: _as_meta(value) for name, value in state.items()}, values)


def _write(folder: Path, meta: dict[str, Any], values: Values) -> None:
    # One file per tensor: the writer holds all tensors of a file until it closes the file.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    planner = _StreamingPlanner(values)
    # The steps of checkpoint.save in a single process. checkpoint.save itself would wrap every error and warn about the
    # single process.
    writer.reset(folder)
    planner.set_up_planner(meta, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(global_plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {name: _as_meta(item) for name, item in value.items()}
    return value


# ---- the metadata ----


def _read_metadata(folder: Path) -> tuple[dict[EntryPath, DcpTensor], dict[EntryPath, DcpItem]]:
    """Returns the tensors and the other values of the checkpoint in a folder.

    Raises:
        NotFoundError: There is no ``.metadata`` file.
        CorruptDataError: The file is damaged, or torch has not written it.
    """
    path = folder / METADATA_NAME
    if not path.is_file():
        raise NotFoundError(f"{folder} contains no torch.distributed.checkpoint: {METADATA_NAME} is missing", path=path)
    if path.stat().st_size > MAX_METADATA_BYTES:
        raise CorruptDataError(f"{path} has {path.stat().st_size} bytes, more than the limit of {MAX_METADATA_BYTES}")
    try:
        return _interpret(_Machine().run(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise CorruptDataError(
            f"{path} is damaged, or was written by something else than torch.distributed.checkpoint: "
            f"{type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Symbol:
    """A class or function that the file names. It is never imported."""

    module: str
    name: str


@dataclass(slots=True, eq=False)
class _Record:
    """What would have been an object."""

    symbol: _Symbol
    arguments: tuple[Any, ...]
    state: Any = None


_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINFLOAT"}
_EMPTY: dict[str, type] = {"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_IGNORED = {"PROTO", "FRAME"}


@dataclass(slots=True)
class _Machine:
    """Follows the instructions of a file. Raises ValueError for instructions that torch does not use."""

    stack: list[Any] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def run(self, data: bytes) -> Any:
        """Returns what the instructions describe."""
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self.stack.pop()
            if name not in _IGNORED:
                self._step(name, argument)
        raise ValueError("it ends early")

    def _step(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "GLOBAL":
            stack.append(_Symbol(*argument.split(" ", maxsplit=1)))
        elif name == "STACK_GLOBAL":
            own, module = stack.pop(), stack.pop()
            stack.append(_Symbol(module, own))
        else:
            self._build(name)

    def _build(self, name: str) -> None:
        stack = self.stack
        match name:
            case "TUPLE":
                stack.append(tuple(self._above_mark()))
            case "APPEND":
                item = stack.pop()
                stack[-1].append(item)
            case "APPENDS":
                items = self._above_mark()
                stack[-1].extend(items)
            case "SETITEM":
                value, key = stack.pop(), stack.pop()
                stack[-1][key] = value
            case "SETITEMS":
                items = self._above_mark()
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
            case "NEWOBJ" | "REDUCE":
                arguments, symbol = stack.pop(), stack.pop()
                if not isinstance(symbol, _Symbol) or not isinstance(arguments, tuple):
                    raise ValueError(f"{name} of {type(symbol).__name__}")
                stack.append(_Record(symbol, arguments))
            case "BUILD":
                state = stack.pop()
                stack[-1].state = state
            case _:
                raise ValueError(f"it contains the instruction {name}")

    def _above_mark(self) -> list[Any]:
        items: list[Any] = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]


# ---- records ----


def _interpret(root: Any) -> tuple[dict[EntryPath, DcpTensor], dict[EntryPath, DcpItem]]:
    fields = _fields(root, "Metadata")
    places = {_index(key): _item(value) for key, value in fields["storage_data"].items()}
    paths = fields.get("planner_data") or {}
    tensors: dict[EntryPath, DcpTensor] = {}
    values: dict[EntryPath, DcpItem] = {}
    for name, entry in fields["state_dict_metadata"].items():
        path = tuple(paths.get(name, (name,)))
        if entry.symbol.name == "BytesStorageMetadata":
            values[path] = places[name, None]
        else:
            tensors[path] = _tensor(name, _fields(entry, "TensorStorageMetadata"), places)
    return tensors, values


def _fields(record: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(record, _Record) or record.symbol.name != name:
        raise ValueError(f"found {getattr(record, 'symbol', record)!r:.100}, expected {name}")
    fields = record.state
    if not isinstance(fields, dict):
        raise ValueError(f"{name} has no fields")
    return fields


def _index(record: Any) -> tuple[str, tuple[int, ...] | None]:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return str(fields["fqn"]), None if offset is None else _size(offset)


def _item(record: Any) -> DcpItem:
    fields = _fields(record, "_StorageInfo")
    if fields.get("transform_descriptors"):
        raise ValueError(f"its files are transformed ({fields['transform_descriptors']}), such as compressed")
    path, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if not isinstance(path, str) or Path(path).name != path or not _are_sizes((offset, length)):
        raise ValueError(f"the place {path!r:.100}, {offset!r:.50}, {length!r:.50}")
    return DcpItem(path, offset, length)


def _tensor(
    name: str, fields: Mapping[str, Any], places: Mapping[tuple[str, tuple[int, ...] | None], DcpItem]
) -> DcpTensor:
    dtype = fields["properties"].state[0]
    found = getattr(torch, dtype.name, None) if isinstance(dtype, _Symbol) and dtype.module == "torch" else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} has dtype {dtype!r:.100}")
    shape, chunks = _size(fields["size"]), []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _size(box["offsets"]), _size(box["sizes"])
        inside = all(start + size <= whole for start, size, whole in zip(offsets, sizes, shape, strict=True))
        if not inside:
            raise ValueError(f"{name!r} {shape} has a chunk {sizes} at {offsets}")
        chunks.append(DcpChunk(offsets, sizes, places[name, offsets]))
    return DcpTensor(found, shape, chunks)


def _size(record: Any) -> tuple[int, ...]:
    """Returns the numbers of a ``torch.Size``."""
    if not isinstance(record, _Record) or record.symbol != _Symbol("torch", "Size"):
        raise ValueError(f"found {record!r:.100}, expected torch.Size")
    (numbers,) = record.arguments or ((),)
    if not _are_sizes(numbers):
        raise ValueError(f"torch.Size{numbers!r:.100}")
    return tuple(numbers)


def _are_sizes(numbers: Any) -> bool:
    return all(isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 62 for number in numbers)
