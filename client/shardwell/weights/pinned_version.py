"""One version of a live run's weights, kept readable while training goes on, without the model's code."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from shardwell.session.coordinator_client import CoordinatorClient
from shardwell.transport.rpc import StandingRpc
from shardwell.weights.unit_reader import PlacedUnit, UnitReader, unreachable
from shardwell_wire.errors import DeadlineError, UnavailableError, VersionGoneError
from shardwell_wire.run_identity import RunIdentity
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

_ATTEMPTS = 8
_CALL_MARGIN_S = 5.0


@dataclass(frozen=True)
class StoredParameter:
    """A parameter or buffer as the run stores it."""

    name: str
    """In the run; that in the model, if ``auto_wrap`` was told the model."""
    unit: PlacedUnit
    index: int
    """In the unit's layout."""

    @property
    def hollow(self) -> torch.Tensor:
        """A tensor of its shape and dtype, without memory."""
        described = self.unit.layout.parameters[self.index]
        return torch.empty(described.shape, dtype=getattr(torch, described.dtype), device="meta")


class PinnedVersion:
    """All parameters and buffers of one version of a run; from ``pinned_version``.

    Attributes:
        run: Name of the run.
        version: Committed steps.
        parameters: Of all units, in the order of the units.
        buffers: The persistent buffers of all sharded modules.
    """

    def __init__(self, weights: coordinator_pb2.DescribeWeightsResponse, reader: UnitReader) -> None:
        self.run, self.version = reader.run.name, weights.version
        self._reader = reader
        units = [PlacedUnit.from_proto(unit) for unit in weights.units]
        self.parameters = _stored(unit for unit in units if not unit.layout.holds_buffers)
        self.buffers = _stored(unit for unit in units if unit.layout.holds_buffers)

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters, then buffers, by name; holds one unit.

        Raises:
            VersionGoneError: A server had no memory left to keep the version.
        """
        unit, flat = None, torch.empty(0)
        for parameter in (*self.parameters, *self.buffers):
            if parameter.unit is not unit:
                flat = torch.empty(0)  # two units are never held at once
                unit, flat = parameter.unit, self._read(parameter.unit)
            yield parameter.name, parameter.unit.view(flat, parameter.index).clone()  # a view would keep the unit

    def _read(self, unit: PlacedUnit) -> torch.Tensor:
        try:
            return self._reader.read(unit)
        except VersionGoneError as error:
            raise VersionGoneError(
                f"version {self.version} of run {self.run!r} was lost while it was read: training is at version "
                f"{error.data.get('newest', '?')}, and a shard server had no memory left to keep unit "
                f"{unit.layout.unit!r} of version {self.version} in a copy. Raise the servers' --memory-budget, add "
                "servers, or try again when less goes on",
                **error.data,
            ) from error


def _stored(units: Iterable[PlacedUnit]) -> Sequence[StoredParameter]:
    return [
        StoredParameter(parameter.name, unit, index)
        for unit in units
        for index, parameter in enumerate(unit.layout.parameters)
    ]


@contextmanager
def pinned_version(coordinator: CoordinatorClient, run: str, *, timeout_s: float) -> Iterator[PinnedVersion]:
    """Holds the newest version of a run of which all servers can be told in time; training goes on.

    While steps are committed faster than servers are told, a version to come is held: each server is asked for it
    before it exists.

    Args:
        coordinator: Knows the run.
        run: Its name.
        timeout_s: How long to wait for a version that is about to come, and for each read.

    Raises:
        NotFoundError: No such run.
        StepStateError: It has no weights yet.
        UnavailableError: A server that holds a part of it cannot be reached from here.
        VersionGoneError: No version lasted long enough to be held.
    """
    ahead, target = 1, None
    tried: list[int] = []
    for _ in range(_ATTEMPTS):
        with ExitStack() as stack:
            try:
                held = _hold(coordinator, run, target, timeout_s, stack)
            except VersionGoneError as error:
                newest = int(error.data["newest"])
                tried.append(newest if target is None else target)
                target, ahead = newest + ahead, ahead * 2
                continue
            except DeadlineError:
                if target is None:
                    raise
                target, ahead = None, 1  # training has paused: the newest version stays
                continue
            yield held
            return
    raise VersionGoneError(
        f"run {run!r} commits steps faster than its shard servers can be told to keep one: versions "
        f"{', '.join(map(str, tried))} were over in less time than that took",
        newest=tried[-1] if tried else None,
    )


def _hold(
    coordinator: CoordinatorClient, run: str, target: int | None, timeout_s: float, stack: ExitStack
) -> PinnedVersion:
    """One attempt at the version ``target``, or the newest; everything that was opened is closed with the stack."""
    newest = describe_weights(coordinator, run)
    version = newest.version if target is None else target
    owners = {shard.address: shard for unit in newest.units for shard in unit.shards}
    asking = stack.enter_context(ThreadPoolExecutor(len(owners) + 1))
    identity, credentials = RunIdentity(run, newest.run_id), coordinator.credentials
    # Closed first: ends what is asked.
    reader = stack.enter_context(UnitReader(identity, version, timeout_s=timeout_s, credentials=credentials))
    # All are asked at once: of a version to come, before it exists.
    described = None
    if target is not None:
        described = asking.submit(describe_weights, coordinator, run, version=target, wait_s=timeout_s)
    opened = [asking.submit(_open, reader, shard, timeout_s) for shard in owners.values()]
    outcomes = [_outcome(future.result) for future in opened]
    for outcome in outcomes:
        if isinstance(outcome, StandingRpc):
            stack.callback(outcome.end)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return PinnedVersion(newest if described is None else described.result(), reader)


def _open(reader: UnitReader, shard: common_pb2.ShardRange, timeout_s: float) -> StandingRpc:
    request = shard_pb2.PinVersionRequest(
        run=reader.run.name, run_id=reader.run.run_id, version=reader.version, wait_s=timeout_s
    )
    try:
        return reader.client(shard.address).open("PinVersion", request, timeout_s=timeout_s + _CALL_MARGIN_S)
    except UnavailableError as error:
        raise unreachable(shard, error) from error


def _outcome(action: Callable[[], StandingRpc]) -> StandingRpc | Exception:
    try:
        return action()
    except Exception as error:
        return error


def describe_weights(
    coordinator: CoordinatorClient, run: str, *, version: int | None = None, wait_s: float = 0.0
) -> coordinator_pb2.DescribeWeightsResponse:
    """Units and buffers of a version, or of the newest; asks again while the coordinator is busy waiting.

    Raises:
        VersionGoneError: A newer version is committed.
        DeadlineError: It was not committed in time.
    """
    give_up = time.monotonic() + wait_s
    while True:
        left_s = max(0.0, give_up - time.monotonic())
        request = coordinator_pb2.DescribeWeightsRequest(run=run, version=version, wait_s=left_s)
        try:
            answer: coordinator_pb2.DescribeWeightsResponse = coordinator.call(
                "DescribeWeights", request, timeout_s=left_s + _CALL_MARGIN_S
            )
            return answer
        except DeadlineError:
            if time.monotonic() >= give_up:
                raise
