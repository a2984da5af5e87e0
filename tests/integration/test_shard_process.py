"""The process ``shardwell-server shard``: start, lease and stop."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpc.aio
import pytest

from shardwell_server.cli import main
from shardwell_server.serving.rpc import add_service
from shardwell_server.shard.process.registration import Registration
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_wire.errors import (
    AccessError,
    ConflictError,
    DuplicateError,
    InternalError,
    NotFoundError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
)
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import coordinator_pb2
from tests.support.forked_servers import ForkedCommand
from tests.support.ports import reserved_ports
from tests.support.server_processes import ENVIRONMENT, ready_address, server_process
from tests.support.shard_server import layout_of, shared_loop

NOBODY = "127.0.0.1:1"
"""An address without a coordinator."""


def test_server_waits_for_its_coordinator_and_stops_cleanly() -> None:
    with (
        reserved_ports() as port,
        server_process("shard", "--coordinator", f"127.0.0.1:{port}", "--id", "early") as shard,
    ):
        assert any("cannot register with the coordinator" in line for line in shard.stderr)
        with server_process("coordinator", "--listen", f"127.0.0.1:{port}"):
            ready = json.loads(shard.stdout.readline())
            assert ready["ready"] == "shardwell_wire.v1.ShardService"
            shard.send_signal(signal.SIGTERM)
            assert shard.wait(20) == 0
        assert "Traceback" not in shard.stderr.read()


@pytest.mark.parametrize("how", ["SIGTERM", "standard input closed"])
def test_server_without_coordinator_can_be_stopped(how: str) -> None:
    with server_process("shard", "--coordinator", NOBODY, "--exit-with-parent") as shard:
        assert any("cannot register with the coordinator" in line for line in shard.stderr)
        if how == "SIGTERM":
            shard.send_signal(signal.SIGTERM)
        else:
            shard.stdin.close()
            shard.stdin = None
        assert shard.wait(20) == 0
        assert "Traceback" not in shard.stderr.read()


@contextmanager
def cluster_with_twin(*options: str) -> Iterator[tuple[tuple[str, ...], ForkedCommand]]:
    """Starts a coordinator and a shard server; yields the arguments of the shard server and its process."""
    with server_process("coordinator", "--listen", "127.0.0.1:0", *options) as coordinator:
        arguments = ("shard", "--coordinator", ready_address(coordinator), "--id", "twin")
        with server_process(*arguments) as shard:
            ready_address(shard)
            yield arguments, shard


def test_second_server_with_an_id_fails_unless_the_first_crashed() -> None:
    with cluster_with_twin("--lease-s", "3600") as (arguments, first):
        with server_process(*arguments) as second:
            output, errors = second.communicate(timeout=60)
        assert (second.returncode, output) == (1, "")
        assert "server 'twin': another process at 127.0.0.1:" in errors
        assert "has this id and is alive: give every server its own id (--id, SHARDWELL_ID)" in errors
        assert "Traceback" not in errors
        assert first.poll() is None
        first.kill()
        first.wait(20)
        with server_process(*arguments) as third:
            ready_address(third)


def test_server_replaced_while_suspended_exits() -> None:
    with cluster_with_twin("--lease-s", "1") as (arguments, first):
        first.send_signal(signal.SIGSTOP)
        with server_process(*arguments) as second:
            ready_address(second)
            first.send_signal(signal.SIGCONT)
            _, errors = first.communicate(timeout=60)
            assert first.returncode == 1
            assert "server 'twin': this process was lost and replaced by another process" in errors
            assert "Traceback" not in errors
            assert second.poll() is None


SECOND_SIGNAL = """
import os, signal
from shardwell_server.serving import process

async def main():
    stop = process.stop_event(process.Endpoint())
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()

