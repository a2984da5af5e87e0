"""Updates on a shard server over gRPC: once, in order, and with memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import grpc
import pytest
import torch

from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_wire.errors import (
    CapacityError,
    InternalError,
    InvalidRequestError,
    StepStateError,
)
from shardwell_wire.model.optimizers import KEPT_GROUP
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import (
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


def test_update_is_applied_once_after_keeping_gradients_failed(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = unit(server)
    one.push(one.filled(1.0))
    one.prepare(0)
    request = one.update_request(0)
    request.optimizer.units[0].group_indices[0] = KEPT_GROUP
    keep, failures = one.shard.gradient.kept.compute_keep, [MemoryError("no memory")]

    def fail_once(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        keep(*arguments)

    monkeypatch.setattr(one.shard.gradient.kept, "compute_keep", fail_once)
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
    def noted(*arguments: Any, **options: Any) -> Any:
        order.append(index)
        return update(*arguments, **options)

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
    values, threads = one.shard.values, server.store.memory.threads
    closed = ThreadPoolExecutor(1)
    closed.shutdown()
    pinned = server.evaluate_async(lambda: values.pin(0, 1.0))

    server.evaluate(lambda: setattr(server.store.memory, "threads", closed))
    assert isinstance(error_of(lambda: one.update(0)), InternalError)
    assert_all(one.gather(0)[1], 0.0)
    server.evaluate(lambda: setattr(server.store.memory, "threads", threads))
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
