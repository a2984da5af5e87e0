"""Reading elements of parameters from checkpoints that divide the parameters differently."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from shardwell.store.residuals import RestoredResiduals
from shardwell_server.shard.requests.checkpoint_contents import describe_shard, fill_shard
from shardwell_server.shard.unit.portable_state import PartState, ShardState
from shardwell_wire.checkpoints.format import Piece
from shardwell_wire.checkpoints.reading import Checkpoint, pieces_of, read_elements
from shardwell_wire.checkpoints.storage import LocalStorage
from shardwell_wire.errors import CorruptDataError, UnitMismatchError
from shardwell_wire.model.layout import BLOCK_BYTES, Box, Parameter, UnitLayout, common_runs
from shardwell_wire.model.topology import World
from tests.support.checkpoints import write_checkpoint

SHAPE = (90, 70)
STATES = ("values", "exp_avg", "ema", "kept_gradient.1", "residual.0")
WHOLE = {state: torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n, state in enumerate(STATES)}


def part(rows: tuple[int, int], columns: tuple[int, int] = (0, SHAPE[1]), dtype: str = "float32") -> Parameter:
    shape, offsets = (rows[1] - rows[0], columns[1] - columns[0]), (rows[0], columns[0])
    return Parameter("w", shape, dtype, whole_shape=SHAPE, offsets=offsets)


ONE = [Parameter("w", SHAPE, "float32")]
ROWS = [part((0, 31)), part((31, 90)), part((90, 90))]
COLUMNS = [part((0, 90), (0, 33)), part((0, 90), (33, 70))]
GRID = [part((0, 45), (0, 33)), part((45, 90), (0, 33)), part((0, 45), (33, 70)), part((45, 90), (33, 70))]
DIVISIONS = {"one": ONE, "rows": ROWS, "columns": COLUMNS, "grid": GRID}


def units(parameters: Sequence[Parameter]) -> list[UnitLayout]:
    return [UnitLayout(f"u@tp{rank}", (each,), tp_rank=rank) for rank, each in enumerate(parameters)]


def saved(folder: Path, parameters: Sequence[Parameter], *, lacks: tuple[str, str] = ("", "")) -> Checkpoint:
    """Returns a checkpoint of Adam's state, in which each part is cut over two files.

    ``lacks`` is the key of a part, and a state that the second file lacks.
    """
    files: list[dict[Piece, torch.Tensor]] = [{}, {}]
    for parameter in parameters:
        cuts = (0, parameter.numel // 3, parameter.numel)
        for tensors, (start, stop) in zip(files, pairwise(cuts), strict=True):
            if start == stop:
                continue
            for state, whole in WHOLE.items():
                if start and (parameter.key, state) == lacks:
                    continue
                piece = Piece(parameter.key, state, start, stop, "float32", (stop - start,))
                tensors[piece] = whole[parameter.box.slices].reshape(-1)[start:stop]
            tensors[Piece(parameter.key, "step", start, stop, "float32", (), "whole")] = torch.tensor(3.0)
    return Checkpoint.open(write_checkpoint(folder, 3, files=files, units=units(parameters)))


def elements_of(box: Box) -> list[tuple[int, ...]]:
    """Returns the indices of a part's elements in the whole tensor, in the order of the flattened part."""
    found = torch.arange(Box(box.whole, (0,) * len(box.whole), box.whole).numel).view(box.whole)[box.slices]
    return [tuple(at.tolist()) for at in found.reshape(-1, 1)]


