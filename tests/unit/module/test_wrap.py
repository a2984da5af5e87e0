"""``auto_wrap`` makes units of the modules that the policy chooses."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.module.fully_shard import fully_shard
from shardwell.module.unit import owner_of
from shardwell.module.units import Units
from shardwell.wrapping.auto_wrap import auto_wrap
from shardwell.wrapping.policies import CustomPolicy, ModuleTypePolicy, NoWrapPolicy, SizePolicy, WrapPolicy
from shardwell_wire.errors import TiedParameterError, UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Block, Gpt, Pair, gpt, gpt_loss, inputs


def wrapped(model: nn.Module, policy: WrapPolicy | None, **options: Any) -> dict[str, list[str]]:
    """Returns parameter names by unit, in the order of creation."""
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
def test_training_does_not_depend_on_the_policy(policy: str) -> None:
    Pair(gpt(), lambda model, session: auto_wrap(model, session, POLICIES[policy])).train(gpt_loss)


@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_are_named_as_in_the_model(policy: str) -> None:
    model = gpt()
    names = [name for name, _ in model.named_parameters()]
    found = wrapped(model, POLICIES[policy])
    assert sorted(name for unit in found.values() for name in unit) == sorted(names)
    assert list(found)[-1] == "Gpt"
    assert all(name.startswith(f"{unit}.") for unit, own in found.items() if unit != "Gpt" for name in own)


def test_module_type_policy_selects_types() -> None:
    assert list(wrapped(gpt(), ModuleTypePolicy({Block}))) == ["blocks.0", "blocks.1", "blocks.2", "Gpt"]
    nested = wrapped(gpt(), ModuleTypePolicy([Block, nn.LayerNorm]))
    assert list(nested)[:4] == ["blocks.0.norm1", "blocks.0.norm2", "blocks.0", "blocks.1.norm1"]


def test_module_type_policy_selects_subclasses() -> None:
    class Special(Block):
        pass

    model = gpt()
    model.blocks[1] = Special()
    assert "blocks.1" in wrapped(model, ModuleTypePolicy({Block}))


def test_no_wrap_policy_makes_one_unit() -> None:
    assert list(wrapped(gpt(), NoWrapPolicy())) == ["Gpt"]


def test_size_policy_counts_parameters_outside_inner_units() -> None:
    class Pair(nn.Module):
        def __init__(self, first: int, second: int) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(first, 1, bias=False), nn.Linear(second, 1, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Sequential(Pair(100, 60), Pair(60, 60), Pair(10, 10))
    assert list(wrapped(model, SizePolicy(min_num_params=100))) == ["0.first", "1", "Sequential"]


def test_size_policy_includes_the_limit() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(9, 11, bias=False))
    assert list(wrapped(model, SizePolicy(min_num_params=100))) == ["0", "Sequential"]


def test_containers_and_children_of_attention_do_not_become_units() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2)])
            self.by_name = nn.ModuleDict({"a": nn.Linear(8, 8)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert list(wrapped(Model(), SizePolicy(min_num_params=1))) == ["layers.0", "by_name.a"]


def test_tied_modules_belong_to_the_unit_around_both() -> None:
    """The head is tied to the embedding, so neither becomes a unit. The blocks do."""
    found = wrapped(gpt(), SizePolicy(min_num_params=100))
    assert "tokens" not in found and "head" not in found and "positions" in found and "blocks.0.up" in found
    assert "tokens.weight" in found["Gpt"]


def test_module_with_inner_ties_becomes_a_unit() -> None:
    found = wrapped(nn.Sequential(gpt(), nn.Linear(3, 3)), ModuleTypePolicy({Gpt}))
    assert list(found) == ["0", "Sequential"]


def test_tied_parameters_still_count_for_the_module_around_them() -> None:
    """The embedding is large enough, but tied, so its size counts for the model around both."""
    found = wrapped(nn.Sequential(gpt(layers=0), nn.Linear(3, 3)), SizePolicy(min_num_params=131 * 20))
    assert list(found) == ["0", "Sequential"]


def test_rest_of_a_partly_sharded_model_is_wrapped() -> None:
    model = gpt()
    session = SimpleNamespace(units=Units(InMemoryStore()))
    fully_shard(model.blocks[1], session)
    auto_wrap(model, session, ModuleTypePolicy({Block}))
    assert [unit.name for unit in session.units] == ["Block-0", "blocks.0", "blocks.2", "Gpt"]


def test_module_used_twice_becomes_one_unit() -> None:
    shared = nn.Linear(12, 12)
    found = wrapped(nn.Sequential(shared, nn.Linear(12, 3), shared), ModuleTypePolicy({nn.Linear}))
    assert list(found) == ["0", "1"]


def test_two_models_of_one_class_get_different_names() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    for _ in range(2):
        auto_wrap(gpt(), session, NoWrapPolicy())
    assert [unit.name for unit in session.units] == ["Gpt", "Gpt-0"]


def test_second_model_with_equal_units_and_other_parameters_gets_a_prefix() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    for layer in (nn.Linear(4, 4), nn.PReLU(4)):
        auto_wrap(nn.Sequential(layer), session, ModuleTypePolicy({nn.Linear, nn.PReLU}))
    names = [each.name for unit in session.units for each in unit.layout.parameters]
    assert names == ["0.weight", "0.bias", "Sequential-0.0.weight"]


def test_options_apply_to_every_unit() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    auto_wrap(gpt(), session, ModuleTypePolicy({Block}), reshard_after_forward=False)
    assert {unit.settings.reshard_after_forward for unit in session.units} == {False}


def test_ignored_parameters_are_not_sharded_and_do_not_tie() -> None:
    """The embedding is tied to the head, but both are ignored."""
    model = gpt()
    found = wrapped(model, SizePolicy(min_num_params=1), ignored_params={model.tokens.weight})
    assert not any(name.startswith(("tokens", "head")) for names in found.values() for name in names)
    assert owner_of(model.tokens.weight) is None and model.tokens.weight.sum().isfinite()
    assert owner_of(model.positions.weight) is not None


def test_default_policy_wraps_repeated_blocks() -> None:
    assert list(wrapped(gpt(), None)) == ["blocks.0", "blocks.1", "blocks.2", "Gpt"]


def test_default_policy_wraps_the_outermost_blocks() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.parts[0](x))

    model = nn.Sequential(nn.Sequential(Layer(), Layer()), nn.ModuleDict({"a": Layer(), "b": Layer()}), nn.ReLU())
    assert list(wrapped(model, None)) == ["0.0", "0.1", "1.a", "1.b"]


def test_default_policy_wraps_modules_as_large_as_a_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.positions = nn.Embedding(100, 8), nn.Embedding(10, 8)
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 80)])
            self.head = nn.Linear(8, 100)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert list(wrapped(Model(), None)) == ["tokens", "layers.0", "layers.1", "layers.2", "head", "Model"]


def test_default_policy_without_blocks_uses_sizes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Linear(1024, 1024), nn.Linear(1024, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.small(self.large(x))

    assert list(wrapped(Model(), None)) == ["large", "Model"]


def test_default_policy_uses_no_split_modules() -> None:
    """A model with ``_no_split_modules``, as in Hugging Face's models."""
    model = gpt()
    model._no_split_modules = ["LayerNorm"]
    assert "blocks.0.norm1" in wrapped(model, None) and "blocks.0" not in wrapped(gpt_named("LayerNorm"), None)
    assert list(wrapped(gpt_named("Absent"), None)) == ["blocks.0", "blocks.1", "blocks.2", "Gpt"]


