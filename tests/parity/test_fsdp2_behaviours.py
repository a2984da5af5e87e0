"""Behaviours that FSDP2's tests assert and that no other file of this folder covers."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from shardwell import MixedPrecisionPolicy
from shardwell.module import torch_patches
from shardwell.module.fully_shard import fully_shard
from shardwell.module.residency import UnitState
from shardwell_wire.errors import UsageError
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import (
    VOCABULARY,
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

# Activation checkpointing without a direct call of ``checkpoint``.


def checkpoint_blocks_by_wrapper(model: Gpt, impl: CheckpointImpl) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, checkpoint_impl=impl)


def wrap_tied(model: Any, session: Any) -> None:
    for block in model.blocks:
        fully_shard(block, session)
    fully_shard([model.tokens, model.head], session)
    fully_shard(model, session)


def wrap_small_parts(model: Any, session: Any) -> None:
    """Wraps attention and feed-forward as separate units."""
    for block in model.blocks:
        inner = getattr(block, "_checkpoint_wrapped_module", block)
        fully_shard([inner.qkv, inner.proj], session)
        fully_shard([inner.up, inner.down], session)
    fully_shard(model, session)


@pytest.mark.parametrize("wrap", [wrap_blocks, wrap_small_parts, wrap_tied])
@pytest.mark.parametrize("kind", ["composable", CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT])
def test_every_kind_of_activation_checkpointing_matches_torch(kind: Any, wrap: Any) -> None:
    """Mirrors FSDP2's ``test_train_parity_with_activation_checkpointing``."""

    def prepare(model: Gpt) -> Gpt:
        if kind == "composable":
            for block in model.blocks:
                composable_checkpoint(block)
        else:
            checkpoint_blocks_by_wrapper(model, kind)
        return model

    plain, pair = prepare(gpt()), Pair(gpt(), lambda model, session: wrap(prepare(model), session))
    pair.plain = plain
    pair.optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(3):
        pair.backward(gpt_loss, number)
        pair.step()
    assert list(map(torch.equal, plain.state_dict().values(), pair.sharded.state().values())).count(False) == 0


# Tied parameters.


def test_every_row_of_a_tied_embedding_is_updated() -> None:
    """Mirrors FSDP2's ``test_train_shared_params_uneven_shard``. The vocabulary size is a prime."""
    pair = Pair(gpt(), wrap_tied, store=InMemoryStore(num_shards=4))
    before = pair.sharded.state()["tokens.weight"]
    pair.train(gpt_loss, steps=1)
    changed = (pair.sharded.state()["tokens.weight"] != before).any(dim=1)
    assert changed.numel() == VOCABULARY
    assert bool(changed.all())


# Frozen and unused parameters.


def freeze_some(model: Gpt) -> Gpt:
    """Freezes the first linear layer of every block."""
    for block in model.blocks:
        block.qkv.requires_grad_(False)
    return model


def test_partly_frozen_units_push_during_the_backward() -> None:
    """Mirrors FSDP2's ``test_train_mixed_requires_grad_per_group``. A unit is pushed when its backward ends."""
    pair = Pair(freeze_some(gpt()), wrap_blocks, prefetch_bytes=0)
    pair.train(gpt_loss, steps=1)
    events = pair.sharded.store.events[: pair.sharded.store.events.index("push Gpt-0") + 1]
    assert events[-7:] == [
        *("gather Block-2", "push Block-2", "gather Block-1", "push Block-1", "gather Block-0", "push Block-0"),
        "push Gpt-0",
    ]


def test_several_forwards_of_partly_frozen_modules_match_torch() -> None:
    """Mirrors FSDP2's ``test_multi_forward_mixed_requires_grad``."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
            self.frozen = nn.Linear(7, 7).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = self.second(self.frozen(self.first(x)).relu())
            return x

    torch.manual_seed(0)
    pair = Pair(Model(), wrap_children).train(squared_loss)
    assert set(pair.sharded.store.pushes) == {"Linear-0", "Linear-1"}


def test_unused_module_of_a_unit_sends_no_gradient() -> None:
    """Mirrors FSDP2's ``test_fully_shard_multi_module_unused_module``."""

    def wrap(model: Any, session: Any) -> None:
        fully_shard([model[1], model[2]], session)
        fully_shard(model[0], session)
        fully_shard(model, session)

    pair = Pair(layers(7, 12, 12, 12), wrap, prefetch_bytes=0)

    def loss(model: Any, number: int) -> torch.Tensor:
        return model[1](model[0](inputs(number, 4, 7))).square().mean()

    pair.train(loss, steps=3)
    store = pair.sharded.store
    assert store.pushes == {"Linear+Linear-0": 3, "Linear-0": 3}
    assert pair.sharded.units.live_bytes == 0
    unused = {pair.sharded.model[2].weight.numel(), pair.sharded.model[2].bias.numel()}
    sent = {gradient.numel() for unit in store.units for part in unit.contributions for _, gradient in part}
    assert not sent & unused


