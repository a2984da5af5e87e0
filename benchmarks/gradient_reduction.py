"""Compares where gradients are added, over slow links: ``sudo python -m benchmarks.gradient_reduction``.

Two hosts with two trainers each, and hosts with a shard server each, are network namespaces of this machine
(``network.py``). The run adds gradients in pairs, so that each host has a complete reduction group. With ``direct``
every trainer pushes its gradient. With ``hierarchical`` the relay of a host pushes their sum. With ``allreduce`` all
trainers add and push a part of the sum each. ``adaptive`` chooses one of these for each unit. The variants take turns
of a few steps at every rate. The losses of all must agree, because the weights are bit-identical.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

from benchmarks import report, workers
from benchmarks.network import Network, NetworkError, Rate
from benchmarks.report import Chart, Report, ratio, spread, summarize, to_table
from benchmarks.slow_network import (
    MODEL,
    TINY_MODEL,
    WARMUP_STEPS,
    address_of,
    count_parameters,
    positive,
    rate_argument,
    start,
    start_servers,
)
from benchmarks.workers import Group
from examples.gpt import GPTConfig

NUM_TRAINER_HOSTS, TRAINERS_PER_HOST, NUM_SERVERS = 2, 2, 2
VARIANTS = ("direct", "hierarchical", "allreduce", "adaptive")


@dataclass
class Samples:
    """Measurements of one variant at one rate."""

    step_s: list[float] = field(default_factory=list)
    """Duration of each step, of its slowest trainer."""
    gradient_bytes: list[float] = field(default_factory=list)
    """Bytes per step that the hosts of the shard servers have received, one number per turn."""
    losses: list[float] = field(default_factory=list)
    """Loss of rank 0 at the end of each turn."""


class GradientReduction:
    """Measures the variants by turns.

    Args:
        options: The parsed command line.
        network: The hosts: those of the trainers, then those of the shard servers.
        model: Sizes of the trained model.
    """

    def __init__(self, options: argparse.Namespace, network: Network, model: GPTConfig) -> None:
        self._options, self._network, self._model = options, network, model
        self.samples = {rate.text: {name: Samples() for name in VARIANTS} for rate in options.rates}

    def run(self) -> dict[str, str]:
        """Runs all turns and returns the reasons of failed variants."""
        starters: Mapping[str, Callable[[], workers.GroupContext]] = {
            name: functools.partial(start_variant, name, self._network, self._model) for name in VARIANTS
        }
        return workers.interleave(
            starters,
            rounds=self._options.rounds,
            resident=True,
            warm_up=lambda _, group: group.run(steps=WARMUP_STEPS),
            measure=self._measure,
        )

    def _measure(self, name: str, group: Group) -> None:
        steps, servers = self._options.steps, self._network.hosts[NUM_TRAINER_HOSTS:]
        for rate in self._options.rates:
            self._network.limit(rate)
            group.run(steps=1)  # the token buckets of the limits then have their usual level
            before = sum(host.received_bytes() for host in servers)
            answers = group.run(steps=steps)
            samples = self.samples[rate.text][name]
            samples.step_s += map(max, zip(*(answer["seconds"] for answer in answers), strict=True))
            samples.gradient_bytes.append((sum(host.received_bytes() for host in servers) - before) / steps)
            samples.losses.append(answers[0]["loss"])


@contextmanager
def start_variant(name: str, network: Network, model: GPTConfig) -> Iterator[Group]:
    """Starts the trainers on the first hosts, and the coordinator and the shard servers on the others."""
    trainer_hosts, server_hosts = network.hosts[:NUM_TRAINER_HOSTS], network.hosts[NUM_TRAINER_HOSTS:]
    with ExitStack() as stack:
        servers, address = start_servers(stack, server_hosts)
        if name in ("hierarchical", "adaptive"):
            relays = [
                start(stack, host, "shardwell_server", ["relay", "--coordinator", address, "--exit-with-parent"])
                for host in trainer_hosts
            ]
            for relay in relays:
                address_of(relay)
        shape = {
            "kind": "shardwell-fp32",
            "address": address,
            "num-trainers": NUM_TRAINER_HOSTS * TRAINERS_PER_HOST,
            "model": json.dumps(asdict(model)),
            "gradient-reduction": name,
            "reduction-groups": f"{TRAINERS_PER_HOST},{NUM_TRAINER_HOSTS}",
        }
        arguments = [text for key, value in shape.items() for text in (f"--{key}", str(value))]
        trainers = [
            start(
                stack,
                host,
                "benchmarks.network_trainer",
                [*arguments, "--rank", str(TRAINERS_PER_HOST * number + index)],
            )
            for number, host in enumerate(trainer_hosts)
            for index in range(TRAINERS_PER_HOST)
        ]
        yield Group(workers=trainers, server_pids=[server.pid for server in servers])


# ---- the report ----


def to_section(rate: Rate, samples: Mapping[str, Samples]) -> str:
    """Returns the table of one rate."""
    direct = summarize(samples["direct"].step_s) if "direct" in samples else None
    rows = []
    for name, found in samples.items():
        step, received = summarize(found.step_s), summarize(found.gradient_bytes).median
        rows.append([name, spread(step, ".2f"), ratio(step, direct), f"{received / 1e6:.1f}"])
    header = ["gradient_reduction", "step, s", "/ direct", "MB received by the servers per step"]
    return f"## {rate.text} each way\n\n{to_table(header, rows)}"


def describe(options: argparse.Namespace, model: GPTConfig) -> str:
    return (
        f"{NUM_TRAINER_HOSTS} hosts with {TRAINERS_PER_HOST} trainers each and {NUM_SERVERS} hosts with a shard server "
        "each are network namespaces of one machine and share its CPUs. "
        f"A GPT with {count_parameters(model) / 1e6:.1f} M parameters in {model.num_layers + 1} units, "
        f"1 x {model.context} tokens per trainer, AdamW, one thread per process, "
        f"reduction_groups=({TRAINERS_PER_HOST}, {NUM_TRAINER_HOSTS}). Medians and quartiles of "
        f"{options.rounds} x {options.steps} steps by turns; ratios below 1 are faster."
    )


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares where gradients are added, over slow links. Needs root.")
    parser.add_argument("--rates", type=rate_argument, nargs="+", default=[Rate("1gbit")], metavar="RATE")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--steps", type=positive, default=3, help="steps of each variant per round and rate")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to check that the benchmark works")
    report.add_arguments(parser, name="gradient_reduction")
    return parser.parse_args(argv)


def main() -> None:
    options = parse_arguments()
    model = TINY_MODEL if options.tiny else MODEL
    document = Report(options, title="Where gradients are added")
    try:
        with Network(NUM_TRAINER_HOSTS + NUM_SERVERS) as network:
            benchmark = GradientReduction(options, network, model)
            failures = benchmark.run()
    except NetworkError as error:
        raise SystemExit(f"gradient_reduction: {error}") from None
    samples = {
        rate: {name: found for name, found in by_name.items() if name not in failures}
        for rate, by_name in benchmark.samples.items()
    }
    slowest = options.rates[-1].text
    document.write(
        results={
            "model": asdict(model),
            "parameters": count_parameters(model),
            "failures": failures,
            "rates": {rate: {name: asdict(at) for name, at in by_name.items()} for rate, by_name in samples.items()},
        },
        sections=[
            describe(options, model),
            *(to_section(rate, samples[rate.text]) for rate in options.rates),
            *(f"{name} failed: {reason}" for name, reason in failures.items()),
        ],
        chart=Chart(
            axis=f"seconds per step at {slowest}",
            bars={name: summarize(found.step_s) for name, found in samples[slowest].items()},
            lines={},
        ),
    )


if __name__ == "__main__":
    main()
