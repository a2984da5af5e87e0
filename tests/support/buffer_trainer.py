"""A trainer process with a model whose buffers change. Prints a hash of the final state as one JSON line.

``python -m tests.support.buffer_trainer --address A --run R --dp 2 --rank 0 --steps 4 [--kill POINT --kill-step K]``
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import shardwell

LR = 0.05
KILL_POINTS = ("in item", "item ended", "work finished", "committed")


class Net(nn.Module):
    """A model with BatchNorm, a queue that changes in every forward, and a random constant.

    One buffer takes its shape in the first forward, as those of observers of quantization.
    """

    def __init__(self, queue_rows: int = 64, constants_seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)
        self.register_buffer("queue", torch.zeros(queue_rows, 6))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("unknown", torch.tensor([float("nan"), -0.0]))
        self.register_buffer("largest", torch.tensor([]))
        torch.manual_seed(constants_seed)
        self.register_buffer("constant", torch.randn(6))
        self.register_buffer("temperature", torch.tensor(1.0))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(batch)) * self.constant / self.temperature
        with torch.no_grad():
            self.queue.copy_(self.queue.roll(len(batch), 0))
            self.queue[: len(batch)] = hidden
            self.calls += 1
            if not self.largest.numel():
                self.largest.resize_(6).fill_(-torch.inf)
            self.largest.copy_(torch.maximum(self.largest, hidden.amax(0)))
            self.unknown.data.neg_()  # `data` bypasses the tensor's version counter
        result: torch.Tensor = self.last(hidden).square().mean()
        return result


def batch(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randn(8, 7, generator=torch.Generator().manual_seed(100 * step + dp_rank))


def state_hash(state: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(name.encode() + state[name].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def plain_state(dp: int, steps: int, *, queue_rows: int = 64, write: bool = False) -> Mapping[str, torch.Tensor]:
    """Returns the final state of plain PyTorch: ranks start from the same buffers, and rank 0's are kept."""
    model = Net(queue_rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    for step in range(steps):
        if write:
            model.temperature.fill_(1.0 + step)
        before, after = [value.clone() for value in model.buffers()], None
        for dp_rank in range(dp):
            set_buffers(model, before)
            model(batch(step, dp_rank)).backward()
            after = after or [value.clone() for value in model.buffers()]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= dp
        optimizer.step()
        optimizer.zero_grad()
        assert after is not None
        set_buffers(model, after)
    return model.state_dict()


def set_buffers(model: nn.Module, values: list[torch.Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.data = value.clone()


def train(
    session: shardwell.Session,
    *,
    steps: int,
    queue_rows: int = 64,
    constants_seed: int = 0,
    write: Callable[[Net, int], object] = lambda model, step: None,
    kill: str = "",
    kill_step: int = -1,
) -> Mapping[str, torch.Tensor]:
    """Trains ``Net``; ``write`` is called before each loop over ``step.batches``."""
    model = Net(queue_rows, constants_seed)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=LR)
    die_at(session, kill, kill_step)
    for step in session.steps(steps):
        write(model, step.number)
        for inputs in step.batches(batch):
            loss = model(inputs)
            if kill == "in item" and step.number == kill_step:
                os.kill(os.getpid(), signal.SIGKILL)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if session.global_rank is not None:
            print(json.dumps({"step": step.number}), flush=True)
    return shardwell.full_state_dict(model)


def die_at(session: shardwell.Session, point: str, kill_step: int) -> None:
    """Kills this process at a point of a step."""
    end = session.in_flight._committer

    def dying(action: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
        def act(step: int, *arguments: Any, **options: Any) -> Any:
            if before and step == kill_step:
                os.kill(os.getpid(), signal.SIGKILL)
            result = action(step, *arguments, **options)
            if step == kill_step:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return act

    if point == "item ended":
        end.finish_work = dying(end.finish_work, before=True)  # type: ignore[method-assign]
    if point == "work finished":
        end.finish_work = dying(end.finish_work, before=False)  # type: ignore[method-assign]
    if point == "committed":
        end.commit = dying(end.commit, before=False)  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--min-trainers", type=int)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--queue-rows", type=int, default=64)
    parser.add_argument("--constants-seed", type=int, default=0)
    parser.add_argument("--write", type=float)
    parser.add_argument("--kill", choices=("", *KILL_POINTS), default="")
    parser.add_argument("--kill-step", type=int, default=-1)
    options = parser.parse_args()
    session = shardwell.join(
        options.address,
        run=options.run,
        world=shardwell.World(dp=options.dp),
        global_rank=options.rank,
        min_trainers=options.min_trainers,
        waits=shardwell.WaitOptions(wait_limit_s=90),
    )

    def write(model: Net, step: int) -> None:
        if options.write is not None:
            model.temperature.fill_(options.write + step)

    state = train(
        session,
        steps=options.steps,
        queue_rows=options.queue_rows,
        constants_seed=options.constants_seed,
        write=write,
        kill=options.kill,
        kill_step=options.kill_step,
    )
    print(json.dumps({"sha256": state_hash(state)}), flush=True)
    session.close()


if __name__ == "__main__":
    main()
