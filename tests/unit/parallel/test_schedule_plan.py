"""Schedules: stages of each trainer, bubble, and numbers that do not fit together."""

from __future__ import annotations

from typing import Any

import pytest

from shardwell.parallel import SCHEDULES, SchedulePlan
from shardwell_wire.errors import UsageError


def plan(schedule: str, pp: int = 2, num_micro_batches: int = 8, stages: int | None = None) -> SchedulePlan:
    return SchedulePlan(schedule=schedule, pp=pp, num_micro_batches=num_micro_batches, stages_per_trainer=stages)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_every_stage_has_one_trainer(schedule: str, pp: int) -> None:
    made = plan(schedule, pp)
    found = [stage for pp_rank in range(pp) for stage in made.stages_of(pp_rank)]
    assert sorted(found) == list(range(made.num_stages))


def test_stages_are_interleaved_or_placed_as_a_v() -> None:
    assert plan("Interleaved1F1B", stages=3).stages_of(1) == [1, 3, 5]
    assert plan("ZBVZeroBubble").stages_of(0) == [0, 3]
    assert plan("1F1B").stages_of(1) == [1]
    with pytest.raises(UsageError, match="pp_rank=2: expected 0 to 1"):
        plan("1F1B").stages_of(2)


def test_bubble_in_theory() -> None:
    assert plan("1F1B", num_micro_batches=4).bubble() == pytest.approx(0.2)
    assert plan("Interleaved1F1B", num_micro_batches=4).bubble() == pytest.approx(1 / 9)
    assert plan("ZBVZeroBubble").bubble() is None
    assert plan("1F1B", num_micro_batches=4).describe() == (
        "1F1B, 4 micro-batches, 2 stages on 2, bubble 20.0% in theory"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("Zero",), r"schedule='Zero': expected one of GPipe, 1F1B"),
        (("1F1B", 4, 2), r"at least as many micro-batches as stages: 4 stages, 2 micro-batches"),
        (("1F1B", 2, 4, 2), r"needs 1 stages per trainer, got 2"),
        (("DualPipeV", 2, 4, 3), r"needs 2 stages per trainer, got 3"),
        (("Interleaved1F1B", 2, 5), r"runs 5 micro-batches in 2 rounds of 2.*use 4 or 6 micro-batches"),
        (("GPipe", 0, 4), r"must be at least 1"),
        (("LoopedBFS", 2, 4, 0), r"needs at least 1 stages per trainer, got 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan(*arguments)
