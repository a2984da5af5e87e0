"""A trainer holds the units in use and not the whole model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import shardwell
from tests.support.memory_probe import NUM_BLOCKS
from tests.support.processes import ROOT


def probe(*arguments: str) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.memory_probe", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    measured: dict[str, int] = json.loads(result.stdout)
    return measured


@pytest.fixture(scope="module")
def plain() -> dict[str, int]:
    return probe("plain")


@pytest.mark.parametrize("transport", ["shm", "socket", "grpc"])
def test_freed_units_hold_no_memory(cluster: shardwell.LocalCluster, plain: dict[str, int], transport: str) -> None:
    sharded = probe(cluster.address, transport)
    size = plain["parameter_bytes"]
    assert sharded["parameter_bytes"] == size
    # A few pages were already free in the heap.
    assert plain["after_forward"] > 0.99 * size
    assert plain["after_backward"] > 1.98 * size, "plain PyTorch holds parameters and gradients"
    block = size / NUM_BLOCKS
    assert sharded["live_unit_bytes"] == 0, "every block is freed after its forward"
    assert sharded["built"] < 2 * block
    # The graph is alive: the memory of weights that autograd saved must be released too.
    assert sharded["after_forward"] < 4 * block
    assert sharded["after_backward"] < 6 * block
