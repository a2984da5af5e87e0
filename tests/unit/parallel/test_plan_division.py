"""The division of a model in a plan: stages, parts, activations in flight and errors."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardwell import World
from shardwell.command.cli import main
from shardwell.parallel import SCHEDULES, SchedulePlan
from shardwell.parallel.pipeline import micro_batches_in_flight
from shardwell.planning import DivisionOptions, Plan, PlanOptions, describe, plan_run
from shardwell_wire.errors import TiedParameterError, UsageError
from tests.support.real_models import llama

HERE = "tests.unit.parallel.test_plan_division"
LENGTH, WIDTH, VOCABULARY, HEADS, LAYERS = 6, 16, 64, 4, 4
MATRICES, VECTORS = 12 * WIDTH * WIDTH, (3 + 4) * WIDTH
"""Elements of the split matrices of a block, and of the biases that are split with them."""
WHOLE = (4 + 2) * WIDTH
"""Elements of a block that every tensor-parallel rank has: two norms, and the biases of the layers split by rows."""
POSITIONS, NORM = LENGTH * WIDTH, 2 * WIDTH


def make_gpt(batch: int, *, num_layers: int = LAYERS, tied: bool = False) -> tuple[nn.Module, torch.Tensor]:
    sizes = GPTConfig(
        vocab_size=VOCABULARY, context=LENGTH, num_layers=num_layers, num_heads=HEADS, width=WIDTH, tied=tied
    )
    return GPT(sizes), torch.zeros(batch, LENGTH, dtype=torch.int64)


def planned(world: World, make: Any = make_gpt, *, batch: int | None = None, **division: Any) -> Plan:
    options = DivisionOptions(fused_by_head=True, **division)
    return plan_run(make, PlanOptions(world=world), division=options, batch=batch, length=LENGTH)


def elements(plan: Plan, stage: int) -> dict[str, int]:
    return {unit.name: sum(p.numel for p in unit.layout.parameters) for unit in plan.division.stages[stage].units}


def test_tensor_parallel_rank_has_whole_units_and_its_parts() -> None:
    whole, plan = planned(World()), planned(World(tp=2))
    found = elements(plan, 0)
    for block in range(LAYERS):
        assert found[f"blocks.{block}"] == WHOLE
        assert found[f"blocks.{block}@tp0"] == (MATRICES + VECTORS) // 2
    assert sum(count for name, count in found.items() if not name.startswith("blocks")) == (
        POSITIONS + NORM + 2 * VOCABULARY * WIDTH // 2
    )
    assert plan.num_parameters == whole.num_parameters, "whole parameters are stored once, parts by every rank"
    assert whole.model_bytes <= plan.model_bytes < 1.05 * whole.model_bytes, "more gaps of alignment"
    assert plan.server.received_bytes == plan.model_bytes, "whole gradients are pushed once"
    assert plan.server.sent_bytes == 2 * plan.trainer.received_bytes, "each rank gathers whole units"


def test_stages_of_a_pipeline_are_planned_each() -> None:
    plan = planned(World(pp=2), num_micro_batches=4)
    block = MATRICES + VECTORS + WHOLE
    assert [sum(elements(plan, stage).values()) for stage in (0, 1)] == [
        2 * block + VOCABULARY * WIDTH + POSITIONS,
        2 * block + NORM + VOCABULARY * WIDTH,
    ]
    for stage, trainer in enumerate(plan.trainers):
        held = sum(unit.size_bytes for unit in plan.division.stages[stage].units)
        assert trainer.stages == (stage,)
        assert trainer.weights_bytes == trainer.gradients_bytes == trainer.received_bytes == trainer.sent_bytes == held
    activation = LENGTH * WIDTH * 4 + LENGTH * 8  # with the tokens
    for trainer in plan.trainers:
        assert trainer.sent_to_stages_bytes == trainer.stage_buffers_bytes == 4 * activation
    first, last = plan.trainers
    assert first.activation_bytes is not None and last.activation_bytes is not None
    one = planned(World(pp=2), num_micro_batches=2).trainers
    assert first.activation_bytes == one[0].activation_bytes, "1F1B: at most 2 micro-batches in the first of 2 stages"
    gpipe = planned(World(pp=2), num_micro_batches=4, schedule="GPipe").trainers
    assert gpipe[0].activation_bytes == 2 * first.activation_bytes
    assert gpipe[1].activation_bytes == 4 * last.activation_bytes


@pytest.mark.parametrize("tp", [1, 2])
def test_tied_parameter_is_stored_once_and_pushed_by_each_stage(tp: int) -> None:
    world = World(dp=2, tp=tp, pp=2)
    plan, separate = (planned(world, partial(make_gpt, tied=tied)) for tied in (True, False))
    shared = 4 * VOCABULARY * WIDTH
    name = "token_embedding.weight" if tp == 1 else "token_embedding.weight@tp0"
    for stage in (0, 1):
        assert elements(plan, stage)[name] == VOCABULARY * WIDTH // tp
        assert sum(elements(plan, stage).values()) == sum(elements(separate, stage).values())
    assert plan.num_parameters == separate.num_parameters - VOCABULARY * WIDTH
    assert plan.model_bytes == separate.model_bytes - shared
    assert plan.server.weights_bytes == separate.server.weights_bytes - shared
    assert plan.server.contributions_bytes == separate.server.contributions_bytes, "both stages push gradients"
    assert plan.server.mean_bytes == separate.server.mean_bytes - shared, "which are added"
    assert plan.server.received_bytes == separate.server.received_bytes
    assert plan.server.sent_bytes == separate.server.sent_bytes
    assert plan.trainers[1].weights_bytes == separate.trainers[1].weights_bytes


def test_gradients_of_two_stages_are_added_even_with_one_data_rank() -> None:
    plan = planned(World(pp=2), partial(make_gpt, tied=True))
    assert plan.server.mean_bytes == 4 * VOCABULARY * WIDTH


def test_context_parallel_ranks_push_and_gather_each() -> None:
    """A plan with the same example call: a rank's part is then as long as a whole sequence of the other plan."""
    make = partial(make_gpt, tied=True)
    one, two = planned(World(dp=2, pp=2), make), planned(World(dp=2, pp=2, cp=2), make)
    assert two.trainers == one.trainers and two.model_bytes == one.model_bytes
    assert (two.server.weights_bytes, two.server.mean_bytes) == (one.server.weights_bytes, one.server.mean_bytes)
    assert two.server.contributions_bytes == 2 * one.server.contributions_bytes
    assert two.server.received_bytes == 2 * one.server.received_bytes
    assert two.server.sent_bytes == 2 * one.server.sent_bytes
    assert planned(World(cp=2), make).server.mean_bytes == one.model_bytes, "even with one data rank"


