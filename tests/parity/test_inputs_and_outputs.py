"""Sharded modules match plain PyTorch bit for bit, whatever they receive, modify, return or keep."""

from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardwell.module.fully_shard import fully_shard
from tests.support.module_kinds import Calls, Residual, run
from tests.support.module_parity import (
    Pair,
    inputs,
    wrap_children,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# Inputs.


def test_unit_may_change_its_input_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 12), nn.Linear(12, 3)
            self.parts = nn.ModuleList(
                [
                    nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 12)),
                    Calls(lambda self, x: self.layer(x.add_(1)), layer=nn.Linear(12, 12)),
                ]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for part in self.parts:
                x = part(x)
            return self.last(x)

    run(InPlace(), 4, 7)


def test_output_may_be_changed_in_place() -> None:
    """One output is a view, whose autograd node an in-place operation replaces."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 12), nn.Linear(12, 3)
            self.parts = nn.ModuleList(
                [
                    nn.Linear(12, 12),
                    Calls(lambda self, x: self.layer(x).view(2, 2, 12)[:, :, :], layer=nn.Linear(12, 12)),
                    Calls(lambda self, x: self.layer(x)[0], layer=nn.Linear(12, 12)),
                ]
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for part in self.parts:
                y = part(x)
                y += 1
                y.mul_(x.view_as(y) if y.numel() == x.numel() else 2)
                x = y.reshape(-1, 12)
            return self.last(x)

    run(InPlace(), 4, 7)


def test_unit_whose_input_needs_no_gradient_pushes_every_step() -> None:
    """Only the end of the whole backward marks the end of the unit's backward."""
    pair = run(nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 3)), 4, 7, requires_grad=False)
    assert pair.sharded.store.pushes["Linear-0"] == 4


class Pairs(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Record:
    left: torch.Tensor
    right: torch.Tensor
    note: str = "kept"


class Opaque:
    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.left, self.right = left, right


CONTAINERS = {
    "tuple": (lambda a, b: (a, b), lambda c: c),
    "list": (lambda a, b: [a, [b]], lambda c: (c[0], c[1][0])),
    "dict": (lambda a, b: {"a": a, "b": {"c": b}}, lambda c: (c["a"], c["b"]["c"])),
    "ordered dict": (lambda a, b: collections.OrderedDict(a=a, b=b), lambda c: (c["a"], c["b"])),
    "named tuple": (Pairs, lambda c: (c.left, c.right)),
    "dataclass": (Record, lambda c: (c.left, c.right)),
    "object": (Opaque, lambda c: (c.left, c.right)),
    "slots": (Slotted, lambda c: (c.left, c.right)),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=[b]), lambda c: (c.a, c.b[0])),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_inputs_and_outputs_may_be_in_any_container(kind: str) -> None:
    pack, unpack = CONTAINERS[kind]

    class Splitting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, packed: Any) -> Any:
            left, right = unpack(packed)
            return pack(self.left(left), self.right(right) + left)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(7, 12), nn.Linear(12, 3)
            self.parts = nn.ModuleList([Splitting(), Splitting()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            packed = pack(x, x * 2)
            for part in self.parts:
                packed = part(packed)
            left, right = unpack(packed)
            return self.last(left * right)

    run(Model(), 4, 7)


def test_module_may_append_to_a_list_of_its_caller() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([Appending(), Appending()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = [x]
            for part in self.parts:
                part(features)
            return torch.stack(features).sum(0)

    class Appending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(7, 7)

        def forward(self, features: list[torch.Tensor]) -> None:
            features.append(self.layer(features[-1]))

    run(Model(), 4, 7)


# Outputs.


def test_unused_output_and_unused_module_match_torch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.used(x), self.unused(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.two, self.never = nn.Linear(7, 12), Two(), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.first(x))[0]

    pair = run(Model(), 4, 7)
    assert pair.sharded.store.pushes["Linear-1"] == 0


def test_result_may_be_kept_as_an_attribute() -> None:
    """Mixtures of experts keep their auxiliary loss this way. Its nodes may be the newest of the unit."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.router = nn.Linear(12, 12), nn.Sequential(nn.Tanh(), nn.Linear(12, 4), nn.Linear(4, 4))
            self.balance: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.balance = self.router(x).square().mean()
            return y

    def loss(model: Any, number: int) -> torch.Tensor:
        value = model(inputs(number, 4, 7)).square().mean()
        return value + sum(part.balance for part in model.parts)

    Pair(Residual(Routed(), Routed()), wrap_children, prefetch_bytes=0).train(loss)


def test_module_may_return_a_parameter_or_a_view_of_one() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.bias = nn.Parameter(torch.randn(9, 12)), nn.Parameter(torch.randn(12))

        def forward(self, length: int) -> dict[str, Any]:
            return {"rows": self.table[:length], "bias": self.bias, "same": (self.table[:length].detach(),)}

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.positions = nn.Linear(7, 12), Positions()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = self.positions(x.shape[0])
            return (self.first(x) + found["rows"]) * found["bias"] * found["same"][0]

    pair = run(Model(), 4, 7)
    with torch.no_grad():
        rows = pair.sharded.model.positions(3)["rows"]
    assert torch.equal(rows, pair.plain.positions.table[:3])


def test_chunked_head_may_use_part_of_a_group() -> None:
    """Norm and head form one unit, and the head runs once per chunk."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.body(x))
            return torch.cat([self.head(chunk) for chunk in x.chunk(3)])

    def wrap(model: Any, session: Any) -> None:
        fully_shard([model.norm, model.head], session)
        fully_shard(model.body, session)
        fully_shard(model, session)

    run(Model(), 9, 7, wrap=wrap)
