"""Trainer processes for tests: started, observed, and always ended."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch

from shardwell_wire import fault_points
from tests.support.cluster import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Note: [Fork server]
# Importing torch, torch._dynamo and the SDK takes a trainer about 4 s of CPU time. A fork server imports them once per
# pytest process, and forks trainers and servers. It has one thread and no gRPC channel, which makes the fork safe.
fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["tests.support.preloaded"])


@cache
def wait_for_fork_server() -> None:
    """Returns when the fork server has its imports, which may take a minute on a busy machine."""
    process = fork_context.Process(target=int)
    process.start()
    process.join()


def run_ranks(function: Callable[..., None], *arguments: object, count: int = 2) -> None:
    """Calls ``function(rank, *arguments)`` in one process per rank; raises if one of them fails."""
    torch.multiprocessing.start_processes(function, arguments, nprocs=count, start_method="forkserver")


class TrainerProcess:
    """Process that runs ``tests.support.trainer`` or another module; the context manager ends it."""

    module = "tests.support.trainer"

    def __init__(self, address: str, run: str, *arguments: object) -> None:
        command = [self.module, "--address", address, "--run", run, *map(str, arguments)]
        self._folder = TemporaryDirectory()
        self._output, self._errors = (Path(self._folder.name) / name for name in ("output", "errors"))
        for path in (self._output, self._errors):
            path.touch()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = fork_context.Process(
            target=_run_module, args=(command, environment, self._output, self._errors), daemon=True
        )
        self.process.start()

    def wait_for_step(self, step: int, timeout_s: float = 90.0) -> None:
        """Returns when the trainer has computed an item of that step."""
        self._wait(lambda: any(message.get("step") == step for message in self._messages()), f"step {step}", timeout_s)

    def wait_stopped(self, timeout_s: float = 90.0) -> None:
        """Returns when the trainer has stopped itself."""
        process = psutil.Process(self.pid)
        self._wait(lambda: process.status() == psutil.STATUS_STOPPED, "stop of the trainer", timeout_s)

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Polls a condition. Fails at once if the trainer ends before it is true."""

        def is_met() -> bool:
            was_alive = self.process.is_alive()
            if condition():
                return True
            assert was_alive, f"the trainer ended before {what}: {self.finish()}"
            return False

        wait_until(is_met, what, timeout_s=timeout_s)

    @property
    def pid(self) -> int:
        """Process id."""
        assert self.process.pid is not None
        return self.process.pid

    def resume(self) -> None:
        """Continues a stopped trainer."""
        os.kill(self.pid, signal.SIGCONT)

    def finish(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Waits for the end of the process; returns its output with ``returncode`` and ``stderr``."""
        self.process.join(timeout_s)
        assert self.process.exitcode is not None, f"the trainer has not ended after {timeout_s} s"
        errors = self._errors.read_text(encoding="utf-8")
        result: dict[str, Any] = {"losses": [], "returncode": self.process.exitcode, "stderr": errors}
        for message in self._messages():
            if "loss" in message:
                result["losses"].append((message["step"], message["loss"]))
            else:
                result.update(message)
        return result

    def _messages(self) -> list[dict[str, Any]]:
        """Returns the complete lines of the output."""
        lines = self._output.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.join()
        self._folder.cleanup()


def _run_module(command: list[str], environment: Mapping[str, str], output: Path, errors: Path) -> None:
    """Runs the ``main`` of a module with its own arguments, environment and output; called in the process."""
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    fault_points.arm_from_environment()
    sys.argv = command
    importlib.import_module(command[0]).main()
