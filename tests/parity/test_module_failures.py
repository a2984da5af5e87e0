"""A failure in a step does not affect later steps, and no gradient is lost without an error."""

from __future__ import annotations

import ctypes
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardwell.memory.buffers import BufferPool
from shardwell.module.residency import UnitState
from shardwell_wire.errors import FreedParameterError, UnavailableError, UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import (
    Gpt,
    Pair,
    Sharded,
    gpt,
    gpt_loss,
    inputs,
    layers,
    squared_loss,
    wrap_blocks,
    wrap_children,
)


class Interruption(Exception):
    pass


def interrupt() -> None:
    raise Interruption


class Interrupted(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise Interruption


def fail_in_forward(model: Gpt) -> None:
    handle = model.blocks[1].down.register_forward_pre_hook(lambda module, args: interrupt())
    with pytest.raises(Interruption):
        gpt_loss(model, 90)
    handle.remove()


def fail_in_backward(model: Gpt) -> None:
    """Fails when the gradients of two blocks have been pushed."""
    handle = model.blocks[0].down.register_forward_hook(lambda module, args, output: Interrupted.apply(output))
    with pytest.raises(Interruption):
        gpt_loss(model, 90).backward()
    handle.remove()


def fail_in_loss(model: Gpt) -> None:
    """Leaves the graph unused. The root stays gathered until the next forward."""
    gpt_loss(model, 90)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("fail", [fail_in_forward, fail_in_backward, fail_in_loss])
def test_training_after_failure_and_zero_grad_gives_the_same_bits(
    fail: Callable[[Gpt], None], recompute: bool | None, prefetch_bytes: int
) -> None:
    pair = Pair(gpt(recompute), wrap_blocks, prefetch_bytes=prefetch_bytes)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            fail(model)
        pair.optimizer.zero_grad()
        pair.sharded.units.zero_grad()
        if fail is fail_in_backward:
            assert pair.sharded.units.live_bytes == 0
        assert all(parameter.grad is None for parameter in pair.sharded.model.parameters())
        assert not any(unit.parts for unit in pair.sharded.store.units)
        pair.backward(gpt_loss, number)
        pair.step()
    pair.compare()


def test_failed_backward_without_zero_grad_leaves_the_same_gradients_as_torch() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(number)
            fail_in_backward(model)
        pair.backward(gpt_loss, number)
        assert pair.sharded.units.live_bytes == 0
        pair.step()
    pair.compare()


def test_zero_grad_withdraws_pushed_gradients() -> None:
    pair = Pair(gpt(), wrap_blocks)
    pair.backward(gpt_loss, 0)
    assert any(unit.parts for unit in pair.sharded.store.units)
    pair.optimizer.zero_grad()
    pair.sharded.units.zero_grad()
    assert pair.sharded.store.events[-1] == "discard"
    pair.train(gpt_loss)


def test_zero_grad_without_a_push_discards_nothing() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    sharded.units.zero_grad()
    gpt_loss(sharded.model, 0).backward()
    sharded.step()
    assert "discard" not in sharded.store.events


def test_zero_grad_between_forward_and_backward_gives_the_same_bits() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        for model, zero_grad in (
            (pair.plain, pair.optimizer.zero_grad),
            (pair.sharded.model, pair.sharded.units.zero_grad),
        ):
            torch.manual_seed(number)
            loss = gpt_loss(model, number)
            zero_grad()
            loss.backward()
        pair.step()
    pair.compare()


@pytest.mark.parametrize("end", ["finish_item", "invalidate"])
@pytest.mark.parametrize("recompute", [None, False, True])
def test_backward_through_a_graph_of_an_earlier_step_raises(recompute: bool | None, end: str) -> None:
    sharded = Sharded(gpt(recompute), wrap_blocks)
    loss = gpt_loss(sharded.model, 0)
    getattr(sharded.units, end)()
    with pytest.raises(UsageError, match="graph that was made before the last optimizer"):
        loss.backward()
    sharded.units.zero_grad()
    assert not sharded.store.pushes
    gpt_loss(sharded.model, 0).backward()
    sharded.step()


def test_failed_gather_raises_and_the_next_one_works() -> None:
    broken = {1}

    def before_gather(unit_index: int) -> None:
        if unit_index in broken:
            raise UnavailableError("server gone")

    sharded = Sharded(gpt(), wrap_blocks, store=InMemoryStore(before_gather=before_gather), prefetch_bytes=0)
    for _ in range(2):
        with pytest.raises(UnavailableError):
            gpt_loss(sharded.model, 0)
        sharded.units.zero_grad()
    broken.clear()
    loss = gpt_loss(sharded.model, 0)
    broken.add(0)
    sharded.units.zero_grad()
    with pytest.raises(UnavailableError):
        loss.backward()
    broken.clear()
    sharded.units.zero_grad()
    pair = Pair(gpt(), wrap_blocks)
    pair.sharded = sharded
    pair.train(gpt_loss)


def test_failed_unshard_releases_all_memory() -> None:
    broken = [True]

    def before_gather(unit_index: int) -> None:
        if broken:
            raise UnavailableError("server gone")

    sharded = Sharded(gpt(), wrap_blocks, store=InMemoryStore(before_gather=before_gather))
    block: Any = sharded.model.blocks[0]
    with pytest.raises(UnavailableError):
        block.unshard()
    handle = block.unshard(async_op=True)
    with pytest.raises(UnavailableError):
        handle.wait()
    assert sharded.units.live_bytes == 0
    broken.clear()
    handle.wait()
    assert block.up.weight.isfinite().all()


def test_memory_outlives_a_gather_that_is_running_when_the_model_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, buffers, kept = threading.Event(), list[weakref.ref[Any]](), list[bytearray]()

    def acquire(pool: BufferPool, size_bytes: int) -> torch.Tensor:
        kept.append(bytearray(size_bytes))  # if this test fails, nothing is written to freed memory
        buffer = (ctypes.c_char * size_bytes).from_buffer(kept[-1])
        buffers.append(weakref.ref(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8)

    store = InMemoryStore(before_gather=lambda unit_index: cast(None, may_end.wait()))
    sharded = Sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), wrap_children, store=store)
    monkeypatch.setattr(BufferPool, "acquire", acquire)
    layer: Any = sharded.model[0]
    layer.unshard(async_op=True)
    units = weakref.ref(sharded.units)
    del sharded, layer
    try:
        gc.collect()
        assert units() is None
        (buffer,) = buffers
        assert buffer() is not None, "the gather writes to it"
    finally:
        may_end.set()
        store.close()
    assert buffer() is None


