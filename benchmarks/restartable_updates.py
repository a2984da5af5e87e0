"""Measures what updates that another process can continue cost: ``python -m benchmarks.restartable_updates``.

By turns, it updates one shard whose files outlive the process, and one whose files do not. It also copies the tensors
that an update changes, slice by slice into one small area, and does nothing else. The table has the CPU seconds of the
thread that updates, which other programs on the machine disturb less than the duration.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.server_optimizer import ServedShard, timed_threads, to_step
from shardwell_server.optimizer_checks import allocation_key
from shardwell_server.shard.arithmetic.update_pieces import SLICE_BYTES
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.unit_shard import StepUpdate
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner

OWNER = FolderOwner(server_id="benchmark", coordinator="none")


async def update(served: ServedShard, store: ShardStore, step: int, algorithm: str, clip: float) -> float:
    """Reduces a gradient and updates the shard; returns the CPU seconds of the update."""
    await served.reduce()
    await served.shard.record_prepared()
    optimizer = to_step(algorithm)
    update = StepUpdate(step, optimizer, {served.shard.index: [0]}, allocation_key(optimizer), clip)
    await served.shard.prepare_update(update)
    with timed_threads(store.memory, time.thread_time) as seconds:
        await served.shard.update(update)
    return sum(seconds)


def copy(served: ServedShard, area: torch.Tensor) -> float:
    """Copies what an update of the shard changes, slice by slice; returns the CPU seconds."""
    optimizer, live = served.shard.optimizer, served.shard.values.live
    assert optimizer is not None and live is not None
    started = time.thread_time()
    for tensor in (live.buffer, *optimizer.state(0).values()):
        for start in range(0, tensor.nbytes, SLICE_BYTES):
            size = min(SLICE_BYTES, tensor.nbytes - start)
            ctypes.memmove(area.data_ptr(), tensor.data_ptr() + start, size)
    return time.thread_time() - started


async def measure(algorithm: str, elements: int, repeats: int, clip: float) -> tuple[float, float, float]:
    """Returns the median CPU seconds of an update that ends with its process, of one that can be continued, and of the
    copies alone."""
    with (
        TemporaryDirectory(dir=DEFAULT_DIRECTORY) as folder,  # no shards of a former measurement are in it
        ThreadPoolExecutor(1) as threads,
        closing(SharedMemory()) as plain,
        closing(SharedMemory(Path(folder), OWNER)) as restartable,
    ):
        stores = [ShardStore(100 * elements, threads, shared) for shared in (plain, restartable)]
        served = [ServedShard(store, elements) for store in stores]
        for each, store in zip(served, stores, strict=True):
            await each.begin(store)
            each.shard.record()
        times: tuple[list[float], list[float]] = ([], [])
        copies, area = [], torch.empty(SLICE_BYTES, dtype=torch.uint8)
        for step in range(repeats + 1):
            for each, store, own in zip(served, stores, times, strict=True):
                seconds = await update(each, store, step, algorithm, clip)
                if step:  # the first update also allocates state
                    own.append(seconds)
            copies.append(copy(served[1], area))
    first, second = map(statistics.median, times)
    return first, second, statistics.median(copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=7 << 20, help="fp32 elements of the shard, a multiple of 1024")
    parser.add_argument("--repeats", type=int, default=9, help="updates of each shard")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| optimizer | clipping | plain, ms | restartable, ms | ratio | copies alone, ms |\n|---|---|---|---|---|---|"
    )
    for algorithm in ("adamw", "sgd", "lion", "adafactor"):
        for clip in (1.0, 0.5):
            plain, other, copies = asyncio.run(measure(algorithm, arguments.elements, arguments.repeats, clip))
            row = (
                algorithm,
                "yes" if clip < 1 else "no",
                f"{plain * 1e3:.1f}",
                f"{other * 1e3:.1f}",
                f"{other / plain:.2f}",
                f"{copies * 1e3:.1f}",
            )
            print("|", " | ".join(row), "|", flush=True)


if __name__ == "__main__":
    main()
