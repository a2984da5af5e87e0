"""The life of a server process: start, say where, serve until told to stop, stop cleanly."""

from __future__ import annotations

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
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from shardwell_server.authentication import interceptors
from shardwell_server.rpc import add_service
from shardwell_server.shm_folders import DEFAULT_DIRECTORY, remove_remains
from shardwell_wire import temporary_folder
from shardwell_wire.channel import SERVER_OPTIONS
from shardwell_wire.credentials import NO_CREDENTIALS, Credentials

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_EVERY_INTERFACE = ("0.0.0.0", "[::]")

STOP_GRACE_S = 2.0
"""Rpcs in flight get this long to finish when the process is told to stop."""


def _print_ready(service: ServiceDescriptor, address: str) -> None:
    print(json.dumps({"ready": service.full_name, "address": address}), flush=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Where a server listens, how others reach it, and how it and whoever started it hear of each other."""

    bind: str = "127.0.0.1:0"
    """host:port to listen on; port 0 takes a free one."""
    advertise: str = ""
    """Host that others shall use; empty: the one in ``bind``, or this host's name if that is every interface."""
    exit_with_parent: bool = False
    """Stop when standard input closes: the starter is gone."""
    stop: asyncio.Event | None = None
    """Set by whoever started the server in a thread of its own process. None: signals stop it."""
    on_ready: Callable[[ServiceDescriptor, str], None] = _print_ready
    """Called with the service and its address once rpcs are answered."""

    def __post_init__(self) -> None:
        host, separator, port = self.bind.rpartition(":")
        if not separator or not host or not port.isdigit() or int(port) > 65535:
            raise ValueError(f"expected HOST:PORT to listen on, got {self.bind!r}")

    @property
    def host(self) -> str:
        """Where to listen, without the port."""
        return self.bind.rpartition(":")[0]

    def address(self, port: int) -> str:
        """host:port to give to others."""
        host = self.advertise or self.host
        if host in _EVERY_INTERFACE:
            host = socket.gethostname()
        return f"{host}:{port}"


Background = Callable[[str], AbstractAsyncContextManager[Awaitable[object]]]
"""Given the address others use: what runs while the server serves, such as a heartbeat. It gives something that raises
when the server must not go on, and is never done otherwise."""


async def serve(
    service: ServiceDescriptor,
    servicer: object,
    endpoint: Endpoint,
    background: Background,
    *,
    credentials: Credentials = NO_CREDENTIALS,
    end_standing: Callable[[], None] = lambda: None,
) -> None:
    """Serves one service with health checks and reflection until SIGTERM, SIGINT or the starter's end.

    Unless ``endpoint.on_ready`` does something else, prints one JSON line
    ``{"ready": service, "address": "host:port"}`` to standard output once rpcs are answered and ``background`` is
    entered.

    Args:
        service: What is served.
        servicer: Serves it.
        endpoint: Where.
        background: Runs meanwhile; what it raises ends the server at once.
        credentials: What callers must show.
        end_standing: Called when told to stop: ends rpcs that do not end by themselves, so that nothing
            waits out ``STOP_GRACE_S`` for them.
    """
    server = grpc.aio.server(interceptors=interceptors(credentials), options=SERVER_OPTIONS)
    add_service(server, service, servicer)
    health = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (service.full_name, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    try:
        port = server.add_insecure_port(endpoint.bind)
    except RuntimeError as error:
        raise SystemExit(f"cannot listen on {endpoint.bind}: {_why_not(endpoint)}") from error
    stop = endpoint.stop or stop_event(endpoint)
    await server.start()
    address = endpoint.address(port)
    try:
        async with AsyncExitStack() as stack:
            entering = asyncio.ensure_future(stack.enter_async_context(background(address)))
            if not await _done_before(stop, entering):
                return
            for name in ("", service.full_name):
                await health.set(name, health_pb2.HealthCheckResponse.SERVING)
            endpoint.on_ready(service, address)
            logger.info("%s serves at %s", service.full_name, address)
            await _done_before(stop, entering.result())
            logger.info("stopping")
            await health.enter_graceful_shutdown()
            end_standing()
            await server.stop(STOP_GRACE_S)
    finally:
        await server.stop(0)


def _why_not(endpoint: Endpoint) -> str:
    """Why nothing can listen there, which gRPC does not say."""
    host, port = endpoint.host.strip("[]"), int(endpoint.bind.rpartition(":")[2])
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return "it was taken a moment ago; start the server again"
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        return f"{reason}; choose another with --listen (port 0: a free one)"


async def _done_before(stop: asyncio.Event, work: Awaitable[object]) -> bool:
    """Awaits ``work``, which may take for ever, unless ``stop`` is set first; returns whether it was done."""
    doing, told = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({doing, told}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return doing.done()
    finally:
        doing.cancel()
        told.cancel()
        await asyncio.gather(doing, told, return_exceptions=True)


def stop_event(endpoint: Endpoint) -> asyncio.Event:
    """Set at SIGTERM or SIGINT, and at the starter's end if the endpoint is to end with it."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def ask_to_stop(*_: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)

    # Not the loop's own handlers: they go with the loop, and a second signal would then kill a process that has
    # stopped well.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    if endpoint.exit_with_parent:
        threading.Thread(target=_stop_at_end_of_input, args=(loop, stop.set), daemon=True).start()
    return stop


def _stop_at_end_of_input(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    # Not sys.stdin: a thread that waits in it holds its lock, which makes the interpreter abort at exit.
    while os.read(0, 4096):
        pass
    loop.call_soon_threadsafe(stop)


def run(main: Awaitable[_Result], *, log_level: str) -> _Result:
    """Runs a server's main coroutine in this process, logging to standard error; returns what it returns."""
    logging.basicConfig(
        level=log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )

    _allow_many_files()

    async def until_done() -> _Result:
        return await main

    # What is imported by now stays, and with torch that is much: the collector would look at all of it again while the
    # server serves, and at its end for a third of a second.
    gc.freeze()
    try:
        return asyncio.run(until_done())
    finally:
        _remove_leftovers()


def _remove_leftovers() -> None:
    """Removes what processes of this user left behind that were killed, such as this one's starter or a sibling."""
    directory = Path(os.environ.get("SHARDWELL_SHM_DIR", DEFAULT_DIRECTORY))
    with suppress(OSError):
        remove_remains(directory)
    with suppress(OSError):
        temporary_folder.remove_remains()


def _allow_many_files() -> None:
    """Lets the process open as many files as it ever may: each connection is one, and each that trainers map.

    A shell's or service's limit is often 1024 at first, which a large model's units and gradient buffers pass.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS says there is no limit, and refuses to do without
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
