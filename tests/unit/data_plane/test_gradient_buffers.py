"""Shared gradient buffers of a trainer that joins again: gradients of items that it has finished still count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from shardwell.step.step_state import StepState
from shardwell.store.item_pushes import ItemPushes
from shardwell.transport.shm_transport import GradientBuffer, GradientBuffers
from shardwell_wire.v1 import coordinator_pb2

SHARD = ("u", 0)


def item(rank: int) -> coordinator_pb2.WorkItem:
    return coordinator_pb2.WorkItem(global_rank=rank, dp_rank=rank, epoch=1, attempt=1)


@pytest.mark.parametrize("moved, free", [(False, {2}), (True, {0, 2})])
def test_only_buffers_of_gradients_that_no_longer_count_are_reused(moved: bool, free: set[int]) -> None:
    numbers = iter(range(10))
    buffers = GradientBuffers(lambda shard: GradientBuffer(next(numbers), memoryview(bytearray(4))))
    before = {rank: buffers.acquire(SHARD, rank).buffer_id for rank in (0, 2)}
    assert before == {0: 0, 2: 1}
    state = StepState(3, [item(0), item(2)])
    state.items[0].finish()
    servers = SimpleNamespace(release_gradient_buffers=lambda dp_rank=None: buffers.release_rank(dp_rank))
    pushes = SimpleNamespace(stats=None, discard=lambda: None)
    gradients = ItemPushes(SimpleNamespace(), state, {}, pushes, servers)  # type: ignore[arg-type]
    state.restart(4 if moved else 3, [item(2), item(5)])  # rank 0's item is finished, and rank 5's is new
    gradients.rejoin(moved=moved)
    reused = set()
    while (buffer := buffers.acquire_free(SHARD, 5)) is not None:
        reused.add({number: rank for rank, number in before.items()}[buffer.buffer_id])
    assert reused == free