def test_common_runs_are_all_common_elements_in_order() -> None:
    random.seed(0)
    for _ in range(300):
        whole = tuple(random.randint(1, 5) for _ in range(random.randint(0, 3)))
        boxes, ranges = [], []
        for _ in range(2):
            first = tuple(random.randrange(size) for size in whole)
            shape = tuple(random.randint(0, size - start) for size, start in zip(whole, first, strict=True))
            boxes.append(Box(whole, first, shape))
            start, stop = sorted(random.randint(0, boxes[-1].numel) for _ in range(2))
            ranges.append((start, stop))
        ours, theirs = map(elements_of, boxes)
        runs = list(common_runs(boxes[0], ranges[0], boxes[1], ranges[1]))
        assert all(count > 0 for _, _, count in runs)
        got = [(first + at, other + at) for first, other, count in runs for at in range(count)]
        (start, stop), (other_start, other_stop) = ranges
        place = {element: at for at, element in enumerate(theirs) if other_start <= at < other_stop}
        assert got == [(at, place[ours[at]]) for at in range(start, stop) if ours[at] in place]


@pytest.mark.parametrize("former", DIVISIONS)
@pytest.mark.parametrize("present", DIVISIONS)
def test_every_range_has_the_bytes_of_the_whole_tensor(
    former: str, present: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "window_bytes", 1000)  # runs go over several windows
    checkpoint = saved(tmp_path, DIVISIONS[former])
    for layout in units(DIVISIONS[present]):
        middle = BLOCK_BYTES if layout.size_bytes > BLOCK_BYTES else layout.size_bytes
        for start, stop in ((0, middle), (middle, layout.size_bytes)):
            described = describe_shard(checkpoint, layout, start, stop, 2)
            state, read = allocated(described), list[int]()
            fill_shard(checkpoint, state, read.append)
            assert sum(read) == sum(tensor.nbytes for _, tensor in state.tensors())
            check(state, layout.parameters[0])


def allocated(described: ShardState) -> ShardState:
    """Returns memory for a state, filled with NaN."""

    def make(tensor: torch.Tensor) -> torch.Tensor:
        return torch.full(tensor.shape, float("nan"))

    def of(at: PartState) -> PartState:
        assert at.average is not None
        state = {name: make(each) for name, each in at.state.items()}
        kept = {rank: make(each) for rank, each in at.kept.items()}
        return replace(at, values=make(at.values), state=state, average=make(at.average), kept=kept)

    return replace(described, parts=[of(at) for at in described.parts])


def check(state: ShardState, parameter: Parameter) -> None:
    for at in state.parts:
        assert (at.algorithm, at.step_count, at.state["step"].item()) == ("adamw", 3, 3.0)
        found = {"values": at.values, "exp_avg": at.state["exp_avg"], "ema": at.average, "kept_gradient.1": at.kept[1]}
        for name, tensor in found.items():
            assert tensor is not None
            expected = WHOLE[name][parameter.box.slices].reshape(-1)[at.start_element : at.stop_element]
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (Parameter("other", SHAPE, "float32"), r"'other' is not in checkpoint .*: resume with the model"),
        (
            Parameter("w", (70, 90), "float32"),
            r"shape \(70, 90\) in the model, but a float32 tensor of shape \(90, 70\)",
        ),
        (part((0, 90), (0, 33), "float64"), r"'w' is a float64 tensor .* but a float32 tensor"),
    ],
)
def test_other_tensors_are_refused(parameter: Parameter, message: str, tmp_path: Path) -> None:
    with pytest.raises(UnitMismatchError, match=message):
        describe_shard(saved(tmp_path, ROWS), UnitLayout("u", (parameter,)), 0, BLOCK_BYTES, 2)


def test_aliases_name_the_same_parameter(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, [replace(ONE[0], name="tied", aliases=("w",))])
    for name, aliases in (("w", ()), ("first", ("w",)), ("tied", ())):
        parameter = Parameter(name, SHAPE, "float32", aliases)
        assert [entry.name for entry, _ in pieces_of(checkpoint, parameter, "values", 0, 10)] == ["tied"]


@pytest.mark.parametrize("present", DIVISIONS)
def test_residuals_follow_their_elements(present: str, tmp_path: Path) -> None:
    restored = RestoredResiduals(saved(tmp_path, ROWS).url, World(dp=2), pp_rank=0)
    for layout in units(DIVISIONS[present]):
        (parameter,), found = layout.parameters, restored(0, layout)
        assert restored(1, layout) == {}
        if parameter.numel:
            assert torch.equal(found[0].view(parameter.shape), WHOLE["residual.0"][parameter.box.slices])


