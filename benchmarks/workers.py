"""Groups of worker processes that are measured by turns. Interleaving spreads machine noise evenly over the variants.

A worker is ``python -m MODULE ARGUMENTS`` with a main that ends in ``serve``. It reads commands from standard input,
answers on standard output, and sleeps in between. A group has the processes of one variant of a benchmark: its workers
and, for Shardwell, a cluster. ``interleave`` starts groups, rotates among them and ends them.
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
"""Key of the error in a worker's last answer."""
_EXIT_LIMIT_S = 10.0
_LOG_TAIL_LINES = 12
_MEMORY_SHARE = 0.75
"""Fraction of the available memory that groups may use. The rest covers errors of the estimates."""


class WorkerFailedError(Exception):
    """Raised when a worker ends or does not answer. The first line is the reason, the others are the end of its log."""


class Worker:
    """One worker process, as seen by the measuring process.

    Args:
        module: Module that ``python -m`` runs, such as ``benchmarks.trainers``.
        arguments: Command line of the worker.
        prefix: Command that starts the worker, such as nsenter with its arguments.
    """

    def __init__(self, module: str, arguments: Sequence[str], *, prefix: Sequence[str] = ()) -> None:
        self.name = " ".join([module, *arguments])
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the worker)
        self._received = b""
        self._process = self._start(module, arguments, prefix)

    def _start(self, module: str, arguments: Sequence[str], prefix: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
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
        """Sends a command and returns. ``receive`` returns the answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self.failure("ended") from None

    def receive(self) -> dict[str, Any] | None:
        """Reads a part of the answer; returns None while the answer is incomplete. Call when the output is readable.

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
        """Returns an error with the reason and the end of the worker's log."""
        return WorkerFailedError(f"a worker {what}: {self.name}\n{self._log_tail()}")

    def _log_tail(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-_LOG_TAIL_LINES:])

    def close(self) -> None:
        """Ends the worker by closing its input, and kills it after a timeout."""
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
    """Answers commands until the standard input ends or a command raises. Called by the main of a worker."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keeps the output of libraries out of the answers
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
    """The processes of one variant of a benchmark."""

    workers: Sequence[Worker]
    """Workers in the order of their ranks."""
    server_pids: Sequence[int] = ()
    """Process ids of the coordinator and the shard servers, or of a baseline's servers."""

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self.workers]

    def run(self, *, timeout_s: float = 600.0, **command: Any) -> list[dict[str, Any]]:
        """Sends a command to all workers and waits for their answers.

        Returns:
            The answers in the order of the workers.

        Raises:
            WorkerFailedError: A worker ended, or did not answer within ``timeout_s``.
        """
        for worker in self.workers:
            worker.begin(command)
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for index, worker in enumerate(self.workers):
                selector.register(worker.stdout_descriptor, selectors.EVENT_READ, index)
            while len(answers) < len(self.workers):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = next(worker for index, worker in enumerate(self.workers) if index not in answers)
                    raise late.failure(f"did not answer in {timeout_s:.0f} s")
                for key, _ in ready:
                    if (answer := self.workers[key.data].receive()) is not None:
                        answers[key.data] = answer
                        selector.unregister(key.fd)
        return [answers[index] for index in range(len(self.workers))]


GroupContext = AbstractContextManager[Group]
"""A context manager that starts a group and ends it."""


@contextmanager
def start_group(
    module: str, command_lines: Iterable[Sequence[str]], *, server_pids: Sequence[int] = ()
) -> Iterator[Group]:
    """Starts one worker of a module per command line."""
    with ExitStack() as stack:
        workers = []
        for arguments in command_lines:
            workers.append(Worker(module, arguments))
            stack.callback(workers[-1].close)
        yield Group(workers=workers, server_pids=server_pids)


def fit_in_memory(sizes_bytes: Iterable[int]) -> bool:
    """Returns True if groups of these estimated sizes fit into this machine's memory together."""
    return sum(sizes_bytes) <= _MEMORY_SHARE * psutil.virtual_memory().available


def interleave(
    starters: Mapping[str, Callable[[], GroupContext]],
    *,
    rounds: int,
    resident: bool,
    warm_up: Callable[[str, Group], object],
    measure: Callable[[str, Group], None],
) -> dict[str, str]:
    """Measures every group once per round. The first group changes from round to round.

    A group that fails is ended and not measured again; the others continue.

    Args:
        starters: Functions that start a group, by the variant's name.
        rounds: Number of turns of each group.
        resident: True keeps groups alive from their first turn to the end. False starts and ends each group around
            each of its turns, for machines without memory for all groups.
        warm_up: Called once after each start.
        measure: Called in each turn, with the variant's name and its group.

    Returns:
        Reasons of failed groups, by name.
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
                    measure(name, alive[name][1])
                except (WorkerFailedError, shardwell.ShardwellError) as error:
                    failures[name] = str(error).partition("\n")[0]
                    print(f"{name} failed: {error}", file=sys.stderr)
                if not resident or name in failures:
                    end(name)
    finally:
        for name in list(alive):
            end(name)
    return failures
