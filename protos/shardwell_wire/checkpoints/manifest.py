"""The manifest of a checkpoint, which the coordinator writes last.

A folder without a valid manifest is no checkpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from shardwell_wire.checkpoints.format import (
    CHECKSUM,
    FORMAT_VERSION,
    NO_CHECKSUM,
    FileRecord,
    checksum_of,
    parse_json,
    require_count,
    require_readable,
)
from shardwell_wire.errors import CorruptDataError, ShardwellError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import check_id, check_name
from shardwell_wire.model.topology import SYNCHRONOUS, Consistency, World
from shardwell_wire.v1 import common_pb2, coordinator_pb2

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 256 << 20
"""Readers refuse larger manifests."""
MAX_FILES, MAX_HEADERS_BYTES = 1 << 16, 1 << 30
"""Most files of a checkpoint, and most bytes of their headers: a reader has all headers in memory."""

RESIDUAL_RANKS = "residual_ranks"
"""Key in ``Manifest.extra``: data ranks whose residuals of error feedback the checkpoint has. A list of integers."""

REDUCTION_GROUPS = "reduction_groups"
"""Key in ``Manifest.extra``: sizes of the run's reduction groups, innermost first. A list of integers."""

CONSISTENCY = "consistency"
"""Key in ``Manifest.extra``: consistency mode of an asynchronous run, as text. Missing: the run is synchronous."""

ITEM_NUMBERS = "item_numbers"
"""Key in ``Manifest.extra``: in an asynchronous run, the number of each data rank's next work item. A list of
integers."""

