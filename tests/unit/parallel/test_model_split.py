"""Division of models into pipeline stages: names, values between stages, descriptions and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from examples.gpt import GPT, GPTConfig
from shardwell.parallel import plan_tensor_parallel, split_model
from shardwell.parallel.outline import LayerKind
from shardwell.parallel.splitting import balanced_starts, even_starts
from shardwell.wrapping.policies import BlockPolicy
from shardwell_wire.errors import UsageError


def untied_gpt(num_layers: int = 4, device: str = "cpu") -> Any:
    with torch.device(device):
        model = GPT(GPTConfig(vocab_size=31, context=8, num_layers=num_layers, num_heads=2, width=8))
        model.head = nn.Linear(8, 31, bias=False)
    return model


class Mixer(nn.Module):
    """Uses the input and a buffer in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(12.0).view(6, 2))
        self.layers = nn.ModuleList(Rotated() for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 2.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        table = self.table[: x.shape[1]]
        if mask is not None:
            raise NotImplementedError
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden, table) + x
        return hidden * scale


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * table


def run(split: Any, *inputs: torch.Tensor, **keywords: torch.Tensor) -> Any:
    values: Any = inputs
    for stage in split.stages:
        output = split.module(stage.index)(*values, **keywords)
        values = output if isinstance(output, tuple) else (output,)
    return values[0]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("by", ["layers", "cost"])
def test_stages_compute_what_the_model_computes(num_stages: int, by: Any) -> None:
    model = untied_gpt()
    split = split_model(model, num_stages, by=by)
    tokens = torch.randint(0, 31, (2, 5))
    assert torch.equal(run(split, tokens), model(tokens))


def test_parameters_keep_their_names_and_are_the_models_own() -> None:
    model = untied_gpt()
    split = split_model(model, 3)
    found = {name: parameter for index in range(3) for name, parameter in split.module(index).named_parameters()}
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    assert all(found[name] is expected[name] for name in expected)
    assert isinstance(split.module(0).position_embedding, nn.Embedding)
    assert [len(BlockPolicy(split.module(index)).blocks()) for index in range(3)] == [1, 2, 1]


def test_inputs_are_passed_on_and_buffers_are_in_all_stages() -> None:
    model = Mixer()
    split = split_model(model, 4)
    x = torch.randn(3, 5, 2)
    assert torch.equal(run(split, x), model(x))
    examples = split.examples(x)
    assert [tuple(value.shape) for value in examples[1].inputs] == [(3, 5, 2), (3, 5, 2)], "the table is computed again"
    assert [example.outputs[0].requires_grad for example in examples] == [True] * 4
    assert all(value.is_meta for example in examples for value in (*example.inputs, *example.outputs))
    assert [list(split.module(index).state_dict()) for index in (0, 1)] == [
        ["table", "layers.0.linear.weight", "layers.0.linear.bias"],
        ["layers.1.linear.weight", "layers.1.linear.bias"],
    ], "the run stores the buffer once"


def test_examples_follow_the_micro_batch_and_leave_the_model_alone() -> None:
    model = untied_gpt()
    split = split_model(model, 2)
    examples = split.examples(torch.zeros(3, 7, dtype=torch.int64))
    assert [tuple(example.outputs[0].shape) for example in examples] == [(3, 7, 8), (3, 7, 31)]
    assert examples[0].inputs[0].dtype == torch.int64
    assert all(not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        (["blocks.0"], [8, 8]),  # the first block cuts the sequence
        (["blocks.2"], [4, 8]),
        (["norm"], [4, 8]),
        (["head"], [8, 8]),  # the last norm gathers the sequence
    ],
)
def test_examples_with_sequence_parallelism_are_parts(starts: list[str], lengths: list[int]) -> None:
    model = untied_gpt()
    model.head = nn.Linear(8, 32, bias=False)
    plan = plan_tensor_parallel(model, 2, sequence_parallel=True, vocabulary=False, fused_by_head=True)
    split = split_model(model, 2, starts=starts)
    examples = split.examples(torch.zeros(3, 8, dtype=torch.int64), tensor_plan=plan)
    assert [example.outputs[0].shape[1] for example in examples] == lengths
    assert examples[1].inputs[0].shape == examples[0].outputs[0].shape
    assert examples[0].inputs[0].shape == (3, 8), "every rank gets the whole sequence"
    assert all(example.outputs[0].requires_grad for example in examples)


