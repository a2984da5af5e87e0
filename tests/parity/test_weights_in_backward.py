"""Graphs that read a unit's weights but bypass the results of its forward give the same gradients as plain PyTorch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwell
from shardwell import MixedPrecisionPolicy, ShardingStrategy
from shardwell.module.units import Units
from shardwell_wire.errors import FreedParameterError, UsageError
from tests.support.in_memory_store import InMemoryStore


class ScaleBySavedView(torch.autograd.Function):
    """Stores a view of the weight in its context, where torch does not check it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.view = weight.view(-1)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return gradient * ctx.view, (gradient * x).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.scale = nn.Linear(6, 6), nn.LayerNorm(6), nn.Parameter(torch.rand(6))
        self.outside: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)).tanh()
        self.outside.append((x * self.scale).mean())
        return ScaleBySavedView.apply(y, self.scale)  # type: ignore[no-any-return]


Model = nn.Sequential
Loss = Callable[[Model, torch.Tensor], torch.Tensor]


def gathered(model: nn.Module) -> Callable[[bool], None]:
    """Returns a function that gathers or frees all units, if there are any."""

    def gather(usable: bool) -> None:
        for module in model.modules():
            if hasattr(module, "unshard"):
                module.unshard() if usable else module.reshard()

    return gather


def evaluated(model: Model, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def aux_losses(model: Model, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum() + sum(model[0].outside + model[1].outside)  # type: ignore[operator]


def aux_losses_alone(model: Model, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return sum(model[0].outside + model[1].outside)  # type: ignore[return-value]


def penalty_between_unshard_and_reshard(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    gathered(model)(True)
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    gathered(model)(False)
    evaluated(model, x)
    return loss + penalty


def penalty_alone(model: Model, x: torch.Tensor) -> torch.Tensor:
    gathered(model)(True)
    penalty = sum(parameter.pow(3).sum() for parameter in model.parameters())
    gathered(model)(False)
    return penalty  # type: ignore[return-value]


def penalty_on_views(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    gathered(model)(True)
    weight = model[1].first.weight
    penalty = (weight.t() @ weight).pow(2).sum() + weight[0].pow(3).sum() + weight.view(-1)[3:].exp().sum()
    penalty = penalty + torch.nn.utils.parameters_to_vector(model[0].parameters()).pow(2).sum()
    gathered(model)(False)
    return loss + penalty


def features_of_hooks(model: Model, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handles = [block.norm.register_forward_hook(lambda _, __, y: seen.append(y)) for block in model]
    model(x)
    for handle in handles:
        handle.remove()
    return sum(y.pow(2).sum() for y in seen)  # type: ignore[return-value]


def feature_of_one_unit_into_another(model: Model, x: torch.Tensor) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    handle = model[0].norm.register_forward_hook(lambda _, __, y: seen.append(y))
    model[0](x)
    handle.remove()
    return model[1](seen[0]).pow(2).sum()  # type: ignore[no-any-return]


def aux_losses_of_checkpoints(reentrant: bool) -> Loss:
    def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = checkpoint(block, x, use_reentrant=reentrant)
        gathered(model)(True)
        penalty = sum(parameter.pow(2).sum() for parameter in model[0].parameters())
        gathered(model)(False)
        return x.sum() + penalty

    return loss


def double_backward(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model(x).pow(2).sum() + sum(model[0].outside)
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    return y + gradient.pow(2).sum()  # type: ignore[no-any-return]


def functional_penalty(model: Model, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).sum()
    gathered(model)(True)
    clones = {name: parameter.clone() for name, parameter in model[0].named_parameters()}
    gathered(model)(False)
    return loss + F.linear(x, clones["first.weight"]).pow(2).sum()


LOSSES: dict[str, Loss] = {
    "auxiliary losses in a list": aux_losses,
    "auxiliary losses alone": aux_losses_alone,
    "penalty between unshard and reshard": penalty_between_unshard_and_reshard,
    "penalty alone": penalty_alone,
    "penalty on views": penalty_on_views,
    "features taken by hooks": features_of_hooks,
    "feature of one unit into another": feature_of_one_unit_into_another,
    "reentrant checkpoints and a penalty": aux_losses_of_checkpoints(True),
    "checkpoints and a penalty": aux_losses_of_checkpoints(False),
    "double backward": double_backward,
    "clones": functional_penalty,
}


def build() -> Model:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture
def store() -> Iterator[InMemoryStore]:
    with closing(InMemoryStore()) as made:
        yield made


def shard(model: Model, store: InMemoryStore, *, root: bool = True, **settings: Any) -> Units:
    units = Units(store)
    session = SimpleNamespace(units=units)
    for block in model:
        shardwell.fully_shard(block, session, **settings)
    if root:
        shardwell.fully_shard(model, session, **settings)
    for block in model:
        block.set_requires_gradient_sync(False)
    return units


def gradients(model: Model, loss: Loss, *, times: int = 1) -> dict[str, torch.Tensor | None]:
    x = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    total = loss(model, x)
    for time in range(times):
        total.backward(retain_graph=time + 1 < times)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"input": x.grad, **found}


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "FULL_SHARD": {"strategy": ShardingStrategy.FULL_SHARD},
    "SHARD_GRAD_OP": {"strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"strategy": ShardingStrategy.NO_SHARD},
    "without a root unit": {"root": False},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_equal_those_of_plain_pytorch(store: InMemoryStore, loss: str, settings: str) -> None:
    model = build()
    shard(model, store, **SETTINGS[settings])
    assert_equal(gradients(model, LOSSES[loss]), gradients(build(), LOSSES[loss]))


def assert_equal(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    for name, gradient in expected.items():
        own = found[name]
        assert (own is None) == (gradient is None), name
        assert own is None or (gradient is not None and torch.equal(own, gradient)), name


@pytest.mark.parametrize("loss", ["penalty on views", "auxiliary losses in a list", "features taken by hooks"])
def test_second_backward_through_a_retained_graph_gives_the_same_gradients(store: InMemoryStore, loss: str) -> None:
    model = build()
    shard(model, store)
    assert_equal(gradients(model, LOSSES[loss], times=2), gradients(build(), LOSSES[loss], times=2))


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_in_another_dtype_equal_those_of_plain_pytorch(store: InMemoryStore, loss: str) -> None:
    model = build()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False, keep_low_precision_grads=True)
    shard(model, store, mp_policy=policy)
    plain = build().bfloat16()

    def in_bfloat16(model: Model, x: torch.Tensor) -> torch.Tensor:
        return LOSSES[loss](model, x.bfloat16()).float()

    found, expected = gradients(model, in_bfloat16), gradients(plain, in_bfloat16)
    for name, gradient in expected.items():
        own = found[name]
        assert (own is None) == (gradient is None), name
        assert own is None or (gradient is not None and torch.equal(own, gradient.to(own.dtype))), name


def test_undetectable_read_raises_and_names_the_parameter(store: InMemoryStore) -> None:
    model, x = build(), torch.rand(4, 6, requires_grad=True)
    shard(model, store)
    model[0].unshard()
    loss = (x * model[0].scale.detach()).sum()
    model[0].reshard()
    with pytest.raises(FreedParameterError, match=r"backward needs parameter 'Block-0.scale', whose unit 'Block-0'"):
        loss.backward()
    with pytest.raises(FreedParameterError, match="clone"):
        torch.autograd.grad(loss, x)


def test_backward_through_a_graph_of_an_earlier_version_raises(store: InMemoryStore) -> None:
    model, x = build(), torch.rand(4, 6)
    units = shard(model, store)
    loss = penalty_alone(model, x)
    units.finish_item()
    store.step()
    units.invalidate()
    model[0].unshard()
    model[1].unshard()
    with pytest.raises(UsageError, match="made before the last optimizer"):
        loss.backward()


def test_error_about_an_unsharded_tensor_is_unchanged(store: InMemoryStore) -> None:
    shard(build(), store)
    x = torch.rand(3, requires_grad=True)
    y = x.exp()
    z = y.sin()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_search_of_an_ordinary_backward_ends_at_the_results_of_forwards(store: InMemoryStore) -> None:
    model, x = build(), torch.rand(4, 6)
    units = shard(model, store)
    loss = model(x).pow(2).sum()
    watched = set(units.passes.graphs.watched)
    loss.backward()
    assert units.passes.graphs.watched == watched


def test_backward_of_a_plain_model_in_another_thread_gathers_nothing(store: InMemoryStore) -> None:
    """Every thread numbers its nodes from 0, so the nodes of both threads have the same numbers."""
    model, x = build(), torch.rand(4, 6)
    units = shard(model, store)

    def backward_of_plain_model() -> None:
        plain = build()
        sum(aux_losses(plain, x) for _ in range(3)).backward()

    in_thread(lambda: model(x))
    watched = set(units.passes.graphs.watched)
    assert watched
    in_thread(backward_of_plain_model)
    assert units.passes.graphs.watched == watched


def test_backward_through_a_graph_of_another_thread_gives_the_same_gradients(store: InMemoryStore) -> None:
    model = build()
    shard(model, store)

    def loss(model: Model, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        in_thread(lambda: made.append(model(x).pow(2).sum()))
        return made[0]

    assert_equal(gradients(model, loss), gradients(build(), loss))


def in_thread(work: Callable[[], None]) -> None:
    """Runs a function in a new thread, and raises if the function does."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert not errors, errors
