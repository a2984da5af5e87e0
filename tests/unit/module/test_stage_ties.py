"""Parameters that pipeline stages share: where they are found, and the units that they become."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardwell import auto_wrap
from shardwell.module.new_units import GridPlace
from shardwell.module.units import Units
from shardwell.parallel import split_model
from shardwell_wire.errors import TiedParameterError
from shardwell_wire.model.layout import UnitLayout
from tests.support.in_memory_store import InMemoryStore
from tests.support.split_gpt import gpt

SHARED = "token_embedding.weight"


def layouts(model: nn.Module, pp: int, pp_rank: int) -> dict[str, UnitLayout]:
    """Returns the layouts of the units that a trainer declares for a stage."""
    held: Any = SimpleNamespace(units=Units(InMemoryStore(), place=GridPlace(pp=pp, pp_rank=pp_rank)))
    auto_wrap(model, held)
    return {unit.name: unit.layout for unit in held.units}


def test_stages_declare_the_same_unit_for_a_shared_parameter() -> None:
    splits = [split_model(gpt(4, tied=True), 2) for _ in range(2)]  # each trainer builds the model
    first, last = (layouts(split.module(index), 2, index) for index, split in enumerate(splits))
    assert first[SHARED] == last[SHARED]
    (parameter,) = first[SHARED].parameters
    assert (parameter.name, parameter.aliases) == (SHARED, ("head.weight",))
    assert first[SHARED].pp_ranks == (0, 1)
    assert {name for name in first if name in last} == {SHARED}
    assert all(layout.pp_ranks == (1,) for name, layout in last.items() if name != SHARED)
    assert "token_embedding.weight = head.weight: shared by the stages 0, 1" in splits[0].describe()


def test_a_parameter_with_other_parameters_in_its_module_becomes_a_unit_of_its_own() -> None:
    model = gpt(2, tied=True)
    model.head = nn.Linear(12, 32, bias=True)
    model.head.weight = model.token_embedding.weight
    last = layouts(split_model(model, 2).module(1), 2, 1)
    assert [parameter.name for parameter in last[SHARED].parameters] == [SHARED]
    assert "head.bias" in {parameter.name for parameter in last["GPTStage1:pp1"].parameters}


def test_the_last_division_of_a_model_counts() -> None:
    model = gpt(2, tied=True)
    split_model(model, 2)
    assert SHARED not in layouts(split_model(model, 1).module(0), 2, 0)


def test_a_world_without_a_pipeline_ignores_the_division() -> None:
    model = gpt(2, tied=True)
    split_model(model, 2).describe()
    (found,) = (layout for layout in layouts(model, 1, 0).values() if SHARED in layout.index_by_name)
    assert found.pp_ranks == (0,)
    assert "head.weight" in found.index_by_name


def test_stages_of_one_trainer_cannot_share_a_parameter() -> None:
    split = split_model(gpt(3, tied=True), 3)
    with pytest.raises(TiedParameterError, match=r"tied over the stages 0, 2, of which one trainer runs two \(pp=2\)"):
        layouts(split.module(0), 2, 0)


def test_a_v_shaped_schedule_of_tied_stages_is_refused_with_a_schedule_that_works() -> None:
    split = split_model(gpt(4, tied=True), 4)
    held: Any = SimpleNamespace(units=Units(InMemoryStore(), place=GridPlace(pp=2, pp_rank=0)))
    auto_wrap(split.module(0), held)
    with pytest.raises(TiedParameterError, match=r"over the stages 0, 3, .* use the schedule 1F1B or GPipe, with"):
        auto_wrap(split.module(3), held)
    for index in range(2):
        found = layouts(split_model(gpt(4, tied=True), 2).module(index), 2, index)
        assert found[SHARED].pp_ranks == (0, 1), "one stage per trainer works"
