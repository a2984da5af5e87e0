"""A shard server's process is killed and started again on its host: it takes up its shards from shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell_server.shard.restart.undo import SUFFIX as UNDO_SUFFIX
from shardwell_wire import fault_points
from shardwell_wire.model.optimizers import OPTIMIZERS
from tests.support.cluster import wait_until
from tests.support.processes import TrainerProcess
from tests.support.reference import undisturbed_sha256
from tests.support.restarted_shard import OWNER
from tests.support.shared_files import folder_of
from tests.unit.shard_arithmetic.test_optimizers import SETTINGS

Fault = tuple[str, int]
"""A fault point, and the occurrence at which the process is killed."""

FILE_CREATED = "server.file.created"


class Shards:
    """Plays processes of one shard server, each in the folder that the former one left."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.restarted_shard"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def play(
        self, folder: Path, algorithm: str, dtype: str, dp: int, fault: Fault | None, **options: Any
    ) -> dict[str, Any]:
        """Runs one process until it has made all steps or is killed. Returns what it found and made."""
        assert self._process.stdin is not None and self._process.stdout is not None
        case = {"folder": str(folder), "algorithm": algorithm, "dtype": dtype, "dp": dp, "fault": fault}
        print(json.dumps(case | {"settings": SETTINGS[algorithm]} | options), file=self._process.stdin, flush=True)
        return dict(json.loads(self._process.stdout.readline()))

    def finish(
        self, folder: Path, algorithm: str, dtype: str, dp: int, *faults: Fault, **options: Any
    ) -> dict[str, Any]:
        """Runs processes until one finishes. Each of the first ones is killed by a fault."""
        folder.mkdir()
        for fault in faults:
            assert self.play(folder, algorithm, dtype, dp, fault, **options) == {"code": -signal.SIGKILL}, fault
        finished = self.play(folder, algorithm, dtype, dp, None, **options)
        assert finished.pop("code") == 0
        names = sorted(path.name for path in folder.iterdir() if path.name not in ("committed", "result"))
        assert len(names) == 1 and names[0].startswith(OWNER.prefix), "a clean stop leaves the server's folder"
        return finished

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def shards() -> Iterator[Shards]:
    started = Shards()
    yield started
    started.close()


@pytest.mark.parametrize(
    ("algorithm", "dtype", "dp"),
    [*((name, "float32", 2) for name in OPTIMIZERS), ("sgd", "bfloat16", 2), ("adamw", "bfloat16", 1)],
)
def test_update_of_every_optimizer_continues_where_it_was_killed(
    algorithm: str, dtype: str, dp: int, tmp_path: Path, shards: Shards
) -> None:
    case = (algorithm, dtype, dp)
    expected = shards.finish(tmp_path / "whole", *case)
    assert expected["held"] == 0
    # The first occurrences are in step 0, in which state is created. The next processes are killed again: once while
    # they continue the update, and once later.
    faults = [("server.update.in_piece", 2), ("server.update.in_piece", 1), ("server.update.middle", 9)]
    found = shards.finish(tmp_path / "killed", *case, *faults)
    assert (found["hash"], found["held"]) == (expected["hash"], 3)


@pytest.mark.parametrize(("algorithm", "new_state_at"), [("adamw", -1), ("muon", -1), ("adamw", 1), ("adamw", 2)])
def test_update_continues_from_every_piece(algorithm: str, new_state_at: int, tmp_path: Path, shards: Shards) -> None:
    case = (algorithm, "float32", 2)
    options = {"new_state_at": new_state_at}
    expected = shards.finish(tmp_path / "whole", *case, **options)
    for point in ("server.update.in_piece", "server.update.middle"):
        for nth in (1, 3, 9, 30):
            folder = tmp_path / f"{point}-{nth}"
            folder.mkdir()
            if shards.play(folder, *case, (point, nth), **options)["code"] == 0:
                break  # the update has fewer pieces
            found = shards.play(folder, *case, None, **options)
            assert (found["hash"], found["held"]) == (expected["hash"], 3), (point, nth)
        assert nth > 3


@pytest.mark.parametrize("algorithm", ["sgd", "adamw"])
def test_update_of_several_shards_is_undone_from_every_point(algorithm: str, tmp_path: Path, shards: Shards) -> None:
    case, point = (algorithm, "float32", 2), "server.update.joint"
    expected = shards.finish(tmp_path / "alone", *case)
    assert shards.finish(tmp_path / "together", *case, slice_bytes=1 << 20)["hash"] == expected["hash"]
    for nth in range(1, 20):
        folder = tmp_path / f"killed-{nth}"
        folder.mkdir()
        if shards.play(folder, *case, (point, nth), slice_bytes=1 << 20)["code"] == 0:
            break  # the updates have fewer points
        found = shards.play(folder, *case, None, slice_bytes=1 << 20)
        assert (found["hash"], found["held"]) == (expected["hash"], 3), nth
    assert nth == 1 + 2 * 5, "two updates of two shards: begun, changed, saved twice, complete"
    faults = [(point, 3), (point, 2)]  # the second process undoes the update of step 2, and is killed in step 3
    found = shards.finish(tmp_path / "again", *case, *faults, slice_bytes=1 << 20)
    assert (found["hash"], found["held"]) == (expected["hash"], 3)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize(
    "point", ["server.prepare.after", "server.update.before", "server.update.between_shards", "server.update.after"]
)
def test_step_is_repeated_or_continued_from_every_point(point: str, dp: int, tmp_path: Path, shards: Shards) -> None:
    case = ("adamw", "float32", dp)
    expected = shards.finish(tmp_path / "whole", *case)
    for nth in (1, 2, 3):
        found = shards.finish(tmp_path / f"killed-{nth}", *case, (point, nth))
        assert (found["hash"], found["held"]) == (expected["hash"], 3)