def test_command_plans_context_parallel_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", f"{HERE}:make_gpt", "--dp", "2", "--cp", "2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "4 trainers as World(dp=2, cp=2, tp=1, pp=1)" in text and "contributions of 4 ranks" in text
    assert "cp: a sequence of the plan is one rank's part" in text
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["world"]["cp"] == 2
    assert found["server"]["received_bytes"] == 4 * found["trainers"][0]["sent_bytes"]


def test_description_has_layers_styles_and_bytes() -> None:
    plan = planned(World(dp=2, tp=2, pp=2), num_micro_batches=4, batch=8)
    model = plan.division.description
    assert model is not None
    assert (model.model, model.schedule, model.num_micro_batches) == ("GPT", "1F1B", 4)
    assert list(model.micro_batch_shape) == [2, LENGTH]
    assert [stage.element_count for stage in model.stages] == [
        sum(elements(planned(World(pp=2)), stage).values()) for stage in (0, 1)
    ]
    rows = {layer.name: layer for layer in model.stages[1].layers}
    assert (rows["head"].kind, rows["head"].style, rows["head"].part) == ("head", "vocabulary", "rows 1/2")
    up = rows["blocks.*.mlp.0"]
    assert [(each.phase, each.bytes_per_step) for each in up.collectives] == [("backward", 2 * 8 * LENGTH * WIDTH * 4)]
    for stage, trainer in zip(model.stages, plan.trainers, strict=True):
        assert trainer.collective_bytes == sum(each.bytes_per_step for row in stage.layers for each in row.collectives)
    text = describe(plan)
    assert "GPT in 2 stages, 1F1B with 4 micro-batches of 2 x 6, tensor parallelism over 2 ranks" in text
    assert "PP 0 (STAGE 0)" in text and "PP 1 (STAGE 1)" in text


