"""The state of the step: its phases, and the work item to which a gradient belongs."""

import gc
import weakref
from functools import partial

import pytest

from shardwell.step.step_commit import StepUpdate
from shardwell.step.step_state import FinishedStep, StepPhase, StepState, WorkItemState
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2
from shardwell_wire.v1.coordinator_pb2 import WorkItem


def items(*ranks: int) -> list[WorkItem]:
    return [WorkItem(global_rank=rank, dp_rank=rank, epoch=7) for rank in ranks]


def test_plain_loop_has_one_current_item_until_it_is_finished() -> None:
    state = StepState(3, items(1))
    assert state.require_current().item.global_rank == 1
    state.finish_item()
    assert state.unfinished == []
    with pytest.raises(UsageError, match="after the work of step 3 was finished"):
        state.require_current()


def test_phases_lead_to_the_next_step() -> None:
    state, update = StepState(3, items(1)), StepUpdate(common_pb2.OptimizerStep())
    state.require_current().record_push(5, [0, 2])
    state.finish_item()
    assert state.phase is StepPhase.COMPUTING, "other trainers may have unfinished items"
    state.work_finished = True
    assert state.phase is StepPhase.WORK_FINISHED
    state.pending_update = update
    assert (state.phase, state.pending_update) == (StepPhase.COMMITTING, update)
    finished = state.advance(4, items(0, 1))
    assert finished == FinishedStep(frozenset({1}), frozenset({5}), frozenset({1}))
    assert (state.number, state.phase, state.pending_update) == (4, StepPhase.COMPUTING, None)
    assert sorted(state.items) == [0, 1] and not state.items[1].is_finished


def test_restarted_item_and_abandoned_commit_return_to_the_earlier_phase() -> None:
    state = StepState(0, items(0))
    item = state.require_current()
    item.record_push(5, [1])
    state.finish_item()
    state.work_finished = True
    state.pending_update = StepUpdate(common_pb2.OptimizerStep())
    state.pending_update = None
    assert state.phase is StepPhase.WORK_FINISHED
    state.restart_item(item, WorkItem(global_rank=0, epoch=7, attempt=1))
    assert state.phase is StepPhase.COMPUTING
    assert (item.item.attempt, item.parts, item.pushed) == (1, {}, {})


def test_dropped_gradients_are_reported_by_the_next_push() -> None:
    state = StepState(0, items(0))
    item = state.require_current()
    assert item.record_push(5, [0, 1]) == (0, [])
    state.drop(5, [1])
    assert item.record_push(5, [2]) == (1, [1])
    assert item.pushed == {5: {0, 2}}


def test_plain_loop_with_several_ranks_is_rejected() -> None:
    with pytest.raises(UsageError, match="plays the logical ranks 0, 1"):
        StepState(0, items(0, 1)).require_current()


def test_gradient_of_a_spare_is_rejected() -> None:
    with pytest.raises(UsageError, match="spare"):
        StepState(0, []).require_current()


def test_batches_compute_own_items_and_those_of_lost_trainers() -> None:
    state = StepState(0, items(0))
    state.start_item(state.items[0])
    state.require_current().record_push(5)
    state.require_current().record_push(5)
    state.finish_item()
    with pytest.raises(UsageError, match="finished"):
        state.require_current()
    (lost,) = state.add_items(items(1))
    assert state.unfinished == [lost]
    state.start_item(lost)
    assert state.require_current() is lost
    state.finish_item()
    finished = state.items[0].to_proto()
    assert [(unit.unit_index, unit.part_count) for unit in finished.units] == [(5, 2)]
    assert finished.epoch == 7


def test_an_item_is_released_with_its_step() -> None:
    state = StepState(0, items(0))
    item = state.require_current()
    item.headers = item.make_headers(common_pb2.RequestContext(), partial(excuses, item))
    item.headers.start_part(5, [0])
    released = weakref.ref(item)
    del item
    gc.disable()  # a cycle would wait for a garbage collection
    try:
        state.advance(1, items(0))
        assert released() is None
    finally:
        gc.enable()


def excuses(item: WorkItemState, _: BaseException) -> bool:
    return item.is_over
