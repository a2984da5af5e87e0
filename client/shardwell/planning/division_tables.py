"""Tables of models that are divided over tensor and pipeline ranks. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table

from shardwell.sizes import format_size
from shardwell_wire.v1 import coordinator_pb2

_HEADINGS = ("STAGE", "PP", "LAYERS", "COUNT", "KIND", "PARAMETERS", "SIZE", "STYLE", "SENT PER STEP AND DP RANK")


def of_models(models: Iterable[coordinator_pb2.ModelPlan], tp: int) -> list[RenderableType]:
    """Returns a line and a table for each model that is divided over tensor and pipeline ranks.

    Args:
        models: The models.
        tp: Number of tensor-parallel ranks.
    """
    found: list[RenderableType] = []
    for model in models:
        table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
        for heading in _HEADINGS:
            table.add_column(heading, overflow="fold")
        for index, stage in enumerate(model.stages):
            span = f"{stage.first_layer} ... {stage.last_layer}" if stage.first_layer else "the whole model"
            sizes = (f"{stage.element_count:,}", format_size(stage.size_bytes))
            table.add_row(str(index), str(stage.pp_rank), span, "", "", *sizes, "", "")
            for layer in stage.layers:
                table.add_row(*_layer_row(layer))
        found += [f"\n{_line(model, tp)}", table]
        if model.omitted_row_count:
            found.append(f"{model.omitted_row_count} rows more")
    return found


def _line(model: coordinator_pb2.ModelPlan, tp: int) -> str:
    size = " x ".join(map(str, model.micro_batch_shape))
    parts = [f"{model.model} in {len(model.stages)} stages"]
    if model.schedule:
        parts.append(f"{model.schedule} with {model.num_micro_batches} micro-batches{size and f' of {size}'}")
    if any(layer.style for stage in model.stages for layer in stage.layers):
        parts.append(f"tensor parallelism over {tp} ranks")
    parts += ["sequence parallelism"] if model.sequence_parallel else []
    parts += ["loss parallelism"] if model.loss_parallel else []
    return ", ".join(parts)


def _layer_row(layer: coordinator_pb2.PlannedLayers) -> Sequence[str]:
    sent = ", ".join(
        f"{each.phase} {each.operation}{f' {format_size(each.bytes_per_step)}' if each.bytes_per_step else ''}"
        for each in layer.collectives
    )
    style = f"{layer.style} ({layer.part})" if layer.style else "whole"
    sizes = (f"{layer.element_count:,}", format_size(layer.size_bytes))
    return ("", "", f"  {layer.name}", str(layer.count), layer.kind, *sizes, style, sent or "-")
