"""The commands of ``shardwell`` that inspect a cluster or delete from it."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from rich.console import Console, RenderableType

from shardwell.command import inspect_tables as tables
from shardwell.credentials import find_credentials
from shardwell.sizes import format_size
from shardwell.transport.rpc import CoordinatorClient, ServiceClient
from shardwell_wire.errors import NotFoundError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.model.names import nearest
from shardwell_wire.model.topology import World
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE, Credentials
from shardwell_wire.security.tls import add_tls_arguments, has_tls_arguments, tls_options
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

DEFAULT_ADDRESS = "localhost:50051"
_PIPE_WIDTH = 200
_NUMBERS = re.compile(r'\[\n((?:\s+"?-?[\d.e+-]+"?,?\n)+)\s*\]')
"""A list of numbers, one per line; 64-bit integers are in quotes."""
_SOURCES = {
    "value": shard_pb2.PEEK_SOURCE_PARAMETER,
    "gradient": shard_pb2.PEEK_SOURCE_GRADIENT,
}


@dataclass(frozen=True, slots=True)
class _Command:
    """One inspection command."""

    name: str
    help: str
    example: str
    handler: Callable[[argparse.Namespace, CoordinatorClient], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda _: None


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds a subcommand for each inspection command."""
    common = argparse.ArgumentParser(add_help=False)
    address = os.environ.get("SHARDWELL_ADDRESS") or DEFAULT_ADDRESS
    common.add_argument(
        "--address",
        default=address,
        metavar="HOST:PORT",
        help="address of the coordinator (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    add_credentials_arguments(common)
    common.add_argument("--json", action="store_true", help="print the response as JSON instead of tables")
    common.add_argument(
        "--timeout",
        type=positive_seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for an answer (default: 10)",
    )
    for command in _COMMANDS:
        parser = subparsers.add_parser(
            command.name,
            parents=[common],
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            epilog=f"example:\n  {command.example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
        parser.set_defaults(handler=_handler(command))


def _handler(command: _Command) -> Callable[[argparse.Namespace], int]:
    def handle(arguments: argparse.Namespace) -> int:
        with open_coordinator(arguments) as coordinator:
            command.handler(arguments, coordinator)
        return 0

    return handle


def positive_seconds(text: str) -> float:
    """Parses a duration of more than 0 s, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return seconds


def add_credentials_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--token-file`` and the options of TLS."""
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        help="file with the cluster's key or a token (default: the key of your local cluster at the address, else the "
        f"token in {TOKEN_VARIABLE}, else the file in {TOKEN_FILE_VARIABLE})",
    )
    add_tls_arguments(parser)


def credentials_of(arguments: argparse.Namespace) -> Credentials:
    """Returns the credentials that the arguments name."""
    tls = tls_options(arguments) if has_tls_arguments(arguments) else None
    return find_credentials(arguments.address, arguments.token_file, tls)


def add_coordinator_arguments(parser: argparse.ArgumentParser, condition: str = "") -> None:
    """Adds ``--address``, ``--token-file``, ``--timeout`` and the options of TLS.

    Args:
        parser: The parser of a command.
        condition: When the arguments are used, such as ``for a run: ``.
    """
    parser.add_argument(
        "--address",
        default=os.environ.get("SHARDWELL_ADDRESS") or DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"{condition}address of the coordinator (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    add_credentials_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="S",
        help=f"{condition}seconds to wait for an answer of the coordinator (default: 60)",
    )


@contextmanager
def open_coordinator(arguments: argparse.Namespace) -> Iterator[CoordinatorClient]:
    """Yields a client for the arguments. If the coordinator cannot be reached, the error says what to check."""
    address = arguments.address
    with closing(CoordinatorClient(address, credentials_of(arguments))) as client:
        try:
            yield client
        except UnavailableError as error:
            if error.data.get("peer") != client.peer:
                raise
            raise UnavailableError(
                f"no answer from a coordinator at {address} ({_reason(error)}). Start one with "
                "`shardwell-server coordinator`, or a whole cluster with `docker compose up`; or name another address "
                "with --address HOST:PORT or SHARDWELL_ADDRESS",
                **error.data,
            ) from error


def _reason(error: UnavailableError) -> str:
    """Returns the useful part of gRPC's message."""
    return str(error).rpartition("last error: ")[2].rpartition("UNKNOWN: ")[2]


def _show(arguments: argparse.Namespace, response: Message, render: Callable[..., RenderableType]) -> None:
    if arguments.json:
        print(to_json(response))
    else:
        _console().print(render(response))


def _console() -> Console:
    """Returns a console on standard output. A pipe gets wide lines instead of columns cut to 80 characters."""
    return Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False)


def to_json(message: Message, *, indent: int | None = 2) -> str:
    """Returns a message as JSON with proto field names and all defaults. A list of numbers takes one line."""
    text = MessageToJson(
        message, indent=indent, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)


