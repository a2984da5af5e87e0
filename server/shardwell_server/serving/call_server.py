"""Takes unary rpcs on call connections, beside gRPC: a request costs about a fifth of the CPU time of a gRPC call.

docs/wire-format.md describes the connections. A request has the same handler, token, limits and errors as over gRPC.
gRPC stays the way for everything else, and for clients that cannot reach the port.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from shardwell_server.serving.authorization import CALLER
from shardwell_server.serving.limits import MAX_LOGGED_PER_S, Rate, Unproven, refusals
from shardwell_server.serving.rpc import CallContext, UnaryRpc, reported_error
from shardwell_wire import fault_points
from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError, End, RequestHeader
from shardwell_wire.connection.socket_frames import set_options
from shardwell_wire.errors import DeadlineError, InvalidRequestError, to_status_details
from shardwell_wire.security.tokens import Identity
from shardwell_wire.v1 import common_pb2

logger = logging.getLogger(__name__)

MAX_CONNECTIONS, MAX_READERS, MAX_UNPROVEN = 4096, 2048, 128
"""Maximum number of connections, of those of readers, and of those whose handshake is not complete. One more of the
last closes the oldest of them."""

MAX_REQUESTS_AT_ONCE = 64
"""Unfinished requests of one connection. Further ones are not read."""

_logged = Rate(MAX_LOGGED_PER_S, MAX_LOGGED_PER_S)
"""Limits the lines about closed connections in the log of this process."""

Admit = Callable[[str, str], Identity | None]
"""Takes the path of an rpc and a token; returns the caller. Raises AccessError if the caller may not call the rpc."""


class CallServer:
    """Listens for call connections. Used on one event loop.

    Args:
        host: Host to listen on, without a port. An IPv6 address may be in brackets.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._secret = secrets.token_bytes(call_frames.SECRET_BYTES)
        self._port = self._grpc_port = 0
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.unproven: dict[_Connection, None] = {}
        """Connections whose handshake is not complete, oldest first."""
        self.refusals: Unproven = refusals(self._close_peers)
        self.rpcs: Mapping[str, UnaryRpc] = {}
        self.admit: Admit = lambda path, token: None

    def offer(self, caller: Identity | None = None, *, is_reader: bool = False) -> common_pb2.CallPort | None:
        """Returns what a caller needs to connect. None: the server does not listen."""
        if not self._port:
            return None
        digest = hashlib.sha256(repr(caller).encode()).digest()
        client_id = bytes([is_reader]) + digest[1 : call_frames.CLIENT_ID_BYTES]
        secret = self.secret_of(client_id)
        return common_pb2.CallPort(port=self._port, grpc_port=self._grpc_port, secret=secret, client_id=client_id)

    def secret_of(self, client_id: bytes) -> bytes:
        """Returns the secret of a client id, which only callers that got an offer with it know."""
        return hmac.digest(self._secret, client_id, "sha256")

    def has_room(self) -> bool:
        """Returns whether another reader may connect."""
        return sum(connection.is_reader for connection in self._connections) < MAX_READERS

    async def start(self, rpcs: Mapping[str, UnaryRpc], admit: Admit, *, grpc_port: int) -> None:
        """Starts to listen on a free port. Without success, there are no call connections.

        Args:
            rpcs: The handlers by path.
            admit: Checks the callers.
            grpc_port: Port on which the same process serves gRPC.
        """
        self.rpcs, self.admit, self._grpc_port = rpcs, admit, grpc_port
        try:
            listener = listen(self._host)
        except SystemExit as error:  # such as on a host without IPv6, where gRPC listens on IPv4 instead
            logger.warning("all rpcs go over gRPC: %s", error)
            return
        self._port = listener.getsockname()[1]
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=listener)

    @property
    def is_listening(self) -> bool:
        """Whether new connections are served."""
        return self._port != 0

    async def stop(self, grace_s: float) -> None:
        """Accepts no more connections and requests, lets the handlers finish for ``grace_s``, and closes everything."""
        if self._server is None:
            return
        self._port = 0
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        await asyncio.sleep(0)  # asyncio leaks a connection that it has accepted if the server is closed in this turn
        self._server.close()
        handlers = {task for connection in self._connections for task in connection.stop_reading()}
        if handlers:
            await asyncio.wait(handlers, timeout=grace_s)
        for connection in list(self._connections):
            connection.close()
        for handler in handlers:  # no handler runs after this method has returned: its server closes what handlers use
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)

    def add(self, connection: _Connection) -> None:
        """Counts a new connection. Closes the oldest one without a complete handshake if there are too many."""
        self._connections.add(connection)
        self.unproven[connection] = None
        if len(self.unproven) > MAX_UNPROVEN or len(self._connections) > MAX_CONNECTIONS:
            oldest = next(iter(self.unproven))
            self.remove(oldest)  # not when it has closed: the event loop makes many connections before that
            oldest.close()

    def remove(self, connection: _Connection) -> None:
        """Stops counting a connection."""
        self._connections.discard(connection)
        self.unproven.pop(connection, None)

    def _close_peers(self, peers: Any) -> int:
        found = [connection for connection in self._connections if connection.peer in set(peers)]
        for connection in found:
            connection.close()
        return len(found)


