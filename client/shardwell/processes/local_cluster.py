"""A cluster on this host: a coordinator and shard servers, each in a child process."""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from shardwell.find_credentials import PublishedCredentials
from shardwell_wire import fault_points
from shardwell_wire.checkpoints.storage import ROOT_VARIABLE
from shardwell_wire.errors import UnavailableError, UsageError
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, TemporaryFolder, own_identity, remove_folders
from shardwell_wire.host.shared_memory import open_file, opened
from shardwell_wire.host.variables import variables
from shardwell_wire.security.credentials import Credentials, new_key
from shardwell_wire.security.tls import Tls, TlsOptions
from shardwell_wire.security.tokens import ClusterKey

logger = logging.getLogger(__name__)

_STOP_LIMIT_S = 30.0
"""Seconds before a stopping server is killed. An interpreter with torch needs one, and several on a busy machine."""
_METRICS_PORT, _DASHBOARD_PORT = "--metrics-port", "--dashboard-port"
_LISTEN = ("--listen", "127.0.0.1:0")
_LOG_TAIL_LINES = 20
_MAX_QUICK_ENDS, _QUICK_END_S = 5, 1.0
"""A server is not started again after this many ends in a row, each before it was ready for these seconds."""


class LocalCluster:
    """Starts a coordinator and shard servers on free loopback ports. ``close`` stops them.

    A context manager::

        with shardwell.LocalCluster(num_shards=2) as cluster:
            session = shardwell.join(cluster.address)

    The servers are real processes. They end with this process, even if it is killed. Ctrl-C does not reach them, so
    trainers can still leave cleanly. A shard server that is killed or crashes is started again at the same address, and
    takes up its shards from shared memory.

    Only processes of this user can use the cluster: its servers require a token, which each start creates. Other
    processes of this user on this host find the token by the cluster's address. Processes on other hosts read it from
    ``token_file``.

    Args:
        num_shards: Number of shard servers.
        memory_budget: Bytes that each shard server may use. None: the servers share 80 % of the memory of the machine
            or container.
        lease_s: Seconds of silence after which a trainer or server is lost. None: the coordinator's default.
        min_shard_bytes: Minimum size of a shard. None: the coordinator's default.
        state_dir: Folder of the coordinator's state. None: a temporary folder.
        log_dir: Folder of the servers' logs. None: a temporary folder.
        log_level: Log level of the servers.
        tls: Certificates of the servers, which then encrypt connections. Other processes name them too, with the token
            file: they do not find the credentials by the address. None: connections are not encrypted.
        checkpoint_root: Folders and URLs, separated by commas, below which trainers may name folders of checkpoints.
            None: as ``SHARDWELL_CHECKPOINT_ROOT`` says, else every folder that this user can open.
        metrics: Whether each server serves metrics for Prometheus at a free loopback port: see
            ``ServerProcess.metrics_address``.
        dashboard: Whether the coordinator serves its web page at a free loopback port, see
            ``ServerProcess.dashboard_address``. Needs the extra ``dashboard``.
        start_limit_s: Seconds to wait until the servers are ready.

    Attributes:
        coordinator: The coordinator's process.
        shards: The shard servers' processes, by their ids ``shard-0``, ``shard-1``, ...

    Raises:
        UsageError: ``num_shards`` is not positive.
        UnavailableError: A server did not start. The message ends with the end of its log.
    """

    coordinator: ServerProcess
    shards: tuple[ServerProcess, ...]
    credentials: Credentials
    """Credentials of an operator of the cluster. Each start creates a new key."""
    key: ClusterKey
    """The secret from which all tokens of the cluster are made. Each start creates a new one."""
    token_file: str
    """File with the token, readable by this user only. Removed when the cluster stops."""

    def __init__(
        self,
        num_shards: int = 2,
        *,
        memory_budget: int | None = None,
        lease_s: float | None = None,
        min_shard_bytes: int | None = None,
        state_dir: str | Path | None = None,
        log_dir: str | Path | None = None,
        log_level: str = "info",
        tls: TlsOptions | None = None,
        checkpoint_root: str | Path | None = None,
        metrics: bool = False,
        dashboard: bool = False,
        start_limit_s: float = 60.0,
    ) -> None:
        if num_shards < 1:
            raise UsageError(f"LocalCluster(num_shards={num_shards}): expected at least 1 shard server")
        self._num_shards = num_shards
        self._shard_options = _options(memory_budget=memory_budget, servers_on_host=num_shards, log_level=log_level)
        self._coordinator_options = _options(lease_s=lease_s, min_shard_bytes=min_shard_bytes, log_level=log_level)
        self._coordinator_options += [_DASHBOARD_PORT, "0"] if dashboard else []
        self._state_dir, self._log_dir, self._tls = state_dir, log_dir, tls
        self._checkpoint_root = str(checkpoint_root or variables().get(ROOT_VARIABLE) or "any")
        self._metrics_options = [_METRICS_PORT, "0"] if metrics else []
        self._start_limit_s = start_limit_s
        self._temporary: TemporaryFolder | None = None
        self._started: list[ServerProcess] = []
        self._published: list[PublishedCredentials] = []

    @property
    def token(self) -> str:
        """A token of an operator for ``authorization: Bearer TOKEN``, valid for at least 30 minutes."""
        return self.credentials.token

    @property
    def address(self) -> str:
        """The coordinator's host:port, for ``shardwell.join``."""
        return self.coordinator.address

    def start(self) -> None:
        """Starts the servers; returns when all are ready. Called by ``with``."""
        deadline = time.monotonic() + self._start_limit_s
        try:
            self._start(deadline)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops the servers and removes temporary files. Called by ``with``. Harmless to repeat.

        The coordinator stops first. Otherwise it would report the shard servers as lost.
        """
        coordinators, shards = self._started[:1], self._started[1:]
        for processes in (coordinators, shards):
            for process in processes:
                process.request_stop(at_once=True)
            for process in processes:
                process.stop(_STOP_LIMIT_S)
        self._started.clear()
        for published in self._published:
            published.withdraw()
        self._published.clear()
        if coordinators:
            remove_folders(DEFAULT_DIRECTORY, coordinators[0].known_address)
        if self._temporary is not None:
            self._temporary.remove()
            self._temporary = None

    def restart_coordinator(self) -> None:
        """Kills the coordinator if it runs, and starts it again at the same address with the same state."""
        self.coordinator.restart(time.monotonic() + self._start_limit_s)

    def _start(self, deadline: float) -> None:
        self._temporary = TemporaryFolder()
        folder = self._temporary.path
        state_dir, log_dir = Path(self._state_dir or folder / "state"), Path(self._log_dir or folder / "logs")
        for directory in (state_dir, log_dir):
            directory.mkdir(parents=True, exist_ok=True)
        self.key = new_key()
        self.credentials = Credentials(self.key)
        self.token_file = write_key(folder / "token", self.key)
        common = [*_LISTEN, "--exit-with-parent", "--token-file", self.token_file]
        common += ["--checkpoint-root", self._checkpoint_root, *self._metrics_options]
        if self._tls is not None:
            self.credentials = replace(self.credentials, tls=Tls(self._tls))
            common += _tls_options(self._tls)
        coordinator_options = ["--state-dir", str(state_dir), "--min-servers", str(self._num_shards)]
        self.coordinator = ServerProcess(
            "coordinator",
            ["coordinator", *common, *coordinator_options, *self._coordinator_options],
            log_dir / "coordinator.log",
        )
        self._started.append(self.coordinator)
        self.coordinator.wait_ready(deadline)
        for name in (f"shard-{index}" for index in range(self._num_shards)):
            arguments = ["shard", *common, "--id", name, "--coordinator", self.address, *self._shard_options]
            arguments += ["--supervisor", own_identity()]  # its parent, unless this process ends while it starts
            self._started.append(ServerProcess(name, arguments, log_dir / f"{name}.log"))
        self.shards = tuple(self._started[1:])
        for shard in self.shards:
            shard.wait_ready(deadline)
            shard.keep_running(self._start_limit_s)
        if self._tls is None:
            self._published = [PublishedCredentials(server.address, self.key) for server in self._started]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ServerProcess:
    """A coordinator or shard server as a child process, which runs ``python -m shardwell_server ...``.

    The process has its own session, so that Ctrl-C in the terminal does not reach it. It reads a pipe that this
    process holds open, and stops when the pipe closes. The pipe also closes if this process is killed.

    Args:
        name: Name in messages and of the log file.
        arguments: Arguments of ``shardwell-server``: the subcommand and its options.
        log_path: File for the server's standard error.
        variables: Names of ``SHARDWELL_*`` variables that the server inherits.
    """

    def __init__(self, name: str, arguments: Sequence[str], log_path: Path, variables: Collection[str] = ()) -> None:
        self.name, self._variables = name, frozenset(variables)
        self.log_path = log_path
        self._arguments = list(arguments)
        self._address: str | None = None
        self.metrics_address = ""
        """host:port of ``/metrics``. It stays the same when the server is started again. Empty: none are served."""
        self.dashboard_address = ""
        """host:port of the web page, in the same way."""
        self._stop_requested = False
        self._lock = threading.RLock()
        """Held while the process is replaced or stopped."""
        self._start_limit_s: float | None = None
        """Seconds until a server that is started again must be ready. None: it is not started again."""
        self._ready_s: float | None = None
        """Time at which the process was ready. None: it is not ready yet."""
        self._quick_ends = 0
        self.ends: list[int] = []
        """Exit codes after which ``keep_running`` started the server again."""
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id. Changes with ``restart``."""
        return self._process.pid

    @property
    def address(self) -> str:
        """The server's host:port, known once ``wait_ready`` has returned."""
        if self._address is None:
            raise UnavailableError(f"{self.name} is not ready yet")
        return self._address

    @property
    def exit_code(self) -> int | None:
        """0 after a clean stop, -n after signal n, None while the server runs."""
        return self._process.poll()

    @property
    def is_over(self) -> bool:
        """True if the server has ended and is not started again."""
        with self._lock:
            given_up = self._start_limit_s is None or self._stop_requested or self._quick_ends >= _MAX_QUICK_ENDS
            return given_up and self.exit_code is not None

    @property
    def is_ready(self) -> bool:
        """True if the current process has reported that it answers rpcs."""
        return self._ready_s is not None

    def wait_ready(self, deadline: float) -> None:
        """Waits until the server answers rpcs.

        Args:
            deadline: Time of ``time.monotonic``.

        Raises:
            UnavailableError: The server ended, or was not ready in time. The message ends with the end of its log.
        """
        line = self._read_first_line(deadline)
        if line is None:
            how = f"ended with exit code {self.exit_code}" if not self._is_alive() else "was not ready in time"
            raise UnavailableError(f"{self.name} {how}. {self.log_tail()}", server=self.name)
        ready = json.loads(line)
        self._address, self._ready_s = ready["address"], time.monotonic()
        self.metrics_address, self.dashboard_address = ready.get("metrics", ""), ready.get("dashboard", "")

    @property
    def known_address(self) -> str:
        """As ``address``. Empty if the server has never been ready."""
        return self._address or ""

    def restart(self, deadline: float) -> None:
        """Kills the server if it runs, and starts it again at the same address."""
        with self._lock:
            self.kill()
            self._stop_requested = False
            self._replace()
        self.wait_ready(deadline)

    def keep_running(self, start_limit_s: float) -> None:
        """Starts the server again at the same address whenever it ends, until ``stop`` or ``kill`` is called.

        Args:
            start_limit_s: Seconds until a server that is started again must be ready.
        """
        with self._lock:
            self._start_limit_s = start_limit_s
            self._watch()

    def _watch(self) -> None:
        if self._start_limit_s is not None:
            arguments = (self._process, self._start_limit_s)
            threading.Thread(target=self._replace_when_ended, args=arguments, name=self.name, daemon=True).start()

    def _replace_when_ended(self, process: subprocess.Popen[bytes], start_limit_s: float) -> None:
        code = process.wait()
        with self._lock:
            if self._stop_requested or process is not self._process:
                return
            is_quick = self._ready_s is None or time.monotonic() - self._ready_s < _QUICK_END_S
            self._quick_ends = self._quick_ends + 1 if is_quick else 0
            how = f"{self.name} (process {process.pid}) ended {_describe_exit(code)}"
            if self._quick_ends >= _MAX_QUICK_ENDS:
                logger.error("%s for the %dth time in a row: not starting it again", how, self._quick_ends)
                return
            logger.warning("%s: starting it again", how)
            self.ends.append(code)
            self._reap()
            self._replace()
        try:
            self.wait_ready(time.monotonic() + start_limit_s)
        except (UnavailableError, OSError, ValueError) as error:  # ``stop`` closes the pipe that is read
            if not self._stop_requested:
                logger.warning("%s", error)

    def _replace(self) -> None:
        """Starts a new process at the same address."""
        self._arguments[self._arguments.index("--listen") + 1] = self.address
        for option, address in ((_METRICS_PORT, self.metrics_address), (_DASHBOARD_PORT, self.dashboard_address)):
            if address:
                self._arguments[self._arguments.index(option) + 1] = address.rpartition(":")[2]
        self._process = self._start()
        self._watch()

    def kill(self) -> None:
        """Kills the server (SIGKILL), like a crash. The server is not started again before ``restart``."""
        with self._lock:
            self._stop_requested = True
            self._process.kill()
            self._reap()

    def stop(self, limit_s: float) -> None:
        """Stops the server (SIGTERM), and kills it after ``limit_s``."""
        self.request_stop()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def request_stop(self, *, at_once: bool = False) -> None:
        """Sends SIGTERM once and returns. ``stop`` waits for the end.

        Args:
            at_once: Close the server's input, too: it then moves no shards before it ends.
        """
        with self._lock:
            if not self._stop_requested and self.exit_code is None:
                self._process.terminate()
            self._stop_requested = True
            if at_once and self._process.stdin is not None:
                self._process.stdin.close()

    def log_tail(self) -> str:
        """Returns the last lines of the server's log, with a heading."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        except OSError as error:  # must not hide why the log was wanted
            lines = [f"({error})"]
        text = "\n".join(f"    {line}" for line in lines) or "    (nothing)"
        return f"The end of its log:\n{text}"

    def _start(self) -> subprocess.Popen[bytes]:
        self._ready_s = None
        with self.log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "shardwell_server", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                env=_server_environment(self._variables),
            )

    def _read_first_line(self, deadline: float) -> bytes | None:
        """Returns the line with the server's address; None if the server ended or the deadline has passed."""
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
        """True if the server runs. A process may end shortly after it has closed its output."""
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


def write_key(path: Path, key: ClusterKey) -> str:
    """Writes the key of a cluster to a new file that only this user can read; returns the file's path."""
    with opened(open_file(path, write=True, create=True)) as descriptor:
        os.write(descriptor, f"{key.secret}\n".encode())
    return str(path)


def _describe_exit(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _server_environment(variables: Collection[str] = ()) -> dict[str, str]:
    """Returns this process's environment without SHARDWELL_* variables, which are meant for trainers, except some.

    Faults of tests are kept: they name the server to which they belong.
    """
    kept = {name for name in os.environ if not name.startswith("SHARDWELL_")} | {fault_points.VARIABLE, *variables}
    inherited = {name: value for name, value in os.environ.items() if name in kept}
    return {"OMP_NUM_THREADS": "1", **inherited}


def _tls_options(tls: TlsOptions) -> list[str]:
    files = _options(tls_ca=tls.ca, tls_cert=tls.cert, tls_key=tls.key, tls_server_name=tls.server_name or None)
    return [*files, "--encrypt", tls.encrypt]


def _options(**values: object) -> list[str]:
    """Returns command line options for keyword arguments that are not None."""
    return [
        text
        for name, value in values.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
