"""Measures the effect of the C library's settings on a trainer's memory and time: ``python -m benchmarks.allocator``.

Trains 12 blocks of 12.6 MB, fetched over sockets, for 8 steps in a new process per setting. MALLOC_* variables disable
the settings of ``shardwell.join``, so each row shows the effect of its variables.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, STEPS = 2, 8
SETTINGS: dict[str, dict[str, str]] = {
    "glibc's default": {"MALLOC_PERTURB_": "0"},  # has no effect, except that join changes no settings
    "threshold 1 MB": {"MALLOC_MMAP_THRESHOLD_": "1000000"},
    "threshold 4 MB": {"MALLOC_MMAP_THRESHOLD_": "4000000"},
    "as join sets it": {},
}


def train(address: str) -> None:
    import torch

    import shardwell
    from tests.support.memory_probe import NUM_BLOCKS, WIDTH, Block, own_bytes

    torch.set_num_threads(1)
    with shardwell.join(
        address, run=uuid.uuid4().hex, transfers=shardwell.TransferOptions(transports="socket,grpc")
    ) as session:
        start = own_bytes()
        model = torch.nn.Sequential(*(shardwell.fully_shard(Block(), session) for _ in range(NUM_BLOCKS)))
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.0)
        seconds = []
        for _ in range(STEPS):
            started = time.perf_counter()
            model(torch.randn(64, WIDTH)).sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"mb": (own_bytes() - start) / 1e6, "s": statistics.median(seconds[2:])}))


def main() -> None:
    import shardwell

    results: dict[str, list[dict[str, float]]] = {name: [] for name in SETTINGS}
    with shardwell.LocalCluster(num_shards=2) as cluster:
        for _ in range(ROUNDS):
            for name, settings in SETTINGS.items():
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **settings}
                command = [sys.executable, __file__, cluster.address]
                output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, cwd=ROOT).stdout
                results[name].append(json.loads(output))
    print("| setting | MB | s per step |\n|---|---|---|")
    for name, rows in results.items():
        cells = [", ".join(f"{row[key]:{form}}" for row in rows) for key, form in (("mb", ".0f"), ("s", ".2f"))]
        print(f"| {name} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        main()
