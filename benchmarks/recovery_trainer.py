"""A trainer of ``benchmarks.recovery``. Prints a JSON line per work item, per commit, and at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import shardwell

RUN = "recovery"
WIDTH, LAYERS, BATCH_SIZE = 384, 6, 256
"""A work item takes about 30 ms on one core."""


def build() -> nn.Sequential:
    """Returns the same model in every process."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def batch(step: int, dp_rank: int) -> Tensor:
    """Returns the batch of a work item. [BATCH_SIZE, WIDTH]"""
    return torch.randn(BATCH_SIZE, WIDTH, generator=torch.Generator().manual_seed(1000 * step + dp_rank))


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def split(model: nn.Sequential, session: shardwell.Session) -> None:
    """Splits pairs of layers over the trainers of the replica: the first by columns, the second by rows."""
    styles = (ColwiseParallel(), RowwiseParallel())
    plan: dict[str, ParallelStyle] = {f"{index}.0": styles[index % 2] for index in range(LAYERS)}
    parallelize_module(model, session.replica_mesh()["tp"], plan)


def train(session: shardwell.Session, steps: int) -> None:
    """Trains to the end. Called again if the replica has lost a trainer."""
    model = build()
    if session.world.tp > 1:
        split(model, session)
        report(formed_at=time.monotonic())
    for layer in model:
        shardwell.fully_shard(layer, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
    for step in session.steps(steps):
        started = time.monotonic()
        for inputs in step.batches(batch):
            model(inputs).square().mean().backward()
            report(step=step.number, item_s=time.monotonic() - started)
            started = time.monotonic()
        optimizer.step()
        report(step=step.number, committed_at=time.monotonic())
        optimizer.zero_grad()
    report(sha256=read_hash(session))


def read_hash(session: shardwell.Session) -> str:
    """Returns the hash of the whole weights."""
    model, digest = build(), hashlib.sha256()
    with shardwell.attach(session.config.address, run=RUN) as reader:
        reader.follow(model, rename=lambda name: name.removeprefix("Sequential-"))
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--join-options", type=json.loads, default={})
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with shardwell.join(
        arguments.address,
        run=RUN,
        world=shardwell.World(dp=2, tp=arguments.tp),
        min_trainers=arguments.tp,
        trainer=arguments.trainer,
        **arguments.join_options,
    ) as session:
        session.run_replica(partial(train, steps=arguments.steps))
    os._exit(0)  # gloo's threads may wait for a lost trainer


if __name__ == "__main__":
    main()
