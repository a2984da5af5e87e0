"""Units are cut into one optimizer partition per data rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import BLOCK_BYTES, cut
from shardwell_wire.model.topology import check_state_tensor, part_in, partition_of, runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2


@pytest.mark.parametrize("size_bytes", [0, 64, BLOCK_BYTES, 10 * BLOCK_BYTES + 64, 1_000_000 // 64 * 64])
@pytest.mark.parametrize("dp", [1, 2, 3, 7])
@pytest.mark.parametrize("num_servers", [1, 2, 5])
def test_intersections_cover_every_shard_once(size_bytes: int, dp: int, num_servers: int) -> None:
    partitions = [partition_of(size_bytes, dp, rank) for rank in range(dp)]
    assert (partitions[0][0], partitions[-1][1]) == (0, size_bytes)
    assert all(before[1] == after[0] for before, after in pairwise(partitions))
    for start, stop in cut(size_bytes, [1.0] * num_servers, BLOCK_BYTES):
        parts = [part_in(size_bytes, dp, rank, start, stop) for rank in range(dp)]
        covered = [byte_range for byte_range in parts if byte_range[0] < byte_range[1]]
        assert all(low <= high for low, high in parts)
        assert sum(high - low for low, high in covered) == stop - start
        assert all(low % BLOCK_BYTES == 0 for low, _ in covered)


@pytest.mark.parametrize("size_bytes", [0, 64, BLOCK_BYTES, 10 * BLOCK_BYTES + 64, 999_936, 123 << 20])
def test_partitions_equal_the_even_cut(size_bytes: int) -> None:
    for dp in (1, 2, 3, 7, 64, 1000):
        expected = cut(size_bytes, [1.0] * dp, BLOCK_BYTES)
        assert [partition_of(size_bytes, dp, rank) for rank in range(dp)] == expected


def test_prefix_marks_optimizers_on_trainers() -> None:
    assert runs_on_trainers("trainer/SGD")
    assert not runs_on_trainers("sgd")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": 99}, "unknown dtype 99"),
        ({"shape": [1] * 65}, "65 dimensions, expected at most 64"),
        ({"shape": [1 << 62, 1 << 62]}, "expected at most 1099511627776 bytes"),
        ({"shape": [(1 << 64) - 1, 0]}, "expected at most 1099511627776 bytes"),
    ],
)
def test_impossible_state_is_rejected(fields: dict[str, Any], message: str) -> None:
    tensor = shard_pb2.StateTensor(**{"name": "momentum", "dtype": common_pb2.DTYPE_FLOAT32, "shape": [3], **fields})
    with pytest.raises(InvalidRequestError, match=f"unit 'u': state 'momentum' .*{message}"):
        check_state_tensor(tensor, "unit 'u'")
