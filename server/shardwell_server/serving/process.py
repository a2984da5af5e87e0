"""Runs a server process: start, print the address, serve until asked to stop, stop cleanly.

``shardwell-server health`` checks a server with the gRPC health protocol, such as in a container's probe.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from shardwell_server.serving import json_log, metrics
from shardwell_server.serving.authentication import ALL_STANDARD, check_caller, interceptors
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.limits import RequestLimits, grpc_port
from shardwell_server.serving.rpc import add_service, unary_rpcs
from shardwell_wire.connection.channel import SERVER_OPTIONS, open_channel
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, remove_remains, remove_temporary_folders
from shardwell_wire.host.variables import variables
from shardwell_wire.model.names import is_host
from shardwell_wire.security.credentials import NO_CREDENTIALS, TOKEN_FILE_VARIABLE, Credentials, read_token_file
from shardwell_wire.security.tls import Tls, add_tls_arguments, tls_options, tls_problem

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_EVERY_INTERFACE = ("0.0.0.0", "[::]")

STOP_GRACE_S = 2.0
"""Time for rpcs in flight to finish when the process is asked to stop."""


def _print_ready(service: ServiceDescriptor, address: str, over_http: Mapping[str, str]) -> None:
    print(json.dumps({"ready": service.full_name, "address": address, **over_http}), flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server listens, how clients reach it, and how its starter controls it."""

    bind: str = "127.0.0.1:0"
    """host:port to listen on. Port 0: a free port."""
    advertise: str = ""
    """Host by which clients reach the server. Empty: the host in ``bind``, or this host's name for a wildcard."""
    exit_with_parent: bool = False
    """Stop when standard input closes, because the parent process has ended."""
    without_token: Collection[str] = ALL_STANDARD
    """Services of gRPC that need no token, such as ``health``."""
    metrics_bind: str = ""
    """host:port on which metrics are served over HTTP. Port 0: a free port. Empty: they are not served."""
    dashboard_bind: str = ""
    """host:port on which the coordinator's web page is served. As ``metrics_bind``."""
    stop: asyncio.Event | None = None
    """Set to stop a server that runs in a thread. None: signals stop the server."""
    on_ready: Callable[[ServiceDescriptor, str, Mapping[str, str]], None] = _print_ready
    """Called when the server accepts rpcs, with the service, its address, and the addresses of what is served over
    HTTP: ``metrics``, ``dashboard``."""

    def __post_init__(self) -> None:
        host, separator, port = self.bind.rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"expected HOST:PORT to listen on, got {self.bind!r}")
        if self.advertise and not is_host(self.advertise):
            raise ValueError(
                f"--advertise is {self.advertise!r}: expected a host name or an IP address without a port, an IPv6 "
                "address in brackets; the port is that of --listen"
            )

    @property
    def host(self) -> str:
        """Host to listen on, without the port."""
        return self.bind.rpartition(":")[0]

    def address(self, port: int) -> str:
        """Returns the host:port by which clients reach the server."""
        host = self.advertise or self.host
        if host in _EVERY_INTERFACE:
            host = socket.gethostname()
        return f"{host}:{port}"


Background = Callable[[str], AbstractAsyncContextManager[Awaitable[object]]]
"""Work that runs while the server serves, such as heartbeats. Called with the server's address. Yields an awaitable
that raises when the server must stop, and never completes otherwise."""


