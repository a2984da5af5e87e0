"""Compares the cost of an optimizer on the trainer with the same optimizer on the servers, interleaved, per transport.

Run ``python -m benchmarks.optimizer_on_trainer [--transports shm,grpc] [--steps 12]``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable

import psutil
import torch
from torch import nn

import shardwell

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

WARM_STEPS = 3

MAKERS: dict[str, Make] = {
    "servers": lambda parameters: shardwell.optim.Adam(parameters, lr=1e-3),
    "trainer, fused": lambda parameters: shardwell.ClientSide(parameters, torch.optim.Adam, lr=1e-3, fused=True),
    "trainer": lambda parameters: shardwell.ClientSide(parameters, torch.optim.Adam, lr=1e-3),
}


class Training:
    """A run that takes one step per call."""

    def __init__(self, address: str, make: Make, transports: str) -> None:
        self._session = shardwell.join(
            address,
            run=f"{id(self)}",
            world=shardwell.World(dp=1),
            transfers=shardwell.TransferOptions(transports=transports),
        )
        torch.manual_seed(0)
        self._model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
        for layer in self._model:
            shardwell.fully_shard(layer, self._session)
        shardwell.fully_shard(self._model, self._session)
        self._optimizer = make(self._model.parameters())

    def step(self) -> tuple[float, float, float]:
        """Takes a step.

        Returns:
            Seconds from the end of the backward until the new weights were used, and the CPU seconds of this process
            and of the servers in this time.
        """
        x = torch.ones(4, 1024)
        self._model(x).square().mean().backward()
        started, own_cpu_s, servers_cpu_s = time.perf_counter(), time.process_time(), _servers_cpu_s()
        self._optimizer.step()
        with torch.no_grad():
            self._model(x)
        return time.perf_counter() - started, time.process_time() - own_cpu_s, _servers_cpu_s() - servers_cpu_s

    def close(self) -> None:
        self._session.close()


def _servers_cpu_s() -> float:
    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return sum(time.user + time.system for time in times)


def measure(address: str, transports: str, steps: int) -> None:
    """Prints the median of each kind, and its ratio to the optimizer on the servers."""
    trainings = {name: Training(address, make, transports) for name, make in MAKERS.items()}
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in trainings}
    for number in range(WARM_STEPS + steps):
        for name, training in trainings.items():
            seconds = training.step()
            if number >= WARM_STEPS:
                taken[name].append(seconds)
    base = statistics.median(wall for wall, _, _ in taken["servers"])
    for name, steps_taken in taken.items():
        wall = statistics.median(each[0] for each in steps_taken)
        own_ms, servers_ms = (1e3 * statistics.mean(values) for values in list(zip(*steps_taken, strict=True))[1:])
        shown = (
            f"{wall * 1e3:6.1f} ms  x{wall / base:4.1f}  cpu: trainer {own_ms:6.1f} ms, servers {servers_ms:6.1f} ms"
        )
        print(f"{transports:8} {name:16} {shown}")
    for training in trainings.values():
        training.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transports", default="shm,socket,grpc")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with shardwell.LocalCluster(num_shards=2) as cluster:
        for transports in options.transports.split(","):
            measure(cluster.address, f"{transports},grpc" if transports == "shm" else transports, options.steps)


if __name__ == "__main__":
    main()
