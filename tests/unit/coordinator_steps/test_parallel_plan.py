"""The parallel plan of a run: the first trainer sets it, others must have the same, and it survives a restart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwell_wire.errors import InvalidRequestError, RunMismatchError, StaleEpochError
from shardwell_wire.model.names import MAX_PLAN_BYTES, MAX_PLAN_MODELS, MAX_PLAN_ROWS
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.coordinator import Harness, Trainer

WORLD = World(dp=2, pp=2)


def plan(num_micro_batches: int = 4, style: str = "column") -> coordinator_pb2.ParallelPlan:
    collective = coordinator_pb2.PlannedCollective(operation="all_reduce", phase="forward", bytes_per_step=64)
    layers = [
        coordinator_pb2.PlannedLayers(
            name=name, count=2, kind="mlp", class_name="Linear", style=style, collectives=[collective]
        )
        for name in ("blocks.*.up", "blocks.*.down")
    ]
    stages = [
        coordinator_pb2.PlannedStage(pp_rank=rank, first_layer=f"blocks.{2 * rank}", layers=layers) for rank in (0, 1)
    ]
    model = coordinator_pb2.ModelPlan(
        model="GPT", schedule="1F1B", num_micro_batches=num_micro_batches, micro_batch_shape=[2, 8], stages=stages
    )
    return coordinator_pb2.ParallelPlan(models=[model])


async def declare(trainer: Trainer, declared: coordinator_pb2.ParallelPlan) -> None:
    await trainer.rpcs.call("DeclareParallelPlan", context=trainer.context(0), trainer=trainer.name, plan=declared)


async def test_first_plan_belongs_to_the_run_and_survives_a_restart(cluster: Harness) -> None:
    first, *others = await cluster.team(*"abcd", world=WORLD)
    assert not (await cluster.call("DescribeWorld", run="r")).HasField("parallel_plan")
    await declare(first, plan())
    await cluster.restart()
    assert (await cluster.call("DescribeWorld", run="r")).parallel_plan == plan()
    for trainer in (first, *others):
        await declare(trainer, plan())
    with pytest.raises(RunMismatchError):
        await declare(others[0], plan(8))
    assert (await cluster.call("DescribeWorld", run="r")).parallel_plan == plan()


async def test_script_without_a_plan_is_refused_after_one_with_a_plan_and_the_other_way_round(cluster: Harness) -> None:
    with_plan, without = await cluster.team("a", "b", world=World(dp=1, pp=2))
    await declare(with_plan, plan())
    with pytest.raises(RunMismatchError, match=r"models: expected GPT, found none; schedule: expected 1F1B"):
        await declare(without, coordinator_pb2.ParallelPlan())
    await cluster.call("DeleteRun", run="r", force=True, request_id="x")
    without, with_plan = await cluster.team("a", "b", world=World(dp=1, pp=2))
    await declare(without, coordinator_pb2.ParallelPlan())
    await cluster.restart()
    with pytest.raises(RunMismatchError, match=r"models: expected none, found GPT"):
        await declare(with_plan, plan())


def changed(change: Callable[[coordinator_pb2.ModelPlan], None]) -> coordinator_pb2.ParallelPlan:
    other = plan()
    change(other.models[0])
    return other


def set_first_layer(model: coordinator_pb2.ModelPlan) -> None:
    model.stages[1].first_layer = "blocks.3"


def set_style(model: coordinator_pb2.ModelPlan) -> None:
    model.stages[0].layers[1].style = "row"


def set_schedule(model: coordinator_pb2.ModelPlan) -> None:
    model.schedule = "GPipe"
    model.sequence_parallel = True


def set_bytes(model: coordinator_pb2.ModelPlan) -> None:
    model.stages[1].layers[0].collectives[0].bytes_per_step = 65


@pytest.mark.parametrize(
    ("other", "message", "name"),
    [
        (plan(8), "num_micro_batches: expected 4, found 8. All trainers", "num_micro_batches"),
        (
            changed(set_first_layer),
            "first layer of stage 1: expected 'blocks.2', found 'blocks.3'. All trainers",
            "first layer of stage 1",
        ),
        (
            changed(set_style),
            "style of layer 'blocks.*.down' of stage 0: expected column, found row. All trainers",
            "style of layer 'blocks.*.down' of stage 0",
        ),
        (
            changed(set_schedule),
            "schedule: expected 1F1B, found GPipe; sequence_parallel: expected False, found True. All trainers",
            "schedule",
        ),
        (
            changed(set_bytes),
            "collectives of layer 'blocks.*.up' of stage 1: expected forward all_reduce of 64 bytes, found forward "
            "all_reduce of 65 bytes. All trainers",
            "collectives of layer 'blocks.*.up' of stage 1",
        ),
        (plan(style="row"), "and 1 more differences. All trainers", "style of layer 'blocks.*.up' of stage 0"),
    ],
)
async def test_error_names_what_differs(
    cluster: Harness, other: coordinator_pb2.ParallelPlan, message: str, name: str
) -> None:
    first, second, *_ = await cluster.team(*"abcd", world=WORLD)
    await declare(first, plan())
    with pytest.raises(RunMismatchError) as refused:
        await declare(second, other)
    text = str(refused.value)
    assert text.startswith("trainer 'b' divides its model differently than run 'r': "), text
    assert message in text, text
    assert refused.value.data["name"] == name


async def test_plan_of_a_former_membership_is_refused(cluster: Harness) -> None:
    first, *_ = await cluster.team(*"abcd", world=WORLD)
    first.epoch -= 1
    with pytest.raises(StaleEpochError):
        await declare(first, plan())
    assert not (await cluster.call("DescribeWorld", run="r")).HasField("parallel_plan")


def rows(count: int) -> coordinator_pb2.ParallelPlan:
    stages = [coordinator_pb2.PlannedStage(layers=[coordinator_pb2.PlannedLayers()] * (count - 1))]
    return coordinator_pb2.ParallelPlan(models=[coordinator_pb2.ModelPlan(stages=stages)])


def named(name: str, times: int = 1) -> coordinator_pb2.ParallelPlan:
    layers = [coordinator_pb2.PlannedLayers(name=name)] * times
    stages = [coordinator_pb2.PlannedStage(layers=layers)]
    return coordinator_pb2.ParallelPlan(models=[coordinator_pb2.ModelPlan(stages=stages)])


@pytest.mark.parametrize(
    ("large", "message"),
    [
        (named("x" * 900, MAX_PLAN_BYTES // 900), f"bytes: expected at most {MAX_PLAN_BYTES}"),
        (rows(MAX_PLAN_ROWS + 1), f"{MAX_PLAN_ROWS + 1} rows: expected at most {MAX_PLAN_ROWS}"),
        (
            coordinator_pb2.ParallelPlan(models=[coordinator_pb2.ModelPlan()] * (MAX_PLAN_MODELS + 1)),
            f"models: expected at most {MAX_PLAN_MODELS}",
        ),
        (
            coordinator_pb2.ParallelPlan(models=[coordinator_pb2.ModelPlan(micro_batch_shape=[1, 2, 3])]),
            "3 sizes of a micro-batch: expected at most 2",
        ),
        (named("a\nb"), "layer is 'a"),
        (named("x" * 1001), "layer is 'xxx"),
    ],
)
async def test_plan_that_is_too_large_or_not_printable_leaves_no_trace(
    cluster: Harness, large: coordinator_pb2.ParallelPlan, message: str
) -> None:
    first, *_ = await cluster.team(*"abcd", world=WORLD)
    with pytest.raises(InvalidRequestError, match=message):
        await declare(first, large)
    assert not (await cluster.call("DescribeWorld", run="r")).HasField("parallel_plan")
    await declare(first, rows(MAX_PLAN_ROWS))
