"""Places in replicas: at the start of a run with fewer replicas than dp ranks, on a later join, and for spares."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.ranks.rank_assignment import (
    Applicant,
    assign_ranks,
    claim_place,
    form_replica,
    replicas_of,
    requested_place,
)
from shardwell_wire.errors import DuplicateError
from shardwell_wire.model.topology import World

WORLD = World(dp=2, tp=2)


def assigned(*names: str) -> dict[int, str]:
    return dict(enumerate(names))


def claim(owners: dict[int, str], live: dict[str, str], applicant: Applicant, world: World = WORLD) -> list[int]:
    changed = claim_place(world, owners, live, applicant)
    assert set(changed.values()) <= {applicant.name}
    return sorted(changed)


def test_fewer_replicas_than_dp_ranks_play_blocks_of_dp_ranks() -> None:
    world = World(dp=5, tp=2)
    trainers = [Applicant(name, host) for name, host in zip("abcd", "mnmn", strict=True)]
    replicas = replicas_of(world, assign_ranks(world, trainers))
    assert replicas == [("a", "c")] * 3 + [("b", "d")] * 2, "trainers of one host share a tensor group"


@pytest.mark.parametrize("order", [("dp", "tp", "pp"), ("pp", "tp", "dp")])
def test_requested_rank_is_granted_although_replicas_play_several_dp_ranks(order: tuple[str, ...]) -> None:
    world = World(dp=4, tp=2, order=order)
    rank = world.global_rank(dp_rank=3, tp_rank=1)
    trainers = [Applicant("w", "z", rank), *(Applicant(name) for name in "abc")]
    owners = assign_ranks(world, trainers)
    assert owners[rank] == "w"
    assert [len(set(replica)) for replica in replicas_of(world, owners)] == [2] * 4
    assert requested_place(world, 4, rank) == requested_place(world, 4, world.global_rank(dp_rank=2, tp_rank=1))
    assert requested_place(world, 4, rank) != requested_place(world, 4, world.global_rank(dp_rank=1, tp_rank=1))
    assert requested_place(world, 8, rank) == rank


def test_returning_trainer_gets_its_place_back_and_no_other() -> None:
    owners = assigned("a", "b", "c", "d")
    assert claim(owners, {"a": "h"}, Applicant("d")) == [3]
    with pytest.raises(DuplicateError, match="trainer 'd' owns rank 3: request another rank than 1"):
        claim(owners, {"a": "h"}, Applicant("d", "", 1))


def test_new_trainer_takes_the_place_of_a_gone_one_in_all_dp_ranks_of_its_replica() -> None:
    owners = assigned("a", "b", "a", "b", "c", "d", "c", "d")
    assert claim(owners, {"a": "h", "c": "h", "d": "h"}, Applicant("n"), World(dp=4, tp=2)) == [1, 3]


def test_new_trainer_prefers_the_replica_that_lacks_the_fewest() -> None:
    assert claim(assigned("a", "b", "c", "d"), {"d": "h"}, Applicant("n")) == [2]
    assert claim(assigned("a", "b", "c", "d"), {"b": "h"}, Applicant("n")) == [0]


def test_new_trainer_prefers_a_tensor_group_on_its_host() -> None:
    owners, live = assigned("a", "b", "c", "d"), {"a": "x", "c": "y"}
    assert claim(owners, live, Applicant("n", "y")) == [3]
    assert claim(owners, live, Applicant("n", "x")) == [1]
    assert claim(owners, live, Applicant("n", "z")) == [1]


def test_trainer_is_a_spare_if_all_places_are_taken() -> None:
    assert claim(assigned("a", "b", "c", "d"), dict.fromkeys("abcd", "h"), Applicant("n")) == []


def test_requested_rank_is_granted_if_its_owner_is_gone() -> None:
    owners = assigned("a", "b", "c", "d")
    assert claim(owners, dict.fromkeys("ab", "h"), Applicant("n", "", 3)) == [3]
    with pytest.raises(DuplicateError, match="rank 0 is played by 'a'"):
        claim(owners, dict.fromkeys("ab", "h"), Applicant("n", "", 0))


def test_spares_form_a_replica_that_takes_dp_ranks_from_the_busiest() -> None:
    world = World(dp=5, tp=2)
    owners = {rank: "ab"[rank % 2] for rank in range(6)} | {6: "c", 7: "d", 8: "c", 9: "d"}
    spares = [Applicant("t", "n"), Applicant("s", "m"), Applicant("u", "m")]
    formed = form_replica(world, owners, spares)
    assert replicas_of(world, owners | formed) == [("a", "b"), ("a", "b"), ("s", "u"), ("c", "d"), ("c", "d")]


def test_too_few_spares_or_equal_replicas_form_none() -> None:
    owners = assigned("a", "b", "a", "b")
    assert form_replica(WORLD, owners, [Applicant("s")]) == {}
    assert form_replica(WORLD, assigned("a", "b", "c", "d"), [Applicant("s"), Applicant("t")]) == {}
    assert sorted(form_replica(WORLD, owners, [Applicant("s"), Applicant("t")])) == [2, 3]