async def serve(
    service: ServiceDescriptor,
    servicer: object,
    endpoint: Endpoint,
    background: Background,
    *,
    credentials: Credentials = NO_CREDENTIALS,
    calls: CallServer | None = None,
    end_standing: Callable[[], None] = lambda: None,
    leave: Callable[[], Awaitable[object]] | None = None,
    read_metrics: metrics.Read = tuple,
) -> None:
    """Serves one service, with health checks and reflection, until SIGTERM, SIGINT or the end of the parent process.

    When ``background`` is entered and rpcs are accepted, calls ``endpoint.on_ready``, which by default prints the JSON
    line ``{"ready": service, "address": "host:port"}`` to standard output, with the addresses of the ``metrics`` and
    the ``dashboard`` if there are any.

    Args:
        servicer: Object that implements the service.
        endpoint: Where to listen.
        background: Runs while the server serves. An error that it raises ends the server at once.
        credentials: The key that verifies the tokens of callers, and the TLS of the server.
        calls: Takes unary rpcs beside gRPC. It does not listen if the server has TLS. None: nothing does.
        end_standing: Called when the server is asked to stop. Ends streams that would otherwise stay open for
            ``STOP_GRACE_S``.
        leave: Called after the first SIGTERM, while the server still serves. The server stops when it returns, or at
            once after a second signal. None: SIGTERM stops the server at once.
        read_metrics: Returns the server's metrics, besides those that all servers have.
    """
    admission = interceptors(credentials.key, endpoint.without_token)
    server = grpc.aio.server(interceptors=admission, options=SERVER_OPTIONS)
    limits = RequestLimits()
    add_service(server, service, servicer, limits)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (service.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    port = _listen(server, endpoint, credentials.tls)
    leaving = asyncio.Event()
    stop = endpoint.stop or stop_event(endpoint, first_sigterm=leaving if leave is not None else None)
    await server.start()
    if calls is not None and credentials.tls is None:
        key = credentials.key
        admit = (lambda path, token: None) if key is None else partial(check_caller, key)
        await calls.start(unary_rpcs(service, servicer, limits), admit, grpc_port=port)
    address = endpoint.address(port)
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(grpc_port(port))
            metrics_address = await stack.enter_async_context(metrics.serving(endpoint.metrics_bind, read_metrics))
            over_http = {"metrics": metrics_address} if metrics_address else {}
            if endpoint.dashboard_bind:
                page = _dashboard(endpoint.dashboard_bind, service, servicer, limits, credentials)
                over_http["dashboard"] = await stack.enter_async_context(page)
            entering = asyncio.ensure_future(stack.enter_async_context(background(address)))
            if not await done_before(entering, stop, leaving):
                return
            for name in ("", service.full_name):
                await health.set(name, health_pb2.HealthCheckResponse.SERVING)
            endpoint.on_ready(service, address, over_http)
            logger.info("%s serves at %s", service.full_name, address)
            working = asyncio.ensure_future(entering.result())
            try:
                await _until_set(working, stop, leaving)
                if leave is not None and not stop.is_set():
                    await done_before(leave(), stop)
            finally:
                working.cancel()
            logger.info("stopping")
            await health.enter_graceful_shutdown()
            end_standing()
            await asyncio.gather(server.stop(STOP_GRACE_S), *([] if calls is None else [calls.stop(STOP_GRACE_S)]))
    finally:
        await server.stop(0)
        if calls is not None:
            await calls.stop(0)


def _dashboard(
    bind: str, service: ServiceDescriptor, servicer: object, limits: RequestLimits, credentials: Credentials
) -> AbstractAsyncContextManager[str]:
    """Returns what serves the web page. Raises SystemExit if its packages are not installed."""
    try:
        from shardwell_server.serving import dashboard
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"--dashboard-port needs the package {error.name!r}, which is not installed: run "
            "pip install 'shardwell[dashboard]'"
        ) from error
    admit = None if credentials.key is None else partial(check_caller, credentials.key)
    return dashboard.serving(bind, dashboard.PageRpcs(service, servicer, limits, admit), credentials.tls)


