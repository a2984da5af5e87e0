"""Measures how fast a shard server applies an optimizer: ``python -m benchmarks.server_optimizer``.

The benchmark updates a shard as the server does: reduction, then ``UnitShard.update`` in a thread of the pool and in
shared memory. By turns, it runs torch's fused AdamW kernel alone on the same tensors.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.report import Chart, Report, Summary, ratio, summarize, to_table
from shardwell_server.optimizer_checks import allocation_key
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.shard_spec import ShardSpec
from shardwell_server.shard.state.shard_store import ShardStore, named_identity
from shardwell_server.shard.unit.contributions import Contribution
from shardwell_server.shard.unit.unit_shard import StepUpdate
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.optimizers import OPTIMIZERS
from shardwell_wire.v1 import common_pb2

RUN = common_pb2.RequestContext(run="benchmark", run_id="benchmark")
ROW, RANKS = 1024, 2
PARAMETER_BYTES = 4
COPIES = 14 + 2 * RANKS
"""Upper bound of copies of a shard: values, two moments, the mean, contributions, and the workspace of an update."""
CLIP = 0.5
ADAMW: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
OTHERS = [name for name in OPTIMIZERS if name not in ("adamw", "muon")]
"""Optimizers other than AdamW. Muon multiplies matrices, so its time is not proportional to the number of elements."""
LONGEST_REPEATS = 200

Result = TypeVar("Result")
Times = dict[str, list[float]]
"""Durations in seconds by activity."""


class ServedShard:
    """A shard in a server's store, and the gradients that two ranks push repeatedly.

    Args:
        store: The store that holds the shard.
        elements: Number of fp32 elements, a multiple of ``ROW``.
    """

    def __init__(self, store: ShardStore, elements: int) -> None:
        layout = UnitLayout(f"{elements}", (Parameter("weight", (elements // ROW, ROW), "float32"),))
        self._memory = store.memory
        self.shard = store.reserve(
            ShardSpec(
                run=named_identity(RUN),
                layout=layout,
                index=len(store.runs),
                start_bytes=0,
                stop_bytes=layout.size_bytes,
                dp=RANKS,
            )
        )
        generator = torch.Generator().manual_seed(0)
        self._pushed = [torch.randn(elements, generator=generator) for _ in range(RANKS)]
        self._step = 0

    async def begin(self, store: ShardStore) -> None:
        """Sets the shard's initial values."""
        shard = self.shard
        room = store.memory.incoming(shard.size_bytes, shard.initial_quota, wait_s=1.0, what=shard.what)
        with await room as received:
            shard.views(received.buffer)[0].fill_(0.01)
            shard.values.accept_initial(0, received)
        shard.values.publish(0)

    async def reduce(self) -> Tensor:
        """Computes the mean gradient of the next step. [elements]"""
        for rank, pushed in enumerate(self._pushed):
            self.shard.gradient.contributions.by_rank[rank] = Contribution(
                0, 0, pushed.view(torch.uint8), [pushed], lambda: None, present={0}, checksums=[None]
            )
        gradient = (await self.shard.gradient.reduce()).gradients[0]
        assert gradient is not None
        return gradient

    async def update(self, algorithm: str, clip: float) -> float:
        """Updates to the next version. Returns the seconds of tensor work in its thread."""
        step = to_step(algorithm)
        update = StepUpdate(self._step, step, {self.shard.index: [0]}, allocation_key(step), clip)
        self.shard.check_update(update)
        with timed_threads(self._memory, time.perf_counter) as seconds:
            await self.shard.update(update)
        self._step += 1
        return sum(seconds)

    def kernel(self, gradient: Tensor) -> None:
        """Runs torch's fused AdamW kernel alone on the shard's values and state."""
        assert self.shard.optimizer is not None and self.shard.values.live is not None
        state = self.shard.optimizer.state(0)
        values = self.shard.views(self.shard.values.live.buffer)[0]
        averages, squares = [state["exp_avg"].view(-1)], [state["exp_avg_sq"].view(-1)]
        torch._fused_adamw_(
            [values], [gradient], averages, squares, [], [state["step"]], **ADAMW, amsgrad=False, maximize=False
        )


@contextmanager
def timed_threads(memory: Memory, clock: Callable[[], float]) -> Iterator[list[float]]:
    """Records the durations of a server's tensor work that runs in threads while the block runs, by a clock."""
    seconds: list[float] = []
    in_thread = memory.in_thread

    async def timed(work: Callable[[], Any]) -> Any:
        def timed_work() -> Any:
            started = clock()
            result = work()
            seconds.append(clock() - started)
            return result

        return await in_thread(timed_work)

    with mock.patch.object(memory, "in_thread", timed):
        yield seconds


def to_step(algorithm: str) -> common_pb2.OptimizerStep:
    """Returns the message of an optimizer step."""
    values = {**ADAMW, "momentum": 0.9, "alpha": 0.99, "rho": 0.9, "d": 1.0, "eps1": 1e-7, "eps2": 1e-3}
    settings = {name: values.get(name, 0.0) for name in OPTIMIZERS[algorithm].names}
    return common_pb2.OptimizerStep(algorithm=algorithm, groups=[common_pb2.ParameterGroup(hyperparameters=settings)])


async def timed(times: Times, what: str, work: Callable[[], Awaitable[Any]]) -> Any:
    """Awaits ``work`` and records its duration."""
    started = time.perf_counter()
    result = await work()
    times.setdefault(what, []).append(time.perf_counter() - started)
    return result


