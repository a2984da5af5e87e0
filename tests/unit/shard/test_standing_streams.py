"""Limits on transport sessions and pinned versions, in total and per connection."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from shardwell_server.shard.requests import client_streams
from shardwell_wire.errors import CapacityError


def test_exceeding_a_limit_is_rejected_and_an_ended_stream_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_streams, "MAX_OPEN_STREAMS", 5)
    monkeypatch.setattr(client_streams, "MAX_OPEN_STREAMS_PER_PEER", 3)
    standing = client_streams.StandingStreams()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(standing.count("a"))
        with pytest.raises(CapacityError, match=r"3 transport sessions .* of this connection .*, 3 of all .* 3 and 5"):
            stack.enter_context(standing.count("a"))
        for peer in "bc":
            stack.enter_context(standing.count(peer))
        with pytest.raises(CapacityError, match="0 transport sessions"):
            stack.enter_context(standing.count("d"))
    assert not standing._by_peer
