"""Measures a process's memory while it saves a trained model unit by unit.

``python -m tests.support.saving_probe ADDRESS (safetensors | dcp) FOLDER`` prints one JSON line: the additional private
memory of the process in bytes, at each tensor that is written. Runs in its own process, because earlier
allocations would distort the measurement.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch import nn

import shardwell
from shardwell.weights import state_dict

NUM_LAYERS, WIDTH = 16, 1448
LAYER_BYTES = 4 * WIDTH * WIDTH


def own_bytes() -> int:
    return int(psutil.Process().memory_full_info().uss)


def main(address: str, kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    used: list[int] = []
    read_values = state_dict.read_values

    def measured(state: Any, **options: Any) -> Iterator[Any]:
        values = read_values(state, **options)
        while (item := next(values, None)) is not None:
            used.append(own_bytes())
            yield item
            del item  # without this wrapper, the caller would hold the only reference

    with shardwell.join(
        address, run=f"saving {kind}", transfers=shardwell.TransferOptions(transports="grpc", prefetch_bytes=0)
    ) as session:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
        for layer in model:
            shardwell.fully_shard(layer, session, source=shardwell.init.drawn())
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(4, WIDTH)).sum().backward()
        optimizer.step()
        shardwell.full_state_dict(model[0])  # one-time costs of the first use are not measured
        state_dict.read_values = measured
        before = own_bytes()
        if kind == "dcp":
            shardwell.save_dcp(model, folder)
        else:
            shardwell.save_safetensors(model, folder, max_shard_bytes=12_000)
    print(json.dumps([now - before for now in used]))


if __name__ == "__main__":
    main(*sys.argv[1:])
