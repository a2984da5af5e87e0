"""A trainer of ``benchmarks.unit_cost``. The command ``{"steps": n}`` runs n steps and returns their durations."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import shardwell
from benchmarks import workers

PLAIN, HOOKS, DDP = "plain", "hooks", "ddp"
BASELINES = (PLAIN, HOOKS, DDP)
BATCH_SIZE = 4
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The model, and the task of one trainer."""

    units: int
    """Number of linear layers. Each is a unit."""
    width: int
    dp: int
    variant: str = PLAIN
    """``plain``, ``hooks``, ``ddp`` or the name of a transport."""
    address: str = ""
    """Address of the coordinator, or the store of ``torch.distributed``."""
    rank: int = 0
    """Rank of the trainer. With Shardwell, the coordinator assigns it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def make_model(self) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(self.width, self.width) for _ in range(self.units)))


def baseline_steps(spec: UnitSpec) -> Iterator[torch.Tensor]:
    """Trains without Shardwell. Each item is the loss of a step."""
    layers, batch = spec.make_model(), torch.ones(BATCH_SIZE, spec.width)
    model: nn.Module = layers
    if spec.variant == HOOKS:
        for layer in layers:
            _add_empty_hooks(layer)
    elif spec.variant == DDP:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group("gloo", init_method=spec.address, rank=spec.rank, world_size=spec.dp)
        model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    while True:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def _add_empty_hooks(layer: nn.Module) -> None:
    """Adds the hooks that a sharded module needs at least: around the forward, before and after the backward."""

    def after_forward(_: nn.Module, __: object, output: torch.Tensor) -> None:
        output.register_hook(lambda _: None)

    layer.register_forward_pre_hook(lambda _, __: None)
    layer.register_forward_hook(after_forward)
    for parameter in layer.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)


def shardwell_steps(spec: UnitSpec) -> Iterator[torch.Tensor]:
    """Trains with Shardwell. Each item is the loss of a step."""
    transports = spec.variant if spec.variant != "shm" else "shm,socket"
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
            loss = torch.tensor(torch.nan)  # of a step in which another trainer computed this rank's item
            for _ in step.batches(lambda *_: batch):
                loss = model(batch).square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()


def answer_steps(steps: Iterator[torch.Tensor]) -> Callable[[dict[str, int]], dict[str, Any]]:
    """Returns the function that answers ``{"steps": n}``: the durations of n steps, and the loss of the last one."""

    def answer(command: dict[str, int]) -> dict[str, Any]:
        seconds = []
        loss = torch.tensor(torch.nan)
        for _ in itertools.repeat(None, command["steps"]):
            started = time.perf_counter()
            loss = next(steps)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "loss": loss.item()}

    return answer


def main() -> None:
    torch.set_num_threads(1)
    spec = UnitSpec(**json.loads(sys.argv[1]))
    steps = baseline_steps(spec) if spec.variant in BASELINES else shardwell_steps(spec)
    workers.serve(answer_steps(steps))
    steps.close()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
