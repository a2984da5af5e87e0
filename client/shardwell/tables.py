"""Sizes, durations and tables as text for human readers. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from io import StringIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from shardwell_wire.v1 import coordinator_pb2

_REPORT_WIDTH = 120
_GAP = 3
"""Spaces between the columns of a listing."""
_WRAPPED_WIDTH = 24
"""Least width of a column that may be narrower than its cells, in characters."""
_MAX_WIDTH = 100_000
_DIVISION = ("STAGE", "PP", "LAYERS", "COUNT", "KIND", "PARAMETERS", "SIZE", "STYLE", "SENT PER STEP AND DP RANK")


def format_size(count_bytes: int) -> str:
    """Returns a size in the binary unit that keeps the number short, such as ``1.5 MiB``."""
    value, units = float(count_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Returns a duration in a unit that keeps the number short, such as ``1.5 ms``."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1e3 * seconds:.1f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def report_table(
    headings: Sequence[str], rows: Iterable[Sequence[str | Text]], *, numbers: Collection[str] = ()
) -> Table:
    """Returns a table without lines, whose long cells are cut at words.

    Args:
        headings: Headings of the columns. If all are empty, the table has no heading.
        numbers: Headings of the columns that are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(headings))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table


class Listing:
    """A table for the answer of a server. Cells do not break inside words.

    If the columns do not fit the console, optional columns are left out, one after the other. If the others do not
    fit either, the lines are longer than the console.

    Args:
        optional: Headings of the columns that may be left out, the least important first.
        wrapped: Headings of the columns whose cells continue in the next line, at spaces.
    """

    def __init__(self, *headings: str, optional: Iterable[str] = (), wrapped: Collection[str] = ()) -> None:
        self._headings, self._optional, self._wrapped = headings, tuple(optional), wrapped
        self._rows: list[Sequence[str | Text]] = []

    @property
    def row_count(self) -> int:
        return len(self._rows)

    def add_row(self, *cells: str | Text) -> None:
        self._rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        omitted: set[str] = set()
        for heading in (*self._optional, None):
            table = self._table(omitted)
            needed = Measurement.get(console, options.update(width=_MAX_WIDTH), table).minimum
            if needed <= options.max_width or heading is None:
                break
            omitted.add(heading)
        yield from console.render(table, options.update(width=max(needed, options.max_width)))

    def _table(self, omitted: Collection[str]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        kept = [index for index, heading in enumerate(self._headings) if heading not in omitted]
        for index in kept:
            heading = self._headings[index]
            longest = max(map(cell_len, (heading, *(str(row[index]) for row in self._rows))))
            wraps = heading in self._wrapped
            table.add_column(heading, min_width=min(longest, _WRAPPED_WIDTH) if wraps else longest, no_wrap=not wraps)
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        return table


def listing_table(*headings: str) -> Table:
    """Returns a table with wide gaps, whose long cells continue in the next line."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def report_text(report: RenderableType) -> str:
    """Returns a report as text without colors, in lines of at most 120 characters."""
    console = Console(file=StringIO(), width=_REPORT_WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(report)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def division_tables(models: Iterable[coordinator_pb2.ModelPlan], tp: int) -> list[RenderableType]:
    """Returns a line and a table for each model that is divided over tensor and pipeline ranks.

    Args:
        tp: Number of tensor-parallel ranks.
    """
    found: list[RenderableType] = []
    for model in models:
        table = listing_table(*_DIVISION)
        for index, stage in enumerate(model.stages):
            span = f"{stage.first_layer} ... {stage.last_layer}" if stage.first_layer else "the whole model"
            sizes = (f"{stage.element_count:,}", format_size(stage.size_bytes))
            table.add_row(str(index), str(stage.pp_rank), span, "", "", *sizes, "", "")
            for layer in stage.layers:
                table.add_row(*_layer_row(layer))
        found += [f"\n{_division_line(model, tp)}", table]
        if model.omitted_row_count:
            found.append(f"{model.omitted_row_count} rows more")
    return found


def _division_line(model: coordinator_pb2.ModelPlan, tp: int) -> str:
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
