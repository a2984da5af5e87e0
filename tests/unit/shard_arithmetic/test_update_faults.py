"""Updates that fail at any operation, and the memory allocated before an update."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwell_server.optimizer_checks import allocation_key
from shardwell_server.shard.arithmetic import update_pieces
from shardwell_server.shard.arithmetic.shard_optimizer import ShardOptimizer
from shardwell_server.shard.arithmetic.update_pieces import Changed, Piece, packed
from shardwell_server.shard.restart.undo import SharedProgress, UndoLog
from shardwell_wire.model.optimizers import OPTIMIZERS
from shardwell_wire.v1 import common_pb2
from tests.unit.shard_arithmetic.test_optimizers import bits, step_of

SHAPES = [(48, 64), (7, 3), (640,)]
STEPS = 2


class FaultError(Exception):
    """Raised by an injected fault."""


class FailingOnce(TorchDispatchMode):
    """Counts torch operations and raises in place of one of them.

    Args:
        number: Number of the operation that fails, -1 for none.
    """

    def __init__(self, number: int = -1) -> None:
        super().__init__()
        self.left, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.left == 0:
            self.left = -1
            raise FaultError(str(func))
        self.left -= self.left > 0
        return func(*args, **(kwargs or {}))


class LargestResult(TorchDispatchMode):
    """Records the largest result that an operation allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A result that shares memory with an argument is not a new allocation.
        known = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs or {}))}
        for tensor in _tensors(result):
            if tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def _tensors(of: object) -> list[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        return [of]
    if isinstance(of, dict):
        return _tensors(tuple(of.values()))
    return [tensor for each in of for tensor in _tensors(each)] if isinstance(of, tuple | list) else []


def settings_of(algorithm: str) -> common_pb2.OptimizerStep:
    step = step_of(algorithm)
    step.ema_decay, step.clip_value = 0.9, 0.75
    return step


def trained(
    algorithm: str, dtype: torch.dtype, do: Callable[[int, Callable[[], None]], None], *, new_state_at: int = -1
) -> list[bytes]:
    """Returns the bits of values, state and averages after some steps. ``do(number, step)`` runs each step.

    Step ``new_state_at`` starts with new optimizer state.
    """
    shapes = [shape for shape in SHAPES if algorithm != "muon" or len(shape) == 2]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    optimizer, step = ShardOptimizer(values), settings_of(algorithm)
    for number in range(STEPS):
        step.new_state = number == new_state_at
        gradients: list[torch.Tensor | None] = [
            torch.randn(value.numel(), generator=generator).to(dtype) for value in values
        ]
        if number == 0:
            gradients[-1] = None  # this parameter's state starts one step later
        do(number, lambda gradients=gradients: optimizer.step(gradients, step, [0] * len(shapes), 0.5))
    states = [optimizer.state(part) for part in range(len(shapes))]
    return [bits(value) for value in values] + [
        bits(state[name].reshape(-1)) for state in states for name in sorted(state)
    ]


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_pieces, "SLICE_BYTES", 4096)


class KilledError(Exception):
    """Raised where a process ends."""


class KilledProgress(SharedProgress):
    """The progress of a process that ends after some pieces."""

    pieces = 0

    def run(self, piece: Piece) -> None:
        if self.pieces == 0:
            raise KilledError
        self.pieces -= 1
        super().run(piece)


def test_order_of_changed_ranges_does_not_depend_on_addresses() -> None:
    low, high = sorted((torch.zeros(1 << 10), torch.zeros(1 << 10)), key=torch.Tensor.data_ptr)
    for first, second in ((low, high), (high, low)):
        # Tensors with few bytes between them share a range; the order within one storage is that of its memory.
        changed = Changed([first[600:700], second[:8], first[16:100], first[100:200], first[210:220]])
        assert changed.ranges == [
            (first[16:].data_ptr(), (220 - 16) * 4),
            (first[600:].data_ptr(), 400),
            (second.data_ptr(), 32),
        ]
        first.fill_(1.0)
        copies = changed.save()
        first.fill_(2.0)
        changed.restore(copies)
        assert first[16:220].eq(1.0).all() and first[600:700].eq(1.0).all()
        assert first[:16].eq(2.0).all() and first[220:600].eq(2.0).all() and first[700:].eq(2.0).all()


