"""Operations that a parameter allows and refuses while its unit is freed."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwell.module.fully_shard import fully_shard
from shardwell.module.mixed_precision import MixedPrecisionPolicy
from shardwell.module.parameters import FreedParameter
from shardwell.module.unit import owner_of
from shardwell_wire.errors import FreedParameterError
from tests.support.module_parity import Sharded, wrap_children, wrap_whole


@pytest.fixture
def layer() -> nn.Linear:
    sharded = Sharded(nn.Sequential(nn.Linear(7, 5)), wrap_children)
    layer = sharded.model[0]
    assert isinstance(layer, nn.Linear)
    return layer


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda p: p + 1,
    "add from the right": lambda p: torch.ones(5, 7) + p,
    "matmul": lambda p: torch.ones(2, 5) @ p,
    "linear": lambda p: F.linear(torch.ones(2, 7), p),
    "index": lambda p: p[0],
    "iterate": lambda p: next(iter(p)),
    "transpose": lambda p: p.T,
    "sum": lambda p: p.sum(),
    "item": lambda p: p.sum().item(),
    "bool": bool,
    "compare": lambda p: p == p,
    "stack": lambda p: torch.stack([torch.ones(5, 7), p]),
    "foreach": lambda p: torch._foreach_add([p], 1.0),
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "set data": lambda p: setattr(p, "data", torch.ones(5, 7)),
    "clone": lambda p: p.clone(),
    "view": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "tolist": lambda p: p.tolist(),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "write": lambda p: p.mul_(2),
    "zero_": nn.init.zeros_,
    "copy from": lambda p: torch.ones(5, 7).copy_(p),
    "copy to": lambda p: p.copy_(torch.ones(5, 7)),
    "set item": lambda p: p.__setitem__(0, 1.0),
    "to": lambda p: p.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "save": lambda p: torch.save(p, io.BytesIO()),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "einsum": lambda p: torch.einsum("ij->i", p),
    "keyword": lambda p: torch.add(input=torch.ones(5, 7), other=p),
    "aten": lambda p: torch.ops.aten.add(p, 1),
}


@pytest.mark.parametrize("use", USES)
def test_operations_on_values_raise(layer: nn.Linear, use: str) -> None:
    with (
        torch.no_grad(),
        pytest.raises(FreedParameterError, match=r"'Linear-0.weight', but its unit 'Linear-0' is freed"),
    ):
        USES[use](layer.weight)


def test_error_names_the_function_and_gives_advice(layer: nn.Linear) -> None:
    with pytest.raises(FreedParameterError) as caught:
        layer.weight.T  # noqa: B018
    assert re.match(r"Tensor\.T needs the values", str(caught.value))
    for advice in ("module.unshard()", "shardwell.full_state_dict(model)", "one fully_shard call"):
        assert advice in str(caught.value)
    assert caught.value.data == {"unit": "Linear-0", "parameter": "Linear-0.weight"}


def test_operations_without_values_work(layer: nn.Linear) -> None:
    weight = layer.weight
    assert isinstance(weight, nn.Parameter) and isinstance(weight, FreedParameter)
    assert (weight.shape, weight.size(0), weight.ndim, len(weight)) == ((5, 7), 5, 2, 5)
    assert (weight.numel(), torch.numel(weight), weight.nbytes, weight.element_size()) == (35, 35, 140, 4)
    assert (weight.dtype, weight.device, weight.layout) == (torch.float32, torch.device("cpu"), torch.strided)
    assert weight.is_leaf and weight.requires_grad and weight.grad is None and weight.grad_fn is None
    assert (
        weight.is_contiguous() and weight.stride() == (7, 1) and not weight.is_complex() and weight.is_floating_point()
    )
    assert torch.zeros_like(weight).sum() == 0 and type(torch.empty_like(weight)) is torch.Tensor
    assert weight.new_zeros(3).shape == (3,)
    assert weight in {weight} and {weight: 1}[weight] == 1
    assert sum(parameter.numel() for parameter in layer.parameters()) == 40


METADATA: dict[str, Callable[[Any], Any]] = {
    "torch.typename": torch.typename,
    "type": lambda p: p.type(),
    "dir": lambda p: "weight" if "requires_grad" in dir(p) else "",
    "is_shared": lambda p: p.is_shared(),
    "is_conj": lambda p: (p.is_conj(), torch.is_conj(p)),
    "is_neg": lambda p: (p.is_neg(), torch.is_neg(p)),
    "is_pinned": lambda p: p.is_pinned(),
    "is_signed": lambda p: (p.is_signed(), torch.is_signed(p)),
    "dim_order": lambda p: p.dim_order(),
    "result_type": lambda p: (torch.result_type(p, 1), torch.result_type(torch.ones(2, dtype=torch.float64), p)),
    "equal": lambda p: (torch.equal(p, p), p.equal(p)),
    "is_set_to": lambda p: p.is_set_to(p),
    "is_same_size": lambda p: (p.is_same_size(p), torch.is_same_size(p, torch.ones(5, 7))),
    "likes": lambda p: [
        (made.shape, made.dtype, type(made))
        for made in (torch.rand_like(p), torch.randn_like(p), torch.randint_like(p, 3))
    ],
}


@pytest.mark.parametrize("policy", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("question", METADATA)
def test_answers_that_need_no_values_are_those_of_a_plain_parameter(question: str, policy: torch.dtype | None) -> None:
    plain = nn.Linear(7, 5)
    precision = MixedPrecisionPolicy(param_dtype=policy)
    sharded = Sharded(nn.Linear(7, 5), lambda model, session: fully_shard(model, session, mp_policy=precision))
    weight = sharded.model.weight
    assert isinstance(weight, FreedParameter)
    assert METADATA[question](weight) == METADATA[question](plain.weight)


def test_model_with_containers_of_parameters_is_printed() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.ParameterDict({"a": torch.ones(3)}), nn.ParameterList([torch.ones(3)])])
    expected = repr(model)
    shared = nn.Sequential(nn.Linear(2, 2))
    shared.parts = model
    Sharded(shared, wrap_whole)
    assert repr(model) == expected


def test_other_values_of_equal_and_type_raise(layer: Any) -> None:
    with pytest.raises(FreedParameterError):
        torch.equal(layer.weight, torch.ones(5, 7))
    with pytest.raises(FreedParameterError):
        layer.weight.type(torch.float64)


def test_printing_shows_no_values(layer: nn.Linear) -> None:
    expected = "FreedParameter('Linear-0.weight', shape=(5, 7), dtype=torch.float32, unit='Linear-0')"
    assert repr(layer.weight) == str(layer.weight) == f"{layer.weight}" == expected
    assert "Linear(in_features=7, out_features=5, bias=True)" in repr(layer)


def test_requires_grad_set_while_freed_persists(layer: Any) -> None:
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad = False
    layer.unshard()
    assert not layer.weight.requires_grad and not layer.bias.requires_grad
    layer.reshard()
    layer.requires_grad_(True)
    assert layer.weight.requires_grad


def test_optimizers_and_groups_take_freed_parameters(layer: nn.Linear) -> None:
    optimizer = torch.optim.AdamW([{"params": [layer.weight]}, {"params": [layer.bias], "lr": 0.1}])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"][0] is layer.weight
    assert optimizer.state_dict()["state"] == {}


def test_gathered_parameter_has_its_ordinary_class(layer: Any) -> None:
    layer.unshard()
    assert type(layer.weight) is nn.Parameter
    assert owner_of(layer.weight).name == "Linear-0.weight"
    layer.reshard()
    assert isinstance(layer.weight, FreedParameter)


def test_subclass_of_parameter_keeps_its_class() -> None:
    class Scaled(nn.Parameter):
        factor = 3

    model = nn.Sequential(nn.Linear(7, 5))
    model[0].weight = Scaled(model[0].weight.detach())
    sharded = Sharded(model, wrap_children)
    layer: Any = sharded.model[0]
    assert isinstance(layer.weight, Scaled) and layer.weight.factor == 3
    with pytest.raises(FreedParameterError):
        layer.weight.sum()
    layer.unshard()
    assert type(layer.weight) is Scaled
