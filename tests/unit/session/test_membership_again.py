"""Memberships that a trainer replaces or asks for again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shardwell.membership.membership import Membership
from shardwell.options import JoinConfig
from shardwell_wire.errors import StaleEpochError
from shardwell_wire.v1 import coordinator_pb2
from tests.unit.session.test_replica_epoch import FakeCoordinator


class Coordinator(FakeCoordinator):
    """Gives memberships the epochs of a list. 0: the membership ends while its trainer waits in Join."""

    def __init__(self, *epochs: int) -> None:
        super().__init__()
        self.joins: list[coordinator_pb2.JoinRequest] = []
        self._epochs = iter(epochs)

    def call(self, rpc_name: str, request: Any, **options: Any) -> Any:
        answer = super().call(rpc_name, request, **options)
        if rpc_name == "Join":
            copy = coordinator_pb2.JoinRequest()
            copy.CopyFrom(request)
            self.joins.append(copy)
            answer.epoch = next(self._epochs)
            if not answer.epoch:
                raise StaleEpochError("trainer 'a' was removed while it waited: join again")
            answer.committed_step = 10 * answer.epoch + len(self.joins)
        return answer


@contextmanager
def joined(*epochs: int) -> Iterator[tuple[Coordinator, Membership]]:
    coordinator = Coordinator(*epochs)
    membership = Membership(JoinConfig(run="r", address=coordinator.address), coordinator)  # type: ignore[arg-type]
    try:
        yield coordinator, membership
    finally:
        membership.leave()


def test_valid_membership_is_replaced_after_it_was_given_up() -> None:
    with joined(4, 7) as (coordinator, membership):
        membership.give_up("its replica is formed again")
        assert membership.lapsed
        with pytest.raises(StaleEpochError, match="its replica is formed again"):
            membership.require_valid()
        assert membership.rejoin().epoch == 7
        assert not membership.lapsed and membership.epoch == 7
        membership.require_valid()
        first, second = coordinator.joins
        assert (first.replaced_epoch, second.replaced_epoch) == (0, 4)
        assert (second.trainer, second.run_id) == ("a", "id") and second.incarnation != first.incarnation


def test_refreshed_membership_has_the_present_state_of_the_run() -> None:
    with joined(4, 4) as (coordinator, membership):
        assert membership.refresh().committed_step == 42
        assert membership.joined.committed_step == 42 and membership.epoch == 4
        first, second = coordinator.joins
        assert second.incarnation == first.incarnation, "the coordinator answers for the same membership"


def test_refreshed_membership_may_be_a_new_one() -> None:
    with joined(4, 6) as (_, membership):
        membership.refresh()
        membership.require_valid()
        assert membership.epoch == 6 and membership.joined.committed_step == 62


def test_trainer_whose_membership_ends_before_the_start_joins_again() -> None:
    with joined(0, 0, 4, 0, 7) as (coordinator, membership):
        assert membership.epoch == 4
        membership.give_up("the run was rolled back")
        assert membership.rejoin().epoch == 7
        assert len({join.incarnation for join in coordinator.joins}) == 5, "each Join is for another membership"
        assert [join.replaced_epoch for join in coordinator.joins] == [0, 0, 0, 4, 4]


def test_trainer_whose_memberships_end_before_the_start_again_and_again_gives_up() -> None:
    with pytest.raises(StaleEpochError, match="was removed while it waited"), joined(*[0] * 100):
        pass


def test_membership_that_ends_while_it_is_refreshed_is_not_replaced() -> None:
    with joined(4, 0) as (_, membership), pytest.raises(StaleEpochError):
        membership.refresh()