@pytest.mark.parametrize("dp", [1, 2])
def test_step_goes_on_from_every_record_that_no_step_word_continues(dp: int, tmp_path: Path, shards: Shards) -> None:
    case = ("adamw", "float32", dp)
    expected = shards.finish(tmp_path / "whole", *case)
    for nth in range(4, 40):  # the first records are those of the three published shards
        folder = tmp_path / f"killed-{nth}"
        folder.mkdir()
        if shards.play(folder, *case, ("server.record.replaced", nth))["code"] == 0:
            break  # fewer records were replaced
        found = shards.play(folder, *case, None)
        assert (found["hash"], found["held"]) == (expected["hash"], 3), nth
    assert 10 < nth < 39


def test_step_goes_on_from_every_file_that_was_being_made(tmp_path: Path, shards: Shards) -> None:
    case = ("adamw", "float32", 2)
    expected = shards.finish(tmp_path / "whole", *case)
    for nth in range(4, 40):  # the first files are the values of the three shards, which are not published yet
        folder = tmp_path / f"killed-{nth}"
        folder.mkdir()
        if shards.play(folder, *case, (FILE_CREATED, nth))["code"] == 0:
            break  # fewer files were made
        found = shards.play(folder, *case, None)
        assert (found["hash"], found["held"]) == (expected["hash"], 3), nth
    assert 8 < nth < 39


# Real processes.


STEPS = 6


@pytest.fixture(scope="module")
def undisturbed_hash() -> str:
    return undisturbed_sha256(dp=2, steps=STEPS)


def train(cluster: shardwell.LocalCluster, kill_after: Sequence[int] = ()) -> tuple[list[str], list[int]]:
    """Trains with two trainers, and kills the first shard server after some steps.

    Returns:
        The hashes that the trainers found, and the process ids that the shard server had.
    """
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    with (
        TrainerProcess(cluster.address, run, *options) as first,
        TrainerProcess(cluster.address, run, *options) as second,
    ):
        pids = [cluster.shards[0].pid]
        for step in kill_after:
            first.wait_for_step(step)
            os.kill(cluster.shards[0].pid, signal.SIGKILL)
            wait_until(lambda: cluster.shards[0].pid != pids[-1], "another process of the shard server")
            pids.append(cluster.shards[0].pid)
        results = [first.finish(), second.finish()]
    assert all("sha256" in result for result in results), results
    return [result["sha256"] for result in results], pids


@pytest.mark.parametrize("num_shards", [1, 2])
def test_killed_shard_server_loses_no_step(num_shards: int, undisturbed_hash: str) -> None:
    with shardwell.LocalCluster(num_shards=num_shards, min_shard_bytes=4096) as cluster:
        hashes, pids = train(cluster, kill_after=(1, 3))
        folder = folder_of(cluster.shards[0].pid)
    assert hashes == [undisturbed_hash] * 2
    assert len(set(pids)) == 3
    assert not folder.exists()


@pytest.mark.parametrize(
    ("point", "nth"),
    [
        ("server.update.in_piece", 5),
        # All of its points: test_update_of_several_shards_is_undone_from_every_point.
        *(("server.update.joint", nth) for nth in (6, 13)),
        ("server.update.between_shards", 9),
        ("server.prepare.after", 3),
        ("server.push.accepted", 11),
        ("server.update.after", 3),
        *((FILE_CREATED, nth) for nth in (1, 2)),  # before the first update, and before the first of several shards
    ],
)
def test_shard_server_killed_in_the_middle_of_a_step_loses_nothing(
    point: str, nth: int, undisturbed_hash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = tmp_path / "happened"
    where = {"suffix": UNDO_SUFFIX} if point == FILE_CREATED else {}
    fault = fault_points.Fault(point=point, action="kill", nth=nth, where=where, once=str(happened))
    for name, value in fault_points.environment(fault).items():
        monkeypatch.setenv(name, value)
    with shardwell.LocalCluster(num_shards=1) as cluster:
        hashes, _ = train(cluster)
    assert happened.exists()
    assert hashes == [undisturbed_hash] * 2
