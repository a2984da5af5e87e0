"""How a unit becomes usable: it is declared, one trainer uploads its initial values, and its shards are mapped.

Moves its shards when they get other servers; ``run_servers.py`` says when.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace

from shardwell.data_plane.host_copy import HostCopies, HostCopy
from shardwell.data_plane.kept_streams import DeltaCache
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.membership.membership import Lease, Membership
from shardwell.module.parameter_store import InitialValues
from shardwell.options import JoinConfig
from shardwell.store.host_relay import HostRelay
from shardwell.store.run_servers import ShardServers
from shardwell.transport.relay_connection import RelayLostError
from shardwell.transport.resending import UPLOAD
from shardwell.transport.server_connection import ServerConnection
from shardwell.transport.shared_vector import CAN_MAP, SharedVector
from shardwell_wire.connection.channel import backoff, retry
from shardwell_wire.encoding import wire_dtypes
from shardwell_wire.errors import (
    CapacityError,
    DeadlineError,
    NotFoundError,
    RunDeletedError,
    ShardwellError,
    UnavailableError,
    UnitMismatchError,
    VersionGoneError,
)
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.topology import Consistency
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_NO_LIMIT = (1 << 63) - 1

_REOPEN_TIMEOUT_S = 10.0
"""Deadline for opening a transport to another owner of a shard. A silent server is soon replaced."""


@dataclass(frozen=True, slots=True, eq=False)
class MovableUnits:
    """Units of one kind, which move in the same way."""

    units: dict[int, RemoteUnit]
    """The units by their index in the run. A moved unit replaces its entry."""
    wire: Callable[[], Wire]
    """Returns the dtypes in which the units travel."""
    remap: Callable[[RemoteUnit, Sequence[int], bool], RemoteUnit]
    """``(unit, moved, wait)``: maps the moved shards again, by number; ``wait``: for the versions that were read."""


class UnitMoves:
    """Connects units to the present owners of their shards. Called in the thread of ``ShardRelocations``.

    Args:
        servers: The connections.
        kinds: All units of this trainer.
    """

    def __init__(self, servers: ShardServers, kinds: Sequence[MovableUnits]) -> None:
        self._servers, self._kinds = servers, kinds
        self._replaced: list[ServerConnection] = []
        """Connections to former owners of shards, which are not closed yet."""
        self._unmapped: defaultdict[int, set[int]] = defaultdict(set)
        """Numbers of moved shards that are not mapped again yet, by unit index."""

    def connect(self, listed: coordinator_pb2.ListUnitsResponse, anew: bool) -> None:
        """Connects all shards to their owners. Called again if it or ``map`` has failed.

        Args:
            listed: The owners.
            anew: Whether to open new connections to all owners.
        """
        if anew:
            self._replaced += self._servers.forget()
        owners = {unit.unit_index: unit.shards for unit in listed.units}
        for kind in self._kinds:
            for index, unit in list(kind.units.items()):
                kind.units[index] = self._follow(unit, owners[index], kind.wire(), anew)
        used = {shard.server for kind in self._kinds for unit in kind.units.values() for shard in unit.shards}
        self._servers.retire([server for server in dict.fromkeys(self._replaced) if server not in used])
        self._replaced.clear()

    def map(self, anew: bool) -> None:
        """Maps the shards that have moved. ``anew``: without waiting for the versions that were read."""
        for kind in self._kinds:
            for index in [index for index in self._unmapped if index in kind.units]:
                kind.units[index] = kind.remap(kind.units[index], sorted(self._unmapped[index]), not anew)
                del self._unmapped[index]

    def _follow(self, unit: RemoteUnit, owners: Sequence[common_pb2.ShardRange], wire: Wire, anew: bool) -> RemoteUnit:
        """Connects the shards of a unit to their owners; returns the unit."""
        ranges = [(owner.start_bytes, owner.stop_bytes) for owner in owners]
        if ranges != [(shard.start_bytes, shard.stop_bytes) for shard in unit.shards]:
            # Only a rollback cuts a unit anew.
            shards = tuple(self._servers.shard(wire, unit.layout, owner) for owner in owners)
            self._replaced += [shard.server for shard in unit.shards]
            for shard in unit.shards:
                shard.forget()
                shard.owner.retire()
            if unit.vector is not None:
                unit.vector.cut(ranges)
            self._unmapped[unit.index] = set(range(len(shards)))
            return replace(unit, shards=shards)
        for number, (shard, owner) in enumerate(zip(unit.shards, owners, strict=True)):
            server = self._servers.connect(owner, open_timeout_s=_REOPEN_TIMEOUT_S)
            if anew or server is not shard.server or (shard.cached is not None and not shard.cached.is_relayed):
                self._unmapped[unit.index].add(number)
            if server is not shard.server:
                self._replaced.append(shard.server)
                shard.move(server)
        return unit


logger = logging.getLogger(__name__)

_UPLOAD_THREADS = 8
"""Threads that upload a unit. Limited, because each holds one piece of the values in memory."""

_FIRST_PUBLISH_POLL_S, _LONGEST_PUBLISH_POLL_S = 0.005, 0.25


class UnitDeclarations:
    """Declares units in the run.

    Args:
        membership: The membership of this trainer.
        servers: Connects to the shards.
        wait_limit_s: Seconds to wait for another trainer's upload of initial values, and for a server to accept them.
    """

    def __init__(self, membership: Membership, servers: ShardServers, wait_limit_s: float) -> None:
        self._membership, self._servers, self._wait_limit_s = membership, servers, wait_limit_s

    def declare(self, layout: UnitLayout, values: InitialValues, step: int, wire: Wire) -> RemoteUnit:
        """Declares a unit; returns when the run has its initial values.

        Args:
            layout: The unit's layout, the same on every trainer.
            values: Initial values, uploaded if the coordinator selects this trainer.
            step: The step in flight.
            wire: How the unit travels.

        Raises:
            DeadlineError: The selected trainer did not upload the values in time.
            StaleEpochError: The membership has lapsed.
            UnavailableError: A server could not be reached for ``wait_limit_s``.
        """
        deadline = time.monotonic() + self._wait_limit_s
        declared = self._declare(layout, step)
        pauses, loading = backoff(_FIRST_PUBLISH_POLL_S, _LONGEST_PUBLISH_POLL_S), ""
        # The values are kept until the unit is published. If the selected trainer is lost, the coordinator selects
        # another one, which may be this trainer.
        while not declared.HasField("version"):
            if declared.initialize:
                try:
                    unit = self._connect(layout, declared, wire)
                    self._initialize(unit, values, declared)
                    former, declared = declared, self._declare(layout, step)
                    if declared.shards == former.shards:
                        return unit
                    # A server ended meanwhile. The unit was placed again, and another trainer may have published it.
                    continue
                except ShardwellError as error:
                    former, declared = declared, self._declare(layout, step)
                    # A unit that was placed again has another epoch, even if its owners are the same.
                    same = (declared.shards, declared.epoch) == (former.shards, former.epoch)
                    if same and not isinstance(error, UnavailableError):
                        raise
                    if time.monotonic() > deadline:
                        raise
                    logger.warning("unit %r: uploading the initial values again: %s", layout.unit, error)
                    continue
            if declared.loading != loading:  # the servers make progress
                loading, deadline = declared.loading, time.monotonic() + self._wait_limit_s
            if time.monotonic() > deadline:
                from_whom = f"; {loading}" if loading else " from the trainer that plays the lowest logical rank"
                raise DeadlineError(
                    f"waited {self._wait_limit_s:.0f} s for the initial values of unit {layout.unit!r}{from_whom}",
                    unit=layout.unit,
                )
            time.sleep(next(pauses))
            declared = self._declare(layout, step)  # a unit without values may have moved to other servers
        while True:
            try:
                return self._connect(layout, declared, wire)
            except (UnavailableError, NotFoundError) as error:
                # A server is being replaced or restarted, and the coordinator may not know it yet.
                if isinstance(error, RunDeletedError) or time.monotonic() > deadline:
                    raise
                logger.warning("unit %r: its servers are asked for again: %s", layout.unit, error)
            time.sleep(next(pauses))
            declared = self._declare(layout, step)

    def _connect(self, layout: UnitLayout, declared: coordinator_pb2.DeclareUnitResponse, wire: Wire) -> RemoteUnit:
        shards = tuple(self._servers.shard(wire, layout, shard) for shard in declared.shards)
        return RemoteUnit(declared.unit_index, layout, shards, declared.placement)

    def require_all(self, declared: Collection[int]) -> None:
        """Checks that this trainer has declared all units of a run that has committed steps.

        Raises:
            UnitMismatchError: The run has other units, too: it was created with another model.
            StaleEpochError: The membership has lapsed.
            UnavailableError: The coordinator does not answer, or the run was being loaded, for ``wait_limit_s``.
        """
        units = retry(
            self._membership.list_units, limit_s=self._wait_limit_s, check=lambda _: self._membership.require_valid()
        ).units
        missing = [unit.unit for unit in units if unit.unit_index not in declared and self._is_own(unit)]
        if missing:
            raise UnitMismatchError(
                f"run {self._membership.run!r} has {len(missing)} units that this trainer's model lacks, such as "
                f"{missing[0]!r}: every trainer must build the same model, also when it resumes from a checkpoint",
                unit=missing[0],
            )

    def _is_own(self, unit: coordinator_pb2.UnitSummary) -> bool:
        """True if trainers of this trainer's tp rank and pp rank hold a unit."""
        at = next((each.coordinates for each in self._membership.rank_assignments), common_pb2.Coordinates())
        return at.pp_rank in (unit.pp_ranks or [0]) and (not unit.HasField("tp_rank") or unit.tp_rank == at.tp_rank)

    def set_model_names(self, layout: UnitLayout, names: Mapping[str, tuple[str, ...]], step: int) -> None:
        """Tells the run the names in the model of its parameters and buffers, by their names in the run.

        Args:
            layout: Layout of any declared unit.
            names: See ``Parameter.model_names``.
            step: The step in flight.
        """
        self._declare(layout, step, names)

    def _declare(
        self, layout: UnitLayout, step: int, names: Mapping[str, tuple[str, ...]] | None = None
    ) -> coordinator_pb2.DeclareUnitResponse:
        request = coordinator_pb2.DeclareUnitRequest(
            context=self._membership.context(step),
            trainer=self._membership.trainer,
            unit=layout.to_proto(),
            names_in_model=[
                coordinator_pb2.NamesInModel(name=name, model_names=found) for name, found in (names or {}).items()
            ],
        )
        response: coordinator_pb2.DeclareUnitResponse = self._membership.call("DeclareUnit", request)
        return response

    def _initialize(self, unit: RemoteUnit, values: InitialValues, lease: Lease) -> None:
        """Uploads the values to every owner of a shard, then publishes the unit."""
        context = self._membership.context(0, lease)
        with ThreadPoolExecutor(min(_UPLOAD_THREADS, max(1, len(unit.shards)))) as uploads:
            list(uploads.map(lambda shard: self._upload(unit, shard, values, lease), unit.shards))
        self._membership.call(
            "PublishInitialUnit",
            coordinator_pb2.PublishInitialUnitRequest(
                context=context, trainer=self._membership.trainer, unit=unit.layout.unit
            ),
        )

    def _upload(self, unit: RemoteUnit, shard: RemoteShard, values: InitialValues, lease: Lease) -> None:
        segments = [
            segment
            for segment in unit.layout.segments(shard.start_bytes, shard.stop_bytes)
            if segment.parameter_index not in values.draws
        ]
        header = shard_pb2.InitializeUnitHeader(
            context=self._membership.context(0, lease),
            unit=unit.layout.unit,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            draws=values.draws.values(),
            frozen_indices=[
                index
                for index, parameter in enumerate(unit.layout.parameters)
                # In 8 bits, one value that is not finite spoils all values of its quantization block.
                if parameter.frozen and not wire_dtypes.has_windows(wire_dtypes.applied(shard.gather_dtype, parameter))
            ],
        )
        size_bytes = sum(segment.size_bytes for segment in segments)
        shard.server.resending.run(
            lambda server, _: server.client.initialize(
                header,
                itertools.chain.from_iterable(map(values.read, segments)),
                size_bytes,
                timeout_s=self._wait_limit_s,
            ),
            UPLOAD,
        )


