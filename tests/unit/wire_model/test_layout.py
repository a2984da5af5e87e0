"""The flat layout: alignment, segments for any cut, cuts at blocks, and invalid units."""

import itertools
import random

import pytest

from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import (
    ALIGNMENT_BYTES,
    BLOCK_BYTES,
    Parameter,
    Segment,
    UnitLayout,
    by_any_name,
    cut,
    shown_names,
    with_model_names,
)
from shardwell_wire.v1 import common_pb2


def awkward_layout() -> UnitLayout:
    shapes = [((), "float32"), ((0,), "float32"), ((7919,), "float32"), ((3, 5), "bfloat16"), ((1021, 3), "float64")]
    return UnitLayout("u", tuple(Parameter(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(shapes)))


def test_parameters_are_aligned_and_do_not_overlap() -> None:
    layout, position = awkward_layout(), 0
    for start, parameter in zip(layout.starts, layout.parameters, strict=True):
        assert start % ALIGNMENT_BYTES == 0
        assert start >= position
        position = start + parameter.size_bytes
    assert layout.size_bytes >= position
    assert layout.size_bytes % ALIGNMENT_BYTES == 0


def test_segments_of_any_cut_tile_every_parameter() -> None:
    layout, rng = awkward_layout(), random.Random(0)
    for _ in range(50):
        bounds = sorted({0, layout.size_bytes, *(rng.randrange(layout.size_bytes // 64) * 64 for _ in range(5))})
        elements: dict[int, int] = {}
        for start, stop in itertools.pairwise(bounds):
            for segment in layout.segments(start, stop):
                assert start <= segment.start_bytes < segment.stop_bytes <= stop
                assert segment.start_element == elements.get(segment.parameter_index, 0)
                elements[segment.parameter_index] = segment.stop_element
        assert elements == {i: p.numel for i, p in enumerate(layout.parameters) if p.numel}


def test_packed_segments_skip_absent_parameters() -> None:
    layout = awkward_layout()
    assert [s.parameter_index for s in layout.packed_segments([0, 3], 0, layout.size_bytes)] == [0, 3]
    assert layout.packed_segments([2], 4096, 8192) == [Segment(2, 4096, 8192, (4096 - 64) // 4, (8192 - 64) // 4)]


@pytest.mark.parametrize("size", [0, 64, 4096, 4160, 100_000, 1 << 20])
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [3.0, 1.0, 2.0], [0.0, 5.0]])
@pytest.mark.parametrize("min_shard_bytes", [BLOCK_BYTES, 65536])
def test_cuts_cover_the_vector_at_blocks(size: int, weights: list[float], min_shard_bytes: int) -> None:
    ranges = cut(size, weights, min_shard_bytes)
    assert len(ranges) == len(weights)
    assert ranges[0][0] == 0
    assert ranges[-1][1] == size
    assert all(start == stop for (start, stop), weight in zip(ranges, weights, strict=True) if weight == 0)
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert stop == start
        assert stop % BLOCK_BYTES == 0 or stop == size


def test_cuts_are_proportional_to_weights() -> None:
    ranges = cut(1 << 22, [3.0, 1.0], BLOCK_BYTES)
    assert ranges == [(0, 3 << 20), (3 << 20, 4 << 20)]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((Parameter("a", (1,), "float8_e8m0fnu"),), "dtype float8_e8m0fnu"),
        ((Parameter("a", (1,), "float32"), Parameter("a", (1,), "float32")), "two parameters with the same name"),
        (
            (Parameter("a", (1,), "float32", aliases=("b",)), Parameter("b", (1,), "float32")),
            "two parameters with the same name",
        ),
        ((Parameter("", (1,), "float32"),), "a parameter without a name"),
        ((Parameter("a", (1 << 40, 2), "float32"),), "more than the limit"),
        ((Parameter("a", (1,) * 65, "float32"),), "'a' has 65 dimensions, more than 64"),
    ],
)
def test_invalid_units_are_rejected(parameters: tuple[Parameter, ...], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        UnitLayout("u", parameters)


def test_layout_round_trips_through_its_proto() -> None:
    layout = UnitLayout("u", (*awkward_layout().parameters, Parameter("tied", (2,), "float32", aliases=("other",))))
    assert UnitLayout.from_proto(layout.to_proto()) == layout


def test_tensor_placement_aligns_parameters_to_blocks_and_never_cuts_them() -> None:
    flat = awkward_layout()
    layout = UnitLayout("u", flat.parameters, "tensor")
    assert all(start % BLOCK_BYTES == 0 for start in (*layout.starts, layout.size_bytes))
    assert UnitLayout.from_proto(layout.to_proto()) == layout != flat == UnitLayout.from_proto(flat.to_proto())
    assert layout.parameters_cut_at([*layout.starts, layout.size_bytes]) == set()
    assert layout.parameters_cut_at([layout.starts[2] + 64, layout.starts[3] + 64, layout.starts[4] + 64]) == {2, 4}


def test_unknown_placement_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="placement 'row': expected one of flat, tensor"):
        UnitLayout("u", (), "row")
    with pytest.raises(InvalidRequestError, match="placement '7'"):
        UnitLayout.from_proto(common_pb2.UnitSpec(name="u", placement=7))


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (UnitLayout("whole", (Parameter("p", (4,), "float32"),), pp_ranks=(1,)), (0, 1)),
        (UnitLayout("shared", (Parameter("p", (4,), "float32"),), pp_ranks=(1, 3)), (0, 1)),
        (UnitLayout("part", (Parameter("p", (2,), "float32", (), (4,), (2,)),), tp_rank=1, pp_ranks=(0, 2)), (1, 0)),
    ],
)
def test_one_trainer_of_a_replica_updates_a_unit(layout: UnitLayout, expected: tuple[int, int]) -> None:
    assert [at for at in itertools.product(range(2), range(4)) if layout.is_updated_by(*at)] == [expected]


def test_contributors_are_numbered_by_data_context_and_pipeline_rank() -> None:
    layout = UnitLayout("tied", (Parameter("w", (2,), "float32"),), pp_ranks=(0, 3), cp=2)
    places = list(itertools.product(range(2), range(2), (0, 3)))
    assert [layout.contributor(dp, pp, cp) for dp, cp, pp in places] == list(range(8))
    assert layout.contributors_per_item == 4 and UnitLayout.from_proto(layout.to_proto()) == layout
    assert [at for at in itertools.product((0, 3), range(2)) if layout.is_updated_by(0, *at)] == [(0, 0)]
    with pytest.raises(InvalidRequestError, match="cp_rank is 2, but unit 'tied' has 2"):
        layout.contributor(0, 0, 2)
    with pytest.raises(InvalidRequestError, match="of buffers has cp 2"):
        UnitLayout("statistics", (Parameter("w", (2,), "float32"),), kind="buffers", cp=2)


def named(unit: str, name: str, *model_names: str, offsets: tuple[int, ...] = ()) -> UnitLayout:
    whole = (2,) if offsets else ()
    return UnitLayout(unit, (Parameter(name, (1,), "float32", (), whole, offsets, model_names=model_names),))


def test_names_in_the_model_are_shown_and_found() -> None:
    parts = [named("B@tp0", "B.w", offsets=(0,)), named("B@tp1", "B.w", "blocks.0.w", "tied.w", offsets=(1,))]
    shown = shown_names([*parts, named("head", "head.w")])
    assert shown == {"B.w": ("blocks.0.w", "tied.w"), "head.w": ("head.w",)}
    assert by_any_name(shown) == {"blocks.0.w": "B.w", "tied.w": "B.w", "B.w": "B.w", "head.w": "head.w"}


def test_equal_names_of_two_tensors_are_not_shown() -> None:
    shown = shown_names(
        [named("first", "first.w", "0.w"), named("second", "second.w", "0.w"), named("c", "c.w", "1.w")]
    )
    assert shown == {name: (name,) for name in ("first.w", "second.w", "c.w")}


def test_names_in_the_model_travel_and_do_not_distinguish_layouts() -> None:
    layout = named("B", "B.w")
    renamed = layout.named({"B.w": ("w",), "other": ("x",)})
    assert renamed == layout and UnitLayout.from_proto(renamed.to_proto()).parameters[0].model_names == ("w",)
    assert renamed.parameters[0].shown_name == "w" and layout.parameters[0].shown_name == "B.w"
    assert renamed.named({"B.w": ("w",)}) is renamed
    assert renamed.named({"B.w": ()}).parameters[0].shown_name == "B.w"


def test_names_in_the_model_are_aliases_unless_the_run_has_them() -> None:
    units = [named("B", "B.w", "0.w", "tied.w"), named("0", "0.w", "1.w"), named("c", "c.w")]
    assert [unit.parameters[0].aliases for unit in with_model_names(units)] == [("tied.w",), ("1.w",), ()]
