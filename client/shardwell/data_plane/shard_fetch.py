"""A fetch of one shard, before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwell.transport.base import NearlyDone
from shardwell.transport.fetch_batch import Arrived, SmallFetch
from shardwell.transport.server_connection import ServerConnection


class ShardFetch:
    """Fetches one version of a shard when it is called.

    Args:
        alone: Fetches the shard by itself.
        server: The server that owns the shard.
        small: The same fetch as part of a batch. None: the values are not streamed.
        wait_limit_s: The longest wait for the version.
    """

    def __init__(
        self,
        alone: Callable[[NearlyDone], int],
        server: ServerConnection,
        small: SmallFetch | None,
        *,
        wait_limit_s: float,
    ) -> None:
        self._alone, self.server, self.small, self.wait_limit_s = alone, server, small, wait_limit_s

    def __call__(self, nearly_done: NearlyDone) -> int:
        """Fetches the shard by itself; returns the version."""
        return self._alone(nearly_done)


def fetch_together(fetches: Sequence[ShardFetch], arrived: Arrived) -> None:
    """Fetches shards of one server with one request, for ``Batches``."""
    first, small = fetches[0], [each.small for each in fetches if each.small is not None]
    first.server.fetch_batch(small, arrived, wait_limit_s=first.wait_limit_s)