def test_unused_prefetch_is_freed_at_the_end_of_the_backward() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.left, self.right = nn.Linear(7, 5), nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor, left: bool) -> torch.Tensor:
            return (self.left if left else self.right)(self.first(x))

    sharded = Sharded(Branch(), wrap_children)
    for left in (True, True, False):
        loss = sharded.model(inputs(0, 2, 7), left).sum()
        mispredicted = [unit.name for unit in sharded.units if unit.state is UnitState.FETCHING]
        loss.backward()
        assert sharded.units.live_bytes == 0
        sharded.step()
    assert mispredicted == ["Linear-1"]


def test_write_to_a_gathered_parameter_raises() -> None:
    """The write would be lost, because the values are on the servers."""
    sharded = Sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), wrap_children)
    layer: Any = sharded.model[0]
    layer.unshard()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(UsageError, match=r"'Linear-0.weight'.*written in place"):
        layer.reshard()
    layer.unshard()
    layer.bias.data = torch.zeros(5)
    with pytest.raises(UsageError, match=r"'Linear-0.bias'.*written in place"):
        sharded.units.finish_item()
    layer.unshard()
    assert layer.bias.abs().sum() > 0
    layer.reshard()
    sharded.units.zero_grad()
    sharded.model(inputs(0, 2, 7)).sum().backward()
    sharded.step()


