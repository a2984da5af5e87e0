"""The cluster of a ``join`` without an address: private to this process, or shared by all ranks of a launcher.

Note: [Joins of one launcher]
    The ranks of a launcher find the cluster of each join in its store, under a key with the join's number.
    All ranks join in the same order, so they agree on the number. A rank counts a join when it has become a member or
    has learned that rank 0 has no cluster for this join. After another failure, it tries the same join again.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from shardwell.find_credentials import find_credentials
from shardwell.options import JoinConfig, LauncherPlace, WaitOptions
from shardwell.processes.local_cluster import LocalCluster
from shardwell.session.joining import announce
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError, UsageError
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_POLL_S = 0.1
_ADVICE = (
    "start a cluster (`shardwell-server`, docs/by-hand.md) and set SHARDWELL_ADDRESS to its coordinator's HOST:PORT"
)


@dataclass(slots=True)
class _Launch:
    """The processes that one launcher has started. See Note: [Joins of one launcher]."""

    store: Store
    join_number: int = 0
    """Number of the next join of this process, or of the one that has not succeeded yet."""

    @property
    def key(self) -> str:
        """Where rank 0 announces the cluster of the join."""
        return f"shardwell/private_cluster/{self.join_number}"


_launches: dict[tuple[str | None, ...], _Launch] = {}
"""By address and restart of the launcher. The store stays open: rank 0 may serve it to the other ranks."""


def open_private_cluster(config: JoinConfig) -> PrivateCluster:
    """Starts a cluster with one shard server. The ranks of a launcher share the cluster that rank 0 starts.

    Raises:
        UsageError: The ranks run on several hosts.
        DeadlineError: Rank 0 did not start the cluster in ``wait_limit_s``.
        UnavailableError: A server did not start, or rank 0 has stopped the cluster.
    """
    place = config.launcher
    if place is None:
        _check_alone(config)
        return _OwnCluster()
    if place.local_world_size != place.world_size:
        raise UsageError(
            f"the launcher started {place.world_size} ranks, {place.local_world_size} of them on this host, but "
            f"shardwell.join() has no address, and a private cluster serves one host only: {_ADVICE}"
        )
    launch = _find_launch(place, config.waits.wait_limit_s)
    return _SharedCluster(launch, config.waits) if place.rank == 0 else _JoinedCluster(launch, config.waits, place)


def _check_alone(config: JoinConfig) -> None:
    """Raises UsageError if the run needs more trainers than this process."""
    world, count = config.world, config.min_trainers or config.world.size
    if count > 1:
        alone = "" if world.replica_size > 1 else ", or let this process play all ranks: join(min_trainers=1)"
        raise UsageError(
            f"a run with {world} waits for {count} trainers, but shardwell.join() has no address, and no other trainer "
            "can join the private cluster of this process: start the script with `shardwell launch` or torchrun, or "
            f"name a cluster with SHARDWELL_ADDRESS{alone}"
        )


class PrivateCluster:
    """A cluster that ends with the session that uses it.

    Attributes:
        address: The coordinator's host:port.
        credentials: Credentials that every rpc to the cluster carries.
    """

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address, self.credentials = address, credentials

    def note_joined(self) -> None:
        """Called when the session has become a member of its run."""

    def close(self) -> None:
        """Called after the session has left its run, or has failed to join."""


class _OwnCluster(PrivateCluster):
    """The cluster of this process."""

    _users = "process"

    def __init__(self) -> None:
        self._cluster = LocalCluster(num_shards=1)
        self._cluster.start()
        super().__init__(self._cluster.address, self._cluster.credentials)
        announce(
            f"without an address, the private cluster at {self.address} serves this {self._users} only and ends with it"
        )

    def close(self) -> None:
        self._cluster.stop()


class _SharedCluster(_OwnCluster):
    """The cluster that rank 0 starts and stops. It stops after the other ranks have left."""

    _users = "launch"

    def __init__(self, launch: _Launch, waits: WaitOptions) -> None:
        self._store, self._key, self._waits = launch.store, launch.key, waits
        launch.join_number += 1
        try:
            super().__init__()
        except BaseException as error:
            self._publish(error=f"rank 0 could not start the private cluster: {error}")
            raise
        self._publish(address=self.address)

    def _publish(self, **found: str) -> None:
        self._store.set(self._key, json.dumps({"host": socket.gethostname(), **found}))

    def close(self) -> None:
        self._publish(error="rank 0 has finished and stopped the private cluster: every rank must join before that")
        # After an error nothing may delay the exit of this process: the launcher then ends the other ranks.
        if sys.exc_info()[0] is None and getattr(sys, "last_value", None) is None:
            self._wait_for_others()
        super().close()

    def _wait_for_others(self) -> None:
        """Returns when no trainer is left: other ranks may still read the weights of the last step."""
        coordinator = CoordinatorClient(self.address, self.credentials)
        started = last_report = time.monotonic()
        try:
            while (count := _count_live_trainers(coordinator)) and (
                now := time.monotonic()
            ) - started < self._waits.wait_limit_s:
                if now - last_report > self._waits.warn_after_s:
                    logger.warning("rank 0 keeps the private cluster until %d other ranks leave", count)
                    last_report = now
                time.sleep(_POLL_S)
        except ShardwellError as error:
            logger.warning("the private cluster stops before the other ranks have left: %s", error)
        finally:
            coordinator.close()


class _JoinedCluster(PrivateCluster):
    """The cluster of rank 0, as used by the other ranks. Rank 0 stops it."""

    def __init__(self, launch: _Launch, waits: WaitOptions, place: LauncherPlace) -> None:
        self._launch = launch
        found = json.loads(_wait_for_rank_0(launch, waits))
        own_host = socket.gethostname()
        if found["host"] != own_host:
            raise UsageError(
                f"rank {place.rank} runs on host {own_host!r} and rank 0 on {found['host']!r}, but shardwell.join() "
                f"has no address, and a private cluster serves one host only: {_ADVICE}"
            )
        if "error" in found:
            launch.join_number += 1
            raise UnavailableError(found["error"])
        # The store does not carry the token, because every user of the host can read it. All ranks run as one user.
        super().__init__(found["address"], find_credentials(found["address"]))

    def note_joined(self) -> None:
        self._launch.join_number += 1


def _count_live_trainers(coordinator: CoordinatorClient) -> int:
    response: coordinator_pb2.ListRunsResponse = coordinator.call("ListRuns", coordinator_pb2.ListRunsRequest())
    return sum(run.live_trainer_count for run in response.runs)


def _wait_for_rank_0(launch: _Launch, waits: WaitOptions) -> bytes:
    started, store, key = time.monotonic(), launch.store, launch.key
    while not store.check([key]):
        waited = time.monotonic() - started
        if waited > waits.wait_limit_s:
            raise DeadlineError(
                f"waited {waited:.0f} s for rank 0 to start the private cluster: rank 0 has not called shardwell.join()"
            )
        try:
            left_s = max(0.1, waits.wait_limit_s - waited)
            store.wait([key], timedelta(seconds=min(waits.warn_after_s, left_s)))
        except DistError:
            logger.warning("waiting for rank 0 to start the private cluster in its shardwell.join()")
    return bytes(store.get(key))


def _find_launch(place: LauncherPlace, limit_s: float) -> _Launch:
    """Returns the launch of this process. Opens its store at MASTER_ADDR and MASTER_PORT, as ``torch.distributed``."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    identity = tuple(os.environ.get(name) for name in names)
    if identity not in _launches:
        _launches[identity] = _Launch(_open_store(place, limit_s))
    return _launches[identity]


def _open_store(place: LauncherPlace, limit_s: float) -> Store:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UsageError(
            f"{' and '.join(place.variables)} are set, but {' and '.join(missing)} not, so the ranks cannot find each "
            f"other: {_ADVICE}. On one host, start the ranks with torchrun or `shardwell launch` instead. To train "
            f"alone, unset {' and '.join(place.variables)}"
        )
    try:
        url = f"env://?rank={place.rank}&world_size={place.world_size}"
        store: Store = next(rendezvous(url, timeout=timedelta(seconds=limit_s)))[0]
    except (DistError, RuntimeError, ValueError) as error:
        raise UnavailableError(f"the ranks cannot find each other at MASTER_ADDR:MASTER_PORT: {error}") from error
    return store
