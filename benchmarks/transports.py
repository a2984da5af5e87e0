"""Measures how fast a layer is gathered and a gradient is pushed, with Shardwell's transports and with baselines.

Run ``python -m benchmarks.transports``. docs/performance.md explains the results.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import shardwell
from benchmarks import report, workers
from benchmarks.report import Chart, Report, Summary, ratio, spread, summarize
from benchmarks.transfers import TransferSpec
from benchmarks.workers import Group

_TRANSPORTS = ("shm", "socket", "grpc")
_TOPOLOGIES = ((1, 1), (2, 1), (2, 2))
"""Numbers of shard servers and trainers."""
_MEMCPY, _TCP = "memcpy", "raw TCP"
_PARTS = ("gather", "read", "push")
_COPIES_PER_GROUP = 5
_PROCESS_BYTES = 250 << 20
"""Rough estimates, which decide whether all groups can be alive at once."""


@contextmanager
def baseline_group(spec: TransferSpec) -> Iterator[Group]:
    """Starts the workers of a baseline."""
    with tempfile.TemporaryDirectory() as directory:
        address = (Path(directory) / "rendezvous").as_uri()
        with _transfers(replace(spec, address=address)) as group:
            yield group


@contextmanager
def shardwell_group(spec: TransferSpec, *, num_shards: int) -> Iterator[Group]:
    """Starts workers that use one transport, and a cluster for them."""
    with (
        shardwell.LocalCluster(num_shards=num_shards) as cluster,
        _transfers(replace(spec, address=cluster.address)) as group,
    ):
        yield group


def _transfers(spec: TransferSpec) -> workers.GroupContext:
    command_lines = [[replace(spec, dp_rank=dp_rank).to_json()] for dp_rank in range(spec.num_trainers)]
    return workers.start_group("benchmarks.transfers", command_lines)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A row of the table: a method to move a layer."""

    spec: TransferSpec
    num_shards: int = 0
    """Number of shard servers; 0 for the baselines."""

    def start(self) -> workers.GroupContext:
        """Starts the variant's group."""
        if self.num_shards:
            return shardwell_group(self.spec, num_shards=self.num_shards)
        return baseline_group(self.spec)

    @property
    def estimated_bytes(self) -> int:
        """Estimated memory of the variant's group."""
        num_others = self.num_shards + 1  # a coordinator, or the server of a baseline
        processes = (self.spec.num_trainers + num_others) * _PROCESS_BYTES
        return processes + _COPIES_PER_GROUP * self.spec.size_bytes


def make_variants(size_bytes: int) -> dict[str, Variant]:
    """Returns all variants by their names in the table."""
    baselines = {
        _MEMCPY: ("memcpy", 1),
        "checksum alone": ("checksum", 1),
        _TCP: ("tcp", 1),
        "raw TCP with checksums": ("checked_tcp", 1),
        "Arrow Flight": ("flight", 1),
        "gloo, 2 ranks": ("gloo", 2),
    }
    variants = {
        name: Variant(spec=TransferSpec(kind=kind, size_bytes=size_bytes, num_trainers=num_trainers))
        for name, (kind, num_trainers) in baselines.items()
    }
    for num_shards, num_trainers in _TOPOLOGIES:
        for transport in _TRANSPORTS:
            name = f"Shardwell {transport}, {_count(num_shards, 'server')}, {_count(num_trainers, 'trainer')}"
            spec = TransferSpec(kind="shardwell", size_bytes=size_bytes, num_trainers=num_trainers, transport=transport)
            variants[name] = Variant(spec=spec, num_shards=num_shards)
    return variants


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- the report ----


def main() -> None:
    arguments = parse_arguments()
    size_bytes = arguments.megabytes * 1_000_000
    document = Report(arguments, title=f"Moving a layer of {arguments.megabytes} MB to a trainer and back")
    variants = make_variants(size_bytes)
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in _PARTS} for name in variants}
    in_place: set[str] = set()

    def measure(name: str, group: Group) -> None:
        answers = group.run(repeats=arguments.repeats)
        for rounds in zip(*(answer["rounds"] for answer in answers), strict=True):
            for part in _PARTS:
                seconds[name][part].append(sum(each[part] for each in rounds) / len(rounds))
            if any(each.get("in_place") for each in rounds):
                in_place.add(name)

    failures = workers.interleave(
        {name: variant.start for name, variant in variants.items()},
        rounds=arguments.rounds,
        resident=workers.fit_in_memory(variant.estimated_bytes for variant in variants.values()),
        warm_up=lambda name, group: group.run(repeats=2),
        measure=measure,
    )
    measured = [name for name in variants if name not in failures]
    document.write(
        results={
            "settings": {name: str(value) for name, value in vars(arguments).items() if name != "results"},
            "failures": failures,
            "in_place": sorted(in_place),
            "seconds": seconds,
        },
        sections=[
            _table(seconds, size_bytes, in_place=in_place, failures=failures),
            "Rates refer to the whole layer and to one trainer. A gather ends when the weights can be used, a push "
            "when the gradient has arrived. A gather in place moves no bytes and has no rate; the column with the "
            "read shows the cost of reading the weights in place.",
        ],
        chart=Chart(
            axis="GB/s to gather and read a layer once, median and quartiles; more is better",
            bars={name: rates(seconds[name], size_bytes)["gather and read"] for name in measured},
            lines={},
        ),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures how fast a layer is gathered and a gradient is pushed.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the layer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="transfers of each variant per round")
    report.add_arguments(parser, name="transports")
    return parser.parse_args()


def rates(seconds: Mapping[str, Sequence[float]], size_bytes: int) -> dict[str, Summary]:
    """Converts the seconds of each part of a round to GB/s."""
    gather_and_read = [gather + read for gather, read in zip(seconds["gather"], seconds["read"], strict=True)]
    done = {"gather": seconds["gather"], "gather and read": gather_and_read, "push": seconds["push"]}
    return {what: summarize(values).inverse(size_bytes / 1e9) for what, values in done.items()}


def _table(
    seconds: Mapping[str, Mapping[str, Sequence[float]]],
    size_bytes: int,
    *,
    in_place: Collection[str],
    failures: Mapping[str, str],
) -> str:
    header = [
        "variant",
        "gather, GB/s",
        "/ memcpy",
        "/ TCP",
        "gather and read, GB/s",
        "push, GB/s",
        "/ memcpy",
        "/ TCP",
    ]
    measured = {name: rates(parts, size_bytes) for name, parts in seconds.items() if name not in failures}
    bases = [measured.get(name, {}) for name in (_MEMCPY, _TCP)]
    rows = []
    for name in seconds:
        if name in failures:
            rows.append(report.failure_row(name, failures[name], len(header)))
            continue
        gather, and_read, push = (measured[name][what] for what in ("gather", "gather and read", "push"))
        gathered = [spread(gather, ".2f"), *(ratio(gather, base.get("gather")) for base in bases)]
        if name in in_place:
            waited_ms = summarize(seconds[name]["gather"]).scaled(1e3)
            gathered = [f"in place after {spread(waited_ms, '.3f')} ms", report.ABSENT, report.ABSENT]
        pushed = [spread(push, ".2f"), *(ratio(push, base.get("push")) for base in bases)]
        rows.append([name, *gathered, spread(and_read, ".2f"), *pushed])
    return report.to_table(header, rows)


if __name__ == "__main__":
    main()
