"""Which modules ``auto_wrap`` makes units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.fully_shard import fully_shard
from shardwell.units import Units
from shardwell.wrap import CustomPolicy, ModuleTypePolicy, NoWrapPolicy, SizePolicy, WrapPolicy, auto_wrap
from shardwell_wire.errors import UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Block, Gpt, Pair, gpt, gpt_loss


def wrapped(model: nn.Module, policy: WrapPolicy, **options: Any) -> dict[str, list[str]]:
    """Parameter names by unit, in the order of the calls."""
    session = SimpleNamespace(units=Units(InMemoryStore()))
    assert auto_wrap(model, session, policy, **options) is model
    return {unit.name: [parameter.name for parameter in unit.layout.parameters] for unit in session.units}


POLICIES: dict[str, WrapPolicy] = {
    "size": SizePolicy(min_num_params=1000),
    "type": ModuleTypePolicy({Block}),
    "custom": CustomPolicy(lambda module: isinstance(module, nn.LayerNorm)),
    "none": NoWrapPolicy(),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_the_same_whatever_the_policy(policy: str) -> None:
    Pair(gpt(), lambda model, session: auto_wrap(model, session, POLICIES[policy])).train(gpt_loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_have_the_names_of_the_model(policy: str) -> None:
    model = gpt()
    names = [name for name, _ in model.named_parameters()]
    found = wrapped(model, POLICIES[policy])
    assert sorted(name for unit in found.values() for name in unit) == sorted(names)
    assert list(found)[-1] == "Gpt"
    assert all(name.startswith(f"{unit}.") for unit, own in found.items() if unit != "Gpt" for name in own)


def test_module_types() -> None:
    assert list(wrapped(gpt(), ModuleTypePolicy({Block}))) == ["blocks.0", "blocks.1", "blocks.2", "Gpt"]
    nested = wrapped(gpt(), ModuleTypePolicy([Block, nn.LayerNorm]))
    assert list(nested)[:4] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.0", "blocks.1.norm1"]


def test_subclass_of_a_wanted_type() -> None:
    class Special(Block):
        pass

    model = gpt()
    model.blocks[1] = Special()
    assert "blocks.1" in wrapped(model, ModuleTypePolicy({Block}))


def test_no_wrap_is_one_unit() -> None:
    assert list(wrapped(gpt(), NoWrapPolicy())) == ["Gpt"]


def test_size_counts_what_no_inner_unit_took() -> None:
    class Pair(nn.Module):
        def __init__(self, first: int, second: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(first, 1, bias=False), nn.Linear(second, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Pair(100, 60), Pair(60, 60), Pair(10, 10))
    assert list(wrapped(model, SizePolicy(min_num_params=100))) == ["0.first", "1", "Sequential"]


def test_size_at_its_limit() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(9, 11, bias=False))
    assert list(wrapped(model, SizePolicy(min_num_params=100))) == ["0", "Sequential"]


def test_containers_and_children_of_attention_are_no_units() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2)])
            self.by_name = nn.ModuleDict({"a": nn.Linear(8, 8)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert list(wrapped(Model(), SizePolicy(min_num_params=1))) == ["layers.0", "by_name.a"]


def test_tied_modules_stay_with_what_contains_both() -> None:
    """The head is tied to the embedding: neither alone can be a unit, a block inside can."""
    found = wrapped(gpt(), SizePolicy(min_num_params=100))
    assert "tokens" not in found and "head" not in found and "positions" in found and "blocks.0.up" in found
    assert "tokens.weight" in found["Gpt"]


def test_module_whose_ties_are_all_inside_is_a_unit() -> None:
    found = wrapped(nn.Sequential(gpt(), nn.Linear(3, 3)), ModuleTypePolicy({Gpt}))
    assert list(found) == ["0", "Sequential"]


def test_tied_parameters_still_count_for_the_module_around_them() -> None:
    """The embedding is large enough alone, but it is tied: the model that holds both has its size."""
    found = wrapped(nn.Sequential(gpt(layers=0), nn.Linear(3, 3)), SizePolicy(min_num_params=131 * 20))
    assert list(found) == ["0", "Sequential"]


def test_rest_of_a_model_that_is_sharded_in_part() -> None:
    model = gpt()
    session = SimpleNamespace(units=Units(InMemoryStore()))
    fully_shard(model.blocks[1], session)
    auto_wrap(model, session, ModuleTypePolicy({Block}))
    assert [unit.name for unit in session.units] == ["Block-0", "blocks.0", "blocks.2", "Gpt"]


def test_module_used_twice_is_one_unit() -> None:
    shared = nn.Linear(12, 12)
    found = wrapped(nn.Sequential(shared, nn.Linear(12, 3), shared), ModuleTypePolicy({nn.Linear}))
    assert list(found) == ["0", "1"]


def test_two_models_of_one_class_in_one_session() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    for _ in range(2):
        auto_wrap(gpt(), session, NoWrapPolicy())
    assert [unit.name for unit in session.units] == ["Gpt", "Gpt-0"]


def test_options_reach_every_unit() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    auto_wrap(gpt(), session, ModuleTypePolicy({Block}), reshard_after_forward=False)
    assert {unit.settings.reshard_after_forward for unit in session.units} == {False}


@pytest.mark.parametrize("make", [lambda: SizePolicy(0), lambda: ModuleTypePolicy({"Block"})])
def test_impossible_policies(make: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        make()
