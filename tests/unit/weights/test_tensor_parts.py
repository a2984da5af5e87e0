"""Parts of parameters that tensor parallelism splits: layouts, declarations, and whole tensors joined from parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwell
from shardwell.weights import changes as changes_module
from shardwell.weights.changes import StoredChanges, TensorChange, UnitChanges
from shardwell.weights.checkpoint_conversion import checkpoint_to_dcp, dcp_to_checkpoint
from shardwell.weights.pinned_version import PinnedVersion
from shardwell.weights.stored_parameters import PlacedUnit, StoredParameter
from shardwell_server.coordinator.placed_units import DeclaredUnits, Unit, require_same_layout
from shardwell_server.coordinator.signals import RunChanges
from shardwell_server.optimizer_checks import check_fit
from shardwell_wire.checkpoints.format import Piece
from shardwell_wire.checkpoints.manifest import message_to_dict
from shardwell_wire.encoding import shard_changes
from shardwell_wire.encoding.shard_changes import ShardChanges, spans_of
from shardwell_wire.encoding.wire_dtypes import AS_STORED
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    StepStateError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import Box, Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2
from tests.support.checkpoints import write_checkpoint

WHOLE = torch.arange(6 * 5, dtype=torch.float32).view(6, 5)


def part(
    rows: tuple[int, int], columns: tuple[int, int] = (0, 5), name: str = "w", dtype: str = "float32"
) -> Parameter:
    shape, offsets = (rows[1] - rows[0], columns[1] - columns[0]), (rows[0], columns[0])
    return Parameter(name, shape, dtype, whole_shape=(6, 5), offsets=offsets)


def split(parts: Sequence[Parameter]) -> list[UnitLayout]:
    return [UnitLayout(f"u@tp{rank}", (each,), tp_rank=rank) for rank, each in enumerate(parts)]


ROWS = split([part((0, 4)), part((4, 6)), part((6, 6))])
COLUMNS = split([part((0, 6), (0, 3)), part((0, 6), (3, 5))])


def test_parts_round_trip_through_the_proto() -> None:
    layout = UnitLayout("u@tp1", (part((4, 6)), Parameter("b", (), "float32")), tp_rank=1, pp_ranks=(2,))
    assert UnitLayout.from_proto(layout.to_proto()) == layout
    assert layout.holds_parts and not UnitLayout("u", (Parameter("b", (), "float32"),)).holds_parts
    assert [(at.key, at.is_part, at.box.is_whole) for at in layout.parameters] == [
        ("w@4,0", True, False),
        ("b", False, True),
    ]
    assert layout.size_bytes == 128, "as a parameter of the part's shape"


@pytest.mark.parametrize(
    "invalid",
    [
        Parameter("w", (2, 5), "float32", whole_shape=(6, 5), offsets=(5, 0)),
        Parameter("w", (2, 5), "float32", whole_shape=(6, 5)),
        Parameter("w", (2, 5), "float32", offsets=(4, 0)),
        Parameter("w", (2,), "float32", whole_shape=(6, 5), offsets=(4, 0)),
    ],
)
def test_parts_outside_their_parameter_are_refused(invalid: Parameter) -> None:
    with pytest.raises(InvalidRequestError, match=r"parameter 'w' is a part of shape .* expected equally many"):
        UnitLayout("u", (invalid,))


def test_buffers_have_no_parts() -> None:
    with pytest.raises(InvalidRequestError, match="buffer 'w' is declared as a part"):
        UnitLayout("u", (part((0, 4)),), kind="buffers")


def test_boxes_overlap_where_they_share_elements() -> None:
    boxes = [each.box for each in (part((0, 4)), part((4, 6)), part((2, 3), (4, 5)), part((6, 6)))]
    assert [[one.overlaps(other) for other in boxes] for one in boxes] == [
        [True, False, True, False],
        [False, True, False, False],
        [True, False, True, False],
        [False, False, False, False],
    ]
    assert torch.equal(WHOLE[boxes[2].slices], WHOLE[2:3, 4:5])
    assert Box((), (), ()).slices == ()


def declared(*layouts: UnitLayout) -> DeclaredUnits:
    units = DeclaredUnits("r", RunChanges())
    for index, layout in enumerate(layouts):
        units.require_new_tensors(layout)
        units.add(Unit(index, layout, ()))
    return units


def test_units_may_have_other_parts_of_a_parameter() -> None:
    for layouts in (ROWS, COLUMNS):
        assert len(declared(*layouts)) == len(layouts)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (Parameter("w", (6, 5), "float32"), "'w' of unit 'v' already belongs to unit 'u@tp0'"),
        (part((3, 6)), r"overlaps the part of shape \(4, 5\) at \(0, 0\)"),
        (part((4, 6), dtype="float64"), "a part of a float64 tensor .* unit 'u@tp0' has a part of a float32 tensor"),
        (replace(part((4, 6)), whole_shape=(7, 5)), r"of shape \(7, 5\), but .* of shape \(6, 5\)"),
    ],
)
def test_parts_that_do_not_fit_are_refused(other: Parameter, message: str) -> None:
    with pytest.raises(ConflictError, match=message):
        declared(ROWS[0]).require_new_tensors(UnitLayout("v", (other,), tp_rank=1))
    with pytest.raises(ConflictError, match="already belongs to unit 'v'"):
        declared(UnitLayout("v", (Parameter("w", (6, 5), "float32"),))).require_new_tensors(ROWS[0])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(ROWS[0], pp_ranks=(1,)), "declared by pipeline stage 0, now by stage 1: .* fully_shard"),
        (replace(ROWS[0], tp_rank=1), "declared for tensor-parallel rank 0, now for rank 1"),
        (UnitLayout("u@tp0", (part((1, 5)),)), r"'w' was declared with offsets \(0, 0\), now with \(1, 0\)"),
    ],
)
def test_other_places_of_a_unit_are_refused(other: UnitLayout, message: str) -> None:
    with pytest.raises(UnitMismatchError, match=message):
        require_same_layout(ROWS[0], other)


class Reader:
    """Reads units of which the whole tensors are known."""

    run, version = RunIdentity("r", "id"), 3

    def __init__(self, wholes: dict[str, torch.Tensor]) -> None:
        self.wholes, self.reads = wholes, list[str]()

    def read(self, unit: PlacedUnit, ranges: Sequence[tuple[int, int]] | None = None) -> Callable[[], torch.Tensor]:
        self.reads.append(unit.layout.unit)
        return lambda: self.flat(unit, ranges)

    def flat(self, unit: PlacedUnit, ranges: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
        flat = torch.zeros(unit.layout.size_bytes, dtype=torch.uint8)
        for index, each in enumerate(unit.layout.parameters):
            unit.view(flat, index).copy_(self.wholes[each.name][each.box.slices])
        if ranges is not None:
            needed = torch.zeros_like(flat)
            for start, stop in ranges:
                needed[start:stop] = 1
            flat[needed == 0] = 255
        return flat


def pinned(layouts: Sequence[UnitLayout], reader: Reader) -> PinnedVersion:
    weights = coordinator_pb2.DescribeWeightsResponse(
        version=3, units=[coordinator_pb2.UnitWeights(spec=layout.to_proto()) for layout in layouts]
    )
    return PinnedVersion(weights, reader, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
def test_a_pinned_version_has_whole_tensors(layouts: list[UnitLayout]) -> None:
    plain = UnitLayout("u", (Parameter("bias", (3,), "float32"), Parameter("scale", (), "float64")))
    wholes = {"w": WHOLE, "bias": torch.rand(3), "scale": torch.tensor(2.0, dtype=torch.float64)}
    reader = Reader(wholes)
    found = pinned([plain, *layouts], reader)
    assert [each.name for each in found.parameters] == ["bias", "scale", "w"]
    assert all(each.meta.shape == wholes[each.name].shape for each in found.parameters)
    got = dict(found.values())
    assert list(got) == ["bias", "scale", "w"] and all(torch.equal(got[name], wholes[name]) for name in wholes)
    assert reader.reads == ["u", *(layout.unit for layout in layouts)], "each unit is read once"


def test_the_next_unit_is_read_while_one_is_used() -> None:
    layouts = [UnitLayout(f"u{index}", (Parameter(f"w{index}", (2,), "float32"),)) for index in range(4)]
    reader = Reader({f"w{index}": torch.rand(2) for index in range(3)})  # w3 cannot be read
    values, reads = pinned(layouts, reader).values(), list[int]()
    for index in range(3):
        name, value = next(values)
        assert name == f"w{index}" and torch.equal(value, reader.wholes[name])
        reads.append(len(reader.reads))
    assert reads == [2, 3, 4], "one unit ahead"
    with pytest.raises(KeyError, match="w3"):
        next(values)


@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_and_changes_do_not_depend_on_the_parts(
    layouts: list[UnitLayout], dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes_module, "_BLOCK_NUMEL", 4)
    found = pinned(layouts, Reader({"w": WHOLE}))
    (stored,) = found.parameters
    after = WHOLE.clone()
    after[0, 4], after[1, 0], after[1, 2], after[4, 0], after[2, 4] = 5.0, 6.0, 7.0, 8.0, 9.0
    units = {}
    for part in stored.parts:
        layout = part.unit.layout
        if not layout.size_bytes:
            units[layout.unit] = UnitChanges(part.unit, torch.empty(0), [])
            continue
        before, new = (Reader({"w": each}).flat(part.unit).numpy().data for each in (WHOLE, after))
        spans = spans_of(layout, layout.segments(0, layout.size_bytes), AS_STORED, 0)
        pieces = shard_changes.encode(spans, before, new, 1 << 20)
        changes = ShardChanges.decode(spans, b"".join(pieces or []), layout.size_bytes, layout.unit)
        units[layout.unit] = UnitChanges(part.unit, torch.empty(0), [(0, layout.size_bytes, changes)])
    for index in range(3):
        ((_, value),) = found.values("w", slices={"w": (dim, index, 3)})
        assert torch.equal(value, WHOLE.chunk(3, dim)[index])
        ((_, region),) = found.choose("w", {"w": (dim, index, 3)})
        change = StoredChanges(stored, region, units, 1).find()
        if change is not None:
            assert change.indices is not None and bool((change.indices.diff() > 0).all())
            change.apply_to(value)
        assert torch.equal(value, after.chunk(3, dim)[index])
    last = StoredChanges(stored, region, units, 1)
    last.check_result(WHOLE)
    with pytest.raises(CorruptDataError, match="does not have the values of version 1"):
        last.check_result(WHOLE + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_change_is_written_into_tensors_of_all_dtypes_and_strides(dtype: torch.dtype, is_transposed: bool) -> None:
    before = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).to(dtype), requires_grad=dtype.itemsize > 1)
    tensor = before.detach().T.contiguous().T if is_transposed else before
    TensorChange("w", torch.tensor([1, 5]), torch.tensor([16.0, -0.5])).apply_to(tensor)
    assert tensor.float().tolist() == [[0.0, 16.0, 2.0], [3.0, 4.0, -0.5]]


def test_a_pinned_version_with_a_missing_part_is_refused() -> None:
    with pytest.raises(StepStateError, match="the run has 20 of the 30 elements of parameter 'w'"):
        pinned(ROWS[:1], Reader({"w": WHOLE}))


def test_a_reader_copies_parts_in_place() -> None:
    (stored,) = pinned(COLUMNS, Reader({"w": WHOLE})).parameters
    assert isinstance(stored, StoredParameter)
    model = torch.zeros(5, 6).t()  # not contiguous
    for each in stored.parts:
        flat = Reader({"w": WHOLE}).flat(each.unit)
        each.copy_to(model, flat)
    assert torch.equal(model, WHOLE)


def checkpoint_of(folder: Path, layouts: Sequence[UnitLayout]) -> shardwell.CheckpointReader:
    files = []
    for layout in layouts:
        (each,) = layout.parameters
        values = WHOLE[each.box.slices].flatten()
        pieces = {"values": values, "exp_avg": values * 2, "step": torch.tensor(3.0)}
        files.append(
            {
                Piece(
                    each.key,
                    state,
                    0,
                    each.numel,
                    "float32",
                    tuple(value.shape),
                    "elements" if value.dim() else "whole",
                ): value
                for state, value in pieces.items()
            }
            if each.numel
            else {}
        )
    optimizer = common_pb2.OptimizerStep(
        algorithm="adamw",
        groups=[common_pb2.ParameterGroup(hyperparameters={"lr": 0.1})],
        units=[common_pb2.UnitGroups(unit_index=index, group_indices=[0]) for index in range(len(layouts))],
    )
    return shardwell.open_checkpoint(
        write_checkpoint(folder, 3, files=files, units=layouts, optimizer=message_to_dict(optimizer))
    )


@pytest.mark.parametrize("layouts", [ROWS, COLUMNS])
def test_a_checkpoint_has_whole_tensors(tmp_path: Path, layouts: list[UnitLayout]) -> None:
    checkpoint = checkpoint_of(tmp_path, layouts)
    assert checkpoint.parameters == {"w": (6, 5)}
    assert torch.equal(checkpoint.read("w"), WHOLE)
    assert torch.equal(checkpoint.read("w", start=7, stop=21), WHOLE.flatten()[7:21])
    assert checkpoint.optimizer("w") == ("adamw", 3)
    state = checkpoint.optimizer_state("w")
    assert torch.equal(state["exp_avg"], WHOLE * 2) and state["step"] == 3
    assert {name: each.shape for name, each in checkpoint.optimizer_tensors("w").items()} == {
        "exp_avg": (6, 5),
        "step": (),
    }
    assert torch.equal(checkpoint.state_dict()["w"], WHOLE)
    (first, *_) = (layout.parameters[0] for layout in layouts)
    assert torch.equal(checkpoint.read(first.key), WHOLE[first.box.slices])


@pytest.mark.parametrize(("before", "after"), [(ROWS, COLUMNS), (COLUMNS, ROWS)])
def test_a_checkpoint_is_converted_to_another_grid(
    tmp_path: Path, before: list[UnitLayout], after: list[UnitLayout]
) -> None:
    """With the optimizer's state, by way of a torch checkpoint."""
    checkpoint_to_dcp(checkpoint_of(tmp_path / "before", before), tmp_path / "dcp")
    like = checkpoint_of(tmp_path / "like", after)
    got = shardwell.open_checkpoint(dcp_to_checkpoint(tmp_path / "dcp", tmp_path / "after", like=like))
    assert got.manifest.units == tuple(after) and got.optimizer("w") == ("adamw", 3)
    assert torch.equal(got.read("w"), WHOLE)
    state = got.optimizer_state("w")
    assert torch.equal(state["exp_avg"], WHOLE * 2) and state["step"] == 3


def test_optimizers_that_need_whole_tensors_refuse_parts() -> None:
    muon = common_pb2.OptimizerStep(algorithm="muon", groups=[common_pb2.ParameterGroup()])
    check_fit(muon, [-1], ROWS[0], [0])
    with pytest.raises(
        InvalidRequestError, match=r"muon needs whole tensors, but parameter 'w' of unit 'u@tp0' is a part"
    ):
        check_fit(muon, [0], ROWS[0], [0])
