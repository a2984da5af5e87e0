"""Opens the TCP ports of a server beside that of gRPC."""

from __future__ import annotations

import socket


def listen(host: str) -> socket.socket:
    """Returns a socket that listens on a free port of a host. An IPv6 address may be in brackets."""
    name = host.strip("[]")
    both = name == "::" and socket.has_dualstack_ipv6()
    try:
        family, *_, address = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
    except OSError as error:
        raise SystemExit(f"cannot listen on {host}: {error}") from error
