"""Relocations of the shards of a run: what is counted, planned and confirmed."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.placed_units import DeclaredUnits, Relocations, Unit
from shardwell_server.coordinator.run_checkpoints import RunCheckpoints
from shardwell_server.coordinator.signals import RunChanges
from shardwell_server.coordinator.storage.records import BackupRecord, BackupState, ShardRecord
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2


def layout() -> UnitLayout:
    return UnitLayout.from_proto(
        common_pb2.UnitSpec(
            name="u", parameters=[common_pb2.ParameterSpec(name="p", shape=[64], dtype=common_pb2.DTYPE_FLOAT32)]
        )
    )


class OneShard:
    """A unit with its primary on server a, and backups on others."""

    def __init__(self, **backups: BackupState) -> None:
        self.changes = RunChanges()
        self.units = DeclaredUnits("r", self.changes)
        records = tuple(BackupRecord(0, 256, name, "1", state=state) for name, state in backups.items())
        self.units.add(Unit(0, layout(), (ShardRecord(0, 256, "a", "1"),), published=True, backups=records))
        self.relocations = Relocations(self.units, RunCheckpoints(), self.changes)

    @property
    def states(self) -> dict[str, BackupState]:
        (unit,) = self.units
        return {backup.server_id: backup.state for backup in unit.backups}


def test_move_makes_the_copy_the_primary_and_keeps_the_former_one() -> None:
    one = OneShard(b=BackupState.IN_SYNC, c=BackupState.IN_SYNC)
    one.relocations.plan_moves({(0, 0): "b"})
    one.relocations.promote(one.relocations.planned_promotions())
    (unit,) = one.units
    assert unit.owners == {"b"}
    assert one.states == {"a": BackupState.FORMER, "c": BackupState.IN_SYNC}
    assert (one.relocations.count, one.relocations.unconfirmed, one.relocations.moves) == (1, {"b"}, {})
    assert one.changes.made


def test_copy_that_is_not_in_sync_is_not_promoted() -> None:
    one = OneShard(b=BackupState.BUILDING)
    one.relocations.plan_moves({(0, 0): "b"})
    assert not one.relocations.planned_promotions()


@pytest.mark.parametrize("how", ["missed the step", "released", "lost"])
def test_move_waits_if_another_backup_went_out_of_sync_since_it_was_planned(how: str) -> None:
    one = OneShard(b=BackupState.IN_SYNC, c=BackupState.IN_SYNC)
    one.relocations.plan_moves({(0, 0): "b"})
    (unit,) = one.units
    (other,) = (backup for backup in unit.backups if backup.server_id == "c")
    if how == "missed the step":
        one.relocations.fail_backups([(0, 0, "c")], BackupState.FORMER)
    elif how == "released":
        one.units.set_backup_state(unit, other, BackupState.RELEASING)
    else:
        one.units.remove_backup(unit, other)
    assert not one.relocations.planned_promotions()
    one.relocations.plan_moves({(0, 0): "b"})  # the keeper has decided again
    assert [promotion.backup.server_id for promotion in one.relocations.planned_promotions()] == ["b"]


def test_confirmation_of_an_earlier_relocation_does_not_count() -> None:
    one = OneShard(b=BackupState.IN_SYNC)
    one.relocations.plan_moves({(0, 0): "b"})
    one.relocations.promote(one.relocations.planned_promotions())
    one.relocations.raise_count()
    one.relocations.note_confirmed("b", 1)
    assert one.relocations.unconfirmed == {"b"}
    one.relocations.note_confirmed("b", 2)
    assert not one.relocations.unconfirmed


def test_placement_is_announced_once() -> None:
    one = OneShard()
    one.relocations.raise_count()
    assert [one.relocations.announce(1), one.relocations.announce(1), one.relocations.announced] == [True, False, 1]


@pytest.mark.parametrize(
    "state, missed, reported, after",
    [
        (BackupState.IN_SYNC, BackupState.BUILDING, True, BackupState.BUILDING),
        (BackupState.IN_SYNC, BackupState.FORMER, True, BackupState.FORMER),
        (BackupState.BUILDING, BackupState.FORMER, False, BackupState.BUILDING),
        (BackupState.RELEASING, BackupState.BUILDING, False, BackupState.RELEASING),
    ],
)
def test_backup_that_missed_a_step_is_not_in_sync(
    state: BackupState, missed: BackupState, reported: bool, after: BackupState
) -> None:
    one = OneShard(b=state)
    assert one.relocations.fail_backups({(0, 0, "b"), (0, 0, "unknown"), (7, 0, "b")}, missed) is reported
    assert one.states == {"b": after}


def test_restarted_coordinator_asks_all_servers_to_confirm() -> None:
    one = OneShard(b=BackupState.IN_SYNC)
    one.relocations.restore(3, rebalancing=True)
    assert (one.relocations.announced, one.relocations.rebalancing) == (3, True)
    assert one.relocations.unconfirmed == {"a"}
