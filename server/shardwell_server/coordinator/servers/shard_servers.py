"""Telling the shard servers of a run something, each in its own words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from google.protobuf.message import Message

from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.servers.lost_shards import problems
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_wire.errors import ConflictError, ShardwellError, StaleEpochError, UnavailableError
from shardwell_wire.v1 import common_pb2


class ShardServers:
    """The shard servers as the coordinator talks to them.

    Args:
        state: Where they are.
        calls: How they are reached.
    """

    def __init__(self, state: CoordinatorState, calls: ShardCalls) -> None:
        self._state, self._calls = state, calls

    def context(self, run: Run, step: int) -> common_pb2.RequestContext:
        """What the coordinator's requests carry."""
        return common_pb2.RequestContext(run=run.name, run_id=run.identity.run_id, epoch=self._state.term, step=step)

    def check(self, run: Run) -> None:
        """Raises ConflictError or UnavailableError if a server has lost shards of the run, or is silent."""
        for problem in problems(run, self._state.cluster):
            raise problem

    async def call(self, server_id: str, rpc_name: str, request: Message, *, retry_for_s: float | None = None) -> Any:
        """Calls one server; errors name it. Retries for a lease's time unless told otherwise."""
        retry = self._state.settings.lease_s if retry_for_s is None else retry_for_s
        address = self._state.cluster.require(server_id).address
        try:
            return await self._calls.call(address, rpc_name, request, retry_for_s=retry)
        except StaleEpochError as error:
            raise ConflictError(
                f"server {server_id!r}: {rpc_name}: {error}: it obeys a later coordinator than this one of term "
                f"{self._state.term}; end that one, or restart the server if this coordinator has lost its state",
                server=server_id,
            ) from error
        except ShardwellError as error:
            raise type(error)(
                f"server {server_id!r}: {rpc_name}: {error}", **{**error.data, "server": server_id}
            ) from error

    async def call_all(
        self, server_ids: Iterable[str], rpc_name: str, request: Callable[[str], Message]
    ) -> dict[str, Any]:
        """Calls several servers at once and waits for all.

        Returns:
            The responses by server.

        Raises:
            ShardwellError: What one of them raised; rather one that waiting does not mend.
        """
        names = list(server_ids)
        outcomes = await asyncio.gather(
            *(self.call(name, rpc_name, request(name)) for name in names), return_exceptions=True
        )
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, UnavailableError))
        return dict(zip(names, outcomes, strict=True))
