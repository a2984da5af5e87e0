"""One trainer of ``benchmarks.slow_network``: the command ``{"steps": n}`` has it take n steps and tell their times.

Every kind trains the same GPT from the same seed on the same batches, so their losses can be compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional

import shardwell
from benchmarks import workers
from benchmarks.wire_choices import TRANSFERS
from examples.gpt import GPT, GPTConfig

ADAMW: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


PEERS = ("alone", "ddp", "fsdp2", "fsdp2-prefetch", "fsdp2-keep")
"""Without Shardwell; ``alone`` does not communicate: what computing itself takes when all share the CPUs."""
KINDS = (*PEERS, *(f"shardwell-{name}" for name in TRANSFERS))

Steps = Iterator[float]
"""Takes one step each time it is asked for the next; yields its loss."""


def make_batch(config: GPTConfig, step: int, rank: int) -> Tensor:  # [1, context + 1]
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    return torch.randint(config.vocab_size, (1, config.context + 1), generator=generator)


def compute(model: nn.Module, batch: Tensor) -> float:
    loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    return loss.item()


def peer_steps(model: GPT, kind: str, rank: int) -> Steps:
    """Steps of a model whose processes hold the state themselves and meet over gloo."""
    trained: nn.Module = model
    begin: Callable[[], object] = lambda: None  # noqa: E731
    if kind == "alone":
        pass
    elif kind == "ddp":
        trained = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for part in (*model.blocks, model):
            # Kept, weights travel once per step, as Shardwell's do here.
            fully_shard(part, mesh=mesh, reshard_after_forward=False if kind == "fsdp2-keep" else None)
        if kind != "fsdp2":
            begin = prefetch_explicitly(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(sys.maxsize):
        begin()
        loss = compute(trained, make_batch(model.config, step, rank))
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def prefetch_explicitly(model: GPT) -> Callable[[], object]:
    """Has FSDP2 gather one block ahead, the only way in which it overlaps on CPU; returns what begins a step."""
    assert isinstance(model, FSDPModule)
    blocks = [block for block in model.blocks if isinstance(block, FSDPModule)]
    model._set_unshard_async_op(True)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 2])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 1) : index])
    return lambda: (model.unshard(async_op=True), blocks[0].unshard(async_op=True))


def sharded_steps(model: GPT, session: shardwell.Session) -> Steps:
    """Steps through Shardwell: one unit per block, one for the rest."""
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
    """Takes the steps that are asked for until the input ends."""

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
    parser.add_argument("--address", required=True, help="the coordinator's, or where rank 0 of gloo listens")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--num-trainers", type=int, required=True)
    parser.add_argument("--model", type=json.loads, required=True, help="GPTConfig as JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**arguments.model))
    if arguments.kind in PEERS:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{arguments.address}",
            rank=arguments.rank,
            world_size=arguments.num_trainers,
        )
        serve(peer_steps(model, arguments.kind, arguments.rank))
        return
    transfer = TRANSFERS[arguments.kind.removeprefix("shardwell-")]
    # Everything stays gathered within a step: on a slow network each weight shall travel once.
    keep_bytes = 4 * sum(parameter.numel() for parameter in model.parameters()) + (64 << 20)
    with shardwell.join(
        arguments.address,
        run=arguments.kind,
        world=shardwell.World(dp=arguments.num_trainers),
        global_rank=arguments.rank,
        transfers=shardwell.TransferOptions(keep_bytes=keep_bytes, **transfer.options()),
    ) as session:
        serve(sharded_steps(model, session))


if __name__ == "__main__":
    main()
