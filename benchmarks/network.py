"""Emulates a network of several hosts on one Linux machine: namespaces, a switch, and links with limited rates.

A host is a process that holds namespaces: network, hostname, SysV memory and ``/dev/shm``. Only its link connects it to
the other hosts. The process ends when its standard input closes. The kernel then removes namespaces and links, even if
the program that built the network is killed.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.sampling import parse_received_bytes

INTERFACE = "eth0"
"""Name of every host's interface to the switch."""
SUBNET = "10.99.0"
MAX_HOSTS = 200
_SWITCH = "switch"
_START_LIMIT_S = 10.0
_UNITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_BURST_S, _MIN_BURST_BYTES = 1e-3, 128 << 10
"""The smallest bucket fits two of TCP's largest segments (64 KiB). In smaller buckets, the kernel splits segments."""
_QUEUE_LATENCY = "50ms"
_TOOLS = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")


class NetworkError(RuntimeError):
    """Raised when the network cannot be built on this machine."""


@dataclass(frozen=True)
class Rate:
    """The rate of a link in each direction."""

    text: str
    """The rate in the notation of tc: ``1gbit``, ``200mbit``."""

    def __post_init__(self) -> None:
        match = re.fullmatch(r"([1-9]\d*)([kmg]?bit)", self.text)
        if match is None:
            raise ValueError(
                f"rate {self.text!r}: expected a whole number and bit, kbit, mbit or gbit, such as 200mbit"
            )

    @property
    def bits_per_s(self) -> int:
        number, unit = re.fullmatch(r"(\d+)(.*)", self.text).groups()  # type: ignore[union-attr]
        return int(number) * _UNITS[unit]

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket: a millisecond of data, and at least two segments."""
        return max(_MIN_BURST_BYTES, round(self.bits_per_s / 8 * _BURST_S))

    def seconds(self, num_bytes: float) -> float:
        """Returns the minimum time to transfer ``num_bytes`` over the link."""
        return 8 * num_bytes / self.bits_per_s

    def qdisc(self) -> list[str]:
        """Returns the arguments of ``tc qdisc add dev X root``."""
        return ["tbf", "rate", self.text, "burst", str(self.burst_bytes), "latency", _QUEUE_LATENCY]


class Host:
    """A set of namespaces, held by a process that waits for the end of its input."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        setup = f"hostname {name} && ip link set lo up && mount -t tmpfs tmpfs /dev/shm && echo ready && exec cat"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--ipc", "--uts", "sh", "-c", setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the program only, which ends its hosts last
        )

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def prefix(self) -> list[str]:
        """Prefix that runs a command on this host. The process executes the command directly."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--ipc", "--uts", "--wd=."]
        # Without this variable, gloo looks up the hostname, which no host of this network can resolve.
        return [*enter, "env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]

    def wait_ready(self) -> None:
        """Waits until the namespaces exist.

        Raises:
            NetworkError: The namespaces cannot be created.
        """
        assert self._holder.stdout is not None and self._holder.stderr is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], _START_LIMIT_S)
        if not ready or self._holder.stdout.readline() != b"ready\n":
            self._holder.kill()
            reason = self._holder.stderr.read().decode(errors="replace").strip()
            raise NetworkError(f"cannot create the namespaces of {self.name}: {reason or 'no answer'}")

    def run(self, *command: str) -> str:
        """Runs a command on this host and returns its output.

        Raises:
            NetworkError: The command fails.
        """
        done = subprocess.run([*self.prefix, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NetworkError(f"on {self.name}, `{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.stdout

    def received_bytes(self) -> int:
        """Returns the bytes that the host has received, with headers (one per segment with offloading)."""
        return parse_received_bytes(Path(f"/proc/{self.pid}/net/dev").read_text(), INTERFACE)

    def free_port(self) -> int:
        """Returns an unused TCP port of this host."""
        code = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"
        return int(self.run("python3", "-c", code))

    def close(self) -> None:
        self._holder.kill()
        self._holder.communicate()


class Network:
    """Context manager for hosts and the switch between them. The links have no limit at first.

    Args:
        num_hosts: Number of hosts.

    Raises:
        NetworkError: The user is not root, a tool is missing, or the kernel refuses an operation.
    """

    def __init__(self, num_hosts: int) -> None:
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts}: expected 1 to {MAX_HOSTS}")
        self._num_hosts = num_hosts
        self._stack = ExitStack()
        self._link_ends: list[tuple[Host, str]] = []
        self.hosts: tuple[Host, ...] = ()

    def limit(self, rate: Rate) -> None:
        """Limits every link to this rate in each direction."""
        for machine, interface in self._link_ends:
            machine.run("tc", "qdisc", "replace", "dev", interface, "root", *rate.qdisc())

    def __enter__(self) -> Self:
        check_requirements(os.geteuid(), [tool for tool in _TOOLS if shutil.which(tool) is None])
        with self._stack:
            self._build()
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _build(self) -> None:
        switch = self._start(_SWITCH, "")
        self.hosts = tuple(self._start(f"host{index}", f"{SUBNET}.{index + 1}") for index in range(self._num_hosts))
        for machine in (switch, *self.hosts):
            machine.wait_ready()
        switch.run("ip", "link", "add", "bridge", "up", "type", "bridge")
        for index, host in enumerate(self.hosts):
            self._connect(host, switch, f"port{index}")

    def _start(self, name: str, address: str) -> Host:
        host = Host(name, address)
        self._stack.callback(host.close)
        return host

    def _connect(self, host: Host, switch: Host, port: str) -> None:
        host.run("ip", "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", str(switch.pid))
        switch.run("ip", "link", "set", port, "master", "bridge", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
        host.run("ip", "link", "set", INTERFACE, "up")
        self._link_ends += [(host, INTERFACE), (switch, port)]


def check_requirements(user_id: int, missing_tools: Sequence[str]) -> None:
    """Checks that a network can be built.

    Raises:
        NetworkError: The user is not root, or tools are missing.
    """
    if user_id != 0:
        raise NetworkError(
            "network namespaces need root: run the benchmark with sudo, or as root in a privileged container"
        )
    if missing_tools:
        raise NetworkError(f"not installed: {', '.join(missing_tools)} (Debian: iproute2, util-linux, mount, hostname)")
