"""Placement of a unit's shards on servers."""

from __future__ import annotations

import random

from shardwell_server.coordinator.placement import Candidate, place
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout

MIB = 1 << 20


def servers(**free_bytes: int) -> list[Candidate]:
    return [Candidate(name, free, 1 << 40) for name, free in free_bytes.items()]


def flat(size_bytes: int) -> UnitLayout:
    return UnitLayout("unit", (Parameter("p", (size_bytes // 4,), "float32"),))


def tensors(*sizes: int) -> UnitLayout:
    return UnitLayout("unit", tuple(Parameter(f"p{n}", (size,), "float32") for n, size in enumerate(sizes)), "tensor")


def test_ranges_cover_the_unit_in_proportion_to_free_memory() -> None:
    ranges = place(flat(8 * MIB), servers(a=100, b=300), 4096)
    assert [(at.server_id, at.start_bytes, at.stop_bytes) for at in ranges] == [
        ("b", 0, 6 * MIB),
        ("a", 6 * MIB, 8 * MIB),
    ]
    assert all(at.start_bytes % BLOCK_BYTES == 0 for at in ranges)


def test_placement_is_independent_of_candidate_order() -> None:
    candidates = servers(a=5, b=5, c=7, d=5)
    expected = place(flat(10 * MIB + 64), candidates, 4096)
    for seed in range(20):
        random.Random(seed).shuffle(candidates)
        assert place(flat(10 * MIB + 64), candidates, 4096) == expected


def test_small_unit_goes_whole_to_the_server_with_most_free_memory() -> None:
    ranges = place(flat(70_016), servers(a=10, b=30, c=20), 64 << 10)
    assert [(at.server_id, at.start_bytes, at.stop_bytes) for at in ranges] == [("b", 0, 70_016)]


def test_small_units_spread_in_proportion_to_budgets() -> None:
    budgets = {"a": 8 << 30, "b": (8 << 30) + 64 * MIB, "c": 4 << 30}
    placed = dict.fromkeys(budgets, 0)
    for _ in range(100):
        candidates = [Candidate(name, budget - placed[name], budget) for name, budget in budgets.items()]
        (only,) = place(flat(MIB), candidates, 2 * MIB)
        placed[only.server_id] += MIB
    assert all(abs(placed[name] / MIB - expected) <= 1 for name, expected in {"a": 40, "b": 40, "c": 20}.items())


def test_small_unit_goes_to_a_server_that_can_hold_it() -> None:
    candidates = [Candidate("almost-full", 100 * MIB, 1 << 30), Candidate("small", MIB, MIB)]
    assert [at.server_id for at in place(flat(3 * MIB), candidates, 2 * MIB)] == ["almost-full"]


def test_full_server_gets_no_range() -> None:
    assert [at.server_id for at in place(flat(8 * MIB), servers(a=0, b=1 << 30, c=1 << 30), 4096)] == ["b", "c"]


def test_empty_unit_has_one_owner() -> None:
    (only,) = place(flat(0), servers(a=1, b=2), 4096)
    assert (only.server_id, only.start_bytes, only.stop_bytes) == ("b", 0, 0)


def test_unit_is_placed_even_if_no_server_has_free_memory() -> None:
    assert [at.server_id for at in place(flat(2 * MIB), servers(a=0, b=0), 4096)] == ["a", "b"]


def test_tensors_are_kept_whole_and_spread_in_proportion() -> None:
    layout = tensors(5_000, 3, 0, 40_000, 11, 20_000, 25_000, 1)
    ranges = place(layout, servers(a=100, b=100, c=50), 4096)
    assert [at.server_id for at in ranges] == ["a", "b", "c"]
    assert ranges[0].start_bytes == 0 and ranges[-1].stop_bytes == layout.size_bytes
    assert [at.start_bytes for at in ranges[1:]] == [layout.starts[4], layout.starts[6]]
    assert layout.parameters_cut_at([at.start_bytes for at in ranges]) == set()


def test_single_tensor_goes_to_the_server_with_most_free_memory() -> None:
    layout = tensors(1_000_003)
    assert [(at.server_id, at.stop_bytes) for at in place(layout, servers(a=1, b=3, c=2), 4096)] == [
        ("b", layout.size_bytes)
    ]


def test_random_units_are_never_cut_inside_a_tensor() -> None:
    rng = random.Random(0)
    for _ in range(200):
        layout = tensors(*(rng.choice([0, 1, 1000, 1024, 99_991]) for _ in range(rng.randrange(12))))
        candidates = [
            Candidate(str(n), rng.randrange(3) * rng.randrange(1000), 3000) for n in range(rng.randrange(1, 6))
        ]
        ranges = place(layout, candidates, 4096)
        bounds = [0, *(at.stop_bytes for at in ranges)]
        assert [at.start_bytes for at in ranges] == bounds[:-1] and bounds[-1] == layout.size_bytes
        assert layout.parameters_cut_at(bounds) == set()
