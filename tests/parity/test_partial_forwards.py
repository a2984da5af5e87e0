"""Forwards and backwards of parts of a sharded model, as FSDP2's tests run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwell.module.fully_shard import fully_shard
from tests.support.module_parity import Pair, gpt, gpt_loss, inputs, layers, squared_loss, wrap_children


def test_child_may_train_alone_after_the_root() -> None:
    """Mirrors FSDP2's ``test_non_root_forward_backward``."""
    pair = Pair(layers(7, 15, 16, 3), wrap_children)
    pair.backward(squared_loss, 0)
    pair.step()
    pair.backward(lambda model, number: model[1](inputs(number, 4, 15)).square().mean(), 1)
    pair.step()
    pair.backward(squared_loss, 2)
    pair.step()
    pair.compare()


class Chunked(nn.Module):
    """Norm and head form one unit of two modules. The loss runs the head once per chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.body(x)))


def chunked() -> Chunked:
    torch.manual_seed(0)
    return Chunked()


def wrap_chunked(model: Any, session: Any) -> None:
    fully_shard([model.norm, model.head], session)
    fully_shard(model.body, session)
    fully_shard(model, session)


def test_one_module_of_a_group_may_run_alone() -> None:
    """Mirrors FSDP2's ``test_partial_group_forward_then_standalone``."""
    pair = Pair(chunked(), wrap_chunked)
    for number in range(2):
        pair.backward(lambda model, at: model.norm(model.body(inputs(at, 6, 7))).square().mean(), number)
        pair.backward(lambda model, at: model.head(inputs(at, 6, 12)).square().mean(), number)
        pair.step()
    pair.compare()


@pytest.mark.parametrize("push_each", [False, True])
def test_each_chunk_may_have_its_own_backward(push_each: bool) -> None:
    """Mirrors FSDP2's ``test_partial_group_grad_accum_chunked``. Every chunk contributes, whichever backward pushes."""
    pair = Pair(chunked(), wrap_chunked)
    head: Any = pair.sharded.model.head
    for number in range(3):
        head.set_requires_gradient_sync(push_each)

        def run(model: Any, number: int = number) -> None:
            hidden = model.norm(model.body(inputs(number, 6, 7)))
            detached = hidden.detach().requires_grad_(True)
            for chunk in detached.chunk(3):
                model.head(chunk).square().sum().backward()
            assert detached.grad is not None
            hidden.backward(detached.grad)

        for model in (pair.plain, pair.sharded.model):
            run(model)
        pair.step()
    pair.compare()
    assert pair.sharded.store.pushes["LayerNorm+Linear-0"] == (3 * 4 if push_each else 3)


@pytest.mark.parametrize("toggles", [(True, False, True), (False, True, False)])
def test_reshard_may_be_toggled_between_chunks(toggles: tuple[bool, ...]) -> None:
    """Mirrors FSDP2's ``test_partial_group_reshard_toggle``."""
    pair = Pair(chunked(), wrap_chunked, prefetch_bytes=0)
    head: Any = pair.sharded.model.head
    for number in range(2):

        def loss(model: Any, at: int) -> torch.Tensor:
            hidden, found = model.norm(model.body(inputs(at, 6, 7))), []
            for chunk, toggle in zip(hidden.chunk(3), toggles, strict=True):
                head.set_reshard_after_forward(toggle)
                head.set_reshard_after_backward(toggle)
                found.append(model.head(chunk).square().sum())
            return torch.stack(found).sum()

        pair.backward(loss, number)
        pair.step()
    pair.compare()


def test_two_partial_forwards_then_one_backward_match_torch() -> None:
    """Mirrors FSDP2's ``test_double_partial_forward_then_backward``."""
    pair = Pair(chunked(), wrap_chunked)

    def loss(model: Any, number: int) -> torch.Tensor:
        first = model.norm(model.body(inputs(number, 6, 7)))
        second = model.norm(model.body(inputs(50 + number, 6, 7)))
        return model.head(first).square().mean() + model.head(second).square().mean()

    pair.train(loss)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_two_forwards_with_nested_units_and_checkpoints_match_torch(use_reentrant: bool | None) -> None:
    """Mirrors FSDP2's ``test_double_forward_with_nested_fsdp_and_checkpoint``.

    Preference losses run the model twice.
    """

    def wrap(model: Any, session: Any) -> None:
        for block in model.blocks:
            fully_shard(block.qkv, session)
            fully_shard([block.up, block.down], session)
            fully_shard(block, session)
        fully_shard(model, session)

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return F.softplus(gpt_loss(model, number) - gpt_loss(model, 100 + number))

    Pair(gpt(use_reentrant), wrap).train(loss, steps=3)
