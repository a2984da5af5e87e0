"""A training script as users write it, whose process ends at an instant of a loop body. Prints JSON lines.

``python -m tests.support.natural_loop --address A --run R [--dp 2] [--end-at INSTANT --at-step K]``
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

import shardwell
from tests.support.cluster import join_options
from tests.support.reference import sha256

INSTANTS = ("before batches", "in batches", "before step", "after step", "in scheduler", "after scheduler", "at end")


class Net(nn.Module):
    """Has dropout and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.norm, self.last = nn.Linear(7, 11), nn.BatchNorm1d(11), nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(self.norm(self.first(x)), 0.2, self.training)
        loss: torch.Tensor = self.last(hidden).square().mean()
        return loss


class Lines(IterableDataset[Any]):
    """A stream of samples of different lengths."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        numbers = random.Random(3)
        return (torch.full((numbers.randint(1, 4), 7), float(n % 13)).sin() for n in range(400))


class Counter:
    """A tracked object that changes before and after ``optimizer.step()``."""

    def __init__(self) -> None:
        self.before = self.rows = 0
        self.drawn = 0.0

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def points(step: int, dp_rank: int) -> torch.Tensor:
    """A batch as a function of the step and the data rank."""
    return torch.randn(9, 7, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def sources(name: str) -> tuple[Any, dict[str, Any]]:
    """Returns the source of a name, and the other arguments of ``step.batches``."""
    samples = TensorDataset(torch.randn(60, 7, generator=torch.Generator().manual_seed(2)))
    return {
        "function": (points, {}),
        "dataset": (samples, {"batch_size": 4, "collate_fn": _stack}),
        "stream": (Lines(), {"batch_size": 4, "collate_fn": torch.cat}),
    }[name]


def _stack(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in samples])


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--min-trainers", type=int)
    parser.add_argument("--trainer", default="")
    parser.add_argument("--global-rank", type=int)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--transports")
    parser.add_argument("--source", default="function")
    parser.add_argument("--optimizer-steps", type=int, default=1)
    parser.add_argument("--client-side", action="store_true")
    parser.add_argument("--end-at", choices=INSTANTS)
    parser.add_argument("--at-step", type=int, default=2)
    parser.add_argument("--stop-after-s", type=float, help="stop the process after some seconds instead of ending it")
    options = parser.parse_args()

    def reach(instant: str) -> None:
        if instant == options.end_at and step.number == options.at_step:
            time.sleep(options.stop_after_s or 0.0)
            os.kill(os.getpid(), signal.SIGKILL if options.stop_after_s is None else signal.SIGSTOP)

    class MortalLR(torch.optim.lr_scheduler.StepLR):
        def get_lr(self) -> list[Any]:
            if self.last_epoch:
                reach("in scheduler")
            return list(super().get_lr())  # type: ignore[no-untyped-call]

    with shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        min_trainers=options.min_trainers,
        trainer=options.trainer,
        global_rank=options.global_rank,
        **join_options(transports=options.transports, wait_limit_s=90),
    ) as session:
        model = Net()
        shardwell.fully_shard(model.first, session)
        shardwell.fully_shard(model, session)
        if options.client_side:
            optimizer: Any = shardwell.ClientSide(model.parameters(), torch.optim.AdamW, lr=0.05)
        else:
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.05)
        scheduler, counter = MortalLR(optimizer, 2, gamma=0.5), Counter()
        session.track(scheduler=scheduler, counter=counter)
        source, arguments = sources(options.source)
        for step in session.steps(options.steps, optimizer_steps=options.optimizer_steps):
            reach("before batches")
            counter.before += 1
            for _ in range(options.optimizer_steps):
                rows = 0
                for x in step.batches(source, **arguments):
                    with model.first.no_sync():
                        (model(x) / 2).backward()
                    loss = model(x) / 2
                    loss.backward()
                    step.log(loss=loss)
                    rows += len(x)
                    reach("in batches")
                reach("before step")
                optimizer.clip_grad_norm_(0.1)
                optimizer.step()
            reach("after step")
            optimizer.zero_grad()
            counter.rows += rows
            counter.drawn += torch.rand(()).item()
            scheduler.step()
            reach("after scheduler")
            state = {**shardwell.full_state_dict(model), **dict(model.named_buffers())}
            print(
                json.dumps(
                    {
                        "step": step.number,
                        "last": loss.item(),
                        "means": dict(step.means),
                        "state": sha256(state),
                        "lr": scheduler.get_last_lr(),
                        "counter": counter.state_dict(),
                        "ranks": step.global_ranks,
                    }
                ),
                flush=True,
            )
            reach("at end")
        print(json.dumps({"ended": loss.item(), "scheduler": scheduler.state_dict()}), flush=True)


if __name__ == "__main__":
    main()
