"""A linear layer that is larger than a trainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from shardwell.module.fully_shard import HasUnits, fully_shard
from shardwell_wire.errors import UsageError


class Tile(nn.Linear):
    """A part of a ``TiledLinear``'s weight; ``auto_wrap`` makes it a unit under every policy."""


class TiledLinear(nn.Module):
    """``nn.Linear``, cut into tiles that are gathered and freed one after another, forward and backward.

    With ``num_tiles`` alone the output and the gradients of weight and bias are worked out from the same numbers in the
    same order as by ``nn.Linear``: the bits agree unless another kernel is picked for a matrix of a tile's size, as for
    a single row of inputs, or of a bias for tiles that are no multiple of 16. The gradient of the input is a sum over
    these tiles, and the output one over those of ``num_input_tiles``, so they are rounded once more per tile.

    ``load_state_dict`` takes the ``weight`` and ``bias`` of an ``nn.Linear`` too.

    Args:
        in_features: Size of the input's last dim.
        out_features: Size of the output's last dim.
        bias: Whether to add one.
        num_tiles: How many to cut the output features into.
        num_input_tiles: How many to cut the input features into.
        session: Where each tile goes as soon as it is made, so that this process never holds two. None: they stay
            here, for ``auto_wrap`` or ``fully_shard``.
        name: What the units' names begin with, if ``session`` is given; the same on every trainer. By default the
            units are numbered.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        UsageError: There are more tiles than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        num_tiles: int,
        num_input_tiles: int = 1,
        session: HasUnits | None = None,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.out_bounds = _bounds("num_tiles", out_features, num_tiles)
        self.in_bounds = _bounds("num_input_tiles", in_features, num_input_tiles)
        self.tiles = nn.ModuleList()
        for low, high in pairwise(self.out_bounds):
            for start, stop in pairwise(self.in_bounds):
                tile = Tile(stop - start, high - low, bias and start == 0, device=device, dtype=dtype)
                _initialise(tile, in_features)
                if session is not None:
                    fully_shard(tile, session, name=None if name is None else f"{name}.tiles.{len(self.tiles)}")
                self.tiles.append(tile)
        self.register_load_state_dict_pre_hook(_cut_state)  # type: ignore[no-untyped-call]

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, num_tiles: int, num_input_tiles: int = 1) -> Self:
        """A tiled copy of a linear layer, for ``auto_wrap`` or ``fully_shard``."""
        weight = linear.weight
        tiled = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            num_tiles=num_tiles,
            num_input_tiles=num_input_tiles,
            device=weight.device,
            dtype=weight.dtype,
        )
        tiled.load_state_dict(linear.state_dict())
        return tiled.requires_grad_(weight.requires_grad)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As ``nn.Linear``. [..., in_features] -> [..., out_features]"""
        parts = [x[..., start:stop] for start, stop in pairwise(self.in_bounds)] if len(self.in_bounds) > 2 else [x]
        tiles = iter(self.tiles)
        rows = [self._row(tiles, parts) for _ in pairwise(self.out_bounds)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _row(self, tiles: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output features of one row of tiles; input features are added up from the first on."""
        first, *others = parts
        total: torch.Tensor = next(tiles)(first)
        for part in others:
            total = total + next(tiles)(part)
        return total

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _bounds(argument: str, num_features: int, num_tiles: int) -> list[int]:
    """Where tiles of nearly the same size begin, and the end of the last."""
    if not 1 <= num_tiles <= max(1, num_features):
        raise UsageError(f"TiledLinear({argument}={num_tiles!r}): expected 1 to {num_features}, the number of features")
    return [num_features * number // num_tiles for number in range(num_tiles + 1)]


def _initialise(tile: Tile, in_features: int) -> None:
    """Draws values from the range in which ``nn.Linear`` draws those of the whole layer."""
    bound = in_features**-0.5 if in_features else 0.0
    for parameter in tile.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def _cut_state(module: TiledLinear, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Replaces an ``nn.Linear``'s entries by those of the tiles."""
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    errors: list[str] = others[-1]
    for name, shape in shapes.items():
        whole = state.pop(f"{prefix}{name}", None)
        if whole is None:
            continue
        if tuple(whole.shape) != shape:
            errors.append(f"size mismatch for {prefix}{name}: got {tuple(whole.shape)}, the tiled layer's is {shape}")
            continue
        places = itertools.product(pairwise(module.out_bounds), pairwise(module.in_bounds))
        for number, ((low, high), (start, stop)) in enumerate(places):
            if name == "weight":
                state[f"{prefix}tiles.{number}.weight"] = whole[low:high, start:stop]
            elif start == 0:
                state[f"{prefix}tiles.{number}.bias"] = whole[low:high]
