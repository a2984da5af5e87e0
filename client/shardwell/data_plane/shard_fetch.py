"""A fetch of one shard, before it is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwell.transport.base import NearlyDone, ignore
from shardwell.transport.fetch_batch import Arrived, SmallFetch
from shardwell.transport.server_connection import ServerConnection

End = Callable[..., None]
"""Called once when a fetch has ended, with the version or with 0 and the error."""


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


class PendingFetch:
    """A small fetch of one shard as a part of a batch. A ``BatchedFetch``.

    Args:
        fetch: The fetch.
        small: The same fetch as part of a message.
        size_bytes: Size of the shard.
        end: See ``BatchedFetch.end``.
    """

    __slots__ = ("_fetch", "end", "size_bytes", "small")

    def __init__(self, fetch: ShardFetch, small: SmallFetch, size_bytes: int, end: End) -> None:
        self._fetch, self.small, self.size_bytes, self.end = fetch, small, size_bytes, end

    @property
    def server(self) -> ServerConnection:
        """The server that owns the shard."""
        return self._fetch.server

    @property
    def wait_limit_s(self) -> float:
        """The longest wait for the version."""
        return self._fetch.wait_limit_s

    def fetch_alone(self) -> int:
        """See ``BatchedFetch``."""
        return self._fetch(ignore)


def fetch_together(fetches: Sequence[PendingFetch], arrived: Arrived) -> None:
    """Fetches shards of one server with one request, for ``FetchBatches``."""
    first = fetches[0]
    first.server.fetch_batch([each.small for each in fetches], arrived, wait_limit_s=first.wait_limit_s)
