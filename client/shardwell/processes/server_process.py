"""One Shardwell server as a child process: started, known to be ready, stopped, killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from shardwell_wire.errors import UnavailableError

_LOG_TAIL_LINES = 20


class ServerProcess:
    """A coordinator or a shard server, running ``python -m shardwell_server ...``.

    The process lives in a session of its own, so Ctrl-C in this terminal does not reach it, and reads
    a pipe that this process holds open: when this process ends, even by SIGKILL, the pipe closes and
    the server stops.

    Args:
        name: What it is called here and what its log file is called.
        arguments: Of ``shardwell-server``: the subcommand and its options.
        log_path: Receives its standard error.
    """

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._arguments = list(arguments)
        self._address: str | None = None
        self._asked_to_stop = False
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Its process id; another one after ``restart``."""
        return self._process.pid

    @property
    def address(self) -> str:
        """host:port it serves at, known once ``wait_ready`` has returned."""
        if self._address is None:
            raise UnavailableError(f"{self.name} is not ready yet")
        return self._address

    @property
    def exit_code(self) -> int | None:
        """0 after a clean stop, -n if signal n ended it, None while it runs."""
        return self._process.poll()

    def wait_ready(self, deadline: float) -> None:
        """Waits until the server answers rpcs.

        Args:
            deadline: On the clock of ``time.monotonic``.

        Raises:
            UnavailableError: It ended, or was not ready in time; the message ends with its log's tail.
        """
        line = self._first_line(deadline)
        if line is None:
            how = f"ended with exit code {self.exit_code}" if not self._is_alive() else "was not ready in time"
            raise UnavailableError(f"{self.name} {how}. {self.log_tail()}", server=self.name)
        self._address = json.loads(line)["address"]

    def restart(self, deadline: float) -> None:
        """Starts it again at the same address; kills it first if it runs."""
        self.kill()
        listen = self._arguments.index("--listen") + 1
        self._arguments[listen] = self.address
        self._asked_to_stop = False
        self._process = self._start()
        self.wait_ready(deadline)

    def kill(self) -> None:
        """Ends it at once (SIGKILL), as a crash would."""
        self._process.kill()
        self._reap()

    def stop(self, grace_s: float) -> None:
        """Asks it to stop (SIGTERM) and kills it if it has not after ``grace_s``."""
        self.ask_to_stop()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def ask_to_stop(self) -> None:
        """Sends SIGTERM, once, and returns; ``stop`` waits for the end."""
        if not self._asked_to_stop and self.exit_code is None:
            self._asked_to_stop = True
            self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shardwell_server", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_environment(),
            )

    def _first_line(self, deadline: float) -> bytes | None:
        """The line that says where it serves; None if it ended or the time is over."""
        assert self._process.stdout is not None
        descriptor, received = self._process.stdout.fileno(), b""
        while b"\n" not in received:
            ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(descriptor, 4096) if ready else b""
            if not data:
                return None
            received += data
        return received.partition(b"\n")[0]

    def _is_alive(self) -> bool:
        """Whether it runs; a process whose output has just closed gets a moment to be gone."""
        try:
            self._process.wait(0.5)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _reap(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def log_tail(self) -> str:
        """The last lines of its log, with a heading."""
        lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        text = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        return f"The end of its log:\n{text}"


def _environment() -> dict[str, str]:
    """This process's environment, without what is meant for other servers and for trainers."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWELL_")}
    return {"OMP_NUM_THREADS": "1", **inherited}
