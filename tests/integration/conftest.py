"""Fixtures of the shard server's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.shard_server import ShardServer


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """A shard server for one test."""
    with ShardServer() as running:
        yield running
