"""The readers of a run, as the coordinator lists them."""

from __future__ import annotations

import pytest

from shardwell_server.coordinator.readers import FORGET_AFTER_S, Readers
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.v1.coordinator_pb2 import ReaderReport


def test_reader_that_is_furthest_behind_comes_first() -> None:
    readers = Readers()
    for name, version in (("new", 9), ("old", 2), ("none", None)):
        readers.note(ReaderReport(reader_id=name, name=name, version=version), 1.0)
    readers.note(ReaderReport(reader_id="new", name="new", version=8), 3.0)
    found = [(each.name, each.lag, each.silent_s) for each in readers.describe(10, 4.0)]
    assert found == [("old", 8, 3.0), ("new", 2, 1.0), ("none", 0, 3.0)]


def test_silent_and_leaving_readers_are_forgotten() -> None:
    readers = Readers()
    readers.note(ReaderReport(reader_id="silent"), 0.0)
    readers.note(ReaderReport(reader_id="leaves"), 5.0)
    readers.note(ReaderReport(reader_id="stays"), 5.0)
    readers.note(ReaderReport(reader_id="leaves", leaving=True), 6.0)
    assert len(readers.describe(0, FORGET_AFTER_S)) == 1


def test_number_of_readers_is_limited() -> None:
    readers = Readers()
    for number in range(1200):
        holds_s = 0.0 if number else 60.0  # the first one holds the run, so others are forgotten before it
        readers.note(ReaderReport(reader_id=str(number), name=str(number), hold_s=holds_s), 0.0)
    assert {int(each.name) for each in readers.describe(0, 1.0)} == {0, *range(201, 1200)}


@pytest.mark.parametrize("field", ["reader_id", "name", "host"])
@pytest.mark.parametrize("text", ["x" * 201, "a\x1b[31m"])
def test_texts_that_cannot_be_shown_are_refused(field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected at most 200 characters"):
        Readers().note(ReaderReport(**{field: text}), 0.0)


def test_run_waits_for_readers_that_hold_it_and_are_too_far_behind() -> None:
    readers = Readers(max_lag=1)
    for name, version, hold_s in (("behind", 2, 5.0), ("near", 3, 5.0), ("free", 0, 0.0)):
        readers.note(ReaderReport(reader_id=name, name=name, host="h", version=version, hold_s=hold_s), 1.0)
    assert readers.waited_for(3, 2.0) == []
    assert readers.waited_for(4, 2.0) == [
        "reader 'behind' on h has read version 2, and the run is at version 4 with max_reader_lag=1: it goes on when "
        "the reader has read version 3, or in 5.0 s"
    ]
    assert readers.give_up(4, 4.0) == []
    behind = ReaderReport(reader_id="behind", name="behind", host="h", version=2, hold_s=5.0)
    readers.note(behind, 8.0)  # a request without a read gives no more time
    assert (readers.waited_for(4, 8.9)[0][-8:], readers.give_up(4, 8.9)) == ("in 0.1 s", [])
    assert readers.give_up(4, 9.0) == [
        "reader 'behind' on h has read version 2, and the run has waited 5 s for it: version 5 is committed without "
        "it. The run waits for it again when it has read"
    ]
    readers.note(ReaderReport(reader_id="near", leaving=True), 9.0)
    readers.note(behind, 9.0)
    assert readers.waited_for(4, 9.0) == readers.give_up(4, 99.0) == []
    readers.note(ReaderReport(reader_id="behind", name="behind", host="h", version=4, hold_s=5.0), 99.0)
    assert readers.waited_for(5, 99.0) == [] and len(readers.waited_for(6, 99.0)) == 1
    readers.note(ReaderReport(reader_id="behind", name="behind", host="h", version=4, hold_s=5.0), 99.0, awaits=7)
    assert readers.waited_for(6, 99.0) == [] and len(readers.waited_for(7, 99.0)) == 1
    readers.note_answered("behind", 99.0)
    assert len(readers.waited_for(6, 99.0)) == 1
    readers.note(ReaderReport(reader_id="behind", leaving=True), 99.0)
    readers.note(ReaderReport(reader_id="new", name="new", host="h", hold_s=5.0), 9.0)
    assert "has read no version yet" in readers.waited_for(4, 9.0)[0]
    assert Readers(max_lag=None).waited_for(4, 9.0) == []


@pytest.mark.parametrize("hold_s", [-1.0, float("nan"), 86401.0])
def test_time_to_wait_is_checked(hold_s: float) -> None:
    with pytest.raises(InvalidRequestError, match="hold_s is"):
        Readers().note(ReaderReport(reader_id="a", hold_s=hold_s), 0.0)
