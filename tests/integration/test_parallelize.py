"""``parallelize`` divides, shards and trains a model as one process does, in every kind of world."""

from __future__ import annotations

import logging
import uuid
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from examples.gpt import GPT, GPTConfig
from shardwell.parallel import TensorParallelOptions, parallelize, split_model
from shardwell_wire.errors import TiedParameterError, UsageError
from tests.support import gloo
from tests.support.processes import run_ranks
from tests.support.split_gpt import loss_of

MICRO_BATCHES, BATCH, STEPS, LENGTH, VOCABULARY = 4, 8, 3, 6, 32
VALIDATION = 1000
"""Number of the validation batch."""


def gpt(*, tied: bool = False) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "context": LENGTH, "num_layers": 4, "num_heads": 2, "width": 12}
    return GPT(GPTConfig(**sizes, tied=tied))


def batch(step: int, dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def evaluate(model: nn.Module) -> torch.Tensor:
    """Returns the mean loss of a plain model on the validation batch."""
    with torch.no_grad():
        parts = zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(VALIDATION, 0)), strict=True)
        return torch.stack([loss_of(model(tokens), targets) for tokens, targets in parts]).mean()


def reference(dp: int) -> tuple[nn.Module, list[list[torch.Tensor]], list[torch.Tensor]]:
    """Returns a plain model after training, its losses by step and dp rank, and its validation losses before steps."""
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses: list[list[torch.Tensor]] = []
    validation = []
    for step in range(STEPS):
        means, losses = [], [*losses, []]
        validation.append(evaluate(model))
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
    return model, losses, [*validation, evaluate(model)]


def train(session: shardwell.Session, model: nn.Module, schedule: str, tp: TensorParallelOptions) -> Any:
    """The script of ``docs/parallelism.md``, with evaluations.

    Returns losses of this trainer, means over the data ranks, and validation losses in each step and after it.
    """
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
    (tokens, targets), losses, means = batch(VALIDATION, 0), list[Any](), []
    validation = [parallel.schedule.eval(tokens, target=targets)]
    for step in session.steps(STEPS):
        for tokens, targets in step.batches(batch):
            inputs, wanted = batch(VALIDATION, 0)
            validation.append(parallel.schedule.eval(inputs, target=wanted))
            losses.append(parallel.schedule.step(tokens, target=targets))
            step.log(loss=losses[-1], samples=len(tokens))
        optimizer.step()
        optimizer.zero_grad()
        means.append(dict(step.means))
        validation.append(parallel.schedule.eval(inputs, target=wanted))
    assert "GPT in" in parallel.describe() and f"{schedule}, {MICRO_BATCHES} micro-batches" in parallel.describe()
    return losses, means, validation


def worker(
    rank: int, address: str, run: str, sizes: tuple[int, int, int], schedule: str, tp: TensorParallelOptions
) -> None:
    world = shardwell.World(*sizes)
    with shardwell.join(address, run=run, world=world, global_rank=rank, host="here") as session:
        options: TensorParallelOptions = {"fused_by_head": True, **tp}
        losses, means, validation = session.run_replica(lambda session: train(session, gpt(), schedule, options))
        expected, expected_losses, expected_validation = reference(world.dp)
        tolerance = 0.0 if world.tp == 1 else 1e-6  # a matrix product in parts rounds differently
        for found, wanted in zip(losses, expected_losses, strict=True):
            if found is not None:
                torch.testing.assert_close(found, wanted[session.dp_rank or 0], rtol=tolerance, atol=tolerance)
        repeated = [value for value in expected_validation for _ in range(2)][1:]  # after a step, and in the next one
        for found, value in zip(validation, [expected_validation[0], *repeated[:-1]], strict=True):
            if found is not None:
                torch.testing.assert_close(found, value, rtol=tolerance, atol=tolerance)
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
        pytest.param((1, 2, 2), "1F1B", {"sequence_parallel": True}, marks=pytest.mark.long),
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
        with pytest.raises(TiedParameterError, match="tied over the stages 0, 1, of which one trainer runs two"):
            parallelize(gpt(tied=True), session, example=short, schedule="ZBVZeroBubble", **options)
        with pytest.raises(UsageError, match=r"the split has 2 stages, but 1F1B.* needs 1"):
            parallelize(gpt(), session, example=short, split=split_model(gpt(), 2), **options)
    gloo.leave()


