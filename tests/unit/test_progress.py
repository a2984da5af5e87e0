"""Which work item a gradient belongs to, in a loop over batches and in a plain loop."""

import pytest

from shardwell.session.progress import StepProgress
from shardwell_wire.errors import UsageError
from shardwell_wire.v1.coordinator_pb2 import WorkItem


def items(*ranks: int) -> list[WorkItem]:
    return [WorkItem(global_rank=rank, dp_rank=rank, epoch=7) for rank in ranks]


def test_a_plain_loop_has_one_item_until_it_ends() -> None:
    progress = StepProgress(3, items(1))
    assert progress.require_current().item.global_rank == 1
    progress.end()
    assert progress.unfinished == []
    with pytest.raises(UsageError, match="after the work of step 3 was finished"):
        progress.require_current()


def test_a_plain_loop_with_several_ranks_is_an_error() -> None:
    with pytest.raises(UsageError, match="plays the logical ranks 0, 1"):
        StepProgress(0, items(0, 1)).require_current()


def test_a_spare_has_nothing_to_push_for() -> None:
    with pytest.raises(UsageError, match="spare"):
        StepProgress(0, []).require_current()


def test_batches_go_through_the_items_and_take_over_lost_ones() -> None:
    progress = StepProgress(0, items(0))
    progress.begin(progress.items[0])
    progress.require_current().parts[5] += 2
    progress.end()
    with pytest.raises(UsageError, match="finished"):
        progress.require_current()
    (lost,) = progress.add(items(1))
    assert progress.unfinished == [lost]
    progress.begin(lost)
    assert progress.require_current() is lost
    progress.end()
    finished = progress.items[0].to_proto()
    assert [(unit.unit_index, unit.part_count) for unit in finished.units] == [(5, 2)]
    assert finished.epoch == 7
