"""The table of optimizers agrees with the client's constructors and the server's arithmetic."""

from __future__ import annotations

import inspect

import pytest

import shardwell
from shardwell_server.shard.arithmetic.algorithms import ENGINES
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS

CLASSES = {
    kind.algorithm: kind
    for kind in (getattr(shardwell.optim, name) for name in shardwell.optim.__all__)
    if getattr(kind, "algorithm", "")
}


def test_every_optimizer_has_a_class_and_an_engine() -> None:
    assert set(OPTIMIZERS) == set(CLASSES) == set(ENGINES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_defaults_of_the_table_equal_the_defaults_of_the_constructor(name: str) -> None:
    defaults = {each.name: each.default for each in inspect.signature(CLASSES[name]).parameters.values()}
    for hyperparameter in OPTIMIZERS[name].hyperparameters:
        if hyperparameter.default is not None:
            assert hyperparameter.value_in(defaults) == hyperparameter.default


def test_state_bytes_count_enabled_tensors_and_factored_shapes() -> None:
    layout = UnitLayout("u", (Parameter("matrix", (32, 64), "float32"), Parameter("vector", (7,), "float32")))
    assert OPTIMIZERS["adamw"].state_bytes(layout) == 2 * layout.size_bytes
    assert OPTIMIZERS["adamw"].state_bytes(layout, {"amsgrad"}) == 3 * layout.size_bytes
    assert OPTIMIZERS["sgd"].state_bytes(layout) == 0
    assert OPTIMIZERS["sgd"].state_bytes(layout, {"momentum"}) == layout.size_bytes
    assert OPTIMIZERS["adafactor"].state_bytes(layout) == 4 * (32 + 64 + 7)
