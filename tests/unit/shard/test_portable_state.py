"""The committed state of shards: exported, cut anew, imported, and trained on with the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from shardwell_server import optimizer_checks
from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.partitions import TrainerState
from shardwell_server.shard.unit.portable_state import (
    PartState,
    ShardState,
    begin_import,
    export,
    finish_import,
)
from shardwell_server.shard.unit.unit_shard import StepUpdate, UnitShard
from shardwell_wire.errors import InvalidRequestError, StepStateError
from shardwell_wire.model.layout import BLOCK_BYTES, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.model.optimizers import KEPT_GROUP, OPTIMIZERS
from shardwell_wire.model.topology import part_in
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.cut_states import fill, import_state, merge, restrict
from tests.unit.shard_arithmetic.test_optimizers import SETTINGS

PARAMETERS = (
    Parameter("matrix", (61, 101), "float32"),
    Parameter("rare", (5003,), "float32"),
    Parameter("scalar", (), "float32"),
    Parameter("empty", (0, 3), "float32"),
    Parameter("half", (4099,), "bfloat16"),
    Parameter("double", (1031,), "float64"),
)
MATRICES = (
    Parameter("one", (61, 101), "float32"),
    Parameter("rare", (83, 17), "float32"),
    Parameter("two", (31, 64), "float32"),
)
RARE = 1
"""Index of a parameter that has a gradient in odd steps only."""


def layout_for(algorithm: str) -> UnitLayout:
    if OPTIMIZERS[algorithm].needs_whole_tensors:
        return UnitLayout("u", MATRICES, placement="tensor")
    return UnitLayout("u", PARAMETERS)


def cuts_of(layout: UnitLayout, count: int) -> list[int]:
    """Bounds of ``count`` shards of different sizes."""
    if layout.placement == "tensor":
        return [0, *layout.starts[1:count], layout.size_bytes]
    blocks = layout.size_bytes // BLOCK_BYTES
    return [0, *(BLOCK_BYTES * (1 + number * blocks // count) for number in range(1, count)), layout.size_bytes]


class Shards:
    """The shards of one unit, which train in memory."""

    def __init__(self, layout: UnitLayout, count: int, dp: int = 2) -> None:
        self.layout, self.dp = layout, dp
        self.memory = Memory(1 << 30)
        self.shards = []
        for start, stop in pairwise(cuts_of(layout, count)):
            spec = ShardSpec(
                run=RunIdentity("r", "id"), layout=layout, index=0, start_bytes=start, stop_bytes=stop, dp=dp
            )
            self.memory.reserve(spec.memory_key, spec.size_bytes, dp)
            self.shards.append(UnitShard(spec, self.memory))

    def import_from(self, states: Sequence[ShardState], version: int) -> Shards:
        whole = merge(states)
        for shard in self.shards:
            import_state(shard, restrict(whole, shard.start_bytes, shard.stop_bytes), version)
        return self

    def initial(self) -> Shards:
        return self.import_from([initial_state(self.layout, self.dp)], 0)

    def export(self) -> list[ShardState]:
        return [export(shard) for shard in self.shards]

    def train(self, step: int, optimizer: common_pb2.OptimizerStep, groups: Sequence[int]) -> None:
        gradients = gradients_of(self.layout, step)
        for shard in self.shards:
            for rank in range(self.dp) if KEPT_GROUP in groups else ():
                self._contribute(shard, rank, gradients)
            cut = [
                None
                if (whole := gradients[segment.parameter_index]) is None
                else whole.view(-1)[segment.start_element : segment.stop_element].clone()
                for segment in shard.segments
            ]
            shard.gradient.mean.reduced = Reduced(cut, None, [])
            key = optimizer_checks.allocation_key(optimizer)
            asyncio.run(shard.update(StepUpdate(step, optimizer, {shard.index: groups}, key, 0.5)))

    def _contribute(self, shard: UnitShard, rank: int, gradients: Sequence[torch.Tensor | None]) -> None:
        buffer = torch.zeros(shard.size_bytes, dtype=torch.uint8)
        views = shard.views(buffer)
        present = set()
        for number, segment in enumerate(shard.segments):
            if (whole := gradients[segment.parameter_index]) is not None:
                views[number].copy_(whole.view(-1)[segment.start_element : segment.stop_element] * (rank + 1))
                present.add(number)
        shard.gradient.contributions.add(rank, Contribution(1, 0, buffer, views, lambda: None, present))


def initial_state(layout: UnitLayout, dp: int) -> ShardState:
    generator = torch.Generator().manual_seed(1)
    parts = [
        PartState(
            parameter_index=index,
            start_element=0,
            stop_element=parameter.numel,
            values=torch.randn(parameter.numel, generator=generator).to(getattr(torch, parameter.dtype)),
        )
        for index, parameter in enumerate(layout.parameters)
        if parameter.numel
    ]
    return ShardState(layout=layout, start_bytes=0, stop_bytes=layout.size_bytes, dp=dp, parts=parts)


def gradients_of(layout: UnitLayout, step: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    drawn = [
        torch.randn(parameter.shape, generator=generator).to(getattr(torch, parameter.dtype))
        for parameter in layout.parameters
    ]
    return [None if index == RARE and step % 2 == 0 else gradient for index, gradient in enumerate(drawn)]


def optimizer_step(algorithm: str, layout: UnitLayout, *, averaged: bool) -> common_pb2.OptimizerStep:
    optimizer = common_pb2.OptimizerStep(
        algorithm=algorithm,
        groups=[common_pb2.ParameterGroup(hyperparameters=SETTINGS[algorithm])],
        units=[common_pb2.UnitGroups(unit_index=0, group_indices=[0] * len(layout.parameters))],
    )
    if averaged:
        optimizer.ema_decay = 0.9
    return optimizer


def content(states: Sequence[ShardState]) -> dict[str, list[float]]:
    whole = merge(states)
    found = {name: tensor.reshape(-1).view(torch.uint8).tolist() for name, tensor in whole.tensors()}
    found["counts"] = [part.step_count for part in whole.parts]
    found["names"] = [part.algorithm for part in whole.parts]  # type: ignore[misc]
    found["begun"] = [whole.averages_begun]
    return found


@pytest.mark.parametrize("moved_at", [0, 1, 2, 3])
@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_training_continues_with_the_same_bits_on_other_shards(algorithm: str, moved_at: int) -> None:
    layout = layout_for(algorithm)
    groups = [0] * len(layout.parameters)
    straight, moving = Shards(layout, 1).initial(), Shards(layout, 2).initial()
    for step in range(5):
        if step == moved_at:
            moving = Shards(layout, 3).import_from(moving.export(), step)
        # Averages begin after the first step, so that parts with and without an average are moved.
        optimizer = optimizer_step(algorithm, layout, averaged=step >= 2)
        straight.train(step, optimizer, groups)
        moving.train(step, optimizer, groups)
    assert content(moving.export()) == content(straight.export())
    rare = merge(moving.export()).parts[RARE]
    assert rare.step_count == 2


def test_absent_state_stays_absent() -> None:
    layout = layout_for("sgd")
    trained = Shards(layout, 2).initial()
    trained.train(0, optimizer_step("sgd", layout, averaged=False), [0] * len(layout.parameters))
    moved = Shards(layout, 3).import_from(trained.export(), 1)
    whole = merge(moved.export())
    assert whole.parts[RARE].state == {} and whole.parts[RARE].algorithm is None
    assert set(whole.parts[0].state) == {"momentum_buffer"}
    assert not whole.averages_begun and whole.parts[0].average is None


def test_kept_gradients_and_a_changed_algorithm_move() -> None:
    layout = layout_for("adam")
    first = [KEPT_GROUP if index == RARE else 0 for index in range(len(layout.parameters))]
    second = [0 if index == RARE else KEPT_GROUP for index in range(len(layout.parameters))]
    plan = [("adam", first), ("sgd", second), ("adam", first), ("lion", first), ("adam", first), ("sgd", second)]
    results = []
    for moves in (False, True):
        shards = Shards(layout, 2).initial()
        for number, (algorithm, groups) in enumerate(plan):
            # Odd steps have every gradient.
            shards.train(number, optimizer_step(algorithm, layout, averaged=False), groups)
            if moves:
                shards = Shards(layout, 3 - number % 2).import_from(shards.export(), number + 1)
        results.append(content(shards.export()))
    assert results[0] == results[1]
    assert any("kept_gradient.1" in name for name in results[0])


def test_moved_memory_is_in_the_budget() -> None:
    layout = layout_for("adam")
    trained = Shards(layout, 1).initial()
    for step in range(2):
        trained.train(step, optimizer_step("adam", layout, averaged=True), [0] * len(layout.parameters))
    moved = Shards(layout, 1).import_from(trained.export(), 2)
    (before,), (after,) = trained.shards, moved.shards
    assert after.optimizer_bytes == before.optimizer_bytes > 0
    assert moved.memory.reserved_bytes == trained.memory.reserved_bytes
    assert moved.memory.used_bytes == trained.memory.used_bytes


def test_a_description_on_the_meta_device_is_filled_by_the_caller() -> None:
    layout = layout_for("adamw")
    trained = Shards(layout, 1).initial()
    trained.train(0, optimizer_step("adamw", layout, averaged=True), [0] * len(layout.parameters))
    (state,) = trained.export()

    def meta(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="meta")

    described = replace(
        state,
        parts=[
            replace(
                part,
                values=meta(part.values),
                state={name: meta(tensor) for name, tensor in part.state.items()},
                average=None if part.average is None else meta(part.average),
            )
            for part in state.parts
        ],
    )
    (shard,) = Shards(layout, 1).shards
    destination = begin_import(shard, described)
    assert shard.version is None
    fill(destination, state)
    finish_import(shard, 1)
    assert content([export(shard)]) == content([state])
    with pytest.raises(StepStateError):
        begin_import(shard, state)


def test_states_that_do_not_fit_are_rejected() -> None:
    layout = layout_for("adam")
    trained = Shards(layout, 2).initial()
    with pytest.raises(StepStateError):
        export(Shards(layout, 1).shards[0])
    for step in range(2):
        trained.train(step, optimizer_step("adam", layout, averaged=False), [0] * len(layout.parameters))
    first, _ = trained.export()
    with pytest.raises(InvalidRequestError, match="does not fit"):
        import_state(Shards(layout, 1).shards[0], first, 1)


def trainer_states(layout: UnitLayout, dp: int, start: int, stop: int) -> list[TrainerState]:
    """State of an optimizer on the trainers that depends on the element only, and a count."""
    states = []
    for rank in range(dp):
        low, high = part_in(layout.size_bytes, dp, rank, start, stop)
        tensors, data = [], []
        for segment in layout.segments(low, high):
            count = segment.stop_element - segment.start_element
            moment = torch.arange(segment.start_element, segment.stop_element, dtype=torch.float32)
            index = segment.parameter_index
            tensors.append(
                shard_pb2.StateTensor(
                    parameter_index=index, name="moment", dtype=common_pb2.DTYPE_FLOAT32, shape=[count]
                )
            )
            data.append(moment.view(torch.uint8))
            tensors.append(
                shard_pb2.StateTensor(parameter_index=index, name="k", dtype=common_pb2.DTYPE_INT64, is_number=True)
            )
            data.append(torch.tensor([5], dtype=torch.int64).view(torch.uint8))
        if low < high:
            states.append(TrainerState(dp_rank=rank, start_bytes=low, stop_bytes=high, tensors=tensors, data=data))
    return states


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_state_of_trainers_is_imported_and_exported(dp: int) -> None:
    layout = layout_for("adam")
    whole = initial_state(layout, dp)
    for shard in Shards(layout, 3, dp).shards:
        expected = trainer_states(layout, dp, shard.start_bytes, shard.stop_bytes)
        import_state(shard, replace(restrict(whole, shard.start_bytes, shard.stop_bytes), partitions=expected), 4)
        assert shard.version == 4
        found = export(shard)
        assert [state.dp_rank for state in found.partitions] == [state.dp_rank for state in expected]
        for state, wanted in zip(found.partitions, expected, strict=True):
            assert list(state.tensors) == list(wanted.tensors)
            assert all(map(torch.equal, state.data, wanted.data))
