"""Models on the meta device are initialised by their own modules, one unit at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import NoWrapPolicy, SizePolicy, auto_wrap
from shardwell.module.fully_shard import fully_shard
from shardwell.module.parameter_store import InitialValues
from shardwell.module.unit import owner_of
from shardwell.module.units import Units
from shardwell.seeds import derive_seed
from shardwell.weights.state_dict import full_state_dict
from shardwell_wire.errors import CapacityError, UsageError
from shardwell_wire.model.layout import UnitLayout
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import Gpt, Sharded, gpt, gpt_loss, inputs

SEED = 7


def meta_gpt() -> Gpt:
    with torch.device("meta"):
        return Gpt()


def initialised_gpt(seed: int = SEED) -> Gpt:
    """Returns the plain model with the initial values of a run with that seed."""
    model, seen = gpt(), set()
    for name, _ in model.named_parameters():
        module = model.get_submodule(name.rpartition(".")[0])
        if module not in seen:
            seen.add(module)
            torch.manual_seed(derive_seed(seed, "initial", f"{name}/{type(module).__name__}"))
            module.reset_parameters()  # type: ignore[operator]
    return model


def session(**options: Any) -> Any:
    return SimpleNamespace(units=Units(InMemoryStore(), init_seed=SEED, **options))


def assert_same(expected: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(expected)
    assert [name for name in expected if not torch.equal(expected[name], got[name])] == []


@pytest.mark.parametrize("policy", [NoWrapPolicy(), SizePolicy(1000), SizePolicy(20)])
def test_initial_values_do_not_depend_on_units(policy: Any) -> None:
    model = auto_wrap(meta_gpt(), session(), policy)
    assert_same(initialised_gpt().state_dict(), full_state_dict(model))


def test_meta_model_trains_as_the_plain_model() -> None:
    plain = initialised_gpt()
    sharded = Sharded(meta_gpt(), lambda model, held: auto_wrap(model, with_unit_names(held), SizePolicy(1000)))
    optimizer = fused_adamw(plain.parameters())
    for number in range(3):
        losses = []
        for model in (plain, sharded.model):
            torch.manual_seed(number)
            loss = gpt_loss(model, number)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        optimizer.step()
        optimizer.zero_grad()
        sharded.step()
    assert_same(plain.state_dict(), sharded.state())


def with_unit_names(held: Any) -> Any:
    held.units.init_seed = SEED
    return held


def test_parameters_stay_the_same_objects_and_tied() -> None:
    model = meta_gpt()
    before = dict(model.named_parameters(remove_duplicate=False))
    with torch.device("meta"):  # the context is still active
        auto_wrap(model, session(), SizePolicy(1000))
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter for name, parameter in before.items())
    assert model.head.weight is model.tokens.weight
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_only_one_unit_has_memory_at_a_time() -> None:
    held = session(prefetch_bytes=0)
    auto_wrap(meta_gpt(), held, SizePolicy(1000))
    assert held.units.live_bytes == 0
    assert held.units.peak_bytes == max(unit.layout.size_bytes for unit in held.units)


def test_buffers_cached_weights_and_nested_parameters_are_initialised() -> None:
    """Covers buffers, weights that a module caches, and parameters that a parent module initialises."""

    with torch.device("meta"):
        norm, lstm, attention = nn.BatchNorm1d(3), nn.LSTM(3, 4, bias=False), nn.MultiheadAttention(6, 2)
    held, generator_state = session(), torch.get_rng_state()
    for module in (norm, lstm, attention):
        fully_shard(module, held)
    assert torch.equal(torch.get_rng_state(), generator_state)
    assert norm.running_var.tolist() == [1, 1, 1] and norm.num_batches_tracked.item() == 0
    assert full_state_dict(attention)["out_proj.bias"].tolist() == [0] * 6
    plain = nn.LSTM(3, 4, bias=False)
    plain.load_state_dict(full_state_dict(lstm))
    x = inputs(0, 5, 3)
    assert torch.equal(lstm(x)[0], plain(x)[0])


def test_function_as_source_initialises_containers_after_their_parts() -> None:
    called = []

    def init(module: nn.Module) -> None:
        called.append(type(module).__name__)
        for parameter in module.parameters():
            if owner_of(parameter) is None:
                parameter.fill_(len(called))

    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3))
    held = session()
    fully_shard(model[0], held, source=init)
    fully_shard(model, held, source=init)
    assert called == ["Linear", "Linear", "Sequential", "Linear", "Sequential"]
    assert {name: value.mean().item() for name, value in full_state_dict(model).items() if "weight" in name} == {
        "0.0.weight": 3.0,
        "0.1.weight": 3.0,
        "1.weight": 5.0,
    }


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_module_that_cannot_initialise_itself_is_rejected_unchanged() -> None:
    with torch.device("meta"):
        model = Bare()
    held = session()
    with pytest.raises(UsageError, match=r"Bare \('Bare-0.scale'\) has 'scale' on the meta device.*source="):
        fully_shard(model, held)
    assert model.scale.is_meta and type(model) is Bare and len(held.units) == 0 and held.units.live_bytes == 0
    fully_shard(model, held, source=lambda module: nn.init.ones_(module.scale))
    assert full_state_dict(model)["scale"].tolist() == [1, 1, 1]


def test_failed_declaration_leaves_the_module_on_meta() -> None:
    class Full(InMemoryStore):
        full = True

        def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
            if self.full:
                raise CapacityError("not enough memory")
            return super().declare(layout, initial_values)

    store = Full()
    held: Any = SimpleNamespace(units=Units(store))
    norm = nn.BatchNorm1d(3, device="meta")
    with pytest.raises(CapacityError):
        fully_shard(norm, held)
    assert norm.weight.is_meta and norm.running_mean is not None and norm.running_mean.is_meta
    store.full = False
    fully_shard(norm, held)
    assert full_state_dict(norm)["weight"].tolist() == [1, 1, 1]


def test_partly_initialised_and_hooked_modules_are_rejected() -> None:
    mixed = nn.Linear(3, 3)
    mixed.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
    with pytest.raises(UsageError, match=r"'Linear-0.bias' has values already"):
        fully_shard(mixed, session(), source=nn.init.ones_)  # type: ignore[arg-type]
    hooked = nn.Linear(3, 3, device="meta")
    hooked.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"'Linear-0.weight' is on the meta device and has hooks"):
        fully_shard(hooked, session())
