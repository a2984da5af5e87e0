"""Training over a slow network, Shardwell against FSDP2 and DDP: ``sudo python -m benchmarks.slow_network``.

Four hosts whose links have 1 Gbit/s or 200 Mbit/s: network namespaces of this machine (``network.py``), which share
its CPUs, so what is compared is the network's part. Groups take turns of a few steps at every rate, in rotating order;
all stay alive meanwhile if memory has room. With ``--loss-seeds 3`` also what 16 and 8 bits on the wire cost in loss.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import torch

from benchmarks import report, workers
from benchmarks.network import Host, Network, NetworkError, Rate
from benchmarks.network_trainer import KINDS, PEERS
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize, to_table
from benchmarks.sampling import PeakMemory
from benchmarks.wire_loss import LossCheck, measure_losses
from benchmarks.workers import Group, Worker
from examples.gpt import GPT, GPTConfig

NUM_HOSTS = 4
WARMUP_STEPS = 2
MODEL = GPTConfig(vocab_size=8192, context=128, num_layers=8, num_heads=8, width=512)
TINY_MODEL = GPTConfig(vocab_size=256, context=32, num_layers=2, num_heads=2, width=64)
NAMES = {
    "alone": "no communication: every trainer a model of its own",
    "ddp": "DDP (gloo)",
    "fsdp2": "FSDP2 (gloo)",
    "fsdp2-prefetch": "FSDP2 (gloo), explicit prefetch",
    "fsdp2-keep": "FSDP2 (gloo), explicit prefetch, kept after the forward",
    "shardwell-fp32": "Shardwell, fp32",
    "shardwell-bf16": "Shardwell, bf16 both ways",
    "shardwell-int8": "Shardwell, int8 both ways",
}
_HOST_BASE_BYTES, _COPIES_PER_HOST = 500 << 20, 6
"""Memory of one host's processes of a group, roughly: the interpreters, and copies of the model."""


@dataclass
class Turns:
    """What the turns of one group at one rate gave."""

    step_s: list[float] = field(default_factory=list)
    """The slowest trainer of each step counts."""
    received_bytes: list[float] = field(default_factory=list)
    """Per step, the busiest host; one number per turn."""
    loss: float = float("nan")
    """Of rank 0 in the last step."""


class SlowNetwork:
    """Measures groups by turns.

    Args:
        options: The command line.
        network: The hosts.
        model: What is trained.
    """

    def __init__(self, options: argparse.Namespace, network: Network, model: GPTConfig) -> None:
        self._options, self._network, self._model = options, network, model
        self.turns = {rate.text: {kind: Turns() for kind in options.groups} for rate in options.rates}
        self.peak_bytes_per_host: dict[str, int] = {}

    def run(self) -> dict[str, str]:
        """Takes all turns; returns why groups failed."""
        group_bytes = NUM_HOSTS * (_HOST_BASE_BYTES + _COPIES_PER_HOST * 4 * count_parameters(self._model))
        starters: Mapping[str, Callable[[], workers.GroupContext]] = {
            kind: functools.partial(started_on_hosts, kind, self._network, self._model) for kind in self._options.groups
        }
        return workers.take_turns(
            starters,
            rounds=self._options.rounds,
            resident=workers.fit_in_memory([group_bytes] * len(starters)),
            warm_up=lambda _, group: group.run(steps=WARMUP_STEPS),
            turn=self._turn,
        )

    def _turn(self, kind: str, group: Group) -> None:
        steps, hosts = self._options.steps, self._network.hosts
        for rate in self._options.rates:
            self._network.limit(rate)
            group.run(steps=1)  # the buckets of the limits are as full as they will be in the other steps
            before = [host.received_bytes() for host in hosts]
            answers = group.run(steps=steps)
            received = [host.received_bytes() - earlier for host, earlier in zip(hosts, before, strict=True)]
            turns = self.turns[rate.text][kind]
            turns.step_s += map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
            turns.received_bytes.append(max(received) / steps)
            turns.loss = answers[0]["loss"]
        if kind not in self.peak_bytes_per_host:
            self.peak_bytes_per_host[kind] = self._measure_memory(group)

    def _measure_memory(self, group: Group) -> int:
        """Unshared memory of the processes of the fullest host, each at its peak."""
        with PeakMemory([*group.worker_pids, *group.server_pids]) as memory:
            group.run(steps=2)
        shards = group.server_pids[1:] or [None] * len(group.workers)
        by_host = [list(pids) for pids in zip(group.worker_pids, shards, strict=True)]
        by_host[0] += group.server_pids[:1]
        return max(sum(memory.peaks[pid].uss_bytes for pid in pids if pid is not None) for pids in by_host)


@contextmanager
def started_on_hosts(kind: str, network: Network, model: GPTConfig) -> Iterator[Group]:
    """A trainer of this kind on every host; for Shardwell also a shard server, and on the first the coordinator."""
    hosts = network.hosts
    with ExitStack() as stack:
        if kind in PEERS:
            servers: list[Worker] = []
            address = f"{hosts[0].address}:{hosts[0].free_port()}"
        else:
            servers, address = start_servers(stack, hosts)
        shape = {"kind": kind, "address": address, "num-trainers": len(hosts), "model": json.dumps(asdict(model))}
        arguments = [text for name, value in shape.items() for text in (f"--{name}", str(value))]
        trainers = [
            start(stack, host, "benchmarks.network_trainer", [*arguments, "--rank", str(rank)])
            for rank, host in enumerate(hosts)
        ]
        yield Group(workers=trainers, server_pids=[server.pid for server in servers])


