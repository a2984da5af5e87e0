"""Buffers on a trainer: values at the start of an item, pushed values, and values after a commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import nn

from shardwell.module.new_units import GridPlace
from shardwell.module.parameter_store import InitialValues
from shardwell.step.step_state import WorkItemState
from shardwell.store.module_buffers import RunBuffers
from shardwell_wire.errors import UsageError, VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2


class Store:
    """Stores a run's buffers in this process, for one or several trainers."""

    def __init__(self) -> None:
        self.layouts: list[UnitLayout] = []
        self.values: dict[tuple[int, int], bytes] = {}
        self.pushed: dict[tuple[int, int], bytes] = {}
        self.reads: list[list[int]] = []
        self.state = coordinator_pb2.RunState()
        self.version = 0

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        if layout in self.layouts:
            return self.layouts.index(layout)
        self.layouts.append(layout)
        unit = len(self.layouts) - 1
        for index, parameter in enumerate(layout.parameters):
            segments = layout.packed_segments([index], 0, layout.size_bytes)
            data = b"".join(bytes(piece) for segment in segments for piece in values.read(segment))
            assert len(data) == parameter.size_bytes
            self.values[unit, index] = data
        return unit

    def find(self, name: str) -> UnitLayout | None:
        return next((layout for layout in self.layouts if layout.unit == name), None)

    def push(
        self, unit_index: int, step: int, item: WorkItemState, buffers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        assert step == self.version
        assert item.item.global_rank == 0
        self.pushed |= {(unit_index, index): raw(tensor) for index, tensor in buffers}

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        if version < self.version:
            raise VersionGoneError(f"{version} is over")
        assert version == self.version
        self.reads.append([index for index, _ in wanted])
        for index, target in wanted:
            if target.nbytes:
                data = bytearray(self.values[unit_index, index])
                target.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))

    def commit(self, item: WorkItemState) -> coordinator_pb2.RunState:
        """Commits the values that rank 0's item pushed; returns the run's state."""
        self.version += 1
        for (unit, index), data in self.pushed.items():
            self.values[unit, index] = data
            known = {versions.unit_index: versions for versions in self.state.buffer_versions}
            if unit not in known:
                known[unit] = self.state.buffer_versions.add(unit_index=unit)
                known[unit].versions.extend([0] * len(self.layouts[unit].parameters))
            known[unit].versions[index] = self.version
        self.state.step = self.version - 1
        self.state.buffer_source.CopyFrom(item.item)
        self.pushed.clear()
        return self.state


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().clone().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def item(rank: int = 0, *, epoch: int = 5, attempt: int = 0) -> WorkItemState:
    return WorkItemState(coordinator_pb2.WorkItem(global_rank=rank, dp_rank=rank, epoch=epoch, attempt=attempt))


class Trainer:
    """A model, its buffers, and a loop over the items of a step."""

    def __init__(self, store: Store, module: nn.Module, *, declare: bool = True) -> None:
        self.store, self.module = store, module
        self.buffers = RunBuffers(lambda: [("unit.", module)], store, store.state, GridPlace())
        if declare:
            self.buffers.declare(store.version, has_work=True)

    def compute(self, at: WorkItemState, forward: Callable[[], object]) -> WorkItemState:
        self.buffers.start_item(self.store.version, at)
        at.written = self.buffers.written()
        forward()
        self.buffers.end_item(self.store.version, at)
        return at

    def commit(self, state: coordinator_pb2.RunState) -> None:
        version = self.store.version
        self.buffers.commit(state, version - 1, version, has_work=True)


