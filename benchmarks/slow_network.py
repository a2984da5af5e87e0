"""Compares Shardwell with FSDP2 and DDP over a slow network: ``sudo python -m benchmarks.slow_network``.

Four hosts with links of 1 Gbit/s or 200 Mbit/s are network namespaces of this machine (``network.py``). They share its
CPUs, so the benchmark compares the network's part of a step. The groups take turns of a few steps at every rate, in
rotating order, and stay alive if memory allows. ``benchmarks.wire_loss`` measures the effect of the wire dtypes on the
loss.
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
from benchmarks.network_trainer import BASELINES, KINDS
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize, to_table
from benchmarks.sampling import PeakMemory
from benchmarks.workers import Group, Worker
from examples.gpt import GPT, GPTConfig

NUM_HOSTS = 4
WARMUP_STEPS = 2
MODEL = GPTConfig(vocab_size=8192, context=128, num_layers=8, num_heads=8, width=512)
TINY_MODEL = GPTConfig(vocab_size=256, context=32, num_layers=2, num_heads=2, width=64)
NAMES = {
    "alone": "no communication: one model per trainer",
    "ddp": "DDP (gloo)",
    "fsdp2": "FSDP2 (gloo)",
    "fsdp2-prefetch": "FSDP2 (gloo), explicit prefetch",
    "fsdp2-keep": "FSDP2 (gloo), explicit prefetch, kept after the forward",
    "shardwell-fp32": "Shardwell, fp32",
    "shardwell-bf16": "Shardwell, bf16 both ways",
    "shardwell-int8": "Shardwell, int8 both ways",
}
_HOST_BASE_BYTES, _COPIES_PER_HOST = 500 << 20, 6
"""Estimated memory of a group's processes on one host: the interpreters, and copies of the model."""


@dataclass
class Samples:
    """Measurements of one group at one rate."""

    step_s: list[float] = field(default_factory=list)
    """Duration of each step, of its slowest trainer."""
    received_bytes: list[float] = field(default_factory=list)
    """Bytes per step of the busiest host, one number per turn."""
    loss: float = float("nan")
    """Loss of rank 0 in the last step."""


class SlowNetwork:
    """Measures the groups by turns.

    Args:
        options: The parsed command line.
        network: The hosts.
        model: Sizes of the trained model.
    """

    def __init__(self, options: argparse.Namespace, network: Network, model: GPTConfig) -> None:
        self._options, self._network, self._model = options, network, model
        self.samples = {rate.text: {kind: Samples() for kind in options.groups} for rate in options.rates}
        self.peak_bytes_per_host: dict[str, int] = {}

    def run(self) -> dict[str, str]:
        """Runs all turns and returns the reasons of failed groups."""
        group_bytes = NUM_HOSTS * (_HOST_BASE_BYTES + _COPIES_PER_HOST * 4 * count_parameters(self._model))
        starters: Mapping[str, Callable[[], workers.GroupContext]] = {
            kind: functools.partial(start_on_hosts, kind, self._network, self._model) for kind in self._options.groups
        }
        return workers.interleave(
            starters,
            rounds=self._options.rounds,
            resident=workers.fit_in_memory([group_bytes] * len(starters)),
            warm_up=lambda _, group: group.run(steps=WARMUP_STEPS),
            measure=self._measure,
        )

    def _measure(self, kind: str, group: Group) -> None:
        steps, hosts = self._options.steps, self._network.hosts
        for rate in self._options.rates:
            self._network.limit(rate)
            group.run(steps=1)  # the token buckets of the limits then have their usual level
            before = [host.received_bytes() for host in hosts]
            answers = group.run(steps=steps)
            received = [host.received_bytes() - earlier for host, earlier in zip(hosts, before, strict=True)]
            samples = self.samples[rate.text][kind]
            samples.step_s += map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
            samples.received_bytes.append(max(received) / steps)
            samples.loss = answers[0]["loss"]
        if kind not in self.peak_bytes_per_host:
            self.peak_bytes_per_host[kind] = self._measure_memory(group)

    def _measure_memory(self, group: Group) -> int:
        """Returns the peak unshared memory of the processes on the host with the most memory in use."""
        with PeakMemory([*group.worker_pids, *group.server_pids]) as memory:
            group.run(steps=2)
        shards: Sequence[int | None] = group.server_pids[1:] or [None] * len(group.workers)
        by_host = [list(pids) for pids in zip(group.worker_pids, shards, strict=True)]
        by_host[0] += group.server_pids[:1]
        return max(sum(memory.peaks[pid].uss_bytes for pid in pids if pid is not None) for pids in by_host)


@contextmanager
def start_on_hosts(kind: str, network: Network, model: GPTConfig) -> Iterator[Group]:
    """Starts a trainer on every host. Shardwell also has a shard server per host, and the coordinator on the first."""
    hosts = network.hosts
    with ExitStack() as stack:
        if kind in BASELINES:
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
    """Starts the coordinator and the shard servers. Returns them and the coordinator's address."""
    listen = ["--listen", f"{hosts[0].address}:0", "--insecure", "--exit-with-parent"]
    coordinator = start(stack, hosts[0], "shardwell_server", ["coordinator", *listen, "--min-servers", str(len(hosts))])
    address = address_of(coordinator)
    shards = []
    for host in hosts:
        options = [
            "--listen",
            f"{host.address}:0",
            "--insecure",
            "--coordinator",
            address,
            "--id",
            f"shard-{host.name}",
        ]
        shards.append(start(stack, host, "shardwell_server", ["shard", *options, "--exit-with-parent"]))
    for shard in shards:
        address_of(shard)
    return [coordinator, *shards], address


