"""``shardwell-server shard --processes N``: start, failure and stop of a group."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from shardwell_server.cli import main
from shardwell_server.serving.process import Endpoint
from shardwell_server.shard.process.process_group import ProcessGroup, command_line, member_settings
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from tests.support.cluster import descendants, wait_gone, wait_until
from tests.support.forked_servers import ForkedCommand
from tests.support.ports import reserved_ports
from tests.support.server_processes import server_process

NOBODY = "127.0.0.1:1"
"""An address without a coordinator: servers retry and are not ready."""


@contextmanager
def server(*arguments: str, **environment: str) -> Iterator[ForkedCommand]:
    """Runs ``shardwell-server``, which is forked, with members that are not."""
    children: list[psutil.Process] = []
    with server_process(*arguments, **environment) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                children = descendants(process.pid)
    wait_gone(children)


def ready_addresses(process: ForkedCommand, count: int) -> list[str]:
    lines = [json.loads(process.stdout.readline()) for _ in range(count)]
    return [line["address"] for line in lines]


def wait_started(process: ForkedCommand, count: int) -> list[psutil.Process]:
    """Returns the children after each has failed to reach the coordinator."""
    for _ in range(count):
        assert any("cannot register with the coordinator" in line for line in process.stderr)
    children = descendants(process.pid)
    assert len(children) == count
    return children


def require_clean_end(process: ForkedCommand) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_members_register_and_stop_with_their_parent() -> None:
    with reserved_ports(2) as port, server("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        (address,) = ready_addresses(coordinator, 1)
        options = ("--listen", f"127.0.0.1:{port}", "--id", "host", "--memory-budget", "201MiB")
        with server("shard", "--coordinator", address, *options, SHARDWELL_PROCESSES="2") as group:
            assert sorted(ready_addresses(group, 2)) == sorted([f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"])
            with open_channel(address) as channel:
                listed = coordinator_pb2_grpc.CoordinatorServiceStub(channel).ListServers(
                    coordinator_pb2.ListServersRequest(), timeout=10
                )
            found = {each.server_id: (each.address, each.budget_bytes) for each in listed.servers}
            assert found == {
                "host-0": (f"127.0.0.1:{port}", 201 * 2**19),
                "host-1": (f"127.0.0.1:{port + 1}", 201 * 2**19),
            }
            children = descendants(group.pid)
            assert len(children) == 2
            group.send_signal(signal.SIGTERM)
            require_clean_end(group)
            wait_gone(children)


def test_one_process_needs_no_group() -> None:
    with server("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        (address,) = ready_addresses(coordinator, 1)
        with server("shard", "--coordinator", address, "--processes", "1") as shard:
            ready_addresses(shard, 1)
            assert descendants(shard.pid) == []


@pytest.mark.parametrize("how", ["SIGINT", "standard input closed"])
def test_group_stops_cleanly_on_signal(how: str) -> None:
    with server("shard", "--coordinator", NOBODY, "--processes", "2", "--exit-with-parent") as group:
        children = wait_started(group, 2)
        if how == "standard input closed":
            group.stdin.close()
            group.stdin = None
        else:
            group.send_signal(signal.SIGINT)
        require_clean_end(group)
        wait_gone(children)


def test_a_member_that_is_killed_is_started_again_alone() -> None:
    with server("coordinator", "--listen", "127.0.0.1:0") as coordinator:
        (address,) = ready_addresses(coordinator, 1)
        with server("shard", "--coordinator", address, "--processes", "3", "--id", "host") as group:
            before = sorted(ready_addresses(group, 3))
            children = descendants(group.pid)
            (victim,) = [child for child in children if "--id=host-1" in child.cmdline()]
            victim.kill()
            (again,) = ready_addresses(group, 1)
            assert again in before, "the port stays, also one that was free"
            after = descendants(group.pid)
            assert {child.pid for child in children} - {child.pid for child in after} == {victim.pid}
            group.send_signal(signal.SIGTERM)
            _, errors = group.communicate(timeout=60)
    assert group.returncode == 0
    assert f"host-1 (process {victim.pid}) ended by SIGKILL; starting it again" in errors
    assert "Traceback" not in errors


def test_a_member_that_fails_at_every_start_ends_the_group(caplog: pytest.LogCaptureFixture) -> None:
    members = [{"coordinator": NOBODY, "id": f"host-{number}", "exit_with_parent": True} for number in range(2)]
    before = set(descendants(os.getpid()))

    def members_now() -> list[psutil.Process]:
        return [each for each in descendants(os.getpid()) if each not in before]

    async def scenario() -> int:
        group = asyncio.ensure_future(ProcessGroup(members).run(Endpoint()))
        while not group.done():
            for child in members_now():
                with suppress(psutil.Error):
                    if "--id=host-1" in child.cmdline():
                        child.kill()
            await asyncio.sleep(0)
        return group.result()

    assert asyncio.run(asyncio.wait_for(scenario(), 60)) == 1
    wait_gone(members_now())
    assert "ended by SIGKILL at its start for the 5th time in a row" in caplog.text
    assert "stopping the other 1" in caplog.text


def test_cleanly_stopped_member_leaves_the_others_running() -> None:
    with server("shard", "--coordinator", NOBODY, "--processes", "2", "--id", "host") as group:
        first, second = wait_started(group, 2)
        first.terminate()
        assert any(f"(process {first.pid}) stopped" in line for line in group.stderr)
        assert second.is_running()
        second.terminate()
        require_clean_end(group)


def test_members_stop_when_the_parent_is_killed() -> None:
    with server("shard", "--coordinator", NOBODY, "--processes", "2") as group:
        children = wait_started(group, 2)
        group.kill()
        wait_gone(children)


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_member_is_killed_and_a_starting_member_ends_cleanly(
    frozen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(descendants(os.getpid()))
    members = [{"coordinator": NOBODY, "id": "host-0", "exit_with_parent": True}]

    async def scenario() -> tuple[int, list[psutil.Process]]:
        started = ProcessGroup(members, stop_limit_s=0.2 if frozen else 60.0)
        group = asyncio.ensure_future(started.run(Endpoint()))
        while started.members[0].process is None:
            await asyncio.sleep(0)
        children = [each for each in descendants(os.getpid()) if each not in before]
        if frozen:
            children[0].suspend()
            wait_until(lambda: children[0].status() == psutil.STATUS_STOPPED, "stop")
        os.kill(os.getpid(), signal.SIGTERM)
        return await asyncio.wait_for(group, 60), children

    code, children = asyncio.run(scenario())
    wait_gone(children)
    assert code == (1 if frozen else 0)
    assert (f"host-0 (process {children[0].pid}) did not stop within 0 s; killing it" in caplog.text) == frozen


def test_occupied_port_ends_the_group() -> None:
    with reserved_ports(2) as port, socket.create_server(("127.0.0.1", port + 1)):
        listen = f"127.0.0.1:{port}"
        with server("shard", "--coordinator", NOBODY, "--processes", "2", "--listen", listen) as group:
            _, errors = group.communicate(timeout=60)
    assert group.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port + 1}" in errors
    assert "ended with exit code 1 before it was ready" in errors and "stopping the other 1" in errors


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--processes", "0"], "--processes is 0, expected at least 1"),
        (["--processes", "2", "--listen", "localhost"], "expected HOST:PORT to listen on, got 'localhost'"),
        (
            ["--processes", "3", "--listen", "localhost:65534"],
            "--processes 3 with --listen localhost:65534: the last port would be 65536",
        ),
    ],
)
def test_error_names_an_invalid_setting(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shard", "--coordinator", NOBODY, *arguments]) == 1
    assert complaint in capsys.readouterr().err


def test_members_differ_in_name_and_port_only() -> None:
    settings: dict[str, Any] = {"processes": 3, "coordinator": "c:1", "listen": "0.0.0.0:7", "threads": 2, "id": ""}
    settings |= {"audit_log": "/audit", "metrics_port": 9464}
    members = member_settings(
        settings, server_id="host", memory_budget_bytes=100, bind="0.0.0.0:7", supervisor="boot/ns/1/2"
    )
    common = {"processes": 1, "coordinator": "c:1", "threads": 2, "memory_budget": 33, "exit_with_parent": True}
    common["supervisor"] = "boot/ns/1/2"
    assert members == [
        {
            **common,
            "id": f"host-{n}",
            "listen": f"0.0.0.0:{7 + n}",
            "audit_log": f"/audit-{n}",
            "metrics_port": 9464 + n,
        }
        for n in range(3)
    ]
    settings["metrics_port"] = 0
    free = member_settings(settings, server_id="host", memory_budget_bytes=100, bind="[::]:0")
    assert [(member["listen"], member["metrics_port"]) for member in free] == [("[::]:0", 0)] * 3


def test_command_line_contains_the_settings() -> None:
    settings = {"memory_budget": 5, "advertise": "", "exit_with_parent": True, "quiet": False, "missing": None}
    expected = [sys.executable, "-m", "shardwell_server", "shard"]
    assert command_line(settings) == [*expected, "--memory-budget=5", "--advertise=", "--exit-with-parent"]
