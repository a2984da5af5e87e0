"""When a unit of a pinned version last changed: the servers of all its shards must have answered."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest

from shardwell.weights.pinned_version import PinnedVersion
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

VERSION = 9
UNIT = UnitLayout("u", (Parameter("w", (30,), "float32"),))
SHARDS = [(0, 40), (40, 128), (128, 128)]
"""The last one is empty. No server has it."""

Answer = Mapping[tuple[int, int], int]
"""When the shards on a server last changed, by range."""


def changed_at(*answers: Answer) -> int:
    """Returns when the unit last changed, according to the servers' answers."""
    weights = coordinator_pb2.DescribeWeightsResponse(version=VERSION)
    shards = [common_pb2.ShardRange(start_bytes=start, stop_bytes=stop) for start, stop in SHARDS]
    weights.units.add(spec=UNIT.to_proto(), shards=shards)
    pins = [
        shard_pb2.PinVersionResponse(
            version=VERSION,
            changes=[
                shard_pb2.ShardChange(unit="u", start_bytes=start, stop_bytes=stop, version=version)
                for (start, stop), version in answer.items()
            ],
        )
        for answer in answers
    ]
    reader = SimpleNamespace(run=RunIdentity("r", "id"), version=VERSION)
    pinned = PinnedVersion(weights, reader, pins)  # type: ignore[arg-type]
    return pinned.changed_at(pinned.units["u"])


@pytest.mark.parametrize(
    "answers, expected",
    [
        ([{(0, 40): 3}, {(40, 128): 5}], 5),
        ([{(0, 40): 3, (40, 128): 5}, {(0, 40): 4}], 5),
        # A shard moved after its new server had answered, and before its former one did.
        ([{(0, 40): 3}, {}], VERSION),
        ([{(40, 128): 5}], VERSION),
        ([], VERSION),
        # The servers answered before the unit was cut anew.
        ([{(0, 64): 3}, {(64, 128): 5}], VERSION),
        ([{(0, 40): 3}, {(40, 100): 5}], VERSION),
    ],
)
def test_a_shard_without_an_answer_may_have_changed(answers: list[Answer], expected: int) -> None:
    assert changed_at(*answers) == expected
