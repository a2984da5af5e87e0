"""Fixtures of the coordinator's tests: the simulated cluster."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from shardwell_server.coordinator.relocation import keeper
from tests.support.coordinator import Harness, harness


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
