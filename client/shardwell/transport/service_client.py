"""Calls Shardwell services by blocking rpcs, with bounded retries and credentials.

A unary rpc goes over the call connection of its client if there is one, otherwise over gRPC. A call connection sends
short frames (docs/wire-format.md). It saves CPU time and latency, and nothing depends on it. ``watch`` warns before a
fork that gRPC does not survive. See Note: [gRPC and fork] in ``shardwell_wire``.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

import shardwell_wire
from shardwell.find_credentials import find_credentials
from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError, End
from shardwell_wire.connection.channel import FailoverChannel, backoff, open_channel, open_stub, retry
from shardwell_wire.connection.socket_frames import ByteStream, EncryptedStream, PlainStream, set_options
from shardwell_wire.errors import (
    DeadlineError,
    ShardwellError,
    TooManyRequestsError,
    UnavailableError,
    from_rpc_error,
    from_status_details,
)
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.security.tls import connection_error, must_encrypt
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_CHECKPOINT_POLL_S = 1.0
"""How long one rpc waits for the end of a checkpoint."""
_REPEATED = (UnavailableError, TooManyRequestsError)
"""A server refuses one request too many before it decodes it, and other trainers of the run may be the cause."""

_RECEIVE_BYTES = 64 << 10

_SHORTEST_ATTEMPT_S = 0.5
"""Least deadline of the last attempt of a call that is repeated, so that the server can still say what it waits for."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Opens all connections to one server. See Note: [Credentials] in ``base.py``.

    Rpcs carry the token as metadata. Other connections carry a token that the server issued over an rpc.
    """

    address: str
    """host:port."""
    credentials: Credentials

    def open_channel(self) -> grpc.Channel:
        """Returns a gRPC channel. It connects at its first rpc."""
        return open_channel(self.address, self.credentials.tls)

    def connect(self, port: int, timeout_s: float) -> socket.socket:
        """Returns a TCP connection to another port of the server's host."""
        host = self.address.rpartition(":")[0].strip("[]")
        return socket.create_connection((host, port), timeout_s)

    def byte_stream(self, connected: socket.socket, encryption: int) -> ByteStream:
        """Returns the bytes of a connection. If they are encrypted, the handshake follows.

        Args:
            encryption: What the server requires, a value of ``SocketEncryption``.
        """
        tls = self.credentials.tls
        if tls is None or not must_encrypt(max(encryption, tls.options.encryption), connected):
            return PlainStream(connected)
        return EncryptedStream(connected, tls.current.client_context, tls.server_name(self.address))


