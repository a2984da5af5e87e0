"""The endpoint of metrics: what a scrape gets if the server cannot answer, and the buckets of a histogram."""

from __future__ import annotations

import asyncio
import logging
import threading
from http.client import HTTPConnection

import pytest

from shardwell_server.serving import metrics
from shardwell_server.serving.metrics import Durations, gauge


def _get(address: str) -> tuple[int, str]:
    connection = HTTPConnection(address, timeout=10)
    try:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def _scrape(read: metrics.Read) -> tuple[int, str]:
    async def scrape() -> tuple[int, str]:
        async with metrics.serving("127.0.0.1:0", read) as address:
            return await asyncio.to_thread(_get, address)

    return asyncio.run(scrape())


def test_metrics_are_read_on_the_event_loop() -> None:
    threads = []

    def read() -> list[metrics.Metric]:
        threads.append(threading.current_thread())
        return [gauge("shardwell_tests", "Tests.", [('a"b', 2)], "run")]

    status, text = _scrape(read)
    assert status == 200
    assert 'shardwell_tests{run="a\\"b"} 2.0' in text
    assert threads == [threading.current_thread()]


def test_busy_server_answers_503() -> None:
    started = threading.Event()

    def read() -> list[metrics.Metric]:
        started.set()
        raise TimeoutError

    assert _scrape(read) == (503, "the server is too busy to answer\n")
    assert started.is_set()


def test_defect_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> list[metrics.Metric]:
        raise RuntimeError("secret detail")

    with caplog.at_level(logging.ERROR):
        status, text = _scrape(read)
    assert (status, "secret" in text) == (500, False)
    assert "secret detail" in caplog.text


def test_buckets_count_all_durations_up_to_their_bound() -> None:
    durations = Durations((0.1, 1.0))
    for seconds in (0.1, 0.2, 5.0, 0.05):
        durations.add(seconds)
    assert durations.buckets() == [("0.1", 2.0), ("1.0", 3.0), ("+Inf", 4.0)]
    assert (durations.sum_s, durations.last_s) == (pytest.approx(5.35), 0.05)


def test_unknown_method_is_not_counted() -> None:
    metrics.count_failed("/a.Service/MadeUpByACaller", "PERMISSION_DENIED")
    assert not [method for method, _ in metrics.failed_rpcs if method == "MadeUpByACaller"]
