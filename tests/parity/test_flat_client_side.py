"""FlatClientSide matches torch bit for bit and rejects invalid results of the update function."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support import transformer
from tests.support.cluster import join_options
from tests.support.flat_updates import FLAT_ADAM, flat_adam
from tests.support.optimizer_parity import compare
from tests.support.processes import TrainerProcess
from tests.support.reference import sha256, train_plain
from tests.support.trainer import train

STEPS = 4
LR = 0.05

Values = torch.Tensor
Settings = Mapping[str, Any]


def sgd(values: Values, gradient: torch.Tensor, state: dict[str, Any], group: Settings) -> Values:
    return values.add_(gradient, alpha=-group["lr"])


@pytest.fixture
def clusters(
    cluster_of_one: shardwell.LocalCluster, cluster_of_three: shardwell.LocalCluster
) -> dict[int, shardwell.LocalCluster]:
    """Returns clusters by number of shard servers."""
    return {1: cluster_of_one, 3: cluster_of_three}


def joined(cluster: shardwell.LocalCluster, *, dp: int = 1, transports: str | None = None) -> shardwell.Session:
    world = shardwell.World(dp=dp)
    return shardwell.join(
        cluster.address,
        run=uuid.uuid4().hex,
        world=world,
        min_trainers=1,
        **join_options(transports=transports),
    )


@pytest.mark.parametrize("num_servers", [1, 3])
def test_weights_match_torch_with_groups_clipping_and_scheduler(
    clusters: dict[int, shardwell.LocalCluster], num_servers: int
) -> None:
    """One parameter has no gradient in some steps, which gives it a lower step count."""
    with joined(clusters[num_servers]) as session:
        compare(
            session,
            lambda groups: shardwell.FlatClientSide(groups, flat_adam, **FLAT_ADAM),
            lambda groups: torch.optim.Adam(groups, **FLAT_ADAM, foreach=False),
        )


@pytest.mark.parametrize(("transports", "keep_bytes"), [(None, float("inf")), ("grpc", float("inf")), ("grpc", 0)])
def test_weights_match_torch_with_two_ranks(
    clusters: dict[int, shardwell.LocalCluster], transports: str | None, keep_bytes: float
) -> None:
    def make(parameters: Any) -> shardwell.FlatClientSide:
        return shardwell.FlatClientSide(parameters, flat_adam, keep_bytes=keep_bytes, **FLAT_ADAM)

    with joined(clusters[3], dp=2, transports=transports) as session:
        _, state = train(session, steps=STEPS, make_optimizer=make)
    assert sha256(state) == adam_hash()


def adam_hash() -> str:
    model = transformer.build()
    optimizer = torch.optim.Adam(model.parameters(), **FLAT_ADAM, foreach=False)
    train_plain(model, optimizer, transformer.batch, dp=2, steps=STEPS)
    return sha256(model.state_dict())


def test_partition_of_a_trainer_killed_in_its_update_is_updated_by_the_other(
    cluster_with_short_leases: shardwell.LocalCluster,
) -> None:
    address, run = cluster_with_short_leases.address, uuid.uuid4().hex
    common = ("--dp", 2, "--steps", STEPS, "--client-side", "flat_adam")
    with (
        TrainerProcess(address, run, *common, "--global-rank", 1, "--kill-in-update", 2) as other,
        TrainerProcess(address, run, *common, "--global-rank", 0) as first,
    ):
        survived, died = first.finish(), other.finish()
    assert died["returncode"] == -9, died
    assert survived.get("sha256") == adam_hash(), survived


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(17, 640), nn.Tanh(), nn.Linear(640, 3))


def backward(model: nn.Module) -> None:
    model(torch.linspace(-1, 1, 4 * 17).view(4, 17)).square().mean().backward()


@pytest.mark.parametrize(("num_servers", "dp"), [(1, 1), (1, 2), (3, 2)])
def test_every_rank_gets_its_partition_of_the_mean_gradient_as_flat_tensors(
    clusters: dict[int, shardwell.LocalCluster], num_servers: int, dp: int
) -> None:
    """One trainer plays all ranks and gets all partitions. Together they are the whole gradient."""
    plain, gradients, values = small_model(), [], []
    start = torch.cat([parameter.detach().flatten() for parameter in plain.parameters()])
    backward(plain)

    def record(given: Values, gradient: torch.Tensor, state: dict[str, Any], group: Settings) -> Values:
        assert (given.ndim, gradient.ndim) == (1, 1)
        gradients.append(gradient)
        values.append(given.clone())
        return sgd(given, gradient, state, group)

    with joined(clusters[num_servers], dp=dp) as session:
        model = shardwell.fully_shard(small_model(), session)
        optimizer = shardwell.FlatClientSide(model.parameters(), record, lr=LR)
        for step in session.steps(1):
            for _ in step.batches(lambda *_: None):
                backward(model)
            optimizer.step()
        state = shardwell.full_state_dict(model)
    assert len(gradients) >= num_servers
    assert len(gradients) >= dp
    torch.testing.assert_close(sorted_parts(gradients), sorted_parts([gradient_of(plain)]), rtol=0, atol=0)
    torch.testing.assert_close(sorted_parts(values), sorted_parts([start]), rtol=0, atol=0)
    torch.optim.SGD(plain.parameters(), lr=LR, foreach=False).step()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def gradient_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def sorted_parts(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts).sort().values


@pytest.mark.parametrize("transports", [None, "grpc"])
def test_update_may_return_a_tensor_of_its_state(
    cluster_of_three: shardwell.LocalCluster, transports: str | None
) -> None:
    """The values of the next call share no memory with the state, and the function may overwrite them."""

    def update(values: Values, gradient: torch.Tensor, state: dict[str, Any], group: Settings) -> Values:
        state["kept"] = sgd(state.get("kept", values), gradient, state, group)
        result: Values = state["kept"]
        if state.get("count"):
            values.zero_()
        state["count"] = 1
        return result

    plain = small_model()
    with joined(cluster_of_three, transports=transports) as session:
        model = shardwell.fully_shard(small_model(), session)
        optimizers = (
            shardwell.FlatClientSide(model.parameters(), update, lr=LR),
            torch.optim.SGD(plain.parameters(), lr=LR, foreach=False),
        )
        for _ in range(STEPS):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                backward(each)
                optimizer.step()
                optimizer.zero_grad()
        state = shardwell.full_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


# Errors.


@pytest.fixture
def sharded(cluster_of_three: shardwell.LocalCluster) -> Iterator[nn.Sequential]:
    with joined(cluster_of_three) as session:
        yield shardwell.fully_shard(nn.Sequential(nn.Linear(16, 6, bias=False)), session, name="small")


def check_rejected(model: nn.Module, update: Callable[..., Any], error: type[Exception], match: str) -> None:
    """Checks that a step with ``update`` raises and changes nothing, and that the next step succeeds."""
    before, good = shardwell.full_state_dict(model), [False]

    def maybe(values: Values, gradient: torch.Tensor, state: dict[str, Any], group: Settings) -> Any:
        return (sgd if good[0] else update)(values, gradient, state, group)

    optimizer = shardwell.FlatClientSide(model.parameters(), maybe, lr=LR)
    model(torch.ones(4, 16)).sum().backward()
    with pytest.raises(error, match=match):
        optimizer.step()
    after = shardwell.full_state_dict(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    good[0] = True
    optimizer.step()
    expected = before["0.weight"].add(torch.full((6, 16), 4.0), alpha=-LR)
    assert torch.equal(shardwell.full_state_dict(model)["0.weight"], expected)


@pytest.mark.parametrize(
    ("update", "got"),
    [
        (lambda values, *_: values[:-1], r"a torch.float32 tensor of shape \[95\]"),
        (lambda values, *_: torch.zeros(97), r"a torch.float32 tensor of shape \[97\]"),
        (lambda values, *_: values.view(6, 16), r"a torch.float32 tensor of shape \[6, 16\]"),
        (lambda values, *_: values.double(), r"a torch.float64 tensor of shape \[96\]"),
        (lambda *_: None, "NoneType"),
    ],
    ids=["short", "long", "shape", "dtype", "nothing"],
)
def test_invalid_result_of_the_update_is_rejected(sharded: nn.Sequential, update: Any, got: str) -> None:
    match = rf"update 'maybe' of unit 'small' returned {got}: expected a torch.float32 tensor of shape \[96\]"
    check_rejected(sharded, update, shardwell.UsageError, match)


def test_state_of_another_shape_is_rejected(sharded: nn.Sequential) -> None:
    def update(values: Values, gradient: torch.Tensor, state: dict[str, Any], group: Settings) -> Values:
        state["total"] = gradient.sum()
        return values

    check_rejected(
        sharded, update, shardwell.UsageError, r"left in state\['total'\] .* of shape \[\]: expected .* \[96\]"
    )


def test_non_finite_values_are_rejected(sharded: nn.Sequential) -> None:
    check_rejected(
        sharded, lambda values, *_: values.fill_(float("nan")), shardwell.NonFiniteError, "has NaN or infinity"
    )


def test_optimizer_class_is_rejected(sharded: nn.Sequential) -> None:
    with pytest.raises(shardwell.UsageError, match=r"expected a function update\(.*use ClientSide for a class"):
        shardwell.FlatClientSide(sharded.parameters(), torch.optim.SGD, lr=LR)  # type: ignore[arg-type]
