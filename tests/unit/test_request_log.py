"""Request ids: a repetition passes, another request under the same id does not."""

from __future__ import annotations

import pytest

from shardwell_server.request_log import RequestLog
from shardwell_wire.errors import DuplicateError, InvalidRequestError


def test_a_repetition_is_told_from_another_request() -> None:
    log = RequestLog()
    assert not log.check("id", "push")
    assert log.check("id", "push")
    with pytest.raises(DuplicateError, match="request id 'id' was used for another request"):
        log.check("id", "pull")
    assert log.check("id", "push"), "the refused request left no trace"


def test_requests_without_an_id_are_not_checked() -> None:
    log = RequestLog()
    assert not log.check("", "push")
    assert not log.check("", "pull")


def test_an_endless_id_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="129 characters"):
        RequestLog().check("x" * 129, "push")


def test_the_least_recently_seen_id_is_forgotten() -> None:
    log = RequestLog(capacity=2)
    for request_id in ("a", "b", "a", "c"):
        log.check(request_id, 1)
    assert log.check("a", 1)
    assert not log.check("b", 2)
