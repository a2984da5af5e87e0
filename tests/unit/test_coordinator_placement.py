"""Where the shards of a unit go."""

from __future__ import annotations

import random

from shardwell_server.coordinator.placement import Candidate, place
from shardwell_wire.layout import BLOCK_BYTES

MIB = 1 << 20


def servers(**free_bytes: int) -> list[Candidate]:
    return [Candidate(name, free) for name, free in free_bytes.items()]


def test_ranges_cover_the_unit_in_proportion_to_free_memory() -> None:
    ranges = place(8 * MIB, servers(a=100, b=300), 4096)
    assert [(at.server_id, at.start_bytes, at.stop_bytes) for at in ranges] == [
        ("b", 0, 6 * MIB),
        ("a", 6 * MIB, 8 * MIB),
    ]
    assert all(at.start_bytes % BLOCK_BYTES == 0 for at in ranges)


def test_the_order_of_the_candidates_does_not_matter() -> None:
    candidates = servers(a=5, b=5, c=7, d=5)
    expected = place(10 * MIB + 64, candidates, 4096)
    for seed in range(20):
        random.Random(seed).shuffle(candidates)
        assert place(10 * MIB + 64, candidates, 4096) == expected


def test_a_small_unit_goes_whole_to_the_server_with_most_room() -> None:
    ranges = place(70_000, servers(a=10, b=30, c=20), 64 << 10)
    assert [(at.server_id, at.start_bytes, at.stop_bytes) for at in ranges] == [("b", 0, 70_000)]


def test_a_full_server_gets_nothing() -> None:
    assert [at.server_id for at in place(8 * MIB, servers(a=0, b=1 << 30, c=1 << 30), 4096)] == ["b", "c"]


def test_an_empty_unit_has_one_owner() -> None:
    (only,) = place(0, servers(a=1, b=2), 4096)
    assert (only.server_id, only.start_bytes, only.stop_bytes) == ("b", 0, 0)


def test_without_any_room_the_servers_are_asked_all_the_same() -> None:
    assert [at.server_id for at in place(2 * MIB, servers(a=0, b=0), 4096)] == ["a", "b"]
