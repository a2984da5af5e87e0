"""Steps of a ``Pair`` whose replicas keep their memory between steps."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from shardwell import ReplicaOptions, ShardingStrategy
from shardwell.module.fully_shard import fully_shard
from tests.support.module_parity import LAYERS, Pair, Sharded

BLOCKS = [f"Block-{number}" for number in range(LAYERS)]
ROOT = "Gpt-0"


def wrap_with(strategy: ShardingStrategy | None, replica: ReplicaOptions | None = None) -> Any:
    """Returns a function that makes a unit with this strategy for every block, and one for the rest."""

    def wrap(model: Any, session: Any) -> None:
        for block in model.blocks:
            fully_shard(block, session, strategy=strategy, replica=replica)
        fully_shard(model, session, strategy=strategy, replica=replica)

    return wrap


def commit(sharded: Sharded) -> None:
    """Does the work of ``optimizer.step()`` and ``optimizer.zero_grad()`` in a plain loop with one rank."""
    sharded.units.finish_item()
    sharded.store.step()
    sharded.units.invalidate()
    sharded.units.passes.begin_step()
    sharded.units.zero_grad()


def step(pair: Pair) -> None:
    """Takes one optimizer step of both models."""
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    commit(pair.sharded)


def difference(counter: Counter[str], before: Counter[str]) -> dict[str, int]:
    """Returns the counts since ``before``."""
    return dict(counter - before)


def unit_of(sharded: Sharded, name: str) -> Any:
    """Returns a unit by its name."""
    return next(unit for unit in sharded.units if unit.name == name)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Returns the blocks and the model."""
    blocks: Any = model.blocks
    return [*blocks, model]
