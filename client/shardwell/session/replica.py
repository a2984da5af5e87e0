"""The process group of a replica, and its device mesh."""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from shardwell.session.membership import Membership
from shardwell_wire.errors import DeadlineError, UsageError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_AXES = ("tp", "pp")
_PAUSE_S = 0.05
"""Pause between two questions to the coordinator while members are missing."""


@dataclass(frozen=True, slots=True)
class ReplicaMembers:
    """The trainers of one replica."""

    dp_rank: int
    key: str
    """Identifies these trainers. Another set of trainers, or the same trainers after another join, has another key."""
    rank: int
    """This trainer's rank in the replica: by tp rank, then by pp rank."""
    missing: tuple[int, ...]
    """Logical ranks without a live trainer."""


class ReplicaGroup:
    """The default process group of a trainer, which spans its replica.

    Note: [Store of a replica]
        The trainer with the lowest coordinates hosts the store in which the members meet. The store ends with this
        trainer, and so does the process group. The members that are left find another set of members, whose key
        differs, and meet in another store.

    Args:
        membership: This trainer's membership in the run.
        wait_limit_s: Longest wait for the other trainers, and of a collective for a trainer that does not answer.
    """

    def __init__(self, membership: Membership, *, wait_limit_s: float) -> None:
        self._membership, self._wait_limit_s = membership, wait_limit_s
        self._mesh: DeviceMesh | None = None
        self._key = ""
        """Members of the group that exists."""

    def mesh(self, device_type: str) -> DeviceMesh:
        """Returns the mesh of the replica, with the axes ``tp`` and ``pp``.

        Forms the process group at the first call, and again if the trainers of the replica have changed.

        Raises:
            UsageError: This trainer plays several places of a replica, or none; or ``torch.distributed`` has another
                default process group.
            DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
        """
        members = self._wait_for_members()
        if self._mesh is None or members.key != self._key:
            self._form(members, device_type)
        assert self._mesh is not None
        return self._mesh

    def _form(self, members: ReplicaMembers, device_type: str) -> None:
        self.close()
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: session.replica_mesh() makes the default process group, "
                "which spans the trainers of one replica. Do not call init_process_group"
            )
        world = self._membership.world
        size = world.tp * world.pp
        timeout = timedelta(seconds=self._wait_limit_s)
        store = self._host_store(members, timeout) if members.rank == 0 else self._find_store(members, timeout)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=members.rank, world_size=size, timeout=timeout)
        self._mesh = DeviceMesh(device_type, torch.arange(size).view(world.tp, world.pp), mesh_dim_names=_AXES)
        self._key = members.key
        logger.info("replica %d: %d trainers formed a process group over %s", members.dp_rank, size, backend)

    def _host_store(self, members: ReplicaMembers, timeout: timedelta) -> Store:
        host = _own_address(self._membership.coordinator_address)
        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        self._membership.exchange_address(0, _name(members), f"{members.key} {host}:{store.port}")
        return store

    def _find_store(self, members: ReplicaMembers, timeout: timedelta) -> Store:
        """Waits until the first trainer of these members has published the address of their store."""
        deadline = time.monotonic() + self._wait_limit_s
        while time.monotonic() < deadline:
            key, _, address = self._membership.exchange_address(0, _name(members), None).partition(" ")
            if key == members.key:
                host, _, port = address.rpartition(":")
                return TCPStore(host, int(port), is_master=False, timeout=timeout)
            time.sleep(_PAUSE_S)
        raise DeadlineError(
            f"waited {self._wait_limit_s:.0f} s for the first trainer of replica {members.dp_rank}: it did not call "
            "session.replica_mesh(), or the trainers of the replica changed meanwhile"
        )

    def _wait_for_members(self) -> ReplicaMembers:
        deadline = time.monotonic() + self._wait_limit_s
        while (members := self._members()).missing:
            if time.monotonic() > deadline:
                raise DeadlineError(
                    f"waited {self._wait_limit_s:.0f} s for the trainers of replica {members.dp_rank}: logical ranks "
                    f"{list(members.missing)} have no live trainer"
                )
            time.sleep(_PAUSE_S)
        return members

    def _members(self) -> ReplicaMembers:
        """Asks the coordinator for the trainers of this trainer's replica."""
        membership, world = self._membership, self._membership.world
        if len(membership.rank_assignments) != 1:
            raise UsageError(
                "a replica has one trainer per tensor and pipeline rank; this trainer plays "
                f"{len(membership.rank_assignments)} logical ranks of {world}"
            )
        own = membership.rank_assignments[0].coordinates
        described: coordinator_pb2.DescribeRunResponse = membership.call(
            "DescribeRun", coordinator_pb2.DescribeRunRequest(run=membership.run)
        )
        owners = {
            global_rank: (trainer.trainer, trainer.epoch)
            for trainer in described.trainers
            if trainer.live
            for global_rank in trainer.global_ranks
        }
        ranks = [
            world.global_rank(dp_rank=own.dp_rank, tp_rank=tp_rank, pp_rank=pp_rank)
            for tp_rank in range(world.tp)
            for pp_rank in range(world.pp)
        ]
        identity = repr((membership.identity, [(rank, owners.get(rank)) for rank in ranks]))
        return ReplicaMembers(
            dp_rank=own.dp_rank,
            key=hashlib.sha256(identity.encode()).hexdigest()[:24],
            rank=ranks.index(own.global_rank),
            missing=tuple(rank for rank in ranks if rank not in owners),
        )

    def close(self) -> None:
        """Ends the process group, if there is one. Its meshes and the modules that use them are unusable afterwards."""
        if self._mesh is not None:
            self._mesh, self._key = None, ""
            dist.destroy_process_group()


def _name(members: ReplicaMembers) -> str:
    return f"replica/{members.dp_rank}"


def _own_address(coordinator: str) -> str:
    """Returns the address of this host on the route to the coordinator. Nothing is sent."""
    host, _, port = coordinator.rpartition(":")
    family, _, _, _, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