@pytest.mark.usefixtures("small_slices")
def test_parts_are_packed_into_full_pieces_and_cut_where_kernels_give_the_same_bits() -> None:
    sizes = [700, 1, 0, 2000, 3, *[1] * 100]
    pieces = list(packed([torch.zeros(size) for size in sizes]))
    assert all(sum(here.stop - here.start for _, here in ranges) <= 1024 for ranges in pieces)
    assert max(map(len, pieces)) == update_pieces.MAX_JOINT
    found: dict[int, list[slice]] = {}
    for number, here in (each for ranges in pieces for each in ranges):
        found.setdefault(number, []).append(here)
    for number, size in enumerate(sizes):
        cuts = found.get(number, [])
        assert [here.start for here in cuts] == [0, *(here.stop for here in cuts[:-1])][: len(cuts)]
        assert all(here.start % 16 == 0 for here in cuts)
        assert (cuts[-1].stop if cuts else 0) == size


@pytest.mark.parametrize("pieces", range(5))
def test_averages_allocated_one_after_the_other_are_finished_by_the_next_process(pieces: int) -> None:
    def prepared(values: list[torch.Tensor]) -> ShardOptimizer:
        optimizer = ShardOptimizer(values)
        optimizer.prepare([True, True], step, [-1, 0])  # the optimizer that was expected
        optimizer.prepare([True, True], step, [0, 0])
        return optimizer

    step, expected = settings_of("sgd"), [torch.ones(4), torch.ones(6)]
    gradients = [torch.full((4,), 0.5), torch.full((6,), 0.25)]
    undisturbed = prepared(expected)
    undisturbed.step(gradients, step, [0, 0], 1.0)

    values = [torch.ones(4), torch.ones(6)]
    former = prepared(values)
    content, word = former.content(), memoryview(bytearray(8))
    undo = UndoLog()
    assert undo.reserve_pieces(former.piece_bytes)
    progress = KilledProgress(undo, word, step=3)
    progress.pieces = pieces
    with suppress(KilledError):
        former.step(gradients, step, [0, 0], 1.0, progress=progress)
    if former.is_updating:
        former = ShardOptimizer(values)
        former.take_up(content)
        former.step(gradients, step, [0, 0], 1.0, progress=SharedProgress(undo, word, step=3))
    for part in range(2):
        found, wanted = former.averages[part], undisturbed.averages[part]
        assert found is not None and wanted is not None
        assert torch.equal(found, wanted) and torch.equal(values[part], expected[part])


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize(
    ("algorithm", "dtype", "new_state_at"),
    [
        *((name, torch.float32, -1) for name in OPTIMIZERS),
        ("sgd", torch.bfloat16, -1),
        ("lion", torch.float16, -1),
        ("adamw", torch.float32, 1),
    ],
)
def test_update_failing_at_any_operation_is_finished_exactly_once(
    algorithm: str, dtype: torch.dtype, new_state_at: int
) -> None:
    counts: list[int] = []

    def counted(_: int, step: Callable[[], None]) -> None:
        with FailingOnce() as counting:
            step()
        counts.append(counting.count)

    expected = trained(algorithm, dtype, counted, new_state_at=new_state_at)
    assert trained(algorithm, dtype, lambda _, step: step(), new_state_at=new_state_at) == expected

    def failing(at: tuple[int, int]) -> Callable[[int, Callable[[], None]], None]:
        def run(number: int, step: Callable[[], None]) -> None:
            if number == at[0]:
                with pytest.raises(FaultError), FailingOnce(at[1]):
                    step()
            step()

        return run

    for number, count in enumerate(counts):
        # Every operation of the first step, and enough of the next step to reach each kind.
        for operation in range(0, count, 1 if number == 0 else 7):
            found = trained(algorithm, dtype, failing((number, operation)), new_state_at=new_state_at)
            assert found == expected, (number, operation)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("algorithm", [name for name, known in OPTIMIZERS.items() if not known.needs_whole_tensors])
