"""Stages that run the model's own forward: what a forward does between its layers, and the order of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwell.parallel import ModelSplit, split_model
from shardwell_wire.errors import UsageError
from tests.support import hugging_face
from tests.support.hugging_face import LENGTH, VOCABULARY

WIDTH = 8
TOKENS = torch.arange(10).view(2, 5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        return x + self.drop(self.linear(x)) * (1 if extra is None else extra)


class Model(nn.Module):
    """A model with embeddings that are no blocks, as nanoGPT has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.body = nn.ModuleDict(
            {
                "tokens": nn.Embedding(11, WIDTH),
                "positions": nn.Embedding(8, WIDTH),
                "blocks": nn.ModuleList(Block() for _ in range(4)),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.head = nn.Linear(WIDTH, 11, bias=False)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        assert tokens.shape[1] <= 8, "too long"
        return self.body.tokens(tokens) + self.body.positions(torch.arange(tokens.shape[1], device=tokens.device))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body.blocks:
            x = block(x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body.norm(self.run(self.embed(tokens))))


class Noise(Model):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x + torch.randn(1))


class SharedNoise(Model):
    """Draws noise once and uses it in all blocks."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(WIDTH)
        for block in self.body.blocks:
            x = block(x, noise)
        return x


class Dropping(Model):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(functional.dropout(x, 0.5, self.training))


class LayerDrop(Model):
    probability = 0.5

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body.blocks:
            if self.training and torch.rand(()) < self.probability:
                continue
            x = block(x)
        return x


class Counting(Model):
    count = 0

    def run(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return super().run(x) * self.count


class Masked(Model):
    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        if mask is not None:
            x = x * mask[..., None]
        for block in self.body.blocks:
            x = block(x, None if mask is None else mask[..., None])
        return self.head(self.body.norm(x))


class Skipping(Model):
    """Adds the output of the first block to that of the third."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.body.blocks[0](x)
        x = self.body.blocks[1](x)
        x = self.body.blocks[2](x) + first
        return self.body.blocks[3](x)


class Writing(Model):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.zeros(x.shape)
        made[:] = x
        return super().run(made)


class Averaging(Model):
    """Keeps a statistic of the last block's output in a buffer of the model itself."""

    assigns = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = super().run(x)
        if self.assigns:
            self.average = 0.9 * self.average + x.detach().mean()
        else:
            self.average.add_(1)
        return x


class HeadFirst(Model):
    """Defines the norm and the head before the blocks, has a parameter of its own, and a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), self.head
        self.auxiliary = nn.Linear(WIDTH, 3)
        body = self.body
        self.body = nn.ModuleDict({name: body[name] for name in ("norm", "tokens", "positions", "blocks")})

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x) * self.scale


class ReadsEmbedding(Model):
    """Computes logits with the weight of the embedding, and embeds other tokens in the last stage."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.body.norm(self.run(self.embed(tokens)))
        return functional.linear(x, self.body.tokens.weight) + self.head(x)


class EmbedsTwice(Model):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.body.blocks[:3]:
            x = block(x)
        x = self.body.blocks[3](self.body.tokens(tokens.flip(1)), x)
        return self.head(self.body.norm(x))


class Experts(Block):
    """Calls an expert with as many tokens as choose it."""

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.flatten(0, 1)
        (chosen,) = (flat[:, 0] > 0).nonzero(as_tuple=True)
        return flat.index_add(0, chosen, self.linear(flat[chosen])).view_as(x)


class Mixture(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body["blocks"] = nn.ModuleList(Experts() for _ in range(4))


def run(split: ModelSplit, *inputs: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
    values: Any = inputs
    for stage in split.stages:
        output = split.module(stage.index)(*values, **keywords)
        values = output if isinstance(output, tuple) else (output,)
    return values[0]


def same_numbers(split: ModelSplit, model: nn.Module, *inputs: torch.Tensor, **keywords: torch.Tensor) -> bool:
    """Compares the last stage's output, whose random numbers begin with the same seed in every stage."""
    torch.manual_seed(3)
    expected = model(*inputs, **keywords)
    values: Any = inputs
    for stage in split.stages:
        torch.manual_seed(3)
        output = split.module(stage.index)(*values, **keywords)
        values = output if isinstance(output, tuple) else (output,)
    return torch.equal(values[0], expected)


@pytest.mark.parametrize("kind", [Model, Noise, SharedNoise, Dropping, Counting, Masked, Mixture])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_code_between_layers_runs_in_every_call(kind: type[Model], num_stages: int) -> None:
    model, split = kind(), split_model(kind(), num_stages)
    split.examples(TOKENS)
    for _ in range(2):
        assert same_numbers(split, model, TOKENS)
    model.eval()
    for stage in split.stages:
        split.module(stage.index).eval()
    assert same_numbers(split, model, TOKENS)


def test_random_numbers_are_drawn_anew() -> None:
    split = split_model(Noise(), 2)
    assert not torch.equal(run(split, TOKENS), run(split, TOKENS))


def test_random_values_that_several_stages_use_are_passed_on() -> None:
    split = split_model(SharedNoise(), 2)
    assert [tuple(value.shape) for value in split.examples(TOKENS)[1].inputs] == [(2, 5, WIDTH), (WIDTH,), (2, 5)]
    hidden, noise, _ = split.module(0)(TOKENS)
    torch.manual_seed(7)
    first = split.module(1)(hidden, noise, TOKENS)
    torch.manual_seed(8)
    assert torch.equal(first, split.module(1)(hidden, noise, TOKENS))


def test_values_that_decide_are_refused() -> None:
    with pytest.raises(UsageError, match="random numbers decide which layers it calls"):
        split_model(LayerDrop(), 2).examples(TOKENS)
    never = LayerDrop()
    never.probability = 0.0
    assert torch.equal(run(split_model(never, 2), TOKENS), never(TOKENS)), "as the models of Hugging Face have it"
    with pytest.raises(UsageError, match="it writes what layers compute into a tensor that no layer computes"):
        split_model(Writing(), 2).examples(TOKENS)


@pytest.mark.parametrize("assigns", [True, False])
def test_a_buffer_that_changes_outside_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch, assigns: bool) -> None:
    monkeypatch.setattr(Averaging, "assigns", assigns)
    with pytest.raises(UsageError, match="changes the buffer 'average' outside of its layers"):
        split_model(Averaging(), 2).examples(TOKENS)
    whole = split_model(Averaging(), 1, example=(TOKENS,))
    whole.examples(TOKENS)
    run(whole, TOKENS)
    assert whole.module(0).average != 0


def test_keyword_arguments_are_those_of_all_stages() -> None:
    model, mask = Masked(), torch.ones(2, 5)
    mask[0, :2] = 0
    split = split_model(model, 3)
    assert len(split.examples(TOKENS, mask=mask)[1].inputs) == 2
    assert torch.equal(run(split, TOKENS, mask=mask), model(TOKENS, mask=mask))
    assert torch.equal(run(split, TOKENS), model(TOKENS))


def test_values_that_no_argument_carries_over_a_cut_are_refused() -> None:
    with pytest.raises(UsageError, match=r"before layer 'body.blocks.2', the first of stage 1, it computes a value"):
        split_model(Skipping(), 2).examples(TOKENS)
    model = Skipping()
    assert torch.equal(run(split_model(model, 2, starts=["body.blocks.3"]), TOKENS), model(TOKENS))


def test_other_sizes_and_devices_of_inputs_are_followed() -> None:
    model = Model()
    split = split_model(model, 2)
    split.examples(TOKENS)
    assert torch.equal(run(split, TOKENS[:1, :3]), model(TOKENS[:1, :3]))
    with pytest.raises(UsageError, match="AssertionError: too long"):
        split.examples(torch.zeros(1, 9, dtype=torch.int64))


def test_a_stage_knows_its_inputs_only_after_an_example() -> None:
    with pytest.raises(UsageError, match=r"call split.examples with a micro-batch first"):
        split_model(Model(), 2).module(1)(torch.zeros(2, 5, WIDTH), TOKENS)


def names(split: ModelSplit) -> list[set[str]]:
    return [{name for name, _ in split.module(stage.index).named_parameters()} for stage in split.stages]


def test_order_of_the_calls_is_that_of_an_example() -> None:
    with pytest.raises(UsageError, match=r"which is in stage 0 because of its place in the model: pass split_model"):
        split_model(HeadFirst(), 2).examples(TOKENS)
    model = HeadFirst()
    split = split_model(model, 2, example=(TOKENS,))
    assert torch.equal(run(split, TOKENS), model(TOKENS))
    first, last = names(split)
    assert {"scale", "head.weight", "body.norm.weight"} <= last
    assert first | last == {name for name, _ in model.named_parameters()}, "also those that the forward does not use"
    assert not first & last
    assert [name for stage in split.stages for name, _ in split.module(stage.index).named_buffers()] == []


@pytest.mark.parametrize("kind", [ReadsEmbedding, EmbedsTwice])
def test_a_layer_that_several_stages_use_is_tied(kind: type[Model]) -> None:
    with pytest.raises(UsageError, match=r"which is in stage 0 because of its place in the model"):
        split_model(kind(), 2).examples(TOKENS)
    model = kind()
    split = split_model(model, 2, example=(TOKENS,))
    (tie,) = split.ties
    assert tie.names == ("body.tokens.weight",) and tie.stages == (0, 1)
    assert torch.equal(run(split, TOKENS), model(TOKENS))


def test_a_block_with_another_result_than_assumed_is_refused() -> None:
    class Changed(Experts):
        def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x)[..., :WIDTH, None].squeeze(-1)[:, :1]

    model = Model()
    model.body["blocks"] = nn.ModuleList(Changed() for _ in range(4))
    split = split_model(model, 2)
    with pytest.raises(UsageError, match=r"layer 'body.blocks.0' returns a tensor of \[2, 1, 8\]"):
        split.module(0)(TOKENS)


def test_blocks_are_neither_embeddings_nor_small() -> None:
    split = split_model(Model(), 4)
    shares = [stage.num_parameters for stage in split.stages]
    assert split.stages[0].calls == ("body.tokens", "body.positions", "body.blocks.0")
    assert max(shares) < 4 * min(shares)


def backward(split: ModelSplit, inputs: Sequence[torch.Tensor], gradient: torch.Tensor) -> torch.Tensor:
    """Runs the stages forward and backward, as a schedule does; returns the last stage's output."""
    examples, values, kept = split.examples(*inputs), tuple(inputs), []
    for stage, example in zip(split.stages, examples, strict=True):
        output = split.module(stage.index)(*values)
        outputs = output if isinstance(output, tuple) else (output,)
        assert [(value.shape, value.dtype) for value in outputs] == [
            (value.shape, value.dtype) for value in example.outputs
        ]
        kept.append((values, outputs))
        values = tuple(
            value.detach().requires_grad_(like.requires_grad)
            for value, like in zip(outputs, example.outputs, strict=True)
        )
    gradients: tuple[torch.Tensor | None, ...] = (gradient,)
    for received, sent in reversed(kept):
        pairs = [pair for pair in zip(sent, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        gradients = tuple(value.grad for value in received)
    return kept[-1][1][0]


@pytest.mark.parametrize("family", hugging_face.FAMILIES)
def test_models_of_hugging_face_are_bit_equal_in_stages(family: str) -> None:
    tokens = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    inputs = hugging_face.inputs_of(family, tokens)
    plain, model = hugging_face.make(family), hugging_face.make(family)
    split = split_model(model, 4)
    expected = plain(*inputs).logits
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    assert torch.equal(backward(split, inputs, gradient), expected)
    ties = {tie.names[0] for tie in split.ties}
    for (name, parameter), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        if name not in ties:  # see docs/parallelism.md: gradients of ties are added per stage
            assert torch.equal(parameter.grad, other.grad), name  # type: ignore[arg-type]
