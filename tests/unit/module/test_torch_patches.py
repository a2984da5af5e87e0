"""Torch is changed while a session with sharded modules is open, and unchanged afterwards."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim import optimizer as torch_optimizer

import shardwell
from shardwell.module import torch_patches
from shardwell.module.units import Units
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Sharded, inputs, layers, squared_loss, wrap_children

PLACES: list[Any] = [torch, torch.autograd, torch.autograd.graph, clip_grad, nn.utils, nn.Parameter, torch.Tensor]


def torchs_state() -> list[dict[str, Any]]:
    state = [{name: id(value) for name, value in vars(place).items() if is_function(value)} for place in PLACES]
    return [*state, dict(torch_optimizer._global_optimizer_pre_hooks)]


def is_function(value: Any) -> bool:
    return not isinstance(value, ModuleType)


@pytest.fixture
def no_others() -> None:
    """Forgets the units of other tests, which do not close them. Imports what the first units import."""
    last = Units(InMemoryStore()).passes
    torch_patches.watch(last)
    for passes in [*torch_patches._watched, last]:
        torch_patches.unwatch(passes)
    assert not torch_patches._undo and not list(torch_patches._watched)


@pytest.mark.usefixtures("no_others")
def test_everything_is_reverted_after_the_last_session() -> None:
    before = torchs_state()
    first, second = (Units(InMemoryStore()).passes for _ in range(2))
    torch_patches.watch(first)
    changed = torchs_state()
    torch_patches.watch(second)
    assert torchs_state() == changed != before
    torch_patches.unwatch(first)
    assert torchs_state() == changed
    torch_patches.unwatch(second)
    assert torchs_state() == before
    torch_patches.unwatch(second)
    torch_patches.watch(first)
    assert torchs_state() != before
    torch_patches.unwatch(first)
    assert torchs_state() == before


@pytest.mark.usefixtures("no_others")
def test_changes_of_others_stay() -> None:
    units = Units(InMemoryStore()).passes
    torch_patches.watch(units)
    ours = clip_grad.clip_grad_value_

    def theirs(*args: Any) -> None:
        ours(*args)

    original = nn.utils.clip_grad_value_.__wrapped__  # type: ignore[attr-defined]
    clip_grad.clip_grad_value_ = theirs
    try:
        torch_patches.unwatch(units)
        assert clip_grad.clip_grad_value_ is theirs and nn.utils.clip_grad_value_ is original
    finally:
        clip_grad.clip_grad_value_ = original


@pytest.mark.usefixtures("no_others")
def test_closed_session_leaves_torch_unchanged(cluster_of_one: shardwell.LocalCluster, run_name: str) -> None:
    before = torchs_state()
    with shardwell.join(cluster_of_one.address, run=run_name) as session:
        model: Any = layers(7, 5, 3)
        shardwell.auto_wrap(model, session)
        squared_loss(model, 0).backward()
        assert torchs_state() != before
    assert torchs_state() == before


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("raises", [KeyboardInterrupt, ZeroDivisionError])
def test_plain_backward_works_after_a_left_forward(
    raises: type[BaseException], closes: bool, cluster_of_one: shardwell.LocalCluster, run_name: str
) -> None:
    def leave(*_: object) -> None:
        raise raises

    session = shardwell.join(cluster_of_one.address, run=run_name)
    model = layers(7, 5, 3)
    shardwell.auto_wrap(model, session)
    handle = model[1].register_forward_hook(leave)
    with pytest.raises(raises):
        squared_loss(model, 0)
    handle.remove()
    if closes:
        session.close()
    gathers = session.stats()["gather_count"]
    plain = layers(7, 5, 3)
    for number in range(3):
        squared_loss(plain, number).backward()
    if not closes:
        assert session.stats()["gather_count"] == gathers
        squared_loss(model, 0).backward()
        session.close()
    with shardwell.join(cluster_of_one.address, run=f"{run_name}-next") as following:
        again = layers(7, 5, 3)
        shardwell.auto_wrap(again, following)
        squared_loss(again, 0).backward()


def test_backward_of_an_older_plain_graph_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = Sharded(layers(7, 5, 3), wrap_children)
    plain = squared_loss(layers(7, 5, 3), 0)
    loss = squared_loss(sharded.model, 0)
    visited = torch_patches._reachable([plain], sharded.units.passes.graphs)
    assert all(type(node).__name__ == torch_patches._LEAF for node in visited)
    assert torch_patches._reachable([loss], sharded.units.passes.graphs)


def test_parameter_data_works_as_in_torch() -> None:
    plain = nn.Parameter(torch.ones(3))
    sharded: Any = Sharded(nn.Sequential(nn.Linear(7, 5)), wrap_children)
    plain.data = torch.zeros(2)
    assert plain.data.tolist() == [0, 0] and not plain.data.requires_grad
    layer = sharded.model[0]
    with pytest.raises(shardwell.FreedParameterError, match=r"Tensor.data needs the values of parameter"):
        layer.weight.data.sum()
    layer.unshard()
    assert layer.weight.data.data_ptr() == layer.weight.data_ptr()
    layer.reshard()
    sharded.model(inputs(0, 2, 7)).sum().backward()
