"""The record of one shard: what a new process of the server needs to take the shard up from its files.

Note: [Records and step words]
    A record describes a shard completely, as it was when the record was written: files, optimizer state, version, step
    counts. It is replaced only when more than these numbers changes, such as the files. Every step stores its numbers
    in one aligned word instead, in the header of the shard's file, which costs no system call. A process may be killed
    between any two stores, and the word is never torn, so the next process always finds the numbers of one instant. The
    word names the generation of the record that it continues. A new record replaces the old one by a rename; from then
    on, the old word is void. Every new record is followed by a word of its generation, so the word in the file is at
    most one generation older.
"""

from __future__ import annotations

import base64
import enum
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash

from shardwell_server.shard.arithmetic.update_pieces import SLICE_BYTES
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_wire.host.shared_memory import store_word
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2

FORMAT = 8
"""Changes with every change of the record or of the pieces of updates."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where a tensor of the optimizer's state is."""

    file: str
    offset_bytes: int
    dtype: str
    shape: Sequence[int]

    @property
    def size_bytes(self) -> int:
        """Size of the tensor."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return torch.Size(self.shape).numel() * dtype.itemsize


Places = dict[str, TensorPlace]
"""Tensors by name."""


@dataclass(frozen=True, slots=True)
class PartRecord:
    """The optimizer's state of one part."""

    algorithm: str | None
    step_count: int
    state: Places
    average: TensorPlace | None
    fresh_algorithm: str | None = None
    """Optimizer for whose first update state is allocated. None: no state is allocated."""
    initializers: Mapping[str, Any] = field(default_factory=dict)
    fresh_state: Places = field(default_factory=dict)
    """State that is allocated for the next update."""
    fresh_average: TensorPlace | None = None


@dataclass(frozen=True, slots=True)
class PreparedRecord:
    """The step that the next update applies."""

    present: Sequence[int]
    """Numbers of the segments that have a mean gradient, or a new value in a shard of buffers."""
    skipped: bool

    @property
    def kind(self) -> Prepared:
        """How a step word names the step."""
        if self.skipped:
            return Prepared.SKIPPED
        return Prepared.GRADIENTS if self.present else Prepared.EMPTY


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDescription:
    """The state of a shard between two updates."""

    spec: ShardSpec
    role: Role = Role.PRIMARY
    relocation: int = 0
    """``UnitShard.relocation``."""
    version: int
    values: str
    """File of the values."""
    files: Mapping[str, int]
    """Sizes of all files but that of the values, in bytes."""
    parts: Sequence[PartRecord] = ()
    """Empty before the first update."""
    averages_started: bool = False
    mean: str | None = None
    """File of the mean gradient, or of the new values of buffers."""
    prepared: PreparedRecord | None = None
    """None: no step is prepared."""
    generation: int = 1
    """Generation of the record. See Note: [Records and step words]."""
    present: Sequence[int] = ()
    """What ``PreparedRecord.present`` is in the steps that step words name as prepared with gradients."""
    counted: Sequence[int] = ()
    """Numbers of the parts that the updates counted by step words change."""
    held: Sequence[str] = ()
    """Files of older versions, each of which shows its version."""

    def continued(self, word: StepWord) -> ShardDescription:
        """Returns the state that a step word of this record leads to. A word of another record changes nothing."""
        if word.generation != self.generation:
            return self
        prepared = {
            Prepared.NO: None,
            Prepared.GRADIENTS: PreparedRecord(self.present, skipped=False),
            Prepared.SKIPPED: PreparedRecord([], skipped=True),
            Prepared.EMPTY: PreparedRecord([], skipped=False),
        }[word.prepared]
        parts = list(self.parts)
        for number in self.counted:
            parts[number] = replace(parts[number], step_count=parts[number].step_count + word.updates)
        return replace(self, version=word.version, parts=parts, prepared=prepared)

    def encode(self, spec: Mapping[str, Any]) -> bytes:
        """Returns the record as JSON, after its checksum.

        Args:
            spec: ``encode_spec`` of the shard, which never changes.
        """
        content = {**spec, **{name: getattr(self, name) for name in _FIELDS}}
        text = json.dumps(content, separators=(",", ":"), default=_fields_of).encode()
        return b"%016x\n%b" % (xxhash.xxh3_64_intdigest(text), text)


_NUMBERS = ("index", "start_bytes", "stop_bytes", "dp", "placement")
_FIELDS = (
    "role",
    "relocation",
    "version",
    "values",
    "files",
    "parts",
    "averages_started",
    "mean",
    "prepared",
    "generation",
    "present",
    "counted",
    "held",
)