def start_servers(stack: ExitStack, hosts: Sequence[Host]) -> tuple[list[Worker], str]:
    """The coordinator and the shard servers, and the coordinator's address."""
    listen = ["--listen", f"{hosts[0].address}:0", "--exit-with-parent"]
    coordinator = start(stack, hosts[0], "shardwell_server", ["coordinator", *listen, "--min-servers", str(len(hosts))])
    address = address_of(coordinator)
    shards = []
    for host in hosts:
        where = ["--listen", f"{host.address}:0", "--coordinator", address, "--id", f"shard-{host.name}"]
        shards.append(start(stack, host, "shardwell_server", ["shard", *where, "--exit-with-parent"]))
    for shard in shards:
        address_of(shard)
    return [coordinator, *shards], address


def start(stack: ExitStack, host: Host, module: str, arguments: Sequence[str]) -> Worker:
    worker = Worker(module, arguments, prefix=host.prefix)
    stack.callback(worker.close)
    return worker


def address_of(server: Worker) -> str:
    """Where a server serves; waits until it is ready."""
    while (line := server.receive()) is None:
        pass
    return str(line["address"])


def count_parameters(model: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


# ---- the report ----


def to_section(rate: Rate, turns: Mapping[str, Turns]) -> str:
    """The table of one rate."""
    steps = {kind: summarize(found.step_s) for kind, found in turns.items()}
    fsdp2 = best_fsdp2(steps)
    rows = []
    for kind, found in turns.items():
        received = summarize(found.received_bytes).median
        ratios = [ratio(steps[kind], fsdp2), ratio(steps[kind], steps.get("ddp"))]
        link = [f"{received / 1e6:.1f}", f"{rate.seconds(received):.2f}"]
        rows.append([NAMES[kind], spread(steps[kind], ".2f"), *ratios, *link])
    header = ["", "step, s", "/ best FSDP2", "/ DDP", "MB received per host and step", "s that the link needs for it"]
    return f"## {rate.text} each way\n\n{to_table(header, rows)}"


def best_fsdp2(steps: Mapping[str, Summary]) -> Summary | None:
    """The fastest of FSDP2's modes."""
    found = [summary for kind, summary in steps.items() if kind.startswith("fsdp2")]
    return min(found, key=lambda summary: summary.median, default=None)


def describe(options: argparse.Namespace, model: GPTConfig) -> str:
    return (
        f"{NUM_HOSTS} hosts: network namespaces of one machine, whose CPUs all share. One trainer each, for Shardwell "
        f"also one shard server. A GPT with {count_parameters(model) / 1e6:.1f} M parameters in {model.num_layers + 1} "
        f"units, 1 x {model.context} tokens per trainer, AdamW, one thread per process. Medians and quartiles of "
        f"{options.rounds} x {options.steps} steps by turns; ratios below 1 are faster. Shardwell, and FSDP2 where "
        "it says kept, gather each weight once per step. Bytes are the busiest host's, by its link's counter."
    )


def to_memory_section(peak_bytes_per_host: Mapping[str, int]) -> str:
    rows = [[NAMES[kind], f"{size / 1e6:.0f}"] for kind, size in peak_bytes_per_host.items()]
    return "## Memory\n\n" + to_table(["", "MB of the fullest host's processes, unshared, each at its peak"], rows)


def write(
    written: Report, options: argparse.Namespace, model: GPTConfig, benchmark: SlowNetwork, failures: Mapping[str, str]
) -> None:
    """Writes what was measured, without the groups that failed."""
    turns = {
        rate: {kind: found for kind, found in by_kind.items() if kind not in failures}
        for rate, by_kind in benchmark.turns.items()
    }
    losses: LossCheck | None = None
    if options.loss_seeds:
        losses = measure_losses(range(options.loss_seeds), options.loss_steps)
    slowest = options.rates[-1].text
    plain = {rate: {kind: asdict(found) for kind, found in by_kind.items()} for rate, by_kind in turns.items()}
    written.write(
        results={
            "model": asdict(model),
            "parameters": count_parameters(model),
            "failures": dict(failures),
            "rates": plain,
            "peak_bytes_per_host": benchmark.peak_bytes_per_host,
            "losses": None if losses is None else asdict(losses),
        },
        sections=[
            describe(options, model),
            *(to_section(rate, turns[rate.text]) for rate in options.rates),
            to_memory_section(benchmark.peak_bytes_per_host),
            *([f"## Loss\n\n{losses.to_markdown()}"] if losses is not None else []),
            *(f"{NAMES[kind]} failed: {reason}" for kind, reason in failures.items()),
        ],
        chart=Chart(
            axis=f"seconds per step at {slowest}",
            bars={NAMES[kind]: summarize(found.step_s) for kind, found in turns[slowest].items()},
            lines={},
        ),
    )


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def rate_argument(text: str) -> Rate:
    try:
        return Rate(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Step time over slow links against FSDP2 and DDP; needs root.")
    rates = [Rate("1gbit"), Rate("200mbit")]
    parser.add_argument("--rates", type=rate_argument, nargs="+", default=rates, metavar="RATE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=3, help="steps of each group per round and rate")
    parser.add_argument("--groups", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see whether everything works")
    parser.add_argument("--loss-seeds", type=int, default=0, help="seeds of the loss check; 0: none")
    parser.add_argument("--loss-steps", type=positive, default=300, help="steps of each training of the loss check")
    report.add_arguments(parser, name="slow_network")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    model = TINY_MODEL if options.tiny else MODEL
    written = Report(options, title="Training over a slow network")
    try:
        with Network(NUM_HOSTS) as network:
            benchmark = SlowNetwork(options, network, model)
            failures = benchmark.run()
    except NetworkError as error:
        raise SystemExit(f"slow_network: {error}") from None
    write(written, options, model, benchmark, failures)


if __name__ == "__main__":
    main()
