"""Measures a process's memory around one forward and backward of 12 blocks, sharded or plain.

``python -m tests.support.memory_probe (plain | ADDRESS TRANSPORTS)`` prints one JSON line: bytes of memory that only
this process uses (USS).
"""

from __future__ import annotations

import gc
import json
import sys

import psutil
import torch
from torch import nn

import shardwell
from shardwell.memory.buffers import trim

WIDTH, NUM_BLOCKS = 512, 12
PUSH_BYTES = 16 << 20
"""Allows a block's gradients in flight, but not the whole model's."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6 * WIDTH), nn.Linear(6 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def own_bytes() -> int:
    gc.collect()
    return int(psutil.Process().memory_full_info().uss)


def main(address: str, transports: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    session = (
        None
        if transports is None
        else shardwell.join(
            address,
            run=f"memory over {transports}",
            transfers=shardwell.TransferOptions(transports=transports, push_bytes=PUSH_BYTES, keep_bytes=0),
        )
    )
    # Warm up: one-time costs such as kernels, connections and threads are not compared.
    warm = Block() if session is None else shardwell.fully_shard(Block(), session)
    warm(torch.randn(2, WIDTH)).sum().backward()
    if session is not None:
        session.store.gradients.drain()
    start = own_bytes()
    blocks = []
    for _ in range(NUM_BLOCKS):
        blocks.append(Block())
        if session is not None:
            shardwell.fully_shard(blocks[-1], session)
    model = nn.Sequential(*blocks)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    built = own_bytes()
    loss = model(torch.randn(2, WIDTH)).sum()
    after_forward = own_bytes()
    live = None if session is None else session.units.live_bytes
    loss.backward()
    if session is not None:
        session.store.gradients.drain()
    after_backward = own_bytes()
    trim()  # the heaps keep the memory of freed gradients for the next step
    held = own_bytes()
    result = {
        "parameter_bytes": parameter_bytes,
        "built": built - start,
        "after_forward": after_forward - start,
        "after_backward": after_backward - start,
        "held_since_built": held - built,
        "live_unit_bytes": live,
        "peak_unit_bytes": None if session is None else session.units.peak_bytes,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