def test_parallelize_refuses_what_cannot_work_before_a_step(cluster: shardwell.LocalCluster) -> None:
    run_ranks(refused_worker, cluster.address, uuid.uuid4().hex)


def undivided_worker(rank: int, address: str, run: str, folder: Path) -> None:
    """Trains a model of which both ranks compute the same, and notes the warnings of this rank."""
    logging.getLogger().addHandler(handler := logging.FileHandler(folder / str(rank)))
    with shardwell.join(address, run=run, world=shardwell.World(tp=2), global_rank=rank, host="here") as session:
        model = nn.Linear(3, 1)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for step in session.steps(2):
            for x in step.batches(lambda step, dp_rank: torch.full((2, 3), float(step))):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    handler.close()
    gloo.leave()


def test_tensor_parallel_ranks_that_divide_nothing_are_one_warning(
    cluster: shardwell.LocalCluster, tmp_path: Path
) -> None:
    run_ranks(undivided_worker, cluster.address, uuid.uuid4().hex, tmp_path)
    logged = "".join((tmp_path / str(rank)).read_text() for rank in range(2))
    assert logged.count("but no layer of the model is divided: the 2 tensor-parallel ranks") == 1


class HeadFirst(nn.Module):
    """A model of features, not tokens, that defines its head before its blocks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        whole = gpt()
        self.head, self.input = whole.head, nn.Linear(5, 12)
        self.blocks, self.norm = whole.blocks, whole.norm

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = self.input(features)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def example_worker(rank: int, address: str, run: str) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(tp=2, pp=2), global_rank=rank, host="here") as session:
        example, tp = torch.empty(BATCH, LENGTH, 5, device="meta"), TensorParallelOptions(fused_by_head=True)
        parallel = parallelize(HeadFirst(), session, loss=loss_of, example=example, micro_batches=MICRO_BATCHES, tp=tp)
        assert [stage.calls[0] for stage in parallel.split.stages] == ["input", "blocks.2"]
    gloo.leave()


def test_the_example_tells_inputs_and_order_of_the_forward(cluster: shardwell.LocalCluster) -> None:
    run_ranks(example_worker, cluster.address, uuid.uuid4().hex, count=4)


def accumulating_worker(
    rank: int, address: str, run: str, sizes: tuple[int, int, int], tied: bool, together: bool
) -> None:
    with shardwell.join(address, run=run, world=shardwell.World(*sizes), global_rank=rank, host="here") as session:
        tp: TensorParallelOptions = {"fused_by_head": True}
        example = torch.empty(BATCH // 2, LENGTH, dtype=torch.int64, device="meta")
        parallel = parallelize(
            gpt(tied=tied), session, loss=half_loss, example=example, micro_batches=MICRO_BATCHES, tp=tp
        )
        optimizer, schedule = shardwell.optim.AdamW(parallel.parameters(), lr=0.01), parallel.schedule
        for step in session.steps(STEPS):
            for tokens, targets in step.batches(batch):
                first, second = zip(tokens.chunk(2), targets.chunk(2), strict=True)
                with schedule.no_sync() if together else nullcontext():
                    schedule.step(first[0], target=first[1])
                schedule.step(second[0], target=second[1])
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        stats, calls = session.stats(), 1 if together else 2
        own = [unit for unit in session.units if unit.pushes]
        assert stats["push_count"] == calls * STEPS * len(own)
        assert stats["live_unit_bytes"] == 0
    gloo.leave()


def half_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return loss_of(logits, targets) / 2


@pytest.mark.parametrize(
    ("sizes", "tied"), [((2, 1, 2), True), pytest.param((1, 2, 2), False, marks=pytest.mark.long)], ids=str
)
def test_calls_without_a_push_between_them_give_the_same_bits(
    cluster: shardwell.LocalCluster, sizes: tuple[int, int, int], tied: bool
) -> None:
    weights = []
    for together in (False, True):
        run = uuid.uuid4().hex
        run_ranks(
            accumulating_worker, cluster.address, run, sizes, tied, together, count=sizes[0] * sizes[1] * sizes[2]
        )
        plain = gpt(tied=tied)
        with shardwell.attach(cluster.address, run=run) as reader:
            reader.follow(plain)
        weights.append(plain.state_dict())
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
