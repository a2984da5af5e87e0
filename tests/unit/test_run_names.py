"""Names in a run and names in the model."""

from __future__ import annotations

import pytest

from shardwell.weights.run_names import buffer_name, name_on, names_in_model
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import Parameter, UnitLayout
from shardwell_wire.topology import World


def unit(name: str, *parameters: str) -> UnitLayout:
    return UnitLayout(name, tuple(Parameter(parameter, (2,), "float32") for parameter in parameters))


STAGES = [unit("pp0.tp0.blocks.0", "pp0.tp0.blocks.0.weight"), unit("pp1.tp0.Model", "pp1.tp0.head.weight")]


def test_stages_lose_what_tells_them_apart() -> None:
    names = names_in_model(World(pp=2), STAGES, "r")
    assert list(names.values()) == ["blocks.0.weight", "head.weight"]
    assert buffer_name("pp0.tp0.blocks.0.norm.mean", STAGES, names) == "blocks.0.norm.mean"
    assert buffer_name("pp1.tp0.Model.norm.mean", STAGES, names) == "norm.mean"


def test_stages_with_the_same_names_keep_it() -> None:
    layouts = [unit("pp0.tp0.Model", "pp0.tp0.0.weight"), unit("pp1.tp0.Model", "pp1.tp0.0.weight")]
    names = names_in_model(World(pp=2), layouts, "r")
    assert list(names.values()) == ["pp0.tp0.0.weight", "pp1.tp0.0.weight"]
    assert buffer_name("pp1.tp0.Model.1.mean", layouts, names) == "pp1.tp0.1.mean"


def test_names_of_one_stage_are_the_models() -> None:
    layouts = [unit("blocks.1", "blocks.1.weight"), unit("blocks.10", "blocks.10.weight"), unit("Block-0", "Block-0.w")]
    names = names_in_model(World(dp=2), layouts, "r")
    assert all(name == own for own, name in names.items())
    for name in ("blocks.10.mean", "Block-0.mean", "elsewhere.mean"):
        assert buffer_name(name, layouts, names) == name


def test_what_only_trainers_can_join_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"run 'r' is split by tensor parallelism over 2 ranks.*shardwell.save_safetensors"
    ):
        names_in_model(World(tp=2), STAGES, "r")


def test_another_tensor_rank() -> None:
    assert name_on(3, "pp1.tp0.blocks.0") == "pp1.tp3.blocks.0"
    assert name_on(0, "blocks.pp1.tp2.x") == "blocks.pp1.tp2.x"