def test_elements_that_are_missing_are_an_error(tmp_path: Path) -> None:
    checkpoint, layout = saved(tmp_path, ROWS, lacks=(ROWS[0].key, "exp_avg")), UnitLayout("u", tuple(ONE))
    state = allocated(describe_shard(checkpoint, layout, 0, layout.size_bytes, 2))
    with pytest.raises(CorruptDataError, match=r"exp_avg of parameter 'w' is incomplete: \d+ of the 6300 elements"):
        fill_shard(checkpoint, state, lambda _: None)


def test_damage_is_found_although_the_tensor_is_cut_anew(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, ROWS)
    damaged = checkpoint.pieces(ROWS[1].key, "ema")[1]
    path, place = Path(checkpoint.url) / damaged.file.name, damaged.placed.start_bytes
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    parameter, found = COLUMNS[0], []
    for state in STATES:
        found += pieces_of(checkpoint, parameter, state, 0, parameter.numel)
    with pytest.raises(CorruptDataError, match=rf"in {path} is damaged: its checksum"):
        read_elements(checkpoint, parameter, found, (0, parameter.numel), bytearray(4 * parameter.numel))


def test_state_of_a_part_as_a_whole_cannot_be_cut_anew(tmp_path: Path) -> None:
    files: list[dict[Piece, torch.Tensor]] = [{}]
    for parameter in ROWS[:2]:
        numel, rows = parameter.numel, parameter.shape[0]
        files[0][Piece(parameter.key, "values", 0, numel, "float32", (numel,))] = torch.zeros(numel)
        files[0][Piece(parameter.key, "row_var", 0, numel, "float32", (rows, 1), "whole")] = torch.zeros(rows, 1)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path, 3, files=files, units=units(ROWS[:2])))
    same, other = units(ROWS)[0], UnitLayout("u", tuple(ONE))
    assert describe_shard(checkpoint, same, 0, same.size_bytes, 2).parts[0].step_count == 3
    with pytest.raises(UnitMismatchError, match=r"'row_var' of 'w' .* resume with the tensor parallelism"):
        describe_shard(checkpoint, other, 0, other.size_bytes, 2)


def test_what_belongs_to_other_data_ranks_is_left_out(tmp_path: Path) -> None:
    checkpoint, (layout,) = saved(tmp_path, ONE), units(ONE)
    same, other = (describe_shard(checkpoint, layout, 0, layout.size_bytes, dp).parts[0] for dp in (2, 3))
    assert (list(same.kept), list(other.kept)) == ([1], [])
    assert same.state.keys() == other.state.keys()
    restored = RestoredResiduals(checkpoint.url, World(dp=3), pp_rank=0)
    assert (restored(0, layout), restored.has_same_ranks) == ({}, False)


def save_in_stages(folder: Path, pp_ranks: tuple[int, ...], states: Mapping[str, torch.Tensor]) -> Checkpoint:
    """Returns a checkpoint of a parameter that stages share."""
    numel = ONE[0].numel
    pieces = {Piece("w", state, 0, numel, "float32", (numel,)): value for state, value in states.items()}
    layout = UnitLayout("u", tuple(ONE), pp_ranks=pp_ranks)
    return Checkpoint.open(write_checkpoint(folder, 3, files=[pieces], units=[layout]))


