"""A cluster with a token rejects callers without it, and never discloses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import shardwell
from shardwell.command.cli import main as command
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.errors import AccessError, UnauthenticatedError, UsageError, from_rpc_error
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials, MemberCredentials, new_key
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2
from tests.support.cluster import build_model, small_run
from tests.support.grpcurl import Grpcurl
from tests.support.processes import ROOT
from tests.support.server_processes import ready_address, server_process

SERVICES = [
    coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
    shard_pb2.DESCRIPTOR.services_by_name["ShardService"],
]
METHODS = [method for service in SERVICES for method in service.methods]
LIST_RUNS = coordinator_pb2.ListRunsRequest()

TRAIN = """
import os, stat, sys
import shardwell
path = os.environ["SHARDWELL_TOKEN_FILE"]
with shardwell.join() as session:
    file, folder = os.stat(path), os.stat(os.path.dirname(path))
    with open(path) as token:
        given = token.read().strip()
    assert not any(given in argument for argument in open("/proc/self/cmdline"))
    assert not any(given in value for value in os.environ.values())
    print(oct(stat.S_IMODE(file.st_mode)), oct(stat.S_IMODE(folder.st_mode)), path)
"""


def call(address: str, method: Any, *, metadata: Any = (), messages: int = 1) -> None:
    """Calls an rpc with invalid bytes. A streamed request has ``messages`` messages and does not end."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    with open_channel(address) as channel:
        if method.client_streaming:
            ended = threading.Event()
            try:
                channel.stream_unary(path)(_unending(messages, ended), metadata=metadata, timeout=20)
            finally:
                ended.set()
        elif method.server_streaming:
            list(channel.unary_stream(path)(b"\xff", metadata=metadata, timeout=20))
        else:
            channel.unary_unary(path)(b"\xff", metadata=metadata, timeout=20)


def _unending(messages: int, ended: threading.Event) -> Iterator[bytes]:
    yield from [b"\xff"] * messages
    ended.wait(20)


def address_of(cluster: shardwell.LocalCluster, method: Any) -> str:
    is_shard = method.containing_service.name == "ShardService"
    return cluster.shards[0].address if is_shard else cluster.address


def test_refusals_say_what_to_do(cluster: shardwell.LocalCluster) -> None:
    stranger = Credentials(new_key())
    for credentials, problem in ((NO_CREDENTIALS, "carries no token"), (stranger, "a token of another cluster")):
        for method in METHODS:
            with pytest.raises(grpc.RpcError) as refused:
                call(address_of(cluster, method), method, metadata=credentials.metadata)
            error = from_rpc_error(refused.value, "peer")
            assert isinstance(error, UnauthenticatedError), "before the bytes are decoded, which would be another error"
            assert problem in str(error)
            assert "SHARDWELL_TOKEN_FILE" in str(error)
            assert "shardwell token --address" in str(error)
            for secret in (stranger.token, stranger.key.secret, cluster.key.secret):
                assert not secret or secret not in str(error)


