"""Groups of worker processes that measure by turns, so that a change of the machine's mood hits all alike.

A worker is ``python -m MODULE ARGUMENTS`` whose main ends in ``serve``. It is told over its standard input what
to do, answers on its standard output, and sleeps in between. A group is what one variant of a benchmark needs:
its workers and, for Shardwell, a cluster. ``take_turns`` starts groups, rotates among them and ends them.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import shardwell

ROOT = Path(__file__).resolve().parents[1]
_ERROR = "error"
"""In a worker's last answer: what it failed of."""
_EXIT_LIMIT_S = 10.0
_LOG_TAIL_LINES = 12
_MEMORY_SHARE = 0.75
"""Of the memory that is available: the rest is for what the estimates do not know."""


class WorkerFailedError(Exception):
    """A worker ended or did not answer; the first line says why, the others are its log's tail."""


class Worker:
    """One worker process, seen from the process that measures.

    Args:
        module: What ``python -m`` runs, such as ``benchmarks.trainers``.
        arguments: Its command line.
        prefix: A program that becomes the worker, such as nsenter with its arguments.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, prefix: Sequence[str] = ()) -> None:
        self.name = " ".join([module, *arguments])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the worker)
        self._received = b""
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout_descriptor(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def begin(self, command: Mapping[str, Any]) -> None:
        """Sends a command and returns; the answer comes through ``receive``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("ended") from None

    def receive(self) -> dict[str, Any] | None:
        """Reads what there is of the answer, which must be something; None while it is not complete.

        Raises:
            WorkerFailedError: The worker ended.
        """
        data = os.read(self.stdout_descriptor, 1 << 16)
        if not data:
            raise self.failure("ended")
        self._received += data
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        answer: dict[str, Any] = json.loads(line)
        if _ERROR in answer:
            raise WorkerFailedError(f"{answer[_ERROR]}\n{self._log_tail()}")
        return answer

    def failure(self, what: str) -> WorkerFailedError:
        """The error that says what became of this worker, and the last that it wrote."""
        return WorkerFailedError(f"a worker {what}: {self.name}\n{self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def close(self) -> None:
        """Ends the worker: it may leave in good order, but not take long for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(_EXIT_LIMIT_S)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._log.close()


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """A worker's life: answers commands until its standard input ends or one of them raises."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a library prints must not land among the answers
        for line in sys.stdin:
            try:
                answered = answer(json.loads(line))
            except Exception as error:
                traceback.print_exc()
                print(json.dumps({_ERROR: f"{type(error).__name__}: {error}"}), file=answers, flush=True)
                raise SystemExit(1) from None
            print(json.dumps(answered), file=answers, flush=True)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The processes of one variant."""

    workers: Sequence[Worker]
    """In order of their ranks."""
    server_pids: Sequence[int] = ()
    """Shardwell's coordinator and shard servers, or another peer's servers."""

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def run(self, *, timeout_s: float = 600.0, **command: Any) -> list[dict[str, Any]]:
        """Has every worker carry out the same command at the same time.

        Returns:
            The answers in order of the workers.

        Raises:
            WorkerFailedError: A worker ended, or not all have answered after ``timeout_s``.
        """
        for worker in self.workers:
            worker.begin(command)
        answers: dict[int, dict[str, Any]] = {}
        give_up = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self.workers):
                selector.register(worker.stdout_descriptor, selectors.EVENT_READ, index)
            while len(answers) < len(self.workers):
                ready = selector.select(max(0.0, give_up - time.monotonic()))
                if not ready:
                    late = next(worker for index, worker in enumerate(self.workers) if index not in answers)
                    raise late.failure(f"did not answer in {timeout_s:.0f} s")
                for key, _ in ready:
                    if (answer := self.workers[key.data].receive()) is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fd)
        return [answers[index] for index in range(len(self.workers))]


GroupContext = AbstractContextManager[Group]
"""Entering it starts a group, leaving it ends the group."""


@contextmanager
def started(module: str, command_lines: Iterable[Sequence[str]], *, server_pids: Sequence[int] = ()) -> Iterator[Group]:
    """A group of workers of one module, one per command line."""
    with ExitStack() as stack:
        workers = []
        for arguments in command_lines:
            workers.append(Worker(module, arguments))
            stack.callback(workers[-1].close)
        yield Group(workers=workers, server_pids=server_pids)


def fit_in_memory(sizes_bytes: Iterable[int]) -> bool:
    """Whether groups of these estimated sizes can all be alive at once on this machine."""
    return sum(sizes_bytes) <= _MEMORY_SHARE * psutil.virtual_memory().available


def take_turns(
    starters: Mapping[str, Callable[[], GroupContext]],
    *,
    rounds: int,
    resident: bool,
    warm_up: Callable[[str, Group], None],
    turn: Callable[[str, Group], None],
) -> dict[str, str]:
    """Gives every group its turn in every round; who is first rotates.

    A group that fails is ended and takes no further part; the others go on.

    Args:
        starters: Make a group's context, by the variant's name.
        rounds: Turns of each group.
        resident: Whether groups live from their first turn to the end. Otherwise each is started and ended
            around each of its turns, for machines where not all fit.
        warm_up: Called once after each start.
        turn: Measures; called with the variant's name and its group.

    Returns:
        Why groups failed, by name; empty if none did.
    """
    failures: dict[str, str] = {}
    alive: dict[str, tuple[ExitStack, Group]] = {}

    def end(name: str) -> None:
        if name in alive:
            alive.pop(name)[0].close()

    try:
        for number in range(rounds):
            names = list(starters)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                if name in failures:
                    continue
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr)
                try:
                    if name not in alive:
                        stack = ExitStack()
                        alive[name] = stack, stack.enter_context(starters[name]())
                        warm_up(name, alive[name][1])
                    turn(name, alive[name][1])
                except (WorkerFailedError, shardwell.ShardwellError) as error:
                    failures[name] = str(error).partition("\n")[0]
                    print(f"{name} failed: {error}", file=sys.stderr)
                if not resident or name in failures:
                    end(name)
    finally:
        for name in list(alive):
            end(name)
    return failures
