"""Sharding strategies change when weights are gathered, and no bit of the results."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import ReplicaOptions, ShardingStrategy, UsageError
from shardwell.module.fully_shard import fully_shard
from shardwell.module.residency import UnitState
from shardwell.module.units import Units
from shardwell_wire.errors import CapacityError, FreedParameterError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import LAYERS, Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks
from tests.support.strategies import BLOCKS, ROOT, commit, sharded_modules, step, unit_of, wrap_with

FULL, GRAD_OP, NONE, HYBRID = ShardingStrategy
IN_MEMORY = [FULL, GRAD_OP, NONE]
"""Strategies that work without a shared copy per host, which the in-memory store does not have."""
SMALL_BUCKETS = ReplicaOptions(bucket_bytes=2000)


def train(pair: Pair, steps: int = 3) -> Pair:
    for number in range(steps):
        pair.backward(gpt_loss, number)
        step(pair)
    pair.compare()
    return pair


# Parity.


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("strategy", IN_MEMORY)
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_every_strategy_gives_the_same_bits(
    strategy: ShardingStrategy, recompute: bool | None, prefetch_bytes: int
) -> None:
    train(Pair(gpt(recompute), wrap_with(strategy), prefetch_bytes=prefetch_bytes))


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("during", [False, True])
def test_buckets_give_the_same_bits(recompute: bool | None, during: bool) -> None:
    options = ReplicaOptions(bucket_bytes=2000, push_during_backward=during)
    train(Pair(gpt(recompute), wrap_with(NONE, options)))


def test_strategies_may_differ_by_unit_and_change_between_steps() -> None:
    pair = Pair(gpt(layers=4), wrap_blocks)
    modules = sharded_modules(pair.sharded.model)
    for number in range(10):
        for position, module in enumerate(modules):
            strategy = [FULL, GRAD_OP, NONE, None][(number + position) % 4]
            module.set_sharding_strategy(strategy, recurse=False, replica=SMALL_BUCKETS if strategy is NONE else None)
        pair.backward(gpt_loss, number)
        step(pair)
    pair.compare()
    pair.sharded.model.set_sharding_strategy(None)
    assert pair.sharded.units.live_bytes == 0


def test_strategy_changed_between_forward_and_backward_gives_the_same_bits() -> None:
    """The backward gathers the units again that the change has freed."""
    pair = Pair(gpt(), wrap_with(NONE))
    for number, strategy in enumerate([FULL, GRAD_OP, NONE]):
        losses = []
        for model in (pair.plain, pair.sharded.model):
            torch.manual_seed(number)
            losses.append(gpt_loss(model, number))
        model.set_sharding_strategy(strategy)
        for loss in losses:
            loss.backward()
        step(pair)
    pair.compare()


def test_replica_with_unused_and_frozen_parameters_gives_the_same_bits() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(11, 11) for _ in range(3))
            self.shared = nn.Linear(11, 11)
            self.frozen = nn.Linear(11, 11).requires_grad_(False)

        def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
            return self.frozen(self.shared(self.branches[chosen](self.shared(x))))

    def wrap(model: nn.Module, session: Any) -> None:
        fully_shard(model, session, strategy=NONE, replica=ReplicaOptions(bucket_bytes=1, find_unused_parameters=True))

    torch.manual_seed(0)
    pair = Pair(Branches(), wrap)
    for number in range(5):
        if number == 3:
            pair.plain.get_submodule("frozen").requires_grad_(True)
            pair.sharded.model.get_submodule("frozen").requires_grad_(True)
        pair.backward(lambda model, number: model(inputs(number, 5, 11), number % 2).square().sum(), number)
        step(pair)
    pair.compare()


def test_hooks_on_gradients_run_before_their_bucket_is_pushed() -> None:
    def scale(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    pair = Pair(gpt(), wrap_with(NONE, ReplicaOptions(bucket_bytes=1)))
    for model in (pair.plain, pair.sharded.model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(scale)
    train(pair)


@pytest.mark.parametrize("strategy", IN_MEMORY)
def test_step_after_an_exception_gives_the_same_bits(strategy: ShardingStrategy) -> None:
    pair = Pair(gpt(), wrap_with(strategy, SMALL_BUCKETS if strategy is NONE else None))

    class FailingError(Exception):
        pass

    def fail(*_: Any) -> None:
        raise FailingError

    model: Any = pair.sharded.model
    for hooked in (model.blocks[1].down.register_forward_hook, model.blocks[1].down.weight.register_hook):
        model.unshard()
        model.blocks[1].unshard()
        handle = hooked(fail)
        with pytest.raises(FailingError):
            gpt_loss(model, 7).backward()
        handle.remove()
        pair.sharded.units.zero_grad()
        train(pair, steps=2)


# Memory.


def test_live_bytes_between_forward_and_backward_by_strategy() -> None:
    for strategy, held in ((None, [ROOT]), (FULL, [ROOT]), (GRAD_OP, [*BLOCKS, ROOT]), (NONE, [*BLOCKS, ROOT])):
        sharded = Sharded(gpt(), wrap_with(strategy), prefetch_bytes=0)
        sizes = sharded.unit_bytes()
        loss = gpt_loss(sharded.model, 0)
        assert sharded.units.live_bytes == sum(sizes[name] for name in held)
        loss.backward()
        assert sharded.units.live_bytes == (sum(sizes.values()) if strategy is NONE else 0)


def test_replica_keeps_its_memory_between_steps() -> None:
    sharded = Sharded(gpt(), wrap_with(NONE), prefetch_bytes=0)
    model: Any = sharded.model
    total, addresses = sum(sharded.unit_bytes().values()), set()
    for number in range(3):
        gpt_loss(model, number).backward()
        addresses.add(tuple(unit.storage.data_ptr() for unit in sharded.units))
        commit(sharded)
        assert sharded.units.live_bytes == total
        assert all(unit.state is UnitState.FETCHING for unit in sharded.units), "the next version is being fetched"
        with pytest.raises(FreedParameterError):
            model.blocks[0].up.weight.sum()
    assert len(addresses) == 1
    assert sharded.units.peak_bytes == total


def test_replicas_do_not_count_as_prefetched() -> None:
    block = Sharded(gpt(), wrap_blocks).unit_bytes()["Block-0"]
    sharded = Sharded(gpt(layers=4), wrap_blocks, prefetch_bytes=block)
    modules: Any = sharded.model.blocks
    modules[3].set_sharding_strategy(NONE)
    ahead = []
    modules[0].up.register_forward_pre_hook(
        lambda *_: ahead.append([unit.name for unit in sharded.units if unit.state is UnitState.FETCHING])
    )
    for number in range(3):
        gpt_loss(sharded.model, number).backward()
        commit(sharded)
    assert ahead == [[], ["Block-1", "Block-3"], ["Block-1", "Block-3"]]


def test_forward_under_no_grad_leaves_nothing_gathered() -> None:
    for strategy in (None, FULL, GRAD_OP):
        sharded = Sharded(gpt(), wrap_with(strategy), prefetch_bytes=0)
        with torch.no_grad():
            gpt_loss(sharded.model, 0)
        assert sharded.units.live_bytes == 0


def test_reshard_makes_a_replica_unusable_and_keeps_its_memory() -> None:
    sharded = Sharded(gpt(), wrap_with(NONE))
    block: Any = sharded.model.blocks[0]
    block.unshard()
    assert torch.equal(block.up.weight, gpt().blocks[0].up.weight)
    block.reshard()
    assert unit_of(sharded, "Block-0").state is UnitState.KEPT
    with pytest.raises(FreedParameterError):
        block.up.weight.sum()


def test_replica_is_garbage_collected_with_its_model() -> None:
    """Its parameters have hooks, and the garbage collector does not see torch's references to hooks."""
    sharded = Sharded(gpt(), wrap_with(NONE))
    gpt_loss(sharded.model, 0).backward()
    model = weakref.ref(sharded.model)
    del sharded
    gc.collect()
    assert model() is None


