"""The coordinator's end of call connections to shard servers, beside gRPC. See docs/wire-format.md."""

from __future__ import annotations

import asyncio
import logging
import secrets
from contextlib import suppress

from shardwell_wire import call_frames
from shardwell_wire.call_frames import CallConnectionError, End
from shardwell_wire.errors import DeadlineError, from_status_details
from shardwell_wire.tcp_options import set_options
from shardwell_wire.v1 import common_pb2

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 2.0


_Response = asyncio.Future[tuple[bytes, bool]]
"""Body of a response, and whether it is an error."""


def _new_response(loop: asyncio.AbstractEventLoop) -> _Response:
    return loop.create_future()


class CallLine(asyncio.Protocol):
    """One call connection, for any number of rpcs at once. Created by ``connect``.

    Args:
        peer: Name of the server, for errors.
        secret: What the server announced over gRPC.
    """

    def __init__(self, peer: str, secret: bytes) -> None:
        self._peer, self._secret, self._loop = peer, secret, asyncio.get_running_loop()
        self._nonce = secrets.token_bytes(call_frames.NONCE_BYTES)
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._number = 0
        self._waiting: dict[int, _Response] = {}
        self._heard_s = self._loop.time()
        self._watch: asyncio.TimerHandle | None = None
        self._greeted = self._loop.create_future()

    @classmethod
    async def connect(cls, host: str, calls: common_pb2.CallPort, peer: str) -> CallLine:
        """Connects to the port that a server announced.

        Raises:
            OSError: The server cannot be reached there, or another process listens at the port.
        """
        line = cls(peer, calls.secret)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: line, host, calls.port)
                await line._greeted
        except BaseException:
            line.close()
            raise
        return line

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, path: str, token: str, body: bytes, timeout_s: float) -> bytes:
        """Calls an rpc; returns the encoded response.

        Args:
            path: /SERVICE/RPC.
            token: A token of the coordinator. Empty: none.
            body: The encoded request.
            timeout_s: Deadline.

        Raises:
            ShardwellError: The error that the server returned.
            DeadlineError: The server did not answer in time.
            CallConnectionError: The connection broke. The server may have executed the request.
        """
        if self._transport is None or not self.is_open:
            raise CallConnectionError("the connection is closed")
        self._number = self._number % 0xFFFF_FFFF + 1
        number, response = self._number, _new_response(self._loop)
        if not self._waiting:
            self._heard_s = self._loop.time()
        self._waiting[number] = response
        self._transport.write(call_frames.encode_request(number, path, token, body, timeout_s))
        if self._watch is None:
            self._watch = self._loop.call_later(call_frames.SILENCE_S, self._ping)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                answer, failed = await response
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineError(f"{self._peer} did not answer in time", peer=self._peer) from None
        finally:
            self._waiting.pop(number, None)
        if failed:
            raise from_status_details(answer, self._peer)
        return answer

    def close(self) -> None:
        """Closes the connection. Calls in progress raise CallConnectionError."""
        if self._transport is not None:
            self._transport.abort()

    # ---- silence ----

    def _ping(self) -> None:
        """Sends a ping if the server has been silent while calls wait. Gives the connection up if it stays silent."""
        self._watch = None
        if not self._waiting or self._transport is None or not self.is_open:
            return
        silent_s = self._loop.time() - self._heard_s
        if silent_s < call_frames.SILENCE_S:
            self._watch = self._loop.call_later(call_frames.SILENCE_S - silent_s, self._ping)
        else:
            self._transport.write(call_frames.PING)
            self._watch = self._loop.call_later(call_frames.PING_LIMIT_S, self._give_up, self._heard_s)

    def _give_up(self, heard_s: float) -> None:
        self._watch = None
        if self._heard_s == heard_s:
            logger.info("the call connection to %s is closed: it does not answer a ping", self._peer)
            self.close()
        else:
            self._ping()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        with suppress(OSError):  # the server is gone; the connection ends at once
            set_options(transport.get_extra_info("socket"))
        transport.write(call_frames.MAGIC + self._nonce)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        lost = CallConnectionError(f"the call connection to {self._peer} is closed")
        for waiting in (self._greeted, *self._waiting.values()):
            if not waiting.done():
                waiting.set_exception(lost)
        if self._greeted.done() and not self._greeted.cancelled():
            self._greeted.exception()  # retrieved, if nobody waits for it

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._heard_s = self._loop.time()
        try:
            if self._greeted.done() or self._check_proof():
                while self._take_response():
                    pass
        except CallConnectionError as error:
            logger.info("the call connection to %s is closed: %s", self._peer, error)
            self.close()

    def _check_proof(self) -> bool:
        if len(self._received) < call_frames.WELCOME_BYTES or self._transport is None:
            return False
        given = bytes(self._received[: call_frames.PROOF_BYTES])
        if not call_frames.is_proof(given, End.SERVER, self._secret, self._nonce):
            raise CallConnectionError("another process listens at the port")
        challenge = bytes(self._received[call_frames.PROOF_BYTES : call_frames.WELCOME_BYTES])
        del self._received[: call_frames.WELCOME_BYTES]
        self._transport.write(call_frames.proof(End.CLIENT, self._secret, challenge))
        self._greeted.set_result(None)
        return True

    def _take_response(self) -> bool:
        if len(self._received) < call_frames.RESPONSE_HEADER_BYTES:
            return False
        header = call_frames.decode_response(self._received)
        end = call_frames.RESPONSE_HEADER_BYTES + header.body_bytes
        if len(self._received) < end:
            return False
        body = bytes(self._received[call_frames.RESPONSE_HEADER_BYTES : end])
        del self._received[:end]
        response = self._waiting.get(header.number)
        if response is not None and not response.done():  # otherwise the caller has given up
            response.set_result((body, header.failed))
        return True
