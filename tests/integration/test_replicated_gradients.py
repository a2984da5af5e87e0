"""Tensor-parallel ranks compute the same gradients of what all of them hold, and a difference is an event."""

from __future__ import annotations

import uuid

import pytest
import torch
from torch.nn import functional

import shardwell
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel
from tests.support import gloo
from tests.support.cluster import events
from tests.support.processes import run_ranks

STEPS, LENGTH, VOCABULARY, WRONG_STEP = 3, 6, 30, 1


def worker(rank: int, address: str, run: str, tp: int, sequence_parallel: bool, wrong_rank: int | None) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(tp=tp), global_rank=rank, host="here") as session:
        mesh = session.replica_mesh()
        torch.manual_seed(0)
        sizes = GPTConfig(
            vocab_size=VOCABULARY, context=LENGTH, num_layers=2, num_heads=6, width=24, tied=not sequence_parallel
        )
        plan = plan_tensor_parallel(GPT(sizes), tp, fused_by_head=True, sequence_parallel=sequence_parallel)
        torch.manual_seed(0)
        model = shardwell.auto_wrap(plan.apply(GPT(sizes), mesh["tp"]), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        step_number = -1

        def change(gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2 if rank == wrong_rank and step_number >= WRONG_STEP else gradient

        model.blocks[1].mlp_norm.weight.register_hook(change)
        for step in session.steps(STEPS):
            step_number = step.number
            for tokens, targets in step.batches(batch):
                loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    gloo.leave()


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (4, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def train(address: str, tp: int, *, sequence_parallel: bool = False, wrong_rank: int | None = None) -> str:
    run = uuid.uuid4().hex
    run_ranks(worker, address, run, tp, sequence_parallel, wrong_rank, count=tp)
    return run


def differences(address: str, run: str) -> list[str]:
    return [event.message for event in events(address, run) if event.kind == "gradients_differ"]


def test_a_wrong_gradient_of_one_rank_is_reported_and_does_not_count(cluster: shardwell.LocalCluster) -> None:
    right, wrong = train(cluster.address, 2), train(cluster.address, 2, wrong_rank=1)
    assert differences(cluster.address, right) == []
    (message,) = differences(cluster.address, wrong)
    assert message.startswith(f"step {WRONG_STEP}: tensor-parallel ranks of dp rank 0, pipeline rank 0, computed")
    assert "of unit 'blocks.1' that all of them hold: 'blocks.1.mlp_norm.weight': rank 1 (trainer" in message
    found = []
    for run in (right, wrong):
        with shardwell.attach(cluster.address, run=run) as reader, reader.pin() as pinned:
            found.append(dict(pinned.values()))
    assert all(torch.equal(found[1][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("tp", [2, 3])
def test_sequence_parallel_ranks_reduce_to_the_same_bits(cluster: shardwell.LocalCluster, tp: int) -> None:
    """Each rank has a part of a norm's gradient. Their all-reduce gives the same bits on every rank."""
    assert differences(cluster.address, train(cluster.address, tp, sequence_parallel=True)) == []
