"""Groups of processes that talk to each other directly: the run's device mesh, and the node group of one host."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from shardwell.data_plane.host_folder import HostFolder
from shardwell.data_plane.node_group import CONNECTED, MemberGoneError, NodeGroup, NodeRendezvous, Outcome
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_STORE_NAME = "torch.distributed"

RENDEZVOUS_LIMIT_S = 5.0
"""Seconds to wait for the other members of a node group. ``join`` returns on all trainers of a run at the
same time, so a short wait is enough. A trainer that joins later does not take part in this rendezvous."""

CONNECT_LIMIT_S = 60.0
"""Seconds to wait until present members are connected."""

ExchangeAddress = Callable[[str, str | None], str]
"""``(name, address) -> address``: publishes an address, or waits for it if ``address`` is None."""


# ---- the device mesh ----


def device_mesh(
    world: World, global_rank: int, *, host: str, exchange: ExchangeAddress, device_type: str
) -> DeviceMesh:
    """Returns a mesh with the axes ``dp``, ``tp``, ``pp`` in the run's order.

    Creates the default process group if there is none: the trainer of logical rank 0 hosts its store, and the
    coordinator passes the store's address to the others.

    Args:
        world: The grid of logical ranks. Each rank has a trainer of its own.
        global_rank: Logical rank of this trainer.
        host: Name or address under which other trainers reach this host.
        exchange: Exchanges the store's address.
        device_type: Device type of the mesh. ``cpu`` uses gloo, ``cuda`` NCCL.

    Raises:
        DeadlineError: Other trainers did not call in time.
    """
    if not dist.is_initialized():
        store = _host_store(world, host, exchange) if global_rank == 0 else _find_store(world, exchange)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=global_rank, world_size=world.size)
    shape = [getattr(world, axis) for axis in world.order]
    return DeviceMesh(device_type, torch.arange(world.size).view(shape), mesh_dim_names=world.order)


def _host_store(world: World, host: str, exchange: ExchangeAddress) -> Store:
    store = TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False)
    exchange(_STORE_NAME, f"{host}:{store.port}")
    return store


def _find_store(world: World, exchange: ExchangeAddress) -> Store:
    host, _, port = exchange(_STORE_NAME, None).rpartition(":")
    return TCPStore(host, int(port), world.size, is_master=False)


# ---- the node group ----


@dataclass(frozen=True, slots=True)
class NodeMembers:
    """The trainers of this host that hold the same units, including this trainer."""

    key: str
    """Identifies these members. Another set of trainers, or the same trainers after another join, has another key."""
    global_ranks: tuple[int, ...]
    """Logical ranks of the members, in increasing order."""
    position: int
    """Index of this trainer in ``global_ranks``."""


def form_node_group(membership: Membership, config: JoinConfig) -> NodeGroup | None:
    """Connects this trainer with the other trainers of its host that joined at the same time.

    Returns:
        None if there is no other trainer, or if not all of them could be connected. The reason is logged, and all of
        them get None.
    """
    backend = config.transfers.node_group
    try:
        members = _find_members(membership, config)
        if members is None:
            return None
        group = _connect(members, backend)
    except (ShardwellError, MemberGoneError, OSError, RuntimeError) as error:
        logger.warning(
            "node group: every trainer of this node fetches whole units for itself: %s", str(error).partition("\n")[0]
        )
        return None
    logger.info("node group: logical ranks %s share gathers over %s", list(members.global_ranks), backend)
    return group


def _find_members(membership: Membership, config: JoinConfig) -> NodeMembers | None:
    """Finds the trainers of this host that hold the same units."""
    if len(membership.rank_assignments) != 1:
        count = len(membership.rank_assignments)
        logger.info("node group: this trainer plays %d logical ranks and shares no transfers", count)
        return None
    own, world = membership.rank_assignments[0].coordinates, membership.world
    described: coordinator_pb2.DescribeRunResponse = membership.call(
        "DescribeRun", coordinator_pb2.DescribeRunRequest(run=membership.run)
    )
    found = []
    for trainer in described.trainers:
        if trainer.live and trainer.host == config.host and len(trainer.global_ranks) == 1:
            at = world.coordinates(trainer.global_ranks[0])
            if (at.tp_rank, at.pp_rank) == (own.tp_rank, own.pp_rank):
                found.append((at.global_rank, trainer.trainer, trainer.epoch))
    ranks = tuple(rank for rank, _, _ in sorted(found))
    if len(ranks) < 2 or own.global_rank not in ranks:
        logger.info("node group: no other trainer on host %r holds the units of this one", config.host)
        return None
    identity = (membership.identity, config.host, config.transfers.node_group, sorted(found))
    return NodeMembers(key_of(identity), ranks, ranks.index(own.global_rank))


def key_of(identity: object) -> str:
    """Returns a name for the members of a group, from what identifies them."""
    return hashlib.sha256(repr(identity).encode()).hexdigest()[:24]


def _connect(members: NodeMembers, backend: str) -> NodeGroup:
    rank, size = members.position, len(members.global_ranks)
    rendezvous, folder = meet(members)
    group = None
    try:
        store = FileStore(str(folder.path / "store"), size)
        group = NodeGroup(rendezvous, backend, store, rank=rank, size=size)
        if rendezvous.decide(CONNECTED, 0, CONNECT_LIMIT_S) is not Outcome.EXCHANGE:
            raise UnavailableError("not all trainers of the node could be connected")
    except BaseException:
        rendezvous.close() if group is None else group.close()
        raise
    return group


def meet(members: NodeMembers) -> tuple[NodeRendezvous, HostFolder]:
    """Waits until all members are present; returns their rendezvous and its folder, which it closes."""
    folder = HostFolder(members.key)
    try:
        rendezvous = NodeRendezvous(folder, members.position, len(members.global_ranks))
    except BaseException:
        folder.close()
        raise
    if not rendezvous.meet(RENDEZVOUS_LIMIT_S):
        rendezvous.close()
        raise UnavailableError(
            f"not all trainers with logical ranks {list(members.global_ranks)} arrived within "
            f"{RENDEZVOUS_LIMIT_S:.0f} s, or they do not share memory"
        )
    return rendezvous, folder
