"""Trainer processes for tests: started, watched, and ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


class TrainerProcess:
    """``tests.support.trainer``, or another module, in a process; a context manager that leaves none behind."""

    module = "tests.support.trainer"

    def __init__(self, address: str, run: str, *arguments: object) -> None:
        command = [sys.executable, "-m", self.module, "--address", address, "--run", run]
        self._lines: list[str] = []
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_step(self, step: int) -> None:
        """Returns when the trainer has computed an item of that step."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)
            if json.loads(line).get("step") == step:
                return
        raise AssertionError(f"the trainer ended before step {step}: {self.finish()}")

    def wait_stopped(self, timeout_s: float = 60.0) -> None:
        """Returns when the trainer has stopped itself."""
        deadline, process = time.monotonic() + timeout_s, psutil.Process(self.process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            assert self.process.poll() is None, f"the trainer ended: {self.finish()}"
            assert time.monotonic() < deadline, "the trainer did not stop"
            time.sleep(0.01)

    def resume(self) -> None:
        """Has a stopped trainer go on."""
        self.process.send_signal(signal.SIGCONT)

    def finish(self, timeout_s: float = 120.0) -> dict[str, Any]:
        """Waits for the end; returns what was printed, with ``returncode`` and ``stderr``."""
        output, errors = self.process.communicate(timeout=timeout_s)
        result: dict[str, Any] = {"losses": [], "returncode": self.process.returncode, "stderr": errors}
        for line in [*self._lines, *output.splitlines()]:
            message = json.loads(line)
            if "loss" in message:
                result["losses"].append((message["step"], message["loss"]))
            else:
                result.update(message)
        return result

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
