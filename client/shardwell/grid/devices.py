"""Chooses the GPU that a trainer computes on, and reports it, so that no two trainers share one by accident."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from shardwell.membership.membership import Membership
from shardwell.options import local_rank_variable
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import coordinator_pb2

_PAUSE_S = 0.1


def choose_device(membership: Membership, device_type: str, *, position: int = 0, shared: bool = False) -> torch.device:
    """Chooses the device of a type that this trainer computes on, makes it current, and reports it to the coordinator.

    The device that the script has made current counts, if it is not the first. Otherwise LOCAL_RANK, or the variable
    that srun or mpirun sets instead, is its index; a trainer that sees one device only takes this one. Without
    such a variable it is the first that no other trainer uses.

    Args:
        device_type: The type. The CPU is neither chosen nor reported.
        position: Index of the device that is tried first without LOCAL_RANK, modulo the number of devices.
        shared: True if other trainers that say so, too, may use the device.

    Raises:
        UsageError: There is no such device, or another trainer of the run uses it.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module: Any = torch.get_device_module(device_type)
    chosen = membership.reports.device
    if chosen is not None and chosen.shared == shared and torch.device(chosen.name).type == device_type:
        module.set_device(torch.device(chosen.name).index)
        return torch.device(chosen.name)
    candidates = _candidates(module, device_type, position)
    # A trainer that was killed uses its device until the coordinator notices the end of its lease.
    deadline = time.monotonic() + membership.joined.lease_s
    while True:
        for index in candidates:
            name = f"{device_type}:{index}"
            device_id = _identify(module, device_type, index, membership.host)
            device = coordinator_pb2.TrainerDevice(name=name, id=device_id, shared=shared)
            if not (user := membership.report_device(device)):
                module.set_device(index)
                return torch.device(name)
        if time.monotonic() > deadline:
            raise UsageError(
                f"{name} of host {membership.host!r} ({device_id}) is used by trainer {user!r}: start one trainer per "
                f"GPU, with LOCAL_RANK from 0 on each host (shardwell launch sets it), or give each launcher of the "
                "host its own CUDA_VISIBLE_DEVICES. Trainers that shall share a GPU call session.device(shared=True), "
                "or session.replica_mesh(..., backend='gloo')"
            )
        time.sleep(_PAUSE_S)


def _candidates(module: Any, device_type: str, position: int) -> Sequence[int]:
    """Returns the indices of the devices that this trainer may take, in the order in which it tries them."""
    count = module.device_count()
    if not count:
        raise UsageError(f"device_type={device_type!r}: this process sees no such device; pass device_type='cpu'")
    if module.is_initialized() and (current := module.current_device()):
        return [current]
    variable = local_rank_variable(os.environ)
    if variable is None:
        return [(position + offset) % count for offset in range(count)]
    text = os.environ[variable]
    if not text.isdecimal():
        raise UsageError(f"{variable}={text!r}: expected the number of this trainer on its host, from 0")
    if int(text) < count:
        return [int(text)]
    if count == 1:  # a scheduler gives each process its device
        return [0]
    raise UsageError(
        f"{variable}={text}, but this process sees {count} devices of type {device_type!r}: start at most {count} "
        "trainers on this host"
    )


def _identify(module: Any, device_type: str, index: int, host: str) -> str:
    """Returns what identifies a device in the cluster: its UUID, or else its host and number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device_type == "cuda" else []
    number = visible[index].strip() if index < len(visible) else ""
    if number.startswith("MIG-"):  # parts of one GPU have one UUID
        return number
    uuid = getattr(module.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else f"{host}/{device_type}:{number or index}"
