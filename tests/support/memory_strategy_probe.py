"""Measures a trainer's peak memory under a memory strategy.

``python -m tests.support.memory_strategy_probe (plain | ADDRESS TRANSPORTS STRATEGY)`` trains a small transformer-like
model for some steps. It prints one JSON line with the peak of memory that only this process uses (USS), above its value
before the model was built, and the seconds of the median step. Memory is sampled every few milliseconds.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import threading
import time

import psutil
import torch
from torch import nn

import shardwell
from tests.support.cluster import join_options

WIDTH, NUM_BLOCKS, BATCH, NUM_STEPS = 384, 8, 1024, 2
LIMITS = {"prefetch_bytes": 8 << 20, "push_bytes": 8 << 20}
"""A block has 7.1 MB of weights."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.up2, self.down2 = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + self.down2(torch.nn.functional.gelu(self.up2(self.norm(x))))


class Peak:
    """Samples the peak of this process's own memory."""

    def __init__(self) -> None:
        gc.collect()
        self._process, self._ended = psutil.Process(), threading.Event()
        self.before_bytes = self.peak_bytes = self._own_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def end(self) -> int:
        """Ends the sampling, and returns the peak above the first value."""
        self._ended.set()
        self._thread.join()
        return self.peak_bytes - self.before_bytes

    def reset(self) -> None:
        """Restarts the peak at the current value."""
        self.peak_bytes = self._own_bytes()

    def _own_bytes(self) -> int:
        return int(self._process.memory_full_info().uss)

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, self._own_bytes())


def main(address: str, transports: str | None = None, strategy: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    session = None
    if strategy is not None:
        session = shardwell.join(
            address,
            run=f"{strategy} over {transports}",
            **join_options(transports=transports, **LIMITS),
        )
    peak = Peak()
    model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 1))
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    optimizer: torch.optim.Optimizer
    if session is None:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    else:
        memory = shardwell.MemoryStrategy[strategy] if strategy != "default" else None  # type: ignore[index]
        shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({Block}), memory=memory)
        optimizer = shardwell.optim.AdamW(model.parameters())
    peak.reset()
    seconds = []
    for _ in range(NUM_STEPS):
        started = time.perf_counter()
        model(torch.randn(BATCH, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
    peak_bytes = peak.end()
    result = {
        "parameter_bytes": parameter_bytes,
        "peak_bytes": peak_bytes,
        "peak_unit_bytes": None if session is None else session.units.peak_bytes,
        "received_bytes": None if session is None else session.stats()["received_bytes"],
        "sent_bytes": None if session is None else session.stats()["sent_bytes"],
        "step_s": round(statistics.median(seconds), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
