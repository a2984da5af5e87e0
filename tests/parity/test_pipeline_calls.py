"""Other calls of a pipeline's schedule, to the bit: evaluation, outputs, keyword arguments, accumulation."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwell.parallel import SCHEDULES, ModelSplit, PipelineSchedule, PipelineStage, SchedulePlan
from shardwell.parallel.splitting import StageExample
from shardwell_wire.errors import UsageError
from tests.parity.test_pipeline_schedules import BATCH, MICRO_BATCHES, STEPS, Trainer, batch, gpt, loss_of, sgd
from tests.support import gloo
from tests.support.processes import run_ranks


def micro_batches(*tensors: torch.Tensor, reverse: bool = False) -> list[tuple[torch.Tensor, ...]]:
    parts = list(zip(*(whole.chunk(MICRO_BATCHES) for whole in tensors), strict=True))
    return parts[::-1] if reverse else parts


def evaluate(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean loss and outputs of a plain model."""
    model.eval()
    with torch.no_grad():
        outputs = [model(part) for (part,) in micro_batches(tokens)]
        losses = [loss_of(output, part) for output, part in zip(outputs, targets.chunk(MICRO_BATCHES), strict=True)]
    model.train()
    return torch.stack(losses).mean(), torch.cat(outputs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, calls: list[Any], schedule: str) -> None:
    """One step of a plain model. Its gradient is the sum of the mean gradients of several calls."""
    totals: dict[nn.Parameter, torch.Tensor] = {}
    for tokens, targets in calls:
        for part, wanted in micro_batches(tokens, targets, reverse=schedule == "LoopedBFS"):
            loss_of(model(part), wanted).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            mean = parameter.grad / MICRO_BATCHES
            totals[parameter] = totals[parameter] + mean if parameter in totals else mean
            parameter.grad = None
    for parameter, total in totals.items():
        parameter.grad = total
    optimizer.step()
    optimizer.zero_grad()


def compare(trainer: Trainer, plain: nn.Module) -> None:
    state = plain.state_dict()
    for name, value in trainer.state().items():
        assert torch.equal(value, state[name]), name


def evaluating_worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plain, trainer = gpt(), Trainer(rank, schedule, gpt())
    optimizer, run = sgd(plain.parameters()), trainer.schedule
    units, store = trainer.sharded.units, trainer.store
    has_last = trainer.plan.num_stages - 1 in trainer.plan.stages_of(rank)
    names = {unit.name for unit in units}
    for step in range(STEPS):
        tokens, targets = batch(100 + step)
        expected, outputs = evaluate(plain, tokens, targets)
        state = torch.get_rng_state()
        found = run.eval(tokens, target=targets if has_last else None, return_outputs=True)
        assert torch.equal(torch.get_rng_state(), state)
        if has_last:
            assert torch.equal(found[0], expected) and torch.equal(found[1], outputs) and not found[1].requires_grad
        else:
            assert found == (None, None)
        assert units.live_bytes == 0 and not units.have_gradients
        assert store.gathers == Counter(dict.fromkeys(names, 2 * step + 1)), "an evaluation gathers each unit once"
        tokens, targets = batch(step)
        run.step(tokens, target=targets if has_last else None)
        assert store.gathers == Counter(dict.fromkeys(names, 2 * step + 2)), "and a step does"
        assert store.pushes == Counter(dict.fromkeys(names, step + 1)), "an evaluation pushes nothing"
        assert all(module.training for module in trainer.modules.modules())
        trainer.sharded.step()
        train(plain, optimizer, [(tokens, targets)], schedule)
    compare(trainer, plain)
    gloo.leave()


QUICK = ("1F1B", "Interleaved1F1B", "DualPipeV")
"""A schedule with one stage per trainer, one with several, and one with two consecutive stages."""


@pytest.mark.parametrize(
    "schedule", [pytest.param(each, marks=[] if each in QUICK else [pytest.mark.long]) for each in SCHEDULES]
)
def test_evaluations_have_the_bits_of_one_process_and_change_no_training(tmp_path: Path, schedule: str) -> None:
    run_ranks(evaluating_worker, str(tmp_path / "store"), schedule)


