"""Serves the coordinator's web page, and the rpcs that it shows, over HTTP.

``GET /api/DescribeRun?run=gpt`` answers what the rpc answers, as JSON: the handler, the checks of the token and the
limits are those of the rpc, and the parameters are the fields of its request. A caller has its token in the header
``Authorization: Bearer TOKEN``. All of it runs on the server's event loop; only the conversion to JSON takes a thread.
Nothing can be changed through this port: only ``RPCS`` are there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import grpc
import uvicorn
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardwell_server.serving import limits
from shardwell_server.serving.authorization import CALLER
from shardwell_server.serving.call_server import Admit
from shardwell_server.serving.limits import RequestLimits
from shardwell_server.serving.rpc import CallContext, StreamingRpc, UnaryRpc, reported_error, streaming_rpcs, unary_rpcs
from shardwell_wire.errors import AccessError, InvalidRequestError, NotFoundError, UnauthenticatedError, wire_message
from shardwell_wire.security.credentials import token_in
from shardwell_wire.security.tls import Tls

logger = logging.getLogger(__name__)

RPCS = (
    *("ListRuns", "DescribeCluster", "DescribeRun", "DescribeWorld", "ListUnits", "ListServers", "ExplainStall"),
    *("DescribePerformance", "ListReaders", "WatchEvents"),
)
"""The rpcs that can be called. None of them changes a run."""

_FILES = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css")}
_FILES["/page.js"] = ("page.js", "text/javascript")

_HEADERS = {
    # The page needs nothing from elsewhere, no site may show it in a frame, and what is injected is not executed.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

_STATUS = {
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""HTTP statuses by those of gRPC. All others are 500."""

_TOKEN_ADVICE = (
    "make one where the cluster's key is: `shardwell token --role operator`, or for one run "
    "`shardwell token --role reader --run RUN`"
)

_ANSWER_LIMIT_S = 10.0
_PAST_EVENTS_S = 0.001
"""A stream of events yields all past events before it looks at its duration."""

_MAX_CONNECTIONS = 64
_MAX_HEADER_BYTES = 16 << 10
_CONNECTION_S = 60.0
"""A connection is closed after this time, when it has no request. A browser opens another one."""


_Ask = Callable[[MethodDescriptor, dict[str, str], CallContext], Awaitable[str]]
"""Calls an rpc with the fields of its request; returns JSON."""


@dataclass(frozen=True, slots=True)
class PageRpcs:
    """The rpcs of a service that the page calls."""

    service: ServiceDescriptor
    servicer: Any
    """Object that implements the service, as for ``add_service``."""
    request_limits: RequestLimits
    """Limits of callers and runs. They count the same rpcs over gRPC, too."""
    admit: Admit | None
    """Checks the token of a caller. None: the cluster has no key, and every caller is admitted."""

    def routes(self, refusals: limits.Unproven) -> Iterator[Route]:
        """Yields a route for each rpc. ``refusals``: limits callers without a right."""
        unary = unary_rpcs(self.service, self.servicer, self.request_limits)
        streaming = streaming_rpcs(self.service, self.servicer, self.request_limits)
        for name in RPCS:
            method, path = self.service.methods_by_name[name], f"/{self.service.full_name}/{name}"
            ask = partial(_ask, unary[path]) if path in unary else partial(_ask_stream, streaming[path])
            yield Route(f"/api/{name}", partial(self._answer, refusals, path, method, ask), methods=["GET"])

    async def _answer(
        self, refusals: limits.Unproven, path: str, method: MethodDescriptor, ask: _Ask, request: Request
    ) -> Response:
        assert request.client is not None
        peer = _peer_of(request.client)
        try:
            self._admit(refusals, path, peer, request)
            context = CallContext(peer, asyncio.get_running_loop().time, _ANSWER_LIMIT_S)
            text = await ask(method, dict(request.query_params), context)
        except Exception as error:
            shown = reported_error(path, error, peer)
            status = _STATUS.get(shown.status or grpc.StatusCode.INTERNAL, 500)
            headers = {"www-authenticate": "Bearer"} if status == 401 else {}
            return _json(json.dumps({"error": type(shown).__name__, "message": wire_message(shown)}), status, headers)
        return _json(text)

    def _admit(self, refusals: limits.Unproven, path: str, peer: str, request: Request) -> None:
        CALLER.set(None)  # otherwise a refusal would be recorded with the caller of an earlier request
        if self.admit is None:
            _check_name(request.url.hostname or "")
            return
        try:
            self.admit(path, token_in(request.headers.items()))
        except AccessError as error:
            refusals.count(peer)
            if isinstance(error, UnauthenticatedError):
                raise UnauthenticatedError(f"{error}: {_TOKEN_ADVICE}", **error.data) from error
            raise


def _check_name(name: str) -> None:
    """Checks the host in the URL of a request without a token.

    A foreign site can let its own name lead to this server, and its scripts would then read the answers in a browser.

    Raises:
        AccessError: The name is neither an IP address nor one of this host.
    """
    if name in ("localhost", socket.gethostname()):
        return
    try:
        ipaddress.ip_address(name)
    except ValueError:
        raise AccessError(
            f"without a key, the page is not served under the name {name!r}: open it by this host's IP address or "
            "name, or give the coordinator a key (--token-file)"
        ) from None


def _peer_of(client: tuple[str, int]) -> str:
    """Returns an address in grpc's format."""
    host, port = client
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


async def _ask(respond: UnaryRpc, method: MethodDescriptor, fields: dict[str, str], context: CallContext) -> str:
    data = await respond(_encode(method, fields), context)
    return await asyncio.to_thread(_to_json, method, [data], lambda documents: documents[0])


