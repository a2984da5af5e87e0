"""Which trainers of a run are on this node and hold the same units, and how they come to be a group."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from torch._C._distributed_c10d import FileStore

from shardwell.data_plane.host_folder import HostFolder
from shardwell.data_plane.node_group import NodeGroup
from shardwell.data_plane.node_rendezvous import CONNECTED, MemberGoneError, NodeRendezvous, Outcome
from shardwell.session.config import JoinConfig
from shardwell.session.membership import Membership
from shardwell_wire.errors import ShardwellError, UnavailableError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

MEETING_LIMIT_S = 5.0
"""``join`` returns on all trainers of a run at once, so who is not there by then joined at another time."""

_CONNECTING_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class NodeMembers:
    """The trainers of this node whose units are the same, this one among them."""

    key: str
    """Of no other such trainers, nor of these once they have joined again."""
    global_ranks: tuple[int, ...]
    """In order."""
    position: int
    """Of this trainer among them."""


def form_node_group(membership: Membership, config: JoinConfig) -> NodeGroup | None:
    """Connects this trainer with the others of its node; all of them have just joined.

    Returns:
        None, after one line in the log, if there is nobody to share with or they could not be connected; then it is
        None on all of them.
    """
    try:
        members = _find(membership, config)
        if members is None:
            return None
        group = _connect(members, config.transfers.node_group)
    except (ShardwellError, MemberGoneError, OSError, RuntimeError) as error:
        logger.warning(
            "node group: every trainer of this node fetches whole units for itself: %s", str(error).partition("\n")[0]
        )
        return None
    logger.info(
        "node group: logical ranks %s share gathers over %s", list(members.global_ranks), config.transfers.node_group
    )
    return group


def _find(membership: Membership, config: JoinConfig) -> NodeMembers | None:
    if len(membership.rank_assignments) != 1:
        logger.info(
            "node group: this trainer plays %d logical ranks and shares no gathers", len(membership.rank_assignments)
        )
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
    identity = repr((membership.identity, config.host, config.transfers.node_group, sorted(found)))
    return NodeMembers(hashlib.sha256(identity.encode()).hexdigest()[:24], ranks, ranks.index(own.global_rank))


def _connect(members: NodeMembers, backend: str) -> NodeGroup:
    rank, size = members.position, len(members.global_ranks)
    folder = HostFolder(members.key)
    try:
        rendezvous = NodeRendezvous(folder, rank, size)
    except BaseException:
        folder.close()
        raise
    group = None
    try:
        if not rendezvous.meet(MEETING_LIMIT_S):
            raise UnavailableError(
                f"of the trainers with logical ranks {list(members.global_ranks)} not all came within "
                f"{MEETING_LIMIT_S:.0f} s, or they have no shared memory in common"
            )
        store = FileStore(str(folder.path / "store"), size)
        group = NodeGroup(rendezvous, backend, store, rank=rank, size=size)
        if rendezvous.decide(CONNECTED, 0, _CONNECTING_LIMIT_S) is not Outcome.TOGETHER:
            raise UnavailableError("not all of them could be connected")
    except BaseException:
        rendezvous.close() if group is None else group.close()
        raise
    return group
