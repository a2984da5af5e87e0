"""Exact numbers of gathers and pushes, for each strategy and kind of gradient accumulation."""

from __future__ import annotations

import itertools
import uuid
from collections import Counter
from typing import Any

import pytest

import shardwell
from shardwell import ReplicaOptions, ShardingStrategy
from tests.support.module_parity import LAYERS, WIDTH, Pair, gpt, gpt_loss, inputs
from tests.support.strategies import BLOCKS, ROOT, difference, step, unit_of, wrap_with

FULL, GRAD_OP, NONE, _ = ShardingStrategy
STRATEGIES = [FULL, GRAD_OP, NONE]
MICRO_BATCHES = 3
BUCKETS = ReplicaOptions(bucket_bytes=4000)

ACCUMULATIONS = {
    "push each": {FULL: (6, 3, 3), GRAD_OP: (3, 3, 3), NONE: (1, 1, 3)},
    "sync last": {FULL: (6, 3, 1), GRAD_OP: (3, 3, 1), NONE: (1, 1, 1)},
    "keep weights": {FULL: (4, 1, 3), GRAD_OP: (1, 1, 3), NONE: (1, 1, 3)},
    "sync last, keep weights": {FULL: (4, 1, 1), GRAD_OP: (1, 1, 1), NONE: (1, 1, 1)},
}
"""Per step of three micro-batches: gathers of each block, gathers of the unit around them, pushes of each unit."""


def prepare_micro_batch(model: Any, accumulation: str, number: int) -> None:
    is_last = number == MICRO_BATCHES - 1
    if "sync last" in accumulation:
        model.set_requires_gradient_sync(is_last)
    if "keep weights" in accumulation:
        model.set_reshard_after_backward(is_last)


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_number_of_gathers_and_pushes_per_step(
    strategy: ShardingStrategy, accumulation: str, prefetch_bytes: int
) -> None:
    pair = Pair(gpt(), wrap_with(strategy), prefetch_bytes=prefetch_bytes)
    store, model = pair.sharded.store, pair.sharded.model
    of_block, of_root, pushes = ACCUMULATIONS[accumulation][strategy]
    for number in range(3):
        if number == 0 or strategy is not NONE:  # the next version of a replica is fetched in the step of its commit
            gathers = Counter(store.gathers)
        pushed = Counter(store.pushes)
        for micro_batch in range(MICRO_BATCHES):
            prepare_micro_batch(model, accumulation, micro_batch)
            pair.backward(gpt_loss, 10 * number + micro_batch)
        times = number + 1 if strategy is NONE else 1
        assert difference(store.gathers, gathers) == {**dict.fromkeys(BLOCKS, times * of_block), ROOT: times * of_root}
        assert difference(store.pushes, pushed) == dict.fromkeys([*BLOCKS, ROOT], pushes)
        step(pair)
    pair.compare()


@pytest.mark.parametrize("recompute", [None, False, True])
def test_replica_is_gathered_once_per_step_with_recomputation(recompute: bool | None) -> None:
    pair = Pair(gpt(recompute), wrap_with(NONE))
    for number in range(3):
        pair.backward(gpt_loss, number)
        assert pair.sharded.store.gathers == dict.fromkeys([*BLOCKS, ROOT], number + 1)
        step(pair)


def test_unused_replica_is_gathered_once_per_step() -> None:
    """As in DDP, a replica fetches every committed version, so that its next use does not wait."""
    pair = Pair(gpt(), wrap_with(NONE))
    pair.backward(gpt_loss, 0)
    step(pair)
    for number in range(2, 4):
        gathers = pair.sharded.store.gathers["Block-1"]
        pair.backward(lambda model, number: model.blocks[0](inputs(number, 1, 2, WIDTH)).sum(), number)  # type: ignore[index,operator]
        step(pair)
        assert pair.sharded.store.gathers["Block-1"] == gathers + 1 == number + 1
    pair.compare()