def test_stream_without_token_is_rejected_before_its_first_message(cluster: shardwell.LocalCluster) -> None:
    method = SERVICES[1].methods_by_name["ReduceScatter"]
    with pytest.raises(grpc.RpcError) as refused:
        call(cluster.shards[0].address, method, messages=0)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_unknown_rpcs_and_services_need_the_token(cluster: shardwell.LocalCluster) -> None:
    with open_channel(cluster.address) as channel:
        for path in (
            "/shardwell_wire.v1.CoordinatorService/Nonsense",
            "/nonsense/Nonsense",
            "/grpc.health.v1.Healthy/Check",
        ):
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary(path)(b"", timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_caller_without_token_changes_nothing(cluster: shardwell.LocalCluster, run_name: str) -> None:
    with small_run(cluster.address, run_name) as session:
        for server in cluster.shards:
            drop = shard_pb2.DropRunRequest(context=common_pb2.RequestContext(run=run_name, epoch=1 << 40))
            with open_channel(server.address) as channel, pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/shardwell_wire.v1.ShardService/DropRun")(drop.SerializeToString(), timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert session.explain_stall()


def test_health_and_reflection_need_no_token(cluster: shardwell.LocalCluster) -> None:
    from shardwell_server.cli import main

    assert main(["health", cluster.address, "--service", "shardwell_wire.v1.CoordinatorService"]) == 0
    assert "shardwell_wire.v1.ShardService" in Grpcurl(cluster.shards[0].address).list()


@pytest.mark.parametrize(("without_token", "is_open"), [("health,reflection", (True, True)), ("none", (False, False))])
def test_health_and_reflection_can_require_a_token(
    tmp_path: Path, without_token: str, is_open: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwell_server.cli import main

    key = new_key()
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_text(key.secret)
    named = ("--token-file", str(path))
    options = ("--listen", "127.0.0.1:0", *named, "--without-token", without_token)
    with server_process("coordinator", *options) as server:
        address = ready_address(server)
        assert (main(["health", address]) == 0) is is_open[0]
        assert main(["health", address, *named]) == 0
        with open_channel(address) as channel:
            # grpcurl tries v1 first, and v1alpha only if v1 is unimplemented.
            for version, wanted in (("v1", grpc.StatusCode.UNIMPLEMENTED), ("v1alpha", grpc.StatusCode.OK)):
                for metadata in ((), Credentials(key).metadata):
                    expected = wanted if metadata or is_open[1] else grpc.StatusCode.UNAUTHENTICATED
                    assert reflection_status(channel, version, metadata) is expected, (version, bool(metadata))
        monkeypatch.setenv("SHARDWELL_TOKEN_FILE", str(path))
        assert "shardwell_wire.v1.CoordinatorService" in Grpcurl(address).list()


def reflection_status(channel: grpc.Channel, version: str, metadata: Any) -> grpc.StatusCode:
    path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
    try:
        list(channel.stream_stream(path)(iter([b"\x3a\x01*"]), metadata=metadata, timeout=20))  # list services
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def test_key_is_not_in_command_lines_logs_or_environments(run_name: str, tmp_path: Path) -> None:
    with shardwell.LocalCluster(
        1, log_level="debug", log_dir=tmp_path / "logs", state_dir=tmp_path / "state"
    ) as cluster:
        secret = cluster.key.secret.encode()
        with small_run(cluster.address, run_name):
            unauthenticated = CoordinatorClient(cluster.address, Credentials(new_key()))
            with closing(unauthenticated), pytest.raises(UnauthenticatedError):
                unauthenticated.call("ListRuns", LIST_RUNS)
            for process in (cluster.coordinator, *cluster.shards):
                for file in ("cmdline", "environ"):
                    assert secret not in Path(f"/proc/{process.pid}/{file}").read_bytes()
        path = Path(cluster.token_file)
        assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert path.read_bytes() == secret + b"\n"
    assert not path.exists()
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) >= 3
    assert not [file for file in written if secret in file.read_bytes()]


# A second terminal of the same user.


def terminal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the ``shardwell`` command in a process that inherits no environment from the cluster's owner."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWELL_")}
    return subprocess.run(
        [sys.executable, "-m", "shardwell", *arguments],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_commands_find_the_token_by_address(cluster: shardwell.LocalCluster) -> None:
    done = terminal("servers", "--json", "--address", cluster.address)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["servers"]) == 2
    for address in (cluster.address, cluster.shards[0].address, cluster.address.replace("127.0.0.1", "localhost")):
        done = terminal("token", "--address", address)
        assert (done.returncode, done.stderr) == (0, "")
        given = done.stdout.removeprefix("authorization: Bearer ").removesuffix("\n")
        assert cluster.key.verify(given).role is Role.OPERATOR


def test_missing_token_error_says_what_to_do(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    done = terminal("servers", "--address", cluster.address, XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "the rpc carries no token, which this cluster requires" in done.stderr
    assert "Traceback" not in done.stderr
    done = terminal("token", "--address", cluster.address, XDG_RUNTIME_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert f"no token is known for {cluster.address}" in done.stderr
    named = ("--token-file", cluster.token_file)
    assert terminal("servers", "--address", cluster.address, *named, XDG_RUNTIME_DIR=str(tmp_path)).returncode == 0


def test_token_file_is_set_by_argument_or_environment(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(UnauthenticatedError):
        shardwell.join(cluster.address, run=run_name)
    with shardwell.join(cluster.address, run=run_name, token_file=cluster.token_file):
        pass
    monkeypatch.setenv("SHARDWELL_TOKEN_FILE", cluster.token_file)
    with small_run(cluster.address, run_name):
        assert command(["peek", run_name, "first.weight", "--address", cluster.address]) == 0
        assert command(["export", run_name, str(tmp_path / "out"), "--address", cluster.address]) == 0
    monkeypatch.setenv("SHARDWELL_TOKEN_FILE", str(tmp_path / "missing"))
    with pytest.raises(UsageError, match="missing cannot be read"):
        shardwell.join(cluster.address, run=run_name)


# Tokens that a holder of the key hands over.


def made(cluster: shardwell.LocalCluster, folder: Path, *options: str, is_new: bool = False) -> str:
    """Returns a file with a token that the ``shardwell token`` command made, by default for a run that exists."""
    done = terminal("token", "--address", cluster.address, *options)
    assert (done.returncode, "the token is for a new run with id" in done.stderr) == (0, is_new)
    path = folder / "_".join(options).replace("/", "")
    path.touch(mode=0o600)
    path.write_text(done.stdout)
    return str(path)


def text_of(token_file: str) -> str:
    return Path(token_file).read_text().strip()


def test_reader_needs_a_token_of_its_run_only(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads_other = made(cluster, tmp_path, "--role", "reader", "--run", "other", is_new=True)
    with small_run(cluster.address, run_name) as session:
        reads = made(cluster, tmp_path, "--role", "reader", "--run", run_name, "--expires", "5m")
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
        with shardwell.attach(cluster.address, run_name, token_file=reads) as reader, reader.pin() as pinned:
            assert {name for name, _ in pinned.values()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
            assert pinned.version == session.step == 2
        for arguments in (
            ["export", run_name, str(tmp_path / "out")],
            ["runs"],
            ["run", run_name],
            ["units", run_name],
            ["peek", run_name, "first.weight"],
        ):
            assert command([*arguments, "--address", cluster.address, "--token-file", reads]) == 0, arguments
        with pytest.raises(
            AccessError, match=f"the token is of a reader of run 'other', but .* names run '{run_name}'"
        ):
            shardwell.attach(cluster.address, run_name, token_file=reads_other)
        with pytest.raises(AccessError, match="Join is for the roles operator, trainer, but the token is of a reader"):
            shardwell.join(cluster.address, run=run_name, token_file=reads)
        for refused in (["delete-run", run_name, "--force"], ["servers"]):
            assert command([*refused, "--address", cluster.address, "--token-file", reads]) == 1, refused


def test_trainer_needs_a_token_of_its_run_only(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = made(cluster, tmp_path, "--role", "trainer", "--run", run_name, is_new=True)
    run_id = cluster.key.verify(text_of(trains)).run_id
    reads = made(cluster, tmp_path, "--role", "reader", "--run", run_name, "--run-id", run_id)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setenv("SHARDWELL_TOKEN", text_of(trains))
    with small_run(cluster.address, run_name) as session:
        assert session._membership.identity.run_id == run_id, "the run that the token is for"
        with shardwell.attach(cluster.address, run_name, token_file=reads):
            pass
        assert session.explain_stall()
        assert session.step == 2
        with pytest.raises(
            AccessError, match=f"the token is of a trainer of run '{run_name}', but .* names run 'other'"
        ):
            shardwell.join(cluster.address, run="other")
        assert command(["delete-run", run_name, "--force", "--address", cluster.address]) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--role", "reader"), "is for one run: add --run"),
        (("--role", "operator", "--run", "r"), "is for all runs: omit --run"),
        (("--run", "r"), "--run and --run-id need --role reader or --role trainer"),
        (("--role", "operator", "--run-id", "0" * 16), "--run-id is the id of a run: add --run"),
        (("--role", "reader", "--run", "r", "--run-id", "1d"), "expected 16 hexadecimal digits, got '1d'"),
        (("--role", "reader", "--run", "r", "--expires", "1w"), "such as 30m, got '1w'"),
        (("--role", "server"), "invalid choice: 'server'"),
    ],
)
def test_token_command_explains_mistakes(
    cluster: shardwell.LocalCluster, options: tuple[str, ...], problem: str
) -> None:
    done = terminal("token", "--address", cluster.address, *options)
    assert done.returncode != 0
    assert (done.stdout, "Traceback" in done.stderr) == ("", False)
    assert problem in done.stderr


def test_holder_of_a_token_makes_no_others(
    cluster: shardwell.LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = made(cluster, tmp_path, "--role", "reader", "--run", "r", "--run-id", "0" * 16)
    done = terminal("token", "--token-file", reads, "--role", "reader", "--run", "other")
    assert (done.returncode, done.stdout) == (1, "")
    assert "a token is made with the cluster's key, but this user has only a token" in done.stderr
    assert terminal("token", "--token-file", reads).stdout == f"authorization: Bearer {Path(reads).read_text()}"


def test_token_of_a_deleted_run_opens_no_later_run_of_its_name(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trains = made(cluster, tmp_path, "--role", "trainer", "--run", run_name, is_new=True)
    operator = cluster.credentials
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))

    def join() -> shardwell.Session:
        return shardwell.join(cluster.address, run=run_name, token_file=trains)

    with join():
        pass
    with closing(CoordinatorClient(cluster.address, operator)) as client:
        client.call("DeleteRun", coordinator_pb2.DeleteRunRequest(run=run_name, force=True))
        cluster.restart_coordinator()
        with pytest.raises(shardwell.RunDeletedError, match=r"was deleted .* ask an operator for a new token"):
            join()
        assert run_name not in [each.run for each in client.call("ListRuns", LIST_RUNS, retry_for_s=20.0).runs]
        with (
            small_run(cluster.address, run_name, token_file=cluster.token_file),
            pytest.raises(AccessError, match=r"but this run has id .* ask an operator for a token of this run"),
        ):
            join()


def test_trainer_of_a_run_resumes_no_other_run(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"checkpoint_dir": str(tmp_path / "checkpoints")}
    with small_run(cluster.address, run_name, **options) as session:
        session.save_checkpoint(wait=True)
    (manifest,) = (tmp_path / "checkpoints").glob("*/*/manifest.json")
    other = f"{run_name}-other"
    trains = made(cluster, tmp_path, "--role", "trainer", "--run", other, is_new=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    options |= {"resume": str(manifest.parent)}
    with pytest.raises(AccessError, match=f"for run '{other}', but checkpoint .* is of another run"):
        shardwell.join(cluster.address, run=other, token_file=trains, **options)
    with shardwell.join(cluster.address, run=other, token_file=cluster.token_file, **options) as session:
        assert session.step == 2


# A pipe instead of a file.


def piped(text: str) -> int:
    """Returns the read end of a pipe with a text, whose write end is closed."""
    read, write = os.pipe()
    os.write(write, text.encode())
    os.close(write)
    return read


def test_token_is_read_from_a_pipe(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    pipe = piped(f"{cluster.token}\n")
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "shardwell",
                "servers",
                "--address",
                cluster.address,
                "--token-file",
                f"/dev/fd/{pipe}",
            ],
            env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
            pass_fds=(pipe,),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(pipe)
    assert (done.returncode, done.stderr) == (0, "")
    assert "shard-0" in done.stdout


# A member's token is renewed, and a trainer without a valid one joins again.


def test_trainer_whose_token_expired_joins_again(cluster: shardwell.LocalCluster, run_name: str) -> None:
    key = cluster.key
    with shardwell.join(cluster.address, run=run_name, trainer="tester") as session:
        model = build_model()
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        member, epochs = session._membership.credentials, [session._membership.epoch]
        assert isinstance(member, MemberCredentials)
        for step in session.steps(3):
            for _ in step.batches(lambda step, dp_rank: None):
                model(torch.ones(3, 17)).sum().backward()
            if step.number == 1 and len(epochs) == 1:
                member.renew(
                    key.mint(
                        Role.TRAINER,
                        run=run_name,
                        run_id=session._membership.identity.run_id,
                        member="tester",
                        lifetime_s=0,
                    )
                )
                epochs.append(0)
            optimizer.step()
            optimizer.zero_grad()
        assert session.step == 3
        assert session._membership.epoch > epochs[0]
        assert key.verify(member.token).member == "tester"


# Servers that are started by hand.


@pytest.fixture
def token_file(tmp_path: Path) -> tuple[str, Credentials]:
    credentials = Credentials(new_key())
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(credentials.key.secret)
    return str(path), credentials


def test_manually_started_servers_use_the_token(token_file: tuple[str, Credentials], run_name: str) -> None:
    path, credentials = token_file
    with server_process("coordinator", "--listen", "127.0.0.1:0", "--token-file", path) as coordinator:
        address = ready_address(coordinator)
        with server_process("shard", "--coordinator", address, "--id", "unauthenticated") as unauthenticated:
            output, errors = unauthenticated.communicate(timeout=60)
        assert (unauthenticated.returncode, output) == (1, "")
        assert "the rpc carries no token" in errors
        assert "Traceback" not in errors
        arguments = ("shard", "--coordinator", address, "--processes", "2", "--id", "member")
        with server_process(*arguments, SHARDWELL_TOKEN_FILE=path) as shards:
            ready_address(shards)
            with closing(CoordinatorClient(address)) as client, pytest.raises(UnauthenticatedError):
                client.call("ListRuns", LIST_RUNS)
            with shardwell.join(
                address, run=run_name, token_file=path, transfers=shardwell.TransferOptions(transports="socket")
            ):
                pass
            with closing(CoordinatorClient(address, credentials)) as client:
                assert [run.run for run in client.call("ListRuns", LIST_RUNS).runs] == [run_name]


@pytest.mark.parametrize("kind", ["coordinator", "shard"])
def test_server_rejects_token_file_that_other_users_can_read(token_file: tuple[str, Credentials], kind: str) -> None:
    path, credentials = token_file
    Path(path).chmod(0o644)
    options = ["--coordinator", "127.0.0.1:1"] if kind == "shard" else ["--listen", "127.0.0.1:0"]
    with server_process(kind, *options, "--token-file", path) as server:
        output, errors = server.communicate(timeout=60)
    assert (server.returncode, output) == (1, "")
    assert "other users can access it (mode 0644): run chmod 600" in errors
    assert credentials.key.secret not in errors


# Launched trainers, and a bare join.


def test_launch_passes_the_token_to_trainers(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    assert command(["launch", "--num-trainers", "2", "--num-shards", "1", str(script)]) == 0
    lines = [line.split() for line in capfdbinary.readouterr().out.decode().splitlines() if "0o" in line]
    assert [line[-3:-1] for line in lines] == [["0o600", "0o700"]] * 2
    assert not Path(lines[0][-1]).exists()


def test_private_cluster_of_join_admits_this_user_only(run_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWELL_ADDRESS", raising=False)
    with shardwell.join(run=run_name) as session:
        address = session.coordinator.address
        with (
            closing(CoordinatorClient(address, NO_CREDENTIALS)) as unauthenticated,
            pytest.raises(UnauthenticatedError),
        ):
            unauthenticated.call("ListRuns", LIST_RUNS)
        assert command(["runs", "--address", address]) == 0
