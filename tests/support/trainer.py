"""A trainer process for tests. Prints one JSON line per step and a hash at the end.

``python -m tests.support.trainer --address A --run R --dp 2 --steps 10 [--kill-at-step K | --stop-at-step K |
--term-at-step K]``

``--wait-in-push N --until FILE`` blocks the Nth push of a shard's part of a gradient until the file exists.

``--client-side NAME`` selects torch's optimizer of that name on the trainers, or ``flat_adam`` of
``tests.support.flat_updates``. ``--kill-in-update K`` kills the process during the update of step K, with ``--after N``
after N segments of partitions are updated, while other segments are read ahead and staged.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shardwell
from shardwell_wire import fault_points
from tests.support import transformer
from tests.support.cluster import join_options, wait_until
from tests.support.mortal_optimizers import client_side
from tests.support.reference import ADAMW, sha256

_PR_SET_DUMPABLE = 4


def adamw(parameters: Iterable[torch.nn.Parameter]) -> shardwell.optim.ShardedOptimizer:
    """The default optimizer."""
    return shardwell.optim.AdamW(parameters, **ADAMW)


def train(
    session: shardwell.Session,
    *,
    steps: int,
    clip: float | None = None,
    signal_at_step: int | None = None,
    number: int = signal.SIGKILL,
    signal_after_s: float = 0.0,
    make_optimizer: Callable[[Iterable[torch.nn.Parameter]], shardwell.optim.ShardedOptimizer] = adamw,
    backwards: int = 1,
) -> Any:
    """Trains the transformer; returns (losses by step and rank, final state).

    Every work item has ``backwards`` forwards and backwards, each of which pushes its gradients.

    During the first backward of ``signal_at_step`` the process sends the signal ``number`` to itself, after some
    seconds.
    """

    def send_signal() -> None:
        nonlocal signal_at_step
        signal_at_step = None
        time.sleep(signal_after_s)
        os.kill(os.getpid(), number)

    model = transformer.build()
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for step in session.steps(steps):
        for tokens in step.batches(transformer.batch):
            if step.number == signal_at_step:
                model.on_backward = send_signal
            else:
                model.on_backward = None
            for _ in range(backwards):
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
    parser.add_argument("--consistency", type=shardwell.Consistency.parse)
    parser.add_argument("--chunk-bytes", type=int)
    parser.add_argument("--checkpoint-dir")
    parser.add_argument("--checkpoint-every", type=int)
    parser.add_argument("--resume")
    parser.add_argument("--backups", type=int)
    parser.add_argument("--transports")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--kill-at-step", type=int)
    parser.add_argument("--stop-at-step", type=int)
    parser.add_argument("--stop-after-s", type=float, default=0.0)
    parser.add_argument("--term-at-step", type=int)
    parser.add_argument("--wait-in-push", type=int)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--client-side")
    parser.add_argument("--kill-in-update", type=int)
    parser.add_argument("--after", type=int, default=2)
    parser.add_argument("--backwards", type=int, default=1)
    parser.add_argument(
        "--user", type=int, help="become this user, after the imports, which it may not be able to read"
    )
    options = parser.parse_args()
    if options.user is not None:
        os.setgroups([])
        os.setresgid(*[options.user] * 3)
        os.setresuid(*[options.user] * 3)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1)  # a process that has changed its user cannot read its page map
    session = shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        min_trainers=options.min_trainers,
        trainer=options.trainer,
        global_rank=options.global_rank,
        consistency=options.consistency,
        checkpoint_dir=options.checkpoint_dir,
        checkpoint_every=options.checkpoint_every,
        resume=options.resume,
        backups=options.backups,
        **join_options(chunk_bytes=options.chunk_bytes, transports=options.transports, wait_limit_s=90),
    )
    at_step, number = options.kill_at_step, signal.SIGKILL
    if options.stop_at_step is not None:
        at_step, number = options.stop_at_step, signal.SIGSTOP
    if options.term_at_step is not None:
        at_step, number = options.term_at_step, signal.SIGTERM
    make = (
        adamw
        if options.client_side is None
        else client_side(options.client_side, options.kill_in_update, options.after)
    )
    with ExitStack() as stack:
        if options.wait_in_push is not None:
            wait = partial(wait_until, options.until.exists, f"{options.until} exists", timeout_s=90.0)
            point = fault_points.armed("client.push.before", lambda _: wait(), nth=options.wait_in_push)
            stack.enter_context(point)
        _, state = train(
            session,
            steps=options.steps,
            clip=options.clip,
            signal_at_step=at_step,
            number=number,
            signal_after_s=options.stop_after_s,
            make_optimizer=make,
            backwards=options.backwards,
        )
    print(json.dumps({"sha256": sha256(state), "stats": session.stats()}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
