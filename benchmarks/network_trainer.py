"""A trainer of ``benchmarks.slow_network`` and ``benchmarks.gradient_reduction``.

The command ``{"steps": n}`` runs n steps and returns their durations.

Every kind trains the same GPT from the same seed on the same batches, so that the losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import shardwell
from benchmarks import workers
from benchmarks.trainers import do_nothing, gather_one_block_ahead
from benchmarks.wire_options import WIRE_OPTIONS
from examples.gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


BASELINES = ("alone", "ddp", "fsdp2", "fsdp2-prefetch", "fsdp2-keep")
"""Kinds without Shardwell. ``alone`` does not communicate: it shows the time of computation with shared CPUs."""
KINDS = (*BASELINES, *(f"shardwell-{name}" for name in WIRE_OPTIONS))

Steps = Iterator[float]
"""An iterator that runs one step per item and yields its loss."""


def make_batch(config: GPTConfig, step: int, rank: int) -> Tensor:  # [1, context + 1]
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randint(config.vocab_size, (1, config.context + 1), generator=generator)


def compute(model: nn.Module, batch: Tensor) -> float:
    loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    return loss.item()


def baseline_steps(model: GPT, kind: str, rank: int) -> Steps:
    """Runs steps with a baseline, whose processes hold the state and communicate over gloo."""
    trained: nn.Module = model
    begin = do_nothing
    if kind == "alone":
        pass
    elif kind == "ddp":
        trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            # Kept weights travel once per step, as with Shardwell in this benchmark.
            fully_shard(part, mesh=mesh, reshard_after_forward=False if kind == "fsdp2-keep" else None)
        if kind != "fsdp2":
            begin = gather_one_block_ahead(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(sys.maxsize):
        begin()
        loss = compute(trained, make_batch(model.config, step, rank))
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def sharded_steps(model: GPT, session: shardwell.Session) -> Steps:
    """Runs steps with Shardwell: one unit per block and one for the rest."""
    config = model.config
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in session.steps(sys.maxsize):
        loss = float("nan")
        for batch in step.batches(lambda number, rank: make_batch(config, number, rank)):
            loss = compute(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def serve(steps: Steps) -> None:
    """Runs the requested steps until the input ends."""

    def answer(command: dict[str, Any]) -> dict[str, Any]:
        seconds, loss = [], float("nan")
        for _ in range(command["steps"]):
            started = time.perf_counter()
            loss = next(steps)
            seconds.append(time.perf_counter() - started)
        return {"seconds": seconds, "loss": loss}

    workers.serve(answer)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--address", required=True, help="address of the coordinator, or of rank 0 for gloo")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--num-trainers", type=int, required=True)
    parser.add_argument("--model", type=json.loads, required=True, help="GPTConfig as JSON")
    parser.add_argument("--gradient-reduction", default="direct")
    parser.add_argument("--reduction-groups", default="", help="sizes with commas, such as 2,2")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**arguments.model))
    if arguments.kind in BASELINES:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{arguments.address}",
            rank=arguments.rank,
            world_size=arguments.num_trainers,
        )
        serve(baseline_steps(model, arguments.kind, arguments.rank))
        return
    transfer = WIRE_OPTIONS[arguments.kind.removeprefix("shardwell-")]
    # All units stay gathered within a step, so that each weight travels once over the slow network.
    keep_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) + (64 << 20)
    with shardwell.join(
        arguments.address,
        run=arguments.kind,
        world=shardwell.World(dp=arguments.num_trainers),
        global_rank=arguments.rank,
        reduction_groups=tuple(map(int, filter(None, arguments.reduction_groups.split(",")))),
        transfers=shardwell.TransferOptions(
            keep_bytes=keep_bytes, gradient_reduction=arguments.gradient_reduction, **transfer.options()
        ),
    ) as session:
        serve(sharded_steps(model, session))


if __name__ == "__main__":
    main()