def test_write_to_a_replica_raises_and_is_undone() -> None:
    sharded = Sharded(gpt(), wrap_with(NONE))
    gpt_loss(sharded.model, 0).backward()
    with torch.no_grad():
        sharded.model.blocks[1].up.weight.add_(1)
    with pytest.raises(UsageError, match=r"Block-1\.up\.weight.*written in place"):
        sharded.units.finish_item()
    sharded.units.zero_grad()
    losses = []
    for model in (gpt(), sharded.model):
        torch.manual_seed(1)
        losses.append(gpt_loss(model, 1))
    assert torch.equal(*losses), "the write is undone"


@pytest.mark.parametrize("strategy", [None, FULL, GRAD_OP])
def test_eval_with_gradients_leaves_nothing_gathered(strategy: ShardingStrategy | None) -> None:
    def wrap(model: nn.Module, session: Any) -> None:
        for block in model.children():
            fully_shard(block, session, strategy=strategy)
        fully_shard(model, session, strategy=strategy)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Sequential(nn.Linear(5, 5)), nn.LayerNorm(5)).eval()

    sharded, plain = Sharded(build(), wrap), build()
    x, y = torch.rand(3, 5, requires_grad=True), torch.rand(3, 5)
    loss = (sharded.model(x) - y).pow(2).sum()
    assert all(unit.state is UnitState.FREED for unit in sharded.units)
    (gradient,) = torch.autograd.grad(loss, x)
    (expected,) = torch.autograd.grad((plain(x) - y).pow(2).sum(), x)
    assert torch.equal(gradient, expected)


