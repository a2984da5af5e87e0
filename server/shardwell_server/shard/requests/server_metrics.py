"""The metrics of a shard server: its memory, shards and pinned versions, and the bytes that it sent and received."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import Metric

from shardwell_server.serving.metrics import counter, gauge
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore


def server_metrics(store: ShardStore) -> Iterator[Metric]:
    """Yields the metrics of a shard server."""
    memory = store.memory
    for name, text, value in (
        ("budget", "Memory budget for all runs.", memory.budget_bytes),
        ("reserved", "Memory that shards have reserved, and that is set aside for readers.", memory.reserved_bytes),
        ("used", "Memory in use for parameters, gradients, streams and optimizer state.", memory.used_bytes),
    ):
        yield gauge(f"shardwell_server_memory_{name}_bytes", text, [(value,)])
    yield gauge(
        "shardwell_server_lease_valid",
        "1 while the server may serve trainers: its coordinator has acknowledged a heartbeat lately.",
        [(store.lease.valid,)],
    )
    # A deleted run may be here beside the one that has its name now.
    runs: dict[str, list[HostedRun]] = {}
    for run in store.runs.values():
        runs.setdefault(run.name, []).append(run)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for run in store.runs.values():
        for shard in run.shards.values():
            counts[run.name, shard.role.value] += 1
            sizes[run.name, shard.role.value] += shard.size_bytes
    for name, text, found in (("shards", "Shards", counts), ("shard_bytes", "Bytes of shards", sizes)):
        samples = ((run, role, value) for (run, role), value in found.items())
        yield gauge(f"shardwell_server_{name}", f"{text} on this server, by role.", samples, "run", "role")
    yield gauge(
        "shardwell_server_version",
        "Lowest version of the run's shards on this server.",
        ((name, found[-1].step) for name, found in runs.items()),
        "run",
    )
    yield gauge(
        "shardwell_server_pins",
        "Versions that readers have pinned on this server, one for each reader.",
        ((name, sum(run.pins.total() for run in found)) for name, found in runs.items()),
        "run",
    )
    yield gauge(
        "shardwell_server_oldest_pin_lag_versions",
        "Versions by which the oldest pinned version is behind the newest; 0 without pins.",
        ((name, max(_pin_lag(run) for run in found)) for name, found in runs.items()),
        "run",
    )
    yield counter(
        "shardwell_server_gathered_bytes_total",
        "Bytes of weights sent over connections. Weights that trainers read in shared memory are not counted.",
        [(store.traffic.gathered_bytes,)],
    )
    yield counter(
        "shardwell_server_reduced_bytes_total",
        "Bytes of gradients that were accepted, over connections (stream) or in shared memory (shm).",
        [("stream", store.traffic.streamed_bytes), ("shm", store.traffic.adopted_bytes)],
        "transport",
    )
    yield counter(
        "shardwell_server_replicated_bytes_total",
        "Bytes of copies of shards, and of steps, that this server has sent to backups.",
        [(store.replicated_bytes,)],
    )


def _pin_lag(run: HostedRun) -> int:
    return max(0, run.step - min(run.pins, default=run.step))
