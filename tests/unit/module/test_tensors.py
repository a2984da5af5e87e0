"""Tensors are found and replaced in the arguments and results of modules."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from shardwell.module.mixed_precision import (
    attribute_tensors,
    find_argument_tensors,
    find_tensors,
    map_tensors,
    share_storage,
)

ONE, TWO = torch.ones(1), torch.ones(2)


class Named(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Record:
    left: Any
    right: Any = 3


class Slotted:
    __slots__ = ("left", "right")

    def __init__(self, left: Any) -> None:
        self.left = left


class Plain:
    def __init__(self, left: Any) -> None:
        self.left = left


class Output(collections.OrderedDict[str, Any]):
    """An output like those of Hugging Face's models."""


VALUES = {
    "tensor": ONE,
    "tuple": (ONE, 3),
    "nested": [{"a": (ONE, None)}, "text"],
    "named tuple": Named(ONE, 3),
    "dict": {"a": ONE},
    "ordered dict": Output(a=ONE),
    "dataclass": Record(ONE),
}


@pytest.mark.parametrize("kind", VALUES)
def test_tensors_are_found_and_replaced(kind: str) -> None:
    value = VALUES[kind]
    assert [found is ONE for found in find_tensors(value)] == [True]
    changed = map_tensors(value, lambda tensor: TWO)
    assert type(changed) is type(value)
    assert [found is TWO for found in find_tensors(changed)] == [True]
    assert [found is ONE for found in find_tensors(value)] == [True]
    assert map_tensors(value, lambda tensor: tensor) is value


@pytest.mark.parametrize("value", [Plain(ONE), Slotted(ONE), {ONE}, Plain([Slotted({"a": ONE})])])
def test_tensors_are_found_in_objects(value: Any) -> None:
    assert [found is ONE for found in find_tensors(value)] == [True]


def test_modules_and_cycles_are_not_followed() -> None:
    loop: list[Any] = [ONE]
    loop.append(loop)
    assert len(find_tensors(loop)) == 1
    assert find_tensors([nn.Linear(3, 3), torch.Tensor, torch.float32, None, "text"]) == []


def test_tensors_in_module_attributes_are_found() -> None:
    layer = nn.Linear(3, 3)
    layer.loss = ONE
    assert [found is ONE for found in attribute_tensors([layer])] == [True]


def test_shared_storage_is_detected() -> None:
    flat = torch.zeros(8)
    assert share_storage(flat[2:4], flat.untyped_storage())
    assert not share_storage(flat.clone(), flat.untyped_storage())
    assert not share_storage(torch.eye(2).to_sparse(), flat.untyped_storage())


class Lazy(Mapping[int, torch.Tensor]):
    """A mapping that loads on access."""

    def __init__(self) -> None:
        self.loaded: list[int] = []

    def __getitem__(self, key: int) -> torch.Tensor:
        self.loaded.append(key)
        return torch.ones(1)

    def __iter__(self) -> Iterator[int]:
        return iter(range(50))

    def __len__(self) -> int:
        return 50


def test_lazy_mappings_in_arguments_are_not_read() -> None:
    lazy = Lazy()
    assert find_argument_tensors((lazy, {"nested": [lazy]}, ONE)) == [ONE]
    assert not lazy.loaded


def test_large_arguments_are_searched_in_part() -> None:
    words = SimpleNamespace(index={f"w{number}": number for number in range(100_000)}, lists=[[]] * 100_000)
    visited: list[int] = []

    class Counted(list[int]):
        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                visited.append(item)
                yield item

    found = find_argument_tensors((words, Counted(range(100_000)), [words, {"states": (ONE, [TWO])}]))
    assert [id(tensor) for tensor in found] == [id(ONE), id(TWO)]  # also after the large objects
    assert len(visited) <= 1024
    linked: list[object] = [ONE]
    for _ in range(5000):
        linked = [linked]
    assert find_argument_tensors((linked,)) == []