class StandingRpc:
    """An rpc that sent one response and stays open until one side ends it.

    Args:
        answer: The response message.
        call: The call of gRPC.
    """

    def __init__(self, answer: Any, call: Any) -> None:
        self.answer, self._call, self._is_closed = answer, call, False
        self.broke = False
        """Whether the rpc failed, that is, neither side ended it."""
        self._over = threading.Event()
        self.when_ended(self._end)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Calls ``callback`` when the rpc has ended: in another thread, or at once if the rpc has ended already."""
        if not self._call.add_callback(callback):
            callback()

    def end(self) -> None:
        """Ends the rpc from this side."""
        self._is_closed = True
        self._call.cancel()

    def cut(self) -> None:
        """Ends the rpc as a lost connection does: it breaks. For tests."""
        self._call.cancel()

    @property
    def status(self) -> grpc.StatusCode:
        """The status with which the rpc ended. Waits until it ends."""
        code: grpc.StatusCode = self._call.code()
        return code

    def broke_within(self, timeout_s: float) -> bool:
        """Waits until the rpc ends, for at most ``timeout_s``; returns whether it broke."""
        self._over.wait(timeout_s)
        return self.broke

    def _end(self) -> None:
        self.broke = not self._is_closed and self._call.code() is not grpc.StatusCode.OK
        self._over.set()


class MessageStream:
    """The messages of an rpc that stays open until one side ends it. Iterate over it in one thread.

    Raises:
        ShardwellError: While iterating: the error that ended the stream, or UnavailableError.
    """

    def __init__(self, call: Any, peer: str) -> None:
        self._call, self._peer = call, peer

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._call
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._peer) from error

    def end(self) -> None:
        """Ends the rpc from this side. Thread-safe."""
        self._call.cancel()


class CallConnection:
    """One call connection, for one rpc at a time. Connects in the constructor.

    Args:
        calls: What the server announced over gRPC.

    Raises:
        OSError: The server cannot be reached there, or another process listens at the port.
    """

    def __init__(self, host: str, calls: common_pb2.CallPort, peer: str) -> None:
        self._peer, self._number, self._received = peer, 0, bytearray()
        deadline = time.monotonic() + call_frames.HANDSHAKE_LIMIT_S
        self._socket = socket.create_connection((host, calls.port), call_frames.HANDSHAKE_LIMIT_S)
        try:
            set_options(self._socket)
            nonce = secrets.token_bytes(call_frames.NONCE_BYTES)
            self._send(call_frames.MAGIC + calls.client_id + nonce, deadline)
            given = self._exactly(call_frames.PROOF_BYTES, deadline)
            if not call_frames.is_proof(given, End.SERVER, calls.secret, nonce):
                raise CallConnectionError(f"another process than {peer} listens at port {calls.port}")
            challenge = self._exactly(call_frames.NONCE_BYTES, deadline)
            self._send(call_frames.proof(End.CLIENT, calls.secret, challenge), deadline)
        except BaseException:
            self._socket.close()
            raise

    def call(self, path: str, token: str, body: bytes, timeout_s: float) -> tuple[bytes, bool]:
        """Calls an rpc. After an error, the connection must be closed.

        Args:
            path: /SERVICE/RPC.
            token: The caller's token. Empty: none.
            body: The encoded request.
            timeout_s: Deadline.

        Returns:
            The body of the response, and whether it is an error of the server.

        Raises:
            DeadlineError: The server did not answer in time.
            OSError: The connection broke. The server may have executed the request.
        """
        self._number = self._number % 0xFFFF_FFFF + 1
        deadline = time.monotonic() + timeout_s
        self._send(call_frames.encode_request(self._number, path, token, body, timeout_s), deadline)
        received = self._received
        while True:
            while len(received) < call_frames.RESPONSE_HEADER_BYTES:
                self._receive(deadline)
            header = call_frames.decode_response(received)
            end = call_frames.RESPONSE_HEADER_BYTES + header.body_bytes
            while len(received) < end:
                self._receive(deadline)
            answer = bytes(received[call_frames.RESPONSE_HEADER_BYTES : end])
            del received[:end]
            if header.number == self._number:
                return answer, header.failed
            if header.number:  # otherwise the answer to a ping
                raise CallConnectionError(f"{self._peer} answered request {header.number}, expected {self._number}")

    def _send(self, data: bytes, deadline: float) -> None:
        self._socket.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise CallConnectionError(f"{self._peer} does not read its requests") from None

    def _exactly(self, size: int, deadline: float) -> bytes:
        """Returns the next bytes of the connection."""
        while len(self._received) < size:
            self._receive(deadline)
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _receive(self, deadline: float) -> None:
        """Waits for bytes. Sends a ping after a long silence, unless the handshake is still in progress."""
        pinged, poller = False, select.poll()  # select.select cannot watch descriptors above 1023
        try:
            poller.register(self._socket, select.POLLIN)
        except ValueError:
            raise CallConnectionError("another thread has closed the connection") from None
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(f"{self._peer} did not answer in time", peer=self._peer)
            limit_s = call_frames.PING_LIMIT_S if pinged else call_frames.SILENCE_S
            if poller.poll((min(left_s, limit_s) if self._number else left_s) * 1000):
                break
            if self._number and deadline > time.monotonic():
                if pinged:
                    raise CallConnectionError(f"{self._peer} does not answer a ping")
                self._send(call_frames.PING, deadline)
                pinged = True
        data = self._socket.recv(_RECEIVE_BYTES)
        if not data:
            raise CallConnectionError(f"{self._peer} closed the connection")
        self._received += data

    def close(self) -> None:
        """Closes the connection. An rpc in another thread ends with an error. Harmless to repeat."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._socket.close()