def clamp_data(weight: nn.Parameter) -> None:
    weight.data.clamp_(-0.01, 0.01)


def multiply_list_of_data(weight: nn.Parameter) -> None:
    torch._foreach_mul_([weight.data], 0.0)


def write_through_a_view_of_data(weight: nn.Parameter) -> None:
    weight.data[0].fill_(1.0)


WRITES = [clamp_data, multiply_list_of_data, write_through_a_view_of_data]


@pytest.mark.parametrize("keep_bytes", [0, None])
@pytest.mark.parametrize("write", WRITES)
def test_write_to_data_raises(write: Callable[[nn.Parameter], None], keep_bytes: int | None) -> None:
    """Torch does not count such writes, and this store is not in shared memory."""
    sharded = Sharded(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)), wrap_children, keep_bytes=keep_bytes)
    before, layer = sharded.state(), cast(Any, sharded.model[0])
    layer.unshard()
    write(layer.weight)
    with pytest.raises(UsageError, match=r"'Linear-0.weight'.*written in place"):
        layer.reshard()
    handle = layer.register_forward_pre_hook(lambda module, _: write(module.weight))
    with pytest.raises(UsageError, match=r"'Linear-0.weight'.*written in place"):
        sharded.model(inputs(0, 2, 7))
    handle.remove()
    layer.unshard()
    assert torch.equal(layer.weight, before["0.weight"])
    write(layer.weight)
    with pytest.raises(UsageError, match=r"'Linear-0.weight'.*written in place"):
        sharded.units.finish_item()
    sharded.units.zero_grad()
    sharded.model(inputs(0, 2, 7)).sum().backward()
    sharded.step()


def test_read_of_data_is_allowed() -> None:
    pair = Pair(layers(7, 5, 3), wrap_children)
    norms: list[float] = []
    for model in (pair.plain, pair.sharded.model):
        model[0].register_forward_pre_hook(lambda module, _: norms.append(module.weight.data.norm().item()))
    pair.train(squared_loss)
    assert norms[0::2] == norms[1::2]


def test_forward_that_writes_its_parameter_raises() -> None:
    sharded = Sharded(nn.Sequential(nn.Embedding(7, 5, max_norm=0.1), nn.Linear(5, 3)), wrap_children)
    with pytest.raises(UsageError, match="written in place"):
        sharded.model(torch.tensor([1, 2]))


@pytest.mark.parametrize("change", ["assign", "load", "delete"])
def test_replaced_parameter_raises_at_the_next_use(change: str) -> None:
    sharded = Sharded(nn.Sequential(nn.Sequential(nn.Linear(7, 5)), nn.Linear(5, 3)), wrap_children)
    linear: Any = sharded.model[0][0]
    if change == "assign":
        linear.weight = nn.Parameter(torch.zeros(5, 7))
    elif change == "load":
        linear.load_state_dict({"weight": torch.zeros(5, 7), "bias": torch.zeros(5)}, assign=True)
    else:
        linear.weight = None
    with pytest.raises(UsageError, match="was replaced or removed after fully_shard"):
        sharded.model(inputs(0, 2, 7))


def test_functional_call_with_other_values_raises() -> None:
    sharded = Sharded(nn.Sequential(nn.Linear(7, 5)), wrap_children)
    with pytest.raises(UsageError, match="functional_call"):
        torch.func.functional_call(sharded.model, {"0.weight": torch.zeros(5, 7)}, inputs(0, 2, 7))


def test_view_of_a_parameter_in_an_opaque_result_raises() -> None:
    class Opaque:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(4, 3))

        def forward(self) -> Opaque:
            return Opaque(self.table[:2])

    sharded = Sharded(nn.Sequential(Table()), wrap_children)
    with pytest.raises(UsageError, match="view of its parameters"):
        sharded.model[0]()


