"""Random initial values do not depend on cuts, and have the requested distribution."""

from __future__ import annotations

import math

import pytest
import torch

from shardwell import init
from shardwell_server.shard.arithmetic import random_values
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Box
from shardwell_wire.v1 import initialization_pb2

ODD = 3 * random_values.BLOCK_ELEMENTS + 17


def draw(how: init.Draw, *, seed: int = 1, stream: str = "w") -> initialization_pb2.ParameterDraw:
    return initialization_pb2.ParameterDraw(distribution=how.distribution, seed=seed, stream=stream)


def whole_of(numel: int) -> Box:
    return Box((numel,), (0,), (numel,))


def filled(
    how: init.Draw, size: int = ODD, first: int = 0, dtype: torch.dtype = torch.float32, **key: object
) -> torch.Tensor:
    values = torch.empty(size, dtype=dtype)
    random_values.fill(values, first, draw(how, **key), whole_of(first + size))  # type: ignore[arg-type]
    return values


KINDS = {
    "uniform": init.uniform(-0.5, 0.25),
    "normal": init.normal(1.0, 0.5),
    "trunc_normal": init.trunc_normal(0.0, 1.0, -0.5, 2.0),
    "constant": init.constant(0.1),
}


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_do_not_change_values(kind: str) -> None:
    whole = filled(KINDS[kind])
    for cut in (
        1,
        5,
        random_values.BLOCK_ELEMENTS - 1,
        random_values.BLOCK_ELEMENTS,
        2 * random_values.BLOCK_ELEMENTS + 3,
    ):
        parts = [filled(KINDS[kind], cut), filled(KINDS[kind], ODD - cut, cut)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_part_has_the_values_of_the_whole(kind: str, dim: int) -> None:
    shape = (70, 31, 23)  # several blocks
    numel = math.prod(shape)
    how = draw(KINDS[kind])
    how.zero_start, how.zero_stop = 5 * 31 * 23, 6 * 31 * 23
    whole = torch.empty(numel)
    random_values.fill(whole, 0, how, Box(shape, (0, 0, 0), shape))
    for index, expected in enumerate(whole.view(shape).chunk(3, dim)):
        offsets = [0, 0, 0]
        offsets[dim] = index * -(-shape[dim] // 3)
        box = Box(shape, tuple(offsets), tuple(expected.shape))
        cut = expected.numel() // 2 + 5
        shards = torch.empty(cut), torch.empty(expected.numel() - cut)
        random_values.fill(shards[0], 0, how, box)
        random_values.fill(shards[1], cut, how, box)
        assert torch.equal(torch.cat(shards).view(expected.shape), expected)


def test_values_depend_on_seed_and_stream() -> None:
    values = filled(init.normal())
    assert torch.equal(values, filled(init.normal()))
    assert not torch.equal(values, filled(init.normal(), seed=2))
    assert not torch.equal(values, filled(init.normal(), stream="v"))
    blocks = values[: 3 * random_values.BLOCK_ELEMENTS].view(3, -1)
    assert len({tuple(block[:3].tolist()) for block in blocks}) == 3


def test_values_match_the_specification() -> None:
    """The values are pinned, because servers of different releases must draw equal values."""
    got = filled(init.uniform(), 2, dtype=torch.float64), filled(init.normal(), 2, random_values.BLOCK_ELEMENTS)
    assert [values.tolist() for values in got] == PINNED


PINNED = [[0.15604345893833277, 0.015218052640904312], [0.06202792376279831, -0.5867211818695068]]


def test_values_have_the_requested_distribution() -> None:
    size = 200_000
    uniform, normal = filled(init.uniform(-2, 4), size), filled(init.normal(3, 2), size)
    assert uniform.min() >= -2 and uniform.max() <= 4
    assert abs(uniform.mean() - 1) < 0.02 and abs(uniform.std() - 6 / math.sqrt(12)) < 0.02
    assert abs(normal.mean() - 3) < 0.03 and abs(normal.std() - 2) < 0.02
    assert abs((normal < 1).float().mean() - 0.1587) < 0.005 and abs((normal > 7).float().mean() - 0.0228) < 0.002
    cut = filled(init.trunc_normal(0, 1, -0.5, 2), size)
    inside = filled(init.normal(), size)
    inside = inside[(inside >= -0.5) & (inside <= 2)]
    assert cut.min() >= -0.5 and cut.max() <= 2 and abs(cut.mean() - inside.mean()) < 0.01
    assert filled(init.normal(3, 0), 5).tolist() == [3] * 5


@pytest.mark.parametrize("kind", KINDS)
def test_zero_range_is_independent_of_cuts(kind: str) -> None:
    how = draw(KINDS[kind])
    how.zero_start, how.zero_stop = random_values.BLOCK_ELEMENTS - 3, random_values.BLOCK_ELEMENTS + 4
    expected = filled(KINDS[kind])
    expected[how.zero_start : how.zero_stop] = 0
    for cut in (1, random_values.BLOCK_ELEMENTS - 5, random_values.BLOCK_ELEMENTS, 2 * random_values.BLOCK_ELEMENTS):
        parts = torch.empty(cut), torch.empty(ODD - cut)
        random_values.fill(parts[0], 0, how, whole_of(ODD))
        random_values.fill(parts[1], cut, how, whole_of(ODD))
        assert torch.equal(torch.cat(parts), expected)
    how.zero_start = how.zero_stop + 1
    with pytest.raises(InvalidRequestError, match=r"'w'.*expected zero_start <= zero_stop"):
        random_values.check(how, "w")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    exact = filled(init.normal(), dtype=torch.float64)
    assert torch.equal(filled(init.normal(), dtype=dtype), exact.to(dtype))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (init.uniform(1, 0), "low <= high"),
        (init.uniform(0, math.inf), "finite"),
        (init.normal(0, -1), "deviation >= 0"),
        (init.normal(math.nan), "finite mean"),
        (init.constant(math.nan), "finite"),
        (init.trunc_normal(0, 1, 2, 2), "low < high"),
        (init.trunc_normal(0, 1, 50, 60), "positive probability"),
        (init.Draw(initialization_pb2.Distribution()), "no distribution"),
    ],
)
def test_invalid_distribution_error_names_the_parameter(how: init.Draw, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'blocks.0.w'.*{message}"):
        random_values.check(draw(how), "blocks.0.w")
