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
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType


class _StreamingPlanner(DefaultSavePlanner):
    """Takes each tensor from an iterator when the writer needs it.

    Args:
        values: Names and tensors, in the order of the state dict.
    """

    def __init__(self, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Returns the value of an item. Called once per item, in the order of the plan."""
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        name, value = next(self._values)
        assert name == write_item.index.fqn, f"the next value is {name}, expected {write_item.index.fqn}"
        return value


def write_checkpoint(folder: Path, state: Mapping[str, Any], values: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Writes a checkpoint with the library's own writer.

    Args:
        folder: An empty folder.
        state: The state dict, which may be nested. Tensors have the right shapes and dtypes. Their memory is not read.
        values: The tensors in the same order, with values, by name. Names of nested tensors are joined with dots.
    """
    meta = _as_meta(state)
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


def _as_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, Mapping):
        return {name: _as_meta(item) for name, item in value.items()}
    return value
