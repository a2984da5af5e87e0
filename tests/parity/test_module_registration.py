"""Units, names and classes of sharded modules, and modules that cannot be sharded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.module.fully_shard import ShardedModule, fully_shard
from shardwell.module.parameter_store import InitialValues
from shardwell.module.units import Units
from shardwell_wire.errors import CapacityError, TiedParameterError, UsageError
from shardwell_wire.model.layout import UnitLayout
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Gpt, Sharded, gpt, gpt_loss, inputs, wrap_blocks, wrap_whole


def backward(sharded: Sharded, number: int = 0) -> None:
    gpt_loss(sharded.model, number).backward()


def test_parameters_stay_the_same_objects() -> None:
    model = gpt()
    before = dict(model.named_parameters())
    sharded = Sharded(model, wrap_blocks)
    seen: list[bool] = []
    model.blocks[0].up.register_forward_pre_hook(
        lambda module, args: seen.append(module.weight is before["blocks.0.up.weight"])
    )
    for _ in range(2):
        backward(sharded)
        sharded.step()
        after = dict(model.named_parameters())
        assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert seen == [True, True]
    assert model.head.weight is model.tokens.weight


def test_optimizer_created_before_wrapping_has_the_sharded_parameters() -> None:
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded = Sharded(model, wrap_blocks)
    located = [sharded.units.locate(parameter) for parameter in optimizer.param_groups[0]["params"]]
    assert None not in located and len(set(located)) == len(located)
    assert located == [sharded.units.locate(parameter) for parameter in model.parameters()]
    assert sharded.units.locate(torch.zeros(3)) is None
    assert Sharded(gpt(), wrap_blocks).units.locate(next(model.parameters())) is None


def test_sharded_module_has_a_subclass_of_its_class() -> None:
    model = gpt()
    Sharded(model, wrap_blocks)
    assert isinstance(model, Gpt) and isinstance(model, ShardedModule)
    assert type(model) is not Gpt and type(model.blocks[0]) is type(model.blocks[1])
    assert not isinstance(model.blocks, ShardedModule)


def test_sharded_module_keeps_the_names_of_its_class() -> None:
    """Libraries write the class's name to files and compare it."""
    expected, model = str(gpt()), gpt()
    Sharded(model, wrap_blocks)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(model), name) == getattr(Gpt, name)
    assert str(model) == expected and model._get_name() == "Gpt"


def test_units_and_parameters_are_named_by_class_and_number() -> None:
    model = gpt()
    units = Units(InMemoryStore())
    session = SimpleNamespace(units=units)
    assert fully_shard([model.tokens, model.head], session) == [model.tokens, model.head]
    assert fully_shard(model.blocks[1], session) is model.blocks[1]
    fully_shard(model.blocks[0], session, name="first")
    fully_shard(model, session)
    layouts = {unit.name: [p.name for p in unit.layout.parameters] for unit in units}
    assert list(layouts) == ["Embedding+Linear-0", "Block-0", "first", "Gpt-0"]
    assert layouts["Embedding+Linear-0"] == ["Embedding+Linear-0.0.weight"]
    assert layouts["first"][0] == "first.norm1.weight"
    assert "Gpt-0.blocks.2.norm1.weight" in layouts["Gpt-0"]
    (tied,) = next(iter(units)).layout.parameters
    assert tied.aliases == ("Embedding+Linear-0.1.weight",)
    with pytest.raises(UsageError, match="has a unit named 'first' already"):
        fully_shard(nn.Linear(3, 3), session, name="first")


def test_module_registered_twice_has_both_names() -> None:
    shared = nn.Linear(3, 3, bias=False)
    units = Units(InMemoryStore())
    fully_shard(nn.Sequential(shared, nn.ReLU(), shared), SimpleNamespace(units=units))
    (unit,) = units
    (parameter,) = unit.layout.parameters
    assert (parameter.name, parameter.aliases) == ("Sequential-0.0.weight", ("Sequential-0.2.weight",))


def test_failed_declaration_changes_nothing() -> None:
    class Full(InMemoryStore):
        def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
            if layout.parameters[0].shape == (5, 7):
                raise CapacityError("not enough memory")
            return super().declare(layout, initial_values)

    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    units = Units(Full())
    with pytest.raises(CapacityError):
        fully_shard(model[0], SimpleNamespace(units=units))
    assert units.live_bytes == 0 and len(units) == 0 and type(model[0]) is nn.Linear
    assert model[0](inputs(0, 2, 7)).isfinite().all()
    fully_shard(model[1], SimpleNamespace(units=units))
    assert [unit.name for unit in units] == ["Linear-0"]


def test_tied_parameters_in_two_units_raise() -> None:
    model = gpt()
    session = SimpleNamespace(units=Units(InMemoryStore()))
    fully_shard(model.tokens, session)
    with pytest.raises(TiedParameterError, match=r"'Linear-0.weight' is tied to 'Embedding-0.weight'.*\[a, b\]"):
        fully_shard(model.head, session)
    with pytest.raises(TiedParameterError, match="fully_shard"):
        fully_shard(model, session)


def test_dropped_units_cause_no_false_ties() -> None:
    """Python reuses the ids of deleted parameters."""
    units = Units(InMemoryStore())
    for _ in range(20):
        fully_shard(nn.Linear(3, 3), SimpleNamespace(units=units))
    assert len(units) == 20


def test_wrapping_top_down_raises() -> None:
    model = gpt()
    session = SimpleNamespace(units=Units(InMemoryStore()))
    fully_shard(model, session)
    with pytest.raises(UsageError, match="bottom-up"):
        fully_shard(model.blocks[0], session)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: nn.ModuleList([nn.Linear(3, 3)]), "has no forward"),
        (lambda: nn.ModuleDict({"a": nn.Linear(3, 3)}), "has no forward"),
        (lambda: nn.LazyLinear(3), "no shape yet"),
        (list, "needs different modules"),
    ],
)
def test_unsupported_modules_are_rejected(make: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        fully_shard(make(), SimpleNamespace(units=Units(InMemoryStore())))


def test_sharding_twice_raises() -> None:
    model = gpt()
    sharded = Sharded(model, wrap_whole)
    with pytest.raises(UsageError, match="sharded already"):
        fully_shard(model, sharded.session)


def test_sharding_keeps_the_values_and_gradients_of_the_module() -> None:
    model = gpt()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.head.weight.grad = torch.ones_like(model.head.weight)
    sharded = Sharded(model, wrap_blocks)
    assert all(torch.equal(value, expected[name]) for name, value in sharded.state().items())
    assert model.head.weight.grad is not None and model.head.weight.grad.sum() == model.head.weight.numel()
