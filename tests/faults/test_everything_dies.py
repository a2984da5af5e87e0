"""Fault test of the loss of every process at once: a run resumes from its last checkpoint, to the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import shardwell
from shardwell_wire.checkpoints.folder import RunFolder
from tests.support.long_run import LongRun

EVERY = 5


def saved(folder: Path, run: str) -> int:
    """Returns the step of the newest complete checkpoint."""
    return max(entry.step for entry in RunFolder.of(folder, run).entries() if entry.is_valid)


def test_run_resumes_after_every_process_was_killed(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    folder = tmp_path / "checkpoints"
    options = {"checkpoint_dir": str(folder), "checkpoint_every": EVERY, "resume": "latest"}
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        LongRun(cluster, tmp_path / "before", **options) as run,
        ThreadPoolExecutor() as threads,
    ):
        run.start("a", "b")
        run.wait_commits(3 * EVERY)
        trainers = [trainer.process for trainer in run.trainers.values()]
        processes = (*trainers, cluster.coordinator, *cluster.shards)
        list(threads.map(lambda process: process.kill(), processes))
        committed, step = run.committed, saved(folder, run.name)
    started_s = time.monotonic()
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        LongRun(cluster, tmp_path / "after", first=step, **options) as resumed,
    ):
        resumed.start("a", "b")
        resumed.wait_commits(1)
        record_property("resumed_after_s", round(time.monotonic() - started_s, 2))
        assert {steps[0] for steps in resumed.reports().values() if steps} == {step + 1}
        assert EVERY <= step <= committed
        resumed.wait_commits(committed - step + EVERY)
        resumed.finish()
