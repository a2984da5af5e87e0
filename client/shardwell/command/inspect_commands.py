"""The commands of ``shardwell`` that inspect a cluster or delete from it."""

from __future__ import annotations

import argparse
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from shardwell.command import inspect_tables as tables
from shardwell.command.arguments import Subparsers, add_command, add_coordinator_arguments, open_coordinator, output
from shardwell.tables import format_size
from shardwell.transport.service_client import CoordinatorClient, ServiceClient
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.model.names import nearest
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_NUMBERS = re.compile(r'\[\n((?:\s+"?-?[\d.e+-]+"?,?\n)+)\s*\]')
"""A list of numbers, one per line; 64-bit integers are in quotes."""
_SOURCES = {
    "value": shard_pb2.PEEK_SOURCE_PARAMETER,
    "gradient": shard_pb2.PEEK_SOURCE_GRADIENT,
}

_Handler = Callable[[argparse.Namespace, CoordinatorClient], None]
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


def add_parsers(subparsers: Subparsers) -> None:
    """Adds a subcommand for each inspection command."""
    for command in _COMMANDS:
        parser = add_command(
            subparsers,
            command.name,
            command.help,
            partial(_handle, command),
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"example:\n  {command.example}",
        )
        add_coordinator_arguments(parser, timeout_s=10.0, what="an answer")
        parser.add_argument("--json", action="store_true", help="print the response as JSON instead of tables")
        for name, options in command.arguments:
            parser.add_argument(name, **options)


def _handle(command: _Command, arguments: argparse.Namespace) -> int:
    with open_coordinator(arguments) as coordinator:
        command.handler(arguments, coordinator)
    return 0


def _shows(rpc: str, request_type: type[Message], render: Callable[[Any], RenderableType]) -> _Handler:
    """Returns a handler that shows the response of an rpc, whose request has the name of the run, or nothing."""

    def handle(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
        request = request_type(**({"run": arguments.run} if "run" in arguments else {}))
        _show(arguments, coordinator.call(rpc, request, timeout_s=arguments.timeout), render)

    return handle


def _show(arguments: argparse.Namespace, response: Message, render: Callable[..., RenderableType]) -> None:
    if arguments.json:
        print(to_json(response))
    else:
        output().print(render(response))


def to_json(message: Message, *, indent: int | None = 2) -> str:
    """Returns a message as JSON with proto field names and all defaults. A list of numbers takes one line."""
    text = MessageToJson(
        message, indent=indent, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def _world(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
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
    _show(arguments, coordinator.call("DescribeWorld", request, timeout_s=arguments.timeout), tables.world)


def _report(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.DescribePerformanceRequest(run=arguments.run, logged_count=arguments.logged)
    _show(arguments, coordinator.call("DescribePerformance", request, timeout_s=arguments.timeout), tables.report)


def _events(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.WatchEventsRequest(run=arguments.run or "", duration_s=arguments.duration)
    console = Console(soft_wrap=True, highlight=False)
    try:
        for event in coordinator.stream("WatchEvents", request, timeout_s=None):
            if arguments.json:
                print(to_json(event, indent=None), flush=True)
            else:
                console.print(tables.event(event))
    except KeyboardInterrupt:
        return


def _peek(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
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
    if arguments.json:
        for piece in pieces:
            print(f'{{"server_id": "{piece.server_id}", "peek": {to_json(piece.response, indent=None)}}}')
    else:
        output().print(tables.peek(arguments.parameter, pieces))


def peek(
    coordinator: CoordinatorClient, request: shard_pb2.PeekRequest, *, timeout_s: float
) -> Sequence[tables.ParameterPiece]:
    """Reads a parameter from all servers that hold a part of it.

    Args:
        coordinator: The coordinator, which names the servers.
        request: The parameter and the values to read.
        timeout_s: Deadline of each rpc.

    Returns:
        The pieces of the parameter in the order of their elements.

    Raises:
        NotFoundError: The run does not exist, or has no such parameter.
        UnavailableError: A server cannot be reached from this host.
    """
    listed = coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=request.run), timeout_s=timeout_s)
    owners = {shard.server_id: shard.address for unit in listed.units for shard in unit.shards}
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
    weights = coordinator.call(
        "DescribeWeights", coordinator_pb2.DescribeWeightsRequest(run=request.run), timeout_s=timeout_s
    )
    names = [parameter.name for unit in weights.units for parameter in unit.spec.parameters]
    if request.parameter not in names:
        return NotFoundError(
            f"run {request.run!r} has no parameter {request.parameter!r}, only {nearest(request.parameter, names)}",
            parameter=request.parameter,
        )
    stall = coordinator.call("ExplainStall", coordinator_pb2.ExplainStallRequest(run=request.run), timeout_s=timeout_s)
    return type(failed)("; ".join([str(failed), *stall.waiting_for]), **failed.data)


def _peek_at(
    server_id: str, server: ServiceClient, request: shard_pb2.PeekRequest, timeout_s: float, **changed: str | int
) -> shard_pb2.PeekResponse:
    """Reads a parameter from one server. ``changed`` has the fields of the request that have other values."""
    sent = shard_pb2.PeekRequest()
    sent.CopyFrom(request)
    for name, value in changed.items():
        setattr(sent, name, value)
    try:
        response: shard_pb2.PeekResponse = server.call("Peek", sent, timeout_s=timeout_s)
    except UnavailableError as error:
        raise UnavailableError(
            f"{server_id} at {server.address} cannot be reached from this host: {error}", server=server_id
        ) from error
    return response


def _delete_run(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
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
    _show(arguments, response, lambda answer: f"deleted run {arguments.run!r}: {format_size(answer.freed_bytes)} freed")


def _forget_server(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.ForgetServerRequest(server_id=arguments.server)
    response = coordinator.call("ForgetServer", request, timeout_s=arguments.timeout)
    _show(arguments, response, lambda _: f"forgot server {arguments.server!r}")


def _argument(name: str, **options: Any) -> _Argument:
    return name, options


_RUN = _argument("run", metavar="RUN", help="name of the run")
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
    _Command("events", "show events as they happen", "shardwell events --run gpt", _events, _EVENTS),
    _Command(
        "peek",
        "show values of a parameter, and its norm, minimum and maximum",
        "shardwell peek gpt blocks.0.mlp.0.weight --source exp_avg",
        _peek,
        _PEEK,
    ),
    _Command(
        "delete-run",
        "end a run and free its memory",
        "shardwell delete-run gpt",
        _delete_run,
        _DELETE,
    ),
    _Command(
        "forget-server",
        "remove a lost or ended shard server from the list of servers",
        "shardwell forget-server shard-7",
        _forget_server,
        (_SERVER,),
    ),
)
