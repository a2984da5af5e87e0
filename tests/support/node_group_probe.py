"""Measures a node group: trainers of one host with and without shared gathers.

``python -m tests.support.node_group_probe --backend gloo [--trainers 2] [--rounds 2]`` starts a cluster and, in each
round, trainers with and without the group. Shared memory is disabled, as if the servers were on other hosts. With
``--backend nccl`` trainer N computes on GPU N.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwell
from shardwell.peers.node_group import BACKENDS
from tests.support.reference import sha256

WIDTH, LAYERS, ROWS, STEPS = 1021, 8, 64, 6
"""Size of the model, and steps of a run. The prime width makes parts uneven. The first step is not counted."""


def train(address: str, run: str, rank: int, num_trainers: int, backend: str, group: str) -> dict[str, Any]:
    """Runs one trainer; returns its measurements."""
    torch.set_num_threads(1)
    device = torch.device(BACKENDS[backend], rank if backend == "nccl" else None)
    if backend == "nccl":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS))).to(device)
    world = shardwell.World(dp=num_trainers)
    with shardwell.join(
        address,
        run=run,
        world=world,
        global_rank=rank,
        transfers=shardwell.TransferOptions(transports="socket,grpc", node_group=group),
    ) as session:
        for block in model:
            shardwell.fully_shard(block, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.01)
        times = []
        for step in session.steps(STEPS):
            started = time.perf_counter()
            for seed in step.batches(lambda number, dp_rank: 1000 * number + dp_rank):
                inputs = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).to(device)
                model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
        moved = session.stats()
        state = {name: value.cpu() for name, value in shardwell.full_state_dict(model).items()}
    return {
        "step_s": statistics.median(times[1:]),
        "cpu_s": sum(os.times()[:2]),
        "received_bytes": moved["received_bytes"] / STEPS,
        "node_shared_bytes": moved["node_shared_bytes"] / STEPS,
        "sha256": sha256(state),
    }


def run_all(address: str, num_trainers: int, backend: str, group: str) -> list[dict[str, Any]]:
    """Runs one trainer process per rank; returns their measurements."""
    run, command = uuid.uuid4().hex, [sys.executable, "-m", "tests.support.node_group_probe", "--backend", backend]
    command += ["--trainers", str(num_trainers), "--address", address, "--run", run, "--group", group]
    trainers = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            cwd=Path(__file__).resolve().parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_trainers)
    ]
    try:
        return [json.loads(trainer.communicate(timeout=300)[0]) for trainer in trainers]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--address")
    parser.add_argument("--run")
    parser.add_argument("--group")
    parser.add_argument("--rank", type=int)
    options = parser.parse_args()
    if options.rank is not None:
        results = train(options.address, options.run, options.rank, options.trainers, options.backend, options.group)
        print(json.dumps(results))
        return
    with shardwell.LocalCluster(num_shards=2) as cluster:
        for _ in range(options.rounds):
            for group in ("none", options.backend):
                for result in run_all(cluster.address, options.trainers, options.backend, group):
                    print(json.dumps({"group": group, **result}), flush=True)


if __name__ == "__main__":
    main()
