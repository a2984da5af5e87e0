"""The log of request ids: retries pass, other requests with the same id are rejected."""

from __future__ import annotations

import pytest

from shardwell_server.serving.rpc import RequestLog
from shardwell_wire.errors import DuplicateError, InvalidRequestError


def test_retry_passes_and_another_request_is_rejected() -> None:
    log = RequestLog()
    assert not log.check("id", "push")
    assert log.check("id", "push")
    with pytest.raises(DuplicateError, match="request id 'id' was used for another request"):
        log.check("id", "pull")
    assert log.check("id", "push"), "the rejected request left no trace"


def test_request_without_id_is_not_checked() -> None:
    log = RequestLog()
    assert not log.check("", "push")
    assert not log.check("", "pull")


def test_overlong_request_id_is_rejected() -> None:
    with pytest.raises(InvalidRequestError, match="129 characters"):
        RequestLog().check("x" * 129, "push")


def test_least_recently_used_request_id_is_removed() -> None:
    log = RequestLog(capacity=2)
    for request_id in ("a", "b", "a", "c"):
        log.check(request_id, 1)
    assert log.check("a", 1)
    assert not log.check("b", 2)
