"""Notices of a run: numbered by the coordinator, logged once by each trainer, identical ones at most once a minute."""

from __future__ import annotations

import pytest

from shardwell.membership.heartbeats import RunNotices
from shardwell_server.coordinator.run import Notices


def test_identical_notices_are_logged_once_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    kept, now = Notices(), [1000.0]
    shown = RunNotices("gpt", lambda: now[0])
    for step in range(10):
        kept.add(f"step {step}: the disk is full", now=now[0], cause="the disk is full")
        shown.show(kept.after(0))
        now[0] += 10.0
    kept.add("step 10: no answer", now=now[0], cause="no answer")
    kept.add("a checkpoint is damaged", now=now[0])
    kept.add("another one is damaged", now=now[0])
    shown.show(kept.after(0))
    assert [record.getMessage().removeprefix("run 'gpt': ") for record in caplog.records] == [
        "step 0: the disk is full",
        "step 6: the disk is full (5 like it were not logged)",
        "step 10: no answer",
        "a checkpoint is damaged",
        "another one is damaged",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_numbers_rise_after_a_restart_and_few_notices_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    shown, before, after = RunNotices("gpt"), Notices(), Notices()
    for number in range(20):
        before.add(f"{number}", now=5.0)
    assert [notice.message for notice in before.after(0)] == [f"{number}" for number in range(12, 20)]
    assert before.after(before.newest) == []
    shown.show(before.after(0))
    after.add("new", now=6.0)
    shown.show(after.after(0))
    assert caplog.records[-1].getMessage() == "run 'gpt': new"


def test_a_remedied_failure_is_forgotten() -> None:
    kept = Notices()
    kept.add("a checkpoint is damaged", now=1.0)
    kept.add("the disk is full", now=1.0, cause="the disk is full")
    kept.forget_failures()
    assert [notice.message for notice in kept.after(0)] == ["a checkpoint is damaged"]