def gpt_named(name: str) -> Gpt:
    model = gpt()
    model._no_split_modules = [name]
    return model


def test_auto_wrap_keeps_existing_units_of_several_modules() -> None:
    """A tied embedding and its head form one unit before the rest is wrapped."""
    model = gpt()
    session = SimpleNamespace(units=Units(InMemoryStore()))
    fully_shard([model.tokens, model.head], session, name="vocabulary")
    auto_wrap(model, session)
    assert [unit.name for unit in session.units] == ["vocabulary", "blocks.0", "blocks.1", "blocks.2", "Gpt"]


def vocabulary_and_blocks(model: Gpt) -> CustomPolicy:
    """Puts the tied embedding and head into one unit, and each block into its own unit."""
    return CustomPolicy(
        lambda module: "vocabulary" if module in (model.tokens, model.head) else isinstance(module, Block)
    )


def test_custom_policy_groups_modules_by_name() -> None:
    """Tied modules can be grouped, although neither could become a unit alone."""
    model = gpt()
    found = wrapped(model, vocabulary_and_blocks(model))
    assert list(found) == ["vocabulary", "blocks.0", "blocks.1", "blocks.2", "Gpt"]
    assert found["vocabulary"] == ["tokens.weight"] and "tokens.weight" not in found["Gpt"]


