"""Replicas: who computes a work item when trainers are gone, and who takes over. Also with one trainer per replica."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.ranks.rank_assignment import (
    complete_replicas,
    distribute_items,
    ranks_of_items,
    replicas_of,
    waiting_replicas,
)
from shardwell_wire.model.topology import World

Replica = tuple[str, ...]


def replicas(*names: str) -> list[Replica]:
    """Returns one replica per word, with one trainer per letter."""
    return [tuple(name) for name in names]


def always(name: str) -> bool:
    return True


def words(chosen: list[Replica | None]) -> list[str | None]:
    return [None if replica is None else "".join(replica) for replica in chosen]


@pytest.mark.parametrize("order", [("dp", "tp", "pp"), ("pp", "dp", "tp"), ("tp", "pp", "dp")])
def test_replica_lists_trainers_by_tp_rank_and_then_pp_rank_in_every_order(order: tuple[str, ...]) -> None:
    world = World(dp=2, tp=2, pp=3, order=order)
    assigned = {at.global_rank: f"{at.dp_rank}{at.tp_rank}{at.pp_rank}" for at in world}
    expected = [tuple(f"{dp}{tp}{pp}" for tp in range(2) for pp in range(3)) for dp in range(2)]
    assert replicas_of(world, assigned) == expected
    assert sorted(rank for ranks in ranks_of_items(world) for rank in ranks) == list(range(12))


def test_replica_lists_trainers_by_context_rank_first() -> None:
    world = World(dp=2, cp=2, pp=2, order=("pp", "dp", "tp"))
    assigned = {at.global_rank: f"{at.dp_rank}{at.cp_rank}{at.pp_rank}" for at in world}
    assert replicas_of(world, assigned) == [tuple(f"{dp}{cp}{pp}" for cp in "01" for pp in "01") for dp in "01"]


def test_replica_is_complete_if_all_its_trainers_are_present() -> None:
    assert complete_replicas(replicas("ab", "cd", "ab"), {"a", "b", "c"}) == replicas("ab")
    assert complete_replicas(replicas("ab", "cd"), {"a", "b", "c", "d"}) == replicas("ab", "cd")
    assert complete_replicas(replicas("ab", "cd"), {"a", "c"}) == []


# One trainer per replica


def test_items_of_vacant_ranks_go_to_the_least_loaded_trainer() -> None:
    owners = replicas("x", "a", "b", "b", "x")
    assert words(distribute_items(owners, {"a", "b"}, always)) == ["a", "a", "b", "b", "a"]
    assert words(distribute_items(owners, {"a", "b", "s"}, always))[0] == "s", "a spare has no items"


def test_trainer_that_rejects_reassigned_work_gets_none() -> None:
    owners = replicas("x", "p", "a")
    assert words(distribute_items(owners, {"p", "a"}, lambda name: name == "a")) == ["a", "p", "a"]
    assert words(distribute_items(owners, {"p"}, lambda name: False)) == [None, "p", None]


def test_expired_owner_keeps_its_item_only_if_no_trainer_accepts_it() -> None:
    owners = replicas("e", "x", "a")
    assert words(distribute_items(owners, {"a"}, lambda name: False, expired={"e"})) == ["e", None, "a"]
    assert words(distribute_items(owners, {"a"}, always, expired={"e"})) == ["a", "a", "a"]


def test_trainer_that_is_behind_gets_no_item_unless_nobody_else_accepts() -> None:
    owners = replicas("a", "b")
    assert words(distribute_items(owners, {"a", "b"}, always, behind={"b"})) == ["a", "a"]
    assert words(distribute_items(owners, {"a", "b"}, lambda name: name == "b", behind={"b"})) == ["a", "b"]


def test_spares_take_over_first() -> None:
    assert waiting_replicas(replicas("a", "b"), ["b", "s", "a"]) == replicas("s", "b", "a")


# Several trainers per replica


def test_items_of_a_broken_replica_go_to_the_complete_replica_with_the_fewest_items() -> None:
    owners = replicas("ab", "cd", "ef", "ef")
    assert words(distribute_items(owners, set("bcdef"), always)) == ["cd", "cd", "ef", "ef"]
    assert words(distribute_items(owners, set("acdef"), always)) == ["cd", "cd", "ef", "ef"]
    assert words(distribute_items(owners, set("ef"), always)) == ["ef"] * 4
    assert words(distribute_items(owners, set("abcdef"), always)) == ["ab", "cd", "ef", "ef"]


def test_replica_takes_over_only_if_all_its_trainers_accept_work() -> None:
    owners = replicas("ab", "cd")
    assert words(distribute_items(owners, set("acd"), lambda name: name != "d")) == [None, "cd"]
    assert words(distribute_items(owners, set("acd"), always, expired={"b"})) == ["cd", "cd"]


def test_broken_replica_keeps_its_item_if_its_absent_trainers_have_only_expired_and_nobody_accepts() -> None:
    owners = replicas("ab", "cd")
    kept = distribute_items(owners, set("acd"), lambda name: False, expired={"b"})
    assert words(kept) == ["ab", "cd"]
    assert words(distribute_items(owners, set("a"), lambda name: False, expired={"b", "c"})) == ["ab", None]


def test_replica_with_a_trainer_that_is_behind_counts_as_incomplete() -> None:
    owners = replicas("ab", "cd")
    assert words(distribute_items(owners, set("abcd"), always, behind={"d"})) == ["ab", "ab"]
    assert words(distribute_items(owners, set("bcd"), always, behind={"d"})) == ["cd", "cd"], "nobody else accepts"


def test_spares_are_no_replica() -> None:
    assert words(distribute_items(replicas("ab"), set("ast"), always)) == [None]
    assert waiting_replicas(replicas("ab", "cd"), ["s", "t", "d", "c", "a"]) == replicas("cd")


def test_replica_takes_over_when_all_its_trainers_wait() -> None:
    assert waiting_replicas(replicas("ab", "cd", "ab"), ["d", "b", "a", "c"]) == replicas("ab", "cd")
    assert waiting_replicas(replicas("ab", "cd"), ["a", "c", "d"]) == replicas("cd")
