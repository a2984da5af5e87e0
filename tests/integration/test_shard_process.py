"""The process ``shardwell-server shard``: it waits for its coordinator, keeps its lease, and stops when told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc.aio
import pytest

from shardwell_server.cli import main
from shardwell_server.rpc import add_service
from shardwell_server.shard.process.registration import Registration
from shardwell_server.shard.state.store import ShardStore
from shardwell_wire.errors import InternalError, NotFoundError, ShardwellError, StaleEpochError
from shardwell_wire.v1 import coordinator_pb2
from tests.support.ports import reserved_ports
from tests.support.shard_server import shared_loop

ENVIRONMENT = {**{k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")}, "OMP_NUM_THREADS": "1"}
NOBODY = "127.0.0.1:1"
"""No coordinator listens here."""


@contextmanager
def server_process(*arguments: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwell_server", *arguments],
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_waits_for_its_coordinator_and_stops_cleanly() -> None:
    with (
        reserved_ports() as port,
        server_process("shard", "--coordinator", f"127.0.0.1:{port}", "--id", "early") as shard,
    ):
        assert shard.stderr is not None
        assert shard.stdout is not None
        assert any("cannot reach the coordinator" in line for line in shard.stderr)
        with server_process("coordinator", "--listen", f"127.0.0.1:{port}"):
            ready = json.loads(shard.stdout.readline())
            assert ready["ready"] == "shardwell.v1.ShardService"
            shard.send_signal(signal.SIGTERM)
            assert shard.wait(20) == 0
        assert "Traceback" not in shard.stderr.read()


@pytest.mark.parametrize("how", ["SIGTERM", "standard input closed"])
def test_it_can_be_stopped_while_there_is_no_coordinator(how: str) -> None:
    with server_process("shard", "--coordinator", NOBODY, "--exit-with-parent") as shard:
        assert shard.stderr is not None
        assert shard.stdin is not None
        assert any("cannot reach the coordinator" in line for line in shard.stderr)
        if how == "SIGTERM":
            shard.send_signal(signal.SIGTERM)
        else:
            shard.stdin.close()
            shard.stdin = None
        assert shard.wait(20) == 0
        assert "Traceback" not in shard.stderr.read()


SECOND_SIGNAL = """
import os, signal
from shardwell_server import process

async def main():
    stop = process.stop_event(process.Endpoint())
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()

process.run(main(), log_level="error")
os.kill(os.getpid(), signal.SIGTERM)
print("ended well")
"""


def test_a_second_signal_does_not_spoil_a_clean_end() -> None:
    command = [sys.executable, "-c", SECOND_SIGNAL]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended well\n"), ended


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command complains of, in this process: it ends before it starts anything."""
    try:
        code: object = main(["shard", "--coordinator", NOBODY, *arguments])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--memory-budget", "nonsense"], {}, "'nonsense' is no size: expected something like 4GiB"),
        ([], {"SHARDWELL_MEMORY_BUDGET": "0"}, "'0' is no size"),
        (["--listen", "localhost"], {}, "expected HOST:PORT to listen on, got 'localhost'"),
        (["--threads", "0"], {}, "--threads 0: expected at least 1"),
        ([], {"SHARDWELL_THREADS": "many"}, "invalid int value: 'many'"),
        (["--log-level", "loud"], {}, "invalid choice: 'loud'"),
    ],
)
def test_settings_that_are_wrong_are_named(
    arguments: list[str],
    environment: dict[str, str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert complaint in run_command(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--listen", "TAKEN"], "Address already in use; choose another with --listen (port 0: a free one)"),
        (["--coordinator", "node0"], "'node0' is no address: expected HOST:PORT"),
    ],
)
def test_addresses_that_are_wrong_are_named(arguments: list[str], complaint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [each.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}") for each in arguments]
        with server_process("shard", "--coordinator", NOBODY, *given) as shard:
            _, errors = shard.communicate(timeout=30)
    assert shard.returncode not in (0, None)
    assert complaint in errors
    assert "Traceback" not in errors


class Coordinator:
    """Answers registrations and heartbeats as told; the rest is not there."""

    def __init__(self, beats: list[ShardwellError | None], registrations: list[ShardwellError | None]) -> None:
        self.beats, self.registrations = beats, registrations
        self.done = asyncio.Event()

    async def RegisterServer(self, request: Any, call: object) -> coordinator_pb2.RegisterServerResponse:
        if self.registrations and (error := self.registrations.pop(0)) is not None:
            raise error
        return coordinator_pb2.RegisterServerResponse(epoch=1, lease_s=0.03)

    async def HeartbeatServer(self, request: Any, call: object) -> coordinator_pb2.HeartbeatServerResponse:
        if not self.beats:
            self.done.set()
        elif (error := self.beats.pop(0)) is not None:
            raise error
        return coordinator_pb2.HeartbeatServerResponse()

    def __getattr__(self, name: str) -> object:
        return None


@pytest.mark.parametrize("lost", [NotFoundError("who?"), StaleEpochError("too late")])
def test_a_server_that_was_given_up_registers_again_whatever_it_meets(lost: ShardwellError) -> None:
    async def scenario() -> None:
        coordinator = Coordinator([None, InternalError("hiccup"), lost, lost], [None, InternalError("hiccup"), None])
        server = grpc.aio.server()
        add_service(server, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"], coordinator)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        with ThreadPoolExecutor(1) as threads:
            registration = Registration(f"127.0.0.1:{port}", "probe", ShardStore(1 << 20, threads))
            async with registration.running("here:1"):
                await asyncio.wait_for(coordinator.done.wait(), 20)
        assert coordinator.registrations == []
        await server.stop(0)

    asyncio.run_coroutine_threadsafe(scenario(), shared_loop()).result(30)
