"""A shard server accepts neither gradients nor optimizers nor draws of parameters that no optimizer updates."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwell_server.optimizer_checks import check_fit
from shardwell_server.shard.shard_spec import Segments, ShardSpec
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import common_pb2

LAYOUT = UnitLayout("u", (Parameter("codes", (3,), "int8"), Parameter("scale", (3,), "float32")))
ADAMW = common_pb2.OptimizerStep(algorithm="adamw", groups=[common_pb2.ParameterGroup()])


def _numbers_of(name: str, *indices: int) -> frozenset[int]:
    run = RunIdentity("r", "id")
    spec = ShardSpec(run=run, layout=LAYOUT, index=0, start_bytes=0, stop_bytes=LAYOUT.size_bytes, dp=1)
    return Segments(spec).numbers_of(name, indices)


REQUESTS: dict[str, Callable[[], object]] = {
    "push": lambda: _numbers_of("parameter_indices", 0, 1),
    "optimizer": lambda: check_fit(ADAMW, [0, 0], LAYOUT, [0]),
}


@pytest.mark.parametrize("request_name", REQUESTS)
def test_requests_are_rejected(request_name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"'codes'.* is int8"):
        REQUESTS[request_name]()


def test_requests_for_other_parameters_of_the_unit_are_accepted() -> None:
    assert _numbers_of("parameter_indices", 1) == {1}
    assert _numbers_of("dropped_indices", 0) == {0}
    check_fit(ADAMW, [-1, 0], LAYOUT, [0])


def test_frozen_parameters_are_no_other_layout() -> None:
    frozen = UnitLayout("u", (Parameter("codes", (3,), "int8", frozen=True), LAYOUT.parameters[1]))
    assert frozen == LAYOUT and UnitLayout.from_proto(frozen.to_proto()) == LAYOUT
    with pytest.raises(InvalidRequestError, match="float8_e8m0fnu; expected one of"):
        UnitLayout("u", (Parameter("codes", (3,), "float8_e8m0fnu"),))
