"""Names of buffers in a run and in the model."""

from __future__ import annotations

import pytest

from shardwell.weights.run_names import buffer_name
from shardwell_wire.layout import Parameter, UnitLayout


def unit(name: str, *parameters: str) -> UnitLayout:
    return UnitLayout(name, tuple(Parameter(parameter, (2,), "float32") for parameter in parameters))


LAYOUTS = [
    unit("blocks.1", "blocks.1.weight"),
    unit("blocks.10", "blocks.10.weight"),
    unit("Block-0", "Block-0.w"),
    unit("Model", "head.weight"),
]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("blocks.10.mean", "blocks.10.mean"),
        ("Block-0.mean", "Block-0.mean"),
        ("elsewhere.mean", "elsewhere.mean"),
        ("Model.norm.mean", "norm.mean"),
    ],
)
def test_a_buffer_is_named_as_the_parameters_beside_it(name: str, expected: str) -> None:
    assert buffer_name(name, LAYOUTS) == expected