def test_a_forward_without_a_backward_leaves_nothing_gathered() -> None:
    """The weights are frozen, such as a teacher's, and the module is in training mode."""

    def wrap(model: nn.Module, session: Any) -> None:
        fully_shard(model, session)

    sharded = Sharded(nn.Sequential(nn.Linear(5, 5)).requires_grad_(False), wrap)
    sharded.model(torch.rand(3, 5))
    assert all(unit.state is UnitState.FREED for unit in sharded.units)


# Conflicts.


@pytest.mark.parametrize(
    ("strategy", "choice", "advice"),
    [(FULL, False, "SHARD_GRAD_OP"), (GRAD_OP, True, "FULL_SHARD"), (NONE, True, "FULL_SHARD")],
)
def test_reshard_after_forward_that_contradicts_the_strategy_is_refused(
    strategy: ShardingStrategy, choice: bool, advice: str
) -> None:
    units = Units(InMemoryStore())

    class Session:
        @property
        def units(self) -> Units:
            return units

    module = nn.Linear(3, 3)
    with pytest.raises(UsageError, match=f"contradicts.*{advice}"):
        fully_shard(module, Session(), strategy=strategy, reshard_after_forward=choice)
    assert len(units) == 0 and type(module) is nn.Linear
    sharded: Any = fully_shard(module, Session(), strategy=strategy)
    with pytest.raises(UsageError, match=r"'Linear-0'.*contradicts"):
        sharded.set_reshard_after_forward(choice)
    sharded.set_sharding_strategy(None)
    sharded.set_reshard_after_forward(choice)
    with pytest.raises(UsageError, match="contradicts"):
        sharded.set_sharding_strategy(strategy)
    sharded.set_reshard_after_forward(None)
    sharded.set_sharding_strategy(strategy)


def test_strategy_that_one_unit_refuses_changes_no_unit() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    model: Any = sharded.model
    model.blocks[1].set_reshard_after_forward(True)
    with pytest.raises(UsageError, match="Block-1"):
        model.set_sharding_strategy(NONE)
    assert [unit.settings.strategy for unit in sharded.units] == [None] * (LAYERS + 1)


def test_strategy_change_during_a_forward_is_refused() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    block: Any = sharded.model.blocks[0]
    handle = block.up.register_forward_pre_hook(lambda *_: block.set_sharding_strategy(NONE))
    with pytest.raises(UsageError, match="'Block-0' cannot change while a forward or backward uses the unit"):
        gpt_loss(sharded.model, 0)
    handle.remove()
    sharded.units.zero_grad()
    gpt_loss(sharded.model, 0).backward()


def test_invalid_strategy_arguments_are_refused() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    model: Any = sharded.model
    with pytest.raises(UsageError, match=r"strategy='NO_SHARD': expected one of ShardingStrategy\.FULL_SHARD"):
        model.set_sharding_strategy("NO_SHARD")
    with pytest.raises(UsageError, match=r"needs strategy=ShardingStrategy\.NO_SHARD"):
        model.set_sharding_strategy(FULL, replica=ReplicaOptions())
    with pytest.raises(UsageError, match="bucket_bytes=0"):
        ReplicaOptions(bucket_bytes=0)
    with pytest.raises(CapacityError, match=r"HYBRID_SHARD: unit 'Block-0' has .* no shared memory"):
        model.blocks[0].set_sharding_strategy(HYBRID)
    gpt_loss(model, 0).backward()