def test_examples_need_a_length_that_the_tensor_parallel_ranks_divide() -> None:
    model = untied_gpt()
    plan = plan_tensor_parallel(model, 2, sequence_parallel=True, vocabulary=False, fused_by_head=True)
    with pytest.raises(UsageError, match="tp=2 does not divide the 7 tokens of a sequence"):
        split_model(model, 2).examples(torch.zeros(3, 7, dtype=torch.int64), tensor_plan=plan)


def test_models_on_the_meta_device_can_be_split() -> None:
    split = split_model(untied_gpt(device="meta"), 2)
    assert split.examples(torch.zeros(1, 4, dtype=torch.int64))[1].outputs[0].shape == (1, 4, 31)


def test_descriptions_list_layers_parameters_and_kinds() -> None:
    model = untied_gpt()
    split = split_model(model, 2)
    first, last = split.stages
    assert first.calls == ("token_embedding", "position_embedding", "blocks.0", "blocks.1")
    assert last.calls == ("blocks.2", "blocks.3", "norm", "head")
    assert first.num_parameters + last.num_parameters == sum(map(torch.numel, model.parameters()))
    assert set(first.parameters_by_kind()) == {
        LayerKind.EMBEDDING,
        LayerKind.ATTENTION,
        LayerKind.MLP,
        LayerKind.NORM,
    }
    assert last.parameters_by_kind()[LayerKind.HEAD] == 8 * 31
    text = split.describe()
    assert "GPT in 2 stages" in text and "stage 1: blocks.2, blocks.3, norm, head" in text and "head 248" in text


def test_even_and_balanced_divisions() -> None:
    assert even_starts(8, 4) == [0, 2, 4, 6]
    assert even_starts(4, 3) == [0, 1, 3], "the inner stage gets the remaining layer"
    assert balanced_starts([1, 1, 1, 5], 2) == [0, 3]
    assert balanced_starts([9, 1, 1, 1, 1], 3) == [0, 1, 2]


def test_stages_start_at_the_named_layers() -> None:
    split = split_model(untied_gpt(), 3, starts=["blocks.1", "head"])
    assert [stage.calls[0] for stage in split.stages] == ["token_embedding", "blocks.1", "head"]
    with pytest.raises(UsageError, match="expected the first layers of stages 1 to 2"):
        split_model(untied_gpt(), 3, starts=["head", "blocks.1"])
    with pytest.raises(UsageError, match=r"The layers are token_embedding, position_embedding, blocks.0"):
        split_model(untied_gpt(), 2, starts=["nonsense"])


def test_costs_of_the_caller_decide() -> None:
    split = split_model(untied_gpt(), 2, by="cost", cost=lambda name, layer: 10.0 if name == "blocks.0" else 1.0)
    assert split.stages[1].calls[0] == "blocks.1"


def test_models_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(UsageError, match="GPT has 2 blocks, too few for 3 stages"):
        split_model(untied_gpt(2), 3)
    with pytest.raises(UsageError, match=r"num_stages=0\): expected at least 1"):
        split_model(untied_gpt(2), 0)
    shared = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="Sequential has 1 layers, too few for 2 stages"):
        split_model(nn.Sequential(shared, nn.Tanh(), shared), 2)


def test_forward_that_depends_on_values_is_refused() -> None:
    class Branch(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self[0](x)
            return self[1](hidden) if hidden.sum() > 0 else x

    split = split_model(Branch(nn.Linear(2, 2), nn.Linear(2, 2)), 2)
    with pytest.raises(UsageError, match=r"the forward of Branch .* it decides by values that layers compute"):
        split.examples(torch.zeros(1, 2))


def test_stage_without_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))
    with pytest.raises(UsageError, match="stage 1 of 3 has no parameters"):
        split_model(model, 3, starts=["1", "2"])
