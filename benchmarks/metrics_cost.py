"""Measures what Prometheus costs: steps of a run whose servers are scraped every second, against steps without scrapes.

Run ``python -m benchmarks.metrics_cost``. One trainer and two shard servers train; a process of its own scrapes all
three servers. Turns with and without scrapes alternate, so that other programs on the machine disturb both alike. The
result is the ratio of the medians over the turns, of the mean time of a step in a turn: a scrape meets few steps, which
a median over steps would hide.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import timeit
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn

import shardwell
from benchmarks.report import to_table
from shardwell_server.serving.metrics import Durations

_SCRAPER = """
import select, sys, time, urllib.request
period_s, urls = float(sys.argv[1]), sys.argv[2:]
on, next_s = False, 0.0
while True:
    wait_s = max(0.0, next_s - time.monotonic()) if on else None
    if select.select([sys.stdin], [], [], wait_s)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        on, next_s = line.strip() == "on", time.monotonic()
        continue
    next_s = time.monotonic() + period_s
    begun_s, size = time.perf_counter(), 0
    for url in urls:
        size += len(urllib.request.urlopen(url, timeout=10).read())
    print(time.perf_counter() - begun_s, size, flush=True)
"""


@contextmanager
def _scraper(urls: list[str], period_s: float) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", _SCRAPER, str(period_s), *urls]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _urls(cluster: shardwell.LocalCluster) -> list[str]:
    return [f"http://{at.metrics_address}/metrics" for at in (cluster.coordinator, *cluster.shards)]


def _cpu_of_scrape(pids: list[int], urls: list[str], count: int = 100) -> float:
    """Returns the CPU time of the servers for one scrape of all of them, while nobody trains."""
    processes = [psutil.Process(pid) for pid in pids]

    def used_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    begun_s = used_s()
    for _ in range(count):
        for url in urls:
            urllib.request.urlopen(url, timeout=10).read()
    return (used_s() - begun_s) / count


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--turn-s", type=float, default=4.0, help="seconds of a turn (default: %(default)s)")
    parser.add_argument("--units", type=int, default=13, help="linear layers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="features of a layer (default: %(default)s)")
    parser.add_argument("--period-s", type=float, default=1.0, help="time between scrapes (default: %(default)s)")
    parser.add_argument("--transports", default="shm,socket,grpc", help="transports (default: %(default)s)")
    arguments = parser.parse_args()
    times: dict[bool, list[float]] = {False: [], True: []}
    transfers = shardwell.TransferOptions(transports=arguments.transports)
    with (
        shardwell.LocalCluster(num_shards=2, metrics=True, log_level="warning") as cluster,
        shardwell.join(cluster.address, run="cost", transfers=transfers) as session,
        _scraper(urls := _urls(cluster), arguments.period_s) as scraper,
    ):
        assert scraper.stdin is not None and scraper.stdout is not None
        width = arguments.width
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(arguments.units)))
        for layer in model:
            shardwell.fully_shard(layer, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        batch = torch.randn(32, width)
        plan = [False] + [scraped for turn in range(arguments.turns) for scraped in (turn % 2 == 0, turn % 2 == 1)]
        steps = iter(session.steps(10**9))
        for turn, scraped in enumerate(plan):
            scraper.stdin.write("on\n" if scraped else "off\n")
            scraper.stdin.flush()
            begun_s, count = time.perf_counter(), 0
            while (passed_s := time.perf_counter() - begun_s) < arguments.turn_s:
                next(steps)
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                count += 1
            if turn:  # the first one warms up
                times[scraped].append(passed_s / count)
        scraper.stdin.close()
        cpu_s = _cpu_of_scrape([at.pid for at in (cluster.coordinator, *cluster.shards)], urls)
        scrapes = [tuple(map(float, line.split())) for line in scraper.stdout]
    without, with_scrapes = (statistics.median(times[scraped]) for scraped in (False, True))
    durations = Durations((0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0))
    count_s = min(timeit.repeat(lambda: durations.add(time.perf_counter() - 1e5), number=100_000, repeat=5)) / 1e5
    rows = [
        ["step without scrapes", f"{1e3 * without:.3f} ms"],
        [f"step with scrapes every {arguments.period_s:g} s", f"{1e3 * with_scrapes:.3f} ms"],
        ["ratio", f"{with_scrapes / without:.4f}"],
        ["scrape of all 3 servers", f"{1e3 * statistics.median(each[0] for each in scrapes):.1f} ms"],
        ["CPU time of such a scrape, in the servers", f"{1e3 * cpu_s:.1f} ms"],
        ["text of all 3 servers", f"{statistics.median(each[1] for each in scrapes) / 1024:.1f} KiB"],
        ["counting one rpc", f"{1e6 * count_s:.2f} us"],
    ]
    print(to_table(["what", "value"], rows))


if __name__ == "__main__":
    main()
