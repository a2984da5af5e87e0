"""What users read: the run that a script continues, names unknown to ``peek``, and forks after ``import grpc``."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import shardwell
import shardwell.testing
from shardwell_wire.errors import ConflictError, UsageError

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


def test_script_without_a_run_is_told_that_it_continues_one(caplog: pytest.LogCaptureFixture) -> None:
    with shardwell.testing.in_process_cluster():
        for run in (None, "named", "named"):
            train(run)
        assert "continues run" not in caplog.text
        train()
    assert "this script continues run 'default' at step 1" in caplog.text


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
