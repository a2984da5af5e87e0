"""Limits per caller and per run: requests per second, requests at once, and bytes of requests.

Every rpc passes ``RequestLimits`` before its message is decoded. A caller is the holder of a token: a trainer of a
run, or all holders of one role for a run. Without a token, a caller is a connection. The coordinator and the shard
servers of a cluster with a key are not limited, because whoever holds the key owns the cluster.

A caller above its rate is slowed down, so that a burst of a healthy trainer costs time and nothing else. Only a
caller that would have to wait for longer than ``MAX_DELAY_S`` is refused.

``Unproven`` limits the callers that prove no right: their TCP connections are closed, for which gRPC's Python API has
no call.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

from shardwell_wire.errors import TooManyRequestsError
from shardwell_wire.security.tokens import Identity, Role

_DESCRIPTORS = "/proc/self/fd"

_ports: Counter[int] = Counter()
"""Ports on which gRPC servers of this process listen."""


@contextmanager
def grpc_port(port: int) -> Iterator[None]:
    """Lets the functions of this module close connections to a port while the block runs.

    The same peer may also be connected to another port of this process, such as that of the socket transport: a client,
    or a router that translates addresses, may use one local port for several destinations.
    """
    _ports[port] += 1
    try:
        yield
    finally:
        _ports[port] -= 1


def close_connection(peer: str) -> bool:
    """Shuts down the TCP connection of a peer, which ends its rpcs and frees the memory that gRPC holds for them.

    Args:
        peer: As gRPC names it, such as ``ipv4:127.0.0.1:40000``.

    Returns:
        True if the connection was found.
    """
    return close_connections([peer]) > 0


def close_connections(peers: Iterable[str]) -> int:
    """Closes several connections with one search of the process's file descriptors; returns how many were found."""
    wanted = {address for peer in peers if (address := _address_of(peer)) is not None}
    found = 0
    with suppress(OSError):
        for descriptor in map(int, os.listdir(_DESCRIPTORS)):
            if found == len(wanted):
                break
            found += _shut_down_if_connected(descriptor, wanted)
    return found


def host_of(peer: str) -> str:
    """Returns the host of a peer, without its port."""
    address = _address_of(peer)
    return peer if address is None else address[0]


def _address_of(peer: str) -> tuple[str, int] | None:
    kind, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _without_mapping(host.strip("[]")), int(port)


