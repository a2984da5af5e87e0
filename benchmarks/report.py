"""Writes the results of a benchmark as JSON, Markdown and a chart."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).resolve().parent / "results"
ABSENT = "-"
"""Cell of a table without a number."""


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of a sample, in the sample's unit."""

    median: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Summary:
        """Converts the summary to another unit."""
        return Summary(self.median * factor, self.low * factor, self.high * factor, self.count)

    def inverse(self, amount: float) -> Summary:
        """Converts seconds per ``amount`` to a rate."""
        return Summary(amount / self.median, amount / self.high, amount / self.low, self.count)


def summarize(values: Sequence[float]) -> Summary:
    """Returns median and quartiles of at least one value.

    Raises:
        ValueError: ``values`` is empty.
    """
    if not values:
        raise ValueError("cannot summarize an empty sample: expected at least one value")
    if len(values) == 1:
        return Summary(values[0], values[0], values[0], 1)
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Summary(median, low, high, len(values))


def ratio(value: Summary | None, base: Summary | None) -> str:
    """Formats a ratio of medians for a table."""
    return ABSENT if value is None or base is None else f"{value.median / base.median:.2f}"


def spread(value: Summary | None, form: str = ".0f") -> str:
    """Formats ``median (low - high)`` for a table."""
    return ABSENT if value is None else f"{value.median:{form}} ({value.low:{form}} - {value.high:{form}})"


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table. The first column is text, the others are numbers.

    Raises:
        ValueError: The number of cells in a row differs from the header.
    """
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"the row {list(row)} has {len(row)} cells, the header {len(header)}")
    ruler = ["---"] + ["--:"] * (len(header) - 1)
    lines = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in (header, ruler, *rows))
    return "\n".join(f"| {line} |" for line in lines)


def failure_row(name: str, reason: str, num_columns: int) -> list[str]:
    """Returns the row of a variant that failed."""
    return [f"{name}: failed ({reason})"] + [ABSENT] * (num_columns - 1)


def parse_cpu_name(cpuinfo: str) -> str:
    """Returns the processor's name from the text of ``/proc/cpuinfo``, or an empty string."""
    names = (line.partition(":")[2].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, "")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and the date of a measurement."""

    cores: int
    cpu: str
    memory_gib: float
    python: str
    torch: str
    load_average_before: float
    """Load average of the minute before, which shows the load by other programs."""
    date: str

    @classmethod
    def now(cls) -> Machine:
        """Describes this machine. Call before the measurement."""
        cpuinfo = Path("/proc/cpuinfo")
        return cls(
            cores=os.cpu_count() or 0,
            cpu=parse_cpu_name(cpuinfo.read_text()) if cpuinfo.exists() else platform.processor(),
            memory_gib=psutil.virtual_memory().total / 2**30,
            python=platform.python_version(),
            torch=str(torch.__version__),
            load_average_before=os.getloadavg()[0],
            date=time.strftime("%Y-%m-%d"),
        )

    def __str__(self) -> str:
        return (
            f"{self.date}, {self.cores} cores ({self.cpu or 'unnamed'}), {self.memory_gib:.0f} GiB of memory, "
            f"Python {self.python}, torch {self.torch}, load average before {self.load_average_before:.1f}"
        )


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Horizontal bars with quartiles."""

    axis: str
    """Label of the axis, with the unit."""
    bars: Mapping[str, Summary]
    lines: Mapping[str, float]
    """Reference values, drawn across all bars."""


class Report:
    """A report that is created before the measurement and written after it.

    Args:
        arguments: Result of a parser with ``add_arguments``.
        title: One line that describes the measurement.
    """

    def __init__(self, arguments: argparse.Namespace, *, title: str) -> None:
        self._directory, self._name = Path(arguments.results), str(arguments.name)
        self._title = title
        self._machine = Machine.now()
        self._command = command_line(sys.orig_argv)

    def write(self, *, results: Mapping[str, Any], sections: Sequence[str], chart: Chart | None = None) -> None:
        """Writes NAME.json, NAME.md and, with a chart, NAME.png. Prints the Markdown.

        Args:
            results: Plain values for the JSON file.
            sections: Tables and paragraphs of the Markdown file.
            chart: Chart of the PNG file.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / self._name
        document = {"title": self._title, "command": self._command, "machine": asdict(self._machine), **results}
        path.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n")
        markdown = "\n\n".join([f"# {self._title}", f"{self._machine}. `{self._command}`", *sections]) + "\n"
        path.with_suffix(".md").write_text(markdown)
        print(markdown, end="")
        if chart is not None and chart.bars:
            draw(chart, title=self._title, path=path.with_suffix(".png"))


def add_arguments(parser: argparse.ArgumentParser, *, name: str) -> None:
    """Adds ``--name`` and ``--results``, the location of the report."""
    parser.add_argument("--name", default=name, help="name of the result files (default: %(default)s)")
    parser.add_argument("--results", default=RESULTS, help="folder of the result files (default: benchmarks/results)")


def command_line(argv: Sequence[str]) -> str:
    """Returns the command that repeats the measurement, without the interpreter's directory."""
    return shlex.join(["python", *argv[1:]])


def draw(chart: Chart, *, title: str, path: Path) -> None:
    """Draws a chart into a PNG file, the first bar on top. Needs matplotlib (the extra ``bench``)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path.name} is not written: matplotlib is not installed", file=sys.stderr)
        return
    figure = Figure(figsize=(9, 1.2 + 0.36 * len(chart.bars)), layout="constrained")
    axes = figure.add_subplot()
    medians = [bar.median for bar in chart.bars.values()]
    below = [bar.median - bar.low for bar in chart.bars.values()]
    above = [bar.high - bar.median for bar in chart.bars.values()]
    bars = axes.barh(list(chart.bars), medians, xerr=[below, above], color="#4c72b0", ecolor="#222222", capsize=3)
    axes.bar_label(bars, fmt="%.3g", padding=6, fontsize=8)
    for label, value in chart.lines.items():
        axes.axvline(value, color="#c44e52", linestyle="--", linewidth=1)
        axes.annotate(label, (value, 1), xycoords=("data", "axes fraction"), color="#c44e52", fontsize=8, rotation=30)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel(chart.axis)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)
