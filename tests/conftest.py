"""What many tests share: one cluster, and a run of its own for each test."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

import shardwell


@pytest.fixture(scope="session")
def cluster() -> Iterator[shardwell.LocalCluster]:
    """A coordinator and two shard servers that tests share; not to be killed."""
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as running:
        yield running


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A name that no other test's run has."""
    return f"{request.node.name[:40]}-{uuid.uuid4().hex[:8]}"
