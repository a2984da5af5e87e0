"""Which work item a gradient belongs to, in a loop over batches and in a plain loop."""

import pytest

from shardwell.session.step_state import StepState
from shardwell_wire.errors import UsageError
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
