"""What tests of the shard server share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.shard_server import ShardServer


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """A shard server of one test's own."""
    with ShardServer() as running:
        yield running