def normalised(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("constant", torch.randn(3))
    return module


def state_of(module: nn.Module) -> dict[str, bytes]:
    return {name: raw(buffer) for name, buffer in module.named_buffers()}


def test_rank_0_sets_the_buffers_and_every_item_starts_with_the_same_values() -> None:
    store = Store()
    both = Trainer(store, normalised())
    norm = both.module[1]
    first = both.compute(item(0), lambda: both.module(torch.randn(8, 3)))
    after_rank_0 = norm.running_mean.clone()
    seen = []

    def second() -> None:
        seen.append(norm.running_mean.clone())
        both.module(torch.randn(8, 3))

    both.compute(item(1), second)
    assert torch.equal(seen[0], torch.zeros(4)), "rank 1 starts with the committed values"
    assert [store.layouts[0].parameters[index].name for _, index in store.pushed] == [
        "unit.1.running_mean",
        "unit.1.running_var",
        "unit.1.num_batches_tracked",
    ]
    both.buffers.check_untouched(0)
    store.reads.clear()
    both.commit(store.commit(first))
    assert torch.equal(norm.running_mean, after_rank_0)
    assert norm.num_batches_tracked == 1
    assert not store.reads, "the trainer that pushed the values does not read them"


def test_joining_trainers_load_the_buffers_and_later_read_the_changed_ones() -> None:
    store = Store()
    one, other = Trainer(store, normalised(0)), Trainer(store, normalised(1))
    assert state_of(one.module) == state_of(other.module)
    store.reads.clear()
    finished = one.compute(item(0), lambda: one.module(torch.randn(8, 3)))
    other.compute(item(1), lambda: other.module(torch.randn(8, 3)))
    state = store.commit(finished)
    for trainer in (one, other):
        trainer.commit(state)
    names = [parameter.name for parameter in store.layouts[0].parameters]
    assert [[names[index] for index in read] for read in store.reads] == [names[1:]], "the constant did not change"
    assert state_of(one.module) == state_of(other.module)
    late = Trainer(store, normalised(2))
    assert state_of(late.module) == state_of(one.module)


def test_unchanged_buffers_are_neither_pushed_nor_read() -> None:
    store = Store()
    one, other = Trainer(store, normalised().eval()), Trainer(store, normalised().eval())
    store.reads.clear()
    finished = one.compute(item(0), lambda: one.module(torch.randn(8, 3)))
    other.compute(item(1), lambda: other.module(torch.randn(8, 3)))
    assert not store.pushed
    state = store.commit(finished)
    one.commit(state)
    other.commit(state)
    assert not store.reads


@pytest.mark.parametrize("lost", ["epoch", "attempt"])
def test_values_pushed_under_a_lost_lease_or_earlier_attempt_are_not_committed(lost: str) -> None:
    store = Store()
    former, other = Trainer(store, normalised()), Trainer(store, normalised())
    former.compute(item(0), lambda: former.module(torch.full((8, 3), 9.0)))
    store.pushed.clear()
    later = item(0, epoch=6) if lost == "epoch" else item(0, attempt=1)
    state = store.commit(other.compute(later, lambda: other.module(torch.randn(8, 3))))
    former.commit(state)
    other.commit(state)
    assert state_of(former.module) == state_of(other.module)


def test_buffers_discarded_with_gradients_can_be_pushed_again() -> None:
    store = Store()
    trainer = Trainer(store, normalised())
    finished = trainer.compute(item(0), lambda: trainer.module(torch.randn(8, 3)))
    expected = dict(store.pushed)
    store.pushed.clear()
    finished.item.attempt = 1
    trainer.buffers.push_again(0, finished)
    assert store.pushed == expected
    store.reads.clear()
    trainer.commit(store.commit(finished))
    assert not store.reads


def test_restarted_item_starts_with_the_same_values() -> None:
    store = Store()
    trainer = Trainer(store, normalised())
    trainer.module[1].running_mean.fill_(4.0)
    with pytest.raises(ZeroDivisionError):
        trainer.compute(item(0), lambda: (trainer.module(torch.randn(8, 3)), 1 / 0))
    seen: list[torch.Tensor] = []
    trainer.compute(item(0, attempt=1), lambda: seen.append(trainer.module[1].running_mean.clone()))
    assert torch.equal(seen[0], torch.full((4,), 4.0))


def test_writes_between_steps_are_kept() -> None:
    store = Store()
    one, other = Trainer(store, normalised()), Trainer(store, normalised())
    for step in range(3):
        for trainer in (one, other):
            trainer.module.constant.data.fill_(step)  # `data` bypasses the tensor's version counter
        reports = [trainer.compute(item(rank), lambda: None).written for rank, trainer in enumerate([one, other])]
        assert reports[0] == reports[1]
        assert [buffer.buffer_index for buffer in reports[0]] == [0]
        state = store.commit(item(0))
        one.commit(state)
        other.commit(state)
        assert torch.equal(one.module.constant, torch.full((3,), float(step)))
        assert state_of(one.module) == state_of(other.module)


def test_item_can_undo_a_write_of_the_script() -> None:
    store = Store()
    trainer = Trainer(store, normalised())
    before = trainer.module.constant.clone()
    trainer.module.constant.fill_(1.0)
    finished = trainer.compute(item(0), lambda: trainer.module.constant.copy_(before))
    trainer.commit(store.commit(finished))
    assert torch.equal(trainer.module.constant, before)


def test_write_between_work_and_commit_is_rejected() -> None:
    store = Store()
    trainer = Trainer(store, normalised())
    trainer.compute(item(1), lambda: trainer.module(torch.randn(8, 3)))
    trainer.buffers.check_untouched(0)
    trainer.module.constant.fill_(1.0)
    with pytest.raises(UsageError, match=r"buffer 'unit.constant' was changed after the work of step 0 was finished"):
        trainer.buffers.check_untouched(0)


def test_writes_in_a_repeated_step_are_undone() -> None:
    store = Store()
    trainer = Trainer(store, normalised())
    before = state_of(trainer.module)
    trainer.module.constant.fill_(1.0)
    trainer.buffers.restore()
    assert state_of(trainer.module) == before


def test_spare_that_has_fallen_behind_reads_buffers_when_it_gets_work() -> None:
    store = Store()
    one, spare = Trainer(store, normalised()), Trainer(store, normalised(1))
    state = store.commit(one.compute(item(0), lambda: one.module(torch.randn(8, 3))))
    one.commit(state)
    store.version = 2  # other trainers have committed another step
    spare.buffers.commit(state, 0, 1, has_work=False)
    with pytest.raises(VersionGoneError):
        spare.buffers.start_item(1, item(1))
    spare.module.constant.fill_(1.0)  # simulates a script that sets the buffer in every step
    spare.buffers.start_item(2, item(1))
    assert [buffer.buffer_index for buffer in spare.buffers.written()] == [0]
    one.module.constant.fill_(1.0)
    assert state_of(spare.module) == state_of(one.module)


class Odd(nn.Module):
    """A module with all kinds of buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("scalar", torch.tensor(3))
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("strided", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("unknown", torch.tensor([float("nan"), -0.0]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("brief", torch.randn(5).bfloat16())
        self.register_buffer("wave", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("also_scalar", self.scalar)


def test_all_kinds_of_buffers_are_stored() -> None:
    store = Store()
    one, other = Trainer(store, Odd()), Trainer(store, Odd())
    names = {parameter.name: parameter.aliases for parameter in store.layouts[0].parameters}
    assert names.pop("unit.scalar") == ("unit.also_scalar",)
    assert set(names) == {"unit.empty", "unit.strided", "unit.unknown", "unit.flags", "unit.brief", "unit.wave"}

    def change() -> None:
        model = one.module
        model.scalar += 1
        model.strided[1, 1] = float("nan")
        model.unknown[1] = 0.0  # equal to -0.0, but with other bytes
        model.flags.logical_not_()
        model.brief *= 2
        model.wave *= 1j
        model.cache += 1

    state = store.commit(one.compute(item(0), change))
    store.reads.clear()
    one.commit(state)
    other.commit(state)
    assert other.module.cache.tolist() == [0.0, 0.0], "buffers that are not persistent are not shared"
    one.module.cache.zero_()
    assert state_of(other.module) == state_of(one.module)
    assert other.module.also_scalar is other.module.scalar
    assert [len(read) for read in store.reads] == [6], "every buffer but the empty one is read"
    quiet = one.compute(item(0), lambda: None)
    assert not store.pushed, "NaN has the same bytes as before"
    one.commit(store.commit(quiet))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: setattr(model, "brief", torch.zeros(6).bfloat16()), r"bfloat16 \[5\] when .* bfloat16 \[6\]"),
        (lambda model: setattr(model, "brief", torch.zeros(5)), r"bfloat16 \[5\] when .* now has float32 \[5\]"),
        (lambda model: setattr(model, "brief", None), "buffer 'unit.brief' .* the model has no such buffer now"),
        (lambda model: setattr(model, "also_scalar", torch.tensor(3)), "also named 'unit.also_scalar' when"),
        (lambda model: model.register_buffer("late", torch.zeros(1)), "buffer 'unit.late' was registered after"),
    ],
)
def test_replaced_buffers_are_named(change: Callable[[nn.Module], object], message: str) -> None:
    trainer = Trainer(Store(), Odd())
    trainer.commit(trainer.store.commit(trainer.compute(item(0), lambda: None)))
    with pytest.raises(UsageError, match=message):
        trainer.compute(item(1), lambda: change(trainer.module))


def test_first_buffer_registered_after_the_first_step_is_rejected() -> None:
    trainer = Trainer(Store(), nn.Linear(2, 2))
    trainer.commit(trainer.store.commit(trainer.compute(item(0), lambda: None)))
    with pytest.raises(UsageError, match=r"buffer 'unit.late' was registered after the optimizer was made"):
        trainer.compute(item(0), lambda: trainer.module.register_buffer("late", torch.zeros(1)))


class Lazy(nn.Module):
    """Gives its buffers their shapes in the first forward, in all ways that modules use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("resized", torch.ones(1))
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("unset", None)
        self.register_buffer("typed", torch.zeros(2))
        self.register_buffer("constant", torch.tensor(5.0))

    def forward(self, x: torch.Tensor) -> None:
        if self.resized.shape != x.shape[1:]:
            self.resized.resize_(x.shape[1:]).zero_()
        if not self.empty.numel():
            self.empty = torch.zeros(x.shape[1], 2)
        if self.unset is None:
            self.unset = torch.zeros((), dtype=torch.long)
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.zeros(x.shape[1]))
        self.typed = self.typed.double() + 1
        self.resized += x.mean(0)
        self.empty.add_(1)
        self.unset += 1
        self.late.copy_(x[0])


