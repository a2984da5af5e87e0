"""TiledLinear matches ``nn.Linear`` and gathers one tile at a time."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.module.units import Units
from tests.support.in_memory_store import InMemoryStore, fused_adamw
from tests.support.module_parity import Pair, inputs

IN, OUT, ROWS = 96, 160, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.large, self.last = nn.Linear(7, IN), nn.Linear(IN, OUT), nn.Linear(OUT, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.large(self.first(x))))


def tiled(model: Model, **options: int) -> Model:
    model.large = shardwell.TiledLinear.from_linear(model.large, **options)  # type: ignore[assignment]
    return model


def wrap(model: nn.Module, session: Any) -> None:
    shardwell.auto_wrap(model, session, shardwell.NoWrapPolicy())


def loss(model: nn.Module, number: int) -> torch.Tensor:
    return model(inputs(number, ROWS, 7)).square().mean()


@pytest.mark.parametrize("options", [{"num_tiles": 5}, {"num_tiles": 4, "num_input_tiles": 3}])
def test_sharded_tiles_match_local_tiles(options: dict[str, int]) -> None:
    torch.manual_seed(0)
    Pair(tiled(Model(), **options), wrap).train(loss)


def run(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the gradient of the input. Parameter gradients are in ``.grad``."""
    x = inputs(0, ROWS, IN, requires_grad=True)
    output = layer(x)
    output.backward(inputs(1, ROWS, OUT))
    assert x.grad is not None
    return output.detach(), x.grad


def test_output_and_weight_gradients_match_linear_bit_for_bit() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(IN, OUT)
    tiles = shardwell.TiledLinear.from_linear(whole, num_tiles=5)
    (expected, expected_input), (output, input_gradient) = run(whole), run(tiles)
    assert torch.equal(output, expected)
    assert torch.equal(torch.cat([tile.weight.grad for tile in tiles.tiles]), whole.weight.grad)
    assert torch.equal(torch.cat([tile.bias.grad for tile in tiles.tiles]), whole.bias.grad)
    torch.testing.assert_close(input_gradient, expected_input)


def test_input_tiles_match_linear_up_to_rounding() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(IN, OUT, bias=False)
    tiles = shardwell.TiledLinear.from_linear(whole, num_tiles=3, num_input_tiles=7)
    for got, expected in zip(run(tiles), run(whole), strict=True):
        torch.testing.assert_close(got, expected)


def test_only_one_tile_is_gathered_at_a_time() -> None:
    torch.manual_seed(0)
    pair = Pair(tiled(Model(), num_tiles=8), wrap, prefetch_bytes=0)
    sizes = pair.sharded.unit_bytes()
    assert [name for name in sizes if name.startswith("large.tiles.")] == [f"large.tiles.{n}" for n in range(8)]
    pair.train(loss, steps=1)
    root = sizes.pop("Model")
    assert pair.sharded.units.peak_bytes == root + max(sizes.values())


def test_tiles_are_sharded_during_construction() -> None:
    session = SimpleNamespace(units=Units(InMemoryStore()))
    layer = shardwell.TiledLinear(IN, OUT, num_tiles=4, session=session, name="head")
    assert [unit.name for unit in session.units] == [f"head.tiles.{number}" for number in range(4)]
    assert shardwell.local_ratio(layer) == 0.0
    assert session.units.peak_bytes <= max(unit.layout.size_bytes for unit in session.units)
    # The values come from the range that nn.Linear draws from.
    values = shardwell.full_state_dict(layer)
    assert all(value.abs().max() <= IN**-0.5 for value in values.values())


def test_state_of_linear_loads_if_its_size_matches() -> None:
    torch.manual_seed(0)
    whole = nn.Linear(IN, OUT)
    model = nn.Sequential(shardwell.TiledLinear(IN, OUT, num_tiles=3, num_input_tiles=2))
    model.load_state_dict(copy.deepcopy(nn.Sequential(whole).state_dict()))
    torch.testing.assert_close(run(model)[0], run(whole)[0])
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(nn.Sequential(nn.Linear(IN, OUT + 1)).state_dict())


def test_training_matches_linear_up_to_rounding() -> None:
    torch.manual_seed(0)
    plain = Model()
    pair = Pair(tiled(copy.deepcopy(plain), num_tiles=4), wrap)
    optimizer = fused_adamw(plain.parameters())
    for number in range(3):
        value = loss(plain, number)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        pair.backward(loss, number)
        pair.step()
    state = pair.sharded.state()
    weight = torch.cat([state[f"large.tiles.{number}.weight"] for number in range(4)])
    torch.testing.assert_close(weight, plain.large.weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"num_tiles": 0}, {"num_tiles": OUT + 1}, {"num_tiles": 1, "num_input_tiles": 97}])
def test_invalid_numbers_of_tiles_are_rejected(options: dict[str, int]) -> None:
    with pytest.raises(shardwell.UsageError, match="expected 1 to"):
        shardwell.TiledLinear(IN, OUT, **options)