def test_training_with_grouped_modules_matches() -> None:
    def wrap(model: Any, session: Any) -> None:
        auto_wrap(model, session, vocabulary_and_blocks(model))

    Pair(gpt(), wrap).train(gpt_loss)


def test_units_are_made_inner_first_with_groups() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)), nn.PReLU())
    first, second = model[0], model[1][0]
    names = {id(first[0]): "pair", id(model[1]): "pair", id(first): True, id(second): True}
    found = wrapped(model, CustomPolicy(lambda module: names.get(id(module), False)))
    assert list(found) == ["1.0", "pair", "0", "Sequential"]
    assert found["pair"] == ["0.0.weight", "0.0.bias"] and found["0"] == ["0.1.weight", "0.1.bias"]


def test_invalid_groups_are_rejected() -> None:
    model = gpt()
    with pytest.raises(UsageError, match="puts Block and a module inside it into one unit 'x'"):
        wrapped(model, CustomPolicy(lambda module: "x" if module in (model.blocks[0], model.blocks[0].up) else None))
    with pytest.raises(
        TiedParameterError, match=r"'x' of Embedding shares a parameter.*return 'x' for that module too"
    ):
        wrapped(model, CustomPolicy(lambda module: "x" if module is model.tokens else None))
    assert not any(map(owner_of, model.parameters()))


def test_ignored_parameters_do_not_count() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(9, 11, bias=False))
    model[0].extra = nn.Parameter(torch.zeros(5))
    wanted = SizePolicy(min_num_params=100)
    assert list(wrapped(model, wanted, ignored_params={model[0].extra})) == ["0", "Sequential"]
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(9, 11, bias=False))
    model[0].extra = nn.Parameter(torch.zeros(5))
    assert list(wrapped(model, wanted, ignored_params={model[0].weight})) == ["Sequential"]
    large = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(4))
    assert list(wrapped(large, None, ignored_params={large[0].weight})) == ["Sequential"]


class Parent(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(5, 5), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.shared(self.own(x))
        return result


def siblings() -> nn.Sequential:
    shared = nn.Linear(5, 5)
    return nn.Sequential(Parent(shared), Parent(shared), nn.Linear(5, 5))


def test_parents_of_a_shared_module_become_units_if_it_is_a_unit() -> None:
    """Otherwise the unit around the parents would contain all their parameters."""
    with pytest.warns(UserWarning, match="chooses no module"):
        assert list(wrapped(siblings(), CustomPolicy(lambda module: isinstance(module, int)))) == ["Sequential"]
    assert list(wrapped(siblings(), ModuleTypePolicy({Parent, nn.Linear}))) == ["0.own", "0.shared", "1.own", "2"]
    model = siblings()
    by_size = wrapped(model, CustomPolicy(lambda module: module is model[0].shared or isinstance(module, Parent)))
    assert list(by_size) == ["0.shared", "0", "1", "Sequential"]


@pytest.mark.parametrize("policy", [None, ModuleTypePolicy({Parent}), SizePolicy(40), ModuleTypePolicy({nn.Linear})])
@pytest.mark.filterwarnings("ignore:.*chooses no module")
def test_module_with_two_parents_trains(policy: WrapPolicy | None) -> None:
    torch.manual_seed(0)
    pair = Pair(siblings(), lambda model, session: auto_wrap(model, session, policy))
    pair.train(lambda model, number: model(inputs(number, 4, 5)).square().sum())


def test_policy_without_units_warns() -> None:
    with pytest.warns(UserWarning, match=r"ModuleTypePolicy.*chooses no module of Gpt.*has .*Block.*NoWrapPolicy\(\)"):
        wrapped(gpt(), ModuleTypePolicy({nn.Conv2d}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped(gpt(), NoWrapPolicy())
        wrapped(gpt(), SizePolicy(10**9))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SizePolicy(0),
        lambda: ModuleTypePolicy({"Block"}),
        lambda: ModuleTypePolicy(Block),
        lambda: ModuleTypePolicy(set()),
        lambda: CustomPolicy(Block),
        lambda: wrapped(gpt(), NoWrapPolicy),
        lambda: wrapped(gpt(), {Block}),
    ],
)
def test_invalid_policies_are_rejected(make: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        make()
