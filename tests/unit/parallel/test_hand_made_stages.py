"""Stages that are built by hand: they cover the model under its names, and keep its ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardwell.grid.parallel_plan import descriptions
from shardwell.parallel import ModelSplit, PipelineStage, SchedulePlan, StageExample
from shardwell_wire.errors import UsageError
from tests.support.split_gpt import LENGTH, VOCABULARY, gpt

TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)


class First(nn.Module):
    def __init__(self, model: Any, blocks: Sequence[int]) -> None:
        super().__init__()
        self.token_embedding, self.position_embedding = model.token_embedding, model.position_embedding
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in blocks})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.token_embedding(tokens) + self.position_embedding.weight[: tokens.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return x


class Last(nn.Module):
    def __init__(self, model: Any, blocks: Sequence[int], name: str = "blocks") -> None:
        super().__init__()
        self.name, self.norm, self.head = name, model.norm, model.head
        self.add_module(name, nn.ModuleDict({str(number): model.blocks[number] for number in blocks}))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.get_submodule(self.name).children():
            x = block(x)
        return self.head(self.norm(x))


def test_ties_of_the_model_are_kept() -> None:
    model = gpt(4, tied=True)
    split = ModelSplit.from_modules(model, [First(model, (0, 1)), Last(model, (2, 3))])
    (tie,) = split.ties
    assert tie.names == ("token_embedding.weight", "head.weight") and tie.stages == (0, 1)
    assert torch.equal(split.module(1)(split.module(0)(TOKENS)), model(TOKENS))
    examples = split.examples(TOKENS)
    assert [tuple(example.outputs[0].shape) for example in examples] == [(2, LENGTH, 12), (2, LENGTH, VOCABULARY)]
    assert "GPT in 2 stages" in split.describe() and "shared by the stages 0, 1" in split.describe()


def test_stages_that_do_not_cover_the_model_are_refused() -> None:
    model = gpt(4)
    with pytest.raises(UsageError, match=r"no stage has 'blocks.2.attention_norm.weight', .* and 2 more of GPT"):
        ModelSplit.from_modules(model, [First(model, (0, 1)), Last(model, (3,))])
    with pytest.raises(UsageError, match=r"'upper.2.attention_norm.weight' of stage 1 has the name 'blocks.2"):
        ModelSplit.from_modules(model, [First(model, (0, 1)), Last(model, (2, 3), "upper")])
    with pytest.raises(UsageError, match=r"'norm.weight' of stage 1 is no parameter or buffer of GPT"):
        ModelSplit.from_modules(model, [First(model, (0, 1)), Last(gpt(4), (2, 3))])


def test_stages_are_described_by_their_blocks() -> None:
    model = gpt(4)
    split = ModelSplit.from_modules(model, [First(model, (0, 2)), Last(model, (1, 3))])
    assert [stage.calls for stage in split.stages] == [
        ("token_embedding", "position_embedding", "blocks.0", "blocks.2"),
        ("norm", "head", "blocks.1", "blocks.3"),
    ]


def test_a_module_of_another_stage_is_refused() -> None:
    model = gpt(4)
    split = ModelSplit.from_modules(model, [First(model, (0, 1)), Last(model, (2, 3))])
    example = split.examples(TOKENS)[1]
    with pytest.raises(UsageError, match=r"the module of stage 1 of 2 \(First\) is stage 0 of 2 in the split of GPT"):
        PipelineStage(split.module(0), 1, 2, "cpu", example=example)
    with pytest.raises(UsageError, match=r"stage 1 of 4 \(Last\) is stage 1 of 2 .* a split into 4 stages"):
        PipelineStage(split.module(1), 1, 4, "cpu", example=example)


def test_a_stage_of_no_split_is_refused() -> None:
    module = nn.Linear(2, 2)
    example = StageExample((torch.zeros(1, 2),), (torch.zeros(1, 2),))
    with pytest.raises(UsageError, match=r"stage 0 \(Linear\) was not made by split_model"):
        PipelineStage(module, 0, 2, "cpu", example=example)


def test_given_examples_tell_the_size_of_a_micro_batch() -> None:
    model = gpt(4)
    stages = [First(model, (0, 1)), Last(model, (2, 3))]
    computed = ModelSplit.from_modules(model, stages).examples(TOKENS)
    split = ModelSplit.from_modules(model, stages, examples=computed)
    plan = SchedulePlan(schedule="GPipe", pp=1, num_micro_batches=1, stages_per_trainer=1)
    plan.note_in(descriptions[split.module(1)])
    assert list(descriptions[split.module(1)].to_proto().micro_batch_shape) == list(TOKENS.shape)
    assert [each.outputs[0].shape for each in split.examples(TOKENS)] == [each.outputs[0].shape for each in computed]
    with pytest.raises(UsageError, match=r"have the shapes and dtypes \[\(\[1, .*of from_modules\(examples=\) are"):
        split.examples(TOKENS[:1])
    with pytest.raises(UsageError, match="1 examples, expected one for each of the 2 stages"):
        ModelSplit.from_modules(model, stages, examples=computed[:1])
