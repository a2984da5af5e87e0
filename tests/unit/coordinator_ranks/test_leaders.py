"""Owners, leaders and initializers of a run with tensor and pipeline axes."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.ranks.rank_assignment import Applicant, replicas_of
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import RunSettings
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.topology import World

WORLD = World(dp=2, tp=2, pp=2)


def layout(*, tp_rank: int = 0, pp_rank: int = 0) -> UnitLayout:
    return UnitLayout("u", (Parameter("w", (3,), "float32"),), tp_rank=tp_rank, pp_ranks=(pp_rank,))


@pytest.fixture
def run() -> Run:
    """A run whose trainers are named after their coordinates."""
    settings = RunSettings(world=WORLD, seed=0, min_trainers=WORLD.size, num_layers=0)
    run = Run(RunIdentity("r", "id"), settings, lambda: 0.0, 0.0)
    for at in WORLD:
        run.admit(Applicant(f"d{at.dp_rank}t{at.tp_rank}p{at.pp_rank}", requested_rank=at.global_rank), "i")
    return run


def test_the_trainers_of_dp_rank_0_lead(run: Run) -> None:
    assert run.work.leaders(run.work.steps[0]) == ["d0t0p0", "d0t0p1", "d0t1p0", "d0t1p1"]


@pytest.mark.parametrize(("tp_rank", "pp_rank"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_holder_of_a_unit_in_dp_rank_0_sends_its_values(run: Run, tp_rank: int, pp_rank: int) -> None:
    unit = layout(tp_rank=tp_rank, pp_rank=pp_rank)
    first = run.choose_initializer(unit)
    assert first is not None and first.trainer == f"d0t{tp_rank}p{pp_rank}"
    assert run.choose_initializer(unit) is first, "as long as it is live"
    others = [run.initializer_of(layout(tp_rank=t, pp_rank=p)) for t in range(2) for p in range(2)]
    assert [each for each in others if each is not None] == [first], "other places choose their own"


def test_a_gone_holder_is_replaced_by_one_of_the_same_place(run: Run) -> None:
    unit = layout(tp_rank=1, pp_rank=0)
    before = run.choose_initializer(unit)
    run.revoke_lease(run.members.by_name["d0t1p0"])
    after = run.choose_initializer(unit)
    assert before is not None and after is not None
    assert after.trainer == "d1t1p0" and after.epoch > before.epoch
    run.revoke_lease(run.members.by_name["d1t1p0"])
    assert run.choose_initializer(unit) is None, "no other trainer has the values"
    assert run.work.leaders(run.work.steps[0]) == []


def test_owners_and_states_are_current_after_every_change(run: Run) -> None:
    def check() -> None:
        owners = run.owners.by_rank
        assert run.owners.replicas == replicas_of(WORLD, owners)
        assert run.members.live == {member.name: member for member in run.members if member.live}
        assert run.members.expired == [member for member in run.members if member.expired]
        for name in run.members.by_name:
            ranks = [rank for rank in range(WORLD.size) if owners[rank] == name]
            assert run.owners.ranks_of(name) == ranks
            assert run.owners.is_waiting_spare(name) is (not ranks)
            epochs = {run.owners.replica_epochs[WORLD.coordinates(rank).dp_rank] for rank in ranks} or {0}
            assert {run.owners.replica_epoch_of(name)} == epochs

    check()
    member = run.members.by_name["d0t1p0"]
    for change in (run.expire_lease, run.restore_lease, run.expire_lease, run.revoke_lease):
        change(member)
        check()
    for name in ("spare", "d0t1p0", "another"):
        run.admit(Applicant(name), "i")
        check()
    assert run.owners.ranks_of("spare") == [2] and run.owners.ranks_of("d0t1p0") == []
    run.revoke_lease(run.members.by_name["d1t0p0"])
    check()
    assert run.owners.ranks_of("d0t1p0") == [4], "a spare gets the free place"
