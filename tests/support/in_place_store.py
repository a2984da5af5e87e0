"""A ``ParameterStore`` whose units are read in place, and whose server can make a new version at any moment."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwell.module.parameter_store import InitialValues, InPlaceVector
from shardwell_wire.errors import VersionGoneError
from shardwell_wire.model.layout import UnitLayout
from tests.support.in_memory_store import InMemoryStore


class FakeVector:
    """A unit's flat vector that the store shares."""

    exact = True

    def __init__(self, memory: torch.Tensor) -> None:
        self.bytes, self.version = memory, 0

    def shows(self, version: int) -> bool:
        return version == self.version

    def check(self, version: int) -> None:
        if not self.shows(version):
            raise VersionGoneError(f"version {version} was overwritten", version=version)

    def forget_writes(self) -> None:
        return None


class InPlaceStore(InMemoryStore):
    """Stores each unit in one piece, which trainers read in place."""

    def __init__(self) -> None:
        super().__init__(num_shards=1)
        self.vectors: list[FakeVector] = []

    def declare(self, layout: UnitLayout, initial_values: InitialValues) -> int:
        index = super().declare(layout, initial_values)
        self.vectors.append(FakeVector(self.units[index].shards[0][2]))
        return index

    def in_place(self, unit_index: int) -> InPlaceVector:  # type: ignore[override]
        return self.vectors[unit_index]

    def present_version(self, unit_index: int) -> int | None:
        self.events.append(f"gather {self.units[unit_index].layout.unit}")
        return self.vectors[unit_index].version

    def await_version(self, unit_index: int) -> Callable[[], int]:
        version = self.vectors[unit_index].version
        return lambda: version

    def overwrite(self, unit_index: int = 0) -> None:
        """Makes the next version on the server, without telling this trainer."""
        vector = self.vectors[unit_index]
        vector.version += 1
        vector.bytes.view(torch.float32).add_(1)
