"""Writes a ``torch.distributed.checkpoint`` from values that arrive one after another.

A separate module, imported on use, because importing ``torch.distributed.checkpoint`` is slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem


class _StreamingPlanner(DefaultSavePlanner):
    """Takes each value from an iterator when the writer needs it.

    Args:
        values: Names and values, in the order of the state dict.
    """

    def __init__(self, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the value of an item. Called once per item, in the order of the plan."""
        name, value = next(self._values)
        assert name == write_item.index.fqn, f"the next value is {name}, expected {write_item.index.fqn}"
        return value


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], values: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Writes a checkpoint with the library's own writer.

    Args:
        folder: An empty folder.
        tensors: Names and tensors with the right shapes and dtypes. Their memory is not read.
        values: The same names in the same order, with values.
    """
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    # One file per tensor: the writer holds all tensors of a file until it closes the file.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    planner = _StreamingPlanner(values)
    # The steps of checkpoint.save in a single process. checkpoint.save itself would wrap every error and warn about the
    # single process.
    writer.reset(folder)
    planner.set_up_planner(meta, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(global_plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])
