"""Fault tests of processes that end at an instant of the loop body and are started again with the same script.

The script reads its loss after ``optimizer.step()`` and after the loop. Its weights, buffers, tracked objects and means
must be those of a run that was not disturbed, bit by bit.
"""

from __future__ import annotations

import uuid
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

import shardwell
from tests.support import natural_loop
from tests.support.processes import TrainerProcess

STEPS, AT = 4, 2
EXPECTED: dict[Any, dict[str, Any]] = {}


class ScriptProcess(TrainerProcess):
    """Runs ``natural_loop.py``."""

    module = "tests.support.natural_loop"

    def results(self) -> dict[str, Any]:
        """Waits for the end; returns the output by step, that after the loop, and the exit code."""
        ended = self.finish()
        steps: dict[int, list[dict[str, Any]]] = {}
        for message in self._messages():
            if "step" in message:
                steps.setdefault(message["step"], []).append(message)
        last = {name: ended.get(name) for name in ("ended", "scheduler")}
        return {"code": ended["returncode"], "errors": ended["stderr"], "steps": steps, **last}


def start(stack: ExitStack, address: str, run: str, rank: int, dp: int, trainers: int, *more: object) -> ScriptProcess:
    """Starts the script of one trainer."""
    options = ("--dp", dp, "--min-trainers", trainers, "--trainer", f"t{rank}", "--global-rank", rank)
    return stack.enter_context(ScriptProcess(address, run, *options, "--steps", STEPS, *more))


def run_script(address: str, run: str, dp: int, trainers: int, *more: object) -> list[dict[str, Any]]:
    """Runs the script in a process per trainer; returns their results by rank."""
    with ExitStack() as stack:
        processes = [start(stack, address, run, rank, dp, trainers, *more) for rank in range(trainers)]
        return [process.results() for process in processes]


def undisturbed(address: str, dp: int, *options: object) -> dict[str, Any]:
    """Returns the result of one trainer that is not disturbed."""
    if (dp, options) not in EXPECTED:
        (found,) = run_script(address, uuid.uuid4().hex, dp, 1, *options)
        assert found["code"] == 0, found["errors"]
        EXPECTED[dp, options] = found
    return EXPECTED[dp, options]


def require_same(
    results: list[dict[str, Any]], expected: dict[str, Any], *, tracks: bool = False, together: bool = False
) -> None:
    """Fails if trainers have other results than an undisturbed one, or have ended by an error.

    Args:
        results: The results by rank.
        expected: The undisturbed result.
        tracks: Whether the tracked objects of the trainer of rank 0 are compared.
        together: Whether no trainer can be behind. One that is behind reads weights that are newer than its step, and
            buffers that may be newer still. Then the weights are compared after the last step only.
    """
    for rank, result in enumerate(results):
        assert result["code"] == 0, result["errors"]
        assert isinstance(result["ended"], float) and result["scheduler"] == expected["scheduler"]
        for number, lines in result["steps"].items():
            (line,), (undisturbed_line,) = lines, expected["steps"][number]
            for name in ("means", "lr", *(("counter",) if tracks and not rank else ())):
                assert line[name] == undisturbed_line[name], (rank, number, name)
            if together or number == max(expected["steps"]):
                assert line["state"] == undisturbed_line["state"], (rank, number)


def end_and_start_again(address: str, instant: str, dp: int, trainers: int, *options: object) -> None:
    """Ends all processes at an instant, starts them again, and compares."""
    run, expected = uuid.uuid4().hex, undisturbed(address, dp, *options)
    first = run_script(address, run, dp, trainers, *options, "--end-at", instant, "--at-step", AT)
    assert {each["code"] for each in first} == {-9}, first
    again = run_script(address, run, dp, trainers, *options)
    require_same(again, expected, tracks=trainers == 1, together=True)
    for rank, result in enumerate(again):
        ranks = [rank] if dp == trainers else list(range(dp))
        assert [lines[0]["ranks"] for lines in result["steps"].values()] == [ranks] * len(result["steps"])
        assert instant == "at end" or min(result["steps"]) == AT, "the iteration is repeated"


@pytest.mark.parametrize("instant", ["before step", "in scheduler"])
def test_script_goes_on_after_its_process_has_ended(cluster: shardwell.LocalCluster, instant: str) -> None:
    end_and_start_again(cluster.address, instant, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("transports", ["shm", "socket"])
@pytest.mark.parametrize(("dp", "trainers"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("instant", natural_loop.INSTANTS)
def test_scripts_go_on_wherever_their_processes_end(
    cluster: shardwell.LocalCluster, instant: str, dp: int, trainers: int, transports: str
) -> None:
    end_and_start_again(cluster.address, instant, dp, trainers, "--transports", transports)


@pytest.mark.long
@pytest.mark.parametrize("instant", ["in batches", "after step"])
@pytest.mark.parametrize(
    "options",
    [
        ("--source", "dataset"),
        ("--source", "stream"),
        ("--optimizer-steps", "2"),
        ("--optimizer-steps", "2", "--source", "stream"),
        ("--client-side",),
    ],
)
def test_repeated_iteration_has_the_batches_of_its_step(
    cluster: shardwell.LocalCluster, options: tuple[object, ...], instant: str
) -> None:
    end_and_start_again(cluster.address, instant, 1, 1, *options)


def acted(results: list[dict[str, Any]], rank: int, steps: int) -> set[int]:
    """Returns the steps in which a trainer has acted for a rank. Fails if two have.

    After the last step, a trainer leaves. One that learns of the commit later then acts once more.
    """
    lines = [line for result in results for each in result["steps"].values() for line in each]
    found = Counter(line["step"] for line in lines if rank in line["ranks"])
    assert all(count == 1 or (step == steps - 1 and count == 2) for step, count in found.items()), found
    return set(found)


@pytest.mark.parametrize("instant", ["in batches", "before step", "after step"])
def test_run_goes_on_when_one_of_its_processes_ends(cluster: shardwell.LocalCluster, instant: str) -> None:
    run, expected = uuid.uuid4().hex, undisturbed(cluster.address, 2)
    with ExitStack() as stack:
        other = start(stack, cluster.address, run, 1, 2, 2)
        first = start(stack, cluster.address, run, 0, 2, 2, "--end-at", instant, "--at-step", AT).results()
        assert first["code"] == -9
        again = start(stack, cluster.address, run, 0, 2, 2).results()
        results = [again, other.results()]
    require_same([result for result in results if result["steps"]], expected)
    found = acted([first, *results], 0, STEPS)
    assert found | ({AT} if instant == "after step" else set()) == set(range(STEPS)), found


@pytest.mark.parametrize("returns", [True, False])
def test_one_trainer_acts_for_a_rank_whose_trainer_hangs(returns: bool) -> None:
    run, more = uuid.uuid4().hex, ("--steps", 10)
    with ExitStack() as stack, shardwell.LocalCluster(num_shards=1, lease_s=60.0) as cluster:
        expected = undisturbed(cluster.address, 2, *more)
        late = ("--end-at", "in batches", "--at-step", 4, "--stop-after-s", 1.0)
        hangs = start(stack, cluster.address, run, 0, 2, 2, *more, *late)
        other = start(stack, cluster.address, run, 1, 2, 2, *more)
        hangs.wait_stopped()
        other.wait_for_step(6)
        if returns:
            hangs.resume()
        else:
            hangs.process.kill()
        results = [hangs.results(), other.results()]
    require_same(results if returns else results[1:], expected)
    assert acted(results, 0, 10) == acted(results, 1, 10) == set(range(10))
