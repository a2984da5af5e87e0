"""Measures engines on other hosts that follow a run: ``sudo python -m benchmarks.readers --network``.

Hosts are network namespaces of this machine (``network.py``), whose links have a limited rate. The first host has the
servers and a trainer, each other one an engine. A GPT trains on the bytes of English text with AdamW. The bytes are
those that the engine's interface receives: with headers, acknowledgements and control messages. All processes read one
clock: a version is visible when the engine's model has it, counted from the return of ``optimizer.step()``.
"""

from __future__ import annotations

import argparse
import json
import select
import statistics
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.network import Host, Network, NetworkError, Rate
from benchmarks.report import Report, ratio, spread, summarize, to_table
from benchmarks.sampling import PeakMemory, cpu_seconds, wait_until_quiet
from benchmarks.slow_network import address_of, count_parameters, start
from benchmarks.workers import Group, Worker
from examples.gpt import GPTConfig

WORKER = "benchmarks.readers_network_worker"
WAYS = {
    "float32": "whole version, float32",
    "bfloat16": "whole version, bfloat16",
    "deltas": "`follow`, bfloat16, `delta_cache_bytes`",
    "patch": "`patch`, bfloat16",
}
_WARMUP_RATE = 1e-4


@dataclass(kw_only=True)
class Loads:
    """Versions that engines have loaded one by one. A step begins when all engines have the version before."""

    first_bytes: list[int] = field(default_factory=list)
    """Received by an engine for its first version."""
    first_s: list[float] = field(default_factory=list)
    received_bytes: list[int] = field(default_factory=list)
    """Received by an engine for a later version."""
    visible_s: list[float] = field(default_factory=list)
    engine_cpu_s: list[float] = field(default_factory=list)
    servers_cpu_s: list[float] = field(default_factory=list)
    """For a step and all engines."""
    engine_peak_bytes: int = 0
    """Peak unshared memory."""
    servers_peak_bytes: int = 0
    """Peak unshared memory of all servers."""


@dataclass(kw_only=True)
class Steps:
    """Steps that do not wait for engines."""

    step_s: list[float] = field(default_factory=list)
    trainer_cpu_s: float = 0.0
    servers_cpu_s: float = 0.0
    engines_cpu_s: float = 0.0
    visible_s: list[float] = field(default_factory=list)
    """Of the versions that engines have loaded."""
    skipped: int = 0
    """Versions that engines have not loaded, because a newer one was committed."""
    first_s: list[float] = field(default_factory=list)
    """Of the engines that joined during the steps."""

    def cpu_s(self) -> float:
        """Returns the CPU time of a step in the trainer and the servers."""
        return (self.trainer_cpu_s + self.servers_cpu_s) / len(self.step_s)