def test_bucket_is_pushed_when_the_next_gradient_is_complete() -> None:
    """The gradient that makes a bucket large enough is the bucket's last one."""
    pair = Pair(gpt(), wrap_with(NONE, BUCKETS))
    pair.backward(gpt_loss, 0)
    layout = unit_of(pair.sharded, "Block-0").layout
    sizes = {specification.name.split(".", 1)[1]: specification.size_bytes for specification in layout.parameters}
    large = [name for name, size in sizes.items() if size >= BUCKETS.bucket_bytes]
    assert sorted(large) == ["down.weight", "qkv.weight", "up.weight"]
    pushed: dict[str, int] = dict(pair.sharded.store.pushes)
    assert pushed == {**dict.fromkeys(BLOCKS, pushed["Block-0"]), ROOT: pushed[ROOT]}
    parts = pair.sharded.store.units[unit_of(pair.sharded, "Block-0").index].parts
    bytes_pushed = [sum(gradient.nbytes for _, gradient in part) for part in parts]
    assert sum(bytes_pushed) == sum(sizes.values())
    assert all(size >= BUCKETS.bucket_bytes for size in bytes_pushed[:-1])
    assert len(parts) > 2
    indices = [index for part in parts for index, _ in part]
    assert sorted(indices) == list(range(len(layout.parameters))), "each gradient once"


def test_pushes_happen_during_the_backward_or_after_it() -> None:
    for during in (True, False):
        pair = Pair(gpt(), wrap_with(NONE, ReplicaOptions(bucket_bytes=4000, push_during_backward=during)))
        store, seen = pair.sharded.store, []
        first: Any = pair.sharded.model.blocks[0]  # type: ignore[index]
        first.qkv.weight.register_hook(lambda _, store=store, seen=seen: seen.append(sum(store.pushes.values())))
        pair.backward(gpt_loss, 0)
        assert (seen[0] > 0) is during
        assert set(store.pushes) == {*BLOCKS, ROOT}
        step(pair)
        pair.compare()


def test_unsynced_gradients_are_pushed_at_the_end_of_the_step() -> None:
    pair = Pair(gpt(), wrap_with(NONE, BUCKETS))
    pair.sharded.model.set_requires_gradient_sync(False)
    for number in range(2):
        pair.backward(gpt_loss, number)
    assert not pair.sharded.store.pushes
    step(pair)
    assert set(pair.sharded.store.pushes) == {*BLOCKS, ROOT}
    pair.compare()


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_session_counts_gathers_and_pushes(
    cluster: shardwell.LocalCluster, strategy: ShardingStrategy, accumulation: str
) -> None:
    """Units that are read in place, or are small enough to be kept, are gathered once per step with any strategy.

    Each strategy and each accumulation has both kinds of these units, but not every pair.
    """
    of_block, of_root, pushes = ACCUMULATIONS[accumulation][strategy]
    freed, kept, default = LAYERS * of_block + of_root, LAYERS + 1, shardwell.TransferOptions().keep_bytes
    turn = STRATEGIES.index(strategy) + list(ACCUMULATIONS).index(accumulation)
    kinds = (("socket", default, kept), ("shm,socket", 0, kept))
    for transports, keep_bytes, expected in (("socket", 0, freed), kinds[turn % 2]):
        transfers = shardwell.TransferOptions(transports=transports, keep_bytes=keep_bytes)
        with shardwell.join(cluster.address, run=uuid.uuid4().hex, transfers=transfers) as session:
            model = gpt()
            wrap_with(strategy)(model, session)
            optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
            counts = []
            for number in session.steps(3):
                for micro_batch in range(MICRO_BATCHES):
                    prepare_micro_batch(model, accumulation, micro_batch)
                    gpt_loss(model, 10 * number.number + micro_batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                counts.append((session.stats()["gather_count"], session.stats()["push_count"]))
        per_step = [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(counts)]
        assert per_step == [(expected, (LAYERS + 1) * pushes)] * 2
        # In the first step replicas are fetched twice: for this step and for the next.
        assert counts[0][0] == expected * (2 if strategy is NONE else 1)
