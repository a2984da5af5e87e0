"""Steps on a shard server over gRPC: pushes, prepare, update."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.memory.budget import shard_need_bytes
from shardwell_server.shard.requests import streams
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    IncompleteStepError,
    InternalError,
    InvalidRequestError,
    NonFiniteError,
    StaleEpochError,
    StepStateError,
    VersionGoneError,
)
from shardwell_wire.optimizers import KEPT_GROUP
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import (
    PLAIN,
    SERVICE,
    OneUnit,
    ShardServer,
    assert_all,
    error_of,
    in_background,
    layout_of,
    train,
    unit,
)

NAN = float("nan")


# Gradients.


def test_duplicate_pushes_are_acknowledged_and_differing_ones_counted(server: ShardServer) -> None:
    one = unit(server)
    assert one.push(one.filled(1.0)).duplicate is False
    assert one.push(one.filled(1.0)).duplicate is True
    assert one.push(one.filled(2.0)).duplicate is True
    one.prepare(0)
    assert one.push(one.filled(1.0)).duplicate is True
    step = server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (step.duplicate_count, step.differing_duplicate_count, step.prepared) == (3, 1, True)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)


def test_parts_are_added_in_order_in_one_buffer(server: ShardServer) -> None:
    one = unit(server)
    before = server.taken_bytes()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), part=1)), StepStateError)
    one.push([one.filled(1.0)[0], None])
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), part=2)), StepStateError)
    one.push([None, one.filled(2.0)[1]], part=1)
    one.push(one.filled(4.0), part=2)
    one.push([None, None], part=3)
    assert (server.taken_bytes() - before, server.unreserved_bytes()) == (one.size, 0)
    one.prepare(0, (0, 0, 4))
    one.update(0)
    a, b = one.gather(1)[1]
    assert (set(a.tolist()), set(b.tolist())) == ({-5.0}, {-6.0})
    assert server.taken_bytes() == before


def test_push_for_next_step_waits_for_an_update_that_is_prepared(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0, (0, 0, 1))
    early = one.open_push().send(*one.push_messages(one.filled(2.0), step=1)).finish()
    with pytest.raises(grpc.FutureTimeoutError):
        early.future.result(timeout=0.3)
    one.update(0)
    assert not early.result().duplicate
    one.prepare(1, (0, 0, 1))
    one.update(1)


def test_pushes_for_other_steps_and_after_prepare_are_rejected(server: ShardServer) -> None:
    one = OneUnit(server, PLAIN)
    one.reserve()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), StepStateError)
    one.initialize(one.zeros())
    one.publish()
    assert isinstance(error_of(lambda: one.push(one.filled(1.0), step=1)), StepStateError)
    half = one.open_push().send(*(messages := one.push_messages(one.filled(1.0)))[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push has started")
    one.prepare(0, (0, 0, 0))
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), StepStateError)
    assert isinstance(half.send(messages[-1]).finish().error(), StepStateError), "a push that ends after prepare"
    one.update(0)
    assert isinstance(error_of(lambda: one.push(one.filled(1.0))), VersionGoneError)
    assert_all(one.gather(1)[1], 0.0)
    assert server.taken_bytes() == one.size


def test_prepare_names_missing_and_surplus_contributions(server: ShardServer) -> None:
    one = unit(server, dp=3)
    one.push(one.filled(1.0))
    one.push(one.filled(1.0), rank=2)
    error = error_of(lambda: one.prepare(0, (0, 0, 1), (1, 0, 1), (2, 0, 0)))
    assert isinstance(error, IncompleteStepError)
    assert "unit 'u': rank 1: expected 1 parts of attempt 0, have none" in str(error)
    assert "unit 'u': rank 2: expected 0 parts of attempt 0, have 1 of attempt 0" in str(error)
    wrong_attempt = error_of(lambda: one.prepare(0, (0, 3, 1), (1, 0, 0), (2, 0, 1)))
    assert isinstance(wrong_attempt, IncompleteStepError)
    for ranks in (((0, 0, 1),), ((0, 0, 1), (1, 0, 0), (3, 0, 1))):
        assert isinstance(error_of(partial(one.prepare, 0, *ranks)), InvalidRequestError)
    assert isinstance(error_of(lambda: one.prepare(0, (0, 0, 1), (1, 0, 0), dp=2)), InvalidRequestError)
    request = one.prepare_request(0, (0, 0, 1), (1, 0, 0), (2, 0, 1))
    request.ranks[1].units.add(unit_index=7, part_count=1)
    error = error_of(lambda: server.call("PrepareStep", request))
    assert isinstance(error, IncompleteStepError)
    assert "unit 7" in str(error)
    assert isinstance(error_of(lambda: one.prepare(1, (0, 0, 1), (1, 0, 0), (2, 0, 1))), StepStateError)
    one.prepare(0, (0, 0, 1), (1, 0, 0), (2, 0, 1))


def test_prepare_is_idempotent_and_can_add_norms(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    one.push(one.filled(1.0))
    one.push(one.filled(-4.0), rank=1)
    first = one.prepare(0)
    assert one.prepare(0) == first
    assert (first.version, sum(first.units[0].square_partials), first.units[0].max_abs) == (0, 60_000 * 2.25, 0.0)
    assert one.prepare(0, norm_type=math.inf).units[0].max_abs == 1.5
    assert server.taken_bytes() == before + 3 * one.size, "two contributions and their mean"
    one.update(0)
    assert_all(one.gather(1)[1], 1.5)


def test_rejected_requests_keep_a_prepared_step(server: ShardServer) -> None:
    """The commit record may be written already."""
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    for rejected in (
        lambda: one.prepare(0, dp=2),
        lambda: one.prepare(0, (0, 0, 2)),
        lambda: one.prepare(1),
        lambda: one.prepare(0, norm_type=math.nan),
    ):
        error_of(rejected)
    one.update(0)
    assert_all(one.gather(1)[1], -1.0)


def test_cancelled_norm_keeps_a_prepared_step(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell_server.shard.arithmetic.reduction import Reduced

    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    started, resume = threading.Event(), threading.Event()

    def slowly(*_: Any) -> list[float]:
        started.set()
        assert resume.wait(20)
        return [1.0]

    monkeypatch.setattr(Reduced, "power_partials", slowly)
    call: Any = server.client._channel.unary_unary(f"/{SERVICE.full_name}/PrepareStep")
    future = call.future(one.prepare_request(0, norm_type=3.0).SerializeToString())
    assert started.wait(20)
    future.cancel()
    # The update waits for the thread of the cancelled prepare.
    updating = in_background(lambda: one.update(0))
    resume.set()
    assert next(updating).version == 1


def test_nan_error_names_parameter_and_ranks_and_the_step_can_be_repeated(server: ShardServer) -> None:
    one = unit(server, dp=3)
    bad = one.filled(1.0)
    bad[1][5] = float("inf")
    before = server.taken_bytes()
    one.push(one.filled(3.0))
    one.push(bad, rank=1)
    one.push(one.filled(2.0), rank=2)
    for _ in range(2):
        error = error_of(lambda: one.prepare(0))
        assert isinstance(error, NonFiniteError)
        assert (error.data["parameter"], error.data["dp_ranks"]) == ("u.b", "1")
    assert isinstance(error_of(lambda: one.update(0)), StepStateError)
    assert server.taken_bytes() == before + 4 * one.size, "three contributions and their mean"
    one.fence(0, (1, 1, 1))
    assert server.taken_bytes() == before + 2 * one.size
    one.push(one.filled(1.0), rank=1, attempt=1)
    one.prepare(0, (0, 0, 1), (1, 1, 1), (2, 0, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


def test_skipped_step_makes_the_next_version_with_equal_values(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    one.push(one.filled(float("inf")))
    one.push(one.filled(1.0), rank=1)
    assert isinstance(error_of(lambda: one.prepare(0)), NonFiniteError)
    skip = one.prepare_request(0, (0, 0, 1), (1, 0, 1))
    skip.skip = True
    assert not server.call("PrepareStep", skip).units
    # A restarted coordinator prepares the step again and gets the same error.
    assert isinstance(error_of(lambda: one.prepare(0)), NonFiniteError)
    server.call("PrepareStep", skip)
    one.update(0)
    version, values = one.gather(1)
    assert version == 1
    assert_all(values, 0.0)
    assert server.taken_bytes() == before
    one.push(one.filled(1.0), step=1)
    one.push(one.filled(3.0), rank=1, step=1)
    one.prepare(1)
    one.update(1)
    assert_all(one.gather(2)[1], -2.0)


def test_overflow_of_the_sum_names_no_rank(server: ShardServer) -> None:
    one = unit(server, dp=2)
    for rank in range(2):
        one.push(one.filled(3e38), rank=rank)
    error = error_of(lambda: one.prepare(0))
    assert isinstance(error, NonFiniteError)
    assert "overflow" in str(error)


def test_newer_stream_of_a_rank_replaces_the_older(server: ShardServer) -> None:
    one = unit(server, dp=2)
    before = server.taken_bytes()
    messages = one.push_messages(one.filled(1.0))
    older = one.open_push().send(*messages[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the older stream has started")
    newer = one.open_push().send(*messages[:-1])
    assert isinstance(older.error(), StaleEpochError)
    stale = one.open_push().send(*one.push_messages(one.filled(1.0), epoch=0)[:-1])
    server.until(lambda: len(one.shard.streams) == 2, "a stream of another lease does not end it")
    stale.cancel()
    server.until(lambda: len(one.shard.streams) == 1, "the rejected stream has ended")
    one.push(one.filled(5.0), rank=1)
    assert newer.send(messages[-1]).finish().result().duplicate is False
    pool = server.store.memory.pool
    server.until(lambda: pool.taken_bytes == before + 3 * one.size, "two contributions and their mean are stored")


def test_fence_ends_stale_streams(server: ShardServer) -> None:
    one = unit(server)
    half = one.open_push().send(*one.push_messages(one.filled(1.0))[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push has started")
    one.fence(0, (0, 2, 0))
    assert isinstance(half.error(), StaleEpochError)
    assert server.taken_bytes() == one.size


@pytest.mark.parametrize("part", [0, 1])
def test_disconnected_push_releases_its_memory(server: ShardServer, part: int) -> None:
    one = unit(server)
    for number in range(part):
        one.push(one.filled(1.0), part=number)
    before = server.taken_bytes()
    half = one.open_push().send(*one.push_messages(one.filled(1.0), part=part)[:-1])
    server.until(lambda: server.store.memory.pool.taken_bytes > before, "the stream is being received")
    assert server.unreserved_bytes() == part * one.size
    half.cancel()
    server.until(lambda: server.store.memory.pool.taken_bytes == before, "the memory is released")
    assert server.unreserved_bytes() == 0
    assert one.push(one.filled(1.0), part=part).duplicate is False


def test_idle_stream_is_cancelled(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = unit(server)
    monkeypatch.setattr(streams, "IDLE_LIMIT_S", 0.05)
    half = one.open_push().send(*one.push_messages(one.filled(1.0))[:-1])
    error = half.error()
    assert isinstance(error, DeadlineError)
    assert "no bytes of the stream arrived" in str(error)
    assert (server.taken_bytes(), one.push(one.filled(1.0)).duplicate) == (one.size, False)


def test_streams_wait_for_memory_in_order_and_time_out() -> None:
    layouts = [layout_of(name, a=((60_000,), "float32")) for name in "abc"]
    size = layouts[0].size_bytes
    # A unit reserves four times its size: values, two moments, a contribution. One buffer is left for all streams.
    with ShardServer(budget_bytes=size * 13) as server:
        ones = [OneUnit(server, layout, index=index) for index, layout in enumerate(layouts)]
        for one in ones:
            one.begin()
            one.push(one.filled(1.0))
        messages = [one.push_messages(one.filled(1.0), part=1) for one in ones]
        first = ones[0].open_push().send(*messages[0][:-1])
        server.until(lambda: server.store.memory.unreserved.used_bytes == size, "the first stream has the memory")
        error = error_of(lambda: ones[1].open_push(timeout_s=0.5).send(*messages[1]).finish().result())
        assert isinstance(error, CapacityError | DeadlineError)
        second = ones[1].open_push().send(*messages[1]).finish()
        server.until(lambda: len(ones[1].shard.streams) == 1, "the second stream waits")
        vanishing = ones[2].open_push().send(*messages[2])
        server.until(lambda: len(ones[2].shard.streams) == 1, "the third stream waits")
        vanishing.cancel()
        assert server.taken_bytes() == 7 * size
        first.send(messages[0][-1]).finish()
        assert [stream.result().duplicate for stream in (first, second)] == [False, False]
        server.until(lambda: server.store.memory.unreserved.used_bytes == 0, "all memory is released")
        assert server.taken_bytes() == 6 * size
        assert (
            server.evaluate(lambda: server.store.memory.used_bytes + server.store.memory.pool.idle_bytes) <= size * 13
        )


def test_encoded_part_needs_no_extra_memory() -> None:
    size = PLAIN.size_bytes
    with ShardServer(budget_bytes=shard_need_bytes(size, 1) + size) as server:
        one = unit(server)
        for part in range(2):
            halves = [gradient.bfloat16() for gradient in one.filled(1.0)]
            messages = one.push_messages(halves, part=part, wire_dtype=common_pb2.WIRE_DTYPE_BFLOAT16)
            assert not one.open_push(timeout_s=2.0).send(*messages).finish().result().duplicate
        one.prepare(0, (0, 0, 2))
        one.update(0)
        assert_all(one.gather(1)[1], -2.0)
        assert server.unreserved_bytes() == 0


# Updates.


def test_update_is_applied_once_after_keeping_gradients_failed(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    request = one.update_request(0)
    request.optimizer.units[0].group_indices[0] = KEPT_GROUP
    keep, failures = one.shard.kept.compute_keep, [MemoryError("no memory")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        keep(*arguments)

    monkeypatch.setattr(one.shard.kept, "compute_keep", fail_once)
    error_of(lambda: server.call("Update", request))
    server.call("Update", request)
    kept, *updated = one.gather(1)[1]
    assert torch.equal(kept, torch.zeros_like(kept)), "the gradient is kept for another optimizer's step"
    assert updated
    assert all(torch.equal(values, torch.full_like(values, -1.0)) for values in updated), "updated exactly once"


def test_update_is_applied_once_and_only_after_prepare(server: ShardServer) -> None:
    one = unit(server)
    assert isinstance(error_of(lambda: one.update(0)), StepStateError)
    train(one, 0)
    assert one.update(0).version == 1
    assert isinstance(error_of(lambda: one.update(1)), StepStateError)
    assert isinstance(error_of(lambda: one.update(5)), StepStateError)
    assert_all(one.gather(1)[1], -1.0)
    train(one, 1)
    assert isinstance(error_of(lambda: one.update(0)), StepStateError)
    assert_all(one.gather(2)[1], -2.0)
    assert server.taken_bytes() == one.size


def test_repeated_update_keeps_the_next_prepared_step(server: ShardServer) -> None:
    """The commit record of the next step may be written already."""
    one = unit(server)
    train(one, 0)
    one.update(0)
    one.push(one.filled(1.0), step=1)
    one.prepare(1)
    one.update(0)
    one.update(1)
    assert_all(one.gather(2)[1], -2.0)


def test_invalid_update_changes_nothing(server: ShardServer) -> None:
    one = unit(server)
    other = OneUnit(server, layout_of("v", a=((8,), "float32")), index=1).begin()
    train_both = one.prepare_request(0)
    train_both.ranks[0].units.add(unit_index=1, part_count=1)
    for each in (one, other):
        each.push(each.filled(1.0))
    server.call("PrepareStep", train_both)
    good = one.update_request(0)
    good.optimizer.units.add(unit_index=1, group_indices=[0])

    def changed(change: Callable[[shard_pb2.UpdateRequest], object]) -> shard_pb2.UpdateRequest:
        request = shard_pb2.UpdateRequest()
        request.CopyFrom(good)
        change(request)
        return request

    for wrong in (
        changed(lambda request: setattr(request, "clip_coefficient", NAN)),
        changed(lambda request: setattr(request, "clip_coefficient", -1.0)),
        changed(lambda request: setattr(request.optimizer, "algorithm", "sdg")),
        changed(lambda request: request.optimizer.units[1].group_indices.append(0)),
        changed(lambda request: request.optimizer.units[1].group_indices.pop()),
        changed(lambda request: request.optimizer.groups[0].hyperparameters.pop("lr")),
    ):
        assert isinstance(error_of(partial(server.call, "Update", wrong)), InvalidRequestError)
    assert (one.gather()[0], other.gather()[0]) == (0, 0)
    assert server.call("Update", good).version == 1
    assert_all(one.gather(1)[1] + other.gather(1)[1], -1.0)
    late = OneUnit(server, layout_of("w", a=((8,), "float32")), index=2)
    late.reserve()
    one.prepare(1, (0, 0, 0))  # a unit without values takes no part in steps


def test_slow_push_under_an_unleased_epoch_does_not_block_the_leaseholder(server: ShardServer) -> None:
    one = unit(server)
    slow = one.open_push().send(*one.push_messages(one.filled(9.0), epoch=1 << 40)[:-1])
    server.until(lambda: len(one.shard.streams) == 1, "the push is being received")
    for step in range(2):
        train(one, step)
    assert_all(one.gather()[1], -2.0)
    assert not slow.future.done()
    one.fence(2, (0, (1 << 40) + 1, 0))
    assert isinstance(slow.error(), StaleEpochError)


def test_reservation_during_a_prepared_step_is_rejected(server: ShardServer) -> None:
    one = unit(server)
    one.prepare(0, (0, 0, 0))
    late = OneUnit(server, layout_of("w", a=((8,), "float32")), index=2)
    assert isinstance(error_of(late.reserve), StepStateError)
    one.update(0)
    late.reserve()


def test_units_are_updated_in_the_requested_order_and_wake_readers(server: ShardServer) -> None:
    ones = [OneUnit(server, layout_of(f"u{index}", a=((5_000,), "float32")), index=index).begin() for index in range(4)]
    waiting = [in_background(partial(one.gather, 1)) for one in ones]
    order: list[int] = []
    request = ones[0].prepare_request(0, (0, 0, 0))
    server.call("PrepareStep", request)
    for one in ones:
        one.shard.update = noting(order, one.index, one.shard.update)
    update = ones[0].update_request(0)
    update.unit_order.extend([2, 0])
    server.call("Update", update)
    assert order == [2, 0, 1, 3]
    assert [next(each)[0] for each in waiting] == [1] * 4


def noting(order: list[int], index: int, update: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*arguments: Any) -> Any:
        order.append(index)
        return update(*arguments)

    return noted


def test_failed_update_is_unreadable_until_its_repetition(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, kernel, fails = unit(server), torch._fused_sgd_, [RuntimeError("no memory"), MemoryError()]
    waiting = in_background(lambda: one.gather(1))
    one.push(one.filled(1.0))
    one.prepare(0)

    def halfway(values: list[torch.Tensor], gradients: list[torch.Tensor], *arguments: Any, **settings: Any) -> None:
        if fails:
            raise fails.pop()
        kernel(values, gradients, *arguments, **settings)

    monkeypatch.setattr(torch, "_fused_sgd_", halfway)
    while fails:
        assert isinstance(error_of(lambda: one.update(0, clip=0.5)), InternalError)
        assert "newest is 0" in str(error_of(lambda: one.gather(timeout_s=0.2)))
    assert one.update(0, clip=0.5).version == 1
    assert_all(next(waiting)[1], -0.5)
    assert_all(one.gather(1)[1], -0.5)
    one.drop()
    assert (server.taken_bytes(), server.unreserved_bytes()) == (0, 0)


def test_update_without_threads_changes_nothing(server: ShardServer) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    values, in_thread = one.shard.values, server.store.in_thread
    pinned = server.evaluate_async(lambda: values.pin(0, 1.0))

    async def no_thread(_: object) -> Any:
        raise RuntimeError("cannot schedule new futures after shutdown")

    server.evaluate(lambda: setattr(server.store, "in_thread", no_thread))
    assert isinstance(error_of(lambda: one.update(0)), InternalError)
    assert_all(one.gather(0)[1], 0.0)
    server.evaluate(lambda: setattr(server.store, "in_thread", in_thread))
    one.update(0)
    assert_all(one.gather(0)[1], 0.0)
    assert_all(one.gather(1)[1], -1.0)
    server.evaluate(lambda: values.unpin(pinned))
    assert server.unreserved_bytes() == 0


def test_memory_for_an_update_is_allocated_before_the_commit(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    assert not one.prepare(0).update_ready, "no optimizer was named"
    adam = one.update_request(0, algorithm="adamw").optimizer
    memory = server.store.memory
    reserved, used = server.evaluate(lambda: (memory.reserved_bytes, memory.used_bytes))

    empty_like = torch.empty_like

    def no_memory(template: torch.Tensor, *, device: str = "cpu", **options: Any) -> torch.Tensor:
        if device == "cpu":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")
        return empty_like(template, device=device, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_like", no_memory)
        error = error_of(lambda: one.prepare_update(0, algorithm="adamw"))
        assert isinstance(error, CapacityError)
        assert "for the optimizer's state of unit 'u'" in str(error)
        assert not one.prepare(0, optimizer=adam).update_ready
        assert server.evaluate(lambda: (memory.reserved_bytes, memory.used_bytes)) == (reserved, used)
    assert one.prepare(0, optimizer=adam).update_ready
    assert server.evaluate(lambda: memory.used_bytes) > used
    one.prepare_update(0, algorithm="adamw")
    monkeypatch.setattr(torch, "empty_like", no_memory)
    one.update(0, algorithm="adamw")
    one.push(one.filled(1.0), step=1)
    assert one.prepare(1, optimizer=adam).update_ready, "the prepare allocates no more memory"
    one.update(1, algorithm="adamw")


def test_optimizer_state_beyond_the_budget_is_rejected_before_the_commit() -> None:
    layout = layout_of(w=((1 << 14,), "float32"))
    size = layout.size_bytes
    with ShardServer(budget_bytes=6 * size) as server:
        one = unit(server, layout)
        one.push(one.filled(1.0))
        one.prepare(0)
        # The reservation covers Adam's two moments, but neither amsgrad's third moment nor an average.
        error = error_of(lambda: one.prepare_update(0, algorithm="adamw", amsgrad=1.0, ema_decay=0.5))
        assert isinstance(error, CapacityError)
        assert f"of the budget of {6 * size} are free. The step is not committed" in str(error)
        one.prepare_update(0, algorithm="adamw")
        one.update(0, algorithm="adamw")
        assert one.gather()[0] == 1


def test_update_finishes_after_its_caller_disconnects(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    started, resume, step = threading.Event(), threading.Event(), ShardOptimizer.step

    def slowly(self: ShardOptimizer, *arguments: Any) -> None:
        started.set()
        assert resume.wait(20)
        step(self, *arguments)

    monkeypatch.setattr(ShardOptimizer, "step", slowly)
    channel = grpc.insecure_channel(server.client.address)
    call: Any = channel.unary_unary(f"/{SERVICE.full_name}/Update")
    future = call.future(one.update_request(0).SerializeToString())
    assert started.wait(20)
    future.cancel()
    channel.close()
    # A repetition waits for the update in flight and does not apply it again.
    waiting = in_background(lambda: one.update(0))
    resume.set()
    assert next(waiting).version == 1
    assert_all(one.gather(1)[1], -1.0)


def test_cancelled_prepare_leaves_no_trace(server: ShardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwell_server.shard.state import mean_gradient

    one = unit(server, dp=2)
    before = server.taken_bytes()
    started, resume, reduce_shard = threading.Event(), threading.Event(), mean_gradient.reduce_shard

    def slowly(*arguments: Any, **options: Any) -> Any:
        started.set()
        assert resume.wait(20)
        return reduce_shard(*arguments, **options)

    monkeypatch.setattr(mean_gradient, "reduce_shard", slowly)
    one.push(one.filled(1.0))
    one.push(one.filled(3.0), rank=1)
    assert started.wait(20), "the mean is computed ahead of prepare"

    def num_waiting() -> int:
        # Requests that wait for the run's lock.
        return len(server.store.run("r")._lock._waiters or ())

    call: Any = server.client._channel.unary_unary(f"/{SERVICE.full_name}/PrepareStep")
    future = call.future(one.prepare_request(0).SerializeToString())
    server.until(lambda: num_waiting() == 1, "the prepare waits for the thread")
    future.cancel()
    server.until(lambda: num_waiting() == 0, "the prepare is cancelled")
    fencing = in_background(lambda: one.fence(0, (0, 1, 1)))
    server.until(lambda: num_waiting() == 1, "the fence waits for the thread")
    resume.set()
    assert next(fencing) is None
    server.until(lambda: server.store.memory.pool.taken_bytes == before + one.size, "only rank 1's gradient is left")
    one.push(one.filled(1.0), attempt=1)
    one.prepare(0, (0, 1, 1), (1, 0, 1))
    one.update(0)
    assert_all(one.gather(1)[1], -2.0)


def test_amsgrad_enabled_later_is_counted_in_the_reservation(server: ShardServer) -> None:
    one = unit(server)
    train(one, 0, algorithm="adamw")
    reserved = server.evaluate(lambda: server.store.memory.reserved_bytes)
    train(one, 1, algorithm="adamw", amsgrad=1.0)
    assert server.evaluate(lambda: server.store.memory.reserved_bytes) >= reserved + one.size - 1024
    shard = server.call("DescribeShard", shard_pb2.DescribeShardRequest(run="r", unit="u"))
    assert list(shard.optimizer_state) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    one.drop()
    assert server.evaluate(lambda: (server.store.memory.used_bytes, server.store.memory.reserved_bytes)) == (0, 0)
