"""The client's end of a call connection: unary rpcs in short frames, beside gRPC.

See docs/wire-format.md. A call connection saves CPU time and latency, and nothing depends on it: when it breaks, or is
not there, rpcs go over gRPC.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable

from shardwell_wire.connection import call_frames
from shardwell_wire.connection.call_frames import CallConnectionError, End
from shardwell_wire.connection.socket_frames import set_options
from shardwell_wire.errors import DeadlineError, from_status_details
from shardwell_wire.v1 import common_pb2

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0
_RECEIVE_BYTES = 64 << 10


class CallConnection:
    """One call connection, for one rpc at a time. Connects in the constructor.

    Args:
        host: Host of the server.
        calls: What the server announced over gRPC.
        peer: Name of the server, for errors.

    Raises:
        OSError: The server cannot be reached there, or another process listens at the port.
    """

    def __init__(self, host: str, calls: common_pb2.CallPort, peer: str) -> None:
        self._peer, self._number, self._received = peer, 0, bytearray()
        self._socket = socket.create_connection((host, calls.port), _CONNECT_TIMEOUT_S)
        try:
            set_options(self._socket)
            nonce, deadline = secrets.token_bytes(call_frames.NONCE_BYTES), time.monotonic() + _CONNECT_TIMEOUT_S
            self._send(call_frames.MAGIC + nonce, deadline)
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
        peer: Name of the server, for errors.
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
