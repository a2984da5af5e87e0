"""A forward that an exception leaves, of any kind and at any place, leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell import fully_shard
from shardwell.module.hooks import find_tensors
from shardwell_wire.errors import UnavailableError, UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks, wrap_children

EXCEPTIONS: list[type[BaseException]] = [
    KeyboardInterrupt,
    asyncio.CancelledError,
    SystemExit,
    RecursionError,
    ZeroDivisionError,
    UsageError,
]


class Leaves(nn.Module):
    """Raises at a chosen place of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.raises: type[BaseException] | None = None
        self.result: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.first(x))
        if self.raises is not None:
            raise self.raises("left")
        return self.result(self) if self.result else self.second(x)

    def generate(self, x: torch.Tensor) -> Any:
        return self(x)


class Nested(nn.Module):
    """A unit around another one. May recompute the inner one in the backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = Leaves(), nn.Linear(7, 7)
        self.recompute: bool | None = None

    def forward(self, x: torch.Tensor) -> Any:
        x = self.outer(x)
        return self.inner(x) if self.recompute is None else checkpoint(self.inner, x, use_reentrant=self.recompute)


def left(model: Any, raises: type[BaseException]) -> None:
    model.inner.raises = raises
    with pytest.raises(raises):
        model(inputs(0, 2, 7))


def left_without_gradients(model: Any, raises: type[BaseException]) -> None:
    with torch.no_grad():
        left(model, raises)


def left_by_a_hook_of_the_user(model: Any, raises: type[BaseException]) -> None:
    def leave(*_: object) -> None:
        raise raises("left")

    handles = [model.inner.register_forward_hook(leave), model.register_forward_pre_hook(leave)]
    for handle in handles:
        with pytest.raises(raises):
            model(inputs(0, 2, 7))
        handle.remove()


def left_in_recomputation(model: Any, raises: type[BaseException], *, use_reentrant: bool = False) -> None:
    model.recompute = use_reentrant
    loss = model(inputs(0, 2, 7, requires_grad=True)).sum()
    model.inner.raises = raises
    with pytest.raises(raises):
        loss.backward()


def left_in_reentrant_recomputation(model: Any, raises: type[BaseException]) -> None:
    left_in_recomputation(model, raises, use_reentrant=True)


def left_by_a_method(model: Any, raises: type[BaseException]) -> None:
    shardwell.register_forward_method(model.inner, "generate")
    model.inner.raises = raises
    with pytest.raises(raises):
        model.inner.generate(inputs(0, 2, 7))


LEAVE = [
    left,
    left_without_gradients,
    left_by_a_hook_of_the_user,
    left_in_recomputation,
    left_in_reentrant_recomputation,
    left_by_a_method,
]


def shard_nested(model: Any, session: Any) -> None:
    fully_shard(model.inner, session)
    fully_shard(model, session)


def assert_nothing_is_open(sharded: Sharded) -> None:
    """A plain model has a backward that gathers nothing, and its nodes get no hook."""
    for unit in sharded.units:
        assert not unit.usage.forward_calls
    gathers, watched = sharded.store.gathers.copy(), set(sharded.units.passes.graphs.watched)
    plain = nn.Linear(7, 7)
    for _ in range(3):
        plain(inputs(0, 2, 7)).sum().backward()
    assert sharded.store.gathers == gathers
    assert sharded.units.passes.graphs.watched == watched


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("raises", EXCEPTIONS)
@pytest.mark.parametrize("leave", LEAVE)
def test_left_forward_leaves_nothing_open(
    leave: Callable[[Any, type[BaseException]], None], raises: type[BaseException], cleans_up: bool
) -> None:
    pair = Pair(Nested(), shard_nested, prefetch_bytes=0)
    sharded: Any = pair.sharded.model
    leave(sharded, raises)
    sharded.inner.raises = sharded.recompute = None
    if cleans_up:
        pair.sharded.units.zero_grad()
    assert_nothing_is_open(pair.sharded)
    pair.sharded.units.zero_grad()
    pair.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())
    assert pair.sharded.units.live_bytes == 0


@pytest.mark.parametrize("raises", EXCEPTIONS)
def test_left_forward_frees_its_units(raises: type[BaseException]) -> None:
    sharded = Sharded(Nested(), shard_nested, prefetch_bytes=0)
    left(sharded.model, raises)
    assert sharded.units.live_bytes == 0


@pytest.mark.parametrize("raises", [KeyboardInterrupt, asyncio.CancelledError, UnavailableError])
def test_interrupted_gather_leaves_nothing_open(raises: type[BaseException]) -> None:
    broken = [True]

    def before_gather(unit_index: int) -> None:
        if broken:
            raise raises("left")

    pair = Pair(gpt(), wrap_blocks, store=InMemoryStore(before_gather=before_gather), prefetch_bytes=0)
    for _ in range(2):
        with pytest.raises(raises):
            gpt_loss(pair.sharded.model, 0)
        assert_nothing_is_open(pair.sharded)


def test_forward_that_a_hook_of_the_library_refuses_leaves_nothing_open() -> None:
    class Opaque:
        def __init__(self, rows: torch.Tensor) -> None:
            self.rows = rows

    pair = Pair(Nested(), shard_nested, prefetch_bytes=0)
    model: Any = pair.sharded.model
    model.inner.result = lambda inner: Opaque(inner.second.weight[:2])
    with pytest.raises(UsageError, match="view of its parameters"):
        model(inputs(0, 2, 7))
    model.inner.result = None
    assert_nothing_is_open(pair.sharded)
    assert pair.sharded.units.live_bytes == 0
    pair.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())


def test_write_in_a_left_forward_is_not_kept() -> None:
    pair = Pair(Nested(), shard_nested, keep_bytes=None)

    def write(inner: Any) -> None:
        with torch.no_grad():
            inner.second.weight.zero_()
        raise KeyboardInterrupt

    model: Any = pair.sharded.model
    model.inner.result = write
    with pytest.raises(KeyboardInterrupt):
        model(inputs(0, 2, 7))
    model.inner.result = None
    pair.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())


def test_left_forward_of_one_session_does_not_affect_another() -> None:
    first, second = (Pair(Nested(), shard_nested, prefetch_bytes=0) for _ in range(2))
    loss = first.sharded.model(inputs(0, 4, 7)).square().mean()
    left(second.sharded.model, KeyboardInterrupt)
    loss.backward()
    assert not second.sharded.store.pushes
    first.sharded.units.zero_grad()
    first.train(lambda model, number: model(inputs(number, 4, 7)).square().mean())


def test_recursion_that_is_left_closes_every_call() -> None:
    class Recursive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self(self.linear(x))
            return result

    sharded = Sharded(Recursive(), lambda model, session: fully_shard(model, session) and None)
    with pytest.raises(RecursionError):
        sharded.model(inputs(0, 2, 7))
    assert_nothing_is_open(sharded)
    assert sharded.units.live_bytes == 0


def test_argument_that_is_deeper_than_the_stack_works() -> None:
    class Parser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)

        def forward(self, stack: Any) -> torch.Tensor:
            total = torch.zeros(())
            while stack is not None:
                x, stack = stack
                total = total + self.linear(x).sum()
            return total

    stack: Any = None
    for number in range(3000):
        stack = (inputs(number, 7), stack)
    torch.manual_seed(0)
    pair = Pair(nn.Sequential(Parser()), wrap_children)
    pair.train(lambda model, number: model(stack), steps=2)


def test_tensors_are_found_in_order_at_any_depth() -> None:
    tensors = [torch.tensor(number) for number in range(5)]
    one, two, three, four, five = tensors
    values = [one, {"a": (two, [three]), "b": {"c": four}}], five
    assert [tensor.item() for tensor in find_tensors(values)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("raises", EXCEPTIONS)
def test_left_backward_leaves_nothing_open(raises: type[BaseException], recompute: bool | None) -> None:
    """The graph of a second micro-batch, which was made before, is still usable, and its gradients are pushed."""

    def leave(gradient: torch.Tensor) -> None:
        raise raises("left")

    pair = Pair(gpt(recompute), wrap_blocks)
    model: Any = pair.sharded.model
    for each in (pair.plain, model):
        each.eval()  # without dropout
    failing, working = gpt_loss(model, 0), gpt_loss(model, 1)
    handle = model.blocks[0].up.weight.register_hook(leave)
    with pytest.raises(raises):
        failing.backward()
    handle.remove()
    assert not any(unit.usage.backward_calls for unit in pair.sharded.units)
    pair.sharded.units.zero_grad()
    assert pair.sharded.units.live_bytes == 0
    assert_nothing_is_open(pair.sharded)
    working.backward()
    assert set(pair.sharded.store.pushes) == {unit.name for unit in pair.sharded.units}
    gpt_loss(pair.plain, 1).backward()
    pair.step()
    pair.compare()
