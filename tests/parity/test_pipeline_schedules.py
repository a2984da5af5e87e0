"""Sharded pipeline stages against one process that accumulates the same micro-batches: every schedule, to the bit."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from examples.gpt import GPT, GPTConfig
from shardwell import MixedPrecisionPolicy, auto_wrap
from shardwell.parallel import SCHEDULES, PipelineSchedule, PipelineStage, SchedulePlan, split_model
from shardwell_wire.errors import ReplicaLostError, UsageError
from tests.support import gloo
from tests.support.in_memory_store import InMemoryStore
from tests.support.module_parity import Sharded
from tests.support.processes import run_ranks

MICRO_BATCHES, BATCH, LENGTH, VOCABULARY, STEPS = 4, 8, 5, 31, 3


def gpt() -> Any:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=4, num_heads=2, width=12))
    model.head = nn.Linear(12, VOCABULARY, bias=False)
    return model


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def reference(model: nn.Module, schedule: str) -> list[torch.Tensor]:
    """Trains a plain model in place. Returns the mean loss of each step."""
    optimizer, losses = sgd(model.parameters()), []
    for step in range(STEPS):
        found = {}
        parts = list(enumerate(zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(step)), strict=True)))
        for number, (tokens, targets) in reversed(parts) if schedule == "LoopedBFS" else parts:
            loss = loss_of(model(tokens), targets)
            loss.backward()
            found[number] = loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO_BATCHES)
        losses.append(torch.stack([found[number] for number in range(MICRO_BATCHES)]).mean())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Trainer:
    """The stages of one process, each sharded to the same store, and their schedule."""

    def __init__(
        self, rank: int, schedule: str, model: Any, *, pp: int = 2, dtype: torch.dtype | None = None, **options: Any
    ) -> None:
        self.plan = SchedulePlan(schedule=schedule, pp=pp, num_micro_batches=MICRO_BATCHES)
        split = split_model(model, self.plan.num_stages)
        tokens = torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64)
        self.examples = split.examples(tokens, dtype=dtype)
        self.modules = nn.ModuleList(split.module(index) for index in self.plan.stages_of(rank))
        self.store = InMemoryStore(make_optimizer=sgd)
        self.sharded = Sharded(self.modules, lambda _, session: self._wrap(session, **options), store=self.store)
        stages = [
            PipelineStage(module, index, self.plan.num_stages, "cpu", example=self.examples[index])
            for index, module in zip(self.plan.stages_of(rank), self.modules, strict=True)
        ]
        self.schedule = PipelineSchedule(self.plan, stages, loss_of)

    def _wrap(self, session: Any, **options: Any) -> None:
        for module in self.modules:
            auto_wrap(module, session, **options)

    def state(self) -> dict[str, torch.Tensor]:
        return self.store.values()


def worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plain = gpt()
    expected = reference(plain, schedule)
    trainer = Trainer(rank, schedule, gpt())
    for step in range(STEPS):
        tokens, targets = batch(step)
        torch.manual_seed(step)
        loss = trainer.schedule.step(tokens, target=targets)
        assert (loss is not None) == (trainer.plan.num_stages - 1 in trainer.plan.stages_of(rank))
        assert loss is None or torch.equal(loss, expected[step]), f"step {step}: {loss} instead of {expected[step]}"
        names = {unit.name for unit in trainer.sharded.units}
        assert trainer.store.pushes == Counter(dict.fromkeys(names, step + 1)), "one push per unit and step"
        assert trainer.store.gathers == Counter(dict.fromkeys(names, step + 1)), "one gather per unit and step"
        assert trainer.sharded.units.live_bytes == 0, "a stage frees its units when it is done"
        trainer.sharded.step()
    state = plain.state_dict()
    for name, value in trainer.state().items():
        assert torch.equal(value, state[name]), name
    gloo.leave()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_as_one_process_that_accumulates(tmp_path: Path, schedule: str) -> None:
    run_ranks(worker, str(tmp_path / "store"), schedule)


def mixed_worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    trainer = Trainer(rank, schedule, gpt(), dtype=torch.bfloat16, mp_policy=policy)
    before = trainer.state()
    trainer.schedule.step(batch(0)[0], target=batch(0)[1])
    trainer.sharded.step()
    plain = gpt()
    for tokens, targets in zip(*(whole.chunk(MICRO_BATCHES) for whole in batch(0)), strict=True):
        loss_of(plain(tokens), targets).backward()
    gradients = {name: parameter.grad / MICRO_BATCHES for name, parameter in plain.named_parameters()}
    for name, value in trainer.state().items():
        update = (before[name] - value) / 0.1
        error = (update - gradients[name]).norm() / gradients[name].norm()
        assert error < 0.05, f"{name}: the update is off by {error:.1%}"
    gloo.leave()


@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_gradients_that_are_summed_apart_are_divided(tmp_path: Path, schedule: str) -> None:
    run_ranks(mixed_worker, str(tmp_path / "store"), schedule)


def wrong_values_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 1), rank=rank, world_size=1)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    trainer = Trainer(rank, "LoopedBFS", gpt(), pp=1, mp_policy=policy)
    with pytest.raises(UsageError, match="a batch of 7 samples cannot be divided into 4 micro-batches"):
        trainer.schedule.step(batch(0)[0][:7], target=batch(0)[1][:7])
    with pytest.raises(UsageError, match=r"stage 0 sends \[2, 5, 12\] of bfloat16.* expects \[2, 5, 12\] of float32"):
        trainer.schedule.step(batch(0)[0], target=batch(0)[1])
    gloo.leave()


def test_values_that_the_next_stage_does_not_expect_are_refused(tmp_path: Path) -> None:
    run_ranks(wrong_values_worker, str(tmp_path / "store"), count=1)


class Noisy(nn.Module):
    """Remembers the masks of its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.masks: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.append(functional.dropout(torch.ones(4), 0.5))
        return self.norm(self.linear(x) * self.masks[-1])


