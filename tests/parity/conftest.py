"""Fixtures shared by the parity tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import shardwell
from tests.support import reference


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Computes with one thread, as trainers in their own processes do."""
    with reference.one_thread():
        yield


@pytest.fixture(scope="package")
def cluster_with_short_leases() -> Iterator[shardwell.LocalCluster]:
    """A coordinator and three shard servers, for tests that kill trainers. Its many heartbeats end with these tests."""
    with shardwell.LocalCluster(num_shards=3, min_shard_bytes=4096, lease_s=2.5) as running:
        yield running