_FORMAT = "shardwell-checkpoint"
_CHECKPOINT_ID = re.compile(r"[A-Za-z0-9]{1,64}")
_CHECKSUM_KEY = "xxh3_64"
"""The last key of a manifest: the XXH3-64 of its bytes with zeros in place of these 16 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint that is not in the files of the shard servers and the trainers."""

    run: str
    """Name of the run."""
    run_id: str
    checkpoint_id: str
    """Random id of the checkpoint."""
    step: int
    """Number of committed steps."""
    created: float
    """Seconds since 1970."""
    world: World
    seed: int
    units: tuple[UnitLayout, ...]
    """In the order of their indices."""
    files: tuple[FileRecord, ...]
    commits: tuple[Mapping[str, Any], ...] = ()
    """The most recent commit records as JSON objects, oldest first. Numbers that are not finite are written as text
    (``Infinity``, ``-Infinity``, ``NaN``), which ``float`` parses."""
    run_state: coordinator_pb2.RunState | None = None
    """Tracked objects and versions of buffers. None: the run has neither."""
    lineage: tuple[str, ...] = ()
    """Ids of the runs that this run was resumed from, oldest first."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """More facts, as JSON values."""

    def __post_init__(self) -> None:
        check_name("run", self.run)
        check_id("run_id", self.run_id)
        if not _CHECKPOINT_ID.fullmatch(self.checkpoint_id):
            raise ValueError(f"checkpoint_id {self.checkpoint_id[:100]!r}: expected 1 to 64 letters and digits")
        require_count(self.step, "step")
        require_count(self.seed, "seed")
        if len({file.name for file in self.files}) != len(self.files):
            raise ValueError("two files have the same name")
        names = [unit.unit for unit in self.units]
        # Parts without elements have no tensors in the files.
        parameters = [
            parameter.key
            for unit in self.units
            for parameter in unit.parameters
            if parameter.numel or not parameter.is_part
        ]
        if len(set(names)) != len(names) or len(set(parameters)) != len(parameters):
            raise ValueError("two units or two parameters have the same name")
        if self.consistency.asynchronous:
            for number in self.item_numbers:
                require_count(number, ITEM_NUMBERS)
            if len(self.item_numbers) != self.world.dp:
                raise ValueError(f"{ITEM_NUMBERS} are {self.item_numbers[:20]}, expected one for each of {self.world}")

    @property
    def reduction_groups(self) -> tuple[int, ...]:
        """Sizes of the run's reduction groups; see ``sum_order.py``."""
        return tuple(self.extra.get(REDUCTION_GROUPS, ()))

    @property
    def consistency(self) -> Consistency:
        """Consistency mode of the run."""
        return Consistency.parse(str(self.extra.get(CONSISTENCY, SYNCHRONOUS)))

    @property
    def item_numbers(self) -> tuple[int, ...]:
        """Number of each data rank's next work item in an asynchronous run."""
        return tuple(self.extra.get(ITEM_NUMBERS, ()))

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        """Returns the content of the manifest's file."""
        content = {
            "format": _FORMAT,
            "format_version": FORMAT_VERSION,
            "run": self.run,
            "run_id": self.run_id,
            "checkpoint_id": self.checkpoint_id,
            "step": self.step,
            "created": self.created,
            "world": {
                **{axis: getattr(self.world, axis) for axis in self.world.axes},
                "order": list(self.world.order),
            },
            "seed": self.seed,
            "lineage": list(self.lineage),
            "commits": _with_finite_numbers(self.commits),
            "run_state": None if self.run_state is None else message_to_dict(self.run_state),
            "units": [message_to_dict(unit.to_proto()) for unit in self.units],
            "files": [file.to_dict() for file in self.files],
            "extra": dict(self.extra),
            _CHECKSUM_KEY: NO_CHECKSUM,
        }
        data = (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
        return _with_checksum(data, NO_CHECKSUM, checksum_of(data))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Manifest:
        """Returns the manifest in a file.

        Args:
            data: Content of the file.

        Raises:
            CorruptDataError: It is not a manifest, is torn, is of a newer version, or contradicts itself.
        """
        content = _parsed(data, where)
        try:
            require_readable(content["format_version"])
            return cls(
                run=content["run"],
                run_id=content["run_id"],
                checkpoint_id=content["checkpoint_id"],
                step=content["step"],
                created=_finite(content["created"]),
                world=World(**content["world"]),
                seed=content["seed"],
                units=tuple(_unit(spec) for spec in content["units"]),
                files=_files(content["files"]),
                commits=tuple(_object(commit, "commit") for commit in content["commits"]),
                run_state=_run_state(content["run_state"]),
                lineage=tuple(str(run_id) for run_id in content["lineage"]),
                extra=dict(content["extra"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError, ShardwellError, json_format.ParseError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            raise CorruptDataError(f"{where} is not the manifest of a checkpoint, or is damaged: {reason}") from error


def _with_checksum(data: bytes, former: str, checksum: str) -> bytes:
    """Returns the bytes of a manifest with another value of its last key, the checksum."""
    start, key, rest = data.rpartition(f'"{_CHECKSUM_KEY}": '.encode())
    return start + key + rest.replace(former.encode(), checksum.encode(), 1)


def _parsed(data: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object in a manifest. See Note: [Contents in errors] in ``reading.py``."""
    try:
        content = parse_json(data)
    except (ValueError, RecursionError):
        problem = "it is not a JSON object"
    else:
        version, expected = content.get("format_version"), str(content.get(_CHECKSUM_KEY))
        if content.get("format") != _FORMAT:
            problem = f"its format is not {_FORMAT!r}"
        elif isinstance(version, int) and version > FORMAT_VERSION:
            return content  # it may have no such checksum
        elif not CHECKSUM.fullmatch(expected):
            problem = f"{_CHECKSUM_KEY!r} is missing"
        elif checksum_of(_with_checksum(data, expected, NO_CHECKSUM)) != expected:
            problem = "its checksum differs from the one that it contains"
        else:
            return content
    raise CorruptDataError(f"{where} is not the manifest of a checkpoint, or is damaged: {problem}") from None


def message_to_dict(message: Any) -> dict[str, Any]:
    """Returns a protobuf message as a JSON object with the field names of the ``.proto`` file."""
    content: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return content


def message_from_dict(content: Mapping[str, Any], message: Any) -> Any:
    """Fills ``message`` from a JSON object and returns it. Unknown fields are ignored.

    Raises:
        google.protobuf.json_format.ParseError: The object does not fit.
    """
    return json_format.ParseDict(dict(content), message, ignore_unknown_fields=True, max_recursion_depth=32)


def _files(content: Any) -> tuple[FileRecord, ...]:
    files = tuple(FileRecord.from_dict(file) for file in content)
    if len(files) > MAX_FILES or sum(file.header_bytes for file in files) > MAX_HEADERS_BYTES:
        raise ValueError(f"it has more than {MAX_FILES} files, or more than {MAX_HEADERS_BYTES} bytes of headers")
    return files


def _unit(spec: Any) -> UnitLayout:
    return UnitLayout.from_proto(message_from_dict(_object(spec, "unit"), common_pb2.UnitSpec()))


def _run_state(content: Any) -> coordinator_pb2.RunState | None:
    if content is None:
        return None
    state: coordinator_pb2.RunState = message_from_dict(_object(content, "run_state"), coordinator_pb2.RunState())
    return state


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"created is {str(value)[:50]!r}, expected seconds since 1970")
    return float(value)


def _with_finite_numbers(value: Any) -> Any:
    """Returns a JSON value in which other numbers than finite ones, which JSON lacks, are text."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case list() | tuple():
            return [_with_finite_numbers(item) for item in value]
        case dict():
            return {key: _with_finite_numbers(item) for key, item in value.items()}
    return value


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {type(value).__name__}, expected an object")
    return value