class _Connection(asyncio.Protocol):
    """One call connection."""

    def __init__(self, server: CallServer) -> None:
        self._server, self._loop = server, asyncio.get_running_loop()
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until the connection is made
        self._received = bytearray()
        self._challenge = self._secret = b""
        """Sent to the client. Empty: its hello has not arrived."""
        self.is_reader = self._is_proven = False
        self._admitted: tuple[RequestHeader, str, Identity | None] | None = None
        """Header, path and caller of the request whose body arrives."""
        self._handlers: set[asyncio.Task[None]] = set()
        self._blocked = False
        """True if the peer does not read its responses."""
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None
        self.peer = ""

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("peername")
        try:
            set_options(transport.get_extra_info("socket"))
        except OSError:
            peer = None
        if peer is None or not self._server.is_listening:  # the peer is gone, or this server stops
            transport.abort()
            return
        host, port, *_ = peer
        self.peer = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        self._timer = self._loop.call_later(call_frames.HANDSHAKE_LIMIT_S, self.close)
        self._server.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._note_proven()
        self._server.remove(self)
        for handler in self._handlers:
            handler.cancel()

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._parse()

    def pause_writing(self) -> None:
        self._blocked = True
        self._read_or_pause()

    def resume_writing(self) -> None:
        self._blocked = False
        if not self._transport.is_closing():
            self._parse()

    # ---- requests ----

    def _parse(self) -> None:
        try:
            if not self._is_proven and not self._shake_hands():
                return
            while self._may_read and self._take_request():
                pass
        except CallConnectionError as error:
            if _logged.admit(""):
                logger.info("a call connection from %s is closed: %s", self.peer, error)
            self.close()
            return
        self._read_or_pause()

    def _shake_hands(self) -> bool:
        """Continues the handshake; returns whether it is complete."""
        if not self._challenge:
            known = min(len(self._received), len(call_frames.MAGIC))
            if self._received[:known] != call_frames.MAGIC[:known]:
                raise CallConnectionError("it begins with other bytes than a call connection")
            if (hello := self._take(call_frames.HELLO_BYTES)) is None:
                return False
            nonce_at = len(call_frames.MAGIC) + call_frames.CLIENT_ID_BYTES
            client_id, nonce = hello[len(call_frames.MAGIC) : nonce_at], hello[nonce_at:]
            if client_id[0] and not self._server.has_room():
                raise CallConnectionError(f"{MAX_READERS} readers are connected, so this one uses gRPC")
            self.is_reader, self._secret = bool(client_id[0]), self._server.secret_of(client_id)
            self._challenge = secrets.token_bytes(call_frames.NONCE_BYTES)
            self._transport.write(call_frames.proof(End.SERVER, self._secret, nonce) + self._challenge)
        if (given := self._take(call_frames.PROOF_BYTES)) is None:
            return False
        if not call_frames.is_proof(given, End.CLIENT, self._secret, self._challenge):
            raise CallConnectionError("the client does not know the secret that was announced over gRPC")
        self._is_proven = True
        self._note_proven()
        return True

    def _take_request(self) -> bool:
        """Starts the next request; returns False if bytes of it are missing.

        The body is not buffered before the token is checked.
        """
        if self._admitted is None:
            header_bytes = call_frames.REQUEST_HEADER_BYTES
            if len(self._received) < header_bytes:
                return False
            header = call_frames.decode_request(self._received)
            if not header.number:
                self._answer_ping(header)
                return True
            if len(self._received) < header_bytes + header.path_bytes + header.token_bytes:
                return False
            del self._received[:header_bytes]
            if not self._admit(header):
                return False
        assert self._admitted is not None
        header, path, caller = self._admitted
        body = self._take(header.body_bytes)
        if body is None:
            return False
        self._admitted = None
        self._start(self._handle(header, path, caller, body))
        return True

    def _answer_ping(self, header: RequestHeader) -> None:
        if header.path_bytes or header.token_bytes or header.body_bytes:
            raise CallConnectionError("a ping has a body")
        del self._received[: call_frames.REQUEST_HEADER_BYTES]
        self._transport.write(call_frames.PONG)

    def _admit(self, header: RequestHeader) -> bool:
        """Checks the token of a request. A refusal is answered and ends the connection."""
        path = bytes(self._received[: header.path_bytes]).decode("ascii", errors="replace")
        if not path.isprintable():  # it is going to be logged
            raise CallConnectionError("the path of a request has characters that cannot be printed")
        token_end = header.path_bytes + header.token_bytes
        token = bytes(self._received[header.path_bytes : token_end]).decode("ascii", errors="replace")
        del self._received[:token_end]
        CALLER.set(None)  # otherwise a refusal would be recorded with the caller of an earlier request
        try:
            caller = self._server.admit(path, token)
        except Exception as error:
            self._server.refusals.count(self.peer)
            self._respond_error(header.number, path, error)
            self._stopping = True
            self._received.clear()
            self._transport.close()  # sends the answer first
            return False
        self._admitted = header, path, caller
        return True

    def _note_proven(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._server.unproven.pop(self, None)

    def _take(self, size: int) -> bytes | None:
        if len(self._received) < size:
            return None
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _start(self, handling: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(handling)
        self._handlers.add(task)
        task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[None]) -> None:
        was_full = len(self._handlers) >= MAX_REQUESTS_AT_ONCE
        self._handlers.discard(task)
        if was_full and not self._transport.is_closing():
            self._parse()

    async def _handle(self, header: RequestHeader, path: str, caller: Identity | None, body: bytes) -> None:
        CALLER.set(caller)
        rpc = self._server.rpcs.get(path)
        try:
            if rpc is None:
                raise InvalidRequestError(f"{path}: this server has no such unary rpc")
            async with asyncio.timeout(header.timeout_s) as limit:
                answer = await rpc(body, CallContext(self.peer, self._loop.time, header.timeout_s))
            fault_points.reach("server.call.executed", rpc=path.rpartition("/")[2], connection=self)
        except TimeoutError as error:
            if isinstance(error, DeadlineError) or not limit.expired():
                self._respond_error(header.number, path, error)
            else:
                late = DeadlineError(f"{path}: no response within the caller's {header.timeout_s:g} s")
                self._respond_error(header.number, path, late)
        except Exception as error:
            self._respond_error(header.number, path, error)
        else:
            self._respond(call_frames.encode_response(header.number, answer))

    def _respond_error(self, number: int, path: str, error: Exception) -> None:
        details = to_status_details(reported_error(path, error, self.peer))
        self._respond(call_frames.encode_response(number, details, failed=True))

    def _respond(self, response: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(response)

    # ---- flow ----

    def _read_or_pause(self) -> None:
        """Reads from the peer unless it has too many requests, or does not read its responses."""
        if self._transport.is_closing():
            return
        if self._may_read:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    @property
    def _may_read(self) -> bool:
        return not (self._blocked or self._stopping) and len(self._handlers) < MAX_REQUESTS_AT_ONCE

    def stop_reading(self) -> set[asyncio.Task[None]]:
        """Takes no more requests; returns the handlers in progress."""
        self._stopping = True
        with suppress(RuntimeError):
            self._transport.pause_reading()
        return set(self._handlers)

    def close(self) -> None:
        """Closes the connection at once. Cancels its handlers."""
        self._transport.abort()


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of a host. An IPv6 address may be in brackets."""
    name = host.strip("[]")
    both = name == "::" and socket.has_dualstack_ipv6()
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host}: {error}") from error
