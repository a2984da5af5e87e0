"""A ``torch.distributed.checkpoint`` written from values that come one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem


class _Streaming(DefaultSavePlanner):
    """Hands out each value when it is written.

    Args:
        values: Names and values in the order of the state dict that is saved.
    """

    def __init__(self, values: Iterator[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._values = values

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The value of an item; called once for each, in the order of the plan."""
        name, value = next(self._values)
        assert name == write_item.index.fqn, f"{name} comes, {write_item.index.fqn} is wanted"
        return value


def write_checkpoint(
    folder: Path, tensors: Mapping[str, torch.Tensor], values: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Writes a checkpoint by the library's own writer, which then knows how to read it.

    Args:
        folder: Empty.
        tensors: Names to tensors of the right shapes and dtypes, whatever memory they have.
        values: The same names in the same order, with values.
    """
    hollow = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    # A file per tensor: the writer holds all tensors of a file until it is closed.
    writer = FileSystemWriter(folder, single_file_per_rank=False, thread_count=1)
    planner = _Streaming(values)
    # What checkpoint.save does in one process; it would wrap every error, and warn that there is only one process.
    writer.reset(folder)
    planner.set_up_planner(hollow, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    local_plan = writer.prepare_local_plan(planner.create_local_plan())
    global_plans, metadata = planner.create_global_plan([local_plan])
    (plan,) = writer.prepare_global_plan(global_plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    writer.finish(metadata, [written.wait()])
