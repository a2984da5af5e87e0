"""Runs the compose cluster: `make compose-test`. Needs Docker and builds the images first.

The tests reach the cluster as a user of the host does: with the authority's certificate, copied from a container, and
with a token that `shardwell token` makes in the coordinator's container.
"""

from __future__ import annotations

import json
import os
import random
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tls import Tls, TlsOptions
from tests.support.cluster import wait_until
from tests.support.grpcurl import Grpcurl, GrpcurlError

ROOT = Path(__file__).resolve().parents[2]
PORT = "20951"
"""Outside the range of ephemeral ports."""

ADDRESS = f"127.0.0.1:{PORT}"
SERVICE = "shardwell_wire.v1.CoordinatorService"
STEPS = 40

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]


PROJECT = "shardwell-test"


def _run_compose(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", "compose", "--project-name", PROJECT, *arguments],
        cwd=ROOT,
        env={**os.environ, "SHARDWELL_PORT": PORT, "TRAIN_OPTIONS": f"--num-steps {STEPS}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def compose(*arguments: str, check: bool = True, **environment: str) -> str:
    """Runs docker compose in a separate project and returns its output."""
    done = _run_compose(*arguments, **environment)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compose_error(*arguments: str, **environment: str) -> str:
    """Runs docker compose and returns what it prints on standard error. It must fail."""
    with pytest.raises(subprocess.CalledProcessError) as failed:
        _run_compose(*arguments, **environment).check_returncode()
    return str(failed.value.stderr)


@cache
def tls() -> Tls:
    """The authority's certificate, as docs/inspection.md says how to get it."""
    folder = tempfile.mkdtemp(prefix="shardwell_compose-")
    compose("cp", "coordinator:/etc/shardwell/servers/ca.pem", folder)
    return Tls(TlsOptions(ca=f"{folder}/ca.pem"))


@cache
def at_coordinator() -> Grpcurl:
    header = compose("exec", "-T", "coordinator", "shardwell", "token").strip()
    return Grpcurl(ADDRESS, Credentials(text=header.removeprefix("authorization: Bearer "), tls=tls()))


def call(rpc: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
    (response,) = at_coordinator().call(f"{SERVICE}/{rpc}", request or {})
    return response


def grpcurl(*arguments: str, check: bool = True) -> str:
    """Runs the service ``grpcurl``, which has a token and the certificate of the authority."""
    return compose("run", "--rm", "-T", "grpcurl", *arguments, check=check)


def in_trainer(program: str, *arguments: str, **environment: str) -> str:
    """Runs a program in a new container of a trainer."""
    return compose("run", "--rm", "-T", "--no-deps", "--entrypoint", program, "trainer", *arguments, **environment)


ATTACK = """
import os, socket, sys
from pathlib import Path
import shardwell
os.environ["SHARDWELL_TOKEN"], *paths = sys.argv[1:]
for path in paths:
    try:
        os.pwrite(os.open(path, os.O_RDWR), bytes(1 << 16), 4096)
        print("altered", path)
    except OSError:
        try:
            print("read", path, len(open(path, "rb").read()))
        except OSError:
            print("denied")
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(str(Path(paths[0]).with_name("socket")))
    connection.send(os.urandom(32) + Path(paths[0]).name.encode())
    _, descriptors, _, _ = socket.recv_fds(connection, 10, 1)
    print("descriptors" if descriptors else "no descriptor")
try:
    shardwell.join(os.environ["SHARDWELL_ADDRESS"], run="gpt", world=shardwell.World(dp=2))
    print("joined")
except shardwell.ShardwellError as error:
    print(type(error).__name__)
"""
"""Tries to change or read the files of shard servers, to get a descriptor, and to join another run."""


def live_servers() -> int:
    return sum(server["live"] for server in call("ListServers")["servers"])


def server_ids() -> set[str]:
    return {server["server_id"] for server in call("ListServers")["servers"]}


def container_names(count: int) -> set[str]:
    """Names of the first ``count`` containers of shard servers."""
    return {f"{PROJECT}-shard-{number}" for number in range(1, count + 1)}


def docker_objects(kind: str) -> list[str]:
    """Containers, volumes or networks of the project."""
    label = f"label=com.docker.compose.project={PROJECT}"
    every = ["--all"] if kind == "container" else []
    shown = "{{.Name}}" if kind == "volume" else "{{.ID}}"
    command = ["docker", kind, "ls", *every, "--filter", label, "--format", shown]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    compose("--profile", "train", "down", "--volumes", "--timeout", "10")
    build = [f"--build-arg={name}={os.environ[name]}" for name in ("PIP_OPTIONS", "LOCKS") if name in os.environ]
    compose("--profile", "train", "--profile", "tools", "build", *build)
    compose("up", "--detach", "--wait")
    try:
        yield
    finally:
        compose("--profile", "train", "down", "--volumes", "--timeout", "10")


def containers(service: str) -> list[dict[str, Any]]:
    output = compose("ps", "--all", "--format", "json", service)
    return [json.loads(line) for line in output.splitlines()]


def test_all_services_report_healthy_over_grpc() -> None:
    health = [container["Health"] for container in containers("coordinator") + containers("shard")]
    assert health == ["healthy"] * 4
    assert live_servers() == 3


def test_reflection_is_reachable_from_host() -> None:
    without_token = Grpcurl(ADDRESS, Credentials(tls=tls()))
    assert SERVICE in without_token.list()
    assert "ExplainStall" in without_token.describe(SERVICE)


def test_callers_need_tls_and_a_token() -> None:
    with pytest.raises(GrpcurlError, match="Unauthenticated"):
        Grpcurl(ADDRESS, Credentials(tls=tls())).call(f"{SERVICE}/ListRuns", {})
    with pytest.raises((GrpcurlError, grpc.RpcError)):
        Grpcurl(ADDRESS, NO_CREDENTIALS).list()
    assert not [server for server in call("ListServers")["servers"] if server["insecure"]]


def test_service_grpcurl_calls_every_server() -> None:
    assert SERVICE in grpcurl("list").split()
    assert "ExplainStall" in grpcurl("describe", SERVICE)
    described = json.loads(grpcurl(f"{PROJECT}-shard-2:50052", "shardwell_wire.v1.ShardService/DescribeServer"))
    assert described["server_id"] == f"{PROJECT}-shard-2"
    requested = grpcurl("-max-time", "20", "-d", '{"world": {"dp": 2, "tp": 2, "pp": 1}}', f"{SERVICE}/DescribeWorld")
    assert json.loads(requested)["world_size"] == 4


def secrets_of(service: str) -> set[str]:
    """Paths of the secrets that a container of a service can see."""
    return set(compose("exec", "-T", service, "find", "/etc/shardwell", "-type", "f").split())


def test_secrets_are_private_and_read_only() -> None:
    folder = "/etc/shardwell/servers"
    expected = {f"{folder}/{name}" for name in ("ca.pem", "key", "server.pem", "server-key.pem")}
    for service in ("coordinator", "shard"):
        assert secrets_of(service) == expected, "not the key of the authority"
        listed = compose("exec", "-T", service, "stat", "--format", "%a %u", *sorted(expected), folder).splitlines()
        assert listed == ["600 10001"] * len(expected) + ["700 10001"]
        assert compose("exec", "-T", service, "touch", f"{folder}/key", check=False) == ""
        assert compose("exec", "-T", service, "sh", "-c", f"echo >> {folder}/key || echo denied").strip() == "denied"


def server_certificate() -> str:
    return ssl.get_server_certificate(("127.0.0.1", int(PORT)))


def test_certificates_are_renewed_while_servers_run() -> None:
    former = server_certificate()
    compose("up", "--detach", "--wait")
    assert server_certificate() == former, "a valid certificate stays"
    compose("run", "--rm", "certs", "--days", "30")
    assert server_certificate() != former
    assert len(call("ListServers")["servers"]) == 3
    assert compose("exec", "-T", "coordinator", "shardwell", "runs")


def test_containers_run_without_privileges() -> None:
    assert compose("exec", "-T", "shard", "id", "-u").strip() == "10001"
    assert in_trainer("id", "-u").strip() == "10002"
    for tool in ("cc", "gcc", "g++", "clang", "ld", "make"):
        assert compose("exec", "-T", "shard", "sh", "-c", f"command -v {tool} || echo none").strip() == "none"
    denied = compose("exec", "-T", "shard", "touch", "/usr/local/x", check=False)
    assert denied == "" and "x" not in compose("exec", "-T", "shard", "ls", "/usr/local").split()


def test_logs_are_rotated() -> None:
    for container in docker_objects("container"):
        shown = subprocess.run(
            ["docker", "inspect", "--format", "{{json .HostConfig.LogConfig.Config}}", container],
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(shown.stdout) == {"max-size": "10m", "max-file": "3"}


def test_server_ids_equal_container_names_after_restart() -> None:
    assert server_ids() == container_names(3)
    for change in (["restart", "shard"], ["up", "--detach", "--wait", "--force-recreate", "shard"]):
        compose(*change)
        wait_until(lambda: live_servers() == 3, "three live servers", timeout_s=60)
        assert server_ids() == container_names(3)


def test_scaling_up_adds_servers() -> None:
    compose("up", "--detach", "--wait", "--scale", "shard=5")
    wait_until(lambda: live_servers() == 5, "five live servers", timeout_s=60)
    assert server_ids() == container_names(5)


def state_of(run: str, *parameters: str) -> list[str]:
    """Values and first moments of parameters, without the servers that hold them."""
    found = []
    for parameter in parameters:
        for source in ("value", "exp_avg"):
            options = ("--source", source, "--count", "512", "--json")
            pieces = compose("exec", "-T", "coordinator", "shardwell", "peek", run, parameter, *options).splitlines()
            shown = [json.loads(piece)["peek"] for piece in pieces]
            found += sorted(json.dumps([piece[key] for key in ("start_element", "norm", "values")]) for piece in shown)
    return found


def test_interrupted_run_outlasts_restart_upgrade_and_down() -> None:
    """A changed image recreates all containers. ``down`` also removes the volume with the servers' shared memory."""
    run = {"SHARDWELL_RUN": "interrupted", "SHARDWELL_SHARDS": "5", "TRAIN_OPTIONS": "--num-steps 80"}

    def committed_step() -> int:
        return next(
            (int(each["committed_step"]) for each in call("ListRuns")["runs"] if each["run"] == "interrupted"), 0
        )

    compose("--profile", "train", "up", "--detach", "trainer", **run)
    wait_until(lambda: committed_step() > 5, "a few steps", timeout_s=120)
    compose("--profile", "train", "stop", "trainer", **run)
    stopped_at = committed_step()
    assert stopped_at < 80
    parameters = ("blocks.0.mlp.0.weight", "blocks.1.qkv.weight", "position_embedding.weight")
    state = state_of("interrupted", *parameters)
    changes = {
        "restart": (["restart", "coordinator", "shard"], ["up", "--detach", "--wait"]),
        "upgrade": (["up", "--detach", "--wait", "--build", "--force-recreate"],),
        "down": (["--profile", "train", "down"], ["up", "--detach", "--wait"]),
    }
    for name, commands in changes.items():
        for command in commands:
            compose(*command, **run)
        wait_until(lambda: live_servers() == 5, f"five live servers after {name}", timeout_s=120)
        assert (committed_step(), state_of("interrupted", *parameters)) == (stopped_at, state), name
    output = compose("--profile", "train", "up", "--no-log-prefix", "trainer", **run)
    assert "step   80/80" in output and "step    1/80" not in output
    call("DeleteRun", {"run": "interrupted", "request_id": "compose-test-interrupted"})
    remove_trainers_of("interrupted")


def remove_trainers_of(run: str) -> None:
    """Removes the containers and volumes of a run other than the project's, which ``down`` does not know."""
    compose("--profile", "train", "rm", "--force", "--stop", "trainer", "trainer-token", SHARDWELL_RUN=run)
    for kind in ("trainer-secrets", "training-output"):
        subprocess.run(["docker", "volume", "rm", f"{PROJECT}_{kind}-{run}"], capture_output=True, check=True)


def test_train_profile_trains_on_all_servers_and_stops_none() -> None:
    output = compose("--profile", "train", "up", "--no-log-prefix", "trainer")
    assert "read weights in place" in " ".join(output.split()), "trainers map the shard servers' memory"
    assert f"step {STEPS:4d}/{STEPS}" in output and "The loss fell from" in output
    summary = next(run for run in call("ListRuns")["runs"] if run["run"] == "gpt")
    assert (summary["committed_step"], summary["live_trainer_count"]) == (str(STEPS), 0)
    units = call("ListUnits", {"run": "gpt"})["units"]
    assert {shard["server_id"] for unit in units for shard in unit["shards"]} == container_names(5)
    assert live_servers() == len(containers("shard")) == 5
    assert [trainer["ExitCode"] for trainer in containers("trainer")] == [0]
    seen = in_trainer("sh", "-c", "find /etc/shardwell -type f 2>/dev/null || true")
    assert set(seen.split()) == {"/etc/shardwell/trainers/ca.pem", "/etc/shardwell/trainers/token"}


SCRIPT = """
import argparse, time, torch, shardwell
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--pause", type=float, default=0.0)
arguments = parser.parse_args()
with shardwell.join() as session:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    shardwell.auto_wrap(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(arguments.steps):
        for number in step.batches(lambda step, dp_rank: step + dp_rank):
            model(torch.full((4, 64), number % 7 / 8)).square().mean().backward()
            time.sleep(arguments.pause)
        optimizer.step()
        optimizer.zero_grad()
    print("rank", session.global_rank, "of", session.world, "ends at", session.step)
"""


def test_own_script_is_trained_beside_another_run(tmp_path: Path) -> None:
    """A mounted script with its arguments, three trainers, and checkpoints in the volume."""
    (tmp_path / "my_train.py").write_text(SCRIPT)
    tmp_path.chmod(0o755)
    before = {container["ID"] for container in containers("trainer")}
    first = in_trainer("cat", "/etc/shardwell/trainers/token", SHARDWELL_RUN="gpt")
    options = {"SHARDWELL_RUN": "mine", "SHARDWELL_TRAINERS": "3", "SHARDWELL_TRAIN_DIR": str(tmp_path)}
    options |= {"SHARDWELL_CHECKPOINT_EVERY": "5"}
    output = compose("run", "--rm", "-T", "trainer", "my_train.py", "--steps", "40", **options)
    assert sorted(re.findall(r"rank (\d) of World\(dp=3, tp=1, pp=1\) ends at 40", output)) == ["0", "1", "2"]
    assert {"gpt", "mine"} <= {run["run"] for run in call("ListRuns")["runs"]}
    assert {container["ID"] for container in containers("trainer")} == before
    assert first == in_trainer("cat", "/etc/shardwell/trainers/token", SHARDWELL_RUN="gpt")
    assert first != in_trainer("cat", "/etc/shardwell/trainers/token", SHARDWELL_RUN="mine")
    saved = compose("exec", "-T", "coordinator", "ls", "/checkpoints/mine").split()
    steps = [int(name.partition("-")[2].partition("-")[0]) for name in sorted(saved)]
    assert len(steps) == 3 and steps[-1] > 20, "SHARDWELL_KEEP"
    assert all(after - before >= 5 for before, after in pairwise(steps)), "the next begins when one is complete"
    missing = compose_error("run", "--rm", "-T", "trainer", "none.py", **options)
    assert "no script none.py in /train that user 10002 can read" in missing
    call("DeleteRun", {"run": "mine", "request_id": "compose-test-mine"})
    compose("--profile", "train", "rm", "--force", "--stop", "trainer-token", SHARDWELL_RUN="mine")
    for kind in ("trainer-secrets", "training-output"):
        subprocess.run(["docker", "volume", "rm", f"{PROJECT}_{kind}-mine"], capture_output=True, check=True)
    compose("--profile", "train", "create", "trainer-token")  # the remaining trainers depend on it


def processes(container: str) -> list[psutil.Process]:
    """The first process of a container, and its descendants."""
    shown = subprocess.run(
        ["docker", "inspect", "--format", "{{.State.Pid}}", container], capture_output=True, text=True, check=True
    )
    if not (pid := int(shown.stdout)):
        return []
    first = psutil.Process(pid)
    return [first, *first.children(recursive=True)]


def kill_servers(names: Iterable[str]) -> None:
    """Kills servers as a crash does. Docker starts them again."""
    for process in [each for name in names for each in processes(name)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def kill_a_trainer(rng: random.Random, container: str) -> None:
    """Kills one trainer. The launcher in its container starts it again."""
    trainers = [each for each in processes(container) if "/train/my_train.py" in each.cmdline()]
    if trainers:  # none: they are being started
        rng.choice(trainers).kill()


def values_of(run: str, parameter: str, start: int) -> list[float]:
    """Returns up to 1024 values of a parameter that one server holds."""
    options = ("--start", str(start), "--count", "1024", "--json")
    shown = compose("exec", "-T", "coordinator", "shardwell", "peek", run, parameter, *options)
    values: list[float] = json.loads(shown)["peek"]["values"]
    return values


def test_random_faults_change_no_bit(tmp_path: Path) -> None:
    """COMPOSE_FAULTS faults during a run: any process is killed, and containers are restarted and replaced."""
    (tmp_path / "my_train.py").write_text(SCRIPT)
    tmp_path.chmod(0o755)
    rng, count = random.Random(1), int(os.environ.get("COMPOSE_FAULTS", "5"))
    steps = 12 * count
    options = {"SHARDWELL_TRAIN_DIR": str(tmp_path), "SHARDWELL_CHECKPOINT_EVERY": "0", "SHARDWELL_RESTARTS": "1000"}
    compose("run", "--rm", "-T", "trainer", "my_train.py", "--steps", str(steps), SHARDWELL_RUN="calm", **options)
    container = f"{PROJECT}-faulted"
    command = ["run", "--detach", "--name", container, "trainer", "my_train.py", "--steps", str(steps)]
    compose(*command, "--pause", "0.2", SHARDWELL_RUN="faulted", **options)
    coordinator, shards = f"{PROJECT}-coordinator-1", sorted(each["Name"] for each in containers("shard"))

    def committed_step() -> int:
        """Returns 0 while the coordinator does not answer."""
        shown = _run_compose("exec", "-T", "coordinator", "shardwell", "run", "faulted", "--json")
        return int(json.loads(shown.stdout)["summary"]["committed_step"]) if shown.returncode == 0 else 0

    faults: dict[str, Callable[[], Any]] = {
        "kill the coordinator": lambda: kill_servers([coordinator]),
        "kill a shard server": lambda: kill_servers([rng.choice(shards)]),
        "kill all servers": lambda: kill_servers([coordinator, *shards]),
        "kill a trainer": lambda: kill_a_trainer(rng, container),
        "restart a shard server": lambda: docker("restart", rng.choice(shards)),
        "restart all servers": lambda: compose("restart", "coordinator", "shard"),
        "replace the shard servers": lambda: compose(
            "up", "--detach", "--no-deps", "--force-recreate", "--scale", f"shard={len(shards)}", "shard"
        ),
    }
    done: list[str] = []
    for _ in range(count):
        before = committed_step()
        done.append(rng.choice([*faults]))
        faults[done[-1]]()
        wait_until(lambda before=before: committed_step() >= min(before + 2, steps), str(done), timeout_s=120)
    assert docker("wait", container).strip() == "0", docker("logs", "--tail", "50", container)
    calm, faulted = (
        [part for start in range(0, 64 * 64, 1024) for part in values_of(run, "weight", start)]
        for run in ("calm", "faulted")
    )
    assert calm == faulted, done
    docker("rm", container)
    for run in ("calm", "faulted"):
        call("DeleteRun", {"run": run, "request_id": f"compose-test-{run}"})
        remove_trainers_of(run)
    compose("--profile", "train", "create", "trainer-token")  # the remaining trainers depend on it


def docker(*arguments: str) -> str:
    """Runs docker and returns its output."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout


def test_trainer_on_the_host_joins(tmp_path: Path) -> None:
    """Shard servers announce the addresses of their containers, which a Linux host reaches."""
    (tmp_path / "my_train.py").write_text(SCRIPT)
    compose("up", "--detach", "--wait", "--no-recreate", "coordinator")
    compose("up", "--detach", "--wait", "--scale", "shard=5", SHARDWELL_ADVERTISE="address")
    wait_until(lambda: live_servers() == 5, "five live servers", timeout_s=60)
    header = compose(
        "exec", "-T", "coordinator", "shardwell", "token", "--role", "trainer", "--run", "from-host"
    ).strip()
    environment = {
        "SHARDWELL_ADDRESS": ADDRESS,
        "SHARDWELL_RUN": "from-host",
        "SHARDWELL_TOKEN": header.removeprefix("authorization: Bearer "),
        "SHARDWELL_TLS_CA": tls().options.ca,
        "SHARDWELL_TLS_SERVER_NAME": "shardwell.internal",
    }
    done = subprocess.run(
        [sys.executable, tmp_path / "my_train.py", "--steps", "5"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ends at 5" in done.stdout, done.stdout + done.stderr
    call("DeleteRun", {"run": "from-host", "request_id": "compose-test-host"})


def test_memory_limit_counts_for_one_server() -> None:
    compose("up", "--detach", "--wait", "--scale", "shard=5", SHARDWELL_SHARD_MEMORY="1g", SHARDWELL_SHARD_CPUS="0.5")
    wait_until(lambda: live_servers() == 5, "five live servers", timeout_s=60)
    budgets = {int(server["budget_bytes"]) for server in call("ListServers")["servers"]}
    assert budgets == {int(0.8 * (1 << 30))}
    compose("up", "--detach", "--wait", "--scale", "shard=5")
    wait_until(lambda: live_servers() == 5, "five live servers", timeout_s=60)


def test_trainer_of_another_run_cannot_touch_shared_memory() -> None:
    """It knows all paths, and has a token of its own run."""
    weights = peek()
    listed = compose("exec", "-T", "shard", "find", "/shared", "-type", "f", "-size", "+8k").split()
    assert listed, "the shards are in shared memory"
    token = compose("exec", "-T", "coordinator", "shardwell", "token", "--role", "trainer", "--run", "other").strip()
    output = in_trainer("python", "-c", ATTACK, token.removeprefix("authorization: Bearer "), *listed)
    assert output.splitlines() == [*["denied"] * len(listed), "no descriptor", "AccessError"], output
    assert peek() == weights


def peek() -> str:
    return compose("exec", "-T", "coordinator", "shardwell", "peek", "gpt", "blocks.0.mlp.0.weight")


def test_peek_works_inside_the_container() -> None:
    assert "blocks.0.mlp.0.weight: 65,536 elements" in peek()


def test_coordinator_state_survives_removal_of_container() -> None:
    compose("rm", "--force", "--stop", "coordinator")
    compose("up", "--detach", "--wait", "--no-deps", "coordinator")
    assert "gpt" in [run["run"] for run in call("ListRuns")["runs"]]
    wait_until(lambda: live_servers() == 5, "servers register again", timeout_s=60)


def test_deleted_run_can_be_trained_anew() -> None:
    call("DeleteRun", {"run": "gpt", "request_id": "compose-test"})
    compose("--profile", "train", "up", "trainer")
    assert [trainer["ExitCode"] for trainer in containers("trainer")] == [0]


def test_scaling_down_removes_servers_from_cluster() -> None:
    call("DeleteRun", {"run": "gpt", "request_id": "compose-test-again"})
    compose("up", "--detach", "--wait", SHARDWELL_SHARDS="4")
    wait_until(lambda: server_ids() == container_names(4), "a server has left", timeout_s=30)
    assert live_servers() == 4


def test_new_shared_memory_size_is_applied() -> None:
    compose("up", "--detach", "--wait", SHARDWELL_SHARDS="3", SHARDWELL_SHM_SIZE="512m")
    wait_until(lambda: live_servers() == 3, "three live servers", timeout_s=60)
    size = compose("exec", "-T", "shard", "df", "--block-size=1M", "--output=size", "/shared").split()
    assert size[-1] == "512"


def test_stop_exits_with_zero() -> None:
    compose("stop", "--timeout", "10")
    codes = {container["Name"]: container["ExitCode"] for container in containers("coordinator") + containers("shard")}
    assert set(codes.values()) == {0}, f"{codes}\n{compose('logs', '--timestamps', '--tail', '30')}"


def test_down_removes_containers_and_networks() -> None:
    compose("--profile", "train", "down", "--volumes", "--timeout", "10")
    assert [docker_objects(kind) for kind in ("container", "network")] == [[], []]
    left = docker_objects("volume")
    for name in left:
        subprocess.run(["docker", "volume", "rm", name], capture_output=True, check=True)
    former_sizes = [f"{PROJECT}_shared-memory-{size}" for size in ("1g", "512m")]
    assert len(left) <= 1 and set(left) <= set(former_sizes), "compose removes only the volume of the present size"
