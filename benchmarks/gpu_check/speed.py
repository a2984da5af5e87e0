"""Checks 9 to 11: a streamed model against a resident one, one unit against the bus, and memory against the plan."""

from __future__ import annotations

import gc
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import psutil
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import shardwell
from benchmarks.gpu_check.task import Task
from benchmarks.gpu_check.training import Net, loss_of, tokens_of
from benchmarks.sampling import cpu_seconds
from examples.gpt import GPT, GPTConfig
from shardwell.memory import device_copies
from shardwell.planning import PlanOptions, plan_run
from shardwell.transport import shared_vector
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2

ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
BF16 = shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Sizes:
    """A model and the tokens of its steps."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    tokens: tuple[int, ...]
    """Tokens of a step, by rising number."""

    @property
    def config(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocabulary,
            context=self.length,
            num_layers=self.layers,
            num_heads=self.heads,
            width=self.width,
            tied=False,
        )


GPT_1_3B = Sizes(24, 2048, 16, 16384, 2048, (8 << 10, 64 << 10, 256 << 10))
GPT_350M = Sizes(24, 1024, 16, 16384, 1024, (4 << 10,))
TINY = Sizes(2, 32, 2, 64, 16, (32, 64))
_LOGITS = 8192
"""Tokens whose logits exist at the same time."""


class LanguageModel(nn.Module):
    """A GPT that returns its loss, computes blocks again in the backward, and never has the logits of all tokens."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gpt = GPT(sizes.config)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gpt, x = self.gpt, self.gpt.token_embedding(tokens)
        x = x + gpt.position_embedding.weight[: tokens.shape[1]]
        for block in gpt.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x, targets = gpt.norm(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        total = torch.zeros((), device=tokens.device)
        for part, wanted in zip(x.split(_LOGITS), targets.split(_LOGITS), strict=True):
            total = total + checkpoint(self._loss, part, wanted, use_reentrant=False)
        return total / targets.numel()

    def _loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.gpt.head(x).float(), targets, reduction="sum")


def make_language_model(sizes: Sizes) -> Any:
    torch.manual_seed(0)
    return LanguageModel(sizes)