class Fleet:
    """The servers, the trainer, and the hosts of engines."""

    def __init__(self, network: Network, arguments: argparse.Namespace, stack: ExitStack) -> None:
        self._hosts, self._arguments, self._network = network.hosts, arguments, network
        self._servers, self._address = _start_servers(stack, network.hosts[0])
        self._trainer = start(stack, network.hosts[0], WORKER, ["trainer", self._address, arguments.model])
        self._server_pids = [server.pid for server in self._servers]
        self.train(arguments.warmup, _WARMUP_RATE)
        self.train(2)
        network.limit(arguments.rate)

    def train(self, steps: int, learning_rate: float | None = None) -> dict[str, Any]:
        """Trains; returns the instants of commits by version, and the seconds of each step."""
        rate = learning_rate or self._arguments.learning_rate
        return Group(workers=[self._trainer]).run(steps=steps, rate=rate)[0]

    @contextmanager
    def engines(self, count: int, first: int = 1) -> Iterator[Group]:
        """Starts engines on the hosts from ``first`` on."""
        with ExitStack() as stack:
            hosts = self._hosts[first : first + count]
            arguments = ["engine", self._address, self._arguments.model]
            yield Group(workers=[start(stack, host, WORKER, arguments) for host in hosts])

    def load_one_by_one(self, way: str, count: int) -> Loads:
        """Measures versions that engines load in one way."""
        found, hosts = Loads(), self._hosts[1 : count + 1]
        with (
            self.engines(count) as engines,
            PeakMemory([*engines.worker_pids, *self._server_pids], interval_s=0.5) as memory,
        ):
            before = [host.received_bytes() for host in hosts]
            answers = engines.run(do="join", way=way)
            found.first_s = [answer["s"] for answer in answers]
            found.first_bytes = [host.received_bytes() - earlier for host, earlier in zip(hosts, before, strict=True)]
            version = answers[0]["version"]
            for number in range(self._arguments.versions + 1):
                before, servers_cpu_s = [host.received_bytes() for host in hosts], cpu_seconds(self._server_pids)
                for engine in engines.workers:
                    engine.begin({"do": "load", "version": version + 1})
                commits = self.train(1)["commits"]
                answers = [_receive(engine) for engine in engines.workers]
                version += 1
                wait_until_quiet(self._server_pids)
                if number:  # the first one makes the servers keep a base
                    after = [host.received_bytes() for host in hosts]
                    found.received_bytes += [new - old for new, old in zip(after, before, strict=True)]
                    found.visible_s += [answer["at"] - commits[str(version)] for answer in answers]
                    found.engine_cpu_s += [answer["cpu_s"] for answer in answers]
                    found.servers_cpu_s.append(cpu_seconds(self._server_pids) - servers_cpu_s)
            pids = engines.worker_pids
        found.engine_peak_bytes = max(memory.peaks[pid].uss_bytes for pid in pids)
        found.servers_peak_bytes = sum(memory.peaks[pid].uss_bytes for pid in self._server_pids)
        return found

    def run(self, found: Steps, engines: Group | None, joining: Group | None = None, way: str = "") -> None:
        """Measures steps, while engines follow and another one joins again and again."""
        wait_until_quiet(self._server_pids)
        pids = ([self._trainer.pid], self._server_pids, [] if engines is None else engines.worker_pids)
        before = [cpu_seconds(each) for each in pids]
        if engines is not None:
            engines.run(do="follow")
        if joining is not None:
            joining.workers[0].begin({"do": "join", "way": way})
        commits = dict[str, float]()
        for _ in range(self._arguments.steps):
            made = self.train(1)
            commits.update(made["commits"])
            found.step_s += made["seconds"]
            if joining is not None and (joined := _poll(joining.workers[0])) is not None:
                found.first_s.append(joined["s"])
                joining.workers[0].begin({"do": "join", "way": way})
        loaded = [] if engines is None else [each["loaded"] for each in engines.run(do="pause")]
        if joining is not None:
            found.first_s.append(_receive(joining.workers[0])["s"])
        wait_until_quiet(self._server_pids)
        used = [cpu_seconds(each) - earlier for each, earlier in zip(pids, before, strict=True)]
        found.trainer_cpu_s, found.servers_cpu_s = found.trainer_cpu_s + used[0], found.servers_cpu_s + used[1]
        found.engines_cpu_s += used[2]
        for versions in loaded:
            seen = {str(version): instant for version, instant in versions}
            found.visible_s += [seen[version] - instant for version, instant in commits.items() if version in seen]
            found.skipped += len(commits.keys() - seen.keys())


def _receive(worker: Worker) -> dict[str, Any]:
    while (answer := worker.receive()) is None:
        pass
    return answer


def _poll(worker: Worker) -> dict[str, Any] | None:
    return _receive(worker) if select.select([worker.stdout_descriptor], [], [], 0)[0] else None


def _start_servers(stack: ExitStack, host: Host) -> tuple[list[Worker], str]:
    """Starts a coordinator and two shard servers on one host; returns them and the coordinator's address."""
    listen = ["--listen", f"{host.address}:0", "--insecure", "--exit-with-parent"]
    coordinator = start(stack, host, "shardwell_server", ["coordinator", *listen, "--min-servers", "2"])
    address = address_of(coordinator)
    options = [*listen, "--coordinator", address, "--id"]
    shards = [start(stack, host, "shardwell_server", ["shard", *options, f"shard-{index}"]) for index in range(2)]
    for shard in shards:
        address_of(shard)
    return [coordinator, *shards], address


