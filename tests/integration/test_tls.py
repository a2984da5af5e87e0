"""Clusters with TLS: trainers, readers, commands and servers connect with certificates only."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.command.cli import main as command
from shardwell.transport import service_client
from shardwell_server.cli import main as server_command
from shardwell_wire.v1 import common_pb2
from tests.integration.test_tokens import terminal
from tests.support.certificates import TestAuthority, replace_files
from tests.support.cluster import build_model, small_run, wait_until
from tests.support.processes import TrainerProcess
from tests.support.rank_runs import gradient_bytes
from tests.support.reference import undisturbed_sha256
from tests.support.relay import relay_process
from tests.support.server_processes import ready_address, server_process


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("certs")).make()


@pytest.fixture(scope="module")
def encrypted(authority: TestAuthority) -> Iterator[shardwell.LocalCluster]:
    with shardwell.LocalCluster(2, tls=authority.server()) as cluster:
        yield cluster


def test_readers_and_commands_use_tls(
    encrypted: shardwell.LocalCluster,
    authority: TestAuthority,
    run_name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = {"token_file": encrypted.token_file, "tls": authority.trusting()}
    with (
        small_run(encrypted.address, run_name, **options),
        shardwell.attach(encrypted.address, run_name, **options) as r,
    ):
        first, last = nn.Linear(17, 64), nn.Linear(64, 1)
        assert r.follow(nn.ModuleDict({"first": first, "rest": nn.ModuleDict({"2": last})})) == 2
        assert not torch.equal(first.weight, build_model()[0].weight)
        given = ["--address", encrypted.address, "--token-file", encrypted.token_file, "--tls-ca", authority.path("ca")]
        assert command(["servers", *given, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["servers"]) == 2
        assert command(["export", run_name, str(tmp_path / "out"), *given]) == 0
        assert command(["servers", *given[:4]]) == 1
        assert "the server requires TLS" in capsys.readouterr().err


def test_no_call_connection_bypasses_tls(
    encrypted: shardwell.LocalCluster, authority: TestAuthority, run_name: str
) -> None:
    """They are not encrypted. No server offers a port, and a trainer with TLS does not use one."""
    options = {"token_file": encrypted.token_file, "tls": authority.trusting()}
    with socket.create_server(("127.0.0.1", 0)) as other, small_run(encrypted.address, run_name, **options) as session:
        coordinator = session._membership._coordinator
        assert coordinator._calls._current is None
        other.setblocking(False)
        grpc_port = int(encrypted.address.rpartition(":")[2])
        coordinator.use_calls(common_pb2.CallPort(port=other.getsockname()[1], grpc_port=grpc_port, secret=b"s" * 32))
        session.explain_stall()
        with pytest.raises(BlockingIOError):
            other.accept()


def test_environment_names_the_authority(encrypted: shardwell.LocalCluster, authority: TestAuthority) -> None:
    named = {"SHARDWELL_TOKEN_FILE": encrypted.token_file, "SHARDWELL_ADDRESS": encrypted.address}
    done = terminal("servers", **named, SHARDWELL_TLS_CA=authority.path("ca"))
    assert (done.returncode, done.stderr) == (0, "")
    done = terminal("servers", **named)
    assert (done.returncode, done.stdout) == (1, "")
    assert "the server requires TLS: set SHARDWELL_TLS_CA" in done.stderr
    assert "Traceback" not in done.stderr


def test_local_clusters_need_no_tls_although_the_environment_names_one(
    cluster: shardwell.LocalCluster, authority: TestAuthority, monkeypatch: pytest.MonkeyPatch, run_name: str
) -> None:
    monkeypatch.setenv("SHARDWELL_TLS_CA", authority.path("ca"))
    for token_file in (None, cluster.token_file):
        with shardwell.join(cluster.address, run=run_name, token_file=token_file):
            pass


def test_health_check_uses_tls(
    encrypted: shardwell.LocalCluster, authority: TestAuthority, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_command(["health", encrypted.shards[0].address, "--tls-ca", authority.path("ca")]) == 0
    assert server_command(["health", encrypted.address]) == 1
    assert "the server requires TLS" in capsys.readouterr().err


def test_shard_server_with_other_authority_ends_with_the_reason(
    encrypted: shardwell.LocalCluster, authority: TestAuthority, tmp_path: Path
) -> None:
    other = TestAuthority(tmp_path / "other").make()
    named = ("shard", "--coordinator", encrypted.address, "--token-file", encrypted.token_file)
    for given, message in (
        (other.server_arguments(), "the certificate of the server is refused: unable to get local issuer certificate"),
        ([], "the server requires TLS"),
    ):
        with server_process(*named, *given) as shard:
            _, log = shard.communicate(timeout=60)
            assert shard.returncode == 1
            assert message in log
            assert "Traceback" not in log


def test_mutual_tls_between_all_members(authority: TestAuthority, run_name: str) -> None:
    given = [*authority.server_arguments(), "--tls-require-client-cert"]
    with server_process("coordinator", "--listen", "127.0.0.1:0", *given) as coordinator:
        address = ready_address(coordinator)
        with server_process("shard", "--coordinator", address, *given) as shard:
            ready_address(shard)
            with pytest.raises(shardwell.TlsError, match="the server requires a certificate"):
                shardwell.join(address, run=run_name, tls=authority.trusting())
            with small_run(address, run_name, tls=authority.client()) as session:
                assert session.step == 2


def test_training_waits_until_certificates_fit_again(
    tmp_path: Path, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, connection_error = list[str](), service_client.connection_error

    def observed(*arguments: Any) -> shardwell.ShardwellError:
        error = connection_error(*arguments)
        failures.append(str(error))
        return error

    # Not the log: it has the first failure only, often from the time in which the coordinator does not listen.
    monkeypatch.setattr(service_client, "connection_error", observed)
    servers, other = TestAuthority(tmp_path / "servers").make(), TestAuthority(tmp_path / "other").make()
    trusted = tmp_path / "trusted.pem"
    shutil.copy(servers.path("ca"), trusted)
    options = {"tls": shardwell.TlsOptions(ca=str(trusted)), "waits": shardwell.WaitOptions(warn_after_s=0.2)}

    def replace_authority(cluster: shardwell.LocalCluster) -> None:
        both = [Path(each.path("ca")).read_text() for each in (servers, other)]
        replace_files(other, servers)
        Path(servers.path("ca")).write_text("".join(both))
        cluster.restart_coordinator()

    def trust() -> None:
        wait_until(
            lambda: any("certificate of the server is refused" in each for each in failures), "a failed handshake"
        )
        shutil.copy(other.path("ca"), trusted)

    with (
        shardwell.LocalCluster(1, tls=servers.server()) as cluster,
        shardwell.join(cluster.address, run=run_name, token_file=cluster.token_file, **options) as session,
        ThreadPoolExecutor(1) as threads,
    ):
        model = build_model()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        connections = session._membership.credentials.tls
        for step in session.steps(3):
            model(torch.ones(3, 17)).sum().backward()
            assert connections.may_recover("another:1") == (step.number > 0), "a server that was added while it trains"
            if step.number == 1:
                replace_authority(cluster)
                trusting = threads.submit(trust)
            optimizer.step()
            optimizer.zero_grad()
        trusting.result()
        assert session.step == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tls-ca", "ca"], "needs a certificate: set --tls-cert"),
        (["--tls-cert", "c", "--tls-key", "k"], "set ca (SHARDWELL_TLS_CA)"),
        (["--tls-require-client-cert"], "--tls-require-client-cert needs --tls-ca"),
        (["--tls-ca", "/none/ca", "--tls-cert", "c", "--tls-key", "k"], "/none/ca cannot be read"),
    ],
)
def test_servers_reject_incomplete_options(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server_command(["coordinator", "--listen", "127.0.0.1:0", *arguments]) == 1
    assert message in capsys.readouterr().err


# Relays.


RELAYED = {
    "SHARDWELL_TRANSPORTS": "socket,grpc",  # as if the servers were on another host
    "SHARDWELL_HOST_CACHE_BYTES": str(1 << 30),
    "SHARDWELL_GRADIENT_REDUCTION": "hierarchical",
}


def test_relay_serves_trainers_with_tokens_of_their_run(
    authority: TestAuthority,
    encrypted: shardwell.LocalCluster,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainers have neither the cluster's key nor a certificate."""
    command = ("token", "--role", "trainer", "--run", run_name, "--address", encrypted.address)
    made = terminal(*command, SHARDWELL_TOKEN_FILE=encrypted.token_file, SHARDWELL_TLS_CA=authority.path("ca"))
    assert made.returncode == 0, made.stderr
    given = {"SHARDWELL_TOKEN": made.stdout.strip(), "SHARDWELL_TLS_CA": authority.path("ca")}
    for name, value in (RELAYED | given).items():
        monkeypatch.setenv(name, value)
    options, results = ("--dp", 2, "--steps", 3, "--global-rank"), list[dict[str, Any]]()
    with (
        relay_process(encrypted, tmp_path, *authority.server_arguments()),
        TrainerProcess(encrypted.address, run_name, *options, 1) as second,
        TrainerProcess(encrypted.address, run_name, *options, 0) as first,
    ):
        results += [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [undisturbed_sha256(dp=2, steps=3)] * 2, results
    assert sum(result["stats"]["node_summed_bytes"] for result in results) == 3 * gradient_bytes()
    assert sum(result["stats"]["cache_hit_bytes"] for result in results) > 0


LAUNCHED = """
import torch, shardwell
with shardwell.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(3):
        for x in step.batches(lambda step, dp_rank: torch.full((2, 64), float(dp_rank))):
            model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = session.stats()
    print("used:", session.store._relay.find().server_id, stats["node_summed_bytes"], stats["cache_hit_bytes"] > 0)
"""


def test_launched_relay_uses_tls(authority: TestAuthority, run_name: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    with shardwell.LocalCluster(1, tls=authority.server()) as cluster:
        given = ("--coordinator", cluster.address, "--relay", "--run", run_name, "--log-dir", str(tmp_path))
        secrets = {
            "SHARDWELL_TOKEN_FILE": cluster.token_file,
            "SHARDWELL_TLS_CA": authority.path("ca"),
            "SHARDWELL_TLS_CERT": authority.path("server"),
            "SHARDWELL_TLS_KEY": authority.path("server-key"),
        }
        done = terminal("launch", *given, str(script), **RELAYED, **secrets)
    assert done.returncode == 0, done.stderr
    used = [line.partition("used: ")[2].split() for line in done.stdout.splitlines() if "used: " in line]
    assert {relay != "shard-0" for relay, _, _ in used} == {True}, done.stdout
    assert sum(float(size) for _, size, _ in used) == 3 * 4 * (64 * 64 + 64), "each gradient crosses the network once"
    assert "True" in [hit for _, _, hit in used]