def encode_spec(spec: ShardSpec) -> dict[str, Any]:
    """Returns the fields of a record that are the same in all records of a shard."""
    return {
        "format": FORMAT,
        "slice_bytes": SLICE_BYTES,
        "run": spec.run.name,
        "run_id": spec.run.run_id,
        "unit": base64.b64encode(spec.layout.to_proto().SerializeToString(deterministic=True)).decode(),
        "reduction_groups": spec.reduction_groups,
        "asynchronous": spec.asynchronous,
        "keep_versions": spec.keep_versions,
        **{name: getattr(spec, name) for name in _NUMBERS},
    }


def decode(data: bytes) -> ShardDescription:
    """Returns the record in a file.

    Raises:
        ValueError: The record is damaged, or another version of the software wrote it.
    """
    checksum, _, text = data.partition(b"\n")
    if checksum != b"%016x" % xxhash.xxh3_64_intdigest(text):
        raise ValueError("its checksum is wrong")
    content = json.loads(text)
    if (content["format"], content["slice_bytes"]) != (FORMAT, SLICE_BYTES):
        raise ValueError(f"it has format {content['format']}, expected {FORMAT}")
    layout = UnitLayout.from_proto(common_pb2.UnitSpec.FromString(base64.b64decode(content["unit"])))
    run = RunIdentity(content["run"], content["run_id"])
    numbers = {name: content[name] for name in _NUMBERS}
    spec = ShardSpec(
        run=run,
        layout=layout,
        reduction_groups=tuple(content["reduction_groups"]),
        asynchronous=content["asynchronous"],
        keep_versions=content.get("keep_versions", 0),  # a file of an older version has none
        **numbers,
    )
    content.setdefault("held", [])  # a file of an older version has none
    fields = {name: content[name] for name in _FIELDS}
    fields["role"] = Role(content["role"])
    fields["parts"] = [_part(part) for part in content["parts"]]
    fields["prepared"] = None if content["prepared"] is None else PreparedRecord(**content["prepared"])
    return ShardDescription(spec=spec, **fields)


def _fields_of(record: Any) -> Any:
    """Returns the value of a role, or the fields of a dataclass of this module. Much faster than ``asdict``, which
    copies every value."""
    if isinstance(record, Role):
        return record.value
    return {name: getattr(record, name) for name in record.__slots__}


def _part(content: Mapping[str, Any]) -> PartRecord:
    found = dict(content)
    for name in ("state", "fresh_state"):
        found[name] = {key: TensorPlace(**place) for key, place in content[name].items()}
    for name in ("average", "fresh_average"):
        found[name] = None if content[name] is None else TensorPlace(**content[name])
    return PartRecord(**found)


_WORD = struct.Struct("@Q")


_GENERATION_BITS, _UPDATE_BITS, _PREPARED_BITS = 8, 22, 2  # the version has the other 32 bits
_UPDATES_AT = _GENERATION_BITS
_PREPARED_AT = _UPDATES_AT + _UPDATE_BITS
_VERSION_AT = _PREPARED_AT + _PREPARED_BITS


MAX_UPDATES = (1 << _UPDATE_BITS) - 1
"""Most updates that a word can count."""


class Prepared(enum.IntEnum):
    """Whether a step is prepared."""

    NO = 0
    GRADIENTS = 1
    """With a mean gradient of the segments that the record names."""
    SKIPPED = 2
    """Without gradients, because the step is skipped."""
    EMPTY = 3
    """Without gradients, because no rank pushed one."""


@dataclass(frozen=True, slots=True)
class StepWord:
    """See Note: [Records and step words]."""

    generation: int
    """Generation of the record that the word continues. 0: the word was never written."""
    version: int
    """The newest version of the shard."""
    updates: int
    """Updates since the record that changed the parts that the record names."""
    prepared: Prepared

    @classmethod
    def read(cls, place: memoryview) -> StepWord:
        """Returns the word at a place in shared memory."""
        word: int = _WORD.unpack_from(place, 0)[0]
        return cls(
            generation=word & ((1 << _GENERATION_BITS) - 1),
            version=word >> _VERSION_AT,
            updates=word >> _UPDATES_AT & MAX_UPDATES,
            prepared=Prepared(word >> _PREPARED_AT & ((1 << _PREPARED_BITS) - 1)),
        )

    def write(self, place: memoryview) -> None:
        """Stores the word."""
        word = self.generation | self.updates << _UPDATES_AT | self.prepared << _PREPARED_AT
        store_word(place, word | self.version << _VERSION_AT)


def next_generation(generation: int) -> int:
    """Returns the generation of the record after one of the given generation. Never 0."""
    return generation % ((1 << _GENERATION_BITS) - 1) + 1