class CallConnections:
    """The call connection of a client, used by one thread at a time. Thread-safe.

    Args:
        address: Returns host:port of the server's gRPC service.
    """

    def __init__(self, address: Callable[[], str], peer: str) -> None:
        self._address, self._peer = address, peer
        self._lock = threading.Lock()
        self.idle: CallConnection | None = None
        """The connection if no thread uses it."""
        self._current: CallConnection | None = None
        """The connection, also while a thread uses it."""
        self._announced: common_pb2.CallPort | None = None
        self._closed = False

    def start(self, calls: common_pb2.CallPort) -> None:
        """Calls ``connect`` in the background."""
        threading.Thread(target=self.connect, args=(calls,), name="shardwell-calls", daemon=True).start()

    def connect(self, calls: common_pb2.CallPort) -> None:
        """Connects to the port that the server announced, and replaces the former connection. Blocks for seconds.

        Does nothing if gRPC reaches the server through another port, such as that of a proxy: the announced port may
        then belong to another process. Without success, rpcs go over gRPC.
        """
        host, _, grpc_port = self._address().rpartition(":")
        if not calls.port or calls.grpc_port != int(grpc_port):
            return
        try:
            connection = CallConnection(host.strip("[]"), calls, self._peer)
        except (OSError, OverflowError) as error:  # OverflowError: there is no such port
            logger.info("%s cannot be reached at its port for calls, so all rpcs go over gRPC: %s", self._peer, error)
            return
        with self._lock:
            unused = connection if self._closed else self.idle
            if not self._closed:
                self._announced, self.idle, self._current = calls, connection, connection
        if unused is not None:
            unused.close()

    def call(self, path: str, token: str, encode: Callable[[], bytes], timeout_s: float) -> bytes | None:
        """Calls an rpc; returns the encoded response.

        Args:
            path: /SERVICE/RPC.
            token: The caller's token. Empty: none.
            encode: Returns the encoded request.
            timeout_s: Deadline.

        Returns:
            None: there is no connection, another thread uses it, or it broke. Repeat the rpc over gRPC.

        Raises:
            ShardwellError: The error that the server returned.
            DeadlineError: The server did not answer in time.
        """
        if self.idle is None or len(body := encode()) > call_frames.MAX_BODY_BYTES:
            return None
        with self._lock:
            connection, self.idle = self.idle, None
        if connection is None:
            return None
        try:
            answer, failed = connection.call(path, token, body, timeout_s)
        except BaseException as error:  # also an interrupt: the response would be taken for that of the next request
            self._replace(connection)
            if isinstance(error, DeadlineError) or not isinstance(error, OSError):
                raise
            logger.info("a call connection broke, so %s goes over gRPC: %s", path, error)
            return None
        with self._lock:
            is_current = connection is self._current and not self._closed
            if is_current:
                self.idle = connection
        if not is_current:
            connection.close()
        if failed:
            raise from_status_details(answer, self._peer)
        return answer

    def _replace(self, connection: CallConnection) -> None:
        """Closes a connection that cannot be used any more, and connects again in the background."""
        connection.close()
        with self._lock:
            calls = self._announced if connection is self._current and not self._closed else None
            if calls is not None:
                self._current = self._announced = None
        if calls is not None:
            self.start(calls)

    def close(self) -> None:
        """Closes the connection, also while a thread uses it."""
        with self._lock:
            self._closed = True
            connection, self.idle = self._current, None
        if connection is not None:
            connection.close()


@dataclass(frozen=True, slots=True)
class _Unary:
    """A unary rpc of a service."""

    path: str
    """/SERVICE/RPC."""
    decode: Callable[[bytes], Any]
    """Returns the response message."""
    stub: Callable[..., Any]
    """Calls the rpc over gRPC, without credentials."""


