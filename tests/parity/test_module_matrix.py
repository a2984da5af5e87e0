"""Counts, order of events, and memory of sharded modules, as FSDP2's own tests assert them."""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.module.fully_shard import ShardedModule, fully_shard
from shardwell.module.residency import UnitState
from shardwell_wire.errors import UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import LAYERS, Pair, Sharded, gpt, gpt_loss, inputs, wrap_blocks, wrap_children

BLOCKS = [f"Block-{number}" for number in range(LAYERS)]


def backward(sharded: Sharded, number: int = 0) -> None:
    gpt_loss(sharded.model, number).backward()


# Counts.


@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_step_gathers_every_block_twice_and_the_root_once(recompute: bool | None, prefetch_bytes: int) -> None:
    """The backward of the root directly follows its forward and needs no second gather."""
    sharded = Sharded(gpt(recompute), wrap_blocks, prefetch_bytes=prefetch_bytes)
    for number in range(1, 4):
        backward(sharded)
        sharded.step()
        assert sharded.store.gathers == {**dict.fromkeys(BLOCKS, 2 * number), "Gpt-0": number}
        assert sharded.store.pushes == dict.fromkeys([*BLOCKS, "Gpt-0"], number)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [({}, (2, 1)), ({"blocks": False}, (1, 1)), ({"root": True}, (2, 2)), ({"root": False, "blocks": True}, (2, 1))],
)
def test_reshard_after_forward_decides_the_number_of_gathers(
    choice: dict[str, bool], expected: tuple[int, int]
) -> None:
    def wrap(model: Any, session: Any) -> None:
        for block in model.blocks:
            fully_shard(block, session, reshard_after_forward=choice.get("blocks"))
        fully_shard(model, session, reshard_after_forward=choice.get("root"))

    sharded = Sharded(gpt(), wrap, prefetch_bytes=0)
    backward(sharded)
    assert (sharded.store.gathers["Block-1"], sharded.store.gathers["Gpt-0"]) == expected
    assert sharded.units.live_bytes == 0


def test_set_reshard_after_forward_may_leave_out_children() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = sharded.model
    model.set_reshard_after_forward(True, recurse=False)
    backward(sharded)
    sharded.step()
    assert sharded.store.gathers == dict.fromkeys([*BLOCKS, "Gpt-0"], 2)
    model.set_reshard_after_forward(False)
    backward(sharded)
    assert sharded.store.gathers == dict.fromkeys([*BLOCKS, "Gpt-0"], 3)


def test_no_unit_is_kept_without_a_root() -> None:
    def wrap(model: Any, session: Any) -> None:
        for layer in model:
            fully_shard(layer, session)

    sharded = Sharded(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 3)), wrap, prefetch_bytes=0)
    loss = sharded.model(inputs(0, 2, 7)).sum()
    assert sharded.units.live_bytes == 0
    loss.backward()
    assert set(sharded.store.gathers.values()) == {2}


