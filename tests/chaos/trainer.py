"""A trainer of the chaos run. Appends a line per committed step to a file, and prints the hash of the final weights.

``python -m tests.chaos.trainer --address A --run R --trainer NAME --commits FILE --stop-file FILE``

The trainer trains until the step that the stop file names exists. Each batch sleeps, as a batch on a GPU leaves the
processor idle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import shardwell
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.reference import ADAMW, sha256

_CLONE_NEWNET = 0x40000000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--dp", type=int, required=True)
    parser.add_argument("--commits", type=Path, required=True, help="file for the times of commits")
    parser.add_argument("--stop-file", type=Path, required=True, help="names the number of steps, once it exists")
    parser.add_argument("--batch-s", type=float, default=0.05, help="seconds that each batch sleeps")
    parser.add_argument("--transports")
    parser.add_argument("--network", help="network namespace to run in")
    parser.add_argument("--join", type=json.loads, default={}, help="more options of shardwell.join, as JSON")
    options = parser.parse_args()
    if options.network:
        enter_network(options.network)
    torch.set_num_threads(1)
    train(options, options.join)


def enter_network(name: str) -> None:
    """Moves this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.close(descriptor)


def train(options: argparse.Namespace, join: Mapping[str, Any]) -> None:
    """Joins the run, trains, and prints the hash of the weights."""
    session = shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        trainer=options.trainer,
        **join_options(transports=options.transports, wait_limit_s=120),
        **join,
    )
    model = transformer.build()
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    with options.commits.open("a") as commits:
        for step in session.steps(10**9):
            if (last := steps_to_train(options.stop_file)) is not None and session.step >= last:
                break
            for tokens in step.batches(transformer.batch):
                time.sleep(options.batch_s)
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"{session.step} {time.monotonic()}", file=commits, flush=True)
    state = shardwell.full_state_dict(model)
    print(json.dumps({"sha256": sha256(state), "steps": session.step}), flush=True)
    session.close()


def steps_to_train(stop_file: Path) -> int | None:
    """Returns the number of steps after which all trainers stop; None while it is not decided."""
    try:
        return int(stop_file.read_text())
    except (FileNotFoundError, ValueError):
        return None


if __name__ == "__main__":
    main()