def test_parameter_read_by_a_module_that_does_not_contain_it_raises() -> None:
    class Reader(nn.Module):
        def __init__(self, table: nn.Embedding) -> None:
            super().__init__()
            self.tables, self.layer = [table], nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) @ self.tables[0].weight.T

    table = nn.Embedding(7, 5)
    sharded = Sharded(nn.Sequential(table, Reader(table)), wrap_children)
    with pytest.raises(FreedParameterError, match=r"'Embedding-0.weight'.*both modules to one fully_shard call"):
        sharded.model[1](inputs(0, 2, 5))


def test_push_without_a_work_item_raises_from_the_backward() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    sharded.store.accepts_pushes = False
    with pytest.raises(UsageError, match="no work item"):
        gpt_loss(sharded.model, 0).backward()
    sharded.store.accepts_pushes = True
    sharded.units.zero_grad()
    gpt_loss(sharded.model, 0).backward()
    sharded.step()


def test_setting_a_pushed_gradient_raises() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    gpt_loss(sharded.model, 0).backward()
    weight = sharded.model.blocks[0].up.weight
    for change in (lambda: setattr(weight, "grad", None), lambda: setattr(weight, "grad", torch.zeros(weight.shape))):
        with pytest.raises(UsageError, match="pushed to the shard servers in this step"):
            change()
    for module in (sharded.model, sharded.model.blocks, sharded.model.blocks[0], sharded.model.blocks[0].up):
        with pytest.raises(UsageError, match=r"optimizer.zero_grad\(\)"):
            module.zero_grad()
    with pytest.raises(UsageError, match=r"optimizer.zero_grad\(\)"):
        torch.optim.SGD(sharded.model.parameters()).zero_grad()
    sharded.units.zero_grad()
    sharded.model.zero_grad()
    weight.grad = torch.zeros(weight.shape)
    sharded.model.zero_grad()
    assert weight.grad is None


def test_gradients_can_be_set_after_the_commit() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    gpt_loss(sharded.model, 0).backward()
    sharded.units.finish_item()
    with pytest.raises(UsageError):
        sharded.model.head.weight.grad = None
    sharded.store.step()
    sharded.units.invalidate()
    sharded.model.head.weight.grad = None
    sharded.model.zero_grad()


def test_gather_that_continues_after_ctrl_c_keeps_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded, targets = Sharded(gpt(), wrap_blocks), list[memoryview]()

    def gather(unit_index: int, target: memoryview, **_: Any) -> Future[int]:
        targets.append(target)
        interrupted = Future[int]()
        interrupted.set_exception(KeyboardInterrupt())
        return interrupted

    monkeypatch.setattr(sharded.store, "gather", gather)
    for unit in sharded.units:
        with suppress(KeyboardInterrupt):
            unit.gather_copy()
    gc.collect()
    others = [torch.empty(len(target), dtype=torch.uint8) for target in targets for _ in range(8)]
    addresses = {memory_address(target) for target in targets}
    assert len(addresses) == len(targets) and not addresses & {other.data_ptr() for other in others}


def test_memory_of_a_gather_that_ctrl_c_left_running_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, may_end = set[int](), threading.Event()
    store = InMemoryStore(before_gather=lambda unit: cast(None, may_end.wait() if unit in blocked else None))
    sharded = Sharded(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), wrap_children, store=store)
    expected, gather = sharded.state()["1.weight"], store.gather

    def interrupted(*arguments: Any, **options: Any) -> Future[int]:
        gather(*arguments, **options)
        raise KeyboardInterrupt

    layers: Any = sharded.model
    blocked.add(0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store, "gather", interrupted)
        layers[0].unshard(async_op=True)
    assert sharded.units.live_bytes == 0
    layers[1].unshard()
    may_end.set()
    store.close()
    assert torch.equal(layers[1].weight, expected)


def memory_address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
