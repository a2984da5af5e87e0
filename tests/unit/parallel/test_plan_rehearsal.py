"""The rehearsal of a plan gathers and holds the same units as a sharded model in training."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardwell import (
    BackwardPrefetch,
    CustomPolicy,
    MemoryOptions,
    ModuleTypePolicy,
    ShardingStrategy,
    SizePolicy,
    auto_wrap,
)
from shardwell.module.flat_vector import VectorMemory
from shardwell.planning.options import PlanOptions
from shardwell.planning.plan_model import plan_units
from shardwell.planning.rehearsal import rehearse
from tests.support.module_parity import VOCABULARY, Block, Sharded, gpt, gpt_loss
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
    got = rehearse(plan_units(gpt(), policy), options)
    assert dict(got.gathers) == gathers
    assert got.peak_bytes == sharded.units.peak_bytes
    assert got.peak_bytes + got.idle_bytes == most


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
    units = plan_units(gpt(), POLICIES["blocks"])
    everything = rehearse(units, PlanOptions(), {unit.name for unit in units})
    assert everything.peak_bytes == everything.idle_bytes == 0
    assert set(everything.gathers.values()) == {1}
    block = rehearse(units, PlanOptions(prefetch_bytes=0, keep_bytes=0), {"blocks.0"})
    whole = rehearse(units, PlanOptions(prefetch_bytes=0, keep_bytes=0))
    assert block.gathers == {**whole.gathers, "blocks.0": 1} and whole.gathers["blocks.0"] == 2
    assert block.peak_bytes == whole.peak_bytes == units[1].size_bytes + units[-1].size_bytes


def test_rehearsal_reports_prefetched_and_kept_bytes() -> None:
    units = plan_units(gpt(), POLICIES["blocks"])
    block = units[0].size_bytes
    found = rehearse(units, PlanOptions(prefetch_bytes=2 * block, keep_bytes=block))
    assert (found.ahead_bytes, found.kept_bytes) == (2 * block, block)
    neither = rehearse(units, PlanOptions(prefetch_bytes=0, keep_bytes=0))
    assert neither.ahead_bytes == neither.kept_bytes == 0