@pytest.mark.parametrize("keep_weights", [False, True])
@pytest.mark.parametrize("part", ["all", "root_only", "some_blocks"])
def test_gradient_accumulation_delays_pushes_and_keeps_weights(part: str, keep_weights: bool) -> None:
    micro_batches, steps = 3, 2
    pair = Pair(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = pair.sharded.model
    targets = {"all": [model], "root_only": [model], "some_blocks": list(model.blocks[:2])}[part]
    for step in range(steps):
        for micro_batch in range(micro_batches):
            is_last = micro_batch == micro_batches - 1
            for target in targets:
                target.set_requires_gradient_sync(is_last, recurse=part != "root_only")
                if keep_weights:
                    target.set_reshard_after_backward(is_last, recurse=part != "root_only")
            pair.backward(gpt_loss, 10 * step + micro_batch)
        pair.step()
    pushes, gathers = Counter(pair.sharded.store.pushes), Counter(pair.sharded.store.gathers)
    pair.compare()
    delayed = {"all": {*BLOCKS, "Gpt-0"}, "root_only": {"Gpt-0"}, "some_blocks": set(BLOCKS[:2])}[part]
    for name in [*BLOCKS, "Gpt-0"]:
        assert pushes[name] == steps * (1 if name in delayed else micro_batches)
        per_pass = 1 if name == "Gpt-0" else 2
        kept = steps * (1 + (per_pass - 1) * micro_batches)
        assert gathers[name] == (kept if keep_weights and name in delayed else steps * per_pass * micro_batches)


def test_manual_unshard_replaces_the_gather_of_the_forward() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = sharded.model
    for module in (model, *model.blocks):
        assert module.unshard() is None
    assert sharded.units.live_bytes == sum(sharded.unit_bytes().values())
    before = Counter(sharded.store.gathers)
    loss = gpt_loss(model, 0)
    assert sharded.store.gathers == before
    loss.backward()
    assert sharded.units.live_bytes == 0


def test_asynchronous_unshard_returns_a_handle() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    block: Any = sharded.model.blocks[0]
    handle = block.unshard(async_op=True)
    (unit,) = (unit for unit in sharded.units if unit.name == "Block-0")
    assert unit.state is UnitState.FETCHING
    handle.wait()
    assert unit.state is UnitState.UNSHARDED
    assert torch.equal(block.up.weight, gpt().blocks[0].up.weight)
    block.reshard()
    assert unit.state is UnitState.FREED and sharded.units.live_bytes == 0
    block.reshard()


def test_unshard_of_a_module_without_own_parameters_does_nothing() -> None:
    def wrap(model: Any, session: Any) -> None:
        wrap_children(model, session)

    sharded = Sharded(nn.Sequential(nn.Linear(7, 5), nn.ReLU()), wrap)
    model: Any = sharded.model
    assert model.unshard(async_op=True) is None and model.unshard() is None
    model.reshard()
    with pytest.raises(UsageError, match="no parameters of its own"):
        model.set_modules_to_forward_prefetch([model[0]])
    assert [unit.name for unit in sharded.units] == ["Linear-0"]


# Order of events.


def test_order_of_events_in_a_step_without_prefetch() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    backward(sharded)
    assert sharded.store.events == [
        *("gather Gpt-0", "gather Block-0", "gather Block-1", "gather Block-2"),
        *("gather Block-2", "push Block-2", "gather Block-1", "push Block-1", "gather Block-0"),
        *("push Block-0", "push Gpt-0"),
    ]


def test_prefetch_follows_the_order_of_the_previous_step() -> None:
    """The prefetch budget is one block."""
    block_bytes = Sharded(gpt(), wrap_blocks).unit_bytes()["Block-0"]
    sharded = Sharded(gpt(layers=4), wrap_blocks, prefetch_bytes=block_bytes)
    states: list[list[str]] = []

    def record(module: nn.Module, args: Any) -> None:
        states.append([unit.name for unit in sharded.units if unit.state is UnitState.FETCHING])

    backward(sharded)
    sharded.step()
    for block in sharded.model.blocks:
        block.up.register_forward_pre_hook(record)
    sharded.store.events.clear()
    backward(sharded)
    assert states == [["Block-1"], ["Block-2"], ["Block-3"], []]
    assert sharded.store.events == [
        *("gather Gpt-0", "gather Block-0", "gather Block-1", "gather Block-2", "gather Block-3"),
        *("gather Block-3", "gather Block-2", "push Block-3", "gather Block-1", "push Block-2", "gather Block-0"),
        *("push Block-1", "push Block-0", "push Gpt-0"),
    ]


def test_forward_only_loop_prefetches_every_unit() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=1 << 30)
    with torch.no_grad():
        gpt_loss(sharded.model, 0)
        sharded.store.events.clear()
        fetched_at: list[set[str]] = []
        sharded.model.blocks[0].register_forward_pre_hook(
            lambda module, args: fetched_at.append({event.split()[1] for event in sharded.store.events})
        )
        gpt_loss(sharded.model, 0)
    assert fetched_at == [{"Gpt-0", *BLOCKS}]


def test_explicit_prefetch_lists_override_the_budget() -> None:
    """Each block prefetches the next two although the budget is zero."""
    pair = Pair(gpt(layers=4), wrap_blocks, prefetch_bytes=0)
    blocks: Any = pair.sharded.model.blocks
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
        block.set_modules_to_backward_prefetch([blocks[before] for before in (at - 1, at - 2) if before >= 0])
    pair.backward(gpt_loss, 0)
    names = [f"Block-{number}" for number in range(4)]
    gathers = [event.removeprefix("gather ") for event in pair.sharded.store.events if event.startswith("gather")]
    assert gathers == ["Gpt-0", *names, *reversed(names)]
    before_first_push = pair.sharded.store.events.index("push Block-3")
    assert pair.sharded.store.events[:before_first_push].count("gather Block-1") == 2
    pair.step()
    pair.train(gpt_loss)


