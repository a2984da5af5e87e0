"""Serves a server's numbers in Prometheus' format over HTTP, and counts the rpcs of the process.

A scrape reads the state of the server on its event loop, between two callbacks, so no number is kept twice and none
needs a lock. Threads of their own serve HTTP and make the text. The endpoint has neither TLS nor tokens: it shows names
of runs and servers, and no weights.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib.metadata import version as installed_version
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

METRICS_PATH = "/metrics"

_SCRAPE_LIMIT_S = 5.0
"""Longest time in which the event loop must answer a scrape."""
_MAX_SCRAPES_AT_ONCE = 4
"""Further connections are closed. Prometheus scrapes again."""

Read = Callable[[], Iterable[Metric]]
"""Returns the metrics of a server. Called on its event loop."""


class Durations:
    """A histogram of durations. Used on one event loop.

    Args:
        bounds: Upper bounds of the buckets in seconds, ascending. One more bucket has no bound.
    """

    __slots__ = ("bounds", "counts", "last_s", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self.counts = bounds, [0] * (len(bounds) + 1)
        self.sum_s = self.last_s = 0.0

    def add(self, seconds: float) -> None:
        """Adds one duration."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds
        self.last_s = seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the upper bound of each bucket, and the number of durations up to it."""
        found, total = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


_RPC_BOUNDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0)

failed_rpcs: Counter[tuple[str, str]] = Counter()
"""Rpcs of this process that ended with an error, by method and status."""


@cache
def rpc_durations(path: str) -> Durations:
    """Returns the durations of the rpcs of this process that succeeded, of one method. Their count is in them.

    Args:
        path: The rpc, such as ``/shardwell_wire.v1.ShardService/Gather``.
    """
    return _durations_of.setdefault(method_of(path), Durations(_RPC_BOUNDS))


_durations_of: dict[str, Durations] = {}


def method_of(path: str) -> str:
    """Returns the name of an rpc without its service."""
    return path.rpartition("/")[2]


def count_failed(path: str, status: str) -> None:
    """Counts an rpc that ended with an error. Unknown methods that callers made up are not counted."""
    if method_of(path) in _durations_of:
        failed_rpcs[method_of(path), status] += 1


Samples = Iterable[tuple[Any, ...]]
"""Tuples of label values, and a number at the end."""


def gauge(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Returns a gauge with its samples."""
    return _add(GaugeMetricFamily(name, text, labels=labels), samples)


def counter(name: str, text: str, samples: Samples, *labels: str) -> Metric:
    """Returns a counter with its samples. The name ends with ``_total``."""
    return _add(CounterMetricFamily(name, text, labels=labels), samples)


def histogram(name: str, text: str, samples: Iterable[tuple[str, Durations]], label: str) -> Metric:
    """Returns a histogram with one series per value of a label."""
    family = HistogramMetricFamily(name, text, labels=[label])
    for value, durations in samples:
        family.add_metric([value], durations.buckets(), durations.sum_s)
    return family


def _add(family: Any, samples: Samples) -> Metric:
    for *values, number in samples:
        family.add_metric([str(value) for value in values], float(number))
    metric: Metric = family
    return metric


def process_metrics() -> Iterator[Metric]:
    """Yields the metrics that all servers have."""
    yield gauge(
        "shardwell_build_info", "Version of the package; always 1.", [(installed_version("shardwell"), 1)], "version"
    )
    called = {method: durations for method, durations in sorted(_durations_of.items()) if any(durations.counts)}
    by_status = {(method, "OK"): sum(durations.counts) for method, durations in called.items()} | dict(failed_rpcs)
    yield counter(
        "shardwell_rpcs_total",
        "Rpcs that have ended, without those that their caller cancelled, by method and gRPC status.",
        ((method, code, count) for (method, code), count in sorted(by_status.items())),
        "method",
        "code",
    )
    yield histogram(
        "shardwell_rpc_duration_seconds",
        "Time of the rpcs that succeeded, with the time that they waited for what they asked for.",
        called.items(),
        "method",
    )


class _LoopCollector(Collector):
    """Reads the metrics on the event loop, for a thread that serves a scrape."""

    def __init__(self, loop: asyncio.AbstractEventLoop, read: Read) -> None:
        self._loop, self._read = loop, read

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering this collector does not call ``collect``."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Returns the metrics. Raises TimeoutError if the event loop does not answer."""

        async def read() -> list[Metric]:
            return [*process_metrics(), *self._read()]

        reading = asyncio.run_coroutine_threadsafe(read(), self._loop)
        try:
            return reading.result(_SCRAPE_LIMIT_S)
        finally:
            reading.cancel()


class _Handler(WSGIRequestHandler):
    timeout = _SCRAPE_LIMIT_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name in the base class
        logger.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    """Serves a few connections at once, each in a thread that ends with the process."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._free = threading.BoundedSemaphore(_MAX_SCRAPES_AT_ONCE)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # not that of HTTPServer, which looks up the name of the host
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape by %s failed", client_address, exc_info=True)


def _application(registry: CollectorRegistry) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    text = make_wsgi_app(registry, disable_compression=True)

    def answer(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] != METRICS_PATH:
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [f"the metrics are at {METRICS_PATH}\n".encode()]
        try:
            found: Iterable[bytes] = text(environ, start_response)
        except TimeoutError:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the server is too busy to answer\n"]
        except Exception:
            logger.exception("the metrics cannot be read")
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [b"the metrics cannot be read; the server's log has the details\n"]
        return found

    return answer


@asynccontextmanager
async def serving(bind: str, read: Read) -> AsyncIterator[str]:
    """Serves ``http://HOST:PORT/metrics`` while the block runs; yields the address.

    Args:
        bind: host:port to listen on. Empty: nothing is served, and the address is empty.
        read: Returns the metrics of the server, besides those that all servers have.

    Raises:
        SystemExit: The address cannot be bound.
    """
    if not bind:
        yield ""
        return
    host, _, port = bind.rpartition(":")
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_LoopCollector(asyncio.get_running_loop(), read))
    try:
        server = _Server((host.strip("[]"), int(port)))
    except OSError as error:
        raise SystemExit(
            f"cannot serve metrics on {bind}: {error.strerror}; choose another address with --metrics-host and "
            "--metrics-port (port 0: a free port)"
        ) from error
    server.set_app(_application(registry))
    address = f"{host}:{server.server_port}"
    thread = threading.Thread(target=partial(server.serve_forever, 0.1), name="metrics", daemon=True)
    thread.start()
    logger.info("metrics are at http://%s%s", address, METRICS_PATH)
    try:
        yield address
    finally:
        await asyncio.to_thread(server.shutdown)  # a scrape in progress still needs the event loop
        server.server_close()