def test_collectives_without_a_pipeline_count_one_forward() -> None:
    model = planned(World(tp=4), batch=3).division.description
    assert model is not None and len(model.stages) == 1
    rows = {layer.name: layer for layer in model.stages[0].layers}
    assert rows["blocks.*.projection"].collectives[0].bytes_per_step == LAYERS * 3 * LENGTH * WIDTH * 4


@pytest.mark.parametrize("name", SCHEDULES)
def test_micro_batches_in_flight_agree_with_the_schedule(name: str) -> None:
    """The first trainer of 1F1B holds one micro-batch per stage after it. GPipe and LoopedBFS hold all."""
    plan = SchedulePlan(schedule=name, pp=2, num_micro_batches=8)
    for pp_rank in range(2):
        counts = micro_batches_in_flight(plan, pp_rank)
        assert all(set(each) == set(plan.stages_of(pp_rank)) for each in counts)
        most = max(sum(each.values()) for each in counts)
        expected = {
            "GPipe": (8, 8),
            "1F1B": (2, 1),
            "LoopedBFS": (16, 16),
            "Interleaved1F1B": (5, 3),
        }.get(name)
        if expected is not None:
            assert most == expected[pp_rank]
        else:
            assert 2 <= most < 16, "schedules with a split backward release activations before the last forward"


def test_json_has_every_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    target = ["plan", f"{HERE}:make_gpt", "--length", str(LENGTH), "--fused-by-head", "--json"]
    assert main([*target, "--tp", "2", "--pp", "2", "--schedule", "Interleaved1F1B", "--micro-batches", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [trainer["stages"] for trainer in found["trainers"]] == [[0, 2], [1, 3]]
    assert found["schedule"]["num_micro_batches"] == 4 and len(found["model"]["stages"]) == 4
    assert [stage["pp_rank"] for stage in found["model"]["stages"]] == [0, 1, 0, 1]


class Branching(nn.Module):
    """Its forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x if x.sum() > 0 else -x
        return x


@pytest.mark.parametrize(
    ("make", "world", "division", "match"),
    [
        (make_gpt, World(tp=3), {}, "tp=3 does not divide the 4 heads of block 'blocks.0'"),
        (make_gpt, World(pp=8), {}, "GPT has 4 blocks, too few for 8 stages"),
        (make_gpt, World(pp=2), {"schedule": "1F1B", "num_micro_batches": 1}, "at least as many micro-batches"),
        (partial(make_gpt, tied=True), World(pp=2), {"schedule": "ZBVZeroBubble"}, "is tied over the stages 0, 3"),
        (
            lambda: (Branching(), torch.zeros(2, 4)),
            World(pp=2),
            {},
            "the forward of Branching cannot be divided into stages",
        ),
        (lambda: (llama(), (), {"input_ids": torch.zeros(1, 4, dtype=torch.int64)}), World(pp=2), {}, "by keyword"),
        (lambda: nn.Linear(2, 2), World(tp=2), {}, "Linear has no repeated blocks"),
    ],
)
def test_model_that_cannot_be_divided_is_refused(make: Any, world: World, division: Any, match: str) -> None:
    with pytest.raises((UsageError, TiedParameterError), match=match):
        planned(world, make, **division)


def test_batch_must_be_divisible_into_micro_batches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:make_gpt", "--pp", "2", "--batch", "3"]) == 1
    assert "a batch of 3 samples cannot be divided into 2 micro-batches of equal size" in capsys.readouterr().err
