"""``shardwell trace``: writes the last steps of a run's trainers in Chrome's trace format, which Perfetto shows."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwell.command.arguments import Subparsers, add_command, add_coordinator_arguments, open_coordinator
from shardwell_wire.errors import NotFoundError
from shardwell_wire.v1 import coordinator_pb2

_DESCRIPTION = """\
Writes where the time of the last steps went, one track per trainer, as a file for https://ui.perfetto.dev or
chrome://tracing. The trainers report at most 8 steps, every few seconds.

The durations of the parts are measured, their order within a step is not: the file has them one after another. The
times are those of each trainer's host.
"""
_ORDER = ("between_steps", "data", "gather_wait", "update_wait", "compute", "pipeline_bubble", "push", "finish_wait")
"""The order in which parts are shown. Others follow."""
_US = 1e6


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``shardwell trace``."""
    parser = add_command(
        subparsers,
        "trace",
        "write the last steps of a run as a trace for Perfetto",
        _trace,
        description=_DESCRIPTION,
        epilog="example:\n  shardwell trace gpt --steps 5 -o trace.json",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="last steps of each trainer (default: 5)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json"),
        metavar="FILE",
        help="file to write (trace.json)",
    )
    add_coordinator_arguments(parser, timeout_s=10.0)


def _trace(arguments: argparse.Namespace) -> int:
    with open_coordinator(arguments) as coordinator:
        request = coordinator_pb2.DescribePerformanceRequest(run=arguments.run)
        response = coordinator.call("DescribePerformance", request, timeout_s=arguments.timeout)
    events = [*trace_events(arguments.run, response, max(1, arguments.steps))]
    steps = [event["args"]["step"] for event in events if event.get("cat") == "step"]
    if not steps:
        raise NotFoundError(
            f"no live trainer of run {arguments.run!r} has reported a step: the second step of a "
            "trainer is the first that its heartbeats report",
            run=arguments.run,
        )
    arguments.output.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    print(f"steps {min(steps)} to {max(steps)}: {arguments.output}, to be opened at https://ui.perfetto.dev")
    return 0


def trace_events(
    run: str, response: coordinator_pb2.DescribePerformanceResponse, steps: int
) -> Iterator[dict[str, Any]]:
    """Yields the events of a trace: the names of the tracks, and each step with its parts, in microseconds.

    Args:
        run: Name of the run.
        response: What the trainers have reported.
        steps: Most steps of each trainer.
    """
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": f"run {run}"}}
    for track, trainer in enumerate(response.trainers, start=1):
        ranks = f"ranks {' '.join(map(str, trainer.global_ranks))}" if trainer.global_ranks else "spare"
        where = {"pid": 1, "tid": track}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": f"{trainer.trainer} ({ranks})"}}
        for step in trainer.report.steps[-steps:]:
            at_us = (step.committed_s - step.step_s) * _US
            span = {"ph": "X", **where, "ts": at_us, "dur": step.step_s * _US}
            yield {**span, "name": f"step {step.step}", "cat": "step", "args": {"step": step.step}}
            for part, seconds in sorted(step.part_s.items(), key=_place):
                share = f"{seconds / step.step_s:.1%}" if step.step_s else "-"
                span = {"ph": "X", **where, "ts": at_us, "dur": seconds * _US}
                yield {**span, "name": part.replace("_", " "), "cat": "part", "args": {"share of the step": share}}
                at_us += seconds * _US


def _place(part: tuple[str, float]) -> tuple[int, str]:
    name, _ = part
    return (_ORDER.index(name) if name in _ORDER else len(_ORDER)), name
