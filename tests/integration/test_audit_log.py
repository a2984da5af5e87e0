"""The audit log says who did what and what was refused, without secrets, and stays small."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_server.serving import authorization
from shardwell_wire.errors import AccessError, UnauthenticatedError
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials, new_key
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2
from tests.support.cluster import small_run
from tests.support.server_processes import ready_address, server_process

PATH = "/shardwell_wire.v1.CoordinatorService/ListRuns"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_has_what_every_caller_did(tmp_path: Path) -> None:
    key = new_key()
    key_file, at_coordinator, at_shard = tmp_path / "key", tmp_path / "coordinator.jsonl", tmp_path / "shard.jsonl"
    key_file.touch(mode=0o600)
    key_file.write_text(key.secret)
    options = ("--token-file", str(key_file), "--checkpoint-root", str(tmp_path))
    with server_process(
        "coordinator", "--listen", "127.0.0.1:0", *options, "--audit-log", str(at_coordinator)
    ) as server:
        address = ready_address(server)
        shard = ("shard", "--coordinator", address, "--id", "one", *options, "--audit-log", str(at_shard))
        with server_process(*shard) as second:
            ready_address(second)
            socket = shardwell.TransferOptions(transports="socket")
            folder = str(tmp_path / "checkpoints")
            places = {"checkpoint_dir": folder, "resume": "latest"}
            with small_run(address, "gpt", token_file=str(key_file), transfers=socket, **places) as session:
                url = session.save_checkpoint(wait=True)
                run_id = session._membership.identity.run_id
                reader = Credentials(text=key.mint(Role.READER, run="gpt", run_id=run_id))
                delete = coordinator_pb2.DeleteRunRequest(run="gpt", force=True)
                for credentials, error in ((NO_CREDENTIALS, UnauthenticatedError), (reader, AccessError)):
                    with closing(CoordinatorClient(address, credentials)) as client, pytest.raises(error):
                        client.call("DeleteRun", delete)
            with closing(CoordinatorClient(address, Credentials(key))) as operator:
                operator.call("DeleteRun", delete)
            written = [lines(path) for path in (at_coordinator, at_shard)]
    of_coordinator, of_shard = ({} for _ in range(2))
    for found, by_rpc in zip(written, (of_coordinator, of_shard), strict=True):
        for line in found:
            assert line["peer"].startswith(("ipv4:127.0.0.1:", "127.0.0.1:"))
            by_rpc.setdefault((line["rpc"].rpartition("/")[2], line["outcome"]), []).append(line)
    (registered,) = of_coordinator["RegisterServer", "admitted"]
    address_of_shard = registered["names"].pop("address")
    assert address_of_shard.startswith("127.0.0.1:")
    assert (registered["caller"], registered["names"]) == ({"role": "server"}, {"server_id": "one"})
    joined = of_coordinator["Join", "admitted"][0]
    assert joined["caller"] == {"role": "operator"}
    assert joined["names"] == {"run": "gpt", "trainer": "tester", **places}
    assert of_shard["BeginCheckpoint", "admitted"][0]["names"]["url"] == url
    (left,) = of_coordinator["Leave", "admitted"]
    assert left["names"]["run_id"] == run_id
    assert left["caller"] == {"role": "trainer", "run": "gpt", "run_id": run_id, "trainer": "tester"}
    nobody, read = of_coordinator["DeleteRun", "refused"]
    assert (nobody["status"], nobody["caller"]) == ("UNAUTHENTICATED", {})
    assert "carries no token" in nobody["reason"]
    assert (read["status"], read["caller"]) == ("PERMISSION_DENIED", {"role": "reader", "run": "gpt", "run_id": run_id})
    (deleted,) = of_coordinator["DeleteRun", "admitted"]
    assert deleted["caller"] == {"role": "operator"}
    assert of_shard["OpenTransport", "admitted"][0]["caller"]["trainer"] == "tester"
    assert of_shard["DropRun", "admitted"][0]["caller"] == {"role": "coordinator"}
    assert not {rpc for rpc, _ in of_coordinator} & {"Heartbeat", "HeartbeatServer", "CommitStep", "FinishWork"}
    for path in (at_coordinator, at_shard):
        assert path.stat().st_mode & 0o777 == 0o600
        text = path.read_text()
        assert key.secret not in text
        assert "sw1." not in text


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "audit.jsonl"
    logger = logging.getLogger(authorization.__name__)
    authorization.start(str(path))
    try:
        yield path
    finally:
        for handler in logger.handlers[:]:
            logger.removeHandler(handler)
            handler.close()


def test_refusals_per_second_are_limited_and_counted(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(authorization.time, "monotonic", lambda: now[0])
    for _ in range(authorization.MAX_REFUSALS_PER_S + 7):
        authorization.record_refused(PATH, "ipv4:1.2.3.4:5", AccessError("no"))
    assert len(lines(log)) == authorization.MAX_REFUSALS_PER_S
    now[0] += 1
    authorization.record_refused(PATH, "ipv4:1.2.3.4:5", AccessError("no"))
    authorization.record_refused(PATH, "ipv4:1.2.3.4:5", AccessError("no"))
    *_, first, second = lines(log)
    assert first["refusals_not_recorded"] == 7
    assert "refusals_not_recorded" not in second


def test_size_of_the_log_is_limited(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = logging.getLogger(authorization.__name__).handlers
    (handler,) = (each for each in handlers if isinstance(each, authorization._PrivateFile))
    monkeypatch.setattr(handler, "maxBytes", 1000)
    join = coordinator_pb2.JoinRequest(run="r", trainer="t")
    for _ in range(100):
        authorization.record_admitted(PATH.replace("ListRuns", "Join"), "ipv4:1.2.3.4:5", join)
    files = sorted(log.parent.glob("audit.jsonl*"))
    assert len(files) == 1 + authorization.FORMER_FILES
    assert all(path.stat().st_size <= 1000 and path.stat().st_mode & 0o777 == 0o600 for path in files)
    assert all(line["names"] == {"run": "r", "trainer": "t"} for path in files for line in lines(path))


def test_repeated_requests_are_not_recorded(log: Path) -> None:
    authorization.record_admitted(PATH, "ipv4:1.2.3.4:5", coordinator_pb2.ListRunsRequest())
    assert lines(log) == []


def test_log_that_cannot_be_written_stops_the_server(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "audit.jsonl"
    with server_process("coordinator", "--listen", "127.0.0.1:0", "--audit-log", str(path)) as server:
        output, errors = server.communicate(timeout=60)
    assert (server.returncode, output) == (1, "")
    assert f"--audit-log {path}: No such file or directory" in errors
    assert "Traceback" not in errors
