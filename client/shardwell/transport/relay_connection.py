"""What a trainer does with the relay of its host: reads shards that it caches, and pushes gradients through it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwell.transport.base import ByteCounter, PreparedPush, ShardAddress
from shardwell.transport.resending import ResendPolicy
from shardwell.transport.server_connection import ConnectOptions, ServerConnection
from shardwell.transport.shared_vector import SegmentLocation
from shardwell.transport.shm_transport import ShmTransport
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.errors import ConflictError, DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.model.names import RunIdentity
from shardwell_wire.v1 import shard_pb2

_ANSWER_S = 5.0
"""How much later than it was asked to the relay may answer before it counts as gone."""

_NOTICE_S = 1.0
"""How long to wait, after the relay could not be reached, for this process to notice that the transport broke."""


class RelayLostError(Exception):
    """The relay is gone. This trainer talks to the servers."""


@dataclass(frozen=True, slots=True)
class AddedUnit:
    """A unit and the order in which its gradients are added."""

    layout: UnitLayout
    dp: int
    reduction_groups: tuple[int, ...]


class RelayConnection(ServerConnection):
    """The relay of this host. Thread-safe. Every operation is one attempt: who loses the relay asks the servers.

    Args:
        options: How to connect, and what this trainer tells the relay. The transport is shared memory.
        server_id: Id of the server that must answer at the address.
        moved: Counts the bytes that the relay moves for this trainer.

    Raises:
        ShardwellError: The relay cannot be reached, or this process shares no memory with it.
        OSError: Its memory cannot be mapped.
    """

    def __init__(
        self, address: str, run: RunIdentity, options: ConnectOptions, server_id: str, moved: ByteCounter
    ) -> None:
        assert options.relay is not None
        super().__init__(address, run, replace(options, transports=(ShmTransport.name,)), ResendPolicy(), server_id)
        self._run, self._moved, self.group, self.server_id = run, moved, tuple(options.relay.group), server_id
        self._dp_rank = options.relay.dp_rank
        self.is_lost = False
        """Whether the relay is gone, or another one is used. It is not asked again over this connection."""
        self.has_pushed_alone = False
        """Whether the relay has pushed a gradient as it was, because it did not have those of the other trainers."""

    def serves(self, dp_rank: int, group: tuple[int, ...]) -> bool:
        """Returns whether the relay adds the gradients of a rank to those of a group."""
        return self.group == group and (not group or self._dp_rank == dp_rank)

    def name_unit(
        self,
        unit: AddedUnit,
        ranges: Sequence[tuple[int, int]],
        *,
        budget_bytes: int | None = None,
        wire_dtype: WireDtype = AS_STORED,
    ) -> list[SegmentLocation]:
        """Has the relay relay shards of a unit; returns where it caches them. Empty: it does not cache them.

        Args:
            ranges: The shards in the flat vector.
            budget_bytes: Limit of all shards of the run that the relay caches. None: these are not to be cached.
            wire_dtype: The dtype in which float32 weights travel.

        Raises:
            CapacityError: Shared memory is full.
            RelayLostError: The relay is gone.
        """
        request = shard_pb2.RelayUnitRequest(
            unit=unit.layout.to_proto(),
            start_bytes=[start for start, _ in ranges],
            stop_bytes=[stop for _, stop in ranges],
            budget_bytes=budget_bytes,
            wire_dtype=wire_dtype,
            dp=unit.dp,
            reduction_groups=unit.reduction_groups,
        )
        response: shard_pb2.RelayUnitResponse = self._call("RelayUnit", request, _ANSWER_S)
        return [
            SegmentLocation(segment.file, start, stop, self._shm().open_file)
            for segment, (start, stop) in zip(response.segments, ranges, strict=False)
        ]

    def read(
        self, shard: ShardAddress, version: int, *, wait_s: float, accepts_deltas: bool
    ) -> shard_pb2.ReadRelayedResponse:
        """Waits until the relay has a version of a cached shard.

        Args:
            shard: The shard.
            version: The version.
            wait_s: The longest wait.
            accepts_deltas: Whether the relay may receive deltas.

        Raises:
            RelayLostError: The relay is gone.
            ShardwellError: The error of the shard's owner.
        """
        request = shard_pb2.ReadRelayedRequest(
            unit=shard.layout.unit,
            start_bytes=shard.start_bytes,
            version=version,
            wait_s=wait_s,
            accepts_deltas=accepts_deltas,
        )
        response: shard_pb2.ReadRelayedResponse = self._call("ReadRelayed", request, wait_s + _ANSWER_S)
        self._moved.add(received_bytes=response.received_bytes)
        return response

    def prepare_relayed(self, push: PreparedPush) -> PreparedPush:
        """Copies gradients to memory of the relay.

        Raises:
            RelayLostError: The relay is gone.
            CapacityError: It has no memory for them.
        """
        shm = self._shm()
        try:
            return shm.prepare_push_at_once(push) or shm.prepare_push(push)
        except ShardwellError as error:
            self._require_present(shm, error)
            raise

    def push_relayed(self, prepared: PreparedPush, *, timeout_s: float) -> shard_pb2.ReduceGradientBufferResponse:
        """Pushes a gradient that ``prepare_push`` has copied to the relay's memory; returns the relay's answer.

        Raises:
            RelayLostError: The relay is gone. The owner of the shard may have the gradient.
            ShardwellError: The error of the shard's owner.
        """
        shm = self._shm()
        try:
            answer = shm.push(prepared, timeout_s=timeout_s)
        except ShardwellError as error:
            self._require_present(shm, error)
            raise
        self._moved.add(sent_bytes=answer.pushed_bytes)
        self.has_pushed_alone = self.has_pushed_alone or not answer.summed_dp_ranks
        return answer

    def skip(self, step: int) -> None:
        """Says that this trainer pushes its gradients of a step itself.

        Raises:
            RelayLostError: The relay is gone.
        """
        self._call("SkipRelay", shard_pb2.SkipRelayRequest(step=step), _ANSWER_S)

    def notice_loss(self) -> bool:
        """Returns whether the relay is gone."""
        shared = self.transports.shared
        self.is_lost = self.is_lost or shared is None or shared.broke
        return self.is_lost

    def _shm(self) -> ShmTransport:
        shared = self.transports.shared
        if self.notice_loss() or not isinstance(shared, ShmTransport):
            raise self._lost(None)
        return shared

    def _call(
        self,
        rpc_name: str,
        request: shard_pb2.RelayUnitRequest | shard_pb2.ReadRelayedRequest | shard_pb2.SkipRelayRequest,
        timeout_s: float,
    ) -> Any:
        """Calls an rpc about the session of shared memory, whose names are set here."""
        shm = self._shm()
        request.run, request.run_id, request.transport_id = self._run.name, self._run.run_id, shm.session_id
        try:
            return self.client.call(rpc_name, request, timeout_s=timeout_s)
        except ShardwellError as error:
            self._require_present(shm, error)
            raise

    def _require_present(self, shm: ShmTransport, error: ShardwellError) -> None:
        """Raises RelayLostError if an error shows that the relay is gone. Otherwise it is the error of an owner.

        A relay that is silent counts as gone, and one that has started again: it knows nothing of the transport.
        """
        is_broken = self.is_lost or (isinstance(error, UnavailableError) and shm.session.broke_within(_NOTICE_S))
        if is_broken or isinstance(error, DeadlineError) or type(error) is ConflictError:
            raise self._lost(error) from error

    def _lost(self, error: ShardwellError | None) -> RelayLostError:
        self.is_lost = True
        return RelayLostError(f"the relay at {self.address} is gone: {error or 'its transport has ended'}")