process.run(main(), log_level="error")
os.kill(os.getpid(), signal.SIGTERM)
print("ended well")
"""


def test_limit_of_open_files_is_raised_to_the_hard_limit() -> None:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before, most - 1), most))
    try:
        with (
            reserved_ports() as nobodys,
            subprocess.Popen(
                [sys.executable, "-m", "shardwell_server", "shard", "--coordinator", f"127.0.0.1:{nobodys}"],
                env=ENVIRONMENT,
                stderr=subprocess.PIPE,
                text=True,
            ) as shard,  # a new interpreter, which has the limits of this process
        ):
            try:
                assert shard.stderr is not None
                assert any("cannot register with the coordinator" in line for line in shard.stderr)
                assert resource.prlimit(shard.pid, resource.RLIMIT_NOFILE) == (most, most)
            finally:
                shard.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_second_signal_does_not_break_a_clean_stop() -> None:
    command = [sys.executable, "-c", SECOND_SIGNAL]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "ended well\n"), ended


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Returns the error of the command, run in this process. The command ends before it starts a server."""
    try:
        code: object = main(["shard", "--coordinator", NOBODY, *arguments])
    except SystemExit as end:
        code = end.code
    assert code in (1, 2)
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environment", "complaint"),
    [
        (["--memory-budget", "nonsense"], {}, "'nonsense' is not a size: expected a value such as 4GiB"),
        ([], {"SHARDWELL_MEMORY_BUDGET": "0"}, "'0' is not a size"),
        (["--listen", "localhost"], {}, "expected HOST:PORT to listen on, got 'localhost'"),
        (["--threads", "0"], {}, "--threads is 0, expected at least 1"),
        ([], {"SHARDWELL_THREADS": "many"}, "invalid int value: 'many'"),
        (["--log-level", "loud"], {}, "invalid choice: 'loud'"),
    ],
)
def test_error_names_an_invalid_setting(
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
        (["--listen", "TAKEN"], "Address already in use; choose another address with --listen (port 0: a free port)"),
        (["--coordinator", "node0"], "'node0' is not an address: expected HOST:PORT"),
    ],
)
def test_error_names_an_invalid_address(arguments: list[str], complaint: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        given = [each.replace("TAKEN", f"127.0.0.1:{taken.getsockname()[1]}") for each in arguments]
        with server_process("shard", "--coordinator", NOBODY, *given) as shard:
            _, errors = shard.communicate(timeout=30)
    assert shard.returncode not in (0, None)
    assert complaint in errors
    assert "Traceback" not in errors


class Coordinator:
    """A fake coordinator that answers registrations and heartbeats only."""

    def __init__(
        self,
        beats: Sequence[ShardwellError | None] = (),
        registrations: Sequence[ShardwellError | None] = (),
        *,
        lease_s: float = 0.03,
    ) -> None:
        self.beats, self.registrations, self._lease_s = list(beats), list(registrations), lease_s
        self.term = 1
        self.done = asyncio.Event()
        self.left: list[tuple[str, int]] = []
        self.answers = True
        self.retired: list[coordinator_pb2.RetiredShard] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Registration]:
        """Yields a registration that has not started."""
        server = grpc.aio.server()
        add_service(server, coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"], self)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with ThreadPoolExecutor(1) as threads:
                yield Registration(f"127.0.0.1:{port}", "probe", ShardStore(1 << 20, threads))
        finally:
            await server.stop(0)

    async def RegisterServer(self, request: Any, call: object) -> coordinator_pb2.RegisterServerResponse:
        if self.registrations and (error := self.registrations.pop(0)) is not None:
            raise error
        return coordinator_pb2.RegisterServerResponse(epoch=1, lease_s=self._lease_s, coordinator_epoch=self.term)

    async def HeartbeatServer(self, request: Any, call: object) -> coordinator_pb2.HeartbeatServerResponse:
        if not self.answers:
            raise UnavailableError("the network is down")
        if not self.beats:
            self.done.set()
        elif (error := self.beats.pop(0)) is not None:
            raise error
        return coordinator_pb2.HeartbeatServerResponse(coordinator_epoch=self.term, retired_shards=self.retired)

    async def DeregisterServer(self, request: Any, call: object) -> coordinator_pb2.DeregisterServerResponse:
        self.left.append((request.server_id, request.epoch))
        return coordinator_pb2.DeregisterServerResponse()

    def __getattr__(self, name: str) -> object:
        return None


def run_on_shared_loop(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run_coroutine_threadsafe(scenario, shared_loop()).result(30)


@pytest.mark.parametrize("lost", [NotFoundError("who?"), StaleEpochError("too late")])
def test_server_with_a_lost_lease_registers_again_despite_errors(lost: ShardwellError) -> None:
    async def scenario() -> None:
        coordinator = Coordinator([None, InternalError("hiccup"), lost, lost], [None, InternalError("hiccup"), None])
        async with coordinator.serving() as registration, registration.running("here:1"):
            await asyncio.wait_for(coordinator.done.wait(), 20)
        assert coordinator.registrations == []

    run_on_shared_loop(scenario())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


def test_server_stops_serving_while_no_heartbeat_is_acknowledged() -> None:
    async def scenario() -> None:
        coordinator = Coordinator(lease_s=0.3)
        async with coordinator.serving() as registration:
            lease = registration._store.lease
            with pytest.raises(UnavailableError, match="has not registered"):
                lease.check()
            async with registration.running("here:1"):
                await until(lambda: lease.valid)
                coordinator.answers = False
                await until(lambda: not lease.valid)
                with pytest.raises(UnavailableError, match="lease of this server expired"):
                    lease.check()
                coordinator.answers = True
                await until(lambda: lease.valid)

    run_on_shared_loop(scenario())


def test_shards_that_moved_are_retired_before_the_lease_is_renewed() -> None:
    async def scenario() -> None:
        coordinator = Coordinator(lease_s=0.3)
        layout = layout_of(a=((64,), "float32"))
        async with coordinator.serving() as registration:
            store, identity = registration._store, RunIdentity("r", "id")
            specs = [
                ShardSpec(
                    run=identity, layout=layout, index=0, start_bytes=0, stop_bytes=256, dp=1, placement=placement
                )
                for placement in (3, 7)
            ]
            shard = store.reserve(specs[0])
            coordinator.retired = [
                coordinator_pb2.RetiredShard(run_id="id", unit="u", stop_bytes=256, placement=placement)
                for placement in (2, 3)
            ]
            async with registration.running("here:1"):
                await until(lambda: shard.role is Role.RETIRED)
                with pytest.raises(UnavailableError, match="no longer the primary"):
                    shard.check_primary()
                await until(lambda: not store.run("r").shards)
                assert store.memory.reserved_bytes == 0
                later = store.reserve(specs[1])
                coordinator.done.clear()
                await until(coordinator.done.is_set)
                assert store.run("r").shards == {("u", 0): later}, "a later reservation stays"

    run_on_shared_loop(scenario())


def test_stopping_server_deregisters_unless_it_was_replaced() -> None:
    async def scenario() -> None:
        coordinator = Coordinator()
        async with coordinator.serving() as registration, registration.running("here:1"):
            await asyncio.wait_for(coordinator.done.wait(), 20)
            assert coordinator.left == []
        assert coordinator.left == [("probe", 1)]
        replaced = Coordinator([StaleEpochError("replaced")], [None, DuplicateError("another has the id")])
        async with replaced.serving() as registration:
            with pytest.raises(DuplicateError):
                async with registration.running("here:1") as failing:
                    await asyncio.wait_for(failing, 20)
        assert replaced.left == []

    run_on_shared_loop(scenario())


def test_error_names_a_coordinator_that_is_too_old() -> None:
    async def scenario() -> None:
        coordinator = Coordinator([NotFoundError("who?")])
        coordinator.term = 0
        async with coordinator.serving() as registration:
            with pytest.raises(ConflictError, match=r"the coordinator at 127\.0\.0\.1:\d+ sends no term"):
                async with registration.running("here:1"):
                    pass
        coordinator.term = 1
        async with coordinator.serving() as registration:
            with pytest.raises(ConflictError, match=r"older than this server .*: update the coordinator"):
                async with registration.running("here:1") as ended:
                    coordinator.term = 0
                    await asyncio.wait_for(ended, 20)

    run_on_shared_loop(scenario())


def test_term_is_learned_from_the_servers_coordinator_only() -> None:
    async def scenario() -> None:
        coordinator = Coordinator(lease_s=3600)
        async with coordinator.serving() as registration, registration.running("here:1"):
            term = registration.term
            await term.check(1)
            with pytest.raises(AccessError, match="term 7, but this server's coordinator has term 1"):
                await term.check(7)
            await term.check(1)
            coordinator.term = 2
            await term.check(2)
            with pytest.raises(StaleEpochError, match="term 1 is over, the current term is 2"):
                await term.check(1)
            coordinator.term = 1
            with pytest.raises(AccessError):
                await term.check(3)
            with pytest.raises(StaleEpochError):
                await term.check(1)
            await term.check(2)

    run_on_shared_loop(scenario())


def test_unconfirmed_later_term_is_unavailable_until_the_coordinator_confirms_it() -> None:
    async def scenario() -> None:
        coordinator = Coordinator([NotFoundError("who?")], lease_s=3600)
        async with AsyncExitStack() as serving:
            registration = await serving.enter_async_context(coordinator.serving())
            async with registration.running("here:1"):
                coordinator.term = 2
                with pytest.raises(UnavailableError, match="'probe' is not registered with the coordinator"):
                    await registration.term.check(2)
                await registration.term.check(2)
                await serving.aclose()
                with pytest.raises(UnavailableError, match="coordinator at 127"):
                    await registration.term.check(3)
                await registration.term.check(2)

    run_on_shared_loop(scenario())