def _shut_down_if_connected(descriptor: int, wanted: set[tuple[str, int]]) -> bool:
    """Shuts a descriptor down if it is a connection of one of several peers to gRPC; returns True if it is."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        # A duplicate, because gRPC owns the descriptor and must close it itself.
        with socket.socket(fileno=os.dup(descriptor)) as connected:
            if connected.family not in (socket.AF_INET, socket.AF_INET6) or connected.type != socket.SOCK_STREAM:
                return False
            host, port, *_ = connected.getpeername()
            if (_without_mapping(host), port) not in wanted or not _ports[connected.getsockname()[1]]:
                return False
            connected.shutdown(socket.SHUT_RDWR)
            return True
    except OSError:
        return False  # closed a moment ago, or a listening socket


def _without_mapping(host: str) -> str:
    """Strips the prefix with which an IPv6 socket names an IPv4 address."""
    return host.removeprefix("::ffff:")


logger = logging.getLogger(__name__)

REQUESTS_PER_S, REQUEST_BURST = 1000.0, 4000
"""Requests of one caller: on average, and at once after a pause. A trainer sends a few for each unit and step."""

RUN_REQUESTS_PER_S, RUN_REQUEST_BURST = 4000.0, 16_000
"""Requests of all callers of one run. One server process handles about this many."""

MAX_DELAY_S = 2.0
"""Longest delay of a request above the rate. A request that would have to wait longer is refused."""

MAX_REQUESTS_AT_ONCE, MAX_RUN_REQUESTS_AT_ONCE = 2048, 32_768
"""Unfinished requests of one caller, and of one run. A membership, a transport session and a pinned version count as a
request while they last."""

MAX_REQUEST_BYTES, MAX_RUN_REQUEST_BYTES = 64 << 20, 512 << 20
"""Size of the unfinished requests of one caller, and of one run. The streams of gradients and values do not count: the
memory budget limits them."""

REFUSALS_PER_S, REFUSAL_BURST = 100.0, 5000
"""Refused requests of one host: on average, and at once after a pause. A refusal takes about 0.3 ms of CPU time. While
a host is above the rate, each refusal closes its connection."""

OPEN_CALLS_PER_S, OPEN_CALL_BURST = 100.0, 1000
"""The same for health checks and reflection, which need no token."""

MAX_OPEN_CALLS_AT_ONCE = 1024
"""Unfinished health checks and reflection calls of one host. A watch of the health, and a stream of reflection, last as
long as the client wants. Each more closes its connection."""

MAX_LOGGED_PER_S = 100
"""Refused requests that are logged in one second."""

_CLOSE_PAUSE_S = 0.02
"""Connections are closed together after this time, because each search for them looks at all descriptors."""

_ROUNDING_S = 1e-6
_MAX_KEYS = 16_384
_UNLIMITED = (Role.COORDINATOR, Role.SERVER)


class Rate:
    """Limits the rate of events by key. An event above the rate has to wait for its turn.

    This is the generic cell rate algorithm (ITU-T I.371): one time per key, no timers.

    Args:
        per_s: Events per second.
        burst: Events that need not wait after a pause.
        clock: Returns seconds.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s = per_s
        self._interval_s, self._slack_s, self._clock = 1 / per_s, burst / per_s + _ROUNDING_S, clock
        self._busy_until_s: OrderedDict[str, float] = OrderedDict()
        """Time at which a key has used up its events, for keys that have not been idle."""

    def delay_s(self, key: str) -> float:
        """Returns how long the next event of a key has to wait. Changes nothing."""
        now = self._clock()
        return max(0.0, self._busy_until_s.get(key, now) + self._interval_s - self._slack_s - now)

    def admit(self, key: str) -> bool:
        """Counts one event unless it is above the rate; returns whether it was counted.

        For events that are dropped or punished instead of delayed. If all events counted, a key would stay above the
        rate long after its last event.
        """
        if self.delay_s(key):
            return False
        self.count(key)
        return True

    def count(self, key: str) -> float:
        """Counts one event, which is going to wait for its turn; returns how long, in seconds."""
        delay_s, now = self.delay_s(key), self._clock()
        self._busy_until_s[key] = max(now, self._busy_until_s.get(key, now)) + self._interval_s
        self._busy_until_s.move_to_end(key)
        # A key that was idle for long enough needs no entry. Beyond the maximum, the longest unused entries go.
        oldest = next(iter(self._busy_until_s))
        if self._busy_until_s[oldest] <= now or len(self._busy_until_s) > _MAX_KEYS:
            del self._busy_until_s[oldest]
        return delay_s


@dataclass(slots=True)
class _Unfinished:
    """The unfinished requests of one caller or run."""

    count: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Share:
    """What one caller or one run may use."""

    key: str
    what: str
    """Names the caller or the run in errors."""
    rate: Rate
    max_count: int
    max_bytes: int


class RequestLimits:
    """Admits the requests of one server, before they are decoded. Used on the event loop."""

    def __init__(self, caller: Rate | None = None, run: Rate | None = None) -> None:
        self._caller = caller or Rate(REQUESTS_PER_S, REQUEST_BURST)
        self._run = run or Rate(RUN_REQUESTS_PER_S, RUN_REQUEST_BURST)
        self._unfinished: dict[str, _Unfinished] = {}
        self._shares: dict[Identity, tuple[_Share, ...]] = {}
        """Shares of callers that have sent a request."""

    def request(self, caller: Identity | None, peer: str, size_bytes: int = 0) -> _Request:
        """Returns a context that counts a request while the block handles it.

        Entering the context waits if the caller is above its rate. It raises TooManyRequestsError if the caller or its
        run is far above its rate, or has too many unfinished requests.

        Args:
            caller: Who sends the request. None: the cluster admits every caller.
            peer: The connection.
        """
        if caller is None:
            return _Request(self, (self._share_of_caller(peer, f"connection {peer}"),), size_bytes)
        shares = self._shares.get(caller)
        if shares is None:
            if len(self._shares) >= _MAX_KEYS:
                self._shares.clear()
            shares = self._shares[caller] = tuple(self._shares_of(caller))
        return _Request(self, shares, size_bytes)

    def _shares_of(self, caller: Identity) -> list[_Share]:
        if caller.role in _UNLIMITED:
            return []
        run = f"{caller.run}/{caller.run_id}"
        own = self._share_of_caller(f"{caller.role}/{run}/{caller.member}", str(caller))
        if not caller.run:
            return [own]
        what = f"run {caller.run!r}"
        return [own, _Share(run, what, self._run, MAX_RUN_REQUESTS_AT_ONCE, MAX_RUN_REQUEST_BYTES)]

    def _share_of_caller(self, key: str, what: str) -> _Share:
        return _Share(key, what, self._caller, MAX_REQUESTS_AT_ONCE, MAX_REQUEST_BYTES)

    def begin(self, shares: Iterable[_Share], size_bytes: int) -> float:
        """Counts a request that fits all shares; returns how long it has to wait."""
        for share in shares:
            self._check(share, size_bytes)
        delay_s = 0.0
        for share in shares:
            unfinished = self._unfinished.setdefault(share.key, _Unfinished())
            unfinished.count += 1
            unfinished.size_bytes += size_bytes
            delay_s = max(delay_s, share.rate.count(share.key))
        return delay_s

    def _check(self, share: _Share, size_bytes: int) -> None:
        unfinished = self._unfinished.get(share.key, _Unfinished())
        if share.rate.delay_s(share.key) > MAX_DELAY_S:
            raise TooManyRequestsError(
                f"{share.what} sends more than {share.rate.per_s:g} requests per second: slow down"
            )
        if unfinished.count >= share.max_count:
            raise TooManyRequestsError(
                f"{share.what} has {unfinished.count} unfinished requests, expected at most {share.max_count}: wait "
                "for some before sending more"
            )
        if unfinished.count and unfinished.size_bytes + size_bytes > share.max_bytes:
            raise TooManyRequestsError(
                f"{share.what} has {unfinished.size_bytes} bytes of unfinished requests and sends {size_bytes} more, "
                f"expected at most {share.max_bytes}: wait for some before sending more"
            )

    def finish(self, shares: Iterable[_Share], size_bytes: int) -> None:
        """Stops counting a request."""
        for share in shares:
            unfinished = self._unfinished[share.key]
            unfinished.count -= 1
            unfinished.size_bytes -= size_bytes
            if not unfinished.count:
                del self._unfinished[share.key]


