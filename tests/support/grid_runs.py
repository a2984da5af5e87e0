"""Runs of a grid with trainers in processes of their own, for tests."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import shardwell
from tests.support.processes import TrainerProcess


class GridTrainer(TrainerProcess):
    """Process that runs ``tests.support.grid_trainer``."""

    module = "tests.support.grid_trainer"


def train(
    cluster: shardwell.LocalCluster,
    folder: Path,
    world: tuple[int, int, int],
    *,
    steps: int,
    device: str = "cpu",
    resume: str = "",
    trainers: int = 0,
    on_trainers: bool = False,
) -> tuple[str, list[dict[str, Any]]]:
    """Runs a trainer per rank, or fewer. Returns the run's name, and the output of each trainer.

    ``folder`` must be a new one. The trainer of rank 0 saves a checkpoint to its folder ``checkpoints`` if the run has
    committed steps. With ``on_trainers``, the trainers run the optimizer.
    """
    run, count = uuid.uuid4().hex, trainers or world[0] * world[1] * world[2]
    options = ["--device", device, "--trainers", count, *(("--resume", resume) if resume else ())]
    options += ["--on-trainers"] if on_trainers else []
    with ExitStack() as stack:
        processes = [
            stack.enter_context(GridTrainer(cluster.address, run, *world, steps, folder, *options))
            for _ in range(count)
        ]
        outputs = [process.finish() for process in processes]
    for output in outputs:
        assert output["returncode"] == 0, output["stderr"]
    return run, sorted(outputs, key=lambda output: output["rank"])


def read(cluster: shardwell.LocalCluster, run: str) -> dict[str, torch.Tensor]:
    """Returns the values of all parameters and buffers."""
    with shardwell.attach(cluster.address, run=run) as reader, reader.pin() as pinned:
        return dict(pinned.values())


def contents(url: str) -> dict[str, torch.Tensor]:
    """Returns everything in a checkpoint that belongs to a parameter or buffer, by name and state."""
    checkpoint = shardwell.open_checkpoint(url)
    names = [*checkpoint.parameters, *checkpoint.buffers]
    return {f"{name}|{state}": checkpoint.read(name, state) for name in names for state in checkpoint.states(name)}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Raises AssertionError unless the tensors have the same names and the same bits."""
    assert got.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(got[name], expected[name])] == []
