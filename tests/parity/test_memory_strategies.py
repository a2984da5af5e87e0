"""Memory strategies: BASIC and STANDARD change no bit, the others round only on the wire."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import (
    BackwardPrefetch,
    MemoryOptions,
    MemoryStrategy,
    ModuleTypePolicy,
    ShardingStrategy,
    UsageError,
    auto_wrap,
)
from tests.support.cluster import join_options
from tests.support.module_parity import LAYERS, WIDTH, Block, Pair, gpt, gpt_loss, inputs
from tests.support.strategies import commit, step

POLICY = ModuleTypePolicy({Block})
EXACT: dict[str, Any] = {"gather_dtype": None, "push_dtype": None, "offload_min_bytes": 1}
NUM_STEPS = 3


def wrap_for(memory: MemoryStrategy | MemoryOptions, **options: Any) -> Any:
    return lambda model, session: auto_wrap(model, session, POLICY, memory=memory, **options)


def exact(strategy: MemoryStrategy, directory: Path) -> MemoryOptions:
    """Returns the options of a strategy without rounding, and with a directory of the test instead of the disk."""
    options = strategy.options(**EXACT)
    return options if options.offload_to != "disk" else strategy.options(**EXACT, offload_to=directory)


def count_forwards(model: Any) -> list[int]:
    """Returns a list that gets an item whenever the first block computes."""
    calls: list[int] = []
    model.blocks[0].up.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("strategy", MemoryStrategy)
def test_every_strategy_without_rounding_gives_the_same_bits(strategy: MemoryStrategy, tmp_path: Path) -> None:
    pair = Pair(gpt(), wrap_for(exact(strategy, tmp_path)))
    calls = count_forwards(pair.sharded.model)
    for number in range(NUM_STEPS):
        pair.backward(gpt_loss, number)
        step(pair)
    pair.compare()
    assert len(calls) == NUM_STEPS * (1 if strategy is MemoryStrategy.BASIC else 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("strategy", "of_block", "of_root"),
    [
        (MemoryStrategy.BASIC, 1, 1),
        (MemoryStrategy.STANDARD, 2, 1),
        (MemoryStrategy.AGGRESSIVE, 2, 2),
        (MemoryStrategy.EXTREME, 2, 2),
    ],
)
def test_number_of_gathers_per_step(strategy: MemoryStrategy, of_block: int, of_root: int, tmp_path: Path) -> None:
    pair = Pair(gpt(), wrap_for(exact(strategy, tmp_path)))
    sharded = pair.sharded
    for number in range(1, 3):
        gpt_loss(sharded.model, number).backward()
        commit(sharded)
        blocks = {f"blocks.{position}": number * of_block for position in range(LAYERS)}
        assert sharded.store.gathers == {**blocks, "Gpt": number * of_root}


def test_extreme_sets_limits_strategy_and_offload(tmp_path: Path) -> None:
    sharded = Pair(gpt(), wrap_for(exact(MemoryStrategy.EXTREME, tmp_path))).sharded
    assert sharded.units.policy.keep_bytes == sharded.units.policy.prefetch_bytes == 0
    assert sharded.units.policy.backward_prefetch is BackwardPrefetch.NONE
    assert {unit.settings.strategy for unit in sharded.units} == {ShardingStrategy.FULL_SHARD}
    gpt_loss(sharded.model, 0).backward()
    moved = [block.forward._wrapper.__self__.moved_bytes for block in sharded.model.blocks]  # type: ignore[union-attr]
    assert moved == [2 * 7 * WIDTH * 4] * LAYERS, "the input of each block"


def test_options_and_arguments_override_the_strategy() -> None:
    options = MemoryStrategy.STANDARD.options(
        checkpoint_activations=False, strategy=ShardingStrategy.NO_SHARD, prefetch_bytes=17
    )
    assert options == MemoryOptions(strategy=ShardingStrategy.NO_SHARD, prefetch_bytes=17)
    pair = Pair(gpt(), wrap_for(options, strategy=ShardingStrategy.SHARD_GRAD_OP))
    assert {unit.settings.strategy for unit in pair.sharded.units} == {ShardingStrategy.SHARD_GRAD_OP}
    calls = count_forwards(pair.sharded.model)
    pair.train(gpt_loss, steps=2)
    assert len(calls) == 2
    kept = Pair(gpt(), wrap_for(MemoryStrategy.STANDARD, reshard_after_forward=False)).sharded
    assert {unit.settings.reshard_after_forward for unit in kept.units} == {False}


@pytest.mark.parametrize("strategy", MemoryStrategy)
def test_recomputed_attention_gets_one_tensor_as_query_key_and_value(strategy: MemoryStrategy, tmp_path: Path) -> None:
    """Attention takes another path for three different tensors. Also covers keywords and a mask that is None."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x, x, x, need_weights=False)[0]
            attended: torch.Tensor = self.second(x, key=x, value=x, attn_mask=None, need_weights=False)[0]
            return attended

    def wrap(model: nn.Module, session: Any) -> None:
        auto_wrap(model, session, ModuleTypePolicy({nn.MultiheadAttention}), memory=exact(strategy, tmp_path))

    torch.manual_seed(0)
    pair = Pair(Model(), wrap)
    pair.train(lambda model, number: model(inputs(number, 3, 5, 8)).square().sum())


