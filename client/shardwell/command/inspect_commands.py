"""The commands of ``shardwell`` that inspect a cluster, delete from it, or trace the steps of a run."""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from rich.console import RenderableType

from shardwell.command import inspect_tables as tables
from shardwell.command.arguments import (
    DEGRADED,
    UNREACHABLE,
    Subparsers,
    add_command,
    add_coordinator_arguments,
    open_coordinator,
)
from shardwell.command.output import Answer, add_output_arguments, as_dict, show
from shardwell.tables import format_size
from shardwell.transport.service_client import CoordinatorClient, ServiceClient
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.model.layout import UnitLayout, by_any_name, shown_names
from shardwell_wire.model.names import nearest
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_SOURCES = {"value": shard_pb2.PEEK_SOURCE_PARAMETER, "gradient": shard_pb2.PEEK_SOURCE_GRADIENT}

_Handler = Callable[[argparse.Namespace, CoordinatorClient], Answer | Iterator[Answer]]
_Argument = tuple[str, dict[str, Any]]
"""Name, and keyword arguments of ``add_argument``."""


@dataclass(frozen=True, slots=True)
class _Command:
    """One inspection command."""

    name: str
    help: str
    example: str
    handler: _Handler
    arguments: tuple[_Argument, ...] = ()
    """Beside those of all inspection commands."""
    can_watch: bool = True
    """False: the command changes something, or its answer has no end."""
    watch_s: float | None = None
    """Default of ``--watch``."""
    notes: str = ""
    """What its help says besides."""


def add_parsers(subparsers: Subparsers) -> None:
    """Adds a subcommand for each inspection command, and ``trace``."""
    for command in _COMMANDS:
        parser = add_command(
            subparsers,
            command.name,
            command.help,
            partial(_handle, command),
            description="\n\n".join(filter(None, (f"{command.help[0].upper()}{command.help[1:]}.", command.notes))),
            epilog=f"example:\n  {command.example}",
        )
        add_coordinator_arguments(parser, timeout_s=10.0, what="an answer")
        add_output_arguments(parser, can_watch=command.can_watch)
        for name, options in command.arguments:
            parser.add_argument(name, **options)
        if command.watch_s is not None:
            parser.set_defaults(watch=command.watch_s)
    _add_trace(subparsers)


def _handle(command: _Command, arguments: argparse.Namespace) -> int:
    with open_coordinator(arguments) as coordinator:
        return show(arguments, lambda: command.handler(arguments, coordinator))


