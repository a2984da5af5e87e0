"""Streams that stay open are counted, for all clients and per connection."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from shardwell_server.shard.requests import standing
from shardwell_server.shard.requests.standing import StandingStreams
from shardwell_wire.errors import CapacityError


def test_the_limits_are_named_and_a_stream_that_ends_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing, "MAX_STREAMS", 5)
    monkeypatch.setattr(standing, "MAX_STREAMS_PER_PEER", 3)
    streams = StandingStreams()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(streams.one("a"))
        with pytest.raises(CapacityError, match=r"3 transport sessions .* of this connection .*, 3 of all .* 3 and 5"):
            stack.enter_context(streams.one("a"))
        for peer in "bc":
            stack.enter_context(streams.one(peer))
        with pytest.raises(CapacityError, match="0 transport sessions"):
            stack.enter_context(streams.one("d"))
    assert not streams._by_peer