def batch_of(sizes: Sizes, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Returns a batch. [num_tokens / length, length]"""
    generator = torch.Generator().manual_seed(num_tokens)
    shape = (num_tokens // sizes.length, sizes.length)
    return torch.randint(sizes.vocabulary, shape, generator=generator).to(device)


@dataclass
class Steps:
    """Steps of one variant, by tokens."""

    seconds: dict[int, float]
    losses: list[float]
    peak_bytes: int
    details: dict[str, float]
    """Of the steps with the most tokens: seconds and bytes per step, and processors in use."""
    profile: str = ""
    """What took most of the device's time in one more step."""


def run_steps(
    task: Task,
    sizes: Sizes,
    step: Callable[[torch.Tensor], torch.Tensor],
    session: Any = None,
    pids: list[int] | None = None,
    *,
    is_slow: bool = False,
) -> Steps:
    """Runs the steps of each size.

    Args:
        task: The check.
        sizes: The model and the tokens of steps.
        step: Runs one step; returns its loss.
        session: Counts bytes and waits.
        pids: Processes whose time is counted.
        is_slow: Whether to run few steps.
    """
    warm_up, repeats = ((1,), (2,)) if is_slow else ((3, 1, 0), (5, 2, 1))
    found = Steps({}, [], 0, {})
    task.reset_peak()
    for number, num_tokens in enumerate(sizes.tokens):
        if number and task.left_s < 25:
            break
        tokens = batch_of(sizes, num_tokens, task.device)
        for _ in range(warm_up[number]):
            found.losses.append(step(tokens).item())
        before, used = dict(session.stats()) if session else {}, cpu_seconds(pids or [])
        seconds = []
        for _ in range(repeats[number]):
            started = time.perf_counter()
            found.losses.append(step(tokens).item())
            task.sync()
            seconds.append(time.perf_counter() - started)
        found.seconds[num_tokens] = sorted(seconds)[len(seconds) // 2]
        if session:
            after, count = session.stats(), len(seconds)
            found.details = {name: (after[name] - before[name]) / count for name in after}
            found.details["cores"] = (cpu_seconds(pids or []) - used) / sum(seconds)
    found.peak_bytes = task.peak_bytes()
    return found


def compare_speed(task: Task) -> None:
    """Compares steps of a resident model with AdamW and of a streamed one whose servers are on this host."""
    sizes = GPT_1_3B if task.on_gpu else TINY
    resident = _run_resident(task, sizes)
    for num_tokens, seconds in resident.seconds.items():
        task.row(f"resident torch, {num_tokens} tokens", f"{seconds * 1e3:.0f} ms")
    task.row("resident torch: peak on the GPU", f"{resident.peak_bytes / 1e9:.1f} GB")
    variants: dict[str, dict[str, Any]] = {
        "shm": {"transports": "shm"},
        "shm, keep_bytes=all": {"transports": "shm", "keep_bytes": 1 << 40},
        "socket": {"transports": "socket"},
    }
    # Each server updates with two threads, so there are as many as the processors can serve.
    with shardwell.LocalCluster(num_shards=max(2, min(12, (os.cpu_count() or 1) - 4))) as cluster:
        for name, transfers in variants.items():
            if task.left_s < 20:
                task.row(name, "not measured: no time is left", None if name != "shm" else False)
                continue
            few = sizes if name == "shm" else Sizes(**{**vars(sizes), "tokens": sizes.tokens[:1]})
            with task.attempt(name):
                streamed = _run_streamed(task, few, cluster, transfers, is_slow=name == "socket")
                _report_streamed(task, name, streamed, resident)


def _report_streamed(task: Task, name: str, streamed: Steps, resident: Steps) -> None:
    most = max(streamed.seconds)
    for num_tokens, seconds in streamed.seconds.items():
        ratio = seconds / resident.seconds[num_tokens]
        goal = ratio <= 1.05 if task.on_gpu and name == "shm" and num_tokens == most else None
        wanted = "" if goal is None else " (<= 1.05)"
        task.row(f"{name}, {num_tokens} tokens{wanted}", f"{seconds * 1e3:.0f} ms, ratio {ratio:.2f}", goal)
    details, seconds = streamed.details, streamed.seconds[most]
    waits = {what: max(0.0, 1 - details[f"{what}_wait_s"] / seconds) for what in ("gather", "push")}
    rates = (
        f"{details['gathered_bytes'] / seconds / 1e9:.1f} GB/s in, {details['pushed_bytes'] / seconds / 1e9:.1f} out"
    )
    task.row(
        f"{name}, {most} tokens: rates, time without a wait",
        f"{rates}, gather {waits['gather']:.0%}, push {waits['push']:.0%}",
    )
    if streamed.profile:
        task.row(f"{name}: most of a step's time on the device, ms", streamed.profile)
    task.row(f"{name}: processors, peak on the GPU", f"{details['cores']:.1f}, {streamed.peak_bytes / 1e9:.1f} GB")
    count = min(3, len(streamed.losses))  # the first steps, all with the same batch
    ours, theirs = (losses[0] - losses[count - 1] for losses in (streamed.losses, resident.losses))
    is_near = abs(streamed.losses[0] - resident.losses[0]) <= 0.01 * resident.losses[0]
    what = f"{name}: fall of the loss in {count} steps, resident (10 % apart)"
    task.row(what, f"{ours:.4f}, {theirs:.4f}", is_near and theirs > 0 and abs(ours - theirs) <= 0.1 * theirs)


def _run_resident(task: Task, sizes: Sizes) -> Steps:
    """Runs steps with float32 weights on the device, whose bf16 copies compute."""
    with task.device:
        model = make_language_model(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    computing = _Cast(model)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with computing.cast():
            loss = model(tokens)
            loss.backward()
        computing.collect()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run_steps(task, sizes, step)


class _Cast:
    """Lets a model compute with bf16 copies of its weights; its gradients are collected in float32."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._masters = [parameter.data for parameter in self._parameters]

    @contextmanager
    def cast(self) -> Iterator[None]:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            parameter.data = master.to(torch.bfloat16)
        yield

    def collect(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            parameter.data = master
            assert gradient is not None
            parameter.grad = gradient.float()


def _run_streamed(
    task: Task, sizes: Sizes, cluster: shardwell.LocalCluster, transfers: dict[str, Any], *, is_slow: bool
) -> Steps:
    """Runs steps of a run of its own, whose weights begin as those of the resident model."""
    run = f"run {transfers}".replace(" ", "-").translate(str.maketrans("", "", "{}':,"))
    options = shardwell.TransferOptions(prefetch_bytes=1 << 30, push_bytes=1 << 30, **transfers)
    pids = [psutil.Process().pid, *(server.pid for server in cluster.shards)]
    with shardwell.join(cluster.address, run=run, transfers=options) as session:
        with task.device:
            model = make_language_model(sizes)
        for block in model.gpt.blocks:
            shardwell.fully_shard(block, session, mp_policy=BF16)
        shardwell.fully_shard(model, session, mp_policy=BF16)
        optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        found = run_steps(task, sizes, step, session, pids, is_slow=is_slow)
        if not is_slow and task.left_s > 25:
            found.profile = profile_of(task, lambda: step(batch_of(sizes, sizes.tokens[0], task.device)))
    task.reset_peak()  # shared memory that this process has registered exists until it is released
    delete_run(cluster.address, run)
    return found


def profile_of(task: Task, step: Callable[[], object]) -> str:
    """Runs one step under torch's profiler; returns the kernels and copies that took most time, on all streams."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if task.on_gpu else [])]
    try:
        with profile(activities=activities) as profiler:
            step()
            task.sync()
    except RuntimeError as error:  # a driver may not let this user profile
        return f"no profile: {error}".splitlines()[0]
    name = "self_device_time_total" if task.on_gpu else "self_cpu_time_total"
    longest = sorted(profiler.key_averages(), key=lambda each: getattr(each, name), reverse=True)[:8]
    return ", ".join(f"{each.key[:40]} {getattr(each, name) / 1e3:.1f}" for each in longest)


def delete_run(address: str, run: str) -> None:
    """Frees the memory that the servers have for a run."""
    with closing(CoordinatorClient(address)) as coordinator:
        described = coordinator.call("DescribeRun", coordinator_pb2.DescribeRunRequest(run=run), timeout_s=30.0)
        run_id = described.summary.run_id
        request = coordinator_pb2.DeleteRunRequest(run=run, run_id=run_id, force=True, request_id=uuid.uuid4().hex)
        coordinator.call("DeleteRun", request, timeout_s=30.0)


# ---- one unit ----


def move_one_unit(task: Task) -> None:
    """Gathers and pushes one large unit, from registered memory and through pinned memory."""
    width = 8192 if task.on_gpu else 512
    size_bytes = 4 * width * width
    ceiling = 0.0
    if task.on_gpu:
        pinned, target = (
            torch.empty(size_bytes, dtype=torch.uint8, **each)
            for each in ({"pin_memory": True}, {"device": task.device})
        )
        ceiling = size_bytes / task.seconds(lambda: target.copy_(pinned, non_blocking=True))
        task.row("pinned host to device", f"{ceiling / 1e9:.1f} GB/s")
    with shardwell.LocalCluster(num_shards=2, min_shard_bytes=4096) as cluster:
        for name in ("registered", "staged"):
            with task.attempt(name), refusing(name == "staged"):
                _move(task, cluster.address, name, width, ceiling)
    if task.on_gpu:
        is_refused = not device_copies.register(1 << 40, 4096)
        after = torch.ones(4, device=task.device).sum().item()
        task.row("memory that CUDA cannot register is refused, and the GPU goes on", ok=is_refused and after == 4.0)


@contextmanager
def refusing(is_refused: bool) -> Iterator[None]:
    """Lets no memory be registered in the block."""
    with mock.patch.object(shared_vector, "register", lambda *_: False) if is_refused else nullcontext():
        yield


def _move(task: Task, address: str, name: str, width: int, ceiling: float) -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(width, width, bias=False)
    expected = model.weight.detach().clone()
    transfers = shardwell.TransferOptions(transports="shm", push_bytes=1 << 30)
    with shardwell.join(address, run=name, transfers=transfers) as session:
        model.to(task.device)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.0)
        model.unshard()
        task.row(f"{name}: equal bits", ok=torch.equal(model.weight.detach().cpu(), expected))
        windows = [shard.address.window for unit in session.store._units.values() for shard in unit.shards]
        is_direct = task.on_gpu and all(window is not None and window.registered is not None for window in windows)
        is_right = is_direct == (task.on_gpu and name == "registered")
        task.row(f"{name}: shards mapped, registered with CUDA", f"{len(windows)}, {is_direct}", is_right)
        model.reshard()
        seconds, size_bytes = [], expected.nbytes
        for _ in range(4):
            started = time.perf_counter()
            model.unshard()
            task.sync()
            seconds.append(time.perf_counter() - started)
            model.reshard()
        rate = size_bytes / min(seconds[1:])
        share = f", {rate / ceiling:.2f} of pinned" if ceiling else ""
        goal = rate >= 0.8 * ceiling if name == "registered" and ceiling else None
        wanted = " (>= 0.8)" if goal is not None else ""
        task.row(f"{name}: gather{wanted}", f"{rate / 1e9:.1f} GB/s{share}", goal)
        seconds = []
        for _ in range(4):
            model(torch.ones(1, width, device=task.device)).sum().backward()
            started = time.perf_counter()
            session.store.gradients.drain()
            seconds.append(time.perf_counter() - started)
            optimizer.step()
            optimizer.zero_grad()
        task.row(f"{name}: push, what the backward has not hidden", f"{size_bytes / min(seconds[1:]) / 1e9:.1f} GB/s")


# ---- memory ----


def compare_memory(task: Task) -> None:
    """Compares the peak of a step with the plan, and looks for growth over many small steps."""
    sizes = GPT_350M if task.on_gpu else TINY
    batch = sizes.tokens[0] // sizes.length
    options = PlanOptions(num_servers=2, checkpoint_activations=True, keep_bytes=0)
    planned = plan_run(
        lambda: (_plain(sizes), (torch.zeros(batch, sizes.length, dtype=torch.long),)), options, batch=batch
    )
    with shardwell.LocalCluster(num_shards=2) as cluster:
        transfers = shardwell.TransferOptions(transports="socket", keep_bytes=0)
        with shardwell.join(cluster.address, run="memory", transfers=transfers) as session:
            model = _plain(sizes).to(task.device)
            memory = shardwell.MemoryOptions(checkpoint_activations=True)
            shardwell.auto_wrap(model, session, memory=memory)
            optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
            tokens = batch_of(sizes, sizes.tokens[0], task.device)
            for number in range(3):
                if number == 2:
                    task.reset_peak()
                loss_of(model, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = session.stats()["peak_unit_bytes"]
            ratio = planned.trainer.weights_bytes / weights
            task.row("weights in the trainer: planned / measured (0.9 to 1.1)", f"{ratio:.2f}", 0.9 <= ratio <= 1.1)
            if task.on_gpu:
                ratio = planned.trainer.total_bytes / task.peak_bytes()
                value = f"{planned.trainer.total_bytes / 1e9:.2f} / {task.peak_bytes() / 1e9:.2f} GB = {ratio:.2f}"
                task.row("GPU memory: planned / measured (0.9 to 1.1)", value, 0.9 <= ratio <= 1.1)
        with task.attempt("growth"):
            _check_growth(task, cluster.address)


def _plain(sizes: Sizes) -> GPT:
    torch.manual_seed(0)
    return GPT(sizes.config)


def _check_growth(task: Task, address: str) -> None:
    process, sizes = psutil.Process(), []
    with shardwell.join(address, run="growth") as session:
        model: Any = Net().to(task.device)
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.5)
        for step in range(200):
            loss_of(model, tokens_of(step % 4).to(task.device)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in (50, 199):
                gc.collect()
                task.sync()
                used = torch.cuda.memory_allocated(task.device) if task.on_gpu else 0
                sizes.append((used, process.memory_full_info().uss))
    on_gpu, on_host = (after - before for before, after in zip(*sizes, strict=True))
    if task.on_gpu:
        task.row("150 small steps: GPU memory (0)", f"{on_gpu} bytes", on_gpu <= 0)
    task.row("150 small steps: memory of the process (<= 8 MB)", f"{on_host / 1e6:.1f} MB", on_host <= 8e6)
