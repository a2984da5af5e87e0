"""The files of a checkpoint: which tensors a file contains, and where.

Each shard server writes one safetensors file for its shards. The header's metadata has one entry, ``shardwell``, which
contains the checksum of every tensor. The header is written last.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args
from urllib.parse import quote, unquote

import xxhash

from shardwell_wire.checkpoints.safetensors_header import (
    MAX_HEADER_BYTES,
    HeaderEntry,
    make_header,
    parse_header,
    parse_json,
)
from shardwell_wire.errors import CapacityError, CorruptDataError
from shardwell_wire.layout import ITEM_SIZES

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
_NO_CHECKSUM = "0" * 16
_CHECKSUM = re.compile(r"[0-9a-f]{16}")
_NAME = re.compile(r"(?P<parameter>.+)\|(?P<state>[^|]+)\|(?P<start>\d{1,18}):(?P<stop>\d{1,18})", re.DOTALL)
_FILE_DTYPES = {
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float16": "F16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
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

    pieces: tuple[Piece, ...]
    """In the order of the file: descending by the size of an element, so that all tensors are aligned."""
    parts: tuple[Part, ...]
    run_id: str
    step: int
    """Committed steps, which is also the version of all values."""
    averages_begun: bool = False
    """True once a step has updated moving averages."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """More facts for the header."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        parts: Iterable[Part],
        *,
        run_id: str,
        step: int,
        averages_begun: bool = False,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        in_order = sorted(pieces, key=lambda piece: -piece.item_size)
        for name, value in {
            "pieces": tuple(in_order),
            "parts": tuple(parts),
            "run_id": run_id,
            "step": step,
            "averages_begun": averages_begun,
            "extra": dict(extra or {}),
        }.items():
            object.__setattr__(self, name, value)
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
            "checksums": {piece.name: checksums.get(piece.name, _NO_CHECKSUM) for piece in self.pieces},
            "kinds": {piece.name: piece.kind for piece in self.pieces if piece.kind != "elements"},
            "dtypes": {piece.name: piece.dtype for piece in self.pieces if piece.dtype == "complex128"},
            "parts": [[part.parameter, part.start, part.stop, part.algorithm, part.step_count] for part in self.parts],
            "extra": dict(self.extra),
        }
        tensors = {piece.name: piece._as_stored() for piece in self.pieces}
        return make_header(tensors, {_METADATA_KEY: json.dumps(facts, separators=(",", ":"), ensure_ascii=False)})


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
            size_bytes: Size of the file.
            where: Path of the file, for errors.

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
    if not isinstance(checksum, str) or not _CHECKSUM.fullmatch(checksum):
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