def measure(arguments: argparse.Namespace) -> None:
    """Runs the benchmark with the command line of ``benchmarks.readers``, and writes its report."""
    model = GPTConfig(
        vocab_size=256, context=arguments.tokens, num_layers=arguments.layers, num_heads=8, width=arguments.width
    )
    arguments.model = json.dumps(asdict(model))
    numel = count_parameters(model)
    document = Report(arguments, title="Engines on other hosts that follow a run")
    loads: dict[str, Loads] = {}
    steps = {name: Steps() for name in ("alone", "following", "joining")}
    try:
        with Network(1 + max(arguments.engines)) as network, ExitStack() as stack:
            fleet = Fleet(network, arguments, stack)
            for count in arguments.engines:
                for way in arguments.ways:
                    loads[f"{count} {way}"] = found = fleet.load_one_by_one(way, count)
                    print(_load_row(count, way, found, numel, arguments.rate), file=sys.stderr, flush=True)
            if arguments.rounds:
                way, count = arguments.ways[-1], max(arguments.engines)
                with fleet.engines(count - 1) as engines, fleet.engines(1, first=count) as last:
                    everyone = Group(workers=[*engines.workers, *last.workers])
                    for _ in range(arguments.rounds):
                        fleet.run(steps["alone"], None)
                        everyone.run(do="join", way=way)
                        fleet.run(steps["following"], everyone)
                        engines.run(do="join", way=way)
                        fleet.run(steps["joining"], engines, last, way)
                        print(_step_rows(steps), file=sys.stderr, flush=True)
    except NetworkError as error:
        raise SystemExit(f"readers: {error}") from None
    header = [
        "engines",
        "way",
        "first read: MB, s",
        "MB per version",
        "of float32",
        "visible after its commit, s",
        "bytes at the link's rate, s",
        "engine CPU, s",
        "servers CPU, s",
        "engine peak, MB",
        "servers peak, MB",
    ]
    rows = [
        _load_row(int(name.split()[0]), name.split()[1], found, numel, arguments.rate) for name, found in loads.items()
    ]
    sections = [_describe(arguments, numel), to_table(header, rows)]
    if arguments.rounds:
        sections.append(_step_table(steps, arguments))
    document.write(
        results={
            "parameters": numel,
            "loads": {name: asdict(found) for name, found in loads.items()},
            "steps": {name: asdict(found) for name, found in steps.items()},
        },
        sections=sections,
    )


def _load_row(count: int, way: str, found: Loads, numel: int, rate: Rate) -> list[str]:
    received = statistics.median(found.received_bytes)
    return [
        str(count),
        WAYS[way],
        f"{statistics.median(found.first_bytes) / 1e6:.1f}, {statistics.median(found.first_s):.2f}",
        f"{received / 1e6:.2f}",
        f"{received / (4 * numel):.2%}",
        spread(summarize(found.visible_s), ".2f"),
        f"{rate.seconds(received) * count:.2f}",
        f"{statistics.median(found.engine_cpu_s):.2f}",
        f"{statistics.median(found.servers_cpu_s):.2f}",
        f"{found.engine_peak_bytes / 1e6:.0f}",
        f"{found.servers_peak_bytes / 1e6:.0f}",
    ]


def _step_rows(steps: dict[str, Steps]) -> list[list[str]]:
    alone = steps["alone"]
    return [
        [
            name,
            spread(summarize(found.step_s), ".2f"),
            ratio(summarize(found.step_s), summarize(alone.step_s)),
            f"{found.trainer_cpu_s / len(found.step_s) * 1000:.0f}",
            f"{found.servers_cpu_s / len(found.step_s) * 1000:.0f}",
            f"{found.cpu_s() / alone.cpu_s() - 1:+.1%}",
            spread(summarize(found.visible_s), ".2f") if found.visible_s else "-",
            str(found.skipped),
            spread(summarize(found.first_s), ".2f") if found.first_s else "-",
        ]
        for name, found in steps.items()
        if found.step_s
    ]


def _step_table(steps: dict[str, Steps], arguments: argparse.Namespace) -> str:
    header = [
        "",
        "step, s",
        "ratio",
        "CPU ms per step: trainer",
        "servers",
        "sum",
        "visible after its commit, s",
        "versions skipped",
        "first read, s",
    ]
    return to_table(header, _step_rows(steps))


def _describe(arguments: argparse.Namespace, numel: int) -> str:
    return (
        f"A GPT with {numel / 1e6:.1f} M parameters ({4 * numel / 1e6:.0f} MB in float32) in {arguments.layers + 1} "
        f"units, 1 x {arguments.tokens} tokens per step, AdamW, {arguments.warmup} steps at a learning rate of "
        f"{_WARMUP_RATE:.0e}, then of {arguments.learning_rate:.0e}. Links of {arguments.rate.text} each way. Medians "
        "and quartiles. The servers and the trainer share a host, and all hosts share the CPUs of this machine."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--network", action="store_true", help="engines on other hosts; needs root")
    group = parser.add_argument_group("with --network")
    group.add_argument("--engines", type=int, nargs="+", default=[1, 4], help="numbers of engines")
    group.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways to follow")
    group.add_argument("--rate", type=Rate, default=Rate("1gbit"), help="rate of a link each way, as for tc")
    group.add_argument("--layers", type=int, default=20)
    group.add_argument("--width", type=int, default=1024)
    group.add_argument("--tokens", type=int, default=64, help="tokens of a step")
    group.add_argument("--warmup", type=int, default=10, help=f"steps at a learning rate of {_WARMUP_RATE:.0e} before")
    group.add_argument("--learning-rate", type=float, default=1e-6)
    group.add_argument("--versions", type=int, default=5, help="versions in each way")
