"""How fast a layer comes and its gradient goes, by Shardwell's transports and by others: ``python -m
benchmarks.transports``.

See docs/performance.md for how to read what it writes.
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
"""Shard servers and trainers."""
_MEMCPY, _TCP = "memcpy", "raw TCP"
_PARTS = ("gather", "read", "push")
_COPIES_PER_GROUP = 5
_PROCESS_BYTES = 250 << 20
"""Both about: they decide whether all groups can be alive at once."""


@contextmanager
def peer_group(spec: TransferSpec) -> Iterator[Group]:
    """Workers of anything but Shardwell."""
    with tempfile.TemporaryDirectory() as directory:
        meeting_point = (Path(directory) / "meeting-point").as_uri()
        with _transfers(replace(spec, meeting_point=meeting_point)) as group:
            yield group


@contextmanager
def shardwell_group(spec: TransferSpec, *, num_shards: int) -> Iterator[Group]:
    """Workers that use one transport to a cluster of their own."""
    with (
        shardwell.LocalCluster(num_shards=num_shards) as cluster,
        _transfers(replace(spec, meeting_point=cluster.address)) as group,
    ):
        yield group


def _transfers(spec: TransferSpec) -> workers.GroupContext:
    command_lines = [[replace(spec, dp_rank=dp_rank).to_json()] for dp_rank in range(spec.num_trainers)]
    return workers.started("benchmarks.transfers", command_lines)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A row of the table: a way to move a layer."""

    spec: TransferSpec
    num_shards: int = 0
    """Shardwell's shard servers; 0 for the peers."""

    def start(self) -> workers.GroupContext:
        if self.num_shards:
            return shardwell_group(self.spec, num_shards=self.num_shards)
        return peer_group(self.spec)

    @property
    def estimated_bytes(self) -> int:
        """About how much memory its group takes."""
        num_others = self.num_shards + 1  # a coordinator, or the other end of a connection
        processes = (self.spec.num_trainers + num_others) * _PROCESS_BYTES
        return processes + _COPIES_PER_GROUP * self.spec.size_bytes


def make_ways(size_bytes: int) -> dict[str, Way]:
    """All ways, by the names they have in the table."""
    peers = {
        _MEMCPY: ("memcpy", 1),
        "checksum alone": ("checksum", 1),
        _TCP: ("tcp", 1),
        "raw TCP with checksums": ("checked_tcp", 1),
        "Arrow Flight": ("flight", 1),
        "gloo, 2 ranks": ("gloo", 2),
    }
    ways = {
        name: Way(spec=TransferSpec(kind=kind, size_bytes=size_bytes, num_trainers=num_trainers))
        for name, (kind, num_trainers) in peers.items()
    }
    for num_shards, num_trainers in _TOPOLOGIES:
        for transport in _TRANSPORTS:
            name = f"Shardwell {transport}, {_count(num_shards, 'server')}, {_count(num_trainers, 'trainer')}"
            spec = TransferSpec(kind="shardwell", size_bytes=size_bytes, num_trainers=num_trainers, transport=transport)
            ways[name] = Way(spec=spec, num_shards=num_shards)
    return ways


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# ---- the report ----


def main() -> None:
    arguments = parse_arguments()
    size_bytes = arguments.megabytes * 1_000_000
    written = Report(arguments, title=f"Moving a layer of {arguments.megabytes} MB to a trainer and back")
    ways = make_ways(size_bytes)
    seconds: dict[str, dict[str, list[float]]] = {name: {part: [] for part in _PARTS} for name in ways}
    in_place: set[str] = set()

    def turn(name: str, group: Group) -> None:
        answers = group.run(repeats=arguments.repeats)
        for rounds in zip(*(answer["rounds"] for answer in answers), strict=True):
            for part in _PARTS:
                seconds[name][part].append(sum(each[part] for each in rounds) / len(rounds))
            if any(each.get("in_place") for each in rounds):
                in_place.add(name)

    failures = workers.take_turns(
        {name: way.start for name, way in ways.items()},
        rounds=arguments.rounds,
        resident=workers.fit_in_memory(way.estimated_bytes for way in ways.values()),
        warm_up=lambda name, group: group.run(repeats=2),
        turn=turn,
    )
    measured = [name for name in ways if name not in failures]
    written.write(
        results={
            "settings": {name: str(value) for name, value in vars(arguments).items() if name != "results"},
            "failures": failures,
            "in_place": sorted(in_place),
            "seconds": seconds,
        },
        sections=[
            _table(seconds, size_bytes, in_place=in_place, failures=failures),
            "Rates are of the whole layer, per trainer. A gather ends when the weights can be used, a push when the "
            "gradient has arrived. A gather in place moves no bytes, so it has no rate; what it then costs to read "
            "the weights where they are is in the column with the read.",
        ],
        chart=Chart(
            axis="GB/s until a layer is there and has been read once, median and quartiles; more is better",
            bars={name: rates(seconds[name], size_bytes)["gather and read"] for name in measured},
            lines={},
        ),
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How fast a layer comes to a trainer and its gradient goes.")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the layer")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="transfers of each variant per round")
    report.add_arguments(parser, name="transports")
    return parser.parse_args()


def rates(seconds: Mapping[str, Sequence[float]], size_bytes: int) -> dict[str, Summary]:
    """GB/s by what was done, from seconds by the parts of a round."""
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
    header = ["way", "gather, GB/s", "/ memcpy", "/ TCP", "gather and read, GB/s", "push, GB/s", "/ memcpy", "/ TCP"]
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
