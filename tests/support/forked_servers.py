"""Servers of ``LocalCluster``, and workers of benchmarks, that are forked from a process that has imported torch.

A process that starts with a new interpreter needs more than 2 s of CPU time for imports, which is most of the time of
many tests. Forked ones are real processes too: they have their own pipes, log, environment, session and exit code.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from io import BufferedReader, TextIOWrapper
from multiprocessing import process as multiprocessing_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from benchmarks.workers import Worker
from shardwell.processes import local_cluster
from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from shardwell_wire import fault_points
from tests.support.processes import fork_context, wait_for_fork_server


class ForkedProcess:
    """A process that runs the ``main`` of a module, with the interface of ``subprocess.Popen`` as far as it is used.

    Args:
        module: The module.
        arguments: Arguments of the command.
        environment: Environment variables.
        log_path: File for standard error.
    """

    def __init__(self, module: str, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        its_input, own_input = fork_context.Pipe(duplex=False)
        own_output, its_output = fork_context.Pipe(duplex=False)
        self._process = fork_context.Process(
            target=_run_module,
            args=(module, list(arguments), dict(environment), os.getcwd(), log_path, its_input, its_output),
            daemon=True,
        )
        self._process.start()
        # Only ``_reap`` may read the exit code. The module polls the processes in this set whenever it starts another.
        multiprocessing_process._children.discard(self._process)  # type: ignore[attr-defined]
        assert self._process.pid is not None
        self.pid, self.returncode, self._ended = self._process.pid, None, threading.Event()
        self.stdin, self.stdout = _file(own_input, "wb"), _file(own_output, "rb")
        for connection in (its_input, its_output):
            connection.close()
        threading.Thread(target=self._reap, name=f"end of {self.pid}", daemon=True).start()

    def _reap(self) -> None:
        self._process.join()
        self.returncode = self._process.exitcode
        self._ended.set()

    def poll(self) -> int | None:
        """Returns the exit code. None: the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code when the process has ended."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Sends SIGKILL."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class ForkedCommand(ForkedProcess):
    """A process that runs ``shardwell-server``. Its standard files are text, as of ``Popen(..., text=True)``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        # The process opens the end for writing by its path, so this end stays open until the process has ended.
        reading, self._written = os.pipe()
        super().__init__(
            "shardwell_server.cli", arguments, environment, Path(f"/proc/{os.getpid()}/fd/{self._written}")
        )
        self.stdout, self.stderr = TextIOWrapper(BufferedReader(self.stdout)), os.fdopen(reading)

    def _reap(self) -> None:
        super()._reap()
        os.close(self._written)

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        self._send(number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Returns the rest of the output and of the errors when the process has ended. Closes the files."""
        if self.stdin is not None:
            self.stdin.close()
        if self.stdout.closed:
            return "", ""
        with ThreadPoolExecutor(2) as pool:
            rest = [pool.submit(file.read) for file in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            output, errors = (each.result() for each in rest)
        self.stdout.close()
        self.stderr.close()
        return output, errors


class ForkedServer(ForkedProcess):
    """A process that runs ``shardwell-server``; see ``ForkedProcess``."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log_path: Path) -> None:
        super().__init__("shardwell_server.cli", arguments, environment, log_path)


_start_interpreter = ServerProcess._start


@contextmanager
def forked_servers() -> Iterator[None]:
    """Makes every ``ServerProcess`` of this process a ``ForkedServer`` while the block runs."""

    start_cluster = LocalCluster.start

    def start(server: ServerProcess) -> ForkedServer:
        return ForkedServer(server._arguments, local_cluster._server_environment(), server.log_path)

    def start_after_fork_server(cluster: LocalCluster) -> None:
        wait_for_fork_server()
        start_cluster(cluster)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServerProcess, "_start", start)
        patched.setattr(LocalCluster, "start", start_after_fork_server)
        yield


@contextmanager
def started_servers() -> Iterator[None]:
    """Lets every ``ServerProcess`` start a new interpreter again while the block runs, as in production."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ServerProcess, "_start", _start_interpreter)
        yield


@contextmanager
def forked_workers() -> Iterator[None]:
    """Makes every worker of a benchmark a ``ForkedProcess`` while the block runs."""

    def start(worker: Worker, module: str, arguments: Sequence[str], prefix: Sequence[str]) -> ForkedProcess:
        assert not prefix, "a forked process has no command that starts it"
        log_path = Path(f"/proc/{os.getpid()}/fd/{worker._log.fileno()}")
        return ForkedProcess(module, arguments, {**os.environ, "OMP_NUM_THREADS": "1"}, log_path)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Worker, "_start", start)
        yield


def _file(connection: Connection, mode: str) -> Any:
    """Returns an unbuffered file for one end of a pipe, and closes the connection."""
    with connection:
        return os.fdopen(os.dup(connection.fileno()), mode, 0)


def _run_module(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    log_path: Path,
    its_input: Connection,
    its_output: Connection,
) -> None:
    """Runs the module as a process of its own; called in the forked process."""
    os.setsid()
    os.chdir(folder)
    log = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for standard, descriptor in enumerate((its_input.fileno(), its_output.fileno(), log)):
        os.dup2(descriptor, standard)
    os.close(log)
    its_input.close()
    its_output.close()
    os.environ.clear()
    os.environ.update(environment)
    fault_points.arm_from_environment()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (multiprocessing has replaced it)
    sys.argv = [module, *arguments]
    sys.exit(importlib.import_module(module).main())
