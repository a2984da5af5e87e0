"""The process group of a replica, and its device mesh."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwell.session.lost_peers import first_line, is_lost_peer
from shardwell.session.membership import Membership
from shardwell.session.peer_connections import Connection, end_connections, open_connections
from shardwell.session.replica_epoch import START_AGAIN
from shardwell.session.replica_store import ReplicaStore
from shardwell_wire.errors import DeadlineError, ReplicaLostError, StaleEpochError, UsageError
from shardwell_wire.topology import World
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_AXES = ("tp", "pp")
_PAUSE_S = 0.05
"""Pause between two questions to the coordinator while members are missing."""


def import_first_uses(world: World) -> None:
    """Imports what torch would import when the model is split: the first use of a DTensor imports torch._dynamo.

    This takes up to a second. A spare spends it before it joins, and not while its replica waits.
    """
    if world.tp > 1:
        importlib.import_module("torch._dynamo")


@dataclass(frozen=True, slots=True)
class ReplicaMembers:
    """The trainers of one replica."""

    dp_rank: int
    epoch: int
    """Epoch of the replica: rises whenever its trainers change."""
    rank: int
    """This trainer's rank in the replica: by tp rank, then by pp rank."""
    missing: tuple[str, ...]
    """Trainers that are gone and not replaced yet."""


class ReplicaGroup:
    """The default process group of a trainer, which spans its replica.

    Args:
        membership: This trainer's membership in the run.
        wait_limit_s: Longest wait for the other trainers, and of a collective for a trainer that does not answer.
    """

    def __init__(self, membership: Membership, *, wait_limit_s: float) -> None:
        self._membership, self._wait_limit_s = membership, wait_limit_s
        self._group: dist.ProcessGroup | None = None
        self._mesh: DeviceMesh | None = None
        self.epoch = 0
        """Epoch of the replica whose group was formed last, or was to be formed. Stays when the group is closed."""
        self._connections: frozenset[Connection] = frozenset()
        """TCP connections to the other trainers of the replica."""
        membership.replica_epoch.when_void = self._end_collectives

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the mesh of the replica, with the axes ``tp`` and ``pp``.

        Forms the process group at the first call, and again if the trainers of the replica have changed.

        Raises:
            UsageError: This trainer plays several places of a replica, or none; or ``torch.distributed`` has another
                default process group.
            DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
        """
        while True:
            members = self._wait_for_members()
            if self._mesh is not None and members.epoch == self.epoch:
                return self._mesh
            try:
                self._form(members, device_type)
            except StaleEpochError as error:  # the store ended: the trainers of the replica have changed meanwhile
                logger.info("replica %d: %s", members.dp_rank, error)

    def _form(self, members: ReplicaMembers, device_type: str) -> None:
        self.close()
        self.epoch = members.epoch
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: session.replica_mesh() makes the default process group, "
                "which spans the trainers of one replica. Do not call init_process_group"
            )
        world = self._membership.world
        size = world.tp * world.pp
        timeout = timedelta(seconds=self._wait_limit_s)
        store = ReplicaStore(self._membership, members.epoch) if size > 1 else HashStore()
        backend = "nccl" if device_type == "cuda" else "gloo"
        # torch numbers the groups of a process, also those whose creation failed. All trainers must use the same names.
        distributed_c10d._world.group_count = 0
        before = open_connections()
        dist.init_process_group(backend, store=store, rank=members.rank, world_size=size, timeout=timeout)
        self._group = dist.group.WORLD
        try:
            self._mesh = DeviceMesh(device_type, torch.arange(size).view(world.tp, world.pp), mesh_dim_names=_AXES)
        except BaseException:  # such as a trainer of the replica that is lost meanwhile
            self.close()
            raise
        self._connections = open_connections() - before
        self._membership.replica_epoch.form(members.epoch, members.dp_rank)
        logger.info("replica %d: %d trainers formed a process group over %s", members.dp_rank, size, backend)

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the trainers of the replica have changed since the process group was formed."""
        self._membership.replica_epoch.require_valid()

    def require_same_item(self, item: coordinator_pb2.WorkItem) -> None:
        """Checks that all trainers of the replica start the same attempt of the same item.

        Collectives carry no names. Trainers that compute different items would mix their activations silently.

        Raises:
            ReplicaLostError: They start different ones, or one of them was lost.
        """
        if self._mesh is None or self._mesh.size() == 1:
            return
        self._membership.replica_epoch.announce(item.replica_epoch)
        self.require_valid()
        own = torch.tensor([item.dp_rank, item.attempt], device=self._mesh.device_type)
        most = torch.cat([own, -own])
        try:
            dist.all_reduce(most, dist.ReduceOp.MAX)
        except Exception as error:
            if not is_lost_peer(error):
                raise
            raise ReplicaLostError(f"a trainer of this replica was lost: {START_AGAIN}. {first_line(error)}") from error
        if not torch.equal(most, torch.cat([own, -own])):
            raise ReplicaLostError(
                f"the trainers of this replica do not start the same work item: dp rank {item.dp_rank}, attempt "
                f"{item.attempt} is this trainer's. To go on, {START_AGAIN}"
            )

    def _wait_for_members(self) -> ReplicaMembers:
        deadline = time.monotonic() + self._wait_limit_s
        while (members := self._members()).missing:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self._wait_limit_s:.0f} s for the trainers of replica {members.dp_rank}: "
                    f"{list(members.missing)} are gone and not replaced"
                )
            time.sleep(_PAUSE_S)
        return members

    def _members(self) -> ReplicaMembers:
        """Asks the coordinator for the trainers of this trainer's replica."""
        membership, world = self._membership, self._membership.world
        ranks = [assignment.coordinates for assignment in membership.rank_assignments]
        if len({(rank.tp_rank, rank.pp_rank) for rank in ranks}) != 1:
            raise UsageError(
                "a replica has one trainer per tensor and pipeline rank; this trainer plays the logical ranks "
                f"{[rank.global_rank for rank in ranks]} of {world}"
            )
        own = ranks[0]
        if world.tp * world.pp == 1:
            return ReplicaMembers(own.dp_rank, epoch=0, rank=0, missing=())
        described: coordinator_pb2.DescribeWorldResponse = membership.call(
            "DescribeWorld", coordinator_pb2.DescribeWorldRequest(run=membership.run)
        )
        rank = own.tp_rank * world.pp + own.pp_rank
        for replica in described.replicas:
            if membership.trainer in replica.trainers:
                return ReplicaMembers(own.dp_rank, replica.replica_epoch, rank, tuple(replica.missing))
        return ReplicaMembers(own.dp_rank, 0, rank, missing=(f"the replica of {membership.trainer!r}",))

    def _end_collectives(self) -> None:
        """Makes a collective fail in which a trainer does not answer, because the process group is void.

        Only while a work item is computed: after the last step, trainers may leave while others use the group.
        See Note: [Ending a collective] in ``peer_connections.py``.
        """
        if self._membership.computes_item:
            count = end_connections(self._connections)
            logger.warning("%s; %d connections are ended", self._membership.replica_epoch.lost_error(), count)

    def close(self) -> None:
        """Ends the process group, if there is one. Its meshes and the modules that use them are unusable afterwards."""
        self._membership.replica_epoch.close()
        self._connections = frozenset()
        group, self._group, self._mesh = self._group, None, None
        if group is not None and dist.is_initialized() and dist.group.WORLD is group:
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Clears torch's caches of operations on DTensors in this thread.

    Meshes are equal if they have the same shape, whatever their groups. A trainer with another place in the next mesh
    would find the groups of its former place in the caches.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
