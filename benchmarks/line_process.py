"""Processes of a benchmark: started, spoken to line by line, their memory watched."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.network import INTERFACE, Host

_LOG_TAIL_LINES = 15
_SAMPLE_S = 0.05
_PRIVATE = re.compile(r"^Private_(?:Clean|Dirty):\s+(\d+) kB$", re.MULTILINE)


class LineProcess:
    """A command that answers lines of input with lines of JSON; it ends when its input does.

    Args:
        command: Program and arguments.
        log: Receives its standard error.
        environment: What its environment has beside this process's.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for the benchmark, which ends its processes itself
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self) -> Any:
        """The next answer; ends the benchmark with the log's tail if the process is gone."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._gone()
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _gone(self) -> SystemExit:
        code, tail = self._process.wait(), self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return SystemExit("\n".join([f"{self._log.stem} ended with exit code {code}; its log ends:", *tail]))


class HostProcess(LineProcess):
    """A ``LineProcess`` on a host of a benchmark's network."""

    def __init__(self, host: Host, command: Sequence[str], log: Path) -> None:
        self.host = host
        # Left to itself gloo looks the hostname up, which no host of this network can resolve.
        super().__init__([*host.prefix, *command], log, {"GLOO_SOCKET_IFNAME": INTERFACE})


class PeakMemory:
    """The most unshared memory that groups of processes have at once, sampled while the context lasts.

    Args:
        groups: Process ids, each group summed.

    Attributes:
        peak_bytes: By group.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self.peak_bytes = [0] * len(groups)
        self._groups = groups
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            for number, pids in enumerate(self._groups):
                size = sum(unshared_bytes(Path(f"/proc/{pid}/smaps_rollup").read_text()) for pid in pids)
                self.peak_bytes[number] = max(self.peak_bytes[number], size)


def unshared_bytes(smaps_rollup: str) -> int:
    """A process's own memory (USS), from the text of ``/proc/PID/smaps_rollup``."""
    return 1024 * sum(map(int, _PRIVATE.findall(smaps_rollup)))
