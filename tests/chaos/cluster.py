"""The processes and the network of a chaos run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from shardwell.processes import local_cluster
from shardwell.processes.local_cluster import LocalCluster, ServerProcess
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import ShardwellError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.long_trainer import Plan
from tests.support.processes import TrainerProcess

RUN = "chaos"
_INTERFACE = "eth0"


class ChaosTrainer(TrainerProcess):
    """A process of ``tests.support.long_trainer``."""

    module = "tests.support.long_trainer"

    @property
    def alive(self) -> bool:
        return self.process.is_alive()


class Network:
    """A network namespace with a link to this host, in which one trainer runs. Needs root.

    Attributes:
        host: Address of this host on the link.
        name: Name of the namespace.
        device: This host's end of the link.
    """

    def __init__(self) -> None:
        number = os.getpid() % 250
        self.name, self.device = f"shardwell-chaos-{number}", f"swchaos{number}"
        self.host, self.guest = f"10.98.{number}.1", f"10.98.{number}.2"

    @staticmethod
    def is_available() -> bool:
        """Returns whether this process may create namespaces and firewall rules."""
        return os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "iptables"))

    def create(self) -> None:
        """Creates the namespace and the link."""
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", self.device, "type", "veth", "peer", "name", _INTERFACE, "netns", self.name)
        run("ip", "addr", "add", f"{self.host}/24", "dev", self.device)
        run("ip", "link", "set", self.device, "up")
        for command in (["addr", "add", f"{self.guest}/24", "dev", _INTERFACE], ["link", "set", _INTERFACE, "up"]):
            run("ip", "-n", self.name, *command)
        run("ip", "-n", self.name, "link", "set", "lo", "up")

    def remove(self) -> None:
        """Removes the namespace and with it the link."""
        subprocess.run(["ip", "netns", "del", self.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.device], check=False, capture_output=True)

    def cut(self) -> None:
        """Takes the link down."""
        run("ip", "link", "set", self.device, "down")

    def heal(self) -> None:
        """Takes the link up."""
        run("ip", "link", "set", self.device, "up")

    def slow_down(self) -> None:
        """Limits the rate of the trainer's incoming traffic to 5 Mbit/s."""
        limit = ("rate", "5mbit", "burst", "64kb", "latency", "50ms")
        run("tc", "qdisc", "replace", "dev", self.device, "root", "tbf", *limit)

    def speed_up(self) -> None:
        """Ends ``slow_down``."""
        subprocess.run(["tc", "qdisc", "del", "dev", self.device, "root"], check=False, capture_output=True)