def test_empty_prefetch_list_turns_prefetch_off() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    for module in sharded.model.modules():
        if isinstance(module, ShardedModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])
    for _ in range(2):
        sharded.store.events.clear()
        backward(sharded)
        sharded.step()
    assert sharded.store.events[:2] == ["gather Gpt-0", "gather Block-0"]
    assert sharded.store.events.index("push Block-2") < len(sharded.store.events) - 5


def test_forward_order_is_the_order_of_first_use() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    by_name = {unit.name: unit.index for unit in sharded.units}
    for _ in range(2):
        backward(sharded)
        assert sharded.units.forward_order() == [by_name[name] for name in ("Gpt-0", *BLOCKS)]
        sharded.step()
    assert sharded.units.forward_order() == [by_name[name] for name in ("Gpt-0", *BLOCKS)]
    sharded.model.blocks[1](inputs(0, 1, 2, 20))
    assert sharded.units.forward_order() == [by_name["Block-1"]]
    sharded.units.invalidate()
    sharded.model.blocks[2](inputs(0, 1, 2, 20))
    assert sharded.units.forward_order() == [by_name["Block-2"]]


def test_prefetched_unit_stays_gathered_until_the_last_backward() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    model: Any = sharded.model
    other = fully_shard(nn.Linear(3, 3), sharded.session)
    for is_last in (False, True):
        model.set_is_last_backward(is_last)
        other.unshard(async_op=True)
        backward(sharded)
        assert (sharded.units.live_bytes > 0) is not is_last


# Races.


@pytest.mark.parametrize("recompute", [None, True])
def test_random_delays_before_gathers_change_no_bit(recompute: bool | None) -> None:
    rng = random.Random(0)
    store = InMemoryStore(before_gather=lambda unit: time.sleep(rng.random() * 0.01), num_threads=4)
    Pair(gpt(recompute), wrap_blocks, store=store).train(gpt_loss)


def test_next_step_gathers_the_updated_weights() -> None:
    """Units that were gathered before the step must not be used after the step."""
    pair = Pair(gpt(), wrap_blocks)
    for number in range(4):
        pair.backward(gpt_loss, number)
        pair.sharded.model.blocks[1].unshard(async_op=True)
        pair.sharded.model.blocks[2].unshard()
        pair.step()
    pair.compare()


# Memory.


def test_peak_memory_is_the_root_and_one_block() -> None:
    sharded = Sharded(gpt(layers=12), wrap_blocks, prefetch_bytes=0)
    sizes = sharded.unit_bytes()
    start = sharded.units.peak_bytes
    assert start == max(sizes.values())
    for _ in range(2):
        backward(sharded)
        assert sharded.units.live_bytes == 0
        sharded.step()
    assert sharded.units.peak_bytes == sizes["Gpt-0"] + sizes["Block-0"]


@pytest.mark.parametrize("recompute", [None, False, True])
def test_peak_memory_with_prefetch_is_bounded_by_the_budget(recompute: bool | None) -> None:
    block_bytes = Sharded(gpt(), wrap_blocks).unit_bytes()["Block-0"]
    sharded = Sharded(gpt(recompute, layers=12), wrap_blocks, prefetch_bytes=2 * block_bytes)
    for _ in range(3):
        backward(sharded)
        sharded.step()
    assert sharded.units.peak_bytes <= sharded.unit_bytes()["Gpt-0"] + 3 * block_bytes


def test_freed_unit_frees_the_weights_that_autograd_saved() -> None:
    """The graph holds views of the freed memory."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    sharded = Sharded(gpt(), wrap_blocks)
    block = sharded.model.blocks[1]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = gpt_loss(sharded.model, 0)
    shapes = {tuple(block.up.weight.shape), tuple(block.up.weight.shape)[::-1]}
    of_weight = [tensor for tensor in saved if tuple(tensor.shape) in shapes]
    assert len(of_weight) >= LAYERS
    assert all(tensor.isnan().all() for tensor in of_weight)
    assert sharded.units.live_bytes == sharded.unit_bytes()["Gpt-0"]  # the root is kept
    loss.backward()


def test_parameters_start_at_multiples_of_64_bytes() -> None:
    sharded = Sharded(gpt(), wrap_blocks)
    block: Any = sharded.model.blocks[0]
    block.unshard()
    assert {parameter.data_ptr() % 64 for parameter in block.parameters()} == {0}
    block.reshard()