def test_ranks_may_use_different_parameters() -> None:
    """A rank without a gradient for a parameter contributes zero. A parameter that no rank used is skipped."""
    pair = Pair(layers(7, 7, 7, 7), wrap_children)
    used = {0: [[0, 1], [0]], 1: [[1], [1, 0]], 2: [[0], [0]]}
    for step, chosen in used.items():
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for rank in range(2):

            def loss(model: Any, number: int, own: list[int] = chosen[rank]) -> torch.Tensor:
                x = inputs(number, 4, 7)
                for index in own:
                    x = model[index](x)
                return x.square().mean()

            pair.backward(loss, 10 * step + rank)
            pair.sharded.units.finish_item()
            pair.sharded.store.finish_item()
            for parameter in pair.plain.parameters():
                if parameter.grad is not None:
                    sums[parameter] = sums[parameter] + parameter.grad if parameter in sums else parameter.grad
                    parameter.grad = None
        for parameter, total in sums.items():
            parameter.grad = total / 2
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.sharded.store.step(dp=2)
        pair.sharded.units.invalidate()
    pair.compare()
    assert pair.sharded.store.pushes["Linear-2"] == 0


# When units are gathered and freed.


def test_wrong_prefetch_order_changes_no_bit() -> None:
    """Mirrors FSDP2's ``test_backward_misprefetch``. The order of layers changes from step to step."""

    def loss(model: Any, number: int) -> torch.Tensor:
        x = inputs(number, 4, 7)
        for index in ([0, 1, 2], [2, 0, 1], [1], [1, 2, 1, 0])[number % 4]:
            x = model[index](x).relu()
        return x.square().mean()

    pair = Pair(layers(7, 7, 7, 7), wrap_children)
    pair.train(loss, steps=8)
    assert pair.sharded.units.live_bytes == 0


def test_manual_reshard_of_kept_weights_costs_one_more_gather() -> None:
    """Mirrors FSDP2's ``test_manual_reshard_with_reshard_after_forward_false``."""

    def wrap(model: Any, session: Any) -> None:
        for layer in model:
            fully_shard(layer, session, reshard_after_forward=False)
        fully_shard(model, session, reshard_after_forward=False)

    pair = Pair(layers(7, 15, 3), wrap, prefetch_bytes=0)
    for number in range(3):
        loss = [model(inputs(number, 4, 7)).square().mean() for model in (pair.plain, pair.sharded.model)]
        for layer in pair.sharded.model:
            layer.reshard()
        assert pair.sharded.units.live_bytes == 0
        for value in loss:
            value.backward()
        pair.step()
    assert pair.sharded.store.gathers == {"Linear-0": 6, "Linear-1": 6}
    pair.compare()


def test_unshard_works_before_the_first_forward() -> None:
    """Mirrors FSDP2's ``test_unshard_without_lazy_init``."""
    sharded = Sharded(layers(7, 15), wrap_children)
    layer: Any = sharded.model[0]
    expected = layers(7, 15).state_dict()
    layer.unshard()
    assert torch.equal(layer.weight, expected["0.weight"])
    layer.reshard()
    assert sharded.units.live_bytes == 0


def test_1f1b_pushes_on_the_last_micro_batch_only() -> None:
    """Mirrors FSDP2's ``test_1f1b_microbatching``. The schedule marks the last backward."""
    pair = Pair(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = pair.sharded.model
    for step in range(2):

        def schedule(each: Any, step: int = step) -> None:
            torch.manual_seed(step)
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
            waiting = [gpt_loss(each, 10 * step), gpt_loss(each, 10 * step + 1)]
            for micro_batch in range(2, 4):
                waiting.pop(0).backward()
                waiting.append(gpt_loss(each, 10 * step + micro_batch))
            waiting.pop(0).backward()
            model.set_requires_gradient_sync(True)
            model.set_reshard_after_backward(True)
            waiting.pop(0).backward()

        for each in (pair.plain, model):
            schedule(each)
        assert pair.sharded.store.pushes == dict.fromkeys(pair.sharded.unit_bytes(), step + 1)
        pair.step()
    pair.compare()


# Clipping and local optimizers on gathered parameters.


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Sharded:
    """Returns a model after a backward: its gradients are pushed and its weights are still gathered."""
    monkeypatch.setattr(torch_patches, "_watched", WeakSet())  # ignores the models of other tests
    sharded = Sharded(layers(7, 15, 3), wrap_children)
    model: Any = sharded.model
    model.set_reshard_after_backward(False)
    squared_loss(model, 0).backward()
    assert all(unit.state is UnitState.UNSHARDED for unit in sharded.units)
    return sharded


@pytest.mark.parametrize(
    "clip",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda model: nn.utils.clip_grad_norm_(model[0].weight, 1.0),
        lambda model: nn.utils.clip_grad_value_(list(model.parameters()), 1.0),
        lambda model: nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0)),
        lambda model: nn.utils.clip_grad.clip_grad_norm_(model.parameters(), 1.0),
    ],
)
def test_torch_clipping_of_gathered_parameters_raises(gathered: Sharded, clip: Any) -> None:
    """Without the guard, clipping would return a norm of 0.0, because the gradients are on the servers."""
    with pytest.raises(UsageError, match=r"'Linear-0.weight'.*optimizer.clip_grad_norm_\(max_norm\)"):
        clip(gathered.model)