class ChaosCluster:
    """A coordinator, shard servers, a relay and trainers. Trainers and servers that end are started again.

    Args:
        folder: Folder for logs and the times of commits.
        trainers: Name of each trainer, with the transports that it may use.
        num_shards: Number of shard servers.
        dp: Data-parallel ranks.
        lease_s: Lease of trainers and servers in seconds.
        batch_s: Seconds that a batch sleeps.
        join: More options of ``shardwell.join``.
        network: Namespace of the first trainer. None: all processes share this host's network.
    """

    def __init__(
        self,
        folder: Path,
        trainers: Mapping[str, str],
        *,
        num_shards: int,
        dp: int,
        lease_s: float,
        batch_s: float,
        join: Mapping[str, Any],
        network: Network | None,
    ) -> None:
        self.folder, self.network = folder, network
        self._transports, self._dp, self._batch_s, self._join = dict(trainers), dp, batch_s, dict(join)
        self.servers = LocalCluster(
            num_shards=num_shards, min_shard_bytes=4096, lease_s=lease_s, log_dir=folder, state_dir=folder / "state"
        )
        self.trainers: dict[str, ChaosTrainer] = {}
        self.outputs: list[dict[str, Any]] = []
        self.plan_file = folder / "plan"
        Plan(10**9, is_final=False).write(self.plan_file)
        self._stack = ExitStack()

    def __enter__(self) -> ChaosCluster:
        with ExitStack() as stack:
            if self.network is not None:
                stack.callback(self.network.remove)
                self.network.create()
            with _listening_on(self.network):
                stack.enter_context(self.servers)
                self._start_group(stack)
                self._start_relay(stack)
            stack.callback(self._end_trainers)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- trainers ----

    def start_trainers(self) -> list[str]:
        """Starts every trainer that does not run; returns the names of those that were started."""
        names = [name for name in self._transports if name not in self.trainers or not self.trainers[name].alive]
        for name in names:
            self.collect(name)
            arguments: list[object] = [
                *("--trainer", name, "--dp", self._dp, "--transports", self._transports[name]),
                *("--batch-s", self._batch_s, "--commits", self.folder / f"{name}.commits"),
                *("--plan-file", self.plan_file, "--join", json.dumps(self._join)),
            ]
            if self.network is not None and name == min(self._transports):
                arguments += ["--network", self.network.name]
            self.trainers[name] = ChaosTrainer(self.servers.address, RUN, *arguments)
        return names

    def collect(self, name: str) -> None:
        """Keeps the output of a trainer that has ended."""
        trainer = self.trainers.pop(name, None)
        if trainer is not None:
            output = trainer.finish(1.0)
            with (self.folder / f"{name}.log").open("a") as log:
                log.write(f"---- exit code {output['returncode']}\n{output['stderr']}")
            self.outputs.append({"trainer": name, **output})
            trainer.__exit__()

    def _end_trainers(self) -> None:
        for name in list(self.trainers):
            self.trainers[name].process.kill()
            self.collect(name)

    # ---- servers ----

    def _start_group(self, stack: ExitStack) -> None:
        """Starts two more shard servers by one command. The command starts each of them again by itself."""
        listen = [*local_cluster._LISTEN, "--coordinator", self.servers.address, "--exit-with-parent"]
        options = ["--id", "group", "--processes", "2", "--memory-budget", "1GiB", "--token-file"]
        group = ServerProcess("group", ["shard", *listen, *options, self.servers.token_file], self.folder / "group.log")
        stack.callback(group.stop, 60.0)
        group.wait_ready(time.monotonic() + 60.0)
        self._group = group

    def _start_relay(self, stack: ExitStack) -> None:
        """Starts a relay for the trainers, beside the shard servers, which relay for them meanwhile if it dies."""
        options = ["--id", "relay", "--coordinator", self.servers.address, "--exit-with-parent", "--token-file"]
        command = ["relay", *local_cluster._LISTEN, *options, self.servers.token_file]
        self.relay = ServerProcess("relay", command, self.folder / "relay.log")
        stack.callback(self.relay.stop, 60.0)
        self.relay.wait_ready(time.monotonic() + 60.0)
        self.relay.keep_running(60.0)

    def group_pids(self) -> list[int]:
        """Returns the process ids of the servers that one command runs."""
        with suppress(psutil.Error):
            return [child.pid for child in psutil.Process(self._group.pid).children()]
        return []

    @property
    def coordinator(self) -> ServerProcess:
        return self.servers.coordinator

    def start_servers(self) -> None:
        """Starts the coordinator if it has ended. ``LocalCluster`` starts shard servers again by itself."""
        if self.servers.coordinator.exit_code is not None:
            self.servers.restart_coordinator()

    def waits_for(self) -> str:
        """Returns what the run waits for, or why the coordinator does not say it."""
        client = CoordinatorClient(self.servers.address)
        try:
            response = client.call("ExplainStall", coordinator_pb2.ExplainStallRequest(run=RUN), timeout_s=10.0)
            return f"{response.phase}: {'; '.join(response.waiting_for)}"
        except ShardwellError as error:
            return f"the coordinator does not answer: {error}"
        finally:
            client.close()

    def pids(self) -> list[int]:
        """Returns the process ids of everything that runs."""
        return [
            *(trainer.pid for trainer in self.trainers.values() if trainer.alive),
            *(
                server.pid
                for server in (self.servers.coordinator, *self.servers.shards, self.relay)
                if server.exit_code is None
            ),
            *self.group_pids(),
        ]

    def connections(self, trainer: str) -> list[tuple[str, int, int]]:
        """Returns the TCP connections of a trainer to servers: address of the trainer, its port, the server's port."""
        guest = self.network.guest if self.network is not None else ""
        own_ports = set()
        with suppress(psutil.Error):
            own_ports = {at.laddr.port for at in psutil.Process(self.trainers[trainer].pid).net_connections("tcp")}
        found = []
        in_namespace = self.network is not None and trainer == min(self._transports)
        for server in (self.servers.coordinator, *self.servers.shards):
            with suppress(psutil.Error):
                for at in psutil.Process(server.pid).net_connections("tcp"):
                    if at.status != psutil.CONN_ESTABLISHED or not at.raddr:
                        continue
                    own = at.raddr.ip.endswith(guest) if in_namespace else at.raddr.port in own_ports
                    if own:
                        found.append((at.raddr.ip.removeprefix("::ffff:"), at.raddr.port, at.laddr.port))
        return found


@contextmanager
def _listening_on(network: Network | None) -> Iterator[None]:
    """Makes the servers of a ``LocalCluster`` listen on this host's address in a network, without TLS."""
    former = local_cluster._LISTEN
    if network is not None:
        local_cluster._LISTEN = ("--listen", f"{network.host}:0", "--insecure")
    try:
        yield
    finally:
        local_cluster._LISTEN = former


def run(*command: str) -> None:
    """Runs a command. Raises if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def signal_process(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


STOP, CONTINUE = signal.SIGSTOP, signal.SIGCONT