def test_batch_normalisation_is_not_recomputed() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(9, 9), nn.BatchNorm1d(9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed: torch.Tensor = self.norm(self.linear(x))
            return normed.relu()

    def wrap(model: nn.Module, session: Any) -> None:
        auto_wrap(model, session, ModuleTypePolicy({Normed}), memory=MemoryStrategy.STANDARD)

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(Normed(), Normed(), nn.Linear(9, 1)), wrap)
    pair.train(lambda model, number: model(inputs(number, 6, 9)).sum())


def test_only_the_outermost_units_below_the_root_are_recomputed() -> None:
    calls: list[str] = []

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append("inner")
            return super().forward(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = Inner(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.own(self.inner(x).tanh())
            return result

    def wrap(model: nn.Module, session: Any) -> None:
        auto_wrap(model, session, ModuleTypePolicy({Outer, Inner}), memory=MemoryStrategy.STANDARD)

    torch.manual_seed(0)
    pair = Pair(nn.Sequential(Outer(), Outer(), nn.Linear(5, 1)), wrap)
    pair.train(lambda model, number: model(inputs(number, 3, 5)).sum(), steps=2)
    assert calls.count("inner") == 2 * 2 * (1 + 2), "once in the plain model, twice in the sharded one"


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match=r"MemoryStrategy\.STANDARD\.options: .*checkpointing"):
        MemoryStrategy.STANDARD.options(checkpointing=True)
    with pytest.raises(UsageError, match="memory='STANDARD': expected a MemoryStrategy"):
        Pair(gpt(), wrap_for("STANDARD"))  # type: ignore[arg-type]


# On servers.


def train_on(cluster: shardwell.LocalCluster, memory: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    with shardwell.join(
        cluster.address, run=uuid.uuid4().hex, **join_options(transports="socket", **options)
    ) as session:
        model = gpt()
        auto_wrap(model, session, POLICY, memory=memory)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        for number in session.steps(NUM_STEPS):
            torch.manual_seed(number.number)
            gpt_loss(model, number.number).backward()
            optimizer.step()
            optimizer.zero_grad()
        return shardwell.full_state_dict(model), session.stats()


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    for number in range(NUM_STEPS):
        torch.manual_seed(number)
        gpt_loss(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("strategy", MemoryStrategy)
def test_strategies_on_servers_round_only_on_the_wire(
    cluster: shardwell.LocalCluster, plain: dict[str, torch.Tensor], strategy: MemoryStrategy, tmp_path: Path
) -> None:
    rounds = strategy in (MemoryStrategy.AGGRESSIVE, MemoryStrategy.EXTREME)
    memory = strategy.options(offload_to=tmp_path, offload_min_bytes=1) if rounds else strategy
    state, stats = train_on(cluster, memory)
    assert equal(state, plain) is not rounds
    for name, value in plain.items():
        torch.testing.assert_close(state[name], value, rtol=0.1, atol=0.05)
    if rounds:
        same, _ = train_on(cluster, None, gather_dtype="bfloat16", push_dtype="bfloat16")
        assert equal(state, same), "only the wire rounds"
        assert equal(train_on(cluster, strategy.options(**EXACT, offload_to=tmp_path))[0], plain)
        assert stats["sent_bytes"] < stats["pushed_bytes"] * 0.6


def test_wire_dtypes_cannot_change_after_the_first_unit(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        auto_wrap(gpt(), session, POLICY, memory=MemoryStrategy.STANDARD)
        with pytest.raises(UsageError, match="can not be set once a session has units"):
            auto_wrap(gpt(), session, POLICY, memory=MemoryStrategy.AGGRESSIVE)
        with pytest.raises(UsageError, match="gather_dtype='float4'"):
            session.store.set_wire_dtypes("float4", None)
