"""Compares the estimates of ``shardwell plan`` with measurements of memory and bytes per step.

``python -m benchmarks.plan_check`` prints a Markdown table with both numbers and their ratio, one line per setting.
Each setting is measured in its own process and cluster, with one trainer and two shard servers. The socket transport
ensures that the trainer and the servers share no memory, as on different hosts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import psutil
import torch
from torch import nn
from torch.nn import functional

import shardwell
from shardwell import MemoryOptions, MemoryStrategy, ShardingStrategy
from shardwell.planning import Plan, PlanOptions, plan_run

BATCH, LENGTH, VOCABULARY, WIDTH, NUM_LAYERS, NUM_HEADS = 2, 128, 8192, 512, 10, 8
NUM_SERVERS, NUM_STEPS = 2, 4
TRANSFERS = {"prefetch_bytes": 16 << 20, "push_bytes": 16 << 20}
_SAMPLE_S = 0.005


@dataclass(frozen=True)
class Setting:
    """Options of a trainer."""

    memory: MemoryOptions = dataclasses.field(default_factory=MemoryOptions)
    transfers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of ``TransferOptions``. The plan has options of the same names."""

    def transfer_options(self) -> shardwell.TransferOptions:
        return shardwell.TransferOptions(transports="socket", **{**TRANSFERS, **self.transfers})

    def plan_options(self) -> PlanOptions:
        known = {field.name for field in dataclasses.fields(PlanOptions)}
        memory = {name: getattr(self.memory, name, None) for name in known}
        passed = {name: value for name, value in memory.items() if value is not None}
        return PlanOptions(**{"num_servers": NUM_SERVERS, **TRANSFERS, **self.transfers, **passed})


RETURNED = MemoryOptions(keep_freed_memory=False)
SETTINGS = {
    "as join": Setting(),
    "freed memory returned": Setting(RETURNED),
    "keep_bytes of 100 MB": Setting(RETURNED, {"keep_bytes": 100_000_000}),
    "gather_dtype bfloat16": Setting(RETURNED, {"gather_dtype": "bfloat16"}),
    "host_cache_bytes of 1 GB": Setting(RETURNED, {"host_cache_bytes": 1_000_000_000}),
    "NO_SHARD": Setting(dataclasses.replace(RETURNED, strategy=ShardingStrategy.NO_SHARD)),
    **{strategy.name: Setting(strategy.options(keep_freed_memory=False)) for strategy in MemoryStrategy},
}


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
    """Returns a model and an example input, for ``shardwell plan benchmarks.plan_check:make``."""
    return Model(), torch.zeros(batch, length, dtype=torch.long)


def own_bytes(process: psutil.Process) -> int:
    """Returns the memory that would be free if the process ended."""
    return int(process.memory_full_info().uss)


class Peak:
    """Context manager that samples the peak of each process's own memory in a thread."""

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


@dataclass(frozen=True)
class Measured:
    """Measured bytes. ``peak_bytes`` lists each process's own memory, the trainer first."""

    weights_bytes: float
    received_bytes: float
    """Received bytes per step."""
    sent_bytes: float
    """Sent bytes per step."""
    peak_bytes: Sequence[int]


def train(
    address: str, run: str, setting: Setting, model: nn.Module, num_steps: int, processes: Sequence[psutil.Process]
) -> Measured:
    """Shards and trains the model, and samples the processes' memory. Counts bytes after the first step."""
    with shardwell.join(address, run=run, transfers=setting.transfer_options()) as session:
        shardwell.auto_wrap(model, session, memory=setting.memory)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=1e-3)
        before: Mapping[str, float] = {}
        with Peak(processes) as peak:
            for step in session.steps(num_steps):
                if step.number == 1:
                    before = session.stats()
                for tokens in step.batches(lambda *_: torch.randint(VOCABULARY, (BATCH, LENGTH))):
                    model(tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
        after = session.stats()
    counted = num_steps - 1
    received, sent = ((after[name] - before[name]) / counted for name in ("received_bytes", "sent_bytes"))
    return Measured(after["peak_unit_bytes"], received, sent, peak.bytes)


def measure(setting: Setting) -> Measured:
    """Measures a setting. Peaks are relative to the memory after training a small model.

    This excludes costs of the first use (kernels, connections, threads), which a plan does not contain.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with shardwell.LocalCluster(num_shards=NUM_SERVERS) as cluster:
        processes = [psutil.Process(), *(psutil.Process(shard.pid) for shard in cluster.shards)]
        train(cluster.address, "warm-up", setting, Model(num_layers=1), 2, processes)
        start = [own_bytes(process) for process in processes]
        measured = train(cluster.address, "measured", setting, Model(), NUM_STEPS, processes)
    above = [most - before for most, before in zip(measured.peak_bytes, start, strict=True)]
    return dataclasses.replace(measured, peak_bytes=above)


def plan(setting: Setting) -> Plan:
    planned = plan_run("benchmarks.plan_check:make", setting.plan_options(), batch=BATCH, length=LENGTH)
    assert not planned.division.unknown
    return planned


def cells(setting: Setting, measured: Measured) -> list[str]:
    """Returns cells with ``planned / measured = ratio``, in MB."""
    planned = plan(setting)
    return [
        f"{expected / 1e6:.1f} / {found / 1e6:.1f} = {expected / found:.2f}" if expected and found else "0"
        for expected, found in (
            (planned.trainer.weights_bytes, measured.weights_bytes),
            (planned.trainer.received_bytes, measured.received_bytes),
            (planned.trainer.sent_bytes, measured.sent_bytes),
            (planned.trainer.total_bytes, measured.peak_bytes[0]),
            (planned.server.total_bytes, max(measured.peak_bytes[1:])),
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares plans with measurements.")
    parser.add_argument("--only", choices=list(SETTINGS), nargs="+", default=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--measure", choices=list(SETTINGS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(dataclasses.asdict(measure(SETTINGS[arguments.measure]))))
        return
    print("planned / measured, MB | weights | received | sent | trainer | server")
    print("--- | --- | --- | --- | --- | ---")
    for name in arguments.only:
        command = [sys.executable, "-m", "benchmarks.plan_check", "--measure", name]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        measured = Measured(**json.loads(output.splitlines()[-1]))
        print(" | ".join([name, *cells(SETTINGS[name], measured)]), flush=True)


if __name__ == "__main__":
    main()
