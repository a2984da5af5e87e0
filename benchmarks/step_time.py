"""Time of a training step through Shardwell against plain PyTorch, on one machine.

Every variant has its own processes with one thread each; they take turns of a few steps, so that a
change of the machine's mood hits all alike. Writes results/step_time.json and results/step_time.md.

    python benchmarks/step_time.py [--rounds 6] [--steps 10]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwell

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

from gpt import GPT, GPTConfig  # noqa: E402 (the examples are not a package)

RESULTS = ROOT / "benchmarks" / "results"
ADAMW = {"lr": 1e-4, "weight_decay": 0.1}
BATCH_SIZE = 4
WARMUP_STEPS = 5
MODEL = GPTConfig(vocab_size=4096, context=128, num_layers=6, num_heads=4, width=256)
VARIANTS = {"plain PyTorch": 1, "Shardwell dp=1": 1, "Shardwell dp=2": 2}
"""Name of a variant to its number of processes."""


def make_batch(step: int, dp_rank: int) -> Tensor:  # [BATCH_SIZE, context + 1]
    generator = torch.Generator().manual_seed(step * 1000 + dp_rank)
    return torch.randint(MODEL.vocab_size, (BATCH_SIZE, MODEL.context + 1), generator=generator)


def compute(model: nn.Module, batch: Tensor) -> None:
    logits = model(batch[:, :-1])
    functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()


def plain_steps() -> Iterator[dict[str, float]]:
    """Takes one step each time it is asked for the next; yields what Shardwell would know of it."""
    model = GPT(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for step in range(sys.maxsize):
        compute(model, make_batch(step, 0))
        optimizer.step()
        optimizer.zero_grad()
        yield {}


def sharded_steps(address: str, dp: int) -> Iterator[dict[str, float]]:
    """The same through Shardwell; yields the session's statistics."""
    session = shardwell.join(address, run=f"dp{dp}", world=shardwell.World(dp=dp))
    model = GPT(MODEL)
    for block in model.blocks:
        shardwell.fully_shard(block, session)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    for step in session.steps(sys.maxsize):
        for batch in step.batches(make_batch):
            compute(model, batch)
        optimizer.step()
        optimizer.zero_grad()
        yield session.stats()


def work(steps: Iterator[dict[str, float]]) -> None:
    """A worker's life: reads how many steps to take, takes them, prints how long each took."""
    for line in sys.stdin:
        seconds, stats = [], {}
        for _ in range(int(line)):
            started = time.perf_counter()
            stats = next(steps)
            seconds.append(time.perf_counter() - started)
        print(json.dumps({"seconds": seconds, "stats": stats}), flush=True)


class Worker:
    """One process of a variant."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def begin(self, steps: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with exit code {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def measure(rounds: int, steps: int, num_shards: int) -> dict[str, dict[str, Any]]:
    """Step times of every variant: the slowest process of each step counts."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    stats: dict[str, dict[str, float]] = {}
    with ExitStack() as stack:
        address = stack.enter_context(shardwell.LocalCluster(num_shards=num_shards)).address
        workers: dict[str, list[Worker]] = {}
        for variant, count in VARIANTS.items():
            arguments = ("--worker", variant, "--address", address)
            workers[variant] = [Worker(*arguments) for _ in range(count)]
            for worker in workers[variant]:
                stack.callback(worker.close)
        for turn in range(rounds + 1):
            for variant, processes in workers.items():
                for process in processes:
                    process.begin(steps if turn else WARMUP_STEPS)
                results = [process.result() for process in processes]
                if turn:
                    times[variant] += map(max, zip(*(result["seconds"] for result in results), strict=True))
                    stats[variant] = results[0]["stats"]
            print(f"round {turn} of {rounds}" if turn else "warmed up", file=sys.stderr)
    return {variant: summarize(times[variant], stats[variant]) for variant in VARIANTS}


def summarize(seconds: list[float], stats: dict[str, float]) -> dict[str, Any]:
    low, median, high = statistics.quantiles(seconds, n=4)
    return {"step_ms": {"median": 1e3 * median, "quartiles": [1e3 * low, 1e3 * high]}, "steps": len(seconds), **stats}


def to_markdown(report: dict[str, Any]) -> str:
    plain = report["variants"]["plain PyTorch"]["step_ms"]["median"]
    lines = [
        f"A GPT with {report['parameters'] / 1e6:.1f} M parameters in {MODEL.num_layers + 1} units, "
        f"batch {BATCH_SIZE} x {MODEL.context} tokens per rank, AdamW, one thread per process, "
        f"{report['num_shards']} shard servers, {report['cpus']} CPUs for all of it, "
        f"load average before {report['load_average_before']:.1f}.",
        "",
        "| variant | step, median (quartiles) | against plain |",
        "|---|---|---|",
    ]
    for variant, result in report["variants"].items():
        step = result["step_ms"]
        low, high = step["quartiles"]
        lines.append(f"| {variant} | {step['median']:.1f} ms ({low:.1f} - {high:.1f}) | {step['median'] / plain:.2f} |")
    lines += ["", "A step at dp=2 takes two batches; its trainers and the servers share the CPUs."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Step time through Shardwell against plain PyTorch.")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps of each variant per round")
    parser.add_argument("--num-shards", type=int, default=2)
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.worker:
        plain = arguments.worker == "plain PyTorch"
        work(plain_steps() if plain else sharded_steps(arguments.address, VARIANTS[arguments.worker]))
        return
    report = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load_average_before": os.getloadavg()[0],
        "num_shards": arguments.num_shards,
        "parameters": sum(parameter.numel() for parameter in GPT(MODEL).parameters()),
        "variants": measure(arguments.rounds, arguments.steps, arguments.num_shards),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "step_time.json").write_text(json.dumps(report, indent=2) + "\n")
    (RESULTS / "step_time.md").write_text(to_markdown(report))
    print(to_markdown(report), end="")


if __name__ == "__main__":
    main()