@pytest.mark.parametrize("first", [0, 1])
def test_buffers_that_take_their_shape_in_the_first_step_are_shared(first: int) -> None:
    store, plain = Store(), Lazy()
    batches = [torch.full((2, 3), float(number)) for number in range(6)]
    both, other = Trainer(store, Lazy()), Trainer(store, Lazy())
    for step in range(3):
        finished = None
        for rank in (first, 1 - first):
            done = both.compute(item(rank), partial(both.module, batches[2 * step + rank]))
            finished = done if rank == 0 else finished
        both.buffers.check_untouched(step)
        assert finished is not None
        state = store.commit(finished)
        both.commit(state)
        other.commit(state)
        plain(batches[2 * step])
        late = Trainer(store, Lazy())
        for trainer in (both, other, late):
            assert state_of(trainer.module) == state_of(plain)
    assert [layout.unit for layout in store.layouts] == ["buffers:0", "buffers:reshaped"]
    with pytest.raises(UsageError, match=r"'unit.late' was float32 \[3\] when .* float32 \[4\].*persistent=False"):
        other.compute(item(1), lambda: setattr(other.module, "late", torch.zeros(4)))


def test_another_trainer_repeats_the_item_that_has_shaped_buffers() -> None:
    store, plain = Store(), Lazy()
    lost, other = Trainer(store, Lazy()), Trainer(store, Lazy())
    lost.compute(item(0), lambda: lost.module(torch.full((2, 3), 9.0)))
    store.pushed.clear()
    state = store.commit(other.compute(item(0, epoch=6), lambda: other.module(torch.ones(2, 3))))
    lost.commit(state)
    other.commit(state)
    plain(torch.ones(2, 3))
    assert state_of(lost.module) == state_of(other.module) == state_of(plain)


