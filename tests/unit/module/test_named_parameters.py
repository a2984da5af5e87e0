"""Parameters keep their objects, names and metadata, also while freed (``use_orig_params`` of FSDP1)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import MixedPrecisionPolicy, fully_shard
from shardwell.module.units import Units
from shardwell_wire.errors import FreedParameterError
from tests.support.in_memory_store import InMemoryStore


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2, dtype=torch.float64)))
    model[0].weight.requires_grad_(False)
    return model


@pytest.fixture(params=[None, torch.bfloat16])
def sharded(request: pytest.FixtureRequest) -> Iterator[nn.Sequential]:
    with closing(InMemoryStore()) as store:
        model, session = build(), SimpleNamespace(units=Units(store))
        objects = dict(model.named_parameters())
        policy: Any = MixedPrecisionPolicy(param_dtype=request.param)
        for child in model:
            fully_shard(child, session, mp_policy=policy)
        assert all(parameter is objects[name] for name, parameter in model.named_parameters())
        yield model


def test_freed_parameters_keep_names_and_metadata(sharded: nn.Sequential) -> None:
    expected = dict(build().named_parameters())
    found = dict(sharded.named_parameters())
    assert list(found) == list(expected)
    for name, parameter in found.items():
        before = expected[name]
        assert isinstance(parameter, nn.Parameter)
        for attribute in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "grad", "nbytes", "itemsize"):
            assert getattr(parameter, attribute) == getattr(before, attribute), (name, attribute)
        assert (parameter.numel(), parameter.size(), parameter.stride()) == (
            before.numel(),
            before.size(),
            before.stride(),
        )


def test_values_are_usable_only_between_unshard_and_reshard(sharded: nn.Sequential) -> None:
    layer: Any = sharded[0]
    with pytest.raises(FreedParameterError, match=r"'Linear-0.bias'.*module.unshard\(\) and module.reshard\(\)"):
        layer.bias.sum()
    layer.unshard()
    assert torch.equal(layer.bias, build()[0].bias.to(layer.bias.dtype))
    layer.reshard()
    with pytest.raises(FreedParameterError):
        layer.bias.sum()


def test_groups_freezing_and_hooks_work_while_freed(sharded: nn.Sequential) -> None:
    seen: list[str] = []
    decayed = [name for name, parameter in sharded.named_parameters() if parameter.ndim > 1]
    assert decayed == ["0.weight", "1.1.weight"]
    sharded.get_parameter("1.1.weight").requires_grad_(False)
    for name, parameter in sharded.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda _, name=name: seen.append(name))
    sharded[0](torch.rand(2, 5)).sum().backward()
    assert seen == ["0.bias"]
