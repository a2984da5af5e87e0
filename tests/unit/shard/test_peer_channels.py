"""Channels to other shard servers: reused, and closed when too many are idle."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shardwell_server.shard.requests import peers
from shardwell_server.shard.requests.peers import GrpcPeers
from shardwell_wire.v1 import shard_pb2


class Channel:
    """Stands for a channel. Its calls end when ``go`` is set."""

    def __init__(self, address: str, go: asyncio.Event) -> None:
        self.address, self.closed, self._go = address, False, go

    def unary_unary(self, *_: Any, **__: Any) -> Any:
        async def call(request: Any, **_: Any) -> str:
            await self._go.wait()
            return self.address

        return call

    async def close(self) -> None:
        self.closed = True


def test_idle_channels_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[Channel]()

    async def check() -> None:
        go = asyncio.Event()

        def open_channel(address: str, tls: object) -> Channel:
            opened.append(Channel(address, go))
            return opened[-1]

        monkeypatch.setattr(peers, "open_aio_channel", open_channel)
        monkeypatch.setattr(peers, "MAX_IDLE_CHANNELS", 2)
        caller = GrpcPeers()

        def call(address: str) -> asyncio.Future[Any]:
            return asyncio.ensure_future(
                caller.call(address, "ConfirmBackups", shard_pb2.ConfirmBackupsRequest(), timeout_s=1.0)
            )

        waiting = [call(address) for address in "abcd"]
        await asyncio.sleep(0)
        assert not [each for each in opened if each.closed], "channels with calls stay"
        go.set()
        assert await asyncio.gather(*waiting) == ["a", "b", "c", "d"]
        assert [each.address for each in opened if each.closed] == ["a", "b"]
        assert [await call(address) for address in "cea"] == ["c", "e", "a"]
        assert [each.address for each in opened] == ["a", "b", "c", "d", "e", "a"], "c was not opened again"
        assert [each.address for each in opened if each.closed] == ["a", "b", "c", "d"]
        await caller.close()
        assert all(each.closed for each in opened)

    asyncio.run(check())
