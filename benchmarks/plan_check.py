"""What ``shardwell plan`` says of a model, and what training it takes: memory of the processes' own, bytes per step.

``python -m benchmarks.plan_check`` prints a table. One trainer, two shard servers, the socket lane: the trainer and the
servers share no memory, as on different hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

import shardwell
from shardwell.planning.plan import PlanOptions, make_plan
from shardwell.planning.plan_model import count_saved_bytes, load, plan_units

BATCH, LENGTH, VOCABULARY, WIDTH, NUM_LAYERS, NUM_HEADS = 2, 128, 8192, 512, 10, 8
NUM_SERVERS, NUM_STEPS = 2, 6
PREFETCH_BYTES, PUSH_BYTES = 16 << 20, 16 << 20
_SAMPLE_S = 0.005


class Model(nn.Module):
    def __init__(self, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def make(batch: int, length: int) -> tuple[nn.Module, torch.Tensor]:
    """For ``shardwell plan benchmarks.plan_check:make``."""
    return Model(), torch.zeros(batch, length, dtype=torch.long)


def own_bytes(process: psutil.Process) -> int:
    """Memory that would be free if the process ended."""
    return int(process.memory_full_info().uss)


class Peak:
    """The most memory of their own that some processes had, sampled in a thread."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self.bytes = [0] * len(processes)

    def _sample(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.bytes = [max(most, own_bytes(each)) for most, each in zip(self.bytes, self._processes, strict=True)]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def train(address: str, run: str, model: nn.Module, num_steps: int, processes: Sequence[psutil.Process]) -> Measured:
    """Shards the model, then trains it and watches the processes' memory."""
    with shardwell.join(
        address, run=run, lanes="socket", prefetch_bytes=PREFETCH_BYTES, push_bytes=PUSH_BYTES
    ) as session:
        shardwell.auto_wrap(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        before: Mapping[str, float] = {}
        with Peak(processes) as peak:
            for step in session.steps(num_steps):
                before = before or session.stats()
                for tokens in step.batches(lambda *_: torch.randint(VOCABULARY, (BATCH, LENGTH))):
                    model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        after = session.stats()
    received, sent = ((after[name] - before[name]) / num_steps for name in ("received_bytes", "sent_bytes"))
    return Measured(after["peak_unit_bytes"], received, sent, peak.bytes)


@dataclass(frozen=True)
class Measured:
    weights_bytes: float
    received_bytes: float
    """Per step."""
    sent_bytes: float
    peak_bytes: Sequence[int]
    """Of each process's own."""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shapes = load("benchmarks.plan_check:make", batch=BATCH, length=LENGTH)
    options = PlanOptions(
        num_servers=NUM_SERVERS,
        prefetch_bytes=PREFETCH_BYTES,
        push_bytes=PUSH_BYTES,
        activation_bytes=count_saved_bytes(shapes),
    )
    plan = make_plan(plan_units(shapes.module), options)
    with shardwell.LocalCluster(num_shards=NUM_SERVERS) as cluster:
        processes = [psutil.Process(), *(psutil.Process(shard.pid) for shard in cluster.shards)]
        # What a first use costs once (kernels, connections, threads) is no part of a plan.
        train(cluster.address, "warm-up", Model(num_layers=1), 2, processes)
        start = [own_bytes(process) for process in processes]
        measured = train(cluster.address, "measured", Model(), NUM_STEPS, processes)
    trainer, *servers = (most - before for most, before in zip(measured.peak_bytes, start, strict=True))
    table = Table("", "PLANNED", "MEASURED", "PLANNED / MEASURED")
    most_weights = plan.trainer.weights_bytes + plan.trainer.prefetch_bytes
    for name, planned, found in (
        ("trainer: weights at most", most_weights, measured.weights_bytes),
        ("trainer: received per step", plan.trainer.received_bytes, measured.received_bytes),
        ("trainer: sent per step", plan.trainer.sent_bytes, measured.sent_bytes),
        ("trainer: peak memory of its own", plan.trainer.total_bytes, trainer),
        ("server: peak memory of its own", plan.server.total_bytes, max(servers)),
    ):
        table.add_row(name, f"{planned / 1e6:.1f} MB", f"{found / 1e6:.1f} MB", f"{planned / found:.2f}")
    print(f"{plan.num_parameters:,} parameters, {plan.model_bytes / 1e6:.1f} MB, {plan.num_units} units")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
