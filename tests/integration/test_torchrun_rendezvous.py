"""torchrun's agents meet at the coordinator: restarts of a replica, and the state that outlives the coordinator."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import tomllib
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import DistStoreError, PrefixStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

import shardwell
from shardwell.grid.replica_store import ReplicaStore
from shardwell.grid.torchrun_rendezvous import CoordinatorBackend, TorchrunStore, create
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.processes import ROOT

TRAIN = """
    import os, pathlib, sys, torch, shardwell
    from torch import distributed as dist
    session = shardwell.join(run=sys.argv[1], world=shardwell.World(dp=2, tp=2))
    os.write(1, f"{session.trainer} is RANK {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n".encode())
    group, killed = session.replica_mesh()["tp"].get_group(), pathlib.Path("killed")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
    for step in session.steps(4):
        for x in step.batches(lambda step, dp_rank: torch.full((2, 3), float(step + dp_rank))):
            if session.global_rank == 3 and session.step == 2 and not killed.exists():
                killed.touch()
                os._exit(7)
            total = torch.ones(1)
            dist.all_reduce(total, group=group)
            (model(x).sum() * total.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    os.write(1, f"{session.trainer} ends at step {session.step}\\n".encode())
"""


@pytest.fixture
def store(cluster: shardwell.LocalCluster) -> Iterator[TorchrunStore]:
    client = CoordinatorClient(cluster.address)
    yield TorchrunStore(client, uuid.uuid4().hex)
    client.close()


def test_store_has_the_semantics_of_torch(store: TorchrunStore) -> None:
    prefixed = PrefixStore("round0", store)
    prefixed.set("a", "1")
    prefixed.multi_set(["b", "c"], ["2", b"3"])
    assert prefixed.multi_get(["a", "b", "c"]) == [b"1", b"2", b"3"]
    assert store.get("round0/a") == b"1"
    assert (prefixed.add("n", 2), prefixed.add("n", 3)) == (2, 5)
    assert prefixed.compare_set("a", "1", "x") == b"x" and prefixed.check(["a"]) and not prefixed.check(["z"])
    assert prefixed.delete_key("a") and not prefixed.delete_key("a")
    prefixed.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(DistStoreError, match=r"round0/z had no value after 0.05 s"):
        prefixed.get("z")


def test_wait_ends_after_its_own_timeout(store: TorchrunStore) -> None:
    store.set("a", "1")
    store.wait(["a"], timedelta(milliseconds=1))
    with pytest.raises(DistStoreError, match=r"z had no value after 0.05 s"):
        PrefixStore("round0", store).wait(["z"], timedelta(milliseconds=50))


def test_wait_in_the_store_of_a_replica_ends_after_its_own_timeout(
    cluster: shardwell.LocalCluster, run_name: str
) -> None:
    join = partial(shardwell.join, cluster.address, run=run_name, world=shardwell.World(pp=2), host="here")
    with ThreadPoolExecutor(2) as threads, ExitStack() as stack:
        joining = [threads.submit(join, trainer=name, min_trainers=2) for name in "ab"]
        membership, _ = (stack.enter_context(each.result(30.0))._membership for each in joining)
        described = membership.call("DescribeWorld", coordinator_pb2.DescribeWorldRequest(run=run_name))
        replica = ReplicaStore(membership, described.replicas[0].replica_epoch)
        replica.set("a", "1")
        replica.wait(["a"], timedelta(milliseconds=1))
        with pytest.raises(DistStoreError, match=r"for the other trainers of the replica \('round0/z'\)"):
            PrefixStore("round0", replica).wait(["z"], timedelta(milliseconds=50))


def test_state_is_set_by_one_of_two_agents(store: TorchrunStore) -> None:
    first, second = CoordinatorBackend(store), CoordinatorBackend(store)
    assert first.get_state() is None
    assert first.set_state(b"one") == (b"one", b"one", True)
    assert second.set_state(b"two") == (b"one", b"one", False)
    assert second.get_state() == (b"one", b"one")
    assert second.set_state(b"two", b"one") == (b"two", b"two", True)
    assert first.set_state(b"three", b"one") == (b"two", b"two", False)


def test_lost_state_is_written_again_by_an_agent_that_knows_it(store: TorchrunStore) -> None:
    agents = [CoordinatorBackend(store) for _ in range(3)]
    agents[0].set_state(b"one")
    agents[1].get_state()
    assert store.delete_key("torchrun/state"), "as a restart of the coordinator does"
    assert agents[2].get_state() is None, "a new agent knows nothing"
    assert agents[1].get_state() == (b"one", b"one")
    assert store.delete_key("torchrun/state")
    assert agents[0].set_state(b"two", b"one") == (b"two", b"two", True)


def test_coordinator_that_cannot_be_used_is_named(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("0" * 64)
    wrong.chmod(0o600)
    parameters = RendezvousParameters("shardwell", cluster.address, "job", 1, 1, token_file=str(wrong))
    with pytest.raises(RendezvousConnectionError, match=r"the coordinator does not keep the rendezvous: .*token"):
        create(parameters)


def agents(cluster: shardwell.LocalCluster, folder: Path, run: str, replicas: int) -> Iterator[subprocess.Popen[str]]:
    """Starts two agents per replica, with one trainer each."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(TRAIN))
    handlers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    metadata = folder / "handlers-0.dist-info"  # an installed package has these entry points
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: handlers\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in handlers.items()]
    (metadata / "entry_points.txt").write_text("\n".join(["[torchrun.handlers]", *lines]))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    for replica in range(replicas):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "SHARDWELL_ADDRESS": cluster.address,
            "SHARDWELL_DP_RANK": str(replica),
        }
        for _ in range(2):
            options = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "shardwell"]
            options += [
                "--rdzv-endpoint",
                cluster.address,
                "--rdzv-id",
                f"{run}-{replica}",
                "--local-addr",
                "127.0.0.1",
            ]
            yield subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, str(script), run],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )


@pytest.mark.long
def test_agents_restart_the_replica_of_a_lost_trainer(cluster: shardwell.LocalCluster, tmp_path: Path) -> None:
    run = uuid.uuid4().hex
    started = list(agents(cluster, tmp_path, run, replicas=2))
    try:
        outputs = [agent.communicate(timeout=150) for agent in started]
    finally:
        for agent in started:
            agent.kill()
    for agent, (_, errors) in zip(started, outputs, strict=True):
        assert agent.returncode == 0, errors
    lines = sorted(line for output, _ in outputs for line in output.splitlines() if line.startswith("rank-"))
    expected = [f"rank-{rank} ends at step 4" for rank in range(4)]
    expected += [f"rank-{rank} is RANK {rank % 2} of 2" for rank in (0, 1, 2, 2, 3, 3)]
    assert lines == sorted(expected), "only the replica of the lost trainer was started again"