def accumulating_worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plain, trainer = gpt(), Trainer(rank, schedule, gpt())
    optimizer, run, store = sgd(plain.parameters()), trainer.schedule, trainer.store
    names = {unit.name for unit in trainer.sharded.units}
    for step in range(STEPS):
        calls = [batch(10 * step + number) for number in range(3)]
        with run.no_sync():
            for tokens, targets in calls[:2]:
                run.step(tokens, target=targets)
                loss = run.eval(tokens, target=targets)
                assert loss is None or torch.equal(loss, evaluate(plain, tokens, targets)[0])
        assert store.pushes == Counter(dict.fromkeys(names, step))
        run.step(calls[2][0], target=calls[2][1])
        assert store.pushes == Counter(dict.fromkeys(names, step + 1)), "one push for all calls"
        assert store.gathers == Counter(dict.fromkeys(names, step + 1)), "one gather for all calls"
        assert trainer.sharded.units.live_bytes == 0
        trainer.sharded.step()
        train(plain, optimizer, calls, schedule)
    compare(trainer, plain)
    with run.no_sync():  # without a last call, the end of the work item pushes
        run.step(batch(0)[0], target=batch(0)[1])
    trainer.sharded.step()
    train(plain, optimizer, [batch(0)], schedule)
    compare(trainer, plain)
    with run.no_sync():
        run.step(batch(0)[0], target=batch(0)[1])
    trainer.sharded.units.zero_grad()
    assert not trainer.sharded.units.have_gradients, "zero_grad drops the gradients of earlier calls"
    run.step(batch(1)[0], target=batch(1)[1])
    trainer.sharded.step()
    train(plain, optimizer, [batch(1)], schedule)
    compare(trainer, plain)
    gloo.leave()


@pytest.mark.parametrize(
    "schedule", ["1F1B", "ZBVZeroBubble", pytest.param("Interleaved1F1B", marks=[pytest.mark.long])]
)
def test_several_calls_gather_and_push_once(tmp_path: Path, schedule: str) -> None:
    run_ranks(accumulating_worker, str(tmp_path / "store"), schedule)


def repeated_worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plain, trainer = gpt(), Trainer(rank, schedule, gpt())
    optimizer, run, units = sgd(plain.parameters()), trainer.schedule, trainer.sharded.units
    names = {unit.name for unit in units}
    for step in range(STEPS):
        calls = [batch(10 * step + number) for number in range(3)]
        for number, (tokens, targets) in enumerate(calls):
            run.step(tokens, target=targets)
            if number == 1:  # a trainer also computes the work items of trainers that were lost
                units.finish_item()
        assert trainer.store.pushes == Counter(dict.fromkeys(names, 3 * (step + 1))), "one push per call"
        trainer.sharded.step()
        train(plain, optimizer, calls, schedule)
    compare(trainer, plain)
    gloo.leave()


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble", "InterleavedZeroBubble"])
def test_several_calls_and_work_items_of_a_step_add_their_gradients(tmp_path: Path, schedule: str) -> None:
    run_ranks(repeated_worker, str(tmp_path / "store"), schedule)


class Masked(nn.Module):
    """A stage made by hand that takes keyword arguments. It holds one layer of the model."""

    def __init__(self, model: nn.ModuleList, index: int) -> None:
        super().__init__()
        self.name = str(index)
        self.add_module(self.name, model[index])

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None, *, scale: float = 1.0) -> torch.Tensor:
        y = torch.tanh(self.get_submodule(self.name)(x)) * scale
        return y if mask is None else y * mask


