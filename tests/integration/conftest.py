"""Fixtures of many tests with real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from shardwell_server.shard.memory.mapped_memory import SharedMemory
from tests.support import reference
from tests.support.shard_server import ShardServer


@pytest.fixture
def shared() -> Iterator[SharedMemory]:
    """Shared memory of the shard server."""
    with closing(SharedMemory()) as made:
        yield made


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[ShardServer]:
    """A shard server for one test. It has shared memory if the test uses the fixture ``shared``."""
    with_memory = "shared" in request.fixturenames
    with ShardServer(shared=request.getfixturevalue("shared") if with_memory else None) as running:
        yield running
        if with_memory:
            running.until(lambda: not running.shm._open, "the transports are closed")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Lets torch compute with one thread."""
    with reference.one_thread():
        yield
