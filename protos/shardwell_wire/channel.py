"""Channel and server options that both ends share."""

from __future__ import annotations

import os

import grpc
import grpc.aio

from shardwell_wire.errors import UsageError

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message either end accepts: four times the largest chunk."""

_FRAME_BYTES = 4 << 20
"""Large HTTP/2 frames make 1 MiB chunks twice as fast as the default of 16 KiB."""

_PROXY_VARIABLE = "grpc_proxy"

_LONGEST_BACKOFF_MS = 1_000

RECONNECT_S = 1.2 * _LONGEST_BACKOFF_MS / 1000
"""Who lost a connection has tried again so long after the peer is back: gRPC varies its pauses by a fifth."""

_SHARED_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.max_frame_size", _FRAME_BYTES),
    ("grpc.http2.write_buffer_size", _FRAME_BYTES),
    ("grpc.http2.lookahead_bytes", _FRAME_BYTES),
]

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_SHARED_OPTIONS,
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", _LONGEST_BACKOFF_MS),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of every channel, beside those of ``_channel_options``. A dead peer is noticed within 15 s even on an idle
connection; a restarted one within about 1 s. One that is busy gets 5 s to answer a connection attempt (gRPC calls that
the least backoff)."""

SERVER_OPTIONS: list[tuple[str, int]] = [
    *_SHARED_OPTIONS,
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.so_reuseport", 0),
]


def open_channel(address: str) -> grpc.Channel:
    """A blocking channel to ``host:port``; it connects when first used. Raises as ``check_address`` does."""
    check_address(address)
    return grpc.insecure_channel(address, options=_channel_options())


def open_aio_channel(address: str) -> grpc.aio.Channel:
    """An asyncio channel to ``host:port``; it connects when first used. Raises as ``check_address`` does."""
    check_address(address)
    return grpc.aio.insecure_channel(address, options=_channel_options())


def _channel_options() -> list[tuple[str, int]]:
    """``CHANNEL_OPTIONS``, and whether to use a proxy.

    ``http_proxy`` and ``https_proxy`` are meant for the web: such a proxy rarely reaches members of a cluster. Only
    ``grpc_proxy``, gRPC's own variable, makes a channel use one.
    """
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(bool(os.environ.get(_PROXY_VARIABLE))))]


def check_address(address: str) -> None:
    """Refuses what gRPC would take for a name to look up, for as long as somebody waits.

    Raises:
        UsageError: It is not ``host:port``.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{address!r} is no address: expected HOST:PORT, such as localhost:50051")
