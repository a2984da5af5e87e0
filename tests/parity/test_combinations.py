"""Random combinations of a sharded model's options, each compared with a training loop written by hand."""

from __future__ import annotations

import copy
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwell
from shardwell import BackwardPrefetch, MixedPrecisionPolicy, ReplicaOptions, ShardingStrategy
from shardwell.module.fully_shard import ShardedModule, fully_shard
from shardwell.module.unit import owner_of
from tests.support.combinations import ByHand, Combination, Layer, loss_of, random_model, random_policy
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import Sharded

IN_MEMORY_SEEDS, SERVER_SEEDS = 60, 16
STRATEGIES = [None, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
WIRE_DTYPES = ["float32", "float32", "bfloat16", "float16"]

Wrap = Callable[[Any, Any], None]


def replica_options(rng: random.Random, strategy: ShardingStrategy | None) -> ReplicaOptions | None:
    if strategy is not ShardingStrategy.NO_SHARD:
        return None
    return ReplicaOptions(bucket_bytes=rng.choice([1, 200, 25 << 20]), push_during_backward=rng.random() < 0.7)


def wrap_randomly(rng: random.Random, policy: MixedPrecisionPolicy, directory: Path, strategies: Any) -> Wrap:
    """Returns a function that makes units with random strategies, and offloads some blocks."""
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
    """Freezes random parameters, except the embedding, which a reentrant checkpoint needs for its gradient."""
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
    """Raises an exception after the layers of a forward, or in the backward of the embedding."""
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


def compare(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert torch.equal(value, got[name]), f"{name} differs by {(value - got[name]).abs().max()}"


class InMemoryWalk:
    """Some training steps of a random model on a store in this process."""

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
            keep_bytes=rng.choice([0, None, 2000, 1 << 20]),
            max_gathers_in_flight=rng.choice([0, 0, 1, 2]),
            backward_prefetch=rng.choice(list(BackwardPrefetch)),
        )
        self.by_hand.unit_of = [owner_of(parameter).unit for parameter in model.parameters()]
        self.models: tuple[Any, ...] = (self.by_hand.computing, self.sharded.model)
        self.modules: list[Any] = [part for part in self.sharded.model.modules() if isinstance(part, ShardedModule)]
        self.dp = rng.choice([1, 1, 2])
        set_prefetch_lists(rng, self.sharded.model)

    def run(self, steps: int = 3) -> None:
        for step in range(steps):
            for rank in range(self.dp):
                self.compute_item(10 * (2 * step + rank))
            self.commit()
            self.change_something()
        compare(self.by_hand.state(), self.sharded.state())

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
        for micro_batch in range(rng.randint(1, 3)):
            self.backward(number + micro_batch, sync=rng.random() < 0.6)
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
        sharded.units.passes.begin_step()
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
def test_random_combination_matches_the_loop_by_hand(seed: int, tmp_path: Path) -> None:
    InMemoryWalk(seed, tmp_path).run()


class JointOptimizers:
    """Steps several local optimizers together."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def both(adamw: Any, sgd: Any, together: Any) -> Any:
    """Returns a function that gives every other parameter to ``adamw``, the rest to ``sgd``, and joins the two."""
    return lambda parameters: together([adamw(parameters[::2]), sgd(parameters[1::2])])


PLAIN_SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)
SHARDED_ADAMW = partial(shardwell.optim.AdamW, lr=1e-2, weight_decay=0.1)
SHARDED_SGD = partial(shardwell.optim.SGD, lr=0.05, momentum=0.9)
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "AdamW": (fused_adamw, SHARDED_ADAMW),
    "SGD": (PLAIN_SGD, SHARDED_SGD),
    "ClientSide": (
        partial(torch.optim.Adagrad, lr=0.05),
        lambda parameters: shardwell.ClientSide(parameters, torch.optim.Adagrad, lr=0.05),
    ),
    "Combined": (
        both(fused_adamw, PLAIN_SGD, JointOptimizers),
        both(SHARDED_ADAMW, SHARDED_SGD, shardwell.optim.Combined),
    ),
}


def set_buffers(model: torch.nn.Module, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


class ServerWalk:
    """Some training steps of a random model on shard servers. One trainer plays all ranks."""

    def __init__(self, seed: int, cluster: shardwell.LocalCluster, directory: Path) -> None:
        self.rng = rng = random.Random(f"servers {seed}")
        self.dp = rng.choice([1, 2])
        gather_dtype, push_dtype = rng.choice(WIRE_DTYPES), rng.choice(WIRE_DTYPES)
        self.scale = rng.choice([1.0, 256.0])
        self.session = shardwell.join(
            cluster.address,
            run=uuid.uuid4().hex,
            world=shardwell.World(dp=self.dp),
            min_trainers=1,
            transfers=shardwell.TransferOptions(
                transports=rng.choice(["shm,socket,grpc", "socket,grpc", "grpc"]),
                gather_dtype=gather_dtype,
                push_dtype=push_dtype,
                keep_bytes=rng.choice([0, None, 2000, 1 << 20]),
                prefetch_bytes=rng.choice([0, 600, 1 << 20]),
                max_gathers_in_flight=rng.choice([0, 1]),
                backward_prefetch=rng.choice(["pre", "post", "none"]),
            ),
            waits=shardwell.WaitOptions(wait_limit_s=30),
        )
        memory = rng.choice([None, None, *shardwell.MemoryStrategy])
        model, policy = random_model(rng, recomputes=memory is None), random_policy(rng)
        masters = copy.deepcopy(model)
        plain, sharded = OPTIMIZERS[rng.choice(list(OPTIMIZERS))]
        self.by_hand = ByHand(masters, plain, policy, getattr(torch, gather_dtype), getattr(torch, push_dtype))
        self.model: Any = model
        if memory is None:
            wrap_randomly(rng, policy, directory, [*STRATEGIES, ShardingStrategy.HYBRID_SHARD])(model, self.session)
        else:
            options = memory.options(gather_dtype=None, push_dtype=None, offload_to=directory, offload_min_bytes=1)
            inner = shardwell.ModuleTypePolicy({Layer})
            policy = replace(policy, output_dtype=None)
            shardwell.auto_wrap(model, self.session, inner, memory=options, mp_policy=policy)
        self.by_hand.unit_of = [owner_of(parameter).unit for parameter in model.parameters()]
        self.optimizer = sharded(list(model.parameters()))
        self.scaler = shardwell.amp.GradScaler(init_scale=self.scale, enabled=self.scale != 1.0)

    def run(self, steps: int = 3) -> None:
        for step in self.session.steps(steps):
            computing, of_first_rank = self.by_hand.computing, None
            committed = copy.deepcopy(dict(computing.named_buffers()))
            for number in step.batches(lambda number, rank: 10 * (2 * number + rank)):
                set_buffers(computing, committed)
                self.compute_item(number)
                self.by_hand.finish_item()
                of_first_rank = of_first_rank or copy.deepcopy(dict(computing.named_buffers()))
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.by_hand.step(self.dp, scale=self.scale)
            set_buffers(computing, of_first_rank or {})
        compare(self.by_hand.state(), shardwell.full_state_dict(self.model))

    def compute_item(self, number: int) -> None:
        rng, models = self.rng, (self.by_hand.computing, self.model)
        if rng.random() < 0.2:
            evaluate(rng, models, number)
        if rng.random() < 0.15:
            fail(rng, models, number)
            self.optimizer.zero_grad()
            self.by_hand.computing.zero_grad()
        sync = rng.random() < 0.6
        for micro_batch in range(rng.randint(1, 2)):
            self.model.set_requires_gradient_sync(sync)
            expected = self.by_hand.backward(number + micro_batch, sync=sync, scale=self.scale)
            loss = loss_of(self.model, number + micro_batch)
            (loss * self.scale).backward()
            assert torch.equal(loss, expected)


@pytest.mark.parametrize("seed", range(SERVER_SEEDS))
def test_random_combination_on_servers_matches_the_loop_by_hand(
    seed: int, cluster: shardwell.LocalCluster, tmp_path: Path
) -> None:
    walk = ServerWalk(seed, cluster, tmp_path)
    with walk.session:
        walk.run()