class _Request:
    """One request while it is handled. A plain class: every request uses it, and a generator would cost more.

    Args:
        shares: What the request counts against.
    """

    __slots__ = ("_limits", "_shares", "_size_bytes")

    def __init__(self, limits: RequestLimits, shares: tuple[_Share, ...], size_bytes: int) -> None:
        self._limits, self._shares, self._size_bytes = limits, shares, size_bytes

    async def __aenter__(self) -> None:
        delay_s = self._limits.begin(self._shares, self._size_bytes)
        if delay_s:
            try:
                await asyncio.sleep(delay_s)
            except BaseException:
                self._limits.finish(self._shares, self._size_bytes)
                raise

    async def __aexit__(self, *_: object) -> None:
        self._limits.finish(self._shares, self._size_bytes)


class Unproven:
    """Closes the connections of hosts that call too often without a right. Used on the event loop.

    A refusal costs the server about as much as the caller. Without this limit, a caller without a token could occupy
    the event loop with refusals.

    Args:
        close: Closes the connections of peers; returns how many were found.
    """

    def __init__(self, rate: Rate, close: Callable[[Iterable[str]], int] = close_connections) -> None:
        self._rate, self._close, self._logged = rate, close, Rate(0.1, 10)
        self._closing: set[str] = set()
        self._unfinished: Counter[str] = Counter()
        """Calls that ``handling`` counts, by host."""

    def count(self, peer: str) -> None:
        """Counts a call. Closes its connection, in a moment, if there were too many of its host."""
        if not self._rate.admit(host_of(peer)):
            self._close_soon(peer)

    @contextmanager
    def handling(self, peer: str) -> Iterator[None]:
        """Counts a call, and that it is unfinished while the block handles it."""
        self.count(peer)
        host = host_of(peer)
        self._unfinished[host] += 1
        if self._unfinished[host] > MAX_OPEN_CALLS_AT_ONCE:
            self._close_soon(peer)
        try:
            yield
        finally:
            self._unfinished[host] -= 1
            if not self._unfinished[host]:
                del self._unfinished[host]

    def _close_soon(self, peer: str) -> None:
        if not self._closing:
            asyncio.get_running_loop().call_later(_CLOSE_PAUSE_S, self._close_all)
        self._closing.add(peer)

    def _close_all(self) -> None:
        closing, self._closing = self._closing, set()
        found = self._close(closing)
        if not self._logged.admit(""):
            return
        logger.warning(
            "closed %d connections after too many calls without a valid token, such as that of %s",
            found,
            min(closing, default=""),
        )


def refusals(close: Callable[[Iterable[str]], int] = close_connections) -> Unproven:
    """Returns the limit of refused requests. ``close``: see ``Unproven``."""
    return Unproven(Rate(REFUSALS_PER_S, REFUSAL_BURST), close)


def open_calls() -> Unproven:
    """Returns the limit of health checks and reflection."""
    return Unproven(Rate(OPEN_CALLS_PER_S, OPEN_CALL_BURST))
