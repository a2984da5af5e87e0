"""Processes that talk to each other directly: a replica's process group, the run's device mesh, a host's node group."""

from __future__ import annotations

import hashlib
import importlib
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from shardwell.grid.devices import choose_device
from shardwell.grid.process_group import (
    AbsentTrainers,
    ReplicaProcessGroup,
    absent_error,
    is_lost_peer,
    lost_peer_error,
    silent_peers_error,
)
from shardwell.grid.replica_store import ReplicaStore
from shardwell.membership.membership import START_AGAIN, Membership
from shardwell.options import JoinConfig
from shardwell.peers.host_folder import HostFolder
from shardwell.peers.node_group import BACKENDS, CONNECTED, MemberGoneError, NodeGroup, NodeRendezvous, Outcome
from shardwell_wire.errors import (
    DeadlineError,
    ReplicaLostError,
    ShardwellError,
    StaleEpochError,
    UnavailableError,
    UsageError,
)
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_STORE_NAME = "torch.distributed"

RENDEZVOUS_LIMIT_S = 5.0
"""Seconds to wait for the other members of a node group. ``join`` returns on all trainers of a run at the
same time, so a short wait is enough. A trainer that joins later does not take part in this rendezvous."""

CONNECT_LIMIT_S = 60.0
"""Seconds to wait until present members are connected."""


# ---- the device mesh ----


def device_mesh(membership: Membership, step: int, *, device_type: str, wait_limit_s: float) -> DeviceMesh:
    """Returns a mesh with the axes ``dp``, ``tp``, ``pp`` in the run's order, and ``cp`` if it is above 1.

    Creates the default process group if there is none: the trainer of logical rank 0 hosts its store, and the
    coordinator passes the store's address to the others.

    Args:
        step: Number of committed steps.
        device_type: Device type of the mesh. ``cpu`` uses gloo, ``cuda`` NCCL.
        wait_limit_s: Longest wait for the other trainers, and of a collective for a trainer that does not answer.

    Raises:
        UsageError: This trainer plays no logical rank or several, or the default process group does not consist of the
            run's logical ranks.
        DeadlineError: Other trainers did not call in time.
    """
    world, ranks = membership.world, membership.rank_assignments
    if len(ranks) != 1:
        raise UsageError(f"a device mesh needs one trainer per logical rank; this one plays {len(ranks)} of {world}")
    rank, timeout = ranks[0].coordinates.global_rank, timedelta(seconds=wait_limit_s)
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) != (world.size, rank):
        raise UsageError(
            f"torch.distributed is initialised with {dist.get_world_size()} processes, of which this is number "
            f"{dist.get_rank()}: session.device_mesh() needs a default process group of all {world.size} logical "
            f"ranks, in which this trainer is number {rank}. session.replica_mesh() makes one of the replica only: "
            "call one of the two, or leave init_process_group to session.device_mesh()"
        )
    choose_device(membership, device_type, position=rank)
    if not dist.is_initialized():
        if rank == 0:
            host = reachable_address(membership.host, membership.coordinator_address)
            store = TCPStore(host, 0, world.size, is_master=True, wait_for_workers=False, timeout=timeout)
            membership.exchange_address(step, _STORE_NAME, f"{host}:{store.port}")
        else:
            found, _, port = membership.exchange_address(step, _STORE_NAME, None).rpartition(":")
            store = TCPStore(found, int(port), world.size, is_master=False, timeout=timeout)
        backend = check_backend(device_type, None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world.size, timeout=timeout)
    shape = [getattr(world, axis) for axis in world.order]
    return DeviceMesh(device_type, torch.arange(world.size).view(shape), mesh_dim_names=world.order)


def reachable_address(host: str, coordinator: str) -> str:
    """Returns a name or an address under which the other trainers of a run reach this machine.

    Args:
        host: The trainer's host. May be a label that is no address.
        coordinator: Address of the coordinator, host:port.

    Raises:
        UsageError: The host is no address of this machine, and no network leads to the coordinator.
    """
    with suppress(OSError):
        for family, *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as attempt:
                attempt.bind((address[0], 0))
                return host
    try:
        return address_towards(coordinator)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"session.device_mesh(): host {host!r} is no address of this machine, and its address towards the "
            f"coordinator at {coordinator} is not known ({error}): pass join(host=ADDRESS)"
        ) from error