def test_total_norm_raises_while_gradients_are_on_the_servers(gathered: Sharded) -> None:
    with pytest.warns(UserWarning, match=r"the .grad of parameter 'Linear-0.weight' is None"):
        present = [parameter.grad for parameter in gathered.model.parameters() if parameter.grad is not None]
    with pytest.raises(UsageError, match=r"get_total_norm.*'Linear-0'.*optimizer.clip_grad_norm_"):
        nn.utils.get_total_norm(present)
    gathered.step()
    assert nn.utils.get_total_norm([]) == 0.0


def test_torch_clipping_of_ordinary_parameters_works(gathered: Sharded) -> None:
    parameters = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        parameters[0].grad = torch.tensor([3.0, 0.0, 4.0])
        clip(iter(parameters), 1.0)
        assert float(parameters[0].grad.norm()) == pytest.approx(1.0 if clip is nn.utils.clip_grad_norm_ else 2**0.5)
    with pytest.warns(UserWarning, match="empty generator"):
        nn.utils.clip_grad_norm_((parameter for parameter in ()), 1.0)


def test_error_of_a_local_optimizer_names_the_alternative(gathered: Sharded) -> None:
    with pytest.raises(UsageError, match=r"shardwell.optim.Adam$"):
        torch.optim.Adam(gathered.model.parameters()).step()
    with pytest.raises(UsageError, match=r"shardwell.ClientSide\(parameters, Rprop, ...\)"):
        torch.optim.Rprop(gathered.model.parameters()).step()


# Failures.


def test_next_step_is_correct_after_an_exception_in_a_checkpoint() -> None:
    """Mirrors FSDP2's ``test_reset_iter_state_after_exception``. The exception is raised in the recomputed forward."""

    class Once(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(7, 7), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 2:
                raise ArithmeticError("in the recomputation")
            return self.layer(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.last = Once(), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.once, x, use_reentrant=False))

    torch.manual_seed(0)
    pair = Pair(Model(), wrap_children)
    for model in (pair.plain, pair.sharded.model):
        with pytest.raises(ArithmeticError):
            squared_loss(model, 0).backward()
    pair.optimizer.zero_grad()
    pair.sharded.units.zero_grad()
    assert pair.sharded.units.live_bytes == 0
    pair.train(squared_loss, steps=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_explicit_prefetch_inside_checkpoints_precedes_the_push(use_reentrant: bool) -> None:
    """Mirrors FSDP2's ``test_set_modules_to_backward_prefetch_inside_ac``."""
    pair = Pair(gpt(use_reentrant), wrap_blocks)
    blocks: Any = pair.sharded.model.blocks
    for before, block in pairwise(blocks):
        block.set_modules_to_backward_prefetch([before])
    blocks[0].set_modules_to_backward_prefetch([])
    pair.train(gpt_loss, steps=2)
    events = pair.sharded.store.events
    events.clear()
    pair.backward(gpt_loss, 2)
    last = {event: place for place, event in enumerate(events)}
    assert all(last[f"gather Block-{number - 1}"] < last[f"push Block-{number}"] for number in (2, 1))
    assert all(events.count(f"gather Block-{number}") == 2 for number in range(3))


def test_reduce_dtype_applies_after_a_frozen_first_step() -> None:
    """Mirrors FSDP2's ``test_reduce_dtype_after_frozen_first_forward``."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    masters = nn.Linear(5, 3)
    sharded = Sharded(copy.deepcopy(masters), lambda model, session: fully_shard(model, session, mp_policy=policy))
    sharded.model.requires_grad_(False)
    assert not sharded.model(inputs(0, 4, 5)).requires_grad
    sharded.step()
    sharded.model.requires_grad_(True)
    optimizer = fused_adamw(masters.parameters())
    for number in range(2):
        low = copy.deepcopy(masters).bfloat16()
        for model in (low, sharded.model):
            for micro_batch in range(2):
                model(inputs(2 * number + micro_batch, 4, 5).bfloat16()).float().square().mean().backward()
                if model is low:
                    for master, parameter in zip(masters.parameters(), low.parameters(), strict=True):
                        assert parameter.grad is not None
                        gradient = parameter.grad.float()
                        master.grad = gradient if master.grad is None else master.grad + gradient
                        parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    for expected, got in zip(masters.parameters(), sharded.state().values(), strict=True):
        assert torch.equal(expected, got)