def start(stack: ExitStack, host: Host, module: str, arguments: Sequence[str]) -> Worker:
    worker = Worker(module, arguments, prefix=host.prefix)
    stack.callback(worker.close)
    return worker


def address_of(server: Worker) -> str:
    """Waits until a server is ready and returns its address."""
    while (line := server.receive()) is None:
        pass
    return str(line["address"])


def count_parameters(model: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


# ---- the report ----


def to_section(rate: Rate, samples: Mapping[str, Samples]) -> str:
    """Returns the table of one rate."""
    steps = {kind: summarize(found.step_s) for kind, found in samples.items()}
    fsdp2 = best_fsdp2(steps)
    rows = []
    for kind, found in samples.items():
        received = summarize(found.received_bytes).median
        ratios = [ratio(steps[kind], fsdp2), ratio(steps[kind], steps.get("ddp"))]
        link = [f"{received / 1e6:.1f}", f"{rate.seconds(received):.2f}"]
        rows.append([NAMES[kind], spread(steps[kind], ".2f"), *ratios, *link])
    header = ["", "step, s", "/ best FSDP2", "/ DDP", "MB received per host and step", "minimum s on the link"]
    return f"## {rate.text} each way\n\n{to_table(header, rows)}"


def best_fsdp2(steps: Mapping[str, Summary]) -> Summary | None:
    """Returns the fastest of FSDP2's modes."""
    found = [summary for kind, summary in steps.items() if kind.startswith("fsdp2")]
    return min(found, key=lambda summary: summary.median, default=None)


def describe(options: argparse.Namespace, model: GPTConfig) -> str:
    return (
        f"{NUM_HOSTS} hosts are network namespaces of one machine and share its CPUs. Each has one trainer and, for "
        f"Shardwell, one shard server. A GPT with {count_parameters(model) / 1e6:.1f} M parameters in "
        f"{model.num_layers + 1} units, 1 x {model.context} tokens per trainer, AdamW, one thread per process. "
        f"Medians and quartiles of {options.rounds} x {options.steps} steps by turns; ratios below 1 are faster. "
        "Shardwell, and FSDP2 in the rows with kept weights, gather each weight once per step. Bytes are counted on "
        "the busiest host's link."
    )


def to_memory_section(peak_bytes_per_host: Mapping[str, int]) -> str:
    rows = [[NAMES[kind], f"{size / 1e6:.0f}"] for kind, size in peak_bytes_per_host.items()]
    return "## Memory\n\n" + to_table(["", "peak unshared memory of the processes on the host with the most, MB"], rows)


def write(
    document: Report, options: argparse.Namespace, model: GPTConfig, benchmark: SlowNetwork, failures: Mapping[str, str]
) -> None:
    """Writes the results, without the groups that failed."""
    samples = {
        rate: {kind: found for kind, found in by_kind.items() if kind not in failures}
        for rate, by_kind in benchmark.samples.items()
    }
    slowest = options.rates[-1].text
    plain = {rate: {kind: asdict(found) for kind, found in by_kind.items()} for rate, by_kind in samples.items()}
    document.write(
        results={
            "model": asdict(model),
            "parameters": count_parameters(model),
            "failures": dict(failures),
            "rates": plain,
            "peak_bytes_per_host": benchmark.peak_bytes_per_host,
        },
        sections=[
            describe(options, model),
            *(to_section(rate, samples[rate.text]) for rate in options.rates),
            to_memory_section(benchmark.peak_bytes_per_host),
            *(f"{NAMES[kind]} failed: {reason}" for kind, reason in failures.items()),
        ],
        chart=Chart(
            axis=f"seconds per step at {slowest}",
            bars={NAMES[kind]: summarize(found.step_s) for kind, found in samples[slowest].items()},
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
    parser = argparse.ArgumentParser(description="Compares step times over slow links with FSDP2 and DDP. Needs root.")
    rates = [Rate("1gbit"), Rate("200mbit")]
    parser.add_argument("--rates", type=rate_argument, nargs="+", default=rates, metavar="RATE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=3, help="steps of each group per round and rate")
    parser.add_argument("--groups", choices=KINDS, nargs="+", default=list(KINDS), help="default: all")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to check that the benchmark works")
    report.add_arguments(parser, name="slow_network")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    model = TINY_MODEL if options.tiny else MODEL
    document = Report(options, title="Training over a slow network")
    try:
        with Network(NUM_HOSTS) as network:
            benchmark = SlowNetwork(options, network, model)
            failures = benchmark.run()
    except NetworkError as error:
        raise SystemExit(f"slow_network: {error}") from None
    write(document, options, model, benchmark, failures)


if __name__ == "__main__":
    main()
