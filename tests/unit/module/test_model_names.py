"""Names in the model of what ``fully_shard`` has declared under other names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from shardwell import auto_wrap, fully_shard
from shardwell.module.new_units import GridPlace
from shardwell.module.units import Units
from shardwell.parallel import split_model
from shardwell.store.model_names import model_names
from shardwell_wire.errors import FreedParameterError
from tests.support.in_memory_store import InMemoryStore
from tests.support.split_gpt import gpt


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)))
        self.again = self.blocks[1]
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.blocks(self.tokens(x))))


def session(**place: int) -> Any:
    return SimpleNamespace(units=Units(InMemoryStore(), place=GridPlace(**place)))


def in_run(held: Any) -> set[str]:
    return {parameter.name for unit in held.units for parameter in unit.layout.parameters}


def shard_blocks(net: Net, held: Any) -> None:
    for block in net.blocks:
        fully_shard(block, held)
    fully_shard([net.tokens, net.head], held)
    fully_shard(net, held)


def test_names_are_those_in_the_outermost_module() -> None:
    held, net = session(), Net()
    shard_blocks(net, held)
    found = model_names(held.units)
    names = [name for name, _ in net.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in net.named_buffers(remove_duplicate=False)]
    assert sorted(name for each in found.values() for name in each) == sorted([*names, *buffers])
    assert found["Embedding+Linear-0.0.weight"] == ("tokens.weight", "head.weight")
    assert found["Sequential-0.0.bias"] == ("blocks.0.0.bias",)
    assert found["Sequential-1.0.bias"] == ("blocks.1.0.bias", "again.0.bias")
    assert found["Sequential-1.1.running_mean"] == ("blocks.1.1.running_mean", "again.1.running_mean")


def test_names_of_several_models_begin_with_their_outermost_units() -> None:
    held, nets = session(), [Net(), Net()]
    for net in nets:
        shard_blocks(net, held)
    found = model_names(held.units)
    assert found["Sequential-2.0.bias"] == ("Net-1.blocks.0.0.bias",)
    assert found["Sequential-2.1.running_var"] == ("Net-1.blocks.0.1.running_var",)
    assert len({name for each in found.values() for name in each}) == sum(map(len, found.values()))


@pytest.mark.parametrize("wrap", ["without an outermost call", "auto_wrap"])
def test_names_that_are_those_in_the_run_are_left_out(wrap: str) -> None:
    held, net = session(), Net()
    if wrap == "auto_wrap":
        auto_wrap(net, held)
    else:
        for block in net.blocks:
            fully_shard(block, held)
    assert model_names(held.units) == {}


def test_stages_of_a_split_have_the_names_of_the_whole_model() -> None:
    stages = split_model(gpt(4, tied=True), 2)
    held, stage = session(pp=2, pp_rank=1), stages.module(1)
    fully_shard(stage, held, name="second")
    found = model_names(held.units)
    assert in_run(held) - found.keys() == {"token_embedding.weight"}, "shared by stages"
    assert {name for (name, *_) in found.values()} == {name for name, _ in stage.named_parameters()} - {"head.weight"}


def test_other_stages_keep_the_names_in_the_run() -> None:
    held = session(pp=2)
    fully_shard(nn.Sequential(nn.Linear(2, 2)), held, name="first")
    assert model_names(held.units) == {}


def test_errors_show_the_names_in_the_model() -> None:
    held, net = session(), Net()
    shard_blocks(net, held)
    held.units.set_model_names(model_names(held.units))
    with pytest.raises(
        FreedParameterError, match=r"parameter 'blocks.1.0.weight', but its unit 'Sequential-1' is freed"
    ):
        net.blocks[1][0].weight + 1
    net.blocks[1].unshard()
    with torch.no_grad():
        net.blocks[1][0].bias.zero_()
    with pytest.raises(Exception, match=r"parameter 'blocks.1.0.bias' of unit 'Sequential-1' was written in place"):
        net.blocks[1](torch.ones(2, 4))
    held.units.set_model_names({})
    with pytest.raises(FreedParameterError, match=r"parameter 'Sequential-0.0.weight'"):
        net.blocks[0][0].weight + 1
