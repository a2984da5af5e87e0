"""How a unit comes to be in a run: it is declared, and one trainer sends its initial values and has them published."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.traffic import RemoteUnit
from shardwell.module.store import InitialValues
from shardwell.session.membership import Membership
from shardwell_wire.errors import DeadlineError, ShardwellError, UnavailableError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

logger = logging.getLogger(__name__)

_UPLOAD_THREADS = 8
"""Each holds a piece of the values."""

_RETRY_S = 2.0
"""For how long an upload is repeated before the coordinator is asked where the unit lives now."""

_FIRST_PUBLISH_POLL_S, _LONGEST_PUBLISH_POLL_S = 0.005, 0.25


class UnitDeclarations:
    """Declares units on behalf of one trainer.

    Args:
        membership: Its place in the run.
        wait_limit_s: How long another trainer may take to send initial values, and a server to take them.
    """

    def __init__(self, membership: Membership, wait_limit_s: float) -> None:
        self._membership, self._wait_limit_s = membership, wait_limit_s

    def declare(
        self,
        layout: UnitLayout,
        values: InitialValues,
        step: int,
        reach: Callable[[coordinator_pb2.DeclareUnitResponse], tuple[RemoteShard, ...]],
    ) -> RemoteUnit:
        """Returns once the run has initial values for the unit.

        Args:
            layout: The unit, as every trainer declares it.
            values: Sent if the coordinator asks this trainer to.
            step: The step in flight.
            reach: Connects to the shards that the coordinator names.

        Raises:
            DeadlineError: The trainer that should send initial values did not in time.
        """
        declared = self._ask(layout, step)
        give_up, delay = time.monotonic() + self._wait_limit_s, _FIRST_PUBLISH_POLL_S
        # The values are kept until the unit is published: whoever should have sent them may be lost,
        # and then this trainer is asked to.
        while not declared.HasField("version"):
            if declared.initialize:
                try:
                    unit = RemoteUnit(declared.unit_index, layout, reach(declared))
                    self._initialize(unit, values, declared.epoch)
                    return unit
                except ShardwellError as error:
                    former, declared = declared, self._ask(layout, step)
                    if declared.shards == former.shards and not isinstance(error, UnavailableError):
                        raise
                    if time.monotonic() > give_up:
                        raise
                    logger.warning("unit %r: sending the initial values again: %s", layout.unit, error)
                    continue
            if time.monotonic() > give_up:
                raise DeadlineError(
                    f"waited {self._wait_limit_s:.0f} s for the initial values of unit {layout.unit!r} "
                    "from the trainer that plays the lowest logical rank",
                    unit=layout.unit,
                )
            time.sleep(delay)
            delay = min(delay * 2, _LONGEST_PUBLISH_POLL_S)
            declared = self._ask(layout, step)  # a unit without values may be placed on other servers meanwhile
        return RemoteUnit(declared.unit_index, layout, reach(declared))

    def _ask(self, layout: UnitLayout, step: int) -> coordinator_pb2.DeclareUnitResponse:
        request = coordinator_pb2.DeclareUnitRequest(
            context=self._membership.context(step), trainer=self._membership.trainer, unit=layout.to_proto()
        )
        response: coordinator_pb2.DeclareUnitResponse = self._membership.call("DeclareUnit", request)
        return response

    def _initialize(self, unit: RemoteUnit, values: InitialValues, epoch: int) -> None:
        """Sends the values to every owner and has them published."""
        context = self._membership.context(0, epoch=epoch)
        with ThreadPoolExecutor(min(_UPLOAD_THREADS, max(1, len(unit.shards)))) as uploads:
            list(uploads.map(lambda shard: self._upload(unit, shard, values, epoch), unit.shards))
        self._membership.call(
            "PublishInitialUnit",
            coordinator_pb2.PublishInitialUnitRequest(
                context=context, trainer=self._membership.trainer, unit=unit.layout.unit
            ),
        )

    def _upload(self, unit: RemoteUnit, shard: RemoteShard, values: InitialValues, epoch: int) -> None:
        segments = [
            segment
            for segment in unit.layout.segments(shard.start_bytes, shard.stop_bytes)
            if segment.parameter_index not in values.draws
        ]
        header = shard_pb2.InitializeUnitHeader(
            context=self._membership.context(0, epoch=epoch),
            unit=unit.layout.unit,
            start_bytes=shard.start_bytes,
            stop_bytes=shard.stop_bytes,
            draws=values.draws.values(),
        )
        # Not under the server's guard, which waits for the server: a unit without values may get another owner.
        shard.server.client.initialize(
            header,
            lambda: itertools.chain.from_iterable(map(values.read, segments)),
            sum(segment.size_bytes for segment in segments),
            timeout_s=self._wait_limit_s,
            retry_for_s=min(_RETRY_S, self._wait_limit_s),
        )
