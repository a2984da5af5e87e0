"""Small checkpoints, written without servers."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.format import CheckpointFileWriter, FilePlan, Part, Piece, checksum_of
from shardwell_wire.checkpoints.manifest import MANIFEST_NAME, Manifest
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

RUN, WORLD = "gpt", World(dp=2)
UNITS = (
    UnitLayout(
        "blocks.0", (Parameter("blocks.0.weight", (5, 7), "float32"), Parameter("blocks.0.bias", (), "float64"))
    ),
    UnitLayout("head", (Parameter("head.weight", (3, 0), "bfloat16"), Parameter("head.scale", (17,), "bfloat16"))),
    UnitLayout("~buffers", (Parameter("freqs", (4,), "complex128"),), kind="buffers"),
)

Tensors = Mapping[Piece, torch.Tensor]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def state_tensors(step: int, cuts: Sequence[int] = (0, 11, 35)) -> list[dict[Piece, torch.Tensor]]:
    """Returns the tensors of two files: ``blocks.0.weight`` is cut, and ``head.scale`` has no optimizer state yet."""
    generator = torch.Generator().manual_seed(step)
    files: list[dict[Piece, torch.Tensor]] = []
    weight, moment = (torch.rand(35, generator=generator) for _ in range(2))
    for start, stop in pairwise(cuts):
        files.append(
            {
                Piece("blocks.0.weight", "values", start, stop, "float32", (stop - start,)): weight[start:stop],
                Piece("blocks.0.weight", "exp_avg", start, stop, "float32", (stop - start,)): moment[start:stop],
                Piece("blocks.0.weight", "step", start, stop, "float32", (), "whole"): torch.tensor(float(step)),
            }
        )
    files[0][Piece("blocks.0.bias", "values", 0, 1, "float64", (1,))] = torch.rand(1, generator=generator).double()
    files[-1][Piece("head.weight", "values", 0, 0, "bfloat16", (0,))] = torch.empty(0).bfloat16()
    files[-1][Piece("head.scale", "values", 0, 17, "bfloat16", (17,))] = torch.rand(17, generator=generator).bfloat16()
    files[-1][Piece("freqs", "values", 0, 4, "complex128", (4,))] = torch.rand(4, generator=generator).to(
        torch.complex128
    )
    return files


def write_checkpoint(
    url: str | Path,
    step: int,
    *,
    checkpoint_id: str | None = None,
    run: str = RUN,
    run_id: str = "id1",
    files: Sequence[Tensors] | None = None,
    units: Sequence[UnitLayout] = UNITS,
    optimizer: Mapping[str, Any] | None = None,
    publish: bool = True,
    created: float | None = None,
    world: World = WORLD,
) -> str:
    """Writes a checkpoint with one file per entry of ``files``. Returns its path or URL."""
    checkpoint_id = checkpoint_id or f"c{step}"
    folder_of_run = RunFolder.of(url, run)
    folder = folder_of_run.begin(step, checkpoint_id)
    storage, records = open_storage(folder_of_run.url_of(folder)), []
    for number, tensors in enumerate(state_tensors(step) if files is None else files):
        parts = [Part(at.parameter, at.start, at.stop, "adamw", step) for at in tensors if at.state == "values"]
        plan = FilePlan(tensors, parts, run_id=run_id, step=step)
        writer = CheckpointFileWriter(storage, f"s{number}", plan)
        for piece, tensor in reversed(tensors.items()):
            writer.write(piece, as_bytes(tensor))
        records.append(writer.finish())
    if publish:
        folder_of_run.publish(
            folder,
            Manifest(
                run=run,
                run_id=run_id,
                checkpoint_id=checkpoint_id,
                step=step,
                created=time.time() if created is None else created,
                world=world,
                seed=3,
                units=tuple(units),
                files=tuple(records),
                commits=(_commit(step, units, optimizer or {}),),
                run_state=coordinator_pb2.RunState(step=step - 1, tracked_json={"schedule": '{"last": 3}'}),
            ),
        )
    return folder_of_run.url_of(folder)


def rewrite_manifest(folder: Path, change: Mapping[str, Any]) -> None:
    """Changes keys of a checkpoint's manifest, and gives it the checksum of its new content."""
    path = folder / MANIFEST_NAME
    content = json.loads(path.read_text()) | {"xxh3_64": "0" * 16} | change
    data = json.dumps(content).encode()
    path.write_bytes(data.replace(b'"xxh3_64": "' + b"0" * 16, b'"xxh3_64": "' + checksum_of(data).encode()))


def _commit(step: int, units: Sequence[UnitLayout], optimizer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": step - 1,
        "time": 1.0,
        "leader": "rank 0",
        "optimizer": dict(optimizer),
        "clip_coefficient": 1.0,
        "unit_order": [index for index, unit in enumerate(units) if not unit.holds_buffers],
        "grad_norm": float("inf"),
        "other_norms": [],
        "skipped": False,
    }
