"""Shared memory of a simulated host, in which the next process of a shard server finds what a killed one has left."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwell_server.shard.memory.mapped_memory import SharedBuffer, SharedMemory

_FOLDER = Path("/simulated")
"""No such folder exists, so a server that is told a path in it streams instead."""


@dataclass
class HostMemory:
    """Files that outlive a process."""

    files: dict[str, torch.Tensor] = field(default_factory=dict)
    """uint8, by name. Each [size_bytes]"""
    records: dict[str, bytes] = field(default_factory=dict)
    """See ``SharedMemory.write_record``."""

    def copy(self) -> HostMemory:
        """Returns the files as they are now: the code of a killed process is unwound, and may still write to them."""
        return HostMemory({name: tensor.clone() for name, tensor in self.files.items()}, dict(self.records))


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer(SharedBuffer):
    host: HostMemory

    def unlink(self) -> None:
        self.host.files.pop(self.name, None)


class SimulatedSharedMemory(SharedMemory):
    """``SharedMemory`` in simulated files.

    Args:
        host: The files.
    """

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self._numbers = itertools.count(len(host.files) + 1)
        self.restartable = True

    def offered(self) -> bool:
        return True

    def create(self, size_bytes: int, what: str, suffix: str = "") -> SharedBuffer:
        name = next(name for number in self._numbers if (name := f"{number}{suffix}") not in self._host.files)
        tensor = self._host.files[name] = torch.zeros(size_bytes, dtype=torch.uint8)
        return _Buffer(str(_FOLDER / name), tensor, self._host)

    def create_sealed(self, size_bytes: int, what: str) -> SharedBuffer:
        return self.create(size_bytes, what)

    def open(self, name: str, size_bytes: int) -> SharedBuffer:
        tensor = self._host.files.get(name)
        if tensor is None or tensor.numel() != size_bytes:
            raise FileNotFoundError(name)
        return _Buffer(str(_FOLDER / name), tensor, self._host)

    @property
    def folder(self) -> Path:
        return _FOLDER

    def size_of(self, name: str) -> int:
        if name not in self._host.files:
            raise FileNotFoundError(name)
        return self._host.files[name].numel()

    def open_whole(self, name: str) -> SharedBuffer:
        return self.open(name, self.size_of(name))

    def names(self, suffix: str) -> list[str]:
        return sorted(name for name in self._host.files if name.endswith(suffix))

    def has(self, name: str) -> bool:
        return name in self._host.files

    def records(self) -> dict[str, bytes]:
        return dict(self._host.records)

    def write_record(self, name: str, data: bytes) -> None:
        self._host.records[name] = data

    def remove_record(self, name: str) -> None:
        self._host.records.pop(name, None)

    def note_use(self) -> None:
        pass  # nobody removes simulated folders

    def remove_all_but(self, names: Collection[str]) -> None:
        for kept in (self._host.files, self._host.records):
            for name in [name for name in kept if name not in names]:
                del kept[name]

    @property
    def keeps_shards(self) -> bool:
        return bool(self._host.records)

    def save(self, names: Collection[str]) -> None:
        pass  # simulated hosts have no state folder

    def remove_saved(self) -> None:
        pass

    def close(self) -> None:
        if not self.keeps_shards:
            self._host.files.clear()
