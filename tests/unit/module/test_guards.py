"""Errors for plain PyTorch code that would silently do the wrong thing with sharded parameters."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell import auto_wrap, fully_shard
from shardwell.module.residency import UnitState
from shardwell.module.units import Units
from shardwell_wire.errors import FreedParameterError, UsageError
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Sharded, gpt, gpt_loss, inputs, wrap_blocks, wrap_children


@pytest.fixture
def sharded() -> Sharded:
    return Sharded(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), wrap_children)


@pytest.mark.parametrize("unshard", [False, True])
def test_step_of_a_local_optimizer_raises(sharded: Sharded, unshard: bool) -> None:
    optimizer = torch.optim.AdamW(sharded.model.parameters(), lr=0.1)
    layer: Any = sharded.model[0]
    if unshard:
        layer.unshard()
    with pytest.raises(UsageError, match=r"AdamW.step\(\).*'Linear-0.weight'.*shardwell.optim.AdamW"):
        optimizer.step()


def test_step_of_a_local_optimizer_on_local_parameters_works() -> None:
    parameter = nn.Parameter(torch.ones(3))
    Sharded(nn.Sequential(nn.Linear(7, 5)), wrap_children)
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert parameter.tolist() == [0.5] * 3


@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_torch_clipping_raises(sharded: Sharded, clip: str, sync: bool) -> None:
    model: Any = sharded.model
    model.set_requires_gradient_sync(sync)
    model(inputs(0, 4, 7)).sum().backward()
    with pytest.raises(UsageError, match=r"optimizer.clip_grad_norm_\(max_norm\)"):
        getattr(nn.utils, clip)(model.parameters(), 1.0)


def test_unsynced_gradients_can_be_read_and_changed(sharded: Sharded) -> None:
    model: Any = sharded.model
    model.set_requires_gradient_sync(False)
    model(inputs(0, 4, 7)).sum().backward()
    gradient = model[0].weight.grad
    assert gradient is not None and gradient.shape == (5, 7)
    model[0].weight.grad = gradient * 2
    sharded.units.finish_item()
    (part,) = sharded.store.units[0].parts
    assert torch.equal(dict(part)[0], gradient * 2)


@pytest.mark.parametrize("unshard", [False, True])
def test_state_dict_raises(sharded: Sharded, unshard: bool) -> None:
    model: Any = sharded.model
    if unshard:
        model[0].unshard()
    holder = nn.Module()
    holder.inner = model
    for module in (model, model[0], holder):
        with pytest.raises(UsageError, match=r"shardwell.full_state_dict\(model\)"):
            module.state_dict()


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_raises(sharded: Sharded, assign: bool) -> None:
    values = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).state_dict()
    before = sharded.state()
    with pytest.raises(UsageError, match="load before fully_shard"):
        sharded.model.load_state_dict(values, assign=assign)
    assert all(torch.equal(value, before[name]) for name, value in sharded.state().items())


@pytest.mark.parametrize("copying", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_raise(sharded: Sharded, copying: Any) -> None:
    for module in (sharded.model, sharded.model[0]):
        kind = type(module).__name__
        with pytest.raises(UsageError, match=f"{kind} cannot be copied or pickled.*full_state_dict.*ema_decay"):
            copying(module)


@pytest.mark.parametrize(
    "convert", [lambda m: m.half(), lambda m: m.double(), lambda m: m.to("meta"), lambda m: m.bfloat16()]
)
def test_conversion_raises_and_changes_nothing(sharded: Sharded, convert: Any) -> None:
    for module in (sharded.model, sharded.model[0]):
        with pytest.raises(UsageError, match=r"cannot become.*convert or move the module first.*mp_policy"):
            convert(module)
    assert {parameter.dtype for parameter in sharded.model.parameters()} == {torch.float32}
    sharded.model(inputs(0, 4, 7)).sum().backward()
    sharded.step()


def test_conversion_without_effect_works() -> None:
    model = nn.Sequential(nn.LSTM(7, 5), nn.BatchNorm1d(5))
    sharded = Sharded(model, wrap_children)
    before = dict(model.named_parameters())
    assert model.to("cpu").float() is model
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    model[1].running_mean.fill_(3)
    model[0](inputs(0, 4, 7))[0].sum().backward()
    sharded.step()


def test_unsharded_parts_of_a_model_can_be_converted() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local, self.sharded = nn.Linear(3, 3), nn.Linear(3, 3)

    def wrap(model: Any, session: Any) -> None:
        wrap_children(nn.Sequential(model.sharded), session)

    sharded = Sharded(Model(), wrap)
    with pytest.raises(UsageError):
        sharded.model.double()
    sharded.model.float()
    assert sharded.model.local.weight.sum() is not None


def test_exception_leaves_no_unit_gathered() -> None:
    sharded = Sharded(gpt(), wrap_blocks, prefetch_bytes=0)
    sharded.model.blocks[1].up.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gpt_loss(sharded.model, 0)
    assert {unit.name for unit in sharded.units if unit.state is not UnitState.FREED} <= {"Gpt-0"}


def test_sharding_twice_is_refused_with_advice(sharded: Sharded) -> None:
    again = "Sequential is sharded already.*once for each module.*set_sharding_strategy.*construct the model again"
    for session in (sharded.session, SimpleNamespace(units=Units(InMemoryStore()))):
        for shard in (fully_shard, auto_wrap):
            with pytest.raises(UsageError, match=again):
                shard(sharded.model, session)
    assert len(sharded.units) == 3


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda model, session: auto_wrap(model, "host:1"), r"session='host:1': expected.*shardwell.join"),
        (lambda model, session: fully_shard(model, None), r"session=None: expected.*shardwell.join"),
        (lambda model, session: auto_wrap([model], session), r"expected a module, got list"),
        (lambda model, session: fully_shard("model", session), r"expected a module, got str"),
        (lambda model, session: auto_wrap(model, session, reshard=True), r"auto_wrap\(reshard=...\): expected one of"),
        (
            lambda model, session: auto_wrap(model, session, ignored_params=["weight"]),
            r"ignored_params has 'weight': expected parameters, such as \{model.get_parameter",
        ),
    ],
)
def test_wrong_arguments_are_refused_with_advice(call: Any, match: str) -> None:
    model, session = nn.Sequential(nn.Linear(3, 3)), SimpleNamespace(units=Units(InMemoryStore()))
    with pytest.raises(UsageError, match=match):
        call(model, session)
    assert len(session.units) == 0


def test_optimizer_made_before_sharding_is_refused_with_advice() -> None:
    model = nn.Sequential(nn.Linear(7, 5))
    before = torch.optim.AdamW(model.parameters())
    with pytest.raises(UsageError, match=r"no sharded parameter: call fully_shard\(model, session\) first"):
        shardwell.optim.AdamW(model.parameters())
    wrap_children(model, SimpleNamespace(units=Units(InMemoryStore())))
    model(inputs(0, 4, 7)).sum().backward()
    with pytest.raises(UsageError, match=r"AdamW.step\(\).*Use shardwell.optim.AdamW"):
        before.step()


def test_module_with_two_parents_is_refused_with_advice() -> None:
    shared, session = nn.Linear(5, 5), SimpleNamespace(units=Units(InMemoryStore()))
    parents = [nn.Sequential(nn.Linear(5, 5), shared) for _ in range(2)]
    fully_shard(parents[0], session)
    with pytest.raises(UsageError, match="its Linear is in several modules, so call fully_shard on that Linear before"):
        fully_shard(parents[1], session)
    shared, session = nn.Linear(5, 5), SimpleNamespace(units=Units(InMemoryStore()))
    for module in (shared, *(nn.Sequential(nn.Linear(5, 5), shared) for _ in range(2))):
        fully_shard(module, session)
    assert len(session.units) == 3


def test_initialising_a_freed_parameter_is_refused_with_advice(sharded: Sharded) -> None:
    with pytest.raises(FreedParameterError, match="before fully_shard, or with its source="):
        torch.Tensor.zero_(sharded.model[0].weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda part: torch.jit.trace(part, torch.ones(1, 4))])
def test_scripted_or_traced_submodule_is_refused(compiled: Any) -> None:
    session: Any = SimpleNamespace(units=Units(InMemoryStore()))
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(compiled(nn.Linear(4, 4))))
    with pytest.raises(UsageError, match=r"submodule '1.0' \(Linear\).*ignored_params"):
        fully_shard(model, session)
    assert len(session.units) == 0
    fully_shard(model, session, ignored_params=set(model[1].parameters()))
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripted_submodule_without_parameters_is_allowed() -> None:
    session: Any = SimpleNamespace(units=Units(InMemoryStore()))
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Tanh())), session)
    model(torch.ones(1, 4)).sum().backward()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_tracing_is_refused_and_a_plain_model_can_be_traced_instead(sharded: Sharded) -> None:
    sharded.model.eval()
    x = inputs(0, 4, 7)
    for part in (sharded.model, sharded.model[0], nn.Sequential(sharded.model)):
        with pytest.raises(UsageError, match=r"torch.jit.trace of unit.*shardwell.full_state_dict\(model\)"):
            torch.jit.trace(part, (x,))
    expected = sharded.model(x)
    plain_model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    plain_model.load_state_dict(shardwell.full_state_dict(sharded.model))
    assert torch.equal(torch.jit.trace(plain_model.eval(), (x,))(x), expected)
    sharded.model(x).sum().backward()
    sharded.step()