async def _ask_stream(
    respond: StreamingRpc, method: MethodDescriptor, fields: dict[str, str], context: CallContext
) -> str:
    """Returns the past events. With ``after``, only those after this time, in the format of ``time``."""
    after = Timestamp()
    try:
        after.FromJsonString(fields.pop("after", "1970-01-01T00:00:00Z"))
    except ValueError as error:
        raise InvalidRequestError(f"after: {error}") from error
    request = _encode(method, {**fields, "duration_s": str(_PAST_EVENTS_S)})
    data = [each async for each in respond(request, context)]
    is_new = partial(_is_after, after.ToNanoseconds())
    return await asyncio.to_thread(_to_json, method, data, lambda documents: {"events": documents}, is_new)


def _encode(method: MethodDescriptor, fields: dict[str, str]) -> bytes:
    request: Message = GetMessageClass(method.input_type)()
    known = request.DESCRIPTOR.fields_by_name
    if unknown := [name for name in fields if name not in known]:
        only = f"only {', '.join(known)}" if known else "and takes none"
        raise InvalidRequestError(f"{method.name} has no field {unknown[0]!r}, {only}")
    try:
        return ParseDict(fields, request).SerializeToString()
    except ParseError as error:
        raise InvalidRequestError(f"the parameters are not those of {method.name}: {error}") from error


def _is_after(time_ns: int, event: Any) -> bool:
    return bool(event.time.ToNanoseconds() > time_ns)


def _to_json(
    method: MethodDescriptor,
    data: Sequence[bytes],
    shape: Callable[[list[Any]], Any],
    is_wanted: Callable[[Message], bool] = lambda _: True,
) -> str:
    """Returns answers as the JSON that ``shardwell -o json`` prints."""
    messages = map(GetMessageClass(method.output_type).FromString, data)
    documents = [
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for message in messages
        if is_wanted(message)
    ]
    return json.dumps(shape(documents), ensure_ascii=False, separators=(",", ":"))


def _json(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(text, status, headers, media_type="application/json")


def _files(needs_token: bool) -> Iterator[Route]:
    """Yields the routes of the page and of what it consists of."""
    folder = resources.files(__package__) / "page"
    for path, (name, kind) in _FILES.items():
        text = (folder / name).read_text(encoding="utf-8").replace("{needs_token}", str(needs_token).lower())
        yield Route(path, partial(_file, text, kind), methods=["GET"])


async def _file(text: str, kind: str, request: Request) -> Response:
    return Response(text, media_type=kind)


def _application(routes: Iterable[Route]) -> Any:
    router = Router([*routes], redirect_slashes=False, default=_unknown)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        given = {name: value for name, value in scope["headers"] if name in (b"content-length", b"transfer-encoding")}
        if given.get(b"transfer-encoding") or given.get(b"content-length", b"0") != b"0":  # it is not read
            refusal = PlainTextResponse("a request to this port has no body\n", 413, {"connection": "close"})
            await refusal(scope, receive, send)
        else:
            await router(scope, receive, send)

    return answer


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    if re.match(r"/api(/|$)", scope["path"]):
        error = NotFoundError(f"expected /api/ and one of {', '.join(RPCS)}")
        text = json.dumps({"error": "NotFoundError", "message": str(error)})
        await _json(text, 404)(scope, receive, send)
    else:
        await PlainTextResponse("there is nothing at this path: the page is at /\n", 404)(scope, receive, send)


class _Connection(H11Protocol):
    """One connection. It ends after ``_CONNECTION_S``, so that silent clients do not keep others out."""

    _timers: Sequence[asyncio.TimerHandle] = ()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.abort()
            return
        later = self.loop.call_later
        self._timers = later(_CONNECTION_S, self.shutdown), later(_CONNECTION_S + _ANSWER_LIMIT_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """A server whose process handles the signals itself."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def close_connections(self, peers: Iterable[str]) -> int:
        """Closes the connections of peers; returns how many were found."""
        wanted = set(peers)
        connections: set[Any] = self.server_state.connections
        found = [each for each in connections if each.client and _peer_of(each.client) in wanted]
        for connection in found:
            connection.transport.abort()
        return len(found)


@asynccontextmanager
async def serving(bind: str, rpcs: PageRpcs, tls: Tls | None) -> AsyncIterator[str]:
    """Serves the page while the block runs; yields the address.

    Args:
        bind: host:port to listen on.
        rpcs: What the page shows.
        tls: TLS of the server. None: there is none.

    Raises:
        SystemExit: The address cannot be bound.
    """
    host, _, port = bind.rpartition(":")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host.strip("[]"), int(port)), family=family)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise SystemExit(
            f"cannot serve the dashboard on {bind}: {reason}; choose another address with --dashboard-host "
            "and --dashboard-port (port 0: a free port)"
        ) from error
    server = _Server(_config())
    server.config.app = _application(
        [*rpcs.routes(limits.refusals(server.close_connections)), *_files(rpcs.admit is not None)]
    )
    server.config.load()
    server.config.ssl = None if tls is None else tls.server_context()
    address = f"{host}:{listener.getsockname()[1]}"
    running = asyncio.ensure_future(server.serve([listener]))
    try:
        while not server.started:
            await asyncio.wait({running}, timeout=0.01)
            if running.done():
                running.result()
        logger.info("the dashboard is at http%s://%s/", "" if tls is None else "s", address)
        yield address
    finally:
        server.should_exit = True
        await running


def _config() -> uvicorn.Config:
    return uvicorn.Config(
        app="",  # set when the server exists, whose connections it may have to close
        interface="asgi3",
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        headers=list(_HEADERS.items()),
        server_header=False,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=1,
    )
