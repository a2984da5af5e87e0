"""Element-wise optimizers match torch.optim bit for bit, wherever parameters are cut."""

from __future__ import annotations

import math
import uuid
from contextlib import closing
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwell
from shardwell.command.inspect_commands import peek
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import shard_pb2
from tests.support.optimizer_parity import OddModel, compare, compare_weights, two_groups
from tests.support.reference_optimizers import Lion

pytestmark = pytest.mark.usefixtures("one_thread")

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
    "adamw": ("AdamW", torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95)}),
    "nadam": ("NAdam", torch.optim.NAdam, {"weight_decay": 0.1, "momentum_decay": 0.01}),
    "nadam decoupled": ("NAdam", torch.optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "radam": ("RAdam", torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.9, 0.9)}),
    "radam decoupled": ("RAdam", torch.optim.RAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adamax": ("Adamax", torch.optim.Adamax, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": ("RMSprop", torch.optim.RMSprop, {"weight_decay": 0.1, "alpha": 0.9}),
    "rmsprop all": ("RMSprop", torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True, "maximize": True}),
    "adagrad": ("Adagrad", torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "adadelta": ("Adadelta", torch.optim.Adadelta, {"weight_decay": 0.1, "rho": 0.8}),
    "lion": ("Lion", Lion, {"lr": 1e-3, "weight_decay": 0.1}),
}
FUSED = ("SGD", "Adam", "AdamW")


@pytest.fixture(params=["cluster_of_one", "cluster_of_three"])
def cluster(request: pytest.FixtureRequest) -> shardwell.LocalCluster:
    running: shardwell.LocalCluster = request.getfixturevalue(request.param)
    return running


@pytest.mark.parametrize("case", CASES)
def test_element_wise_optimizer_matches_torch_bit_for_bit(cluster: shardwell.LocalCluster, case: str) -> None:
    name, plain, settings = CASES[case]
    implementation = {"fused": True} if name in FUSED else {}

    def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
        return two_groups(model, lr=settings.get("lr", plain([torch.zeros(1)]).defaults["lr"]) * 3)

    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        compare(
            session,
            lambda params: getattr(shardwell.optim, name)(params, **settings),
            lambda params: plain(params, **settings, **implementation),
            groups,
            # torch's fused SGD requires that all parameters start in the same step.
            always_rare=name == "SGD",
        )


def test_settings_have_the_defaults_of_torch(cluster: shardwell.LocalCluster) -> None:
    implementation_settings = {"foreach", "capturable", "differentiable", "fused"}
    left_out = {"Adam": {"decoupled_weight_decay"}, "AdamW": {"decoupled_weight_decay"}}
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(torch.nn.Linear(2, 2, bias=False), session)
        for name in shardwell.optim.__all__:
            if (torch_class := getattr(torch.optim, name, None)) is not None:
                expected = torch_class([torch.zeros(2, 2)]).defaults
                defaults = getattr(shardwell.optim, name)(model.parameters()).defaults
                assert defaults.items() <= expected.items(), name
                assert expected.keys() - defaults.keys() <= implementation_settings | left_out.get(name, set()), name


def test_peek_returns_optimizer_state_in_pieces(cluster: shardwell.LocalCluster) -> None:
    run, settings = uuid.uuid4().hex, {"lr": 1e-3, "momentum": 0.9, "centered": True}
    with (
        shardwell.join(cluster.address, run=run) as session,
        closing(CoordinatorClient(cluster.address)) as coordinator,
    ):
        plain, expected = compare(
            session,
            lambda params: shardwell.optim.RMSprop(params, **settings),
            lambda params: torch.optim.RMSprop(params, **settings),
        )
        for name in ("grad_avg", "momentum_buffer", "square_avg"):
            request = shard_pb2.PeekRequest(
                run=run, parameter="odd.wide.weight", source=shard_pb2.PEEK_SOURCE_OPTIMIZER_STATE, state_name=name
            )
            pieces = [piece.response for piece in peek(coordinator, request, timeout_s=60)]
            state = expected.state[plain.wide.weight][name]
            assert list(pieces[0].values) == state.flatten()[:8].tolist()
            assert math.fsum(piece.norm**2 for piece in pieces) == pytest.approx(state.double().square().sum().item())


def test_moving_averages_match_torch(cluster: shardwell.LocalCluster) -> None:
    plain, model = OddModel(), OddModel()
    frozen_at_first = "tall.weight"
    averaged = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        shardwell.fully_shard(model, session, name="odd")
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        for trained in (plain, model):
            trained.get_parameter(frozen_at_first).requires_grad_(False)
        for step in session.steps(6):
            x = torch.randn(5, 101, generator=torch.Generator().manual_seed(step.number))
            for trained in (plain, model):
                trained.get_parameter(frozen_at_first).requires_grad_(step.number > 2)
                trained(x, use_rare=step.number % 3 == 1).backward()
            optimizer.ema_decay = 0.9 if step.number != 4 else None
            for each in (expected, optimizer):
                each.step()
                each.zero_grad()
            if step.number != 4:
                averaged.update_parameters(plain)
            got = shardwell.full_state_dict(model, ema=True)
            for name, value in averaged.module.state_dict().items():
                assert torch.equal(got[name], value), f"{name} in step {step.number}"
        compare_weights(model, plain)


def test_reading_averages_without_ema_decay_is_rejected(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(torch.nn.Linear(2, 2), session)
        optimizer = shardwell.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        with pytest.raises(shardwell.StepStateError, match=r"no moving average: set optimizer\.ema_decay"):
            shardwell.full_state_dict(model, ema=True)
        with pytest.raises(shardwell.UsageError, match=r"ema_decay=1\.5: expected 0 to 1"):
            optimizer.ema_decay = 1.5
