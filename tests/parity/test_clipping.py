"""Clipping by norm and by value matches torch; the norm does not depend on how units are cut."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.optimizer_parity import OddModel, compare_weights

Optimizer = shardwell.optim.SGD | shardwell.ClientSide

MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], Any]] = {
    "servers": lambda parameters: shardwell.optim.SGD(parameters, lr=0.5),
    "trainers": lambda parameters: shardwell.ClientSide(parameters, torch.optim.SGD, lr=0.5),
}


@pytest.fixture
def clusters(
    cluster_of_one: shardwell.LocalCluster, cluster_of_three: shardwell.LocalCluster
) -> dict[int, shardwell.LocalCluster]:
    """Returns clusters by number of shard servers."""
    return {1: cluster_of_one, 3: cluster_of_three}


@pytest.fixture
def session(clusters: dict[int, shardwell.LocalCluster]) -> Iterator[shardwell.Session]:
    with shardwell.join(clusters[3].address, run=uuid.uuid4().hex) as joined:
        yield joined


def backward(model: nn.Module, number: int = 0) -> None:
    x = torch.randn(5, 101, generator=torch.Generator().manual_seed(number))
    model(x, use_rare=number % 2 == 0).backward()


def plain_step(model: OddModel, clip: Callable[[list[nn.Parameter]], Any], number: int = 0) -> Any:
    model.zero_grad()
    backward(model, number)
    result = clip(list(model.parameters()))
    torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()
    return result


@pytest.mark.parametrize("norm_type", [1, 2.0, 3, 0.5, "inf"])
def test_clipping_by_any_norm_matches_torch(clusters: dict[int, shardwell.LocalCluster], norm_type: Any) -> None:
    norms, states, plain = [], [], OddModel()
    # torch's inf norm fails for a parameter without elements.
    expected = plain_step(plain, lambda p: nn.utils.clip_grad_norm_([q for q in p if q.numel()], 0.3, norm_type))
    exact = torch.cat([p.grad.double().flatten() for p in parameters_after_backward(OddModel())]).norm(float(norm_type))
    for cluster in clusters.values():
        with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
            model = shardwell.fully_shard(OddModel(), session)
            optimizer = MAKERS["servers"](model.parameters())
            backward(model)
            norms.append(optimizer.clip_grad_norm_(0.3, norm_type, foreach=False))
            optimizer.step()
            states.append(shardwell.full_state_dict(model))
    assert norms[0].item() == norms[1].item(), "the same for any number of servers"
    assert norms[0].item() == pytest.approx(exact.item(), rel=1e-9)
    torch.testing.assert_close(norms[0].float(), expected, rtol=1e-5, atol=0.0)
    assert norms[0] > 0.3
    for name, value in plain.state_dict().items():
        assert torch.equal(states[0][name], states[1][name])
        torch.testing.assert_close(states[0][name], value, rtol=1e-5, atol=1e-7)


def parameters_after_backward(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters with their gradients in step 0."""
    backward(model)
    return list(model.parameters())


@pytest.mark.parametrize("where", MAKERS)
def test_clipping_by_value_matches_torch_bit_for_bit(session: shardwell.Session, where: str) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizer = MAKERS[where](model.parameters())
    for number, value in enumerate((0.01, 1e-3, None, 0.02)):
        if value is None:
            plain_step(plain, lambda parameters: None, number)
        else:
            plain_step(plain, lambda parameters, value=value: nn.utils.clip_grad_value_(parameters, value), number)
        backward(model, number)
        if value is not None:
            optimizer.clip_grad_value_(value)
        optimizer.step()
        optimizer.zero_grad()
    compare_weights(model, plain)


def test_norms_of_several_types_can_be_requested_in_one_step(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(OddModel(), session)
    optimizer = MAKERS["servers"](model.parameters())
    backward(model)
    norms = [optimizer.clip_grad_norm_(float("inf"), p).item() for p in (1, 2, 1, float("inf"), 2)]
    assert norms[0] == norms[2] > norms[1] == norms[4] > norms[3]


def test_invalid_clipping_arguments_are_rejected(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(OddModel(), session)
    optimizer = MAKERS["servers"](model.parameters())
    backward(model)
    for norm_type in (0, -1.0, float("-inf"), float("nan")):
        with pytest.raises(shardwell.UsageError, match=r"norm_type=.*expected a number above 0, or infinity"):
            optimizer.clip_grad_norm_(1.0, norm_type)
    for value in (0.0, -1.0, float("nan")):
        with pytest.raises(shardwell.UsageError, match=r"clip_grad_value_.*expected a positive number"):
            optimizer.clip_grad_value_(value)
    with pytest.raises(shardwell.UsageError, match="non-finite gradient is never committed"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=False)


def test_norm_that_overflows_a_double_is_rejected(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(OddModel(), session)
    optimizer = MAKERS["servers"](model.parameters())
    (model(torch.ones(5, 101), use_rare=False) * 1e30).backward()
    with pytest.raises(shardwell.NonFiniteError, match="norm of type 40 overflows a double"):
        optimizer.clip_grad_norm_(1.0, 40)
