"""Sharded models match plain PyTorch bit for bit, however they are trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwell.module.fully_shard import fully_shard
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import (
    Block,
    Gpt,
    Pair,
    gpt,
    gpt_loss,
    inputs,
    wrap_blocks,
    wrap_children,
    wrap_whole,
)

LAST = 2
"""Index of the last micro-batch of a step."""


def wrap_tied(model: Gpt, session: Any) -> None:
    fully_shard([model.tokens, model.head], session)
    wrap_blocks(model, session)


def accumulate_pushing(model: Any, micro_batch: int) -> None:
    pass


def accumulate_locally(model: Any, micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == LAST)


def accumulate_locally_keeping_weights(model: Any, micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == LAST)
    model.set_reshard_after_backward(micro_batch == LAST)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30], ids=["no-prefetch", "prefetch"])
@pytest.mark.parametrize("wrap", [wrap_blocks, wrap_tied, wrap_whole])
@pytest.mark.parametrize("recompute", [None, False, True], ids=["saved", "nonreentrant", "reentrant"])
def test_transformer_matches_torch(recompute: bool | None, wrap: Any, prefetch_bytes: int) -> None:
    Pair(gpt(recompute), wrap, prefetch_bytes=prefetch_bytes).train(gpt_loss)


@pytest.mark.parametrize("mode", [accumulate_pushing, accumulate_locally, accumulate_locally_keeping_weights])
@pytest.mark.parametrize("wrap", [wrap_blocks, wrap_tied])
@pytest.mark.parametrize("recompute", [None, False, True], ids=["saved", "nonreentrant", "reentrant"])
def test_gradient_accumulation_matches_torch(recompute: bool | None, wrap: Any, mode: Any) -> None:
    pair = Pair(gpt(recompute), wrap)
    for step in range(3):
        for micro_batch in range(LAST + 1):
            mode(pair.sharded.model, micro_batch)
            pair.backward(gpt_loss, 10 * step + micro_batch)
        pair.step()
    pair.compare()


@pytest.mark.parametrize("num_shards", [1, 2, 5])
def test_number_of_shards_changes_no_bit(num_shards: int) -> None:
    Pair(gpt(), wrap_blocks, store=InMemoryStore(num_shards)).train(gpt_loss)


def test_two_ranks_train_with_the_mean_of_their_gradients() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for step in range(3):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(2):
            pair.backward(gpt_loss, 10 * step + rank)
            pair.sharded.units.finish_item()
            pair.sharded.store.finish_item()
            for parameter in pair.plain.parameters():
                assert parameter.grad is not None
                sums[parameter] = sums[parameter] + parameter.grad if rank else parameter.grad
                parameter.grad = None
        for parameter, total in sums.items():
            parameter.grad = total / 2
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.sharded.store.step(dp=2)
        pair.sharded.units.invalidate()
    pair.compare()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_before_and_between_steps_changes_no_bit(mode: Any) -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        results = []
        for model in (pair.plain, pair.sharded.model):
            model.eval()
            with mode():
                results.append(gpt_loss(model, 50 + number))
            model.train()
        assert torch.equal(*results)
        pair.backward(gpt_loss, number)
        pair.step()
    pair.compare()


def test_evaluation_between_forward_and_backward_changes_no_bit() -> None:
    def loss(model: nn.Module, number: int) -> torch.Tensor:
        value = gpt_loss(model, number)
        with torch.no_grad():
            gpt_loss(model, 70 + number)
        return value

    Pair(gpt(), wrap_blocks).train(loss)


def test_two_forwards_then_one_backward_match_torch() -> None:
    """DPO runs the chosen and the rejected answer through the same model."""

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        return (gpt_loss(model, number) - gpt_loss(model, 80 + number)).sigmoid()

    for recompute in (None, False, True):
        Pair(gpt(recompute), wrap_blocks).train(loss)


def test_two_backwards_through_one_graph_match_torch() -> None:
    pair = Pair(gpt(), wrap_blocks)
    for number in range(3):
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(number)
            loss = gpt_loss(model, number)
            loss.backward(retain_graph=True)
            loss.backward()
        pair.step()
    pair.compare()


def test_gradient_penalty_matches_torch() -> None:
    """The graph of the inner backward uses the weights, too."""

    class Critic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

    def loss(model: nn.Module, number: int) -> torch.Tensor:
        x = inputs(number, 3, 7, requires_grad=True)
        value = model(x).sum()
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return value + (gradient.norm() - 1) ** 2

    torch.manual_seed(0)
    Pair(Critic(), wrap_children).train(loss)


def test_pipeline_micro_batches_gather_once_and_push_once() -> None:
    """Forwards run ahead of backwards (1F1B)."""
    pair = Pair(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = pair.sharded.model
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    for step in range(3):
        for each in (pair.plain, pair.sharded.model):
            torch.manual_seed(step)
            first, second = gpt_loss(each, 10 * step), gpt_loss(each, 10 * step + 1)
            first.backward()
            third = gpt_loss(each, 10 * step + 2)
            second.backward()
            third.backward()
        pair.step()
    names = pair.sharded.unit_bytes()
    assert pair.sharded.store.gathers == dict.fromkeys(names, 3)
    assert pair.sharded.store.pushes == dict.fromkeys(names, 3)
    pair.compare()


def test_child_may_train_alone_in_every_second_step() -> None:
    """Steps alternate between the whole model and one child."""

    def child_loss(model: Any, number: int) -> torch.Tensor:
        return model.blocks[1](inputs(number, 2, 3, 20)).square().mean()

    pair = Pair(gpt(), wrap_blocks)
    for number in range(4):
        pair.backward(gpt_loss if number % 2 == 0 else child_loss, number)
        pair.step()
    pair.compare()


def test_checkpoints_around_units_and_inside_one_match_torch() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.inner = Block()

        def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
            def pair_of_blocks(value: torch.Tensor, at: int) -> torch.Tensor:
                return self.blocks[at + 1](self.blocks[at](value))

            for at in (0, 2):
                x = checkpoint(pair_of_blocks, x, at, use_reentrant=reentrant)
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    for reentrant in (False, True):
        torch.manual_seed(0)
        Pair(Outer(), wrap_blocks).train(
            lambda model, number, reentrant=reentrant: (
                model(inputs(number, 2, 3, 20, requires_grad=True), reentrant).square().mean()
            )
        )


# torch.compile reads .grad of non-leaf inputs.
ignore_compiler_warning = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@ignore_compiler_warning
def test_compiled_forward_matches_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3))

    def wrap(sharded: nn.Module, session: Any) -> None:
        wrap_children(sharded, session)
        for layer in sharded:
            layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)

    Pair(model, wrap).train(lambda each, number: each(inputs(number, 4, 7)).square().mean())


@ignore_compiler_warning
def test_block_compiled_before_sharding_matches_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3))

    def wrap(sharded: Any, session: Any) -> None:
        for number, layer in enumerate(sharded):
            sharded[number] = fully_shard(torch.compile(layer, backend="aot_eager"), session)

    pair = Pair(model, wrap)
    for number in range(3):
        pair.backward(lambda each, at: each(inputs(at, 4, 7)).square().mean(), number)
        pair.step()
    assert all(map(torch.equal, pair.plain.state_dict().values(), pair.sharded.state().values()))


@ignore_compiler_warning
def test_compiled_model_matches_torch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.Linear(15, 3))

    pair = Pair(model, wrap_children)
    compiled = torch.compile(pair.sharded.model, backend="aot_eager")
    for number in range(3):
        pair.plain(inputs(number, 4, 7)).square().mean().backward()
        compiled(inputs(number, 4, 7)).square().mean().backward()
        pair.step()
    pair.compare()
