"""A shard with its primary on one server and its backup on another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwell_server.shard.unit.unit_shard import UnitShard
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import ADAM, PLAIN, OneUnit, ShardServer

BACKUP = shard_pb2.SHARD_ROLE_BACKUP


class Pair:
    """A shard with its primary on one server and its backup on another."""

    def __init__(
        self, servers: Sequence[ShardServer], layout: Any = PLAIN, *, initial: Any = None, **options: Any
    ) -> None:
        self.primary = OneUnit(servers[0], layout, **options).begin(initial)
        self.backup = OneUnit(servers[1], layout, **options)
        self.reservation = 0

    @property
    def both(self) -> tuple[OneUnit, OneUnit]:
        return self.primary, self.backup

    @property
    def reference(self) -> shard_pb2.ShardReference:
        one = self.primary
        return shard_pb2.ShardReference(unit=one.layout.unit, start_bytes=one.start, stop_bytes=one.stop)

    def copy(self) -> Any:
        self.reservation += 1
        self.backup.reserve(role=BACKUP, placement=self.reservation)
        request = shard_pb2.CopyShardRequest(
            context=self.primary.context(),
            shard=self.reference,
            placement=self.reservation,
            target_server_id="backup",
            target_address=self.backup.server.address,
        )
        return self.primary.server.call("CopyShard", request)

    def push(self, step: int, *, attempt: int = 0, scale: float = 1.0) -> None:
        for rank in range(self.primary.dp):
            self.primary.push(gradients(self.primary, step, rank, scale), step=step, rank=rank, attempt=attempt)

    def update(self, step: int, request: shard_pb2.UpdateRequest | None = None) -> list[Any]:
        request = request or adam(self.primary, step)
        return [one.server.call("Update", request) for one in self.both]

    def train(self, step: int, **options: Any) -> Any:
        self.push(step)
        answer = self.primary.prepare(step, **options)
        self.update(step)
        return answer

    def promote(self, step: int, *, placement: int = 1, fences: Sequence[tuple[int, int, int]] = ()) -> None:
        ranks = [shard_pb2.RankFence(dp_rank=rank, epoch=epoch, attempt=attempt) for rank, epoch, attempt in fences]
        request = shard_pb2.PromoteShardsRequest(
            context=self.backup.context(step), placement=placement, shards=[self.reference], fences=ranks
        )
        self.backup.server.call("PromoteShards", request)

    def hashes(self) -> list[Any]:
        return [hash_of(one) for one in self.both]

    def assert_equal(self, version: int) -> None:
        first, second = self.hashes()
        assert (first.role, second.role) == (shard_pb2.SHARD_ROLE_PRIMARY, BACKUP)
        assert first.version == second.version == version
        assert list(first.tensors) == list(second.tensors)


def hash_of(one: OneUnit) -> Any:
    answer = one.server.call("HashShards", shard_pb2.HashShardsRequest(context=one.context()))
    return next(shard for shard in answer.shards if (shard.unit, shard.start_bytes) == (one.layout.unit, one.start))


def gradients(one: OneUnit, step: int, rank: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [(torch.randn(value.numel(), generator=generator) * scale).to(value.dtype) for value in one.zeros()]


def adam(one: OneUnit, step: int, *, groups: Sequence[int] | None = None, **fields: Any) -> shard_pb2.UpdateRequest:
    optimizer = common_pb2.OptimizerStep(
        algorithm="adamw",
        groups=[common_pb2.ParameterGroup(hyperparameters=ADAM)],
        units=[common_pb2.UnitGroups(unit_index=one.index, group_indices=groups or [0] * len(one.layout.parameters))],
        **fields,
    )
    return shard_pb2.UpdateRequest(context=one.context(step), optimizer=optimizer, clip_coefficient=0.5)


def shard_on(one: OneUnit) -> UnitShard:
    return one.server.evaluate(lambda: one.shard)


def straight(layout: Any, dp: int, steps: int, **options: Any) -> Any:
    """Hashes of a shard that was trained without a backup."""
    with ShardServer() as server:
        one = OneUnit(server, layout, dp=dp, **options).begin()
        for step in range(steps):
            for rank in range(dp):
                one.push(gradients(one, step, rank), step=step, rank=rank)
            one.prepare(step)
            server.call("Update", adam(one, step))
        return hash_of(one).tensors