def _runs(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.ListRunsRequest()
    _show(arguments, coordinator.call("ListRuns", request, timeout_s=arguments.timeout), tables.runs)


def _run(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.DescribeRunRequest(run=arguments.run)
    _show(arguments, coordinator.call("DescribeRun", request, timeout_s=arguments.timeout), tables.run)


def _world(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    has_sizes = bool(arguments.dp or arguments.tp or arguments.pp)
    if bool(arguments.run) == has_sizes:
        raise UsageError("expected either the name of a run, or the sizes of a world by --dp, --tp and --pp")
    request = coordinator_pb2.DescribeWorldRequest(run=arguments.run or "", num_layers=arguments.num_layers)
    if has_sizes:
        world = World(
            dp=arguments.dp or 1, tp=arguments.tp or 1, pp=arguments.pp or 1, order=arguments.order.split(",")
        )
        request.world.CopyFrom(world.to_proto())
    _show(arguments, coordinator.call("DescribeWorld", request, timeout_s=arguments.timeout), tables.world)


def _units(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.ListUnitsRequest(run=arguments.run)
    _show(arguments, coordinator.call("ListUnits", request, timeout_s=arguments.timeout), tables.units)


def _servers(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.ListServersRequest()
    _show(arguments, coordinator.call("ListServers", request, timeout_s=arguments.timeout), tables.servers)


def _stall(arguments: argparse.Namespace, coordinator: CoordinatorClient) -> None:
    request = coordinator_pb2.ExplainStallRequest(run=arguments.run)
    _show(arguments, coordinator.call("ExplainStall", request, timeout_s=arguments.timeout), tables.stall)


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
        _console().print(tables.peek(arguments.parameter, pieces))


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


def _server_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", metavar="SERVER", help="id of the server")


def _run_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="name of the run")


def _world_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", nargs="?", help="name of a run")
    for axis, meaning in (("dp", "data"), ("tp", "tensor"), ("pp", "pipeline")):
        parser.add_argument(
            f"--{axis}", type=int, metavar="N", help=f"size of the {meaning} axis of a hypothetical world"
        )
    parser.add_argument(
        "--order", default="dp,tp,pp", help="axes of the hypothetical world, slowest first (default: dp,tp,pp)"
    )
    parser.add_argument("--num-layers", type=int, default=0, metavar="N", help="layers to split over the stages")


def _events_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", metavar="RUN", help="show events of this run only (default: of all runs and servers)")
    parser.add_argument(
        "--duration", type=float, default=0.0, metavar="S", help="stop after S seconds (default: at Ctrl-C)"
    )


def _peek_arguments(parser: argparse.ArgumentParser) -> None:
    _run_argument(parser)
    parser.add_argument("parameter", metavar="PARAMETER", help="qualified name, such as blocks.0.mlp.0.weight")
    parser.add_argument(
        "--source",
        default="value",
        metavar="WHAT",
        help="value, gradient, or the name of an optimizer state such as exp_avg (default: value)",
    )
    parser.add_argument(
        "--start", type=int, default=0, metavar="N", help="first element to show of each shard (default: 0)"
    )
    parser.add_argument("--count", type=int, default=8, metavar="N", help="values to show of each shard (default: 8)")


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    _run_argument(parser)
    parser.add_argument("--force", action="store_true", help="delete the run even if trainers are live")


_COMMANDS = (
    _Command("runs", "show all runs", "shardwell runs", _runs),
    _Command(
        "run", "show one run: its trainers, work in flight and optimizer", "shardwell run gpt", _run, _run_argument
    ),
    _Command(
        "world",
        "show the rank assignments of a run or of a hypothetical world",
        "shardwell world --dp 2 --tp 2 --pp 2",
        _world,
        _world_arguments,
    ),
    _Command(
        "units",
        "show a run's units, and the primary and the backups of every shard",
        "shardwell units gpt",
        _units,
        _run_argument,
    ),
    _Command(
        "servers", "show the shard servers: memory, shards, and traffic to backups", "shardwell servers", _servers
    ),
    _Command("stall", "show what a run waits for, and for how long", "shardwell stall gpt", _stall, _run_argument),
    _Command("events", "show events as they happen", "shardwell events --run gpt", _events, _events_arguments),
    _Command(
        "peek",
        "show values of a parameter, and its norm, minimum and maximum",
        "shardwell peek gpt blocks.0.mlp.0.weight --source exp_avg",
        _peek,
        _peek_arguments,
    ),
    _Command(
        "delete-run",
        "end a run and free its memory",
        "shardwell delete-run gpt",
        _delete_run,
        _delete_arguments,
    ),
    _Command(
        "forget-server",
        "remove a lost or ended shard server from the list of servers",
        "shardwell forget-server shard-7",
        _forget_server,
        _server_argument,
    ),
)
