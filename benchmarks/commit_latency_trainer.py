"""A trainer of ``benchmarks.commit_latency``. The command ``{"steps": n}`` runs n steps and returns their waits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import nn

import shardwell
from benchmarks import workers

WAITS = {"finish_wait_s": "FinishWork", "commit_wait_s": "CommitStep"}
"""Keys of ``session.stats()``, and the rpcs that they measure."""
FIRST_WEIGHTS = "first weights"


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """The model, and the run of a trainer."""

    units: int
    width: int
    dp: int
    address: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def train(spec: TrainerSpec) -> Iterator[dict[str, float]]:
    """Trains linear layers with SGD. Each item has the seconds that the trainer waited in a step, by reason."""
    world = shardwell.World(dp=spec.dp)
    with shardwell.join(spec.address, run="commit-latency", world=world) as session:
        layers = [shardwell.fully_shard(nn.Linear(spec.width, spec.width), session) for _ in range(spec.units)]
        model, first = nn.Sequential(*layers), cast(Any, layers[0])
        optimizer, batch = shardwell.optim.SGD(model.parameters(), lr=1e-3), torch.ones(4, spec.width)
        for step in session.steps(sys.maxsize):
            before, waits = session.stats(), {FIRST_WEIGHTS: 0.0}
            for _ in step.batches(lambda *_: batch):
                started = time.perf_counter()
                first.unshard()
                waits[FIRST_WEIGHTS] = time.perf_counter() - started
                model(batch).square().mean().backward()
            optimizer.step()
            after = session.stats()
            optimizer.zero_grad()
            yield waits | {rpc: after[key] - before[key] for key, rpc in WAITS.items()}


def main() -> None:
    torch.set_num_threads(1)
    steps = train(TrainerSpec(**json.loads(sys.argv[1])))
    workers.serve(lambda command: {"waits": [next(steps) for _ in range(command["steps"])]})
    steps.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
