"""A server that listens on a network needs TLS and a token, or an explicit ``--insecure``, which it reports."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from shardwell_server.cli import main
from shardwell_server.serving import server_options
from shardwell_wire.errors import UsageError
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials, new_key
from shardwell_wire.security.tls import Tls
from tests.integration.test_tokens import terminal
from tests.support.certificates import TestAuthority
from tests.support.server_processes import ready_address, server_process

INSECURE, SECURE = argparse.Namespace(insecure=True), argparse.Namespace(insecure=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "[::1]"])
def test_loopback_needs_nothing(host: str) -> None:
    assert server_options.insecurity(host, NO_CREDENTIALS, SECURE) == ""


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1"])
def test_network_needs_tls_and_a_token(host: str, tmp_path: Path) -> None:
    tls = Tls(TestAuthority(tmp_path / "certs").make().server())
    for credentials, lacks in (
        (NO_CREDENTIALS, "no TLS and no token"),
        (Credentials(key=new_key()), "no TLS"),
        (Credentials(tls=tls), "no token"),
    ):
        with pytest.raises(UsageError, match=f"the server has {lacks}: .* --insecure"):
            server_options.insecurity(host, credentials, SECURE)
        assert server_options.insecurity(host, credentials, INSECURE) == lacks
    assert server_options.insecurity(host, Credentials(key=new_key(), tls=tls), SECURE) == ""


@pytest.mark.parametrize(
    "arguments",
    [["coordinator"], ["shard", "--coordinator", "a:1"], ["shard", "--coordinator", "a:1", "--processes", "2"]],
)
def test_insecure_server_does_not_start(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--listen", "0.0.0.0:0"]) == 1
    assert "the server has no TLS and no token" in capsys.readouterr().err


def test_insecure_servers_report_themselves() -> None:
    given = ("--listen", "0.0.0.0:0", "--advertise", "127.0.0.1", "--insecure")
    with server_process("coordinator", *given) as coordinator:
        address = ready_address(coordinator)
        with server_process("shard", "--coordinator", address, "--id", "open", *given) as shard:
            ready_address(shard)
            with server_process("shard", "--coordinator", address, "--id", "closed") as closed:
                ready_address(closed)
                done = terminal("servers", "--address", address)
                assert done.returncode == 0
                reported = [line for line in done.stdout.splitlines() if line.startswith("INSECURE")]
                assert reported == [
                    "INSECURE: the coordinator listens on a network with no TLS and no token",
                    "INSECURE: server open listens on a network with no TLS and no token",
                ]
                found = json.loads(terminal("servers", "--json", "--address", address).stdout)
                assert {server["server_id"]: server["insecure"] for server in found["servers"]} == {
                    "open": "no TLS and no token",
                    "closed": "",
                }
            for process in (shard, coordinator):
                process.terminate()
                _, log = process.communicate(timeout=60)
                assert "INSECURE: the server listens on 0.0.0.0:0 with no TLS and no token" in log
