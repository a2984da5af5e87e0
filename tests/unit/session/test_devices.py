"""Which GPU a trainer takes. The GPUs and the coordinator's answers are those of a fake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwell.grid import devices
from shardwell.grid.devices import choose_device
from shardwell.grid.replica import device_mesh
from shardwell.membership.heartbeats import TrainerReports
from shardwell_wire.errors import UsageError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2


class Gpus:
    """The module ``torch.cuda`` of a process that sees some GPUs."""

    def __init__(self, count: int, current: int = 0, *, used: bool = False) -> None:
        self.count, self.current, self.used = count, current, used

    def device_count(self) -> int:
        return self.count

    def is_initialized(self) -> bool:
        return self.used

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        assert 0 <= index < self.count
        self.current, self.used = index, True

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(uuid=f"uuid{index}")


class Member:
    """A member of a run in which other trainers use some GPUs."""

    host = "host"

    def __init__(self, used: dict[str, str]) -> None:
        self.reports, self._used = TrainerReports(), used
        self.joined = coordinator_pb2.JoinResponse(lease_s=0.0)
        self.asked: list[str] = []

    def report_device(self, device: coordinator_pb2.TrainerDevice) -> str:
        self.asked.append(device.id)
        user = "" if device.shared else self._used.get(device.id, "")
        self.reports.device = None if user else device
        return user


def choose(
    monkeypatch: pytest.MonkeyPatch,
    gpus: Gpus,
    local_rank: str | None = None,
    used: dict[str, str] | None = None,
    **options: Any,
) -> tuple[str, list[str]]:
    """Returns the name of the device, and the ids for which the coordinator was asked."""
    monkeypatch.setattr(torch, "get_device_module", lambda _: gpus)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    member: Any = Member(used or {})
    device = choose_device(member, "cuda", **options)
    assert gpus.current == device.index and member.reports.device.name == str(device)
    assert choose_device(member, "cuda", **options) == device, "the choice stays"
    return str(device), member.asked


def test_local_rank_is_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Gpus(4), "2") == ("cuda:2", ["GPU-uuid2"])
    assert choose(monkeypatch, Gpus(4, used=True), "2")[0] == "cuda:2", "some call has initialised CUDA on GPU 0"


def test_local_rank_of_srun_is_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_PROCID": "7", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}.items():
        monkeypatch.setenv(name, value)
    assert choose(monkeypatch, Gpus(4))[0] == "cuda:3"
    assert choose(monkeypatch, Gpus(4), "2")[0] == "cuda:2", "a launcher in the task counts"
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    assert choose(monkeypatch, Gpus(4))[0] == "cuda:0", "a batch script may start several trainers"


def test_current_device_of_the_script_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Gpus(4, 3, used=True), "2")[0] == "cuda:3"


def test_only_device_is_taken_whatever_the_local_rank_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Gpus(1), "5")[0] == "cuda:0"


@pytest.mark.parametrize(
    ("gpus", "local_rank", "message"),
    [
        (4, "4", r"LOCAL_RANK=4, but this process sees 4 devices.*start at most 4 trainers"),
        (4, "x", r"LOCAL_RANK='x': expected the number"),
        (0, "0", r"this process sees no such device; pass device_type='cpu'"),
    ],
)
def test_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch, gpus: int, local_rank: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose(monkeypatch, Gpus(gpus), local_rank)


def test_without_a_local_rank_trainers_take_free_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose(monkeypatch, Gpus(4), position=6)[0] == "cuda:2"
    used = {"GPU-uuid2": "a", "GPU-uuid3": "b"}
    assert choose(monkeypatch, Gpus(4), used=used, position=2) == ("cuda:0", ["GPU-uuid2", "GPU-uuid3", "GPU-uuid0"])


def test_two_trainers_share_a_device_only_if_both_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"GPU-uuid0": "a"}
    with pytest.raises(UsageError, match=r"cuda:0 of host 'host' \(GPU-uuid0\) is used by trainer 'a'.*shared=True"):
        choose(monkeypatch, Gpus(2), "0", used)
    assert choose(monkeypatch, Gpus(2), "0", used, shared=True)[0] == "cuda:0"


def test_device_of_a_killed_trainer_is_free_when_its_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {"GPU-uuid0": "killed"}
    monkeypatch.setattr(Member, "joined", property(lambda _: coordinator_pb2.JoinResponse(lease_s=60.0)), raising=False)
    monkeypatch.setattr(
        Member, "__init__", lambda self, _: vars(self).update(reports=TrainerReports(), _used=used, asked=[])
    )
    monkeypatch.setattr(devices.time, "sleep", lambda _: used.clear())
    assert choose(monkeypatch, Gpus(2), "0", used) == ("cuda:0", ["GPU-uuid0", "GPU-uuid0"])


@pytest.mark.parametrize(
    ("visible", "uuid", "expected"),
    [
        ("MIG-a,MIG-b", "same", "MIG-b"),
        ("4,7", "u", "GPU-u"),
        ("4,7", None, "host/cuda:7"),
        (None, None, "host/cuda:1"),
    ],
)
def test_devices_have_names_of_the_cluster(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, uuid: str | None, expected: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    module = SimpleNamespace(get_device_properties=lambda _: SimpleNamespace(**({"uuid": uuid} if uuid else {})))
    assert devices._identify(module, "cuda", 1, "host") == expected


def test_cpu_is_not_reported() -> None:
    member: Any = None
    assert choose_device(member, "cpu") == torch.device("cpu")


def test_mesh_of_the_run_chooses_the_device_before_it_meets_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: Gpus(0))
    member: Any = Member({})
    member.world = World(dp=2)
    at = SimpleNamespace(global_rank=1)
    member.rank_assignments = (SimpleNamespace(coordinates=at),)
    with pytest.raises(UsageError, match="sees no such device"):
        device_mesh(member, 0, device_type="cuda", wait_limit_s=1.0)
