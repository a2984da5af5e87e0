"""A trainer of ``benchmarks.growth``. The command ``{"kind": "plain" or "sharded", "steps": n}`` runs n such steps."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import shardwell
from benchmarks import workers

BATCH_SIZE = 4
Times = dict[str, float]
"""Duration of one step and its parts, in seconds."""


class Layer(nn.Module):
    """A linear layer with a residual path, which keeps values small over a thousand layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:  # [batch, width] -> [batch, width]
        return x + 1e-3 * self.linear(x)


def compute(model: nn.Module, batch: Tensor) -> None:
    model(batch).square().mean().backward()


def plain_steps(layers: int, width: int) -> Iterator[Times]:
    """Runs forward and backward without an update. All layers share the memory of one layer."""
    layer, batch = Layer(width), torch.ones(BATCH_SIZE, width)
    model = nn.Sequential(*[layer] * layers)
    while True:
        started = time.perf_counter()
        compute(model, batch)
        yield {"step_s": time.perf_counter() - started}
        layer.zero_grad()


def sharded_steps(layers: int, width: int, session: shardwell.Session) -> Iterator[Times]:
    """Runs steps with Shardwell, one unit per layer. Each layer is sharded before the next is created."""
    torch.manual_seed(0)
    model = nn.Sequential(*(shardwell.fully_shard(Layer(width), session) for _ in range(layers)))
    optimizer = shardwell.optim.SGD(model.parameters(), lr=1e-3)
    batch, before = torch.ones(BATCH_SIZE, width), session.stats()
    for step in session.steps(sys.maxsize):
        started = time.perf_counter()
        for _ in step.batches(lambda *_: batch):
            compute(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        seconds, after = time.perf_counter() - started, session.stats()
        spent = {name: after[name] - before[name] for name in after if name.endswith(("_wait_s", "ed_bytes"))}
        before = after
        yield {"step_s": seconds, **spent}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--trainers", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with shardwell.join(arguments.address, run="growth", world=shardwell.World(dp=arguments.trainers)) as session:
        plain = plain_steps(arguments.layers, arguments.width)
        sharded = sharded_steps(arguments.layers, arguments.width, session)
        kinds = {"plain": plain, "sharded": sharded}
        workers.serve(lambda command: {"times": [next(kinds[command["kind"]]) for _ in range(command["steps"])]})


if __name__ == "__main__":
    main()
