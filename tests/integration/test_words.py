"""What users read when they join, names unknown to ``peek``, and forks after ``import grpc``."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import fields, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardwell
import shardwell.testing
from shardwell.options import JoinConfig, LauncherPlace, variable_of
from shardwell.session import joining
from shardwell_wire.errors import ConflictError, UsageError
from tests.unit.test_advice import known_variables

FORKING = """
import os
{first}
import shardwell, shardwell.testing, {second}
with shardwell.testing.in_process_cluster(), shardwell.join():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
"""


def train(run: str | None = None) -> None:
    with shardwell.join(run=run) as session:
        model = torch.nn.Linear(4, 2)
        shardwell.fully_shard(model, session, name="head")
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        for _ in session.steps(session.step + 1):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()


def test_join_shows_in_one_line_whether_the_run_is_new_or_continues(capsys: pytest.CaptureFixture[str]) -> None:
    with shardwell.testing.in_process_cluster():
        train("named")
        train("named")
    new, continued = capsys.readouterr().err.splitlines()
    assert new == "[shardwell] new run 'named' (World(dp=1, tp=1, pp=1)): trainer 'trainer-0' plays rank 0"
    assert (
        "run 'named' (World(dp=1, tp=1, pp=1)) continues at step 1, with its weights and optimizer state" in continued
    )
    assert re.search(
        r"It was made \d s ago by trainer 'trainer-0' on host \S+: trainer 'trainer-\d' plays rank", continued
    )
    assert "shardwell delete-run named" in continued


def test_the_line_is_a_log_record_if_the_script_shows_those(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with shardwell.testing.in_process_cluster(), caplog.at_level(logging.INFO, logger="shardwell"):
        train("named")
    assert "new run 'named'" in caplog.text and "new run" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "file", "name"),
    [
        (None, "/x/train_gpt.py", "train_gpt"),
        (ModuleSpec("my.package.__main__", None), "/x/my/package/__main__.py", "package"),
        (ModuleSpec("my.train", None), "/x/my/train.py", "train"),
    ],
)
def test_a_run_is_named_after_the_script(
    monkeypatch: pytest.MonkeyPatch, spec: ModuleSpec | None, file: str, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec, __file__=file))
    assert joining.name_run() == name


def test_without_a_script_the_run_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None))
    with pytest.raises(UsageError, match=r"name the run: join\(run=NAME\)"):
        shardwell.join("localhost:1")


def test_unknown_variables_are_named_with_the_nearest_known_one(caplog: pytest.LogCaptureFixture) -> None:
    names = ["SHARDWELL_BACKUP", "SHARDWELL_ADRESS", "SHARDWELL_DP_RANK", "SHARDWELL_TOKEN", "OTHER_BACKUP"]
    joining.check_variables(dict.fromkeys(names, "1"))
    assert [record.getMessage() for record in caplog.records] == [
        "nothing reads the variable SHARDWELL_ADRESS: is SHARDWELL_ADDRESS meant?",
        "nothing reads the variable SHARDWELL_BACKUP: is SHARDWELL_BACKUPS meant?",
    ]


def test_variables_of_servers_and_deployments_are_known(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (JoinConfig, LauncherPlace)
    unread = {f"SHARDWELL_{at.name.upper()}" for kind in kinds for at in fields(kind) if variable_of(at) is None}
    unread |= {"SHARDWELL_RANK", "SHARDWELL_LOCAL_WORLD_SIZE"}  # of torchrun, without the prefix
    joining.check_variables(dict.fromkeys(known_variables() - unread, "1"))
    assert caplog.records == []


GUARDLESS = """
import multiprocessing, torch, shardwell
session = shardwell.join()
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.ones(2)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn"):
    pass
"""
GUARDED = """
import torch, shardwell
def train(rank): shardwell.join().close(); print("trained")
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


def test_a_child_process_that_runs_the_script_again_names_the_guard(tmp_path: Path) -> None:
    """A function that a child process runs may join."""
    outcomes = []
    for source in (GUARDLESS, GUARDED):
        (script := tmp_path / "script.py").write_text(source)
        outcomes.append(subprocess.run([sys.executable, script], capture_output=True, text=True, check=False))
    assert outcomes[0].returncode and 'call it under `if __name__ == "__main__":`' in outcomes[0].stderr
    assert outcomes[0].stderr.count("the private cluster at") == 1
    assert (outcomes[1].returncode, outcomes[1].stdout) == (0, "trained\n"), outcomes[1].stderr


