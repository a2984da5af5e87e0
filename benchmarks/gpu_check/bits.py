"""Checks 2 to 5: a run with trainers on a GPU has the bits of plain PyTorch on that GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwell
from benchmarks.gpu_check.task import Task
from benchmarks.gpu_check.training import Net, Trained, loss_of, tokens_of, train_plain, train_sharded
from examples.gpt import GPT, GPTConfig
from shardwell import ShardingStrategy
from shardwell.parallel import SCHEDULES, PipelineSchedule, PipelineStage, SchedulePlan, split_model

KEPT = {"keep_bytes": 1 << 30}
STRATEGIES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FULL_SHARD": ({"keep_bytes": 0}, {}),
    "SHARD_GRAD_OP": ({"keep_bytes": 0}, {"strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "NO_SHARD": ({"keep_bytes": 0}, {"strategy": ShardingStrategy.NO_SHARD}),
    "keep_bytes": (KEPT, {}),
    "reshard_after_forward=False": ({"keep_bytes": 0}, {"reshard_after_forward": False}),
}
"""Arguments of ``TransferOptions`` and of ``fully_shard``."""
MODELS: Mapping[str, Callable[[], Net]] = {
    "tied weights": lambda: Net(tied=True),
    "a frozen block": lambda: Net(frozen=True),
    "an unused block": lambda: Net(unused=True),
    "activation checkpointing": lambda: Net(checkpointed=True),
    "dropout": lambda: Net(dropout=0.3),
}


def report(task: Task, what: str, got: Trained, expected: Trained) -> None:
    """Reports whether all bits are equal."""
    difference = got.difference(expected)
    task.row(what, difference or "equal bits", not difference)


def compare_strategies(task: Task) -> None:
    """Compares transports, strategies and kinds of models with resident training."""
    expected = train_plain(Net(), task.device)
    transports = ("shm", "socket", "grpc")
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        address = cluster.address
        for transport in transports if task.on_gpu else transports[:2]:
            for name, (transfers, options) in STRATEGIES.items():
                with task.attempt(f"{transport}, {name}"):
                    got = train_sharded(
                        address,
                        f"{transport} {name}",
                        Net(),
                        task.device,
                        transfers={"transports": transport, **transfers},
                        options=options,
                    )
                    report(task, f"{transport}, {name}", got, expected)
        for name, make in MODELS.items():
            with task.attempt(name):
                transfers = {"transports": "shm", "keep_bytes": 0}
                got = train_sharded(address, name, make(), task.device, transfers=transfers)
                report(task, name, got, train_plain(make(), task.device))
        with task.attempt("accumulation over 4 backwards"):
            got = train_sharded(address, "accumulation", Net(), task.device, backwards=4)
            report(task, "accumulation over 4 backwards", got, train_plain(Net(), task.device, backwards=4))


# ---- mixed precision ----


def train_rounded(device: torch.device, dtype: torch.dtype) -> Trained:
    """Trains with weights that the processor rounds before each step, and that SGD updates in float32."""
    masters = {name: value.detach().clone() for name, value in Net().named_parameters()}
    losses = []
    for step in range(4):
        model = Net().to(dtype)
        model.load_state_dict({name: value.to(dtype) for name, value in masters.items()})
        model.to(device)
        loss = loss_of(model, tokens_of(step).to(device))
        loss.backward()
        losses.append(loss.detach().cpu())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            masters[name] -= 0.5 * parameter.grad.float().cpu()
    return Trained(losses, masters)


def compare_precisions(task: Task) -> None:
    """Compares mixed precision, loss scaling and lossy transfers with rounding by the processor."""
    policy = shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        address = cluster.address
        expected = train_rounded(task.device, torch.bfloat16)
        for transport in ("shm", "socket"):
            with task.attempt(f"bf16 weights, {transport}"):
                got = train_sharded(
                    address,
                    f"bf16 {transport}",
                    Net(),
                    task.device,
                    transfers={"transports": transport, "keep_bytes": 0},
                    options={"mp_policy": policy},
                )
                report(task, f"MixedPrecisionPolicy bf16, {transport}", got, expected)
        with task.attempt("fp16 with an overflow"):
            _check_overflow(task, address)
        for dtype in ("bfloat16", "int8"):
            with task.attempt(f"gather_dtype={dtype}"):
                on_cpu, on_device = (
                    _gathered(address, f"{dtype} {device}", device, dtype)
                    for device in (torch.device("cpu"), task.device)
                )
                stored = torch.cat([value.detach().flatten() for value in Net().parameters()])
                is_equal = torch.equal(on_cpu, on_device) and not torch.equal(on_cpu, stored)
                task.row(f"gather_dtype={dtype}: weights as on a CPU, rounded", ok=is_equal)


def _check_overflow(task: Task, address: str) -> None:
    """Forces one infinite gradient: the step is skipped, and the next one is not."""
    policy = shardwell.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    with shardwell.join(address, run="fp16") as session:
        model: Any = Net().to(task.device)
        for block in model.blocks:
            shardwell.fully_shard(block, session, mp_policy=policy)
        shardwell.fully_shard(model, session, mp_policy=policy)
        optimizer, scaler = shardwell.optim.SGD(model.parameters(), lr=0.5), shardwell.amp.GradScaler(init_scale=256.0)
        states = [_whole(model)]
        for step in range(3):
            factor = float("inf") if step == 1 else 1.0
            scaler.scale(loss_of(model, tokens_of(step).to(task.device)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            states.append(_whole(model))
    changed = [not torch.equal(before, after) for before, after in pairwise(states)]
    is_finite = bool(torch.isfinite(states[-1]).all())
    is_right = changed == [True, False, True] and is_finite and scaler.get_scale() == 128.0
    task.row("fp16: steps with an update, scale", f"{changed}, {scaler.get_scale():.0f}", is_right)


def _whole(model: nn.Module) -> torch.Tensor:
    return torch.cat([value.cpu().flatten() for value in shardwell.full_state_dict(model).values()])


def _gathered(address: str, run: str, device: torch.device, dtype: str) -> torch.Tensor:
    """Returns the weights that a trainer computes with, on the CPU."""
    transfers = shardwell.TransferOptions(gather_dtype=dtype)
    with shardwell.join(address, run=run, transfers=transfers) as session:
        model: Any = Net().to(device)
        shardwell.fully_shard(model, session)
        model.unshard()
        return torch.cat([value.detach().cpu().flatten() for value in model.parameters()])


# ---- optimizers ----


def compare_adamw(task: Task) -> None:
    """Compares the servers' AdamW with torch's AdamW on the device: the same gradients, 20 steps."""
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    shape = (1024, 1024) if task.on_gpu else (64, 64)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Linear(*shape, bias=False).to(task.device))
    plain, sharded = models
    with shardwell.LocalCluster(num_shards=2) as cluster, shardwell.join(cluster.address) as session:
        shardwell.fully_shard(sharded, session)
        optimizers = [
            torch.optim.AdamW(plain.parameters(), **hyper, fused=task.on_gpu),
            shardwell.optim.AdamW(sharded.parameters(), **hyper),
        ]
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            x, y = (torch.randn(size, generator=generator).to(task.device) for size in reversed(shape))
            for model, optimizer in zip(models, optimizers, strict=True):
                # The gradient is an outer product, whatever the weights are.
                (model(x[None]) * y).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        got, expected = shardwell.full_state_dict(sharded)["weight"].cpu(), plain.weight.detach().cpu()
    distance = ((got - expected).norm() / expected.norm()).item()
    torch.manual_seed(0)
    moved = ((nn.Linear(*shape, bias=False).weight - expected).norm() / expected.norm()).item()
    task.row("20 steps of AdamW: relative distance (<= 1e-5)", f"{distance:.1e}", distance <= 1e-5)
    task.row("relative movement of the weights", f"{moved:.2f}", moved > 0.1)


# ---- schedules ----

MICRO_BATCHES, BATCH, LENGTH, VOCABULARY = 4, 8, 5, 31


def _gpt() -> GPT:
    torch.manual_seed(0)
    sizes = GPTConfig(vocab_size=VOCABULARY, context=LENGTH, num_layers=4, num_heads=2, width=12, tied=False)
    return GPT(sizes)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _accumulated(device: torch.device, *, is_reversed: bool) -> Trained:
    """Trains one process that adds the gradients of the micro-batches."""
    model = _gpt().to(device)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(2):
        tokens = tokens_of(step, batch=BATCH, length=LENGTH, vocabulary=VOCABULARY).to(device)
        found = {}
        parts = list(enumerate(tokens.chunk(MICRO_BATCHES)))
        for number, part in reversed(parts) if is_reversed else parts:
            loss = _loss(model(part[:, :-1]), part[:, 1:])
            loss.backward()
            found[number] = loss.detach()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack([found[number] for number in range(MICRO_BATCHES)]).mean().cpu())
    return Trained(losses, {name: value.detach().cpu() for name, value in model.state_dict().items()})


def compare_schedules(task: Task) -> None:
    """Compares all schedules of two or more stages in one process with accumulation in one process."""
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        for schedule in SCHEDULES:
            with task.attempt(schedule):
                got, num_warnings = _scheduled(task, cluster.address, schedule)
                report(task, schedule, got, _accumulated(task.device, is_reversed=schedule == "LoopedBFS"))
                if task.on_gpu:
                    task.row(f"{schedule}: synchronizing calls in a step", num_warnings)


def _scheduled(task: Task, address: str, schedule: str) -> tuple[Trained, int]:
    plan = SchedulePlan(schedule=schedule, pp=1, num_micro_batches=MICRO_BATCHES)
    with shardwell.join(address, run=schedule) as session:
        group = session.replica_mesh(task.device.type)["pp"].get_group()
        split = split_model(_gpt(), plan.num_stages)
        examples = split.examples(torch.zeros(BATCH // MICRO_BATCHES, LENGTH, dtype=torch.int64))
        stages = []
        for index in plan.stages_of(0):
            module: nn.Module = split.module(index).to(task.device)
            shardwell.auto_wrap(module, session)
            example = examples[index]
            stages.append(PipelineStage(module, index, plan.num_stages, task.device, example=example, group=group))
        pipeline = PipelineSchedule(plan, stages, _loss)
        parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        optimizer, losses = shardwell.optim.SGD(parameters, lr=0.5), []
        num_warnings = 0
        for step in range(2):
            tokens = tokens_of(step, batch=BATCH, length=LENGTH, vocabulary=VOCABULARY).to(task.device)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if task.on_gpu:
                    torch.cuda.set_sync_debug_mode("warn")
                loss = pipeline.step(tokens[:, :-1], target=tokens[:, 1:])
                if task.on_gpu:
                    torch.cuda.set_sync_debug_mode("default")
            num_warnings = sum("synchroniz" in str(each.message) for each in caught)
            assert loss is not None
            losses.append(loss.detach().cpu())
            optimizer.step()
            optimizer.zero_grad()
        plain = _gpt()
        with shardwell.attach(address, run=schedule) as reader:
            reader.follow(plain)
        weights = {name: value.detach() for name, value in plain.state_dict().items()}
    if dist.is_initialized():
        dist.destroy_process_group()
    return Trained(losses, weights), num_warnings
