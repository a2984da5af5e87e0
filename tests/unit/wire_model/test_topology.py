"""Logical ranks map to coordinates, groups and neighbours as documented."""

from itertools import permutations, product

import pytest

from shardwell_wire.errors import WorldError
from shardwell_wire.model.topology import AXES, CONTEXT_AXES, MAX_WORLD_SIZE, Coordinates, World, check_data_ranks

ALL_WORLDS = [World(dp, tp, pp, order) for dp, tp, pp in product((1, 2, 3), repeat=3) for order in permutations(AXES)]


def test_default_order_matches_the_documentation() -> None:
    world = World(dp=2, tp=2, pp=2)
    assert world.coordinates(3) == Coordinates(3, dp_rank=0, tp_rank=1, pp_rank=1)
    assert world.coordinates(5) == Coordinates(5, dp_rank=1, tp_rank=0, pp_rank=1)
    for at in world:
        assert at.global_rank == at.dp_rank * 4 + at.tp_rank * 2 + at.pp_rank


@pytest.mark.parametrize("world", ALL_WORLDS, ids=str)
def test_mapping_is_a_bijection_and_groups_partition(world: World) -> None:
    places = [(at.dp_rank, at.tp_rank, at.pp_rank) for at in world]
    assert sorted(places) == sorted(product(range(world.dp), range(world.tp), range(world.pp)))
    for at in world:
        assert world.global_rank(dp_rank=at.dp_rank, tp_rank=at.tp_rank, pp_rank=at.pp_rank) == at.global_rank
        for axis in AXES:
            group = world.group(at.global_rank, axis)
            assert group[at.along(axis)] == at.global_rank
            assert len(group) == getattr(world, axis)
            assert all(world.group(other, axis) == group for other in group)


def test_last_axis_of_the_order_varies_fastest() -> None:
    assert World(2, 2, 2, ("pp", "tp", "dp")).coordinates(1) == Coordinates(1, dp_rank=1, tp_rank=0, pp_rank=0)


@pytest.mark.parametrize("order", [AXES, CONTEXT_AXES, ("cp", "pp", "dp", "tp")], ids=str)
def test_context_ranks_are_between_data_and_tensor_ranks(order: tuple[str, ...]) -> None:
    world = World(2, 2, 3, order, cp=2)
    assert world.size == 24 and world.replica_size == 12 and set(world.order) == set(CONTEXT_AXES)
    places = [(at.dp_rank, at.cp_rank, at.tp_rank, at.pp_rank) for at in world]
    assert sorted(places) == list(product(range(2), range(2), range(2), range(3)))
    assert (places == sorted(places)) == (order != ("cp", "pp", "dp", "tp"))
    ranks = world.replica_ranks(1)
    assert [world.rank_in_replica(world.coordinates(rank)) for rank in ranks] == list(range(12))
    assert [len(world.group(0, axis)) for axis in CONTEXT_AXES] == [2, 2, 2, 3]
    assert World.from_proto(world.to_proto()) == world


def test_world_without_context_ranks_is_as_before() -> None:
    world = World(2, 2, 2, CONTEXT_AXES)
    assert world == World(2, 2, 2) and world.axes == AXES and str(world) == "World(dp=2, tp=2, pp=2)"
    assert str(World(cp=2)) == "World(dp=1, cp=2, tp=1, pp=1)"
    with pytest.raises(WorldError, match="cp is 1"):
        world.global_rank(cp_rank=1)
    with pytest.raises(WorldError, match=r"World\(cp=0\)"):
        World(cp=0)


def test_stage_neighbours_are_adjacent_stages() -> None:
    world = World(dp=2, pp=3)
    assert [world.stage_neighbours(rank) for rank in (3, 4, 5)] == [(None, 4), (3, 5), (4, None)]


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"tp": -1}, {"pp": True}, {"dp": 2.0}, {"dp": 1 << 21}])
def test_invalid_sizes_are_rejected(sizes: dict[str, int]) -> None:
    with pytest.raises(WorldError, match=r"expected an integer|more than the limit"):
        World(**sizes)


@pytest.mark.parametrize("order", [("dp", "tp"), ("dp", "tp", "tp"), ("data", "tp", "pp")])
def test_invalid_orders_are_rejected(order: tuple[str, ...]) -> None:
    with pytest.raises(WorldError, match="each of"):
        World(order=order)


def test_errors_say_what_to_change() -> None:
    with pytest.raises(WorldError, match=r"start 8, or change dp to 1"):
        World(2, 2, 2).check_fits(world_size=6)
    with pytest.raises(WorldError, match=r"use pp of 1, 2, 3, 4, 6, 12, or 15 layers"):
        World(pp=5).check_fits(num_layers=12)
    World(2, 2, 3).check_fits(world_size=12, num_layers=12)


def test_ranks_outside_the_world_are_rejected() -> None:
    with pytest.raises(WorldError, match="rank 8 is not in"):
        World(2, 2, 2).coordinates(8)
    with pytest.raises(WorldError, match="tp_rank 2"):
        World(2, 2, 2).global_rank(tp_rank=2)


@pytest.mark.parametrize("world", ALL_WORLDS[::5], ids=str)
def test_world_round_trips_through_its_proto(world: World) -> None:
    assert World.from_proto(world.to_proto()) == world


def test_limit_of_data_ranks_equals_limit_of_a_world() -> None:
    check_data_ranks(MAX_WORLD_SIZE)
    for dp in (0, MAX_WORLD_SIZE + 1, (1 << 32) - 1):
        with pytest.raises(WorldError, match=f"dp is {dp}: expected 1 to {MAX_WORLD_SIZE}"):
            check_data_ranks(dp)
