"""The default process group of a trainer, which spans its replica: formed, ended from another thread, destroyed.

Note: [Ending a collective]
    A collective of gloo in which a process does not answer ends at the group's timeout. With torch 2.13, ``abort`` and
    ``shutdown`` of the group in another thread do not end it. It fails at once when a connection of the group ends, as
    if the other process had ended. Gloo does not tell its connections. They are those that exist after the group was
    formed and did not exist before. A connection to a server that another thread opened meanwhile is ended, too; the
    trainer connects again.

    Collectives of other backends are ended by ``abort``. Those of NCCL run on the GPU, and the training thread waits
    in a synchronization. After ``abort`` the kernels return and the wait ends without an error, but the results are
    undefined. So the group counts as aborted before it is aborted, and the results of a work item count only if the
    group is not aborted when the item ends. A group that is void is aborted before it is destroyed: ``shutdown`` would
    wait for collectives that cannot end.
"""

from __future__ import annotations

import math
import os
import re
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Set
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName

from shardwell.membership.membership import START_AGAIN
from shardwell_wire.errors import ReplicaLostError

_GLOO = re.compile(
    r"gloo.*(closed by peer|reset by peer|broken pipe|timed out|connect timeout|socket closed)",
    re.IGNORECASE | re.DOTALL,
)
"""Gloo reports a lost process as a plain RuntimeError: its text begins with the path of a source file of gloo."""


def is_lost_peer(error: BaseException) -> bool:
    """True if an error, or an error that caused it, says that another process does not answer."""
    return any(isinstance(cause, dist.DistError) or _GLOO.search(str(cause)) for cause in _causes(error))


def lost_peer_error(error: BaseException) -> ReplicaLostError:
    """Returns the error for a collective that failed because another process does not answer."""
    return ReplicaLostError(
        f"a trainer of this replica was lost, or did not answer in time: {START_AGAIN}. {first_line(error)}"
    )


def silent_peers_error(names: Collection[str], error: BaseException) -> ReplicaLostError:
    """Returns the error for a collective that failed because other trainers do not answer the coordinator, either."""
    return ReplicaLostError(
        f"{' and '.join(f'trainer {name!r}' for name in names)} of this replica sent nothing for longer than a lease, "
        "and a collective waited too long: look whether the process is stopped or its host is cut off (shardwell "
        f"run RUN), and {START_AGAIN}. {first_line(error)}"
    )


def first_line(error: BaseException) -> str:
    """Returns the first line of the error that caused all others."""
    *_, cause = _causes(error)
    return str(cause).strip().partition("\n")[0]


def _causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


_DESCRIPTORS = "/dev/fd"
"""Folder that lists the open file descriptors of this process, on Linux and macOS."""


class Connection(NamedTuple):
    """The two ends of a TCP connection, as ``socket`` returns them."""

    local: Any
    remote: Any


def open_connections() -> frozenset[Connection]:
    """Returns the TCP connections of this process."""
    return frozenset(connection for connection, _ in _connected_sockets())


def end_connections(connections: Set[Connection]) -> int:
    """Ends those of the given connections that this process has. Returns their number.

    Their descriptors stay open: they belong to the process group. Pending data that has arrived can still be read.
    """
    count = 0
    for connection, connected in _connected_sockets():
        if connection in connections:
            with suppress(OSError):  # the other process has ended it
                connected.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _connected_sockets() -> Iterator[tuple[Connection, socket.socket]]:
    """Yields each TCP connection with a socket that is closed when the next one is requested."""
    for name in os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else ():
        try:
            descriptor = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            os.close(descriptor)
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                try:
                    connection = Connection(duplicate.getsockname(), duplicate.getpeername())
                except OSError:  # not connected
                    continue
                yield connection, duplicate


_GLOO_NAME, _NCCL_NAME = "gloo", "nccl"
_ERROR_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""Variables that say what NCCL's watchdog does when a collective fails. By default it ends the process."""


