"""Rank assignment at the start of a run and on a later join."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from shardwell_server.coordinator.ranks.rank_assignment import Applicant, assign_ranks, claim_ranks, natural_key
from shardwell_wire.errors import DuplicateError
from shardwell_wire.model.topology import World


def applicants(*hosts: str) -> list[Applicant]:
    return [Applicant(f"t{index}", host) for index, host in enumerate(hosts)]


def test_numbers_in_names_sort_by_value() -> None:
    names = ["node66", "node7", "node8", "a10b2", "a10b10", "a9b99"]
    assert sorted(names, key=natural_key) == ["a9b99", "a10b2", "a10b10", "node7", "node8", "node66"]


def test_assignment_is_independent_of_join_order() -> None:
    world = World(dp=2, tp=2, pp=2)
    team = [*applicants("node10", "node9", "node10", "node9", "x", "y", "node9"), Applicant("requester", "z", 5)]
    expected = assign_ranks(world, team)
    assert sorted(expected) == list(range(8))
    assert len(set(expected.values())) == 8
    assert expected[5] == "requester"
    for seed in range(50):
        random.Random(seed).shuffle(team)
        assert assign_ranks(world, team) == expected


def test_ranks_are_assigned_by_host_and_name() -> None:
    team = [Applicant(f"t{index}", f"node{host}") for index, host in ((0, 66), (1, 8), (2, 7), (10, 7))]
    assert assign_ranks(World(dp=4), team) == {0: "t2", 1: "t10", 2: "t1", 3: "t0"}


@pytest.mark.parametrize(
    ("hosts", "whole_groups"),
    [("aabb", 2), ("abab", 2), ("abbc", 1), ("aaab", 1), ("abbbbc", 2), ("abcd", 0), ("aabbbc", 2), ("aaabbb", 2)],
)
def test_trainers_of_one_host_share_a_tensor_group(hosts: str, whole_groups: int) -> None:
    world = World(dp=len(hosts) // 2, tp=2)
    rank_assignments = assign_ranks(world, applicants(*hosts))
    host_of = {f"t{index}": host for index, host in enumerate(hosts)}
    groups = [
        {host_of[rank_assignments[rank]] for rank in world.group(2 * dp_rank, "tp")} for dp_rank in range(world.dp)
    ]
    assert sum(len(group) == 1 for group in groups) == whole_groups


def test_requested_rank_attracts_trainers_of_its_host_to_its_tensor_group() -> None:
    team = [Applicant("wish", "m", 3), Applicant("mate", "m"), Applicant("a", "a"), Applicant("b", "z")]
    rank_assignments = assign_ranks(World(dp=2, tp=2), team)
    assert (rank_assignments[2], rank_assignments[3]) == ("mate", "wish")


def test_fewer_trainers_than_ranks_get_even_contiguous_blocks() -> None:
    rank_assignments = assign_ranks(World(dp=7), applicants("c", "b", "a"))
    assert [rank_assignments[rank] for rank in range(7)] == ["t2", "t2", "t2", "t1", "t1", "t0", "t0"]


def test_block_is_assigned_to_the_trainer_that_requested_a_rank_in_it() -> None:
    rank_assignments = assign_ranks(World(dp=4), [Applicant("late", "a", 3), Applicant("free", "z")])
    assert [rank_assignments[rank] for rank in range(4)] == ["free", "free", "late", "late"]


def test_two_requested_ranks_in_one_block_are_both_granted() -> None:
    rank_assignments = assign_ranks(World(dp=5), [Applicant("one", "a", 1), Applicant("zero", "a", 0)])
    assert (rank_assignments[0], rank_assignments[1]) == ("zero", "one")
    assert sorted(Counter(rank_assignments.values()).values()) == [2, 3]


def test_trainers_beyond_the_ranks_are_spares() -> None:
    assert assign_ranks(World(dp=2), applicants("a", "a", "a")) == {0: "t0", 1: "t1"}


def claimed(rank_assignments: dict[int, str], live: set[str], applicant: Applicant, **options: object) -> list[int]:
    changed = claim_ranks(rank_assignments, live, applicant, **({"requested": ()} | options))
    assert set(changed.values()) <= {applicant.name}
    return sorted(changed)


def test_returning_trainer_gets_its_former_ranks() -> None:
    rank_assignments = {0: "a", 1: "b", 2: "b", 3: "c"}
    assert claimed(rank_assignments, {"a"}, Applicant("b")) == [1, 2]


def test_new_trainer_gets_vacant_ranks_up_to_its_fair_share() -> None:
    rank_assignments = dict(enumerate("aabbccdd"))
    assert claimed(rank_assignments, {"a", "b"}, Applicant("new")) == [4, 5, 6]


def test_new_trainer_takes_ranks_from_the_most_loaded_if_that_is_fairer() -> None:
    assert claimed({0: "a", 1: "a", 2: "a", 3: "b"}, {"a", "b"}, Applicant("new")) == [2]
    assert claimed({0: "a", 1: "a", 2: "a", 3: "a"}, {"a"}, Applicant("new")) == [2, 3]
    assert claimed({0: "a", 1: "a", 2: "b", 3: "b"}, {"a", "b"}, Applicant("new")) == [3]
    assert claimed({0: "a", 1: "b"}, {"a", "b"}, Applicant("new")) == []


def test_requested_rank_is_taken_from_a_trainer_with_several_ranks() -> None:
    rank_assignments = dict.fromkeys(range(4), "a")
    assert claimed(rank_assignments, {"a"}, Applicant("new", "", 1)) == [1, 3]


@pytest.mark.parametrize(("rank_assignments", "requested"), [({0: "a", 1: "b"}, ()), ({0: "a", 1: "a"}, (1,))])
def test_requested_rank_of_a_live_trainer_is_rejected(
    rank_assignments: dict[int, str], requested: tuple[int, ...]
) -> None:
    with pytest.raises(DuplicateError, match="rank 1 is played by"):
        claim_ranks(rank_assignments, {"a", "b"}, Applicant("new", "", 1), requested=requested)
