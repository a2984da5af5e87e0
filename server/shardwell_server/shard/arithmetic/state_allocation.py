"""Memory of an optimizer's state, allocated before the update that creates the state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from shardwell_server.shard.arithmetic.algorithms.engines import State

Key = TypeVar("Key")

Allocate = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
"""Returns memory for tensors that are given on the meta device, in their order. The content is undefined."""


def allocate_ordinary(templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Allocates tensors in the memory of this process."""
    return [torch.empty_like(template, device="cpu") for template in templates]


@dataclass(frozen=True, slots=True)
class FreshState:
    """State that is allocated for the next update of one part."""

    algorithm: str
    initializers: Mapping[str, object]
    """The settings that determine the initial values."""
    state: State


@dataclass(slots=True)
class AllocatedState:
    """Memory that is allocated for the next update."""

    states: dict[int, FreshState] = field(default_factory=dict)
    """By part number."""
    averages: dict[int, torch.Tensor] = field(default_factory=dict)
    """By part number."""

    @property
    def size_bytes(self) -> int:
        states = sum(tensor.nbytes for fresh in self.states.values() for tensor in fresh.state.values())
        return states + sum(average.nbytes for average in self.averages.values())


class MissingTensors:
    """Tensors to allocate, together with their initial value and the mapping that receives them."""

    def __init__(self) -> None:
        self._templates: list[torch.Tensor] = []
        self._targets: list[tuple[float, Callable[[torch.Tensor], None]]] = []

    def add(self, template: torch.Tensor, initial: float, receiver: dict[Key, torch.Tensor], key: Key) -> None:
        """Adds a tensor, given on the meta device."""
        self._templates.append(template)
        self._targets.append((initial, partial(receiver.__setitem__, key)))

    def allocate(self, allocate: Allocate) -> None:
        """Allocates all tensors at once. Writes to all of the memory, because the system provides pages only then."""
        if self._templates:
            for tensor, (initial, receive) in zip(allocate(self._templates), self._targets, strict=True):
                receive(tensor.fill_(initial))
