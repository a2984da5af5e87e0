"""A ``torch.distributed`` device mesh over the run's logical ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.session import Session

_STORE_NAME = "torch.distributed"


def device_mesh(session: Session, device_type: str = "cpu") -> DeviceMesh:
    """A mesh with the axes ``dp``, ``tp``, ``pp`` in the run's order.

    Makes the default process group if there is none: the trainer of logical rank 0 hosts the store,
    the coordinator tells the others where. Every logical rank must have a trainer of its own.

    Args:
        session: This trainer's session.
        device_type: Of the mesh; ``cpu`` uses gloo, ``cuda`` NCCL.

    Raises:
        UsageError: This trainer plays none or several logical ranks.
        DeadlineError: The others did not come.
    """
    rank = session.global_rank
    if rank is None or session.num_ranks != 1:
        raise UsageError(
            f"a device mesh needs one trainer per logical rank; this one plays {session.num_ranks} of {session.world}"
        )
    if not dist.is_initialized():
        _init_process_group(session, rank, device_type)
    world = session.world
    shape = [getattr(world, axis) for axis in world.order]
    return DeviceMesh(device_type, torch.arange(world.size).view(shape), mesh_dim_names=world.order)


def _init_process_group(session: Session, rank: int, device_type: str) -> None:
    store = _host_store(session) if rank == 0 else _find_store(session)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", store=store, rank=rank, world_size=session.world.size
    )


def _host_store(session: Session) -> Store:
    host = session.config.host
    store = TCPStore(host, 0, session.world.size, is_master=True, wait_for_workers=False)
    session.exchange_address(_STORE_NAME, f"{host}:{store.port}")
    return store


def _find_store(session: Session) -> Store:
    host, _, port = session.exchange_address(_STORE_NAME).rpartition(":")
    return TCPStore(host, int(port), session.world.size, is_master=False)