class ServiceClient:
    """Calls the rpcs of one service at one address. Thread-safe.

    Args:
        address: host:port. Several, separated by commas: those of servers of which one serves.
        service: The service, from the generated module's ``DESCRIPTOR``.
        check: Called before a retry while the server is unavailable; raises if a retry is pointless.
        credentials: Sent with every rpc. None: the result of ``find_credentials`` for the address.

    Raises:
        UsageError: The address is malformed, or the token file cannot be used.
    """

    def __init__(
        self,
        address: str,
        service: ServiceDescriptor,
        check: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> None:
        self.address, self._check = address, check
        self.credentials = find_credentials(address) if credentials is None else credentials
        self.endpoint = Endpoint(address, self.credentials)
        self.peer = f"{service.name} at {address}"
        self._service = service
        self._channel = self.endpoint.open_channel()
        self._unary: dict[str, _Unary] = {}
        self._calls = CallConnections(lambda: self.present_address, self.peer)
        self._closed = threading.Event()

    @property
    def present_address(self) -> str:
        """host:port of the server to which rpcs go now."""
        return self._channel.address if isinstance(self._channel, FailoverChannel) else self.address

    def call(
        self,
        rpc_name: str,
        request: Any,
        *,
        timeout_s: float = 10.0,
        retry_for_s: float = 0.0,
        until_s: float = math.inf,
    ) -> Any:
        """Calls a unary rpc.

        Args:
            rpc_name: The rpc's name in the proto file.
            request: The request message.
            timeout_s: Deadline of one attempt.
            retry_for_s: How long to retry while the server is unavailable. Every rpc of Shardwell may be repeated.
            until_s: Time by ``time.monotonic`` at which the last attempt ends, after ``_SHORTEST_ATTEMPT_S`` at least.

        Returns:
            The response message.

        Raises:
            ShardwellError: The error that the server returned, UnavailableError or DeadlineError.
        """
        started, pauses = time.monotonic(), None
        while True:
            left_s = max(_SHORTEST_ATTEMPT_S, until_s - time.monotonic())
            try:
                return self._call(rpc_name, request, min(timeout_s, left_s))
            except _REPEATED as error:
                self._check_retry(error)
                pauses = pauses or backoff()
                pause_s = next(pauses)
                if time.monotonic() + pause_s > started + retry_for_s:
                    raise
                logger.debug("retrying in %.2f s: %s", pause_s, error)
            self._closed.wait(pause_s)

    def use_calls(self, calls: common_pb2.CallPort) -> None:
        """Sends unary rpcs to a port that the server has announced, as long as it can be reached."""
        if self.credentials.tls is None:  # call connections are not encrypted
            self._calls.start(calls)

    def _call(self, rpc_name: str, request: Any, timeout_s: float) -> Any:
        """Calls a unary rpc once."""
        rpc = self._unary.get(rpc_name) or self._open_unary(rpc_name)
        credentials, deadline = self.credentials, time.monotonic() + timeout_s
        if self._calls.idle is not None:
            answer = self._calls.call(rpc.path, credentials.token, request.SerializeToString, timeout_s)
            if answer is not None:
                return rpc.decode(answer)
        # A broken connection may have used up a part of the caller's time.
        left_s = max(0.0, deadline - time.monotonic())
        return self.once(rpc.stub, request, metadata=credentials.metadata, timeout=left_s)

    def _open_unary(self, rpc_name: str) -> _Unary:
        """Returns what a unary rpc needs, which is made once."""
        decode = GetMessageClass(self._service.methods_by_name[rpc_name].output_type).FromString
        stub = open_stub(self._channel, self._service, rpc_name)
        rpc = self._unary[rpc_name] = _Unary(f"/{self._service.full_name}/{rpc_name}", decode, stub)
        return rpc

    def stream(self, rpc_name: str, request: Any, *, timeout_s: float | None) -> Iterator[Any]:
        """Calls an rpc that returns a stream of messages; raises as ``call`` does."""
        try:
            yield from self._stub(rpc_name)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise self._mapped(error) from error

    def watch(self, rpc_name: str, request: Any) -> MessageStream:
        """Calls an rpc that sends messages until one side ends it. Waits until the server can be reached.

        Raises:
            UnavailableError: The client is closed.
        """
        stub = self._stub(rpc_name)
        return self.attempt(lambda: MessageStream(stub(request, wait_for_ready=True), self.peer), retry_for_s=0.0)

    def open(self, rpc_name: str, request: Any, *, timeout_s: float, retry_for_s: float | None = None) -> StandingRpc:
        """Calls an rpc that sends one response and then stays open; raises as ``call`` does.

        Args:
            rpc_name: The rpc's name in the proto file.
            request: The request message.
            timeout_s: Deadline of the response.
            retry_for_s: How long to retry while the server is unavailable. None: for ``timeout_s``.
        """
        retry_for_s = timeout_s if retry_for_s is None else retry_for_s
        return self.attempt(lambda: self._open(rpc_name, request, timeout_s), retry_for_s=retry_for_s)

    def _open(self, rpc_name: str, request: Any, timeout_s: float) -> StandingRpc:
        call = self.byte_response_stub(rpc_name)(request)
        # A timer, because a deadline of the rpc itself would also end it after the response.
        timer, deadline = threading.Timer(timeout_s, call.cancel), time.monotonic() + timeout_s
        timer.start()
        try:
            answer = GetMessageClass(self._service.methods_by_name[rpc_name].output_type).FromString(next(call))
        except grpc.RpcError as error:
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{self.peer} did not answer {rpc_name} within {timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()
        return StandingRpc(answer, call)

    def byte_response_stub(self, rpc_name: str) -> Callable[..., Any]:
        """Returns a stub that leaves response messages undecoded, for ``chunk_streams``."""
        return self._stub(rpc_name, raw_response=True)

    def byte_request_stub(self, rpc_name: str) -> Callable[..., Any]:
        """Returns a stub that takes encoded request messages, from ``chunk_streams``."""
        return self._stub(rpc_name, raw_request=True)

    def attempt(self, action: Callable[[], Result], *, retry_for_s: float) -> Result:
        """Calls ``action`` with retries while the server is unavailable or refuses requests. Maps gRPC errors."""
        return retry(
            partial(self.once, action),
            limit_s=retry_for_s,
            errors=_REPEATED,
            check=self._check_retry,
            sleep=self._closed.wait,
        )

    def once(self, action: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Calls ``action`` with the arguments, and maps the errors of gRPC."""
        try:
            result = action(*arguments, **options)
        except grpc.RpcError as error:
            raise self._mapped(error) from error
        except ValueError as error:  # gRPC raises this error for a closed channel
            if not self._closed.is_set():
                raise
            raise UnavailableError(f"{self.peer}: this process closed the connection", peer=self.peer) from error
        if (tls := self.credentials.tls) is not None:
            tls.note_reached(self.address)
        return result

    def _check_retry(self, error: Exception) -> None:
        """Raises if another attempt is pointless."""
        if self._closed.is_set():
            raise error
        self._check()

    def _mapped(self, error: grpc.RpcError) -> ShardwellError:
        return connection_error(error, self.peer, self.address, self.credentials.tls)

    def close(self) -> None:
        """Closes the connection. Rpcs in flight are cancelled."""
        self._closed.set()
        self._calls.close()
        self._channel.close()

    def _stub(self, rpc_name: str, **raw: bool) -> Callable[..., Any]:
        """Returns a stub that sends the client's present credentials with every call; see ``open_stub``."""
        stub = open_stub(self._channel, self._service, rpc_name, **raw)
        if not self.credentials:
            return stub

        # Not functools.partial: its repr would show the token wherever a stub is printed.
        def call(*arguments: Any, **options: Any) -> Any:
            return stub(*arguments, metadata=self.credentials.metadata, **options)

        return call


class CoordinatorClient(ServiceClient):
    """Calls ``CoordinatorService``.

    Args:
        address: host:port. Several, separated by commas: those of all coordinators.
        credentials: See ``ServiceClient``. Calls to the cluster's shard servers carry ``self.credentials``, too.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        super().__init__(address, service, credentials=credentials)


def save_checkpoint(
    call: Callable[[str, Any], Any], run: str, *, run_id: str = "", wait: bool
) -> Iterator[coordinator_pb2.CheckpointProgress]:
    """Saves a checkpoint of the newest version of a run, or joins one of this version that is being written.

    Args:
        call: Calls an rpc of the coordinator: name and request.
        run_id: Id of the run. Empty: any.
        wait: Whether to wait until the checkpoint is complete. Otherwise until its folder is known.

    Yields:
        The progress, at least once and about once per second.

    Raises:
        UnavailableError: The checkpoint could not be written.
    """
    request = coordinator_pb2.SaveCheckpointRequest(run=run, run_id=run_id)
    while True:
        progress: coordinator_pb2.CheckpointProgress = call("SaveCheckpoint", request).checkpoint
        yield progress
        if progress.state != coordinator_pb2.CHECKPOINT_STATE_WRITING or (progress.url and not wait):
            break
        request = coordinator_pb2.SaveCheckpointRequest(
            run=run, checkpoint_id=progress.checkpoint_id, wait_s=_CHECKPOINT_POLL_S
        )
    if progress.state == coordinator_pb2.CHECKPOINT_STATE_FAILED:
        raise UnavailableError(
            f"the checkpoint of step {progress.step} of run {run!r} was not written: {progress.error}", run=run
        )


@functools.cache
def watch(in_child: Callable[[], None]) -> None:
    """Calls a function in every process that this one forks from now on.

    Args:
        in_child: The function. It must not call gRPC.
    """
    if shardwell_wire.GRPC_HANDLES_FORKS:
        os.register_at_fork(before=_warn)
    os.register_at_fork(after_in_child=in_child)


@functools.cache
def _warn() -> None:
    logger.warning(
        "this process forks while gRPC handles forks, so the forked process, such as a worker of a DataLoader, may be "
        "killed: grpc was imported before shardwell. Import grpc after shardwell, set GRPC_ENABLE_FORK_SUPPORT=0, or "
        "use DataLoader(multiprocessing_context='spawn')"
    )
