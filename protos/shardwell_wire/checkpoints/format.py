"""The files of a checkpoint: which tensors a file contains and where, how it is written, and how its header is parsed.

A safetensors file consists of the length of the header (8 bytes, little-endian), the header (JSON: name to dtype, shape
and half-open byte range after the header), and the bytes of the tensors in C order, without holes.
(https://github.com/huggingface/safetensors, "Format".)

Each shard server writes one such file for its shards. The header's metadata has one entry, ``shardwell``, which
contains the checksum of every tensor. The tensors are written in any order, and the header last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote

import xxhash

from shardwell_wire.checkpoints.storage import OutputFile, Storage
from shardwell_wire.errors import CapacityError, CorruptDataError
from shardwell_wire.model.layout import ITEM_SIZES, MAX_DIMS
from shardwell_wire.model.names import check_id

LENGTH_BYTES = 8
"""Size of the header's length at the start of a file."""

MAX_HEADER_BYTES = 100_000_000
"""Limit of the header's size in the reference implementation, without its length."""

SAFETENSORS_DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""torch's name of each dtype, and bytes per element, by the format's names."""

_ALIGNMENT_BYTES = 8
_METADATA = "__metadata__"
_MAX_SIZE = 1 << 62
"""Limit of sizes and offsets. Python's integers have none."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A tensor of a file."""

    dtype: str
    """The format's name, such as ``F32``."""
    shape: tuple[int, ...]
    start_bytes: int
    """Half-open, in the file."""
    stop_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the start of a file: the length and the header. The bytes of the tensors follow in the same order.

    Args:
        tensors: The format's name of the dtype, and the shape, by name.
        metadata: Additional strings.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape) in tensors.items():
        stop = position + math.prod(shape) * SAFETENSORS_DTYPES[dtype][1]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, stop]}
        position = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_size(start: bytes, size_bytes: int, where: str) -> int:
    """Returns the size of the length and the header together. See Note: [Contents in errors] in ``reading.py``.

    Args:
        start: The first 8 bytes of the file.

    Raises:
        CorruptDataError: The header would be longer than the file or the format's limit.
    """
    length = int.from_bytes(start, "little")
    if start[:4] == b"PK\3\4":
        raise CorruptDataError(
            f"{where} is a file of torch.save, not a safetensors file: call model.load_state_dict(torch.load(path)) "
            "before fully_shard, or convert the file with safetensors.torch.save_file"
        )
    if len(start) < LENGTH_BYTES or length > min(size_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CorruptDataError(
            f"{where} is not a safetensors file, or is truncated: {size_bytes} bytes, but its header is longer "
            f"than that, or than the limit of {MAX_HEADER_BYTES} bytes"
        )
    return LENGTH_BYTES + length


def parse_header(header: bytes, size_bytes: int, where: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Returns the tensors of a file by name, in the header's order, and its metadata.

    Args:
        header: The start of the file: the length and the header.

    Raises:
        CorruptDataError: The header does not parse, or does not describe exactly the bytes of the file.
    """
    try:
        content = parse_json(header[LENGTH_BYTES:])
        metadata = content.pop(_METADATA, {})
        if not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError(f"{_METADATA} has a value that is no string")
        entries = {name: _parse_entry(name, entry, len(header)) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptDataError(f"{where} is not a safetensors file: its header does not parse ({error})") from error
    _check_ranges(entries, len(header), size_bytes, where)
    return entries, metadata


def parse_json(text: bytes) -> dict[str, Any]:
    """Returns a JSON object.

    Raises:
        ValueError: The text is not a JSON object, a key is repeated, or the nesting is too deep.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_repetitions)
    except RecursionError:
        raise ValueError("its nesting is too deep") from None
    if not isinstance(content, dict):
        raise ValueError(f"it is {type(content).__name__}, expected an object")
    return content


def _without_repetitions(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is repeated")
        found[key] = value
    return found


def _parse_entry(name: str, entry: Mapping[str, Any], data_start: int) -> HeaderEntry:
    dtype, shape = entry["dtype"], entry["shape"]
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise ValueError(f"tensor {name!r} has unknown dtype {dtype!r}")
    start, stop = entry["data_offsets"]
    if len(shape) > MAX_DIMS or not all(_is_size(size) for size in (*shape, start, stop)):
        raise ValueError(f"tensor {name!r} has shape {str(shape)[:200]} and data_offsets {[start, stop]}")
    return HeaderEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_SIZE


def _check_ranges(entries: Mapping[str, HeaderEntry], data_start: int, size_bytes: int, where: str) -> None:
    """Raises CorruptDataError unless the tensors are stored one after another and fill the file."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].stop_bytes)):
        needed = math.prod(entry.shape) * SAFETENSORS_DTYPES[entry.dtype][1]
        if entry.start_bytes != position or entry.size_bytes != needed:
            raise CorruptDataError(
                f"{where}: tensor {name!r} {entry.shape} of {entry.dtype} has bytes [{entry.start_bytes}, "
                f"{entry.stop_bytes}) in the header, expected [{position}, {position + needed})"
            )
        position = entry.stop_bytes
    if position != size_bytes:
        kind = "truncated" if position > size_bytes else "longer than its header says"
        raise CorruptDataError(
            f"{where} is {kind}: {size_bytes - data_start} bytes of tensors, expected {position - data_start}"
        )


FORMAT_VERSION = 1
"""Version of manifests and files. Readers refuse newer versions."""

VALUES = "values"
"""``Piece.state`` of parameter and buffer values."""
AVERAGE = "ema"
"""``Piece.state`` of moving averages."""
TRAINER_STATE = "trainer."
"""Prefix of ``Piece.state`` for the state of optimizers that run on the trainers, before torch's name."""
KEPT_GRADIENT = "kept_gradient."
"""Prefix of ``Piece.state`` for gradients that are kept for another optimizer, before the number of the contributor."""
RESIDUAL = "residual."
"""Prefix of ``Piece.state`` for residuals of error feedback."""


def residual_state(dp_rank: int, pp_rank: int | None) -> str:
    """Returns the ``Piece.state`` of a residual.

    Args:
        dp_rank: The logical dp rank.
        pp_rank: The pipeline rank, if several stages push the parameter. None: one stage pushes it.
    """
    return f"{RESIDUAL}{dp_rank}" if pp_rank is None else f"{RESIDUAL}{dp_rank}.{pp_rank}"


PieceKind = Literal["elements", "whole", "number"]

_METADATA_KEY = "shardwell"
CHECKSUM = re.compile(r"[0-9a-f]{16}")
"""An XXH3-64 as text."""
NO_CHECKSUM = "0" * 16
"""Stands for a checksum that is not known yet."""
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*\.safetensors")
_NAME = re.compile(r"(?P<parameter>.+)\|(?P<state>[^|]+)\|(?P<start>\d{1,18}):(?P<stop>\d{1,18})", re.DOTALL)
_FILE_DTYPES = {dtype: stored for stored, (dtype, _) in SAFETENSORS_DTYPES.items() if dtype in ITEM_SIZES}
"""The file format's names of dtypes, by torch's. complex128 is stored as F64 with a last dim of 2."""
_DTYPES = {stored: dtype for dtype, stored in _FILE_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint: values or state of consecutive elements of one parameter or buffer."""

    parameter: str
    """Key of the parameter or buffer in the run: ``layout.Parameter.key``."""
    state: str
    """What it is: ``values``, ``ema``, a state name of the optimizer such as ``exp_avg``, or a name with one of the
    prefixes of this module. State that does not exist (yet) has no piece: it differs from zeros."""
    start: int
    """First element of the flattened parameter that the piece belongs to."""
    stop: int
    """End of the elements, exclusive."""
    dtype: str
    """torch's name of the dtype."""
    shape: tuple[int, ...]
    kind: PieceKind = "elements"
    """``elements``: one entry per element, in the parameter's order; may be cut. ``whole``: belongs to all elements
    together, such as a step count; equal in all pieces of the parameter. ``number``: as ``whole``, a Python number."""

    def __post_init__(self) -> None:
        numel = math.prod(self.shape)
        if not 0 <= self.start <= self.stop or (self.kind == "elements" and numel != self.stop - self.start):
            raise ValueError(f"{self.name!r} has shape {self.shape}, {numel} elements")
        if self.dtype not in ITEM_SIZES or self.kind not in get_args(PieceKind):
            raise ValueError(f"{self.name!r} has dtype {self.dtype!r} and kind {self.kind!r}")

    @property
    def name(self) -> str:
        """Name of the tensor in the file: ``PARAMETER|STATE|START:STOP``."""
        return f"{self.parameter}|{quote(self.state, safe=' +/=@,:()[]')}|{self.start}:{self.stop}"

    @property
    def item_size(self) -> int:
        """Bytes per element."""
        return ITEM_SIZES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_size

    def _as_stored(self) -> tuple[str, tuple[int, ...]]:
        if self.dtype == "complex128":
            return "F64", (*self.shape, 2)
        return _FILE_DTYPES[self.dtype], self.shape


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive elements of a parameter in one shard, and how its optimizer has updated them."""

    parameter: str
    """As in ``Piece``."""
    start: int
    """First element of the flattened parameter."""
    stop: int
    """End of the elements, exclusive."""
    algorithm: str | None = None
    """Name of the optimizer that updated the part last, such as ``adamw``. None: no update yet."""
    step_count: int = 0
    """Number of updates by this optimizer."""


@dataclass(frozen=True, eq=False)
class FilePlan:
    """The tensors of a file that is about to be written. Determines all positions.

    Raises:
        ValueError: Two pieces have the same name.
        CapacityError: The header would be longer than readers accept.
    """

    pieces: Sequence[Piece]
    """In the order of the file: descending by the size of an element, so that all tensors are aligned."""
    parts: Sequence[Part]
    run_id: str = field(kw_only=True)
    step: int = field(kw_only=True)
    """Committed steps, which is also the version of all values."""
    averages_begun: bool = field(default=False, kw_only=True)
    """True once a step has updated moving averages."""
    extra: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """More facts for the header."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", tuple(sorted(self.pieces, key=lambda piece: -piece.item_size)))
        if len(self.offsets) != len(self.pieces):
            names = [piece.name for piece in self.pieces]
            raise ValueError(f"a piece is repeated: {next(name for name in names if names.count(name) > 1)!r}")
        if self.header_bytes > MAX_HEADER_BYTES:
            raise CapacityError(
                f"the header of a checkpoint file would have {self.header_bytes} bytes for {len(self.pieces)} tensors, "
                f"more than the limit of {MAX_HEADER_BYTES}: use more shard servers"
            )

    @cached_property
    def header_bytes(self) -> int:
        """Size of the header with its length. It does not depend on the checksums."""
        return len(self.header({}))

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Position of each piece in the file, by name."""
        found, position = {}, self.header_bytes
        for piece in self.pieces:
            found[piece.name] = position
            position += piece.size_bytes
        return found

    @cached_property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.header_bytes + sum(piece.size_bytes for piece in self.pieces)

    def header(self, checksums: Mapping[str, str]) -> bytes:
        """Returns the start of the file. Missing checksums are zeros.

        Args:
            checksums: XXH3-64 of each piece's bytes as 16 hexadecimal digits, by name.
        """
        facts = {
            "format_version": FORMAT_VERSION,
            "run_id": self.run_id,
            "step": self.step,
            "averages_begun": self.averages_begun,
            "checksums": {piece.name: checksums.get(piece.name, NO_CHECKSUM) for piece in self.pieces},
            "kinds": {piece.name: piece.kind for piece in self.pieces if piece.kind != "elements"},
            "dtypes": {piece.name: piece.dtype for piece in self.pieces if piece.dtype == "complex128"},
            "parts": [[part.parameter, part.start, part.stop, part.algorithm, part.step_count] for part in self.parts],
            "extra": dict(self.extra),
        }
        tensors = {piece.name: piece._as_stored() for piece in self.pieces}
        return make_header(tensors, {_METADATA_KEY: json.dumps(facts, separators=(",", ":"), ensure_ascii=False)})


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint. The checksum covers the header, which contains the checksums of all tensors."""

    name: str
    """File name in the checkpoint's folder."""
    server_id: str
    """Shard server that wrote the file, or ``trainer-EPOCH``."""
    size_bytes: int
    header_bytes: int
    """Size of the header with its length, at the start of the file."""
    header_xxh3_64: str
    """XXH3-64 of these bytes as 16 hexadecimal digits."""

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.name) or len(self.name) > 255:
            raise ValueError(f"file name {self.name[:100]!r}: expected letters, digits, '.', '_', ':', '-'")
        check_id("server_id", self.server_id)
        if not 8 < require_count(self.header_bytes, "header_bytes") <= require_count(self.size_bytes, "size_bytes"):
            raise ValueError(f"file {self.name!r} has {self.size_bytes} bytes, its header {self.header_bytes}")
        if not isinstance(self.header_xxh3_64, str) or not CHECKSUM.fullmatch(self.header_xxh3_64):
            raise ValueError(f"file {self.name!r} has checksum {str(self.header_xxh3_64)[:50]!r}")

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> FileRecord:
        """Returns the record of a JSON object. Raises ValueError, TypeError or InvalidRequestError."""
        return cls(**content)


class CheckpointFileWriter:
    """Writes the tensors of a file as they become available. Methods may be called from any thread.

    Args:
        storage: The checkpoint's folder.
        server_id: Shard server or trainer that writes the file.
        name: Name of the file. Empty: that of a shard server's file.

    Raises:
        ShardwellError: See ``Storage``.
    """

    def __init__(self, storage: Storage, server_id: str, plan: FilePlan, *, name: str = "") -> None:
        self.name = name or file_name(server_id)
        self.plan, self._server_id = plan, server_id
        self._unfinished: dict[str, tuple[int, Any]] = {}
        """Bytes and hash so far of pieces that are written in parts, by name."""
        self._checksums: dict[str, str] = {}
        self._file: OutputFile = storage.create(self.name, plan.size_bytes)

    def write(self, piece: Piece, data: Any) -> None:
        """Writes a whole tensor.

        Args:
            data: Its bytes, as any contiguous buffer.

        Raises:
            ShardwellError: See ``Storage``.
        """
        view = memoryview(data).cast("B") if piece.size_bytes else memoryview(b"")
        assert view.nbytes == piece.size_bytes, f"{piece.name!r}: {view.nbytes} bytes, expected {piece.size_bytes}"
        self.write_part(piece, view)

    def write_part(self, piece: Piece, data: Any) -> None:
        """Writes the next bytes of a tensor. The parts of one tensor come in order, one call at a time."""
        view, name = memoryview(data).cast("B"), piece.name
        done, hasher = self._unfinished.pop(name, None) or (0, xxhash.xxh3_64())
        assert name not in self._checksums, f"{name!r} was written twice"
        assert done + view.nbytes <= piece.size_bytes, f"{name!r}: too many bytes"
        self._file.write(view, self.plan.offsets[name] + done)
        hasher.update(view)
        done += view.nbytes
        if done < piece.size_bytes:
            self._unfinished[name] = done, hasher
        else:
            self._checksums[name] = hasher.hexdigest()

    def finish(self) -> FileRecord:
        """Writes the header and makes the file durable.

        Raises:
            ShardwellError: See ``Storage``.
        """
        missing = [piece.name for piece in self.plan.pieces if piece.name not in self._checksums]
        assert not missing, f"{len(missing)} tensors were not written, such as {missing[0]!r}"
        header = self.plan.header(self._checksums)
        self._file.write(header, 0)
        self._file.finish()
        return FileRecord(
            name=self.name,
            server_id=self._server_id,
            size_bytes=self.plan.size_bytes,
            header_bytes=len(header),
            header_xxh3_64=checksum_of(header),
        )

    def abort(self) -> None:
        """Removes the file. Never raises. Harmless to repeat, and after ``finish``."""
        self._file.abort()


def file_name(server_id: str) -> str:
    """Returns the name of a shard server's file."""
    return f"shards-{server_id}.safetensors"


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A tensor in a file that was written."""

    piece: Piece
    start_bytes: int
    """Position in the file."""
    checksum: str
    """XXH3-64 of its bytes as 16 hexadecimal digits."""


@dataclass(frozen=True)
class FileIndex:
    """The parsed header of a file."""

    pieces: Sequence[PlacedPiece]
    """In the order of the file."""
    parts: Sequence[Part]
    run_id: str
    step: int
    averages_begun: bool
    extra: Mapping[str, str]

    @classmethod
    def parse(cls, header: bytes, size_bytes: int, where: str) -> FileIndex:
        """Parses the start of a file.

        Args:
            header: The length and the header.

        Raises:
            CorruptDataError: The header is not one of a checkpoint's file, or contradicts itself.
        """
        entries, metadata = parse_header(header, size_bytes, where)
        try:
            facts = parse_json(metadata[_METADATA_KEY].encode())
            require_readable(facts["format_version"])
            ordered = sorted(entries.items(), key=lambda item: (item[1].start_bytes, item[1].stop_bytes))
            return cls(
                [_placed(name, entry, facts) for name, entry in ordered],
                [_parse_part(part) for part in facts["parts"]],
                str(facts["run_id"]),
                require_count(facts["step"], "step"),
                facts["averages_begun"] is True,
                {str(key): str(value) for key, value in facts["extra"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CorruptDataError(f"{where} is not a file of a Shardwell checkpoint: {reason}") from error


def _placed(name: str, entry: HeaderEntry, facts: Mapping[str, Any]) -> PlacedPiece:
    found = _NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"tensor {name[:200]!r} is not named PARAMETER|STATE|START:STOP")
    dtype, shape = facts["dtypes"].get(name, _DTYPES.get(entry.dtype)), entry.shape
    if dtype == "complex128":
        if entry.dtype != "F64" or shape[-1:] != (2,):
            raise ValueError(f"tensor {name!r} is {entry.dtype} {shape}, expected F64 with a last dim of 2")
        shape = shape[:-1]
    elif dtype != _DTYPES.get(entry.dtype) or dtype is None:
        raise ValueError(f"tensor {name!r} has dtype {entry.dtype}, called {dtype!r}")
    kind = facts["kinds"].get(name, "elements")
    piece = Piece(
        found["parameter"], unquote(found["state"]), int(found["start"]), int(found["stop"]), dtype, shape, kind
    )
    checksum = facts["checksums"][name]
    if not isinstance(checksum, str) or not CHECKSUM.fullmatch(checksum):
        raise ValueError(f"tensor {name!r} has checksum {str(checksum)[:50]!r}, expected 16 hexadecimal digits")
    return PlacedPiece(piece, entry.start_bytes, checksum)


def _parse_part(fields: Any) -> Part:
    parameter, start, stop, algorithm, step_count = fields
    if not isinstance(parameter, str) or not (algorithm is None or isinstance(algorithm, str)):
        raise ValueError(f"part {str(fields)[:200]} is invalid")
    start, stop = require_count(start, "start"), require_count(stop, "stop")
    return Part(parameter, start, stop, algorithm, require_count(step_count, "step_count"))


def require_count(value: object, what: str) -> int:
    """Returns an integer of at least 0. Raises ValueError for other values."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{what} is {str(value)[:50]!r}, expected an integer from 0 to 2**63 - 1")
    return value


def require_readable(version: object) -> None:
    """Raises ValueError unless this version of the format can be read."""
    if require_count(version, "format_version") > FORMAT_VERSION:
        raise ValueError(
            f"its format version is newer than {FORMAT_VERSION}, the newest that this software reads: use a newer "
            "version of shardwell"
        )


def checksum_of(data: Any) -> str:
    """Returns the XXH3-64 of bytes as 16 hexadecimal digits."""
    return xxhash.xxh3_64(data).hexdigest()
