"""A trainer of a grid, for tests.

``python -m tests.support.grid_trainer --address A --run R DP TP PP STEPS FOLDER [--device meta] [--resume URL]
[--trainers N] [--on-trainers]``

Tensor parallelism is torch's. The pipeline is written out: each stage runs its forward and its backward once per batch.
With ``--on-trainers``, the trainers run the optimizer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwell
from tests.support import gloo

WIDTH, HIDDEN, CLASSES, BATCH, MAX_NORM = 8, 12, 5, 4, 0.5
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    """A residual block with a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def reset_parameters(self) -> None:
        self.mean.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
        return x + self.down(self.up(self.norm(x)).tanh())


class Model(nn.Module):
    """Blocks by name, and a head on the last stage. A stage lacks the blocks of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(4)})
        self.head: nn.Module | None = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)


def build(device: str, *, pp: int = 1, pp_rank: int = 0, mesh: DeviceMesh | None = None) -> Model:
    """Returns one stage of the model, split over a mesh of tensor-parallel ranks if there is one."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Model()
    count = len(model.blocks) // pp
    for number in range(len(model.blocks)):
        if number // count != pp_rank:
            del model.blocks[str(number)]
    if pp_rank < pp - 1:
        model.head = None
    for block in model.blocks.values() if mesh is not None else ():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and classes of a work item."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randn(BATCH, WIDTH, generator=generator), torch.randint(CLASSES, (BATCH,), generator=generator)


def compute(model: Model, step: int, dp_rank: int, neighbours: tuple[int | None, int | None]) -> float | None:
    """Runs forward and backward of one stage. Returns the loss on the last stage."""
    (before, after), (inputs, classes) = neighbours, batch(step, dp_rank)
    if before is not None:
        inputs = torch.empty(BATCH, WIDTH)
        dist.recv(inputs, before)
        inputs.requires_grad_()
    output = model(inputs)
    loss = None
    if after is None:
        loss = nn.functional.cross_entropy(output, classes)
        loss.backward()
    else:
        dist.send(output.detach(), after)
        gradient = torch.empty_like(output)
        dist.recv(gradient, after)
        output.backward(gradient)
    if before is not None:
        assert inputs.grad is not None
        dist.send(inputs.grad, before)
    return None if loss is None else loss.item()


def join_replica(session: shardwell.Session, folder: str) -> DeviceMesh:
    """Forms the process group of this trainer's replica."""
    world, place = session.world, session.units.place
    store = dist.FileStore(f"{folder}/replica{session.dp_rank}", world.tp * world.pp)
    rank = place.tp_rank * world.pp + place.pp_rank
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.tp * world.pp)
    return init_device_mesh("cpu", (world.tp, world.pp), mesh_dim_names=("tp", "pp"))


def make_optimizer(parameters: Iterable[nn.Parameter], *, on_trainers: bool) -> Any:
    """Returns AdamW on the servers, with moving averages, or on the trainers."""
    if on_trainers:
        return shardwell.ClientSide(parameters, torch.optim.AdamW, **OPTIMIZER)
    optimizer = shardwell.optim.AdamW(parameters, **OPTIMIZER)
    optimizer.ema_decay = 0.5
    return optimizer


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--address")
    parser.add_argument("--run")
    for name in ("dp", "tp", "pp", "steps"):
        parser.add_argument(name, type=int)
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--resume")
    parser.add_argument("--trainers", type=int)
    parser.add_argument("--on-trainers", action="store_true")
    options = parser.parse_args()
    world, folder = shardwell.World(options.dp, options.tp, options.pp), options.folder
    waits = shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(
        options.address,
        run=options.run,
        world=world,
        min_trainers=options.trainers,
        seed=7,
        checkpoint_dir=f"{folder}/checkpoints",
        resume=options.resume,
        waits=waits,
    ) as session:
        mesh, place = join_replica(session, folder), session.units.place
        model = build(options.device, pp=world.pp, pp_rank=place.pp_rank, mesh=mesh["tp"] if world.tp > 1 else None)
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({Block}))
        optimizer = make_optimizer(model.parameters(), on_trainers=options.on_trainers)
        rank = dist.get_rank()
        neighbours = (rank - 1 if place.pp_rank else None, rank + 1 if place.pp_rank < world.pp - 1 else None)
        norms = []
        for step in session.steps(options.steps):
            for item in step.batches(lambda step, dp_rank: (step, dp_rank)):
                compute(model, *item, neighbours)
            norms.append(float(optimizer.clip_grad_norm_(MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()  # before a commit, units of other ranks may lack values
        if session.global_rank == 0 and session.step:
            session.save_checkpoint(wait=True)
        stats = session.stats()
        print(json.dumps({"rank": session.global_rank, "norms": norms, "pushed_bytes": stats["pushed_bytes"]}))
    gloo.leave()


if __name__ == "__main__":
    main()
