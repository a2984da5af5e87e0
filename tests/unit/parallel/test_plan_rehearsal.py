"""The rehearsal of a plan gathers and holds the same units as a sharded model in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardwell import (
    BackwardPrefetch,
    CustomPolicy,
    MemoryOptions,
    ModuleTypePolicy,
    ShardingStrategy,
    SizePolicy,
    World,
    auto_wrap,
)
from shardwell.memory.buffers import VectorMemory
from shardwell.planning.dry_run import DryRun, dry_run
from shardwell.planning.plan_model import DivisionOptions, PlanOptions, divide, load
from tests.support.module_parity import LENGTH, VOCABULARY, Block, Sharded, gpt, gpt_loss
from tests.support.strategies import commit

FULL, GRAD_OP, REPLICA, _ = ShardingStrategy


def vocabulary_unit(module: nn.Module) -> bool | str:
    """Puts the embeddings and the tied head into one unit, which both ends of the model use."""
    if isinstance(module, nn.Embedding) or getattr(module, "out_features", None) == VOCABULARY:
        return "vocabulary"
    return isinstance(module, Block)


POLICIES = {
    "blocks": ModuleTypePolicy({Block}),
    "nested": ModuleTypePolicy({Block, nn.LayerNorm}),
    "grouped": CustomPolicy(vocabulary_unit),
    "uneven": SizePolicy(min_num_params=1000),
}
NUM_STEPS = 4


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Records the bytes of weights and idle buffers whenever weights are gathered or freed."""
    seen: list[int] = []
    add = VectorMemory.add

    def recording(memory: VectorMemory, size_bytes: int) -> None:
        add(memory, size_bytes)
        seen.append(memory.live_bytes + memory.pool.idle_bytes)

    monkeypatch.setattr(VectorMemory, "add", recording)
    return seen


def make() -> nn.Module:
    return gpt()


def make_with_example() -> tuple[nn.Module, torch.Tensor]:
    return gpt(), torch.zeros(2, LENGTH, dtype=torch.int64)


def rehearse(options: PlanOptions, policy: Any, make: Any = make) -> DryRun:
    """Takes the steps of a plan."""
    return dry_run(divide(load(make, batch=2, length=LENGTH), World(), DivisionOptions()), 0, options, policy)


def gathers_of(run: DryRun) -> dict[str, int]:
    return {unit.name: run.gathers[unit.index] for unit in run.units}


def check(policy: Any, options: PlanOptions, totals: list[int]) -> None:
    """Trains a model, and compares the rehearsal with its last step's gathers and its peaks."""

    def wrap(model: nn.Module, session: Any) -> None:
        of_units = {"strategy": options.strategy, "reshard_after_forward": options.reshard_after_forward}
        memory = MemoryOptions(checkpoint_activations=options.checkpoint_activations)
        auto_wrap(model, session, policy, memory=memory, **of_units)

    names = ("prefetch_bytes", "keep_bytes", "backward_prefetch")
    sharded = Sharded(gpt(), wrap, **{name: getattr(options, name) for name in names})
    totals.clear()
    gathers: dict[str, int] = {}
    for number in range(NUM_STEPS):
        before = sharded.store.gathers.copy()
        gpt_loss(sharded.model, number).backward()
        commit(sharded)
        gathers = dict(sharded.store.gathers - before)
    most = max(totals)
    for example in (make, make_with_example):
        got = rehearse(options, policy, example)
        assert gathers_of(got) == gathers
        assert got.weights_bytes == sharded.units.peak_bytes
        assert got.weights_bytes + got.idle_bytes == most


@pytest.mark.parametrize("keep_bytes", [0, 45_000, None])
@pytest.mark.parametrize("prefetch_bytes", [0, 25_000, 1 << 30])
@pytest.mark.parametrize("strategy", [None, GRAD_OP, REPLICA])
@pytest.mark.parametrize("policy", POLICIES)
def test_rehearsal_matches_training_for_strategies_and_limits(
    policy: str, strategy: ShardingStrategy | None, prefetch_bytes: int, keep_bytes: int | None, totals: list[int]
) -> None:
    options = PlanOptions(strategy=strategy, prefetch_bytes=prefetch_bytes, keep_bytes=keep_bytes)
    check(POLICIES[policy], options, totals)


@pytest.mark.parametrize("mode", BackwardPrefetch)
@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_rehearsal_matches_training_for_resharding_and_prefetch(
    policy: str, reshard: bool | None, mode: BackwardPrefetch, totals: list[int]
) -> None:
    check(POLICIES[policy], PlanOptions(reshard_after_forward=reshard, backward_prefetch=mode), totals)


@pytest.mark.parametrize("reshard", [None, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_rehearsal_matches_training_with_recomputation(policy: str, reshard: bool | None, totals: list[int]) -> None:
    options = PlanOptions(checkpoint_activations=True, reshard_after_forward=reshard, prefetch_bytes=0)
    check(POLICIES[policy], options, totals)


def test_units_read_in_place_take_no_memory() -> None:
    units = list(rehearse(PlanOptions(), POLICIES["blocks"]).units)
    everything = rehearse(PlanOptions(same_host=True), POLICIES["blocks"])
    assert everything.weights_bytes == everything.idle_bytes == 0
    assert set(gathers_of(everything).values()) == {1}
    cache = {"host_cache_bytes": units[0].size_bytes}
    block = rehearse(PlanOptions(prefetch_bytes=0, keep_bytes=0, **cache), POLICIES["blocks"])
    whole = rehearse(PlanOptions(prefetch_bytes=0, keep_bytes=0), POLICIES["blocks"])
    assert gathers_of(block) == {**gathers_of(whole), "blocks.0": 1} and gathers_of(whole)["blocks.0"] == 2
    assert block.weights_bytes == whole.weights_bytes == units[1].size_bytes + units[-1].size_bytes


def test_rehearsal_reports_prefetched_and_kept_bytes() -> None:
    block = next(iter(rehearse(PlanOptions(), POLICIES["blocks"]).units)).size_bytes
    found = rehearse(PlanOptions(prefetch_bytes=2 * block, keep_bytes=block), POLICIES["blocks"])
    assert (found.ahead_bytes, found.kept_bytes) == (2 * block, block)
    neither = rehearse(PlanOptions(prefetch_bytes=0, keep_bytes=0), POLICIES["blocks"])
    assert neither.ahead_bytes == neither.kept_bytes == 0