def test_items_that_do_not_count_leave_no_shapes() -> None:
    store = Store()
    one = Trainer(store, Lazy())
    before = state_of(one.module)
    one.compute(item(1), lambda: one.module(torch.ones(2, 3)))
    assert state_of(one.module) == before
    assert one.module.unset is None and not hasattr(one.module, "late")
    with pytest.raises(ZeroDivisionError):
        one.compute(item(0), lambda: (one.module(torch.ones(2, 3)), 1 / 0))
    one.buffers.abandon_item()
    assert state_of(one.module) == before


def test_buffer_dtype_that_cannot_be_stored_is_rejected() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("eighth", torch.zeros(2, dtype=torch.float8_e8m0fnu))
    with pytest.raises(UsageError, match=r"buffer 'unit.eighth' has dtype float8_e8m0fnu .* persistent=False"):
        Trainer(Store(), module)


def test_buffers_of_modules_sharded_later_are_declared_with_the_next_optimizer() -> None:
    store, first, second = Store(), normalised(0), normalised(1)
    modules = [("a.", first)]
    buffers = RunBuffers(lambda: modules, store, store.state, GridPlace())
    buffers.declare(0, has_work=True)
    modules.append(("b.", nn.Sequential(first, second)))
    buffers.declare(0, has_work=True)
    assert [[parameter.name for parameter in layout.parameters] for layout in store.layouts] == [
        [f"a.{name}" for name in ("constant", "1.running_mean", "1.running_var", "1.num_batches_tracked")],
        [f"b.1.{name}" for name in ("constant", "1.running_mean", "1.running_var", "1.num_batches_tracked")],
    ]


def test_initial_values_are_read_in_parts() -> None:
    store = Store()
    trainer = Trainer(store, SimpleBuffers(torch.arange(1000.0)))
    assert store.values[0, 0] == raw(trainer.module.values)


class SimpleBuffers(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("values", values)