class ShardMappings:
    """Maps shards into this process: from shared memory of a server on this host, or from the host's relay.

    Args:
        membership: The membership of this trainer.
        config: Limits, and how much the relay may cache.
        relay: The relay of this host.
        deltas: The memory for deltas, which counts what they save.
    """

    def __init__(self, membership: Membership, config: JoinConfig, relay: HostRelay, deltas: DeltaCache) -> None:
        self._membership, self._config, self._relay = membership, config, relay
        self._reads_in_place = CAN_MAP and not Consistency.from_proto(membership.joined.config).asynchronous
        self.copies = HostCopies(accepts_deltas=deltas.budget_bytes > 0, count_deltas=deltas.count)
        """The copies of shards on this host."""
        self.has_copies = False
        """Whether a gather of a vector that is read in place may fetch bytes from a server."""

    def map(self, unit: RemoteUnit, gather_dtype: str) -> RemoteUnit:
        """Maps the shards of a unit that are in shared memory.

        Args:
            unit: The unit. Its mapped shards are changed.
            gather_dtype: Dtype in which 32-bit floats travel to this trainer.

        Returns:
            The unit, with a vector if all shards are mapped.
        """
        return self._map(unit, gather_dtype, beyond_budget=False)

    def map_stored(self, unit: RemoteUnit) -> RemoteUnit:
        """Maps a unit that travels in its stored dtypes, if servers of this host share all its shards."""
        if not self._reads_in_place or not unit.layout.size_bytes:
            return unit
        try:
            locations = [shard.locate() for shard in unit.shards]
            found = [location for location in locations if location is not None]
            if len(found) < len(locations):
                return unit
            return replace(unit, vector=SharedVector(unit.layout.unit, found))
        except OSError as error:
            _warn_not_mapped(unit, error)
            return unit

    def share_on_host(self, unit: RemoteUnit, gather_dtype: str) -> RemoteUnit:
        """Maps a unit and copies its other shards to this host, however much the relay may cache."""
        return self._map(unit, gather_dtype, beyond_budget=True)

    def remap(self, unit: RemoteUnit, moved: Sequence[int], gather_dtype: str, *, wait: bool) -> None:
        """Maps shards again that have moved, at the addresses where they were read in place before.

        The part of a unit that moved out of reach of shared memory is copied to this host from now on.

        Args:
            unit: The unit. Its shards are changed.
            moved: Numbers of the shards.
            gather_dtype: Dtype in which 32-bit floats travel to this trainer.
            wait: Whether to wait until the new owners have the versions that were read in place.

        Raises:
            CapacityError: This host has no shared memory for the copy.
            OSError: A segment cannot be mapped.
        """
        if not self._reads_in_place or not unit.layout.size_bytes:
            return
        vector, exact = unit.vector, not wire_dtypes.GATHER_NAMES[gather_dtype]
        others = []
        for number in moved:
            shard = unit.shards[number]
            if shard.start_bytes == shard.stop_bytes:
                continue
            shown = vector.shown(shard.start_bytes) if vector is not None and wait else None
            if (location := shard.locate(shown)) is not None:
                shard.map(location, ask=self._membership.ask)
            if vector is None:
                continue
            if location is not None and exact:
                shard.cached = None
                vector.replace(location)
            elif shard.cached is None or not wait or (not shard.cached.is_relayed and self._relay.find() is not None):
                others.append(number)
        if others:
            assert vector is not None
            for number, copy in self._copied(unit, others, gather_dtype).items():
                shard = unit.shards[number]
                # The version in the memory must not rise before its place is taken by memory with the same version.
                with nullcontext() if shard.cached is None else shard.cached.unchanged():
                    if wait and (shown := vector.shown(shard.start_bytes)) is not None:
                        with suppress(VersionGoneError):  # then nobody computes with it any more
                            shard.fetch_copy(copy, shown)
                    copy.vector = vector
                    vector.replace(copy.location)
                    shard.cached = copy

    def _copied(self, unit: RemoteUnit, numbers: Sequence[int], gather_dtype: str) -> dict[int, HostCopy]:
        """Copies shards that must be read in place to this host; returns the copies by number."""
        copies = self._copy(unit, numbers, gather_dtype, beyond_budget=True)
        if len(copies) < len(numbers):
            size_bytes = sum(unit.shards[number].stop_bytes - unit.shards[number].start_bytes for number in numbers)
            raise CapacityError(
                f"unit {unit.layout.unit!r} was read in place, and {size_bytes} bytes of it have moved to a server "
                "whose memory this process cannot map. They need as much shared memory on this host: enlarge /dev/shm",
                unit=unit.layout.unit,
            )
        return copies

    def start_over(self, rollback_count: int) -> None:
        """Copies nothing of former versions any more: the run was rolled back, and the next ones have other values."""
        self._relay.start_over(rollback_count)

    def _map(self, unit: RemoteUnit, gather_dtype: str, *, beyond_budget: bool) -> RemoteUnit:
        if not self._reads_in_place or not unit.layout.size_bytes:
            return unit
        name, exact = unit.layout.unit, not wire_dtypes.GATHER_NAMES[gather_dtype]
        try:
            locations = {}
            for number, shard in enumerate(unit.shards):
                if (location := shard.locate()) is not None:
                    if location.stop_bytes > location.start_bytes:
                        shard.map(location, ask=self._membership.ask)
                    # A lossy dtype has other bytes than the server's segment, so the shard is read from a copy in this
                    # dtype.
                    if exact:
                        locations[number] = location
            others = [number for number in range(len(unit.shards)) if number not in locations]
            copies = self._copy(unit, others, gather_dtype, beyond_budget=beyond_budget)
            for number, copy in copies.items():
                unit.shards[number].cached, locations[number] = copy, copy.location
            if len(locations) == len(unit.shards):
                in_order = [locations[number] for number in range(len(unit.shards))]
                vector = SharedVector(name, in_order, exact=exact, ask=self._membership.ask)
                for copy in copies.values():
                    copy.vector = vector
                return replace(unit, vector=vector)
        except OSError as error:
            _warn_not_mapped(unit, error)
        return unit

    def _copy(
        self, unit: RemoteUnit, numbers: Sequence[int], gather_dtype: str, *, beyond_budget: bool
    ) -> dict[int, HostCopy]:
        """Copies shards to this host if there is room; returns the copies by number.

        The relay has them, if there is one. Otherwise, each trainer has copies of its own of those shards that must be
        read in place.
        """
        budget_bytes = _NO_LIMIT if beyond_budget else self._config.transfers.host_cache_bytes
        if not numbers or not budget_bytes or not CAN_MAP:
            return {}
        # Mapped shards are rounded on this host, without a network.
        remote = [number for number in numbers if not unit.shards[number].is_mapped]
        copies = self._copy_to_relay(unit, remote, gather_dtype, budget_bytes) if remote else {}
        if beyond_budget and copies is not None:
            own = [number for number in numbers if number not in copies]
            copies |= {number: HostCopy(unit.shards[number].address, self.copies) for number in own}
        self.has_copies = self.has_copies or bool(copies)
        return copies or {}

    def _copy_to_relay(
        self, unit: RemoteUnit, numbers: Sequence[int], gather_dtype: str, budget_bytes: int
    ) -> dict[int, HostCopy] | None:
        """Has the relay cache shards, if it has room; returns the copies by number. None: shared memory is full."""
        if (relay := self._relay.find()) is None:
            return {}
        shards = [unit.shards[number] for number in numbers]
        try:
            locations = relay.name_unit(
                self._relay.added(unit),
                [(shard.start_bytes, shard.stop_bytes) for shard in shards],
                budget_bytes=budget_bytes,
                wire_dtype=wire_dtypes.GATHER_NAMES[gather_dtype],
            )
            return {
                number: HostCopy(shard.address, self.copies, relay, location)
                for number, shard, location in zip(numbers, shards, locations, strict=False)
            }
        except (ShardwellError, RelayLostError) as error:
            logger.warning(
                "unit %r is not cached by the relay of this host, and every trainer fetches it by itself: %s",
                unit.layout.unit,
                error,
            )
            return None if isinstance(error, CapacityError) else {}


def _warn_not_mapped(unit: RemoteUnit, error: Exception) -> None:
    logger.warning("unit %r is fetched instead of read in place: %s", unit.layout.unit, error)
