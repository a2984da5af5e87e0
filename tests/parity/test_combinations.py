"""Random combinations of what can be chosen for a sharded model, each against the loop written by hand."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell import BackwardPrefetch, MixedPrecisionPolicy, ReplicaOptions, ShardingStrategy
from shardwell.module.fully_shard import ShardedModule, fully_shard
from shardwell.module.parameter import owner_of
from tests.support.combinations import ByHand, Combination, loss_of, random_model, random_policy
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import Sharded

IN_MEMORY_SEEDS, SERVER_SEEDS = 70, 24
STRATEGIES = [None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]

Wrap = Callable[[Any, Any], None]


def replica_options(rng: random.Random, strategy: ShardingStrategy | None) -> ReplicaOptions | None:
    if strategy is not ShardingStrategy.NO_SHARD:
        return None
    return ReplicaOptions(bucket_bytes=rng.choice([1, 200, 25 << 20]), push_during_backward=rng.random() < 0.7)


def wrap_randomly(rng: random.Random, policy: MixedPrecisionPolicy, directory: Path, strategies: Any) -> Wrap:
    """Units of blocks, of what is tied, and of the rest, each with a strategy of its own; some blocks offload."""
    inner_policy = replace(policy, output_dtype=None)

    def shard(modules: Any, session: Any, chosen_policy: MixedPrecisionPolicy = inner_policy) -> None:
        strategy = rng.choice(strategies)
        fully_shard(
            modules,
            session,
            strategy=strategy,
            replica=replica_options(rng, strategy),
            reshard_after_forward=rng.choice([None, None, True, False]) if strategy is None else None,
            mp_policy=chosen_policy,
        )

    def wrap(model: Any, session: Any) -> None:
        for block in model.blocks:
            offload = rng.choice([None, None, "before", "after"])
            if offload == "before":
                shardwell.offload_activations(block, to=directory, min_bytes=1)
            if rng.random() < 0.8:
                shard(block, session)
            if offload == "after":
                shardwell.offload_activations(block, to=directory, min_bytes=1)
        if rng.random() < 0.3:
            shard([model.embedding, model.head], session)
        shard(model, session, policy)

    return wrap


def set_prefetch_lists(rng: random.Random, model: Any) -> None:
    modules = [block for block in model.blocks if isinstance(block, ShardedModule)]
    for module in modules:
        if rng.random() < 0.3:
            module.set_modules_to_forward_prefetch(rng.sample(modules, rng.randint(0, len(modules))))
        if rng.random() < 0.3:
            module.set_modules_to_backward_prefetch(rng.sample(modules, rng.randint(0, len(modules))))


def freeze(rng: random.Random, models: tuple[Combination, ...]) -> list[str]:
    """Freezes some parameters, but not the embedding, without which a reentrant checkpoint has no gradient."""
    names = [name for name, _ in models[0].named_parameters() if "embedding" not in name and rng.random() < 0.15]
    for model in models:
        for name in names:
            model.get_parameter(name).requires_grad_(False)
    return names


def evaluate(rng: random.Random, models: tuple[Any, ...], number: int) -> None:
    mode = rng.choice([torch.no_grad, torch.inference_mode])
    # A reentrant checkpoint warns of inputs without a gradient.
    in_training = rng.random() < 0.3 and all(block.recompute is not True for block in models[0].blocks)
    results = []
    for model in models:
        model.train(in_training)
        with mode():
            results.append(loss_of(model, number))
        model.train()
    assert torch.equal(*results)


def fail(rng: random.Random, models: tuple[Any, ...], number: int) -> None:
    """An exception after the layers of a forward, or in the backward of the last of them."""
    in_forward = rng.random() < 0.5
    for model in models:
        model.fails = in_forward
        if in_forward:
            with pytest.raises(ZeroDivisionError):
                loss_of(model, number)
        else:
            handle = model.embedding.register_forward_hook(
                lambda module, inputs, output: output.register_hook(lambda gradient: 1 / 0) and None
            )
            with pytest.raises(ZeroDivisionError):
                loss_of(model, number).backward()
            handle.remove()
        model.fails = False


class InMemoryWalk:
    """Some steps of a random model on a store in this process."""

    def __init__(self, seed: int, directory: Path) -> None:
        self.rng = rng = random.Random(seed)
        model, policy = random_model(rng), random_policy(rng)
        frozen = copy.deepcopy(model)
        self.frozen = freeze(rng, (model, frozen))
        self.by_hand = ByHand(frozen, fused_adamw, policy)
        self.sharded = Sharded(
            model,
            wrap_randomly(rng, policy, directory, STRATEGIES),
            store=InMemoryStore(rng.randint(1, 3)),
            prefetch_bytes=rng.choice([0, 600, 1 << 20]),
            keep_bytes=rng.choice([0, 0, 2000, 1 << 20]),
            max_gathers_in_flight=rng.choice([0, 0, 1, 2]),
            backward_prefetch=rng.choice(list(BackwardPrefetch)),
        )
        self.by_hand.unit_of = [owner_of(parameter).unit for parameter in model.parameters()]
        self.models: tuple[Any, ...] = (self.by_hand.computing, self.sharded.model)
        self.modules: list[Any] = [part for part in self.sharded.model.modules() if isinstance(part, ShardedModule)]
        self.has_unit_of_two = any(len(unit.modules) > 1 for unit in self.sharded.units)
        self.dp = rng.choice([1, 1, 2])
        set_prefetch_lists(rng, self.sharded.model)

    def run(self, steps: int = 3) -> None:
        for step in range(steps):
            for rank in range(self.dp):
                self.compute_item(10 * (2 * step + rank))
            self.commit()
            self.change_something()
        expected, got = self.by_hand.state(), self.sharded.state()
        assert list(got) == list(expected)
        for name, value in expected.items():
            assert torch.equal(value, got[name]), f"{name} differs by {(value - got[name]).abs().max()}"

    def compute_item(self, number: int) -> None:
        rng, units = self.rng, self.sharded.units
        if rng.random() < 0.2:
            evaluate(rng, self.models, number)
        if rng.random() < 0.2:
            self.backward(number, sync=rng.random() < 0.5)
            fail(rng, self.models, number)
            units.zero_grad()
            self.by_hand.drop()
            self.by_hand.computing.zero_grad()
        sync = rng.random() < 0.6
        for micro_batch in range(rng.randint(1, 3)):
            # A unit of two calls pushes what was kept when the first one is over: then sums are rounded elsewhere.
            sync = sync if self.has_unit_of_two else rng.random() < 0.6
            self.backward(number + micro_batch, sync=sync)
            if rng.random() < 0.1:
                self.sharded.state()
        units.finish_item()
        self.sharded.store.finish_item()
        self.by_hand.finish_item()

    def backward(self, number: int, *, sync: bool) -> None:
        skipped = frozenset(index for index in range(4) if self.rng.random() < 0.15)
        for model in self.models:
            model.skipped = skipped
        self.sharded.model.set_requires_gradient_sync(sync)
        self.sharded.model.set_reshard_after_backward(self.rng.random() < 0.7)
        if self.rng.random() < 0.1:
            self.rng.choice(self.modules).unshard(async_op=True)
        expected = self.by_hand.backward(number, sync=sync)
        loss = loss_of(self.sharded.model, number)
        loss.backward()
        assert torch.equal(loss, expected)

    def commit(self) -> None:
        sharded = self.sharded
        sharded.store.step(dp=self.dp)
        sharded.units.invalidate()
        sharded.units.begin_step()
        sharded.units.zero_grad()
        self.by_hand.step(self.dp)

    def change_something(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            for name in self.frozen:
                for model in (self.by_hand.computing, self.sharded.model):
                    model.get_parameter(name).requires_grad_(True)
        if rng.random() < 0.3:
            module = rng.choice(self.modules)
            module.set_reshard_after_forward(None, recurse=False)
            strategy = rng.choice(STRATEGIES)
            module.set_sharding_strategy(strategy, recurse=False, replica=replica_options(rng, strategy))


@pytest.mark.parametrize("seed", range(IN_MEMORY_SEEDS))
def test_in_memory(seed: int, tmp_path: Path) -> None:
    InMemoryWalk(seed, tmp_path).run()
