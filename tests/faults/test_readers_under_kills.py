"""Readers follow a run while servers, the coordinator and readers are killed: they never read a mixture of versions.

``READER_KILLS=1000 pytest -m long tests/faults/test_readers_under_kills.py`` kills more often.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main as command
from shardwell.weights.digest import pinned_digest
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from tests.support.background_training import BackgroundTraining
from tests.support.cluster import wait_until
from tests.support.processes import TrainerProcess

KILLS = int(os.environ.get("READER_KILLS", "30"))
KEPT = 3


class _Digests(dict[int, Any]):
    """Digests of states that are set. The first of each version counts: an iteration of the loop that repeats a step
    begins with buffers that the forward of the lost attempt has changed."""

    def __setitem__(self, version: int, state: dict[str, torch.Tensor]) -> None:
        self.setdefault(version, shardwell.weights_digest(state))


class Model(nn.Module):
    """A model with statistics, large enough that a read takes some transfers."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave, self.norm = nn.Linear(300, 300), nn.Linear(300, 300), nn.BatchNorm1d(300)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)))


class Training(BackgroundTraining):
    model, units, width = Model, {nn.BatchNorm1d}, 300


class FollowingReader(TrainerProcess):
    """A process of this module: appends each version that it has read, and its digest, to a file."""

    module = "tests.faults.test_readers_under_kills"


def main() -> None:
    """Follows a run until it is killed. Every third read is of a published version, every third of an older one."""
    parser = argparse.ArgumentParser()
    for name in ("--address", "--run", "--reads"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with Path(arguments.reads).open("a") as reads, shardwell.attach(arguments.address, arguments.run) as reader:
        for number in range(10**9):
            try:
                version = (None, "eval", reader.version - 1)[number % 3]
                with reader.pin(version) as pinned:
                    digest = pinned_digest(pinned)
                reads.write(f"{pinned.version} {digest}\n")
                reads.flush()
            except (UnavailableError, VersionGoneError, DeadlineError) as error:
                if version == "eval" and isinstance(error, VersionGoneError):
                    raise  # it is promised


def reads_of(path: Path) -> list[tuple[int, str]]:
    """Returns what readers have written to a file. A reader that is killed may leave half a line."""
    lines = [line.split() for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(int(line[0]), line[1]) for line in lines if len(line) == 2 and len(line[1]) == 64]


@pytest.mark.long
@pytest.mark.timeout(120 + 5 * KILLS)
def test_every_read_is_one_version_as_it_was_trained(tmp_path: Path) -> None:
    rng, kills = random.Random(0), {"server": 0, "coordinator": 0, "reader": 0}
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        training = Training(cluster.address, keep_versions=KEPT, backups=1)
        training.states = _Digests()
        paths = [tmp_path / f"reads-{number}" for number in range(2)]

        def follow(path: Path) -> FollowingReader:
            return FollowingReader(cluster.address, training.run, "--reads", path)

        def read_count() -> int:
            return sum(len(reads_of(path)) for path in paths if path.exists())

        with training.in_background():
            training.wait_for(KEPT)
            published = training.pause()
            assert command(["publish", training.run, "eval", "--address", cluster.address]) == 0
            training.resume()
            readers = [follow(path) for path in paths]
            try:
                wait_until(lambda: read_count() > 0, "the first read", timeout_s=60.0)
                for _ in range(KILLS):
                    threading.Event().wait(rng.uniform(0.0, 0.3))  # at random instants
                    victim = rng.choice(("server", "server", "coordinator", "reader", "reader"))
                    kills[victim] += 1
                    if victim == "server":
                        rng.choice(cluster.shards).restart(time.monotonic() + 60.0)
                    elif victim == "coordinator":
                        cluster.restart_coordinator()
                    else:
                        number = rng.randrange(len(readers))
                        readers[number].process.kill()
                        readers[number].finish(30.0)
                        readers[number].__exit__()
                        readers[number] = follow(paths[number])
                count, step = read_count(), training.step
                wait_until(lambda: read_count() > count + 6, "reads after the last kill", timeout_s=60.0)
                training.wait_for(step + 1)
                assert all(each.process.is_alive() for each in readers), [each.finish(1.0) for each in readers]
            finally:
                for each in readers:
                    each.__exit__()
    reads = [read for path in paths for read in reads_of(path)]
    mixed = [(version, digest) for version, digest in reads if training.states[version] != digest]
    print(f"kills: {kills}, reads: {len(reads)} of {len(set(reads))} versions, mixed: {len(mixed)}")
    assert not mixed and published in dict(reads)
