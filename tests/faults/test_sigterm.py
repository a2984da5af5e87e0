"""Fault tests of SIGTERM: a trainer hands back its work, or finishes it first, leaves, and exits with code 143."""

from __future__ import annotations

import signal
import time
import uuid

import pytest
import torch
from torch import nn

import shardwell
import shardwell.testing
from shardwell.training.work_items import preemption
from tests.support.cluster import cluster_fixture
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256

STEPS = 5


cluster = cluster_fixture(num_shards=1, lease_s=60.0)


@pytest.mark.parametrize("at_step", [0, 3])
def test_trainer_leaves_on_sigterm(cluster: shardwell.LocalCluster, at_step: int) -> None:
    """In its first step, a trainer does not know how long an item takes, and hands it back."""
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(cluster.address, run, *options, "--trainer", "a", "--term-at-step", at_step) as left,
        TrainerProcess(cluster.address, run, *options, "--trainer", "b") as other,
    ):
        ended, result = left.finish(), other.finish(timeout_s=30.0)  # half of the lease
    assert ended["returncode"] == 128 + signal.SIGTERM, ended
    assert len(ended["losses"]) == (0 if at_step == 0 else at_step + 1), "the last item is finished first"
    assert result.get("sha256") == undisturbed_sha256(dp=2, steps=STEPS), result
    assert len(result["losses"]) == 2 * STEPS - len(ended["losses"]), "nothing is computed twice"


def test_handler_of_the_script_is_kept() -> None:
    def handler(*_: object) -> None: ...

    former = signal.signal(signal.SIGTERM, handler)
    try:
        with shardwell.testing.in_process_cluster(), shardwell.join():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, former)
    with shardwell.testing.in_process_cluster():
        with shardwell.join():
            assert signal.getsignal(signal.SIGTERM) == preemption._terminate
        assert signal.getsignal(signal.SIGTERM) == former


def test_item_that_takes_long_is_handed_back() -> None:
    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        model = nn.Linear(3, 3)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        started = time.monotonic()
        with pytest.raises(SystemExit, match="143"):
            for step in session.steps(3):
                for x in step.batches(lambda step, rank: torch.ones(2, 3)):
                    model(x).sum().backward()
                    if step.number == 1:
                        session.in_flight.items._item_s = 3600.0
                        signal.raise_signal(signal.SIGTERM)
                optimizer.step()
        assert time.monotonic() - started < 30.0
        assert session.step == 1
