"""A trainer of ``benchmarks.unit_cost``. The command ``{"steps": n}`` runs n steps and returns their durations."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from torch import nn

import shardwell
from benchmarks import workers

BATCH_SIZE = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The model, and the task of one trainer."""

    units: int
    """Number of linear layers. Each is a unit."""
    width: int
    dp: int
    transport: str = ""
    """Name of the transport. Empty: train without Shardwell and without communication."""
    address: str = ""
    """Address of the coordinator."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def make_model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.units)))


def plain_steps(spec: UnitSpec) -> Iterator[None]:
    """Trains without Shardwell, one step per item."""
    model, batch = spec.make_model(), torch.ones(BATCH_SIZE, spec.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    while True:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def shardwell_steps(spec: UnitSpec) -> Iterator[None]:
    """Trains with Shardwell, one step per item."""
    transports = spec.transport if spec.transport != "shm" else "shm,socket"
    with shardwell.join(
        spec.address,
        run="unit-cost",
        world=shardwell.World(dp=spec.dp),
        transfers=shardwell.TransferOptions(transports=transports),
    ) as session:
        model, batch = spec.make_model(), torch.ones(BATCH_SIZE, spec.width)
        for layer in model:
            shardwell.fully_shard(layer, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for step in session.steps(sys.maxsize):
            for _ in step.batches(lambda *_: batch):
                model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def main() -> None:
    torch.set_num_threads(1)
    spec = UnitSpec(**json.loads(sys.argv[1]))
    steps = shardwell_steps(spec) if spec.transport else plain_steps(spec)

    def answer(command: dict[str, int]) -> dict[str, list[float]]:
        seconds = []
        for _ in itertools.repeat(None, command["steps"]):
            started = time.perf_counter()
            next(steps)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds}

    workers.serve(answer)
    steps.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
