"""A trainer of a run without a fixed length. Appends a line per committed step to a file, and prints a hash at the end.

``python -m tests.support.long_trainer --address A --run R --trainer NAME --commits FILE --plan-file FILE``

The plan says how far the run may train (``Plan``). Each batch sleeps, as a batch on a GPU leaves the processor idle.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

import shardwell
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.reference import ADAMW, sha256

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Plan:
    """How far a run may train. Its trainers read it before each step, so that all of them end at the same step."""

    steps: int
    """Number of steps after which the trainers wait for another plan, or end."""
    is_final: bool
    """True if the trainers end there."""

    def write(self, path: Path) -> None:
        """Replaces the file of the plan as a whole."""
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(asdict(self)))
        new.replace(path)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file of the plan."""
        return cls(**json.loads(path.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--dp", type=int, required=True)
    parser.add_argument("--commits", type=Path, required=True, help="file for the times of commits")
    parser.add_argument("--plan-file", type=Path, required=True, help="how far to train")
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
        **join_options(transports=options.transports, wait_limit_s=120, **join),
    )
    model = transformer.build()
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    with options.commits.open("a") as commits:
        for step in session.steps(10**9):
            if not may_train(session.step, options.plan_file):
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


def may_train(step: int, plan_file: Path) -> bool:
    """Waits until the plan allows or forbids the step."""
    while step >= (plan := Plan.read(plan_file)).steps:
        if plan.is_final:
            return False
        time.sleep(0.01)
    return True


if __name__ == "__main__":
    main()
