"""A linear layer whose weight does not fit a trainer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Self

import torch
from torch import nn

from shardwell.module.fully_shard import fully_shard
from shardwell_wire.errors import UsageError


class Tile(nn.Linear):
    """A tile of a ``TiledLinear``. ``auto_wrap`` makes it a unit under every policy."""


class TiledLinear(nn.Module):
    """An ``nn.Linear`` cut into tiles that are gathered and freed one after another, forward and backward.

    With ``num_tiles`` only, the output and the gradients of weight and bias are computed from the same numbers in the
    same order as by ``nn.Linear``. The bits agree unless another kernel is selected for matrices of a tile's size, such
    as for a single input row, or for a bias if the tile size is not a multiple of 16. The gradient of the input is a
    sum over these tiles, and the output is a sum over the tiles of ``num_input_tiles``: both are rounded once more per
    tile.

    ``load_state_dict`` also accepts the ``weight`` and ``bias`` of an ``nn.Linear``.

    Args:
        in_features: Size of the input's last dim.
        out_features: Size of the output's last dim.
        bias: Whether to add a bias.
        num_tiles: Number of tiles of the output features.
        num_input_tiles: Number of tiles of the input features.
        session: Shards each tile when it is created, so that this process never holds two. None: the tiles stay in this
            process until ``auto_wrap`` or ``fully_shard``.
        name: Prefix of the units' names if ``session`` is set. Must be the same on every trainer. None: the units are
            numbered.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

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
        session: Any = None,
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
        """Returns a tiled copy of a linear layer, for ``auto_wrap`` or ``fully_shard``."""
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
        """Applies the layer. [..., in_features] -> [..., out_features]"""
        parts = [x[..., start:stop] for start, stop in pairwise(self.in_bounds)] if len(self.in_bounds) > 2 else [x]
        tiles = iter(self.tiles)
        rows = [self._row(tiles, parts) for _ in pairwise(self.out_bounds)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _row(self, tiles: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes the output features of one row of tiles. Adds the input tiles in order."""
        first, *others = parts
        total: torch.Tensor = next(tiles)(first)
        for part in others:
            total = total + next(tiles)(part)
        return total

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _bounds(argument: str, num_features: int, num_tiles: int) -> list[int]:
    """Returns the first feature of each tile, and the end of the last. Tile sizes differ by at most one."""
    if not 1 <= num_tiles <= max(1, num_features):
        raise UsageError(f"TiledLinear({argument}={num_tiles!r}): expected 1 to {num_features}, the number of features")
    return [num_features * number // num_tiles for number in range(num_tiles + 1)]


def _initialise(tile: Tile, in_features: int) -> None:
    """Draws values from the same range as ``nn.Linear`` does for the whole layer."""
    bound = in_features**-0.5 if in_features else 0.0
    for parameter in tile.parameters():
        nn.init.uniform_(parameter, -bound, bound)


def _cut_state(module: TiledLinear, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Replaces the entries of an ``nn.Linear`` by entries of the tiles."""
    shapes = {"weight": (module.out_features, module.in_features), "bias": (module.out_features,)}
    errors: list[str] = others[-1]
    for name, shape in shapes.items():
        whole = state.pop(f"{prefix}{name}", None)
        if whole is None:
            continue
        if tuple(whole.shape) != shape:
            errors.append(f"size mismatch for {prefix}{name}: got {tuple(whole.shape)}, expected {shape}")
            continue
        places = itertools.product(pairwise(module.out_bounds), pairwise(module.in_bounds))
        for number, ((low, high), (start, stop)) in enumerate(places):
            if name == "weight":
                state[f"{prefix}tiles.{number}.weight"] = whole[low:high, start:stop]
            elif start == 0:
                state[f"{prefix}tiles.{number}.bias"] = whole[low:high]
