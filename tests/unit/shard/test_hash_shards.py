"""Hashes of a server's shards while shards come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from shardwell_server.shard.requests import backups
from shardwell_server.shard.shard_spec import Role
from shardwell_server.shard.state.runs import HostedRun
from shardwell_wire.v1 import shard_pb2


def test_shards_that_are_released_meanwhile_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(shard: Any) -> Any:
        assert (shard.unit, 0) in run.shards, "a released shard has no values"
        return SimpleNamespace(tensors=lambda: [("p|values|0", torch.ones(3))])

    def shard(unit: str, index: int, role: Role) -> Any:
        return SimpleNamespace(
            unit=unit,
            index=index,
            start_bytes=0,
            stop_bytes=12,
            role=role,
            version=1,
            unchanging=asyncio.Lock(),
            memory=SimpleNamespace(in_thread=release_the_backup),
        )

    async def release_the_backup(compute: Callable[[], int]) -> int:
        run.shards.pop(("b", 0), None)
        return compute()

    primary, backup = shard("a", 0, Role.PRIMARY), shard("b", 1, Role.BACKUP)
    run = SimpleNamespace(published=[primary], backups=[backup], shards={("a", 0): primary, ("b", 0): backup})
    monkeypatch.setattr(backups, "export", export)
    request = shard_pb2.HashShardsRequest(version=1)
    response = asyncio.run(backups.hash_shards(cast(HostedRun, run), request))
    assert [each.unit for each in response.shards] == ["a"]