class ReplicaProcessGroup:
    """The default process group, and the replica's mesh on it. Formed in the constructor.

    Refers to the store while the group exists: torch keeps only the C++ half of a store that is written in Python.

    Attributes:
        mesh: The mesh, with the axes of ``shape``.
        backend: Name of the backend.
        aborted: True if results of collectives may be undefined. See Note: [Ending a collective].

    Args:
        store: The store in which the trainers of the replica meet.
        rank: This trainer's rank in the replica.
        shape: Sizes of the axes by name, slowest first.
        timeout_s: Longest time that a collective waits for a trainer that does not answer.
    """

    def __init__(
        self, backend: str, device_type: str, store: Store, *, rank: int, shape: Mapping[str, int], timeout_s: float
    ) -> None:
        size, self.backend, self.aborted = math.prod(shape.values()), backend, False
        self._store, self._abort_lock = store, threading.Lock()
        self._connections: frozenset[Connection] = frozenset()
        """TCP connections to the other trainers of the replica."""
        if backend == _NCCL_NAME and not any(name in os.environ for name in _ERROR_HANDLING):
            # This trainer ends failed collectives by itself, and its process goes on.
            os.environ[_ERROR_HANDLING[0]] = "0"
        # torch numbers the groups of a process, also those whose creation failed. All trainers must use the same names.
        distributed_c10d._world.group_count = 0
        before = open_connections()
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        self._group = dist.group.WORLD
        try:
            self.mesh = DeviceMesh(device_type, torch.arange(size).view(*shape.values()), mesh_dim_names=tuple(shape))
        except BaseException:  # such as a trainer of the replica that is lost meanwhile
            self.close(lost=True)
            raise
        self._connections = open_connections() - before

    @property
    def control_device(self) -> str:
        """Device type of small tensors that trainers compare."""
        return "cpu" if self.backend == _GLOO_NAME else str(self.mesh.device_type)

    def end_collectives(self) -> str:
        """Makes collectives fail in which a trainer does not answer. Called in any thread.

        Returns:
            What was done, for messages.
        """
        if self.backend == _GLOO_NAME:
            return f"{end_connections(self._connections)} connections are ended"
        self._abort()
        return f"the process groups over {self.backend} are aborted"

    def _abort(self) -> None:
        with self._abort_lock:
            if not self.aborted:
                self.aborted = True
                _abort_groups(self._group)

    def close(self, *, lost: bool) -> None:
        """Ends the process group. Its mesh and the modules that use it are unusable afterwards.

        Args:
            lost: True if a trainer of the replica may not answer.
        """
        if self._group is None or not dist.is_initialized() or dist.group.WORLD is not self._group:
            return  # the script has destroyed it
        if lost and self.backend != _GLOO_NAME:
            self._abort()
        dist.destroy_process_group()
        self._group = None
        _forget_meshes()


_ABSENT_NAME = "shardwell_absent"


class AbsentTrainers(dist.ProcessGroup):
    """A process group of this trainer alone, in which all collectives are refused. Models can be divided over it.

    Args:
        store: Not used.
        rank: This trainer's rank.
        timeout: Not used.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the constructor for subclasses

    @property
    def group_name(self) -> GroupName:
        """Name by which torch finds the group."""
        return distributed_c10d._world.pg_names[self]

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise absent_error()

    allgather = allgather_coalesced = all_gather_single = allreduce = allreduce_coalesced = _refuse
    alltoall = all_to_all_single = barrier = broadcast = gather = monitored_barrier = _refuse
    reduce = reduce_scatter = reduce_scatter_single = scatter = send = recv = recv_anysource = _refuse

    @classmethod
    def register(cls) -> str:
        """Makes torch know the group; returns the name of its backend."""
        if _ABSENT_NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(_ABSENT_NAME, cls, devices=["cpu", "cuda"])
        return _ABSENT_NAME


def absent_error() -> ReplicaLostError:
    """Returns the error for a trainer that cannot compute without the other trainers of its replica."""
    return ReplicaLostError(
        "the other trainers of this replica have ended their training, and this trainer has steps or collectives left: "
        "start all trainers of the replica to continue the run"
    )


def _abort_groups(group: Any) -> None:
    """Aborts all process groups, the newest first.

    ``torch.distributed._abort_process_group`` does the same, and also forgets the groups, which the training thread may
    use at this moment.
    """
    names = dict(distributed_c10d._world.pg_names)
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none for this device type
        backend = None
    together = hasattr(backend, "_group_start")  # otherwise aborts of several communicators of NCCL may deadlock
    if together:
        backend._group_start()
    try:
        for each in sorted(names, key=lambda each: names[each], reverse=True):
            each.abort()
    finally:
        if together:
            backend._group_end()


def _forget_meshes() -> None:
    """Clears torch's caches of operations on DTensors in this thread.

    Meshes are equal if they have the same shape, whatever their groups. A trainer with another place in the next mesh
    would find the groups of its former place in the caches.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