class _StandBy(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Refuses every rpc of a server that does not serve yet."""

    def service(self, _: Any) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    @staticmethod
    async def _refuse(_: object, context: grpc.aio.ServicerContext) -> None:
        await context.abort(
            grpc.StatusCode.UNAVAILABLE, "this coordinator is a stand-by: name the addresses of all coordinators"
        )


@asynccontextmanager
async def standing_by(service: ServiceDescriptor, endpoint: Endpoint, credentials: Credentials) -> AsyncIterator[None]:
    """Listens while the block runs, without serving: the server is not healthy, and its rpcs are UNAVAILABLE.

    Args:
        credentials: As for ``serve``.
    """
    server = grpc.aio.server(interceptors=interceptors(credentials.key, endpoint.without_token), options=SERVER_OPTIONS)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in ("", service.full_name):
        await health.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_generic_rpc_handlers((_StandBy(),))
    _listen(server, endpoint, credentials.tls)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


def _listen(server: grpc.aio.Server, endpoint: Endpoint, tls: Tls | None) -> int:
    """Returns the port on which the server listens. Raises SystemExit if the address cannot be bound."""
    try:
        if tls is None:
            port: int = server.add_insecure_port(endpoint.bind)
        else:
            port = server.add_secure_port(endpoint.bind, tls.server_credentials())
    except RuntimeError as error:
        raise SystemExit(f"cannot listen on {endpoint.bind}: {_why_not(endpoint)}") from error
    return port


def _why_not(endpoint: Endpoint) -> str:
    """Returns why the address cannot be bound, which gRPC does not report."""
    host, port = endpoint.host.strip("[]"), int(endpoint.bind.rpartition(":")[2])
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return "another process has just released the port; start the server again"
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        return f"{reason}; choose another address with --listen (port 0: a free port)"


async def done_before(work: Awaitable[object], *events: asyncio.Event) -> bool:
    """Awaits ``work`` until an event is set, then cancels it; returns True if the work was done first."""
    doing = asyncio.ensure_future(work)
    try:
        await _until_set(doing, *events)
        return doing.done()
    finally:
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


async def _until_set(work: asyncio.Future[Any], *events: asyncio.Event) -> None:
    """Returns when an event is set or ``work`` is done. Raises the error of ``work``."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait({work, *waits}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)


def stop_event(endpoint: Endpoint, first_sigterm: asyncio.Event | None = None) -> asyncio.Event:
    """Returns an event set by SIGTERM or SIGINT, and by the end of the parent if ``exit_with_parent`` is set.

    Args:
        endpoint: How the starter of the process controls it.
        first_sigterm: Set by the first SIGTERM instead. Later ones set the returned event.
    """
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def note(number: int) -> None:
        if number == signal.SIGTERM and first_sigterm is not None and not first_sigterm.is_set():
            first_sigterm.set()
        else:
            stop.set()

    def handle(number: int, _: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(note, number)

    # Not loop.add_signal_handler: closing the loop removes its handlers, and a second signal would then kill a process
    # that is stopping cleanly.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    if endpoint.exit_with_parent:
        threading.Thread(target=_stop_at_end_of_input, args=(loop, stop.set), daemon=True).start()
    return stop


def _stop_at_end_of_input(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    # Not sys.stdin: a thread blocked in it holds its lock, and the interpreter aborts at exit.
    while os.read(0, 4096):
        pass
    with suppress(RuntimeError):  # the loop is closed: the server has stopped already
        loop.call_soon_threadsafe(stop)


def run(main: Coroutine[Any, Any, _Result], *, log_level: str, log_format: str = "text", name: str = "") -> _Result:
    """Runs a server's main coroutine with logging to standard error; returns its result.

    Args:
        main: The coroutine.
        log_level: Lowest level that is logged.
        log_format: ``text`` or ``json``.
        name: Name of this process in a log in JSON.
    """
    json_log.configure(log_level, log_format, name)
    _allow_many_files()

    # Imported modules are never freed. Without this call, the garbage collector scans their objects while the server
    # serves and at exit. With torch, a scan takes a third of a second.
    gc.freeze()
    try:
        return asyncio.run(main)
    finally:
        _remove_leftovers()


def _remove_leftovers() -> None:
    """Removes the files of killed processes of this user, such as the parent or a sibling of this process."""
    directory = Path(variables().get("SHARDWELL_SHM_DIR", DEFAULT_DIRECTORY))
    with suppress(OSError):
        remove_remains(directory)
    with suppress(OSError):
        remove_temporary_folders()


def _allow_many_files() -> None:
    """Raises the limit of open files to the hard limit.

    Each connection and each file in shared memory uses one descriptor. The initial limit is often 1024, less than the
    units and gradient buffers of a large model need.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports an unlimited hard limit but rejects it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``health`` subcommand."""
    parser = subparsers.add_parser(
        "health",
        help="check the health of a server",
        description="Exits with 0 if the server reports SERVING over the gRPC health protocol, otherwise with 1.",
        epilog="example:\n  shardwell-server health localhost:50051",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--service", default="", help="such as shardwell_wire.v1.ShardService (default: the server as a whole)"
    )
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait (default: 2)")
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        default=variables().get(TOKEN_FILE_VARIABLE, ""),
        help="file with the cluster's key or a token, for a server that requires one for health checks "
        f"({TOKEN_FILE_VARIABLE})",
    )
    add_tls_arguments(parser)
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server health``; prints the status."""
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    options = tls_options(arguments)
    tls = None if options is None else Tls(options)
    with open_channel(arguments.address, tls) as channel:
        try:
            response = _check(channel, request, arguments)
        except grpc.RpcError as error:
            problem = tls_problem(arguments.address, tls) or f"{error.code().name}: {error.details()}"
            print(f"{arguments.address}: {problem}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1


def _check(
    channel: grpc.Channel, request: health_pb2.HealthCheckRequest, arguments: argparse.Namespace
) -> health_pb2.HealthCheckResponse:
    """Sends the token only to a server that requires one."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return stub.Check(request, timeout=arguments.timeout)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED or not arguments.token_file:
            raise
    return stub.Check(request, timeout=arguments.timeout, metadata=read_token_file(arguments.token_file).metadata)