@pytest.mark.parametrize(
    ("former", "present", "expected"),
    [
        ((0, 1), (0,), {0: 5.0}),
        ((0, 1), (0, 1), {0: 1.0, 1: 4.0}),
        ((0, 1), (1, 3), {1: 5.0, 3: None}),
        ((1,), (0, 1), {0: 7.0, 1: None}),
        ((1,), (2,), {2: 7.0}),
    ],
)
def test_residuals_of_a_shared_parameter_are_added_if_other_stages_share_it(
    former: tuple[int, ...], present: tuple[int, ...], expected: Mapping[int, float | None], tmp_path: Path
) -> None:
    values = {"residual.0.0": 1.0, "residual.0.1": 4.0} if len(former) > 1 else {"residual.0": 7.0}
    states = {state: torch.full((ONE[0].numel,), value) for state, value in {"values": 0.0, **values}.items()}
    checkpoint, layout = save_in_stages(tmp_path, former, states), UnitLayout("u", tuple(ONE), pp_ranks=present)
    for pp_rank, value in expected.items():
        found = RestoredResiduals(checkpoint.url, World(dp=2, pp=4), pp_rank)(0, layout)
        assert {index: set(residual.tolist()) for index, residual in found.items()} == ({0: {value}} if value else {})


def test_kept_gradients_of_other_stages_are_left_out(tmp_path: Path) -> None:
    states = {state: torch.zeros(ONE[0].numel) for state in ("values", "kept_gradient.3")}
    checkpoint = save_in_stages(tmp_path, (0, 1), states)
    for pp_ranks, expected in (((0, 1), [3]), ((0, 2), [3]), ((0,), [])):
        layout = UnitLayout("u", tuple(ONE), pp_ranks=pp_ranks)
        assert list(describe_shard(checkpoint, layout, 0, layout.size_bytes, 2).parts[0].kept) == expected


def save_partitions(folder: Path, states: Mapping[str, tuple[str, Sequence[torch.Tensor]]]) -> Checkpoint:
    """Returns a checkpoint with the state of an optimizer on trainers in two halves, each with its kind."""
    numel = ONE[0].numel
    halves = ((0, numel // 2), (numel // 2, numel))
    tensors = {Piece("w", "values", 0, numel, "float32", (numel,)): torch.zeros(numel)}
    for name, (kind, values) in states.items():
        for (start, stop), value in zip(halves, values, strict=True):
            tensors[Piece("w", f"trainer.{name}", start, stop, "float32", tuple(value.shape), kind)] = value
    return Checkpoint.open(write_checkpoint(folder, 3, files=[tensors], units=units(ONE)))


@pytest.mark.parametrize("dp", [1, 3])
def test_state_of_optimizers_on_trainers_is_cut_into_other_partitions(dp: int, tmp_path: Path) -> None:
    average = torch.randn(ONE[0].numel)
    states = {"average": ("elements", average.chunk(2)), "count": ("number", [torch.tensor(5.0)] * 2)}
    checkpoint, (layout,) = save_partitions(tmp_path, states), units(ONE)
    described = describe_shard(checkpoint, layout, 0, layout.size_bytes, dp)
    filled = replace(
        described,
        parts=[],
        partitions=[
            replace(at, data=[torch.empty(data.shape, dtype=torch.uint8) for data in at.data])
            for at in described.partitions
        ],
    )
    fill_shard(checkpoint, filled, lambda _: None)
    assert [at.dp_rank for at in filled.partitions] == list(range(dp))
    found = [data.view(torch.float32) for at in filled.partitions for data in at.data]
    assert torch.equal(torch.cat(found[::2]), average)
    assert [count.item() for count in found[1::2]] == [5.0] * dp


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (("whole", [torch.zeros(2, 2)] * 2), r"belongs to elements \[0, 3150\) as a whole, and this run has elements"),
        (("number", [torch.tensor(1.0), torch.tensor(2.0)]), "differs between parts of the parameter"),
    ],
)
def test_state_of_partitions_as_wholes_is_refused_for_other_partitions(
    state: tuple[str, Sequence[torch.Tensor]], message: str, tmp_path: Path
) -> None:
    checkpoint, (layout,) = save_partitions(tmp_path, {"odd": state}), units(ONE)
    with pytest.raises(UnitMismatchError, match=message):
        described = describe_shard(checkpoint, layout, 0, layout.size_bytes, 1)
        partitions = [
            replace(at, data=[torch.empty(data.shape, dtype=torch.uint8) for data in at.data])
            for at in described.partitions
        ]
        fill_shard(checkpoint, replace(described, parts=[], partitions=partitions), lambda _: None)
