"""Fixtures of the tests of the coordinator and of benchmarks: the simulated cluster, and forked workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from shardwell_server.coordinator.relocation import keeper
from tests.support.coordinator import Harness, harness
from tests.support.forked_servers import forked_workers


@pytest.fixture
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[Harness]:
    """A coordinator with two simulated shard servers. ``@pytest.mark.harness`` has other arguments of ``harness``."""
    mark = request.node.get_closest_marker("harness")
    return harness(tmp_path, **(mark.kwargs if mark is not None else {}))


@pytest.fixture
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the coordinator repeat what failed at once."""
    monkeypatch.setattr(keeper, "_TICK_S", 0.002)
    monkeypatch.setattr(keeper, "_PAUSE_S", 0.002)


@pytest.fixture(scope="module")
def _forked_workers() -> Iterator[None]:
    """Starts the workers of benchmarks in a fraction of the time."""
    with forked_workers():
        yield
