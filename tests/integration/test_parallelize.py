"""``parallelize`` divides, shards and trains a model as one process does, in every kind of world."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import TensorParallelOptions, parallelize
from shardwell_wire.errors import UsageError
from tests.support import gloo
from tests.support.processes import run_ranks
from tests.support.split_gpt import loss_of

MICRO_BATCHES, BATCH, STEPS, LENGTH, VOCABULARY = 4, 8, 3, 6, 32


def gpt() -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "context": LENGTH, "num_layers": 4, "num_heads": 2, "width": 12}
    return GPT(GPTConfig(**sizes, tied=False))


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def reference(dp: int) -> tuple[nn.Module, list[list[torch.Tensor]]]:
    """Returns a plain model after training, and its losses by step and dp rank."""
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses: list[list[torch.Tensor]] = []
    for step in range(STEPS):
        means, losses = [], [*losses, []]
        for dp_rank in range(dp):
            found = []
            for tokens, targets in zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(step, dp_rank)), strict=True):
                loss = loss_of(model(tokens), targets)
                loss.backward()
                found.append(loss.detach())
            means.append([parameter.grad / MICRO_BATCHES for parameter in model.parameters()])  # type: ignore[operator]
            optimizer.zero_grad()
            losses[-1].append(torch.stack(found).mean())
        for parameter, *gradients in zip(model.parameters(), *means, strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / dp
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def train(session: shardwell.Session, model: nn.Module, schedule: str, tp: TensorParallelOptions) -> Any:
    """The script of ``docs/parallelism.md``. Returns the losses of this trainer, and the means over the data ranks."""
    parallel = parallelize(
        model,
        session,
        loss=loss_of,
        example=torch.empty(BATCH, LENGTH, dtype=torch.int64, device="meta"),
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        tp=tp,
    )
    optimizer = shardwell.optim.SGD(parallel.parameters(), lr=0.1)
    losses, means = [], []
    for step in session.steps(STEPS):
        for tokens, targets in step.batches(batch):
            losses.append(parallel.schedule.step(tokens, target=targets))
            step.log(loss=losses[-1], samples=len(tokens))
        optimizer.step()
        optimizer.zero_grad()
        means.append(dict(step.means))
    assert "GPT in" in parallel.describe() and f"{schedule}, {MICRO_BATCHES} micro-batches" in parallel.describe()
    return losses, means


def worker(
    rank: int, address: str, run: str, sizes: tuple[int, int, int], schedule: str, tp: TensorParallelOptions
) -> None:
    world = shardwell.World(*sizes)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        options: TensorParallelOptions = {"fused_by_head": True, **tp}
        losses, means = session.run_replica(lambda session: train(session, gpt(), schedule, options))
        expected, expected_losses = reference(world.dp)
        tolerance = 0.0 if world.tp == 1 else 1e-6  # a matrix product in parts rounds differently
        for found, wanted in zip(losses, expected_losses, strict=True):
            if found is not None:
                torch.testing.assert_close(found, wanted[session.dp_rank or 0], rtol=tolerance, atol=tolerance)
        for found, wanted in zip(means, expected_losses, strict=True):
            mean = sum(float(loss) for loss in wanted) / world.dp
            assert found == {"loss": pytest.approx(mean, rel=tolerance, abs=tolerance), "samples": BATCH}
        if rank == 0:
            plain = gpt()
            with shardwell.attach(address, run=run) as reader:
                reader.follow(plain)
            for (name, value), other in zip(plain.named_parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(value, other, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")
    gloo.leave()


@pytest.mark.parametrize(
    ("sizes", "schedule", "tp"),
    [
        ((1, 1, 1), "1F1B", {}),
        ((2, 1, 2), "ZBVZeroBubble", {}),
        ((1, 2, 2), "1F1B", {"sequence_parallel": True}),
        ((1, 2, 2), "Interleaved1F1B", {"sequence_parallel": True, "vocabulary": False}),
    ],
    ids=str,
)
def test_parallelize_trains_as_one_process(
    cluster: shardwell.LocalCluster, sizes: tuple[int, int, int], schedule: str, tp: TensorParallelOptions
) -> None:
    count = sizes[0] * sizes[1] * sizes[2]
    run_ranks(worker, cluster.address, uuid.uuid4().hex, sizes, schedule, tp, count=count)


def refused_worker(rank: int, address: str, run: str) -> None:
    world = shardwell.World(tp=2)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        options: dict[str, Any] = {"loss": loss_of, "micro_batches": MICRO_BATCHES}
        short = torch.zeros(BATCH, LENGTH - 1, dtype=torch.int64)
        with pytest.raises(UsageError, match="schedule='2F2B': expected one of GPipe"):
            parallelize(gpt(), session, example=short, schedule="2F2B", **options)
        with pytest.raises(UsageError, match="6 samples cannot be divided into 4 micro-batches"):
            parallelize(gpt(), session, example=short[:6], **options)
    gloo.leave()


def test_parallelize_refuses_what_cannot_work_before_a_step(cluster: shardwell.LocalCluster) -> None:
    run_ranks(refused_worker, cluster.address, uuid.uuid4().hex)