class Unmasked(Masked):
    """A stage that takes none of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.tanh(self.get_submodule(self.name)(x))


def masked_worker(rank: int, path: str, schedule: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    plan = SchedulePlan(schedule=schedule, pp=2, num_micro_batches=MICRO_BATCHES)
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(plan.num_stages))
    layers = [Unmasked(model, index) if index == 2 else Masked(model, index) for index in range(plan.num_stages)]
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 4, generator=generator)
    mask = torch.randint(0, 2, (BATCH, 1), generator=generator).float()
    losses, outputs = [], []
    for part, kept, wanted in micro_batches(x, mask, target):
        value = part
        for layer in layers:
            value = layer(value) if isinstance(layer, Unmasked) else layer(value, mask=kept, scale=0.5)
        outputs.append(value.detach())
        losses.append(functional.mse_loss(value, wanted))
        losses[-1].backward()
    expected = {
        index: [parameter.grad / MICRO_BATCHES for parameter in layer.parameters() if parameter.grad is not None]
        for index, layer in enumerate(layers)
    }
    for layer in layers:
        layer.zero_grad()
    inner = torch.zeros(BATCH // MICRO_BATCHES, 4, requires_grad=True)
    examples = [StageExample((inner if index else inner.detach(),), (inner,)) for index in range(plan.num_stages)]

    def stages_of(split: ModelSplit) -> list[PipelineStage]:
        return [
            PipelineStage(split.module(index), index, plan.num_stages, "cpu", example=examples[index])
            for index in plan.stages_of(rank)
        ]

    with pytest.raises(UsageError, match=r"size of a micro-batch of ModuleList is not known.*from_modules\(model, st"):
        PipelineSchedule(plan, stages_of(ModelSplit.from_modules(model, layers)), functional.mse_loss)
    stages = stages_of(ModelSplit.from_modules(model, layers, examples=examples))
    run = PipelineSchedule(plan, stages, functional.mse_loss)
    loss, merged = run.step(x, target=target, return_outputs=True, mask=mask, scale=0.5)
    if plan.num_stages - 1 in plan.stages_of(rank):
        assert torch.equal(loss, torch.stack(losses).mean().detach()) and torch.equal(merged, torch.cat(outputs))
    for stage in stages:
        for parameter, gradient in zip(stage.submod.parameters(), expected[stage.stage_index], strict=True):
            assert torch.equal(parameter.grad, gradient), stage.stage_index
    _, evaluated = run.eval(x, return_outputs=True, mask=mask, scale=0.5)
    assert merged is evaluated is None or torch.equal(evaluated, merged)
    check_refusals(run, x, target, mask)
    gloo.leave()


def check_refusals(run: PipelineSchedule, x: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> None:
    """Wrong arguments raise before anything runs."""
    with pytest.raises(UsageError, match="no stage of this trainer takes the keyword argument 'maks'"):
        run.step(x, target=target, maks=mask)
    with pytest.raises(UsageError, match=r"keyword argument .mask. has 1 samples .* but input 0 has 8"):
        run.step(x, target=target, mask=mask[:1])
    with (
        pytest.raises(UsageError, match=r"under torch.no_grad\(\) cannot run backwards: call schedule.eval"),
        torch.no_grad(),
    ):
        run.step(x, target=target)
    with pytest.raises(UsageError, match="a batch of 6 samples cannot be divided into 4 micro-batches"):
        run.eval(x[:6], target=target[:6])
    stages = run.stages
    if stages[-1].is_last:
        with pytest.raises(UsageError, match="needs target= on the trainer of the last stage"):
            run.step(x)
        with pytest.raises(UsageError, match="needs target= to compute the loss, or return_outputs=True"):
            run.eval(x)
    if stages[0].is_first:
        with pytest.raises(UsageError, match=r"input 0 has the shape \[4, 4\], expected \[8, 4\]: 4 micro-batches"):
            run.step(x[:4], target=target[:4])
    with pytest.raises(UsageError, match=r"stage \d is not sharded: call fully_shard or auto_wrap"), run.no_sync():
        raise AssertionError
    assert not any(parameter.grad is None for stage in stages for parameter in stage.submod.parameters())


@pytest.mark.parametrize("schedule", ["GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
def test_keyword_arguments_and_outputs_are_those_of_one_process(tmp_path: Path, schedule: str) -> None:
    run_ranks(masked_worker, str(tmp_path / "store"), schedule)
