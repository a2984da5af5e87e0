"""Prefetch modes and limits: the order of gathers and pushes, memory, and gathers in flight."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from itertools import pairwise
from typing import Any

import pytest

from shardwell import BackwardPrefetch, ShardingStrategy
from shardwell_wire.model.layout import UnitLayout
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Pair, Sharded, gpt, gpt_loss, wrap_blocks
from tests.support.strategies import ROOT, commit, sharded_modules, step, wrap_with


def events_of_a_backward(**options: Any) -> list[str]:
    """Returns the events from the first gather in the third step's backward on."""
    pair = Pair(gpt(), wrap_blocks, **options)
    for number in range(3):
        pair.sharded.store.events.clear()
        pair.backward(gpt_loss, number)
        step(pair)
    events = pair.sharded.store.events
    pair.compare()
    return events[events.index("gather Block-2", events.index("gather Block-2") + 1) :][:6]


def test_backward_prefetch_modes_order_gathers_and_pushes() -> None:
    """PRE gathers before the computation, POST after the computation and before the push, NONE after the push."""
    block = Sharded(gpt(), wrap_blocks).unit_bytes()["Block-0"]
    pre, post, none = (
        events_of_a_backward(prefetch_bytes=block, backward_prefetch=mode)
        for mode in (BackwardPrefetch.PRE, BackwardPrefetch.POST, BackwardPrefetch.NONE)
    )
    second, first, zeroth = (f"Block-{number}" for number in (2, 1, 0))
    assert pre == [
        *(f"gather {second}", f"gather {first}", f"push {second}", f"gather {zeroth}"),
        *(f"push {first}", f"push {zeroth}"),
    ]
    assert post == [
        *(f"gather {second}", f"gather {first}", f"push {second}", f"gather {zeroth}", f"push {first}"),
        f"push {zeroth}",
    ]
    assert none == [
        *(f"gather {second}", f"push {second}", f"gather {first}", f"push {first}", f"gather {zeroth}"),
        f"push {zeroth}",
    ]


def test_backward_prefetch_post_holds_one_block_at_a_time() -> None:
    peaks = {}
    for mode in BackwardPrefetch:
        sharded = Sharded(gpt(), wrap_blocks, backward_prefetch=mode)
        gpt_loss(sharded.model, 0).backward()
        commit(sharded)
        for block in sharded_modules(sharded.model)[:-1]:
            block.set_modules_to_forward_prefetch([])
        gpt_loss(sharded.model, 1).backward()
        peaks[mode] = sharded.units.peak_bytes
    sizes = Sharded(gpt(), wrap_blocks).unit_bytes()
    assert peaks[BackwardPrefetch.POST] == peaks[BackwardPrefetch.NONE] == sizes[ROOT] + sizes["Block-0"]
    assert peaks[BackwardPrefetch.PRE] > peaks[BackwardPrefetch.POST]


class CountingStore(InMemoryStore):
    """Counts running gathers, from the call until the copy is complete."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self._count_lock = threading.Lock()
        super().__init__(num_threads=8)

    def gather(self, unit_index: int, target: memoryview, **options: Any) -> Future[int]:
        with self._count_lock:
            self.running += 1
            self.most = max(self.most, self.running)
        return super().gather(unit_index, target, **options)

    def _copy(self, unit_index: int, target: memoryview, layout: UnitLayout) -> int:
        version = super()._copy(unit_index, target, layout)
        with self._count_lock:
            self.running -= 1
        return version


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("strategy", [None, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("explicit", [False, True])
def test_gathers_in_flight_stay_below_the_limit(limit: int, strategy: ShardingStrategy | None, explicit: bool) -> None:
    store = CountingStore()
    pair = Pair(gpt(layers=6), wrap_with(strategy), store=store, max_gathers_in_flight=limit)
    if explicit:
        blocks: Any = pair.sharded.model.blocks
        for before, block in pairwise(blocks):
            before.set_modules_to_forward_prefetch(list(blocks))
            block.set_modules_to_backward_prefetch(list(blocks))
    for number in range(3):
        pair.backward(gpt_loss, number)
        step(pair)
    assert 1 <= store.most <= limit
    pair.compare()  # outside of training, no limit applies


def test_prefetch_without_a_gather_limit_uses_all_its_bytes() -> None:
    store = InMemoryStore()
    sharded = Sharded(gpt(layers=6), wrap_blocks, store=store)
    gpt_loss(sharded.model, 0).backward()
    commit(sharded)
    gathered: list[int] = []
    sharded.model.blocks[0].register_forward_pre_hook(lambda *_: gathered.append(len(store.events)))
    store.events.clear()
    gpt_loss(sharded.model, 1)
    assert gathered == [7]
