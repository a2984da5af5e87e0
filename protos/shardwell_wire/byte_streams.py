"""The bytes of a connected socket, as they are or encrypted with TLS 1.3.

Note: [TLS in memory]
    The TLS of Python's ``ssl`` module works in memory here. One system call moves many records, and the waits for the
    socket are the same as without TLS. A stream that ends without TLS's own end is noticed by the frames of
    ``socket_frames``, which have an END and a checksum.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from shardwell_wire.chunk_streams import Buffer

_BATCH_BYTES = 256 << 10
"""Bytes that one call encrypts, and encrypted bytes that one call receives."""

_MAX_RECORD_BYTES = 5 + (16 << 10) + 256
"""Longest record of TLS 1.3, encrypted."""

_MOST_RECORDS = 1 << 24
"""Records in each direction after which a connection is replaced. An AES-GCM key must encrypt at most 2**24.5 records
(RFC 8446, section 5.5)."""


class ByteStream(Protocol):
    """The bytes of one connection. Errors of the socket are OSErrors, as are those of TLS."""

    @property
    def buffered_bytes(self) -> int:
        """Bytes that were received from the socket, and not by the caller. 0 does not exclude a part of a record."""
        ...

    @property
    def is_worn_out(self) -> bool:
        """Whether the connection should be replaced by a new one."""
        ...

    def low_water_mark(self, wanted_bytes: int) -> int:
        """Returns for how many bytes in the socket a reader may wait that wants ``wanted_bytes``, at least 1."""
        ...

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Sends bytes of consecutive buffers; returns how many.

        After a BlockingIOError, the next call must begin with the same bytes.

        Raises:
            BlockingIOError: The socket takes no bytes now.
        """
        ...

    def receive(self, places: Sequence[memoryview]) -> int:
        """Receives bytes into consecutive places without waiting; returns how many. 0: the peer has closed.

        Raises:
            BlockingIOError: No bytes have arrived.
        """
        ...


class PlainStream:
    """The bytes of a socket as they are.

    Args:
        connected: The socket. ``send`` waits if it is blocking.
    """

    buffered_bytes = 0
    is_worn_out = False

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def low_water_mark(self, wanted_bytes: int) -> int:
        """See ``ByteStream.low_water_mark``."""
        return max(1, wanted_bytes)

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See ``ByteStream.send``."""
        return self._socket.sendmsg(buffers)

    def receive(self, places: Sequence[memoryview]) -> int:
        """See ``ByteStream.receive``."""
        count, *_ = self._socket.recvmsg_into(places, 0, socket.MSG_DONTWAIT)
        return count


class EncryptedStream:
    """The bytes of a socket, encrypted with TLS. See Note: [TLS in memory].

    Args:
        connected: The socket. ``send`` waits if it is blocking.
        context: Versions and certificates.
        server_name: Name that the certificate of the server must have. None: this end is the server.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str | None = None) -> None:
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._is_ready = False
        self._received = memoryview(bytearray(_BATCH_BYTES))
        self._unsent = memoryview(b"")
        """Encrypted bytes that the socket has not taken."""
        self._encrypted_bytes = 0
        """Bytes of the caller that are encrypted in ``_unsent``, or were sent before."""
        self._sent_records = self._received_records = 0

    @property
    def buffered_bytes(self) -> int:
        """See ``ByteStream.buffered_bytes``."""
        return self._incoming.pending + self._tls.pending()

    @property
    def is_worn_out(self) -> bool:
        """See ``ByteStream.is_worn_out``."""
        return max(self._sent_records, self._received_records) > _MOST_RECORDS

    def low_water_mark(self, wanted_bytes: int) -> int:
        """See ``ByteStream.low_water_mark``."""
        # OpenSSL also keeps the received part of one record, and does not tell its size.
        return max(1, wanted_bytes - self.buffered_bytes - _MAX_RECORD_BYTES)

    def handshake(self) -> None:
        """Continues the handshake until it is complete.

        Raises:
            BlockingIOError: Bytes of the peer are missing. Call again when they have arrived.
            ssl.SSLError: The handshake failed, for example because the certificate of the peer is refused.
        """
        while not self._is_ready:
            try:
                self._tls.do_handshake()
                self._is_ready = True
            except ssl.SSLWantReadError:
                self._flush()
                self._fill()
            except ssl.SSLError:
                with suppress(OSError):
                    self._flush()  # tells the peer the reason
                raise
        self._flush()

    def send(self, buffers: Sequence[Buffer]) -> int:
        """See ``ByteStream.send``."""
        if not self._unsent:
            self._encrypt(buffers)
        self._flush()
        sent_bytes, self._encrypted_bytes = self._encrypted_bytes, 0
        return sent_bytes

    def receive(self, places: Sequence[memoryview]) -> int:
        """See ``ByteStream.receive``."""
        try:
            while not (count := self._decrypt(places)):
                self._fill()
        except EOFError:
            return 0
        return count

    def _encrypt(self, buffers: Sequence[Buffer]) -> None:
        """Encrypts the first bytes of the buffers."""
        for buffer in buffers:
            left = memoryview(buffer)
            while left:
                if self._encrypted_bytes >= _BATCH_BYTES:
                    return
                count = self._tls.write(left)
                self._sent_records += 1
                self._encrypted_bytes += count
                left = left[count:]

    def _flush(self) -> None:
        """Sends the encrypted bytes. Raises BlockingIOError if some are left."""
        if self._outgoing.pending:
            self._unsent = memoryview(bytes(self._unsent) + self._outgoing.read())
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _fill(self) -> None:
        """Receives encrypted bytes without waiting. Raises BlockingIOError without any, and EOFError after the last."""
        count = self._socket.recv_into(self._received, 0, socket.MSG_DONTWAIT)
        if not count:
            if not self._is_ready:
                raise ConnectionResetError("the peer closed the connection during the TLS handshake")
            raise EOFError
        self._incoming.write(self._received[:count])

    def _decrypt(self, places: Sequence[memoryview]) -> int:
        """Decrypts received bytes into consecutive places; returns how many."""
        total = 0
        with suppress(ssl.SSLWantReadError):
            for place in places:
                left = place
                while left:
                    count: int = self._tls.read(len(left), left)  # type: ignore[assignment]  # typed as without a buffer
                    if not count:
                        raise EOFError
                    self._received_records += 1
                    total += count
                    left = left[count:]
        return total