def _shows(rpc: str, request_type: type[Message], render: Callable[[Any], RenderableType]) -> _Handler:
    """Returns a handler that shows the response of an rpc, whose request has the name of the run, or nothing."""

    def handle(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
        request = request_type(**({"run": arguments.run} if "run" in arguments else {}))
        return _answer(coordinator.call(rpc, request, timeout_s=arguments.timeout), render)

    return handle


def _answer(response: Message, render: Callable[[Any], RenderableType]) -> Answer:
    return Answer((response,), render(response))


def _describe_cluster(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Any:
    request = coordinator_pb2.DescribeClusterRequest(run=arguments.run or "")
    return coordinator.call("DescribeCluster", request, timeout_s=arguments.timeout)


def _status(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    response = _describe_cluster(arguments, coordinator)
    view = tables.cluster(response, coordinator.address)
    return Answer((response,), view, exit_code=DEGRADED if tables.is_degraded(response) else 0)


def _top(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    request = coordinator_pb2.DescribeRunRequest(run=arguments.run)
    run = coordinator.call("DescribeRun", request, timeout_s=arguments.timeout)
    cluster = _describe_cluster(arguments, coordinator)
    asked = coordinator_pb2.DescribePerformanceRequest(run=arguments.run)
    performance = coordinator.call("DescribePerformance", asked, timeout_s=arguments.timeout)
    found = {"run": run, "cluster": cluster, "performance": performance}
    return Answer(({name: as_dict(each) for name, each in found.items()},), tables.top(run, cluster, performance))


def _world(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    has_sizes = bool(arguments.dp or arguments.cp or arguments.tp or arguments.pp)
    if bool(arguments.run) == has_sizes:
        raise UsageError("expected either the name of a run, or the sizes of a world by --dp, --cp, --tp and --pp")
    request = coordinator_pb2.DescribeWorldRequest(run=arguments.run or "", num_layers=arguments.num_layers)
    if has_sizes:
        world = World(
            dp=arguments.dp or 1,
            tp=arguments.tp or 1,
            pp=arguments.pp or 1,
            order=arguments.order.split(","),
            cp=arguments.cp or 1,
        )
        request.world.CopyFrom(world.to_proto())
    return _answer(coordinator.call("DescribeWorld", request, timeout_s=arguments.timeout), tables.world)


def _report(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    request = coordinator_pb2.DescribePerformanceRequest(run=arguments.run, logged_count=arguments.logged)
    return _answer(coordinator.call("DescribePerformance", request, timeout_s=arguments.timeout), tables.report)


def _events(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Iterator[Answer]:
    request = coordinator_pb2.WatchEventsRequest(run=arguments.run or "", duration_s=arguments.duration)
    for event in coordinator.stream("WatchEvents", request, timeout_s=None):
        yield Answer((event,), tables.event(event), one_per_line=True)


def _peek(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    source = _SOURCES.get(arguments.source, shard_pb2.PEEK_SOURCE_OPTIMIZER_STATE)
    request = shard_pb2.PeekRequest(
        run=arguments.run,
        parameter=arguments.parameter,
        source=source,
        state_name="" if arguments.source in _SOURCES else arguments.source,
        start=arguments.start,
        count=arguments.count,
    )
    pieces = peek(coordinator, request, timeout_s=arguments.timeout)
    documents = [{"server_id": piece.server_id, "peek": as_dict(piece.response)} for piece in pieces]
    return Answer(documents, tables.peek(arguments.parameter, pieces), one_per_line=True)


def peek(
    coordinator: CoordinatorClient, request: shard_pb2.PeekRequest, *, timeout_s: float
) -> Sequence[tables.ParameterPiece]:
    """Reads a parameter from all servers that hold a part of it.

    Args:
        request: The parameter, by its name in the model or in the run, and the values to read.

    Returns:
        The pieces of the parameter in the order of their elements.

    Raises:
        NotFoundError: The run does not exist, or has no such parameter.
        UnavailableError: A server cannot be reached from this host.
    """
    listed = coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=request.run), timeout_s=timeout_s)
    owners = {shard.server_id: shard.address for unit in listed.units for shard in unit.shards}
    with suppress(ShardwellError):  # the answers of the servers then say what is missing
        by_name = by_any_name(_names(coordinator, request.run, timeout_s))
        request = _changed(request, parameter=by_name.get(request.parameter, request.parameter))
    pieces: list[tables.ParameterPiece] = []
    failed: NotFoundError | UnavailableError | None = None
    for server_id, address in owners.items():
        service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        with closing(ServiceClient(address, service, credentials=coordinator.credentials)) as server:
            try:
                first = _peek_at(server_id, server, request, timeout_s)
            except (NotFoundError, UnavailableError) as error:
                failed = error
                continue
            for unit in first.units:
                of_unit = first if unit == first.unit else _peek_at(server_id, server, request, timeout_s, unit=unit)
                pieces.append(tables.ParameterPiece(server_id, of_unit))
                for start_bytes in of_unit.shard_start_bytes[1:]:  # more shards of the unit on the same server
                    other = _peek_at(server_id, server, request, timeout_s, unit=unit, shard_start_bytes=start_bytes)
                    pieces.append(tables.ParameterPiece(server_id, other))
    if not owners:
        raise NotFoundError(f"run {request.run!r} has no units yet", run=request.run)
    if isinstance(failed, UnavailableError) or (failed is not None and not pieces):
        raise _explain_peek(coordinator, request, failed, timeout_s)
    return sorted(pieces, key=lambda piece: ([*piece.response.offsets], piece.response.start_element))


def _explain_peek(
    coordinator: CoordinatorClient,
    request: shard_pb2.PeekRequest,
    failed: NotFoundError | UnavailableError,
    timeout_s: float,
) -> ShardwellError:
    """Returns the error for a parameter that the servers did not return: its name is wrong, or its shards are gone."""
    names = _names(coordinator, request.run, timeout_s)
    if request.parameter not in names:
        known = [shown for shown, *_ in names.values()]
        return NotFoundError(
            f"run {request.run!r} has no parameter {request.parameter!r}, only {nearest(request.parameter, known)}",
            parameter=request.parameter,
        )
    stall = coordinator.call("ExplainStall", coordinator_pb2.ExplainStallRequest(run=request.run), timeout_s=timeout_s)
    return type(failed)("; ".join([str(failed), *stall.waiting_for]), **failed.data)


def _names(coordinator: CoordinatorClient, run: str, timeout_s: float) -> dict[str, tuple[str, ...]]:
    """Returns ``shown_names`` of a run."""
    request = coordinator_pb2.DescribeWeightsRequest(run=run)
    weights = coordinator.call("DescribeWeights", request, timeout_s=timeout_s)
    return shown_names(UnitLayout.from_proto(unit.spec) for unit in weights.units)


def _peek_at(
    server_id: str, server: ServiceClient, request: shard_pb2.PeekRequest, timeout_s: float, **changed: str | int
) -> shard_pb2.PeekResponse:
    """Reads a parameter from one server. ``changed`` has the fields of the request that have other values."""
    try:
        response: shard_pb2.PeekResponse = server.call("Peek", _changed(request, **changed), timeout_s=timeout_s)
    except UnavailableError as error:
        raise UnavailableError(
            f"{server_id} at {server.address} cannot be reached from this host: {error}", server=server_id
        ) from error
    return response


def _changed(request: shard_pb2.PeekRequest, **changed: str | int) -> shard_pb2.PeekRequest:
    copy = shard_pb2.PeekRequest()
    copy.CopyFrom(request)
    for name, value in changed.items():
        setattr(copy, name, value)
    return copy


def _delete_run(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    described = coordinator.call(
        "DescribeRun", coordinator_pb2.DescribeRunRequest(run=arguments.run), timeout_s=arguments.timeout
    )
    request = coordinator_pb2.DeleteRunRequest(
        run=arguments.run,
        run_id=described.summary.run_id,  # a retry must not delete a later run of the same name
        force=arguments.force,
        request_id=uuid.uuid4().hex,
    )
    response = coordinator.call("DeleteRun", request, timeout_s=arguments.timeout)
    return _answer(response, lambda answer: f"deleted run {arguments.run!r}: {format_size(answer.freed_bytes)} freed")


def _forget_server(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> Answer:
    request = coordinator_pb2.ForgetServerRequest(server_id=arguments.server)
    response = coordinator.call("ForgetServer", request, timeout_s=arguments.timeout)
    return _answer(response, lambda _: f"forgot server {arguments.server!r}")


def _argument(name: str, **options: Any) -> _Argument:
    return name, options


_RUN = _argument("run", metavar="RUN", help="name of the run")
_TOP = (_RUN, _argument("--once", dest="watch", action="store_const", const=None, help="print one view, and end"))
_WORLD = (
    _argument("run", metavar="RUN", nargs="?", help="name of a run"),
    *(
        _argument(f"--{axis}", type=int, metavar="N", help=f"size of the {meaning} axis of a hypothetical world")
        for axis, meaning in (("dp", "data"), ("cp", "context"), ("tp", "tensor"), ("pp", "pipeline"))
    ),
    _argument("--order", default="dp,tp,pp", help="axes of the hypothetical world, slowest first (default: dp,tp,pp)"),
    _argument("--num-layers", type=int, default=0, metavar="N", help="layers to split over the stages"),
)
_REPORT = (
    _RUN,
    _argument("--logged", type=int, default=5, metavar="N", help="steps whose logged numbers to show (default: 5)"),
)
_EVENTS = (
    _argument("--run", metavar="RUN", help="show events of this run only (default: of all runs and servers)"),
    _argument("--duration", type=float, default=0.0, metavar="S", help="stop after S seconds (default: at Ctrl-C)"),
)
_PEEK = (
    _RUN,
    _argument("parameter", metavar="PARAMETER", help="qualified name, such as blocks.0.mlp.0.weight"),
    _argument(
        "--source",
        default="value",
        metavar="WHAT",
        help="value, gradient, or the name of an optimizer state such as exp_avg (default: value)",
    ),
    _argument("--start", type=int, default=0, metavar="N", help="first element to show of each shard (default: 0)"),
    _argument("--count", type=int, default=8, metavar="N", help="values to show of each shard (default: 8)"),
)
_DELETE = (_RUN, _argument("--force", action="store_true", help="delete the run even if trainers are live"))
_SERVER = _argument("server", metavar="SERVER", help="id of the server")

_COMMANDS = (
    _Command(
        "status",
        "show whether the servers and runs are all right",
        "shardwell status; shardwell status gpt --watch",
        _status,
        (_argument("run", metavar="RUN", nargs="?", help="show this run only (default: all runs)"),),
        notes=f"The exit code is 0 if all is well, {DEGRADED} if it is degraded, and {UNREACHABLE} if the coordinator "
        "does not answer.\nDegraded: a server is lost, shards are unavailable, backups are missing, a run is stalled, "
        "or checkpoints fail.",
    ),
    _Command(
        "top",
        "show a run's step time, the state of every rank, and the servers, again and again",
        "shardwell top gpt; shardwell top gpt --once",
        _top,
        _TOP,
        watch_s=1.0,
        notes="Asks every second until Ctrl-C, or every SECONDS of --watch. A pipe gets one view after the other.",
    ),
    _Command(
        "runs", "show all runs", "shardwell runs", _shows("ListRuns", coordinator_pb2.ListRunsRequest, tables.runs)
    ),
    _Command(
        "run",
        "show one run: its trainers, work in flight and optimizer",
        "shardwell run gpt",
        _shows("DescribeRun", coordinator_pb2.DescribeRunRequest, tables.run),
        (_RUN,),
    ),
    _Command(
        "world",
        "show the rank assignments of a run or of a hypothetical world",
        "shardwell world --dp 2 --tp 2 --pp 2",
        _world,
        _WORLD,
    ),
    _Command(
        "readers",
        "show who reads a run's weights, and how far each is behind",
        "shardwell readers gpt; shardwell readers gpt --watch",
        _shows("ListReaders", coordinator_pb2.ListReadersRequest, tables.readers),
        (_RUN,),
        notes="Lists readers (shardwell.attach) that have asked for weights in the last ten minutes.",
    ),
    _Command(
        "units",
        "show a run's units, and the primary and the backups of every shard",
        "shardwell units gpt",
        _shows("ListUnits", coordinator_pb2.ListUnitsRequest, tables.units),
        (_RUN,),
    ),
    _Command(
        "servers",
        "show the shard servers: memory, shards, and traffic to backups",
        "shardwell servers",
        _shows("ListServers", coordinator_pb2.ListServersRequest, tables.servers),
    ),
    _Command(
        "stall",
        "show what a run waits for, and for how long",
        "shardwell stall gpt",
        _shows("ExplainStall", coordinator_pb2.ExplainStallRequest, tables.stall),
        (_RUN,),
    ),
    _Command(
        "report",
        "show where the time of each trainer's steps goes, and what to do about it",
        "shardwell report gpt",
        _report,
        _REPORT,
    ),
    _Command("events", "show events as they happen", "shardwell events --run gpt", _events, _EVENTS, can_watch=False),
    _Command(
        "peek",
        "show values of a parameter, and its norm, minimum and maximum",
        "shardwell peek gpt blocks.0.mlp.0.weight --source exp_avg",
        _peek,
        _PEEK,
    ),
    _Command(
        "delete-run", "end a run and free its memory", "shardwell delete-run gpt", _delete_run, _DELETE, can_watch=False
    ),
    _Command(
        "forget-server",
        "remove a lost or ended shard server from the list of servers",
        "shardwell forget-server shard-7",
        _forget_server,
        (_SERVER,),
        can_watch=False,
    ),
)


_TRACE_DESCRIPTION = """\
Writes where the time of the last steps went, one track per trainer, as a file for https://ui.perfetto.dev or
chrome://tracing. The trainers report at most 8 steps, every few seconds.

The durations of the parts are measured, their order within a step is not: the file has them one after another. The
times are those of each trainer's host.
"""
_PARTS = ("between_steps", "data", "gather_wait", "update_wait", "compute", "pipeline_bubble", "push", "finish_wait")
"""The order in which parts are shown. Others follow."""
_US = 1e6


def _add_trace(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "trace",
        "write the last steps of a run as a trace for Perfetto",
        _trace,
        description=_TRACE_DESCRIPTION,
        epilog="example:\n  shardwell trace gpt --steps 5 -o trace.json",
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="last steps of each trainer (default: 5)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="file to write (trace.json)"
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
    return (_PARTS.index(name) if name in _PARTS else len(_PARTS)), name
