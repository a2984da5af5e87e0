"""Measures what the performance monitor costs a step: ``python -m benchmarks.monitor_cost``.

Calls the monitor's parts on a session with 13 units and two shard servers, many times each.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
import uuid
from collections.abc import Callable

import torch
from torch import nn

import shardwell
from shardwell.data_plane.transfers import TrafficStats
from shardwell.monitor.step_times import CommitFacts, LastFinished, ServerUpdate

UNITS, ROUNDS, KEPT_STEPS = 12, 9, 1000


def measure(action: Callable[[], object], calls: int) -> str:
    times_s = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(calls):
            action()
        times_s.append((time.perf_counter() - started) / calls)
    return f"{1e6 * statistics.median(times_s):.1f} us (least {1e6 * min(times_s):.1f})"


def wait_for_gather(stats: TrafficStats) -> None:
    stats.add_gather_wait(time.perf_counter())


def push(stats: TrafficStats) -> None:
    started_s = time.perf_counter() - stats.push_wait_s
    stats.push_copy_s += time.perf_counter() - stats.push_wait_s - started_s


def train(session: shardwell.Session, steps: int) -> None:
    model = nn.Sequential(*(shardwell.fully_shard(nn.Linear(64, 64), session) for _ in range(UNITS)), nn.Linear(64, 1))
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1e-6)
    for step in session.steps(steps):
        for batch in step.batches(lambda *_: torch.ones(4, 64)):
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    stats = TrafficStats()
    print("per gather wait:", measure(lambda: wait_for_gather(stats), 10_000))
    print("per push:       ", measure(lambda: push(stats), 10_000))
    with (
        shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster,
        shardwell.join(cluster.address, run=uuid.uuid4().hex) as session,
    ):
        train(session, steps=5)
        facts = CommitFacts(LastFinished(0, "trainer", 1.0), ServerUpdate("server", 0.01), 0.001)
        waits = [(1.0, 2.0)] * (2 * UNITS)

        def end_step() -> None:
            session.monitor.end_step(1, facts, session._training.sample(), waits)

        print("per step:       ", measure(end_step, 1000))
        tracemalloc.start()
        for _ in range(KEPT_STEPS):
            end_step()
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"memory per step: {size_bytes / KEPT_STEPS:.0f} bytes, at most 1024 steps")
        print("report():       ", measure(lambda: str(session.report()), 5))


if __name__ == "__main__":
    main()