def address_towards(coordinator: str) -> str:
    """Returns the address of this machine from which the coordinator at host:port is reached."""
    name, _, port = coordinator.rpartition(":")
    family, kind, *_, target = socket.getaddrinfo(name.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as route:
        route.connect(target)  # sends nothing
        return str(route.getsockname()[0])


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
        choose_device(membership, BACKENDS[backend])
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


_GLOO, _NCCL = "gloo", "nccl"
_NEWS_LIMIT_S = 1.0
"""Longest wait for the coordinator's news about a trainer that does not answer."""

SUCCESSOR_LIMIT_S = 10.0
"""Longest wait for a spare or a restarted trainer in the place of a trainer that has left with an error. The error of a
training script mostly comes again, so this is much shorter than the wait for a trainer that was lost."""

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
    """This trainer's rank in the replica: by cp rank, then by tp rank, then by pp rank."""
    missing: tuple[str, ...]
    """Trainers that are gone and not replaced yet."""
    errors: tuple[str, ...] = ()
    """Errors with which missing trainers have left, and their ranks."""
    ended: bool = False
    """True if the training loop of a trainer of the run has ended and nothing was committed since."""


class ReplicaGroup:
    """The default process group of a trainer, which spans its replica.

    Args:
        wait_limit_s: Longest wait for the other trainers, and of a collective for a trainer that does not answer.
    """

    def __init__(self, membership: Membership, *, wait_limit_s: float) -> None:
        self._membership, self._wait_limit_s = membership, wait_limit_s
        self._group: ReplicaProcessGroup | None = None
        self.epoch = 0
        """Epoch of the replica whose group was formed last, or was to be formed. Stays when the group is closed."""
        self.may_be_alone = False
        """True if the caller goes on after the error of a group without the other trainers. See ``is_alone``."""
        self.is_alone = False
        """True if the group has no other trainers, because the run has ended: this trainer finds out whether its loop
        has steps left."""
        self._in_use = False
        """True if the training thread may wait in a collective although it computes no work item."""
        membership.replica_epoch.when_void = self._end_collectives

    def mesh(self, device_type: str, backend: str | None = None) -> DeviceMesh:
        """Returns the mesh of the replica, with the axes ``tp`` and ``pp``, after ``cp`` if it is above 1.

        Forms the process group at the first call, and again if the trainers of the replica have changed.

        Args:
            backend: Backend of the process group. None: ``nccl`` for ``cuda``, otherwise ``gloo``.

        Raises:
            UsageError: This trainer plays several places of a replica, or none; ``torch.distributed`` has another
                default process group; or the backend does not suit the device type.
            DeadlineError: The other trainers of the replica did not call in ``wait_limit_s``.
        """
        backend = check_backend(device_type, backend)
        while True:
            members = self._wait_for_members()
            if self._group is not None and members.epoch == self.epoch:
                return self._group.mesh
            try:
                self._form(members, device_type, backend, alone=members.ended and self.may_be_alone)
            except StaleEpochError as error:  # the store ended: the trainers of the replica have changed meanwhile
                logger.info("replica %d: %s", members.dp_rank, error)

    def _form(self, members: ReplicaMembers, device_type: str, backend: str, *, alone: bool) -> None:
        self.close(lost=True)
        self.epoch = members.epoch
        if dist.is_initialized():
            raise UsageError(
                "torch.distributed is initialised already: session.replica_mesh() makes the default process group, "
                "which spans the trainers of one replica. Do not call init_process_group"
            )
        world = self._membership.world
        size, axes = world.replica_size, tuple(axis for axis in world.axes if axis != "dp")
        choose_device(self._membership, device_type, position=members.rank, shared=backend == _GLOO)
        self.is_alone = alone and size > 1
        self._group = ReplicaProcessGroup(
            AbsentTrainers.register() if self.is_alone else backend,
            device_type,
            ReplicaStore(self._membership, members.epoch) if size > 1 and not self.is_alone else HashStore(),
            rank=members.rank,
            shape={axis: getattr(world, axis) for axis in axes},
            timeout_s=self._wait_limit_s,
        )
        if self.is_alone:
            logger.info("replica %d: the run has ended, so this trainer does not wait for the others", members.dp_rank)
            return
        self._membership.replica_epoch.form(members.epoch, members.dp_rank)
        logger.info("replica %d: %d trainers formed a process group over %s", members.dp_rank, size, backend)

    def require_valid(self) -> None:
        """Raises ReplicaLostError if the trainers of the replica have changed since the process group was formed."""
        if self.is_alone:
            raise absent_error()
        self._membership.replica_epoch.require_valid()

    def require_results(self) -> None:
        """Raises ReplicaLostError if collectives were aborted, so that what was computed is undefined."""
        if self._group is not None and self._group.aborted:
            raise self._membership.replica_epoch.lost_error()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context of collectives that may be outside of a work item, such as those of an evaluation between two steps.

        A collective fails if another trainer of the replica is lost meanwhile, unless the run has ended: that trainer
        may have done its part and left.

        Raises:
            ReplicaLostError: A trainer was lost before, or the results are undefined.
        """
        former, self._in_use = self._in_use, True  # first, so that a loss is noticed here or in _end_collectives
        try:
            epoch = self._membership.replica_epoch
            if epoch.is_void and not self._members(member=False).ended:
                raise epoch.lost_error()
            yield
            self.require_results()
        finally:
            self._in_use = former

    @property
    def has_tensor_ranks(self) -> bool:
        """Whether the process group has several tensor-parallel ranks."""
        return self._group is not None and self._membership.world.tp > 1

    def require_same_item(self, item: coordinator_pb2.WorkItem, batch: int = 0) -> None:
        """Checks that all trainers of the replica start the same attempt of the same item.

        Collectives carry no names. Trainers that compute different items would mix their activations silently. So would
        tensor-parallel ranks with different batches. The stages of a pipeline may have different batches.
        ``ContextParallel.split`` compares the batches of context-parallel ranks.

        Args:
            item: The item that this trainer starts.
            batch: Fingerprint of its batch, from 0 to 2**62 - 1.

        Raises:
            ReplicaLostError: They start different ones, or one of them was lost.
            UsageError: Tensor-parallel ranks have different batches.
        """
        group = self._group
        if group is None or group.mesh.size() == 1:
            return
        self._membership.replica_epoch.announce(item.replica_epoch)
        self.require_valid()
        membership, world = self._membership, self._membership.world
        own = torch.tensor([item.dp_rank, item.attempt], device=group.control_device)
        batches = own.new_full((2, world.cp, world.pp), -(1 << 62))  # below the fingerprints of all ranks
        batches[:, membership.cp_rank, membership.pp_rank] = own.new_tensor([batch, -batch])
        most = torch.cat([own, -own, batches.flatten()])
        try:
            dist.all_reduce(most, dist.ReduceOp.MAX)
            most = most.cpu()  # raises on a GPU if the collective failed
        except Exception as error:
            if not is_lost_peer(error):
                raise
            raise self.lost_error(error) from error
        self.require_results()
        if most[:4].tolist() != [*own.tolist(), *(-own).tolist()]:
            raise ReplicaLostError(
                f"the trainers of this replica do not start the same work item: dp rank {item.dp_rank}, attempt "
                f"{item.attempt} is this trainer's. To go on, {START_AGAIN}"
            )
        highest, lowest = most[4:].view(batches.shape)
        if places := (highest != -lowest).nonzero().tolist():
            context = f"context-parallel rank {places[0][0]}, " if world.cp > 1 else ""
            raise UsageError(
                f"the tensor-parallel ranks of {context}pipeline rank {places[0][1]} have different batches for dp "
                f"rank {item.dp_rank}, attempt {item.attempt}: they compute parts of one batch together. Make the "
                "batch from the arguments (step, dp_rank) only, not from the trainer's rank or a generator of its own"
            )

    def lost_error(self, error: BaseException) -> ReplicaLostError:
        """Returns the error for a collective that failed because another trainer does not answer.

        Waits a moment for the coordinator, which knows with which error the other trainer has left, if it has, or which
        trainers are silent.
        """
        epoch = self._membership.replica_epoch
        if epoch.wait_until_void(_NEWS_LIMIT_S):
            return epoch.lost_error()
        with suppress(ShardwellError):
            members = self._members(member=False, limit_s=_NEWS_LIMIT_S)
            if members.missing:
                return silent_peers_error(members.missing, error)
        return lost_peer_error(error)

    def wait_for_successors(self) -> None:
        """Waits for trainers in the places of those that have left with an error since the group was formed.

        Raises:
            ReplicaLostError: There are none after ``SUCCESSOR_LIMIT_S``. Names the trainers, their ranks and errors.
        """
        epoch = self._membership.replica_epoch
        if not epoch.formed:
            return
        epoch.wait_until_void(_NEWS_LIMIT_S)
        deadline = time.monotonic() + SUCCESSOR_LIMIT_S
        while epoch.error and (errors := self._members(member=False).errors):
            if time.monotonic() > deadline:
                raise ReplicaLostError(
                    f"{'; '.join(errors)}. No trainer has taken its place in {SUCCESSOR_LIMIT_S:.0f} s, so this "
                    "trainer ends, too: remove the cause, and start all trainers of the replica again"
                )
            time.sleep(_PAUSE_S)

    def _wait_for_members(self) -> ReplicaMembers:
        deadline = time.monotonic() + self._wait_limit_s
        while (members := self._members()).missing:
            if members.ended and self.may_be_alone:
                break
            if time.monotonic() > deadline:
                errors = f" ({'; '.join(members.errors)})" if members.errors else ""
                raise DeadlineError(
                    f"waited {self._wait_limit_s:.0f} s for the trainers of replica {members.dp_rank}: "
                    f"{list(members.missing)} are gone and not replaced{errors}"
                )
            time.sleep(_PAUSE_S)
        return members

    def _members(self, *, member: bool = True, limit_s: float | None = None) -> ReplicaMembers:
        """Asks the coordinator for the trainers of this trainer's replica.

        Args:
            member: Whether to raise StaleEpochError if the membership has lapsed.
            limit_s: Longest wait for a coordinator that is unavailable. None: ``wait_limit_s``.
        """
        membership, world = self._membership, self._membership.world
        ranks = [assignment.coordinates for assignment in membership.rank_assignments]
        if len({(rank.cp_rank, rank.tp_rank, rank.pp_rank) for rank in ranks}) != 1:
            raise UsageError(
                "a replica has one trainer per context, tensor and pipeline rank; this trainer plays the logical ranks "
                f"{[rank.global_rank for rank in ranks]} of {world}"
            )
        own = ranks[0]
        if world.replica_size == 1:
            return ReplicaMembers(own.dp_rank, epoch=0, rank=0, missing=())
        described: coordinator_pb2.DescribeWorldResponse = membership.call(
            "DescribeWorld", coordinator_pb2.DescribeWorldRequest(run=membership.run), member=member, limit_s=limit_s
        )
        rank = world.rank_in_replica(world.coordinates(own.global_rank))
        for replica in described.replicas:
            if membership.trainer in replica.trainers:
                return ReplicaMembers(
                    own.dp_rank,
                    replica.replica_epoch,
                    rank,
                    missing=tuple(replica.missing),
                    errors=tuple(replica.errors),
                    ended=described.ended,
                )
        return ReplicaMembers(own.dp_rank, 0, rank, missing=(f"the replica of {membership.trainer!r}",))

    def _end_collectives(self) -> None:
        """Makes a collective fail in which a trainer does not answer, because the process group is void.

        Only while a work item is computed or the group is ``in_use``: after the last step, trainers may leave while
        others use the group. See Note: [Ending a collective].
        """
        group = self._group
        if group is None:
            return
        if self._membership.computes_item:
            self._end_group(group)
        elif self._in_use:  # this is the membership's thread, which must not wait for an rpc
            threading.Thread(target=self._end_unless_ended, args=(group,), name="lost replica", daemon=True).start()

    def _end_unless_ended(self, group: ReplicaProcessGroup) -> None:
        """Ends the collectives of a group unless the run has ended."""
        try:
            ended = self._members(member=False).ended
        except ShardwellError as error:
            logger.warning("a collective of the void process group may last until its timeout: %s", error)
            return
        if not ended and self._in_use and self._group is group:
            self._end_group(group)

    def _end_group(self, group: ReplicaProcessGroup) -> None:
        logger.warning("%s; %s", self._membership.replica_epoch.lost_error(), group.end_collectives())

    def close(self, *, lost: bool = False) -> None:
        """Ends the process group, if there is one. Its meshes and the modules that use them are unusable afterwards.

        Args:
            lost: True if a trainer of the replica may not answer.
        """
        lost = lost or self._membership.replica_epoch.is_void
        self._membership.replica_epoch.close()
        self.is_alone = False
        group, self._group = self._group, None
        if group is not None:
            group.close(lost=lost)


def check_backend(device_type: str, backend: str | None) -> str:
    """Returns the backend of process groups on a type of device.

    Args:
        backend: The backend that the caller wants. None: the usual one.

    Raises:
        UsageError: Torch has no such backend, or it does not serve this type of device.
    """
    if backend is None:
        return _NCCL if device_type == "cuda" else _GLOO
    known = dist.Backend.backend_capability
    if device_type not in known.get(backend, ()):
        able = ", ".join(repr(name) for name, types in known.items() if device_type in types)
        raise UsageError(
            f"backend {backend!r} does not serve device_type={device_type!r}: choose one of {able}, or leave it out"
        )
    return backend
