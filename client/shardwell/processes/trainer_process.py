"""One trainer as a child process of ``shardwell launch``: its output relayed, its end noticed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from shardwell.processes import trainer_start

_output_lock = threading.Lock()
_LINE_END = re.compile(rb"([\r\n])")
"""A carriage return ends one state of a line that is rewritten in place."""


class TrainerProcess:
    """A training script that runs as one of several trainers.

    It gets a session of its own, so that signals reach it only through the launcher, and dies with
    the launcher (on Linux also if that is killed).

    Args:
        name: Its name in the run; put before each line of its output.
        command: Program and arguments.
        environment: Its whole environment.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.starts = 0
        self._command, self._environment = list(command), dict(environment)
        self.start()

    def start(self) -> None:
        """Starts it; again after it has ended."""
        self.starts += 1
        self._process = subprocess.Popen(
            [sys.executable, "-I", trainer_start.__file__, str(os.getpid()), *self._command],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        self._relays = [
            threading.Thread(target=_relay, args=(source, target, f"[{self.name}] ".encode()), daemon=True)
            for source, target in ((self._process.stdout, sys.stdout.buffer), (self._process.stderr, sys.stderr.buffer))
        ]
        for relay in self._relays:
            relay.start()

    @property
    def pid(self) -> int:
        """Its process id; another one after each start."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As a shell counts: 128 + n for signal n. None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, signal_number: int) -> None:
        """Sends a signal to the trainer, if it runs."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """Ends the trainer and everything that it started (SIGKILL)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Waits for its end, and until its output is relayed or its heirs have closed theirs for long enough."""
        self._process.wait()
        for relay in self._relays:
            relay.join(timeout=2.0)


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code > 128:
        try:
            return f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"


def _relay(source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
    """Copies output line by line, so that trainers do not write into each other's lines."""
    rest = b""
    with source:
        while data := os.read(source.fileno(), 65536):
            *lines, rest = _LINE_END.split(rest + data)
            try:
                for line, end in zip(lines[::2], lines[1::2], strict=True):
                    _write(target, prefix + line + end)
            except BrokenPipeError:
                return
    if rest:
        _write(target, prefix + rest + b"\n")


def _write(target: IO[bytes], data: bytes) -> None:
    with _output_lock:
        target.write(data)
        target.flush()
