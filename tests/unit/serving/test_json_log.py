"""The log in JSON: fields of requests, of calls and of exceptions."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from typing import Any

import pytest

from shardwell_server.serving import json_log
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2


def formatted(message: str, *arguments: object, **settings: Any) -> dict[str, Any]:
    logger = logging.getLogger("shardwell_server.tests")
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, message, arguments, None, **settings)
    line = json_log.JsonFormatter("shard-0").format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_line_has_what_is_known_of_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_log, "_enabled", True)
    context = common_pb2.RequestContext(run="gpt", run_id="r1", step=0, request_id="abc")
    request = shard_pb2.PrepareStepRequest(context=context)

    def handle() -> dict[str, Any]:
        json_log.note_request("/shardwell_wire.v1.ShardService/PrepareStep", "ipv4:127.0.0.1:1", request)
        return formatted("prepared\n%s", "it", extra={"fields": {"event": "step_committed"}})

    line = contextvars.copy_context().run(handle)
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "level": "info",
        "logger": "shardwell_server.tests",
        "message": "prepared\nit",
        "process": "shard-0",
        "rpc": "PrepareStep",
        "peer": "ipv4:127.0.0.1:1",
        "run": "gpt",
        "step": 0,
        "request": "abc",
        "event": "step_committed",
    }
    assert "run" not in formatted("later, in another task")


def test_log_as_text_notes_no_request() -> None:
    json_log.note_request("/x/Join", "", coordinator_pb2.JoinRequest(run="gpt"))
    assert "run" not in formatted("joined")


def test_line_has_the_exception() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = formatted("failed", extra=None)
        record = logging.LogRecord("x", logging.ERROR, "", 1, "failed", (), sys.exc_info())
    assert "exception" not in line
    assert json.loads(json_log.JsonFormatter("x").format(record))["exception"].endswith("ValueError: two\nlines")