async def measure_adamw(served: ServedShard, repeats: int) -> Times:
    """Runs the server's updates and the kernel by turns, in alternating order."""
    await served.reduce()
    await served.update("adamw", 1.0)
    times: Times = {}
    for number in range(repeats):
        for clip in (1.0, CLIP):
            gradient = await timed(times, "reduce", served.reduce)
            clipped = " clipped" if clip != 1.0 else ""

            async def kernel(gradient: Tensor = gradient, clip: float = clip) -> None:
                served.kernel(gradient if clip == 1.0 else gradient.mul_(clip))

            async def update(clip: float = clip, what: str = "optimizer" + clipped) -> None:
                times.setdefault(what, []).append(await served.update("adamw", clip))

            work_items: list[tuple[str, Callable[[], Awaitable[None]]]] = [("kernel", kernel), ("update", update)]
            for what, work in work_items if number % 2 else reversed(work_items):
                await timed(times, what + clipped, work)
    return times


async def measure_other(served: ServedShard, algorithm: str, repeats: int) -> Times:
    """Runs the server's updates with another algorithm."""
    times: Times = {}
    for number in range(repeats + 1):
        await served.reduce()
        await timed(times if number else {}, "update", lambda: served.update(algorithm, 1.0))
    return times


def measure(
    sizes_mb: Sequence[float], others_mb: float, rounds: int
) -> tuple[dict[float, dict[str, Summary]], dict[str, Summary]]:
    """Returns elements per second of AdamW, by size and activity, and of the other algorithms' updates."""
    torch.set_num_threads(1)
    adamw: dict[float, dict[str, Summary]] = {}
    others: dict[str, Summary] = {}

    def run(elements: int, work: Callable[[ServedShard], Awaitable[Times]]) -> dict[str, Summary]:
        async def serve() -> Times:
            with ThreadPoolExecutor(1) as threads, closing(SharedMemory()) as shared:
                store = ShardStore(COPIES * PARAMETER_BYTES * elements, threads, shared)
                served = ServedShard(store, elements)
                await served.begin(store)
                times = await work(served)
                await store.drop(RUN.run_id)
                return times

        return {what: summarize(taken).inverse(elements) for what, taken in asyncio.run(serve()).items()}

    for size in sizes_mb:
        repeats = min(LONGEST_REPEATS, max(rounds, int(rounds * max(sizes_mb) / size)))
        adamw[size] = run(to_elements(size), lambda served, repeats=repeats: measure_adamw(served, repeats))  # type: ignore[misc]
    for algorithm in OTHERS:
        found = run(to_elements(others_mb), lambda served, name=algorithm: measure_other(served, name, rounds))  # type: ignore[misc]
        others[algorithm] = found["update"]
    return adamw, others


def to_elements(megabytes: float) -> int:
    """Returns the number of fp32 elements of a shard."""
    return max(1, int(megabytes * 1e6) // PARAMETER_BYTES // ROW) * ROW


def to_sections(
    adamw: Mapping[float, Mapping[str, Summary]], others_mb: float, others: Mapping[str, Summary]
) -> list[str]:
    """Returns the sections of the report."""
    columns = {
        "kernel": "fused kernel",
        "optimizer": "server's optimizer",
        "update": "whole update",
        "kernel clipped": "clip, then kernel",
        "optimizer clipped": "server's optimizer, clipped",
        "update clipped": "whole update, clipped",
        "reduce": "mean and norm",
    }
    rows = []
    for size, found in adamw.items():
        cells = {name: f"{found[name].median / 1e9:.2f}" for name in columns}
        for clipped in ("", " clipped"):
            for what in ("optimizer" + clipped, "update" + clipped):
                cells[what] += f" ({ratio(found[what], found['kernel' + clipped])})"
        rows.append([f"{size:g}", *cells.values()])
    other_rows = [[name, f"{rate.median / 1e9:.2f}"] for name, rate in others.items()]
    return [
        "Billions of fp32 elements per second, one thread, medians; in parentheses relative to the kernel, which is "
        "measured by turns on the same memory. The optimizer is timed in its thread. The whole update includes the "
        f"switch to this thread and back, and the change of version. The mean has {RANKS} ranks.",
        to_table(["shard, MB", *columns.values()], rows),
        f"Other algorithms, the server's update of {others_mb:g} MB:",
        to_table(["algorithm", "server's update"], other_rows),
    ]


def to_chart(adamw: Mapping[float, Mapping[str, Summary]]) -> Chart:
    """Returns a chart of the kernel's and the server's rates by size."""
    bars = {
        f"{size:g} MB, {what}": found[what].scaled(1e-9)
        for size, found in adamw.items()
        for what in ("kernel", "optimizer", "update")
    }
    return Chart(axis="billion elements per second", bars=bars, lines={})


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares a shard server's optimizer with torch's fused kernel.")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[1.0, 16.0, 256.0], help="shard sizes for AdamW")
    parser.add_argument("--others-megabytes", type=float, default=16.0, help="shard size for other algorithms")
    parser.add_argument("--rounds", type=int, default=10, help="updates of the largest shard; smaller shards get more")
    report.add_arguments(parser, name="server_optimizer")
    arguments = parser.parse_args(argv)
    if arguments.rounds < 1 or min(*arguments.megabytes, arguments.others_megabytes) <= 0:
        parser.error("expected at least one round, and sizes above 0")
    return arguments


def main() -> None:
    options = parse_arguments()
    document = Report(options, title="A shard server's optimizer")
    adamw, others = measure(options.megabytes, options.others_megabytes, options.rounds)
    document.write(
        results={
            "adamw": {str(size): {what: asdict(rate) for what, rate in found.items()} for size, found in adamw.items()},
            "others": {name: asdict(rate) for name, rate in others.items()},
        },
        sections=to_sections(adamw, options.others_megabytes, others),
        chart=to_chart(adamw),
    )


if __name__ == "__main__":
    main()
