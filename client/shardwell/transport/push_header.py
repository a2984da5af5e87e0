"""The header of a push: the fields that one part has on all shards, and those that all parts have on one shard.

Neither is encoded anew for each push and shard. A batch of pushes names the fields of the attempt once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwell_wire.v1 import shard_pb2
from shardwell_wire.wire_dtypes import AS_STORED, WireDtype


@dataclass(slots=True, eq=False)
class PartHeader:
    """One part of a contribution: the fields of its header that are the same for all shards of the unit."""

    common: shard_pb2.ReduceScatterHeader
    """The fields that all parts of the attempt share, without a request id. Must not change any more."""
    part: int = 0
    """Number of the part."""
    dropped_indices: Sequence[int] = ()
    """Parameters whose earlier gradients are dropped."""
    request_id: str = ""
    """Prefix of the ids of the part's requests. Empty: they have none."""
    summed: Sequence[shard_pb2.SummedRank] = ()
    """Ranks whose gradients are in the part. Empty: the part has the gradients of one rank."""


class PushedRange:
    """Some parameters of a unit, cut to one shard. Shared by all pushes of these parameters.

    Args:
        unit: Name of the unit.
        start_bytes: Half-open range of the shard in the unit's flat vector.
        stop_bytes: End of the range.
        indices: The parameters, by rising index.
    """

    def __init__(self, unit: str, start_bytes: int, stop_bytes: int, indices: Sequence[int]) -> None:
        self.unit, self.start_bytes, self.stop_bytes, self.indices = unit, start_bytes, stop_bytes, tuple(indices)
        self.shard_key = unit, start_bytes
        """Identifies the shard on its server."""
        self._encoded = shard_pb2.ReduceScatterHeader(
            unit=unit, parameter_indices=indices, start_bytes=start_bytes, stop_bytes=stop_bytes
        ).SerializeToString()

    def header(self, part: PartHeader, wire_dtype: WireDtype = AS_STORED) -> shard_pb2.ReduceScatterHeader:
        """Returns the whole header of a push."""
        header = shard_pb2.ReduceScatterHeader()
        header.CopyFrom(part.common)
        if part.request_id:  # one per shard: a server may own several shards of the unit
            header.context.request_id = f"{part.request_id}.{self.start_bytes}"
        self.complete(header, part, wire_dtype)
        return header

    def complete(self, header: shard_pb2.ReduceScatterHeader, part: PartHeader, wire_dtype: WireDtype) -> None:
        """Sets the fields that are not in ``PartHeader.common``."""
        header.MergeFromString(self._encoded)
        if part.part:
            header.part = part.part
        if part.dropped_indices:
            header.dropped_indices.extend(part.dropped_indices)
        if part.summed:
            header.summed.extend(part.summed)
        if wire_dtype:
            header.wire_dtype = wire_dtype
