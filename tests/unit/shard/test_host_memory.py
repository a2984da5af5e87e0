"""Memory limits of cgroups, in every layout of hierarchies."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shardwell_server.shard.memory import budget
from shardwell_server.shard.memory.budget import cgroup_limits, default_budget_bytes

GIB = 1 << 30
NO_LIMIT_V1 = 9223372036854771712


def fake_proc(tmp_path: Path, cgroup: str, mounts: list[tuple[str, str, str, str]], limits: dict[str, object]) -> Path:
    """Creates a process directory as in /proc, and files with memory limits.

    Args:
        tmp_path: The folder for all files.
        cgroup: Content of the file ``cgroup``.
        mounts: Entries of ``mountinfo`` as (root, mount point, type, options).
        limits: Limits by their path below ``tmp_path``.
    """
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    lines = [
        f"30 20 0:26 {root} {tmp_path}/{point} rw,nosuid shared:4 - {kind} {kind} rw,{options}\n"
        for root, point, kind, options in mounts
    ]
    (proc / "mountinfo").write_text("21 1 8:1 / / rw - ext4 /dev/sda rw\n" + "".join(lines))
    for path, limit in limits.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{limit}\n")
    return proc


def test_limits_of_outer_cgroups_count(tmp_path: Path) -> None:
    proc = fake_proc(
        tmp_path,
        "0::/system.partition/slurmstepd.scope/job_7/step_0\n",
        [("/", "cg", "cgroup2", "nsdelegate")],
        {
            "cg/system.partition/slurmstepd.scope/job_7/step_0/memory.max": "max",
            "cg/system.partition/slurmstepd.scope/job_7/memory.max": 3 * GIB,
            "cg/system.partition/slurmstepd.scope/memory.high": 4 * GIB,
            "cg/system.partition/memory.max": "max",
        },
    )
    assert sorted(cgroup_limits(proc)) == [3 * GIB, 4 * GIB]


def test_limits_are_found_in_version_1_and_hybrid_hierarchies(tmp_path: Path) -> None:
    proc = fake_proc(
        tmp_path,
        "12:cpu,cpuacct:/user\n9:memory:/slurm/uid_1/job_2\n0::/user.partition\n",
        [("/", "memory", "cgroup", "memory"), ("/", "cpu", "cgroup", "cpu,cpuacct"), ("/", "unified", "cgroup2", "x")],
        {
            "memory/slurm/uid_1/job_2/memory.limit_in_bytes": NO_LIMIT_V1,
            "memory/slurm/uid_1/memory.limit_in_bytes": 2 * GIB,
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            "unified/user.partition/memory.max": 5 * GIB,
        },
    )
    assert min(cgroup_limits(proc)) == 2 * GIB
    assert 5 * GIB in cgroup_limits(proc)


@pytest.mark.parametrize("cgroup", ["0::/\n", "0::/docker/4711\n", "0::/../sibling\n"])
def test_container_cgroup_is_the_root_of_the_mount(tmp_path: Path, cgroup: str) -> None:
    proc = fake_proc(tmp_path, cgroup, [("/docker/4711", "cg", "cgroup2", "x")], {"cg/memory.max": GIB})
    assert cgroup_limits(proc) == [GIB]


def test_machine_memory_counts_without_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cgroup_limits(tmp_path / "nowhere") == []
    machine = psutil.virtual_memory().total
    for limits, usable in (([], machine), ([1 << 62], machine), ([GIB, 5], 5)):
        monkeypatch.setattr(budget, "cgroup_limits", lambda limits=limits: limits)
        assert budget.usable_memory_bytes() == usable


def test_limit_of_a_container_is_not_divided_by_the_servers_on_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = psutil.virtual_memory().total
    monkeypatch.setattr(budget, "cgroup_limits", lambda: [3 * 1024, 1 << 62])
    assert default_budget_bytes(3) == 819, "80 % of a third of a limit that the servers share"
    assert default_budget_bytes(3, own_limits=True) == 2457, "80 % of a container's own limit"
    monkeypatch.setattr(budget, "cgroup_limits", lambda: [machine])
    for own_limits in (False, True):
        assert default_budget_bytes(3, own_limits=own_limits) == int(machine // 3 * 0.8)
