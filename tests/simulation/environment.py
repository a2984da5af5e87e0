"""Replaces what the simulated code takes from the operating system: channels, disks, process ids and randomness.

The replacements are installed once per Python process and always refer to the simulation that is running.
"""

from __future__ import annotations

import logging
import random
import secrets
import sqlite3
import sys
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwell_server.coordinator.servers import shard_client
from shardwell_server.coordinator.storage import database
from shardwell_server.shard.requests import checkpoints as checkpoint_writing
from shardwell_wire.connection import channel
from shardwell_wire.host import server_folders
from shardwell_wire.model import names
from tests.simulation.loop import current_process
from tests.simulation.network import Channel, Network

DISK = Path("/dev/shm")
"""A folder in memory, for checkpoints. The coordinator's databases are not written to it."""

_WRITE_S = 0.002
"""Mean time to write a file of a checkpoint."""


class Disk:
    """The coordinator's disk: SQLite databases in memory that survive the process that opened them."""

    def __init__(self) -> None:
        self._databases: dict[str, _Database] = {}
        self.full = False
        """Whether writes fail."""

    def connect(self, path: Path, **options: Any) -> _Database:
        """Opens a database as ``sqlite3.connect`` does."""
        found = self._databases.get(str(path))
        if found is None:
            found = self._databases[str(path)] = sqlite3.connect(":memory:", factory=_Database, **options)
            if _empty:
                found.deserialize(_empty[0])
            found.disk = self
        return found

    def release(self) -> None:
        """Frees the databases."""
        for opened in self._databases.values():
            opened.release()


_empty: list[bytes] = []
"""A database with tables and without rows."""


class _Database(sqlite3.Connection):
    disk: Disk

    def executescript(self, script: str) -> sqlite3.Cursor:
        cursor = super().executescript(script)
        _empty.append(self.serialize())  # creating the tables takes longer than copying them
        return cursor

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if self.disk.full and statement.startswith("BEGIN"):
            raise sqlite3.OperationalError("database or disk is full")
        return super().execute(statement, *arguments)

    def close(self) -> None:
        """Keeps the data for the next process."""
        if self.in_transaction:
            super().execute("ROLLBACK")

    def release(self) -> None:
        super().close()


@dataclass
class Environment:
    """What the simulated processes share."""

    network: Network
    rng: random.Random
    disk: Disk = field(default_factory=Disk)
    ended: set[str] = field(default_factory=set)
    """Identities of processes that have ended."""
    one_host: bool = True
    """Whether all processes run on one host, where each can see the processes of the others."""


_running: list[Environment] = []


def running() -> Environment:
    """Returns the environment of the simulation that is running."""
    return _running[-1]


def enter(environment: Environment) -> None:
    """Begins a simulation."""
    _install()
    _running.append(environment)


def leave() -> None:
    """Ends the simulation that is running."""
    _running.pop().disk.release()


@cache
def _install() -> None:
    logging.getLogger().addHandler(_Log())
    _replace(channel.open_aio_channel, lambda address, tls: Channel(running().network, address))
    _replace(shard_client._connect, _connect)
    database.sqlite3 = _Sqlite()  # type: ignore[attr-defined]
    _replace(server_folders.own_identity, _own_identity)
    _replace(server_folders.has_ended, _has_ended)
    _replace(server_folders.runs_here, _runs_here)
    checkpoint_writing.threading = _Threading()  # type: ignore[attr-defined]
    checkpoint_writing._NICENESS = 0
    # Both take long, and neither is a part of the protocol.
    _replace(metadata.version, lambda distribution: "0")
    _replace(names.check_names, lambda message: None)
    _replace(secrets.token_hex, lambda size: running().rng.randbytes(size).hex())
    _replace(secrets.token_bytes, lambda size: bytes(running().rng.randbytes(size)))
    _replace(uuid.uuid4, lambda: uuid.UUID(int=running().rng.getrandbits(128), version=4))


def _replace(original: Callable[..., Any], replacement: Callable[..., Any]) -> None:
    """Replaces a function in every module that has imported it."""
    for module in [*sys.modules.values()]:
        for name, value in [*vars(module).items()] if hasattr(module, "__dict__") else []:
            if value is original:
                setattr(module, name, replacement)


class _Log(logging.Handler):
    """Adds what the simulated processes log to the trace. Exceptions that only the log shows are problems."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _running:
            return
        network, message = running().network, record.getMessage()
        if record.exc_info:
            network.loop.problems.append(f"{message}: {record.exc_info[1]!r}")
        network.trace(f"    {record.name.rpartition('.')[2]}: {message}")


def _own_identity() -> str:
    return current_process().identity


def _has_ended(identity: str) -> bool:
    return running().one_host and identity in running().ended


def _runs_here(identity: str) -> bool:
    return running().one_host and bool(identity) and identity not in running().ended


def _connect(address: str) -> None:
    network = running().network
    if network.is_cut(current_process().name, network.name_of(address)):
        raise TimeoutError(110, "Connection timed out")
    if not network.is_running(address):
        raise ConnectionRefusedError(111, "Connection refused")


class _Threading:
    """``threading`` whose threads do their work at one instant on the event loop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)

    class Thread:
        def __init__(self, target: Callable[[], None], **options: Any) -> None:
            self._target = target

        def start(self) -> None:
            loop = running().network.loop
            loop.call_later(running().rng.expovariate(1 / _WRITE_S), self._target)


class _Sqlite:
    """``sqlite3`` with databases on the simulated disk."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sqlite3, name)

    def connect(self, path: Path, **options: Any) -> Any:
        return running().disk.connect(path, **options)
