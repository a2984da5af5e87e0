"""The kinds of faults of a chaos run."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Mapping

from tests.chaos.cluster import ChaosCluster, run, signal_process
from tests.chaos.timeline import InjectedFault


class Faults:
    """Injects faults, and ends those that last.

    Args:
        cluster: The cluster.
        rng: Decides targets and durations.
        lease_s: Lease of trainers and servers in seconds.
        replaceable_servers: True if the run continues while a shard server is missing, because shards have backups.
    """

    def __init__(self, cluster: ChaosCluster, rng: random.Random, *, lease_s: float, replaceable_servers: bool) -> None:
        self._cluster, self._rng, self._lease_s = cluster, rng, lease_s
        self._replaceable_servers = replaceable_servers
        self._lasting: list[tuple[float, Callable[[], None]]] = []
        self._stopped: set[int] = set()
        self.kinds: Mapping[str, Callable[[], InjectedFault | None]] = self._available()

    def _available(self) -> dict[str, Callable[[], InjectedFault | None]]:
        kinds: dict[str, Callable[[], InjectedFault | None]] = {
            "kill trainer": self._kill_trainer,
            "stop trainer": self._stop_trainer,
            "terminate trainer": self._terminate_trainer,
            "kill coordinator": self._kill_coordinator,
            "stop coordinator": self._stop_coordinator,
            "stop shard server": self._stop_server,
            "kill shard server": self._kill_server,
            "terminate shard server": self._terminate_server,
            "kill all shard servers": self._kill_servers,
            "terminate all shard servers": self._terminate_servers,
            "kill one of several processes": self._kill_child,
            "kill relay": self._kill_relay,
            "stop relay": self._stop_relay,
        }
        if self._cluster.network is not None:
            kinds["close connections"] = self._close_connections
            kinds["drop packets"] = self._drop_packets
            kinds["partition"] = self._partition
            kinds["slow link"] = self._slow_link
        return kinds

    # ---- faults that last ----

    def end(self, *, now: float) -> None:
        """Ends the faults whose duration is over."""
        over = [undo for until, undo in self._lasting if until <= now]
        self._lasting = [(until, undo) for until, undo in self._lasting if until > now]
        for undo in over:
            undo()

    def end_all(self) -> None:
        """Ends all faults."""
        self.end(now=float("inf"))

    @property
    def lasting(self) -> bool:
        """True while a fault lasts."""
        return bool(self._lasting)

    @property
    def next_end_s(self) -> float:
        """Time at which the next fault is over."""
        return min((until for until, _ in self._lasting), default=float("inf"))

    def _last(self, seconds: float, undo: Callable[[], None]) -> None:
        self._lasting.append((time.monotonic() + seconds, undo))

    def _fault(self, kind: str, what: str, seconds: float = 0.0, *, blocks: bool = False) -> InjectedFault:
        now = time.monotonic()
        lasts = f" for {seconds:.1f} s" if seconds else ""
        return InjectedFault(kind, f"{what}{lasts}", now, now + seconds, blocks)

    # ---- processes ----

    def _trainer(self) -> str | None:
        alive = sorted(name for name, trainer in self._cluster.trainers.items() if trainer.alive)
        return self._rng.choice(alive) if len(alive) > 1 else None

    def _kill_trainer(self) -> InjectedFault | None:
        return self._signal_trainer("kill trainer", signal.SIGKILL)

    def _terminate_trainer(self) -> InjectedFault | None:
        return self._signal_trainer("terminate trainer", signal.SIGTERM)

    def _signal_trainer(self, kind: str, number: int) -> InjectedFault | None:
        if (name := self._trainer()) is None:
            return None
        signal_process(self._cluster.trainers[name].pid, number)
        return self._fault(kind, name)

    def _stop_trainer(self) -> InjectedFault | None:
        name = self._trainer()
        return None if name is None else self._stop("stop trainer", name, self._cluster.trainers[name].pid)

    def _stop_coordinator(self) -> InjectedFault | None:
        return self._stop("stop coordinator", "coordinator", self._cluster.coordinator.pid, blocks=True)

    def _stop_server(self) -> InjectedFault | None:
        server = self._rng.choice(self._cluster.servers.shards)
        return self._stop("stop shard server", server.name, server.pid, blocks=not self._replaceable_servers)

    def _stop(self, kind: str, name: str, pid: int, *, blocks: bool = False) -> InjectedFault | None:
        if pid in self._stopped:
            return None
        seconds = self._rng.uniform(0.1, 1.0) if blocks or self._rng.random() < 0.6 else 1.5 * self._lease_s
        signal_process(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        self._last(seconds, lambda: self._continue(pid))
        return self._fault(kind, name, seconds, blocks=blocks)

    def _continue(self, pid: int) -> None:
        self._stopped.discard(pid)
        signal_process(pid, signal.SIGCONT)

    def _kill_coordinator(self) -> InjectedFault | None:
        if self._cluster.coordinator.pid in self._stopped:
            return None
        signal_process(self._cluster.coordinator.pid, signal.SIGKILL)
        return self._fault("kill coordinator", "coordinator")

    def _kill_server(self) -> InjectedFault | None:
        return self._signal_server("kill shard server", signal.SIGKILL)

    def _terminate_server(self) -> InjectedFault | None:
        return self._signal_server("terminate shard server", signal.SIGTERM)

    def _signal_server(self, kind: str, number: int) -> InjectedFault | None:
        server = self._rng.choice(self._cluster.servers.shards)
        if server.pid in self._stopped or server.exit_code is not None:
            return None
        signal_process(server.pid, number)
        return self._fault(kind, server.name)

    def _kill_servers(self) -> InjectedFault | None:
        return self._signal_servers("kill all shard servers", signal.SIGKILL)

    def _terminate_servers(self) -> InjectedFault | None:
        return self._signal_servers("terminate all shard servers", signal.SIGTERM)

    def _signal_servers(self, kind: str, number: int) -> InjectedFault | None:
        pids = [server.pid for server in self._cluster.servers.shards if server.exit_code is None]
        if self._stopped.intersection(pids):
            return None
        others = self._cluster.group_pids()  # killed: one that is asked to stop is not started again
        for pid in pids:
            signal_process(pid, number)
        for pid in others:
            signal_process(pid, signal.SIGKILL)
        return self._fault(kind, f"{len(pids) + len(others)} processes")

    def _kill_child(self) -> InjectedFault | None:
        """Kills one server of the command that runs several."""
        if not (pids := self._cluster.group_pids()):
            return None
        signal_process(pid := self._rng.choice(pids), signal.SIGKILL)
        return self._fault("kill one of several processes", f"process {pid}")

    def _kill_relay(self) -> InjectedFault | None:
        relay = self._cluster.relay
        if relay.pid in self._stopped or relay.exit_code is not None:
            return None
        signal_process(relay.pid, signal.SIGKILL)
        return self._fault("kill relay", "relay")

    def _stop_relay(self) -> InjectedFault | None:
        return self._stop("stop relay", "relay", self._cluster.relay.pid, blocks=True)

    # ---- the network ----

    def _close_connections(self) -> InjectedFault | None:
        return self._filter("close connections", 0.3, "REJECT", "--reject-with", "tcp-reset")

    def _drop_packets(self) -> InjectedFault | None:
        return self._filter("drop packets", self._rng.uniform(0.3, 1.5 * self._lease_s), "DROP")

    def _filter(self, kind: str, seconds: float, *target: str) -> InjectedFault | None:
        """Filters the packets that servers send to one trainer on its open connections."""
        if (name := self._trainer()) is None:
            return None
        rules = [
            ["OUTPUT", "-p", "tcp", "-d", host, "--dport", str(port), "--sport", str(server_port), "-j", *target]
            for host, port, server_port in self._cluster.connections(name)
        ]
        for rule in rules:
            run("iptables", "-w", "-I", *rule)
        self._last(seconds, lambda: _remove(rules))
        return self._fault(kind, f"servers -> {name}", seconds)

    def _partition(self) -> InjectedFault | None:
        network = self._cluster.network
        assert network is not None
        seconds = self._rng.uniform(0.3, 1.5 * self._lease_s)
        network.cut()
        self._last(seconds, network.heal)
        return self._fault("partition", "the trainer in the namespace", seconds)

    def _slow_link(self) -> InjectedFault | None:
        network = self._cluster.network
        assert network is not None
        network.slow_down()
        self._last(5.0, network.speed_up)
        return self._fault("slow link", "the trainer in the namespace", 5.0)


def _remove(rules: list[list[str]]) -> None:
    for rule in rules:
        subprocess.run(["iptables", "-w", "-D", *rule], check=False, capture_output=True)