class Joins(torch.utils.data.Dataset[int]):
    """A dataset that joins a run."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        shardwell.join()
        return index


def test_a_worker_of_a_data_loader_cannot_join() -> None:
    with pytest.raises(UsageError, match=r"in a worker process of a DataLoader"):
        list(torch.utils.data.DataLoader(Joins(), num_workers=1, multiprocessing_context="fork"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> shardwell.WaitOptions:
    monkeypatch.setattr(joining, "_RESOLVE_S", 0.1)
    return shardwell.WaitOptions(wait_limit_s=20, warn_after_s=0.1)


def test_an_address_that_cannot_be_right_is_an_error_at_once(impatient: shardwell.WaitOptions) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        answering = threading.Thread(target=answer_all, args=(other,), daemon=True)
        answering.start()
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(shardwell.UnavailableError, match=r"does not speak gRPC: it answers b'HTTP/1.1.*Name the"):
            shardwell.join(address, run="r", waits=impatient)
        other.shutdown(socket.SHUT_RDWR)
        answering.join(5)
    with pytest.raises(shardwell.UnavailableError, match=r"the name of the host 'nosuch\.invalid' is not known"):
        shardwell.join("nosuch.invalid:50051", run="r", waits=impatient)


def answer_all(server: socket.socket) -> None:
    """Answers every connection as a server of HTTP 1.1 does."""
    while True:
        try:
            connected, _ = server.accept()
        except OSError:
            return
        with connected:
            connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_an_address_that_refuses_connections_may_be_that_of_a_cluster_that_starts(
    impatient: shardwell.WaitOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(shardwell.UnavailableError, match=r"Connection refused.*Name the coordinator's address"):
        shardwell.join("127.0.0.1:1", run="r", waits=replace(impatient, wait_limit_s=1))
    assert "retrying for 1 s. Name the coordinator's address" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"address": ""}, "is empty: name the coordinator's HOST:PORT"),
        ({"address": 50051}, "address=50051: expected a text, such as 'localhost:50051'"),
        ({"world": 2}, r"world=2: expected a World, such as shardwell.World\(dp=2\)"),
        ({"seed": "7"}, "seed='7': expected an integer"),
        ({"backups": True}, "backups=True: expected an integer"),
        ({"rewrap": "no"}, "rewrap='no': expected True or False"),
        ({"consistency": "asynchronous"}, "expected shardwell.SYNCHRONOUS"),
        ({"transfers": {"transports": "shm"}}, "expected shardwell.TransferOptions"),
        ({"waits": 10}, "expected shardwell.WaitOptions"),
        ({"reduction_groups": 2}, "expected a tuple of integers"),
        ({"world": shardwell.World(dp=2)}, r"no address.*`shardwell launch`.*join\(min_trainers=1\)"),
        ({"world": shardwell.World(tp=2)}, "name a cluster with SHARDWELL_ADDRESS$"),
    ],
)
def test_arguments_of_another_type_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shardwell.join(**arguments)


def test_options_of_another_type_are_named() -> None:
    for make in (
        lambda: shardwell.WaitOptions(wait_limit_s="10"),  # type: ignore[arg-type]
        lambda: shardwell.TransferOptions(prefetch_bytes="1MB"),  # type: ignore[arg-type]
        lambda: shardwell.TransferOptions(push_error_feedback="no"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match="expected"):
            make()


def test_a_model_cell_can_run_again_as_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(session: shardwell.Session) -> torch.nn.Module:
        return shardwell.fully_shard(torch.nn.Linear(4, 2), session)

    def train(session: shardwell.Session, model: torch.nn.Module, until: int) -> None:
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.1, fused=True, foreach=False)
        for _ in session.steps(until):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with shardwell.testing.in_process_cluster(), shardwell.join() as session:
        train(session, model := make(session), 1)
        with pytest.raises(shardwell.StepStateError, match=r"shardwell.unwrap\(model\).*join\(run=NAME\)"):
            make(session)(torch.ones(1, 4))
        assert repr(session) == (
            f"Session(run='default', trainer='trainer-0', ranks=[0], step=1, world={session.world})"
        )
        shardwell.unwrap(model)
        train(session, again := make(session), 3)
        assert again(torch.ones(1, 4)).shape == (1, 2)


def test_peek_names_the_nearest_parameters_of_all_servers() -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster, shardwell.join(cluster.address, run="r") as session:
        for number in range(12):
            shardwell.fully_shard(torch.nn.Linear(4, 2), session, name=f"layers.{number}")
        command = [sys.executable, "-m", "shardwell", "peek", "r", "layers.7.wait", "--address", cluster.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run 'r' has no parameter 'layers.7.wait', only 'layers.7.weight', " in done.stderr
    assert done.stderr.rstrip().endswith("and 16 more")


def test_peek_at_a_lost_run_says_that_its_shards_are_lost() -> None:
    with shardwell.LocalCluster(num_shards=1) as cluster, shardwell.join(cluster.address, run="r") as session:
        shardwell.fully_shard(torch.nn.Linear(4, 2), session, name="head")
        cluster.shards[0].kill()
        command = [sys.executable, "-m", "shardwell", "peek", "r", "head.weight", "--address", cluster.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "server 'shard-0' has ended" in done.stderr and "started again on its host" in done.stderr


@pytest.mark.parametrize("transports", [("shm", "socket"), ["grpc"], 3])
def test_transports_that_are_no_text_are_refused(transports: object) -> None:
    with pytest.raises(UsageError, match="expected one text with commas, such as 'shm,socket,grpc'"):
        shardwell.TransferOptions(transports=transports)  # type: ignore[arg-type]


def test_transport_that_the_server_does_not_offer_fails_at_once() -> None:
    options = shardwell.TransferOptions(transports="shm")
    with (
        shardwell.testing.in_process_cluster(),
        shardwell.join(transfers=options) as session,
        pytest.raises(ConflictError, match=r"none of the transports shm can be opened.*transports=shm,grpc"),
    ):
        shardwell.fully_shard(torch.nn.Linear(4, 2), session)


@pytest.mark.parametrize(("first", "second"), [("import grpc", "os"), ("import torch, grpc", "os"), ("", "grpc")])
def test_fork_warns_if_grpc_was_imported_first(first: str, second: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    for setting in ({}, {"GRPC_ENABLE_FORK_SUPPORT": "0"}):
        done = subprocess.run(
            [sys.executable, "-c", FORKING.format(first=first, second=second)],
            env={**variables, **setting},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert ("grpc was imported before shardwell" in done.stderr) == (bool(first) and not setting)
