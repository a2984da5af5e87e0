"""A trainer as a child process of ``shardwell launch``, with relayed output."""

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
"""Progress bars rewrite a line in place and end each state with a carriage return."""


class TrainerProcess:
    """A training script that runs as one of several trainers.

    The process has its own session, so that it receives signals from the launcher only. It ends with the launcher; on
    Linux also if the launcher is killed.

    Args:
        name: Name of the trainer in the run, and prefix of each line of its output.
        command: Program and arguments.
        environment: The complete environment.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name = name
        self.starts = 0
        self._command, self._environment = list(command), dict(environment)
        self.start()

    def start(self) -> None:
        """Starts the trainer. Also restarts a trainer that has ended."""
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
        """Process id. Changes with each start."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code as in a shell: 128 + n for signal n. None while the trainer runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def send(self, signal_number: int) -> None:
        """Sends a signal to the trainer if it runs."""
        self._process.send_signal(signal_number)

    def kill(self) -> None:
        """Kills the trainer and all processes that it has started (SIGKILL)."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def finish(self) -> None:
        """Waits for the trainer's end, and a limited time for output that its own child processes still hold open."""
        self._process.wait()
        for relay in self._relays:
            relay.join(timeout=2.0)


def describe_exit(code: int) -> str:
    """Returns a description of an exit code."""
    if code > 128:
        try:
            return f"ended by {signal.Signals(code - 128).name}"
        except ValueError:
            pass
    return f"ended with exit code {code}"


def _relay(source: IO[bytes], target: IO[bytes], prefix: bytes) -> None:
    """Copies output line by line, so that lines of different trainers do not mix."""
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
