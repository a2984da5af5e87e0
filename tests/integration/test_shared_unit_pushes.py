"""A unit that several pipeline stages push: one contribution per data rank and stage, added in this order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from shardwell_wire.errors import IncompleteStepError, InvalidRequestError
from shardwell_wire.model.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2
from tests.support.shard_server import OneUnit, ShardServer, error_of, layout_of, unit

STAGES = (1, 3)
LAYOUT = replace(layout_of(a=((1500,), "float32"), b=((77,), "bfloat16")), pp_ranks=STAGES)
BIG = 2.0**24


def gradients(*values: float) -> list[torch.Tensor]:
    """Returns a gradient of each parameter that has these values in turn."""
    return [
        torch.tensor(values, dtype=dtype).repeat(count)[:count]
        for dtype, count in ((torch.float32, 1500), (torch.bfloat16, 77))
    ]


def prepare(one: OneUnit, step: int, attempts: Sequence[int], parts: Sequence[int] = (1, 1)) -> None:
    """Prepares a step in which each data rank pushed this number of parts in each stage."""
    ranks = [
        shard_pb2.RankManifest(
            dp_rank=dp_rank,
            attempt=attempt,
            units=[
                common_pb2.UnitParts(unit_index=0, part_count=count, pp_rank=stage)
                for stage, count in zip(STAGES, parts, strict=True)
            ],
        )
        for dp_rank, attempt in enumerate(attempts)
    ]
    request = shard_pb2.PrepareStepRequest(context=one.context(step), ranks=ranks, dp=one.dp)
    one.server.call("PrepareStep", request)


def test_stages_of_a_rank_are_added_before_the_ranks(server: ShardServer) -> None:
    """Sums of these float32 numbers depend on their order: 2**24 + 1 is 2**24."""
    one = unit(server, LAYOUT, dp=2)
    for stage, rank, value in ((3, 1, BIG), (3, 0, 1.0), (1, 1, -BIG), (1, 0, 1.0)):
        one.push(gradients(value), rank=rank, pp_rank=stage)
    prepare(one, 0, (0, 0))
    one.update(0)
    for value in one.gather(1)[1]:
        assert set(value.tolist()) == {-1.0}, "(1 + 1) + (-2**24 + 2**24)"


def test_16_bit_gradients_are_rounded_after_all_sums(server: ShardServer) -> None:
    """1 + 2**-8 is 1 in bfloat16, but 1 + 2**-7 is not."""
    one = unit(server, LAYOUT, dp=2)
    for rank, stage, value in ((0, 1, 1.0), (0, 3, 2.0**-8), (1, 1, 2.0**-8), (1, 3, 0.0)):
        one.push(gradients(value), rank=rank, pp_rank=stage)
    prepare(one, 0, (0, 0))
    one.update(0)
    assert [set(value.tolist()) for value in one.gather(1)[1]] == [{-(0.5 + 2.0**-8)}] * 2


def test_the_parts_of_each_stage_are_numbered_from_0(server: ShardServer) -> None:
    one = unit(server, LAYOUT)
    one.push(gradients(1.0), pp_rank=3)
    one.push(gradients(2.0), pp_rank=3, part=1)
    one.push(gradients(4.0), pp_rank=1)
    prepare(one, 0, (0,), parts=(1, 2))
    one.update(0)
    assert [set(value.tolist()) for value in one.gather(1)[1]] == [{-7.0}] * 2


def test_a_stage_without_a_gradient_adds_nothing(server: ShardServer) -> None:
    one = unit(server, LAYOUT)
    one.push(gradients(3.0), pp_rank=3)
    prepare(one, 0, (0,), parts=(0, 1))
    one.update(0)
    assert [set(value.tolist()) for value in one.gather(1)[1]] == [{-3.0}] * 2


def test_the_mean_waits_for_all_stages_and_names_the_missing_one(server: ShardServer) -> None:
    one = unit(server, LAYOUT)
    one.push(gradients(1.0), pp_rank=3)
    assert server.evaluate(lambda: one.shard.gradient.reduced) is None
    error = error_of(lambda: prepare(one, 0, (0,)))
    assert isinstance(error, IncompleteStepError)
    assert "rank 0, pipeline rank 1: expected 1 parts of attempt 0, have none" in str(error)
    step = server.call("DescribeStep", shard_pb2.DescribeStepRequest(run="r"))
    assert (list(step.shards[0].present_dp_ranks), list(step.shards[0].missing_dp_ranks)) == ([], [0])
    one.push(gradients(1.0), pp_rank=1)
    server.until(lambda: one.shard.gradient.reduced is not None, "the gradient is reduced")


def test_a_restarted_item_drops_the_gradients_of_all_its_stages(server: ShardServer) -> None:
    one = unit(server, LAYOUT, dp=2)
    for rank in range(2):
        for stage in STAGES:
            one.push(gradients(1.0), rank=rank, pp_rank=stage)
    one.fence(0, (1, 1, 1))
    assert server.evaluate(lambda: sorted(one.shard.gradient.contributions.by_rank)) == [0, 1]
    for stage in STAGES:
        one.push(gradients(5.0), rank=1, attempt=1, pp_rank=stage)
    prepare(one, 0, (0, 1))
    one.update(0)
    assert [set(value.tolist()) for value in one.gather(1)[1]] == [{-6.0}] * 2


def test_duplicates_are_found_by_stage(server: ShardServer) -> None:
    one = unit(server, LAYOUT)
    found = [one.push(gradients(1.0), pp_rank=stage).duplicate for stage in (1, 3, 1, 3)]
    assert found == [False, False, True, True]


def test_other_stages_may_not_push(server: ShardServer) -> None:
    one = unit(server, LAYOUT)
    error = error_of(lambda: one.push(gradients(1.0), pp_rank=2))
    assert isinstance(error, InvalidRequestError)
    assert "pp_rank is 2, but unit 'u' belongs to the pipeline ranks [1, 3]" in str(error)


def test_a_shared_unit_reserves_memory_for_all_contributions(server: ShardServer) -> None:
    shared, plain = (
        unit(server, replace(layout, unit=name), dp=2, index=index).shard.spec
        for index, (name, layout) in enumerate((("x", LAYOUT), ("y", replace(LAYOUT, pp_ranks=(0,)))))
    )
    assert (shared.max_contributions, plain.max_contributions) == (4, 2)
    reserved = server.evaluate(lambda: {key[1]: at.need_bytes for key, at in server.store.memory._reservations.items()})
    assert reserved["x"] - reserved["y"] == 2 * LAYOUT.size_bytes


@pytest.mark.parametrize("pp_ranks", [(), (1, 1), (2, 1)])
def test_invalid_pipeline_ranks_are_refused(pp_ranks: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="expected strictly rising ranks"):
        replace(LAYOUT, pp_ranks=pp_ranks)


def test_buffers_belong_to_one_stage() -> None:
    with pytest.raises(InvalidRequestError, match=r"of buffers has pp_ranks \[0, 1\]: expected one"):
        UnitLayout("b", LAYOUT.parameters, kind="buffers", pp_ranks=(0, 1))
