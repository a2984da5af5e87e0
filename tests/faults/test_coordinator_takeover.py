"""Fault tests of two coordinators with their state in a real etcd: the stand-by takes over, and the bits are equal."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.takeover import CoordinatorProcess
from shardwell.processes.local_cluster import ServerProcess
from shardwell_wire.host.server_folders import FolderOwner
from tests.faults.test_coordinator_death import STEPS, expected_hash
from tests.support.etcd import EtcdMember, etcd_cluster
from tests.support.left_folders import discard
from tests.support.ports import reserved_ports
from tests.support.processes import TrainerProcess

pytestmark = pytest.mark.etcd

LIMIT_S = 60.0


class Coordinators:
    """Two coordinators of one cluster with two shard servers."""

    def __init__(self, processes: list[CoordinatorProcess], members: list[EtcdMember]) -> None:
        self.processes, self.members = processes, members
        self.address = ",".join(each.address for each in processes)

    def wait_for_roles(self) -> tuple[CoordinatorProcess, CoordinatorProcess]:
        """Returns the leader and the stand-by when both run."""
        leader, stand_by = sorted(self.processes, key=lambda each: not each.leads.is_set())
        assert leader.leads.is_set()
        stand_by.wait_standing_by()
        return leader, stand_by


@pytest.fixture
def coordinators(tmp_path: Path) -> Iterator[Coordinators]:
    with ExitStack() as stack:
        members = stack.enter_context(etcd_cluster(tmp_path, 3))
        state = f"etcd://{','.join(member.address for member in members)}/shardwell"
        options = ["--state", state, "--etcd-lease-s", "3", "--min-servers", "2", "--min-shard-bytes", "4096"]
        port = stack.enter_context(reserved_ports(2))
        processes = []
        for index in range(2):
            processes.append(CoordinatorProcess(port + index, options, tmp_path / f"coordinator-{index}.log"))
            stack.callback(processes[-1].kill)
        found = Coordinators(processes, members)
        for name in ("shard-0", "shard-1"):
            command = ["shard", "--coordinator", found.address, "--id", name, "--listen", "127.0.0.1:0"]
            server = ServerProcess(name, [*command, "--memory-budget", "200MiB"], tmp_path / f"{name}.log")
            stack.callback(discard, [FolderOwner(server_id=name, coordinator=found.address)])
            stack.callback(server.stop, LIMIT_S)
            server.wait_ready(time.monotonic() + LIMIT_S)
        yield found


def test_run_survives_the_loss_of_leaders_and_of_a_member_of_etcd(coordinators: Coordinators) -> None:
    run, options = uuid.uuid4().hex, ("--dp", 2, "--steps", STEPS)
    address = coordinators.address
    with TrainerProcess(address, run, *options) as first, TrainerProcess(address, run, *options) as second:
        leader, stand_by = coordinators.wait_for_roles()
        first.wait_for_step(2)
        leader.kill()
        assert stand_by.leads.wait(LIMIT_S)
        leader.start()
        frozen, stand_by = coordinators.wait_for_roles()
        frozen.process.send_signal(signal.SIGSTOP)
        assert stand_by.leads.wait(LIMIT_S)
        coordinators.members[0].kill()
        frozen.process.send_signal(signal.SIGCONT)
        assert frozen.process.wait(LIMIT_S) == 1, "a coordinator that leads no longer ends itself"
        results = [first.finish(), second.finish()]
    assert [result.get("sha256") for result in results] == [expected_hash(2)] * 2, results
    assert all([step for step, _ in result["losses"]] == list(range(STEPS)) for result in results)
