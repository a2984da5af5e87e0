"""Several shards of one unit on one server: every request finds its shard by its range."""

from __future__ import annotations

import pytest
import torch

from shardwell_wire.errors import IncompleteStepError, InvalidRequestError, NotFoundError, UnitMismatchError
from shardwell_wire.model.layout import BLOCK_BYTES
from shardwell_wire.v1 import shard_pb2
from tests.support.shard_server import PLAIN, OneUnit, ShardServer, error_of, train

CUT = 10 * BLOCK_BYTES


class TwoShards:
    """Two shards of one unit on one server."""

    def __init__(self, server: ShardServer, dp: int = 2) -> None:
        self.server = server
        parts = ((0, CUT), (2 * CUT, PLAIN.size_bytes))
        self.shards = [OneUnit(server, PLAIN, dp=dp, part=part) for part in parts]
        for one in self.shards:
            one.reserve()
            one.initialize(one.filled(float(one.start)))
        self.shards[0].publish()

    def push(self, step: int) -> None:
        for one in self.shards:
            for rank in range(one.dp):
                one.push(one.filled(1.0 + rank + one.start), step=step, rank=rank)


def test_each_request_finds_its_shard(server: ShardServer) -> None:
    two = TwoShards(server)
    for step in range(2):
        two.push(step)
        answer = two.shards[0].prepare(step)
        assert [norm.unit_index for norm in answer.units] == [0, 0]
        two.shards[0].update(step, algorithm="adamw")
    for one in two.shards:
        assert one.gather(2)[0] == 2
    listed = server.call("ListShards", shard_pb2.ListShardsRequest(run="r")).shards
    assert [(shard.start_bytes, shard.stop_bytes) for shard in listed] == [(one.start, one.stop) for one in two.shards]
    for one in two.shards:
        request = shard_pb2.DescribeShardRequest(run="r", unit=PLAIN.unit, start_bytes=one.start)
        assert server.call("DescribeShard", request).summary.start_bytes == one.start


def test_the_values_are_those_of_one_shard_per_server(server: ShardServer) -> None:
    two = TwoShards(server)
    for step in range(3):
        two.push(step)
        two.shards[0].prepare(step)
        two.shards[0].update(step, algorithm="adamw")
    for one in two.shards:
        with ShardServer() as other:
            alone = OneUnit(other, PLAIN, dp=2, part=(one.start, one.stop)).begin(one.filled(float(one.start)))
            for step in range(3):
                for rank in range(2):
                    alone.push(alone.filled(1.0 + rank + one.start), step=step, rank=rank)
                alone.prepare(step)
                alone.update(step, algorithm="adamw")
            expected = alone.gather(3)[1]
        assert all(map(torch.equal, one.gather(3)[1], expected))


def test_a_missing_part_of_either_shard_is_named(server: ShardServer) -> None:
    two = TwoShards(server, dp=1)
    two.shards[1].push(two.shards[1].filled(1.0))
    assert "expected 1 parts" in str(error_of(lambda: two.shards[0].prepare(0)))
    assert isinstance(error_of(lambda: two.shards[0].prepare(0)), IncompleteStepError)
    two.shards[0].push(two.shards[0].filled(1.0))
    two.shards[0].prepare(0)


def test_a_request_without_a_range_is_rejected(server: ShardServer) -> None:
    two = TwoShards(server)
    request = two.shards[0].gather_request(0, start_bytes=0, stop_bytes=0)
    stub = server.client.byte_response_stub("Gather")
    error = error_of(lambda: list(stub(request, timeout=20.0)))
    assert isinstance(error, InvalidRequestError) and "several shards" in str(error)
    between = two.shards[0].gather_request(0, start_bytes=CUT, stop_bytes=2 * CUT)
    assert isinstance(error_of(lambda: list(stub(between, timeout=20.0))), NotFoundError)


def test_peek_reads_every_shard_of_a_parameter(server: ShardServer) -> None:
    two = TwoShards(server)
    first = server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="u.a"))
    assert list(first.shard_start_bytes) == [0, 2 * CUT]
    second = server.call("Peek", shard_pb2.PeekRequest(run="r", parameter="u.a", shard_start_bytes=2 * CUT))
    assert (first.start_element, second.start_element) == (0, 2 * CUT // 4)
    assert second.values[0] == two.shards[1].start
    wrong = shard_pb2.PeekRequest(run="r", parameter="u.a", shard_start_bytes=CUT)
    assert "start at 0, 81920" in str(error_of(lambda: server.call("Peek", wrong)))


def test_overlapping_shards_are_rejected_and_memory_is_reserved_per_shard(server: ShardServer) -> None:
    two = TwoShards(server)
    overlapping = OneUnit(server, PLAIN, dp=2, part=(BLOCK_BYTES, 3 * BLOCK_BYTES))
    assert isinstance(error_of(overlapping.reserve), UnitMismatchError)
    reserved = server.evaluate(lambda: server.store.memory.reserved_bytes)
    between = OneUnit(server, PLAIN, dp=2, part=(CUT, 2 * CUT))
    between.reserve()
    assert server.evaluate(lambda: server.store.memory.reserved_bytes) > reserved
    server.call(
        "ReleaseUnit", shard_pb2.ReleaseUnitRequest(context=two.shards[0].context(), unit=PLAIN.unit, placement=0)
    )
    assert not server.evaluate(lambda: server.store.run("r").shards)
    assert server.evaluate(lambda: server.store.memory.reserved_bytes) == 0


@pytest.mark.parametrize("dp", [1, 2])
def test_one_shard_trains_alone_while_another_is_not_published(server: ShardServer, dp: int) -> None:
    first = OneUnit(server, PLAIN, dp=dp, part=(0, CUT)).begin()
    second = OneUnit(server, PLAIN, dp=dp, part=(CUT, PLAIN.size_bytes))
    second.reserve()
    train(first, 0)
    second.initialize(second.filled(1.0))
    assert first.gather(1)[0] == 1
