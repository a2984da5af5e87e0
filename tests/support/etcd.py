"""A real etcd cluster on loopback, for tests with the marker ``etcd``."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.ports import reserved_ports

START_LIMIT_S = 30.0


class EtcdMember:
    """One member of a cluster.

    Args:
        command: How to start it.
        port: Port for clients.
        log: File for its output.
    """

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command, self._port, self._log = command, port, log
        self.address = f"127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """Sends SIGKILL. Harmless to repeat."""
        self.process.kill()
        self.process.wait()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self._log.read_text()[-2000:]
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), 1.0):
                return
            time.sleep(0.02)
        raise AssertionError(self._log.read_text()[-2000:])


@contextmanager
def etcd_cluster(directory: Path, members: int = 1) -> Iterator[list[EtcdMember]]:
    """Runs the members of an etcd cluster. Skips the test if there is no etcd on PATH.

    Args:
        directory: For data and logs.
        members: Number of members.
    """
    binary = shutil.which("etcd")
    if binary is None:
        pytest.skip("etcd is not on PATH")
    with ExitStack() as stack:
        first = stack.enter_context(reserved_ports(2 * members))
        names = {f"m{index}": (first + 2 * index, first + 2 * index + 1) for index in range(members)}
        initial = ",".join(f"{name}=http://127.0.0.1:{peer}" for name, (_, peer) in names.items())
        started = []
        for name, (port, peer) in names.items():
            client_url, peer_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"
            command = [binary, "--name", name, "--data-dir", str(directory / name), "--log-level", "warn"]
            command += ["--listen-client-urls", client_url, "--advertise-client-urls", client_url]
            command += ["--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url]
            command += ["--initial-cluster", initial]
            member = EtcdMember(command, port, directory / f"{name}.log")
            stack.callback(member.kill)
            started.append(member)
        for member in started:
            member.wait_ready()
        yield started
