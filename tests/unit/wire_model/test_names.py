"""Names are checked in every request, before anything else."""

from __future__ import annotations

import logging

import pytest
from google.protobuf.message import Message

from shardwell_server.serving.rpc import reported_error
from shardwell_wire.errors import InvalidRequestError
from shardwell_wire.model.names import MAX_NAME_LENGTH, MAX_PATH_LENGTH, check_id, check_name, check_names, check_path
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2


@pytest.mark.parametrize("name", ["a", "gpt 2", "team/gpt", "größe", "x" * MAX_NAME_LENGTH, "a.b-c_d:1"])
def test_valid_names_are_accepted(name: str) -> None:
    check_name("run", name)


@pytest.mark.parametrize("name", ["", " ", " a", "a ", "a\nb", "a\x00b", "\u200b", "x" * (MAX_NAME_LENGTH + 1)])
def test_invalid_names_are_rejected(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="expected 1 to 200 printable characters, without spaces at the ends"):
        check_name("run", name)


@pytest.mark.parametrize(
    "server_id", ["", " ", "a/../../b", "..", "-x", "a b", "ä", "x" * (MAX_NAME_LENGTH + 1), "a\n"]
)
def test_invalid_ids_are_rejected(server_id: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"server_id is .*: expected 1 to 200 letters, digits"):
        check_id("server_id", server_id)


@pytest.mark.parametrize("server_id", ["3deff9898fc0-6", "host.example.org-12", "shard-0", "s0", "a:1"])
def test_valid_ids_are_accepted(server_id: str) -> None:
    check_id("server_id", server_id)


def test_qualified_names_may_be_longer() -> None:
    check_path("unit", "m" * MAX_PATH_LENGTH)
    with pytest.raises(InvalidRequestError, match="expected 1 to 1000"):
        check_path("unit", "m" * (MAX_PATH_LENGTH + 1))


LONG = "r" * 5_000_000
CONTEXT = common_pb2.RequestContext(run=LONG)


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("run", coordinator_pb2.JoinRequest(run=LONG)),
        ("trainer", coordinator_pb2.HeartbeatRequest(run="r", trainer=" ")),
        ("run", coordinator_pb2.DeleteRunRequest(run=LONG)),
        ("server_id", coordinator_pb2.RegisterServerRequest(server_id="a/../../b")),
        ("run", coordinator_pb2.FinishWorkRequest(context=CONTEXT)),
        ("name", coordinator_pb2.DeclareUnitRequest(unit=common_pb2.UnitSpec(name="u\n"))),
        (
            "name",
            shard_pb2.ReserveUnitRequest(
                unit=common_pb2.UnitSpec(name="u", parameters=[common_pb2.ParameterSpec(name="p" * 1001)])
            ),
        ),
        ("run", shard_pb2.ReduceGradientBufferRequest(header=shard_pb2.ReduceScatterHeader(context=CONTEXT))),
        ("unit", shard_pb2.GatherRequest(run="r", unit="\t")),
        ("run", shard_pb2.OpenStagingBufferRequest(partition=shard_pb2.ReadPartitionRequest(context=CONTEXT))),
        ("parameter", shard_pb2.PeekRequest(run="r", parameter=LONG)),
    ],
)
def test_invalid_name_is_found_in_any_request(field: str, request_: Message) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field} is ") as refused:
        check_names(request_)
    assert len(str(refused.value)) < 300


def test_requests_without_names_pass() -> None:
    for request in (coordinator_pb2.ListRunsRequest(), shard_pb2.MeasureTransportRequest(), shard_pb2.PeekRequest()):
        check_names(request)


def test_long_name_is_shortened_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reported_error("/x", InvalidRequestError(LONG), "peer")
    assert len(caplog.text) < 2000
