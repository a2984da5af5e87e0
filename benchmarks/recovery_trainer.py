"""A trainer of ``benchmarks.recovery``. Prints one JSON line per work item, per commit, and at the end."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import time
from typing import Any

import torch
from torch import Tensor, nn

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--trainer", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--join-options", type=json.loads, default={})
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with shardwell.join(
        arguments.address,
        run=RUN,
        world=shardwell.World(dp=2),
        min_trainers=1,
        trainer=arguments.trainer,
        **arguments.join_options,
    ) as session:
        model = build()
        for layer in model:
            shardwell.fully_shard(layer, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        for step in session.steps(arguments.steps):
            started = time.monotonic()
            for inputs in step.batches(batch):
                model(inputs).square().mean().backward()
                report(step=step.number, item_s=time.monotonic() - started)
                started = time.monotonic()
            optimizer.step()
            report(step=step.number, committed_at=time.monotonic())
            optimizer.zero_grad()
        digest = hashlib.sha256()
        for name, value in sorted(shardwell.full_state_dict(model).items()):
            digest.update(name.encode() + value.numpy().tobytes())
        report(sha256=digest.hexdigest())


if __name__ == "__main__":
    main()
