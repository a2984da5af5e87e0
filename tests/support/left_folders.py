"""Finds the shards that servers of a test leave in shared memory, to the next process with the same ``--id``.

Only servers that this process has started count: other test runs use the same directory.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest

from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner, take_folder
from tests.support.forked_servers import ForkedServer


def owners_of(arguments: Sequence[Any], environment: Mapping[str, str] | None = None) -> list[FolderOwner]:
    """Returns the owners of the folders that a command leaves. Empty: it starts no shard server with a name."""
    words = [str(word) for word in arguments]

    def option(name: str, default: str = "") -> str:
        given = [value for word, value in pairwise(words) if word == f"--{name}"]
        return given[-1] if given else (environment or {}).get(f"SHARDWELL_{name.upper()}", default)

    name, count = option("id"), int(option("processes", "1"))
    if "shard" not in words or not name:
        return []
    names = [name] if count == 1 else [f"{name}-{index}" for index in range(count)]
    return [FolderOwner(server_id=each, coordinator=option("coordinator")) for each in names]


def discard(owners: Iterable[FolderOwner]) -> list[str]:
    """Deletes what servers that have ended left, as ``shardwell-server discard`` does. Returns folders with shards.

    The others contain no shards: the next server that starts on the host would delete them.
    """
    found = []
    for owner in owners:
        if (folder := take_folder(DEFAULT_DIRECTORY, owner)) is not None:
            if folder.has_shards:
                found.append(f"{folder.path} of server {owner.server_id!r}, coordinator {owner.coordinator}")
            folder.remove()
    return found


@contextmanager
def noted_servers() -> Iterator[list[FolderOwner]]:
    """Yields the owners of the folders of all shard servers that this process starts while the block runs."""
    started: list[FolderOwner] = []
    start_process, start_forked = subprocess.Popen.__init__, ForkedServer.__init__

    def popen(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not isinstance(args, str | bytes):
            started.extend(owners_of(args, options.get("env")))
        start_process(self, args, *rest, **options)

    def forked(self: Any, arguments: Any, environment: Any, *rest: Any) -> None:
        started.extend(owners_of(arguments, environment))
        start_forked(self, arguments, environment, *rest)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(subprocess.Popen, "__init__", popen)
        patched.setattr(ForkedServer, "__init__", forked)
        yield started
