"""Tests of the server's log lines about rejected requests."""

from __future__ import annotations

import logging

import pytest

from shardwell_server.serving.rpc import reported_error
from shardwell_wire.errors import (
    AccessError,
    InternalError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
)


def test_the_log_names_the_peer(caplog: pytest.LogCaptureFixture) -> None:
    refused = NotFoundError("no such run")
    with caplog.at_level(logging.INFO):
        assert reported_error("/Service/Call", refused, "ipv4:10.0.0.7:1234") is refused
        assert isinstance(reported_error("/Service/Call", ValueError("defect"), "ipv4:10.0.0.8:1"), InternalError)
    assert caplog.messages == [
        "/Service/Call from ipv4:10.0.0.7:1234 rejected: NotFoundError: no such run",
        "/Service/Call from ipv4:10.0.0.8:1 failed",
    ]


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (StaleEpochError("it left"), logging.DEBUG),
        (UnavailableError("the run is being loaded"), logging.DEBUG),
        (NotFoundError("no such run"), logging.INFO),
        (AccessError("the token is for another run"), logging.WARNING),
    ],
)
def test_ordinary_answers_are_no_refusals(error: ShardwellError, level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        reported_error("/Service/Call", error, "ipv4:10.0.0.7:1234")
    # Threads of earlier tests may log, too.
    (record,) = (each for each in caplog.records if each.name == reported_error.__module__)
    assert record.levelno == level
    assert ("rejected" in record.getMessage()) == (level > logging.DEBUG)
