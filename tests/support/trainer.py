"""A trainer as a process of its own, for tests: prints one JSON line per step and a hash at the end.

``python -m tests.support.trainer --address A --run R --dp 2 --steps 10 [--kill-at-step K | --stop-at-step K]``
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from typing import Any

import torch

import shardwell
from tests.support import transformer
from tests.support.reference import ADAMW, sha256


def train(
    session: shardwell.Session,
    *,
    steps: int,
    clip: float | None = None,
    signal_at_step: int | None = None,
    number: int = signal.SIGKILL,
) -> Any:
    """Trains the transformer; returns (losses by step and rank, final state).

    In mid-backward of ``signal_at_step`` this process sends itself the signal ``number``.
    """
    model = transformer.build()
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for step in session.steps(steps):
        for tokens in step.batches(transformer.batch):
            if step.number == signal_at_step:
                model.on_backward = lambda: os.kill(os.getpid(), number)
            loss = model(tokens)
            loss.backward()
            losses.append(loss.item())
            print(json.dumps({"step": step.number, "loss": loss.item()}), flush=True)
        if clip is not None:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return losses, shardwell.full_state_dict(model)


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--min-trainers", type=int)
    parser.add_argument("--trainer", default="")
    parser.add_argument("--global-rank", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--chunk-bytes", type=int)
    parser.add_argument("--lanes")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--stop-at-step", type=int)
    options = parser.parse_args()
    session = shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        min_trainers=options.min_trainers,
        trainer=options.trainer,
        global_rank=options.global_rank,
        chunk_bytes=options.chunk_bytes,
        lanes=options.lanes,
        wait_limit_s=90,
    )
    at_step, number = options.kill_at_step, signal.SIGKILL
    if options.stop_at_step is not None:
        at_step, number = options.stop_at_step, signal.SIGSTOP
    _, state = train(session, steps=options.steps, clip=options.clip, signal_at_step=at_step, number=number)
    print(json.dumps({"sha256": sha256(state), "stats": session.stats()}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
