"""Plans are proved on the dataflow: which parameters have partial gradients, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwell.parallel import plan_tensor_parallel
from shardwell_wire.errors import UsageError
from tests.support.small_transformer import WIDTH, Transformer


def partial_modules(model: Any, **options: Any) -> set[str]:
    plan = plan_tensor_parallel(model, 2, **options)
    return {layer.name.removeprefix("blocks.0.") for layer in plan.layers if layer.style == "partial"} - {
        layer.name for layer in plan.layers if layer.name.startswith("blocks.1.")
    }


@pytest.mark.parametrize(
    ("variant", "options", "expected"),
    [
        ("", {}, set()),
        ("", {"sequence_parallel": True}, set()),
        ("head norms", {}, {"attn.q_norm", "attn.k_norm"}),
        ("head norms", {"sequence_parallel": True}, {"attn.q_norm", "attn.k_norm"}),
        ("scale", {}, {"attn"}),
        ("learned activation", {}, {"mlp.act"}),
        ("scaled branches", {}, set()),
        ("scaled branches", {"sequence_parallel": True}, {"after"}),
        ("norms after", {"sequence_parallel": True}, {"norm3"}),
        ("post-norm", {}, set()),
        ("bias outside", {}, set()),
        ("last token", {"sequence_parallel": True}, set()),
    ],
)
def test_parameters_that_meet_parts_only_have_partial_gradients(
    variant: str, options: dict[str, Any], expected: set[str]
) -> None:
    assert partial_modules(Transformer(variant), **options) == expected


@pytest.mark.parametrize(
    ("variant", "options", "message"),
    [
        ("norms over heads", {}, r"'blocks.0.attn.q_norm' fails with the part of one rank"),
        ("plain norm over heads", {}, r"in 'blocks.0.attn' works over 16 values together, but one rank has 8"),
        ("norm of each head", {}, r"'blocks.0.attn.* makes other operations .*: it computes each head by operations"),
        ("scale of each head", {}, r"'blocks.0.attn' fails with the part of one rank"),
        ("slopes", {}, r"'blocks.0.attn' .* joins a part of the heads .*, such as the slopes"),
        ("fixed heads", {}, r"bmm in 'blocks.0.attn' works over 4 values together, but one rank has 2"),
        ("gate", {}, r"'blocks.0.attn' \(mul\) joins a part of the heads or features with an activation"),
        ("shared norm", {}, r"'blocks.0.attn.q_norm.weight' is used with whole values and with parts"),
        ("weight outside", {}, r"'embedding.weight' is split, but 'Transformer' uses it outside of the forward"),
        ("post-norm", {"sequence_parallel": True}, r"input of 'blocks.0.attn.q_proj' is not the output of a norm"),
        ("pooled", {"sequence_parallel": True}, r"mean in 'blocks.0' works over 4 values together, but one rank has 2"),
        ("scaled stream", {"sequence_parallel": True}, r"'blocks.0' has parameters of its own, .* is split itself"),
        ("values", {}, r"Transformer cannot run without values.* Pass example="),
        ("two inputs", {}, r"Transformer cannot run without values.* Pass example="),
    ],
)
def test_what_cannot_be_proved_is_refused(variant: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_tensor_parallel(Transformer(variant), 2, **options)


def test_an_example_stands_for_the_arguments_of_the_call() -> None:
    tokens, more = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, WIDTH)
    assert plan_tensor_parallel(Transformer("two inputs"), 2, example=(tokens, more)).layers
    assert plan_tensor_parallel(Transformer(), 2, example={"tokens": tokens}).layers
    odd = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(UsageError, match=r"tp=2 does not divide the length 5 of the sequence at 'blocks.0'"):
        plan_tensor_parallel(Transformer(), 2, example=odd, sequence_parallel=True)


def test_a_compiled_model_is_not_compiled_by_its_plan() -> None:
    def compiled(*_: object) -> Any:
        pytest.fail("the model was compiled")

    model = Transformer("head norms")
    model.compile(backend=compiled)
    call = model._compiled_call_impl
    assert partial_modules(model) == {"attn.q_norm", "attn.k_norm"}
    assert call is not None and model._compiled_call_impl is call


def test_a_plan_changes_nothing_in_the_model() -> None:
    model = Transformer("head norms")
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_pre_hook(lambda module, _: setattr(module, "calls", module.calls + 1))
    before = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
    random_state = torch.get_rng_state()
    plan_tensor_parallel(model, 2, sequence_parallel=True)
    after = [vars(module) for module in model.modules()]
    assert [list(attributes) for attributes in before] == [list(attributes) for attributes in after]
    for one, other in zip(before, after, strict=True):
        assert all(value is other[name] or value == other[name] for name, value in one.items())
    assert torch.equal(random_state, torch.get_rng_state())