def noisy_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    masks: dict[str, dict[int, torch.Tensor]] = {}
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"):
        plan = SchedulePlan(schedule=schedule, pp=2, num_micro_batches=MICRO_BATCHES)
        torch.manual_seed(0)
        model = nn.Sequential(*(Noisy() for _ in range(4)))
        split = split_model(model, plan.num_stages)
        examples = split.examples(torch.zeros(2, 4))
        assert all(int(layer.norm.num_batches_tracked) == 0 for layer in model)  # type: ignore[arg-type, union-attr]
        stages = [
            PipelineStage(split.module(index), index, plan.num_stages, "cpu", example=examples[index])
            for index in plan.stages_of(rank)
        ]
        torch.manual_seed(11)
        state = torch.get_rng_state()
        run = PipelineSchedule(plan, stages, functional.mse_loss)
        run.step(torch.randn(8, 4), target=torch.randn(8, 4))
        run.eval(torch.randn(8, 4), target=torch.randn(8, 4))  # leaves statistics alone
        torch.manual_seed(11)
        assert torch.equal(torch.get_rng_state(), state)
        for stage in stages:
            for module in stage.submod.modules():
                if isinstance(module, Noisy):
                    assert int(module.norm.num_batches_tracked) == MICRO_BATCHES, "each micro-batch counts once"  # type: ignore[arg-type]
            if stage.num_stages == 4 and stage.stage_index in (0, 1):
                layer = next(module for module in stage.submod.modules() if isinstance(module, Noisy))
                masks.setdefault(schedule, {})[stage.stage_index] = torch.stack(
                    layer.masks[-2 * MICRO_BATCHES :][:MICRO_BATCHES]
                )
    interleaved, v_shaped = masks["Interleaved1F1B"], masks["ZBVZeroBubble"]
    assert interleaved.keys() == v_shaped.keys() == {rank}
    assert torch.equal(interleaved[rank], v_shaped[rank]), "masks depend on stage and micro-batch only"
    gathered = [torch.empty(MICRO_BATCHES, 4) for _ in range(2)]
    dist.all_gather(gathered, interleaved[rank])
    rows = torch.cat(gathered)
    assert len({tuple(row.tolist()) for row in rows}) > 4, "stages and micro-batches have masks of their own"
    gloo.leave()


def test_random_numbers_and_statistics_do_not_depend_on_the_schedule(tmp_path: Path) -> None:
    run_ranks(noisy_worker, str(tmp_path / "store"))


def lost_worker(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    trainer = Trainer(rank, "1F1B", gpt())
    trainer.schedule.step(batch(0)[0], target=batch(0)[1])
    if rank == 1:
        os._exit(0)
    with pytest.raises(ReplicaLostError, match="a trainer of this replica was lost"):
        for step in range(1, 3):
            trainer.schedule.step(batch(step)[0], target=batch(step)[1])
    assert trainer.sharded.units.live_bytes == 0, "all units are freed"
    trainer.sharded.units.zero_grad()
    assert not trainer.sharded.units.have_gradients
    os._exit(0)


def test_lost_trainer_is_reported_as_such(tmp_path: Path) -> None:
    run_ranks(lost_worker, str(tmp_path / "store"))