def test_chunks_change_no_bit_and_bound_the_workspace(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    largest: list[int] = []

    def measured(_: int, step: Callable[[], None]) -> None:
        with LargestResult() as results:
            step()
        largest.append(results.bytes)

    optimizer, step = ShardOptimizer([torch.ones(48, 64)]), settings_of(algorithm)
    for _ in range(2):
        optimizer.prepare([True], step, [0])
        gradient = torch.ones(48 * 64)
        measured(0, partial(optimizer.step, [gradient], step, [0], 0.5))
    assert max(largest) <= 2 * 4096, "adamax joins two tensors of a slice's size"
    sliced = trained(algorithm, torch.float32, lambda _, step: step())
    monkeypatch.setattr(update_pieces, "SLICE_BYTES", 1 << 30)
    assert trained(algorithm, torch.float32, lambda _, step: step()) == sliced


@pytest.mark.parametrize("algorithm", list(OPTIMIZERS))
def test_state_is_allocated_before_the_update_with_the_announced_size(algorithm: str) -> None:
    values, step = [torch.ones(64, 48)], settings_of(algorithm)
    optimizer = ShardOptimizer(values)
    needed, workspace = optimizer.needs([True], step, [0])
    before = [bits(value) for value in values]
    optimizer.prepare([True], step, [0])
    allocated = optimizer.size_bytes
    assert [bits(value) for value in values] == before
    assert not optimizer.state(0), "no change is visible before the commit"
    assert optimizer.is_prepared([True], [0], allocation_key(step))
    optimizer.step([torch.ones(64 * 48)], step, [0], 1.0)
    assert optimizer.size_bytes == allocated == needed
    assert (workspace > 0) == OPTIMIZERS[algorithm].needs_whole_tensors
    assert optimizer.is_prepared([True], [0], allocation_key(step)), "the next step needs no more memory"


def test_new_state_replaces_that_of_every_part_in_a_group() -> None:
    """Also that of a part without a gradient; a part in no group keeps its state, and averages stay."""
    optimizer, step = ShardOptimizer([torch.ones(8) for _ in range(3)]), step_of("adamw")
    gradients: list[torch.Tensor | None] = [torch.ones(8) for _ in range(3)]
    step.ema_decay = 0.5
    for _ in range(2):
        optimizer.step(gradients, step, [0, 0, 0], 1.0)
    averages, third = [optimizer.averages[part] for part in range(3)], optimizer.part(2)
    step.new_state = True
    optimizer.step([gradients[0], None, None], step, [0, 0, -1], 1.0)
    assert [optimizer.steps_of(part) for part in range(3)] == [1, 0, 2]
    fresh = ShardOptimizer([torch.ones(8)])
    fresh.step([gradients[0]], step, [0], 1.0)
    for name, tensor in fresh.part(0).state.items():
        assert torch.equal(optimizer.part(0).state[name], tensor), name
    assert (optimizer.part(1).algorithm, optimizer.part(1).state) == (None, {})
    assert all(optimizer.part(2).state[name] is tensor for name, tensor in third.state.items())
    assert all(optimizer.averages[part] is average for part, average in enumerate(averages))
    step.new_state = False
    optimizer.step(gradients, step, [0, 0, 0], 1.0)
    assert [optimizer.steps_of(part) for part in range(3)] == [2, 1, 3]
    assert optimizer.size_bytes == sum(tensor.nbytes for part in range(3) for tensor in optimizer.state(part).values())


def test_state_prepared_for_another_optimizer_is_released() -> None:
    optimizer = ShardOptimizer([torch.ones(64)])
    optimizer.prepare([True], step_of("adamw"), [0])
    assert optimizer.size_bytes == 2 * 256 + 4
    optimizer.prepare([True], step_of("lion"), [0])
    assert optimizer.size_bytes == 256
    optimizer.prepare([False], step_of("lion"), [0])
    assert optimizer.size_bytes == 0


def test_only_settings_that_change_memory_change_the_allocation_key() -> None:
    base = settings_of("rmsprop")
    for change, same in (({"lr": 0.5}, True), ({"momentum": 0.1}, True), ({"momentum": 0.0}, False)):
        other = settings_of("rmsprop")
        for name, value in change.items():
            other.groups[0].hyperparameters[name] = value
        assert (allocation_key(other) == allocation_key(base)) == same, change
    assert allocation_key(step_of("adagrad")) != allocation_key(step_of("adagrad", initial_accumulator_value=0.25))
    without = step_of("rmsprop")
    assert allocation_key(without) != allocation_key(base), "averages need memory"
