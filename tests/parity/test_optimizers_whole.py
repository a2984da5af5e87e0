"""Whole-tensor optimizers match their references bit for bit and reject tensors that are cut."""

from __future__ import annotations

import uuid
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.v1 import coordinator_pb2
from tests.support.optimizer_parity import OddModel, compare, compare_weights
from tests.support.reference_optimizers import Lamb

pytestmark = pytest.mark.usefixtures("one_thread")

Groups = list[dict[str, Any]]


@pytest.fixture(params=["cluster_of_one", "cluster_of_three"])
def cluster(request: pytest.FixtureRequest) -> shardwell.LocalCluster:
    return request.getfixturevalue(request.param)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim != 2]


def with_elements(model: nn.Module) -> Groups:
    """Returns groups without empty parameters: torch's Adafactor divides by the number of elements."""
    rest = [parameter for parameter in others(model) if parameter.numel()]
    return [{"params": matrices(model)}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]


ADAFACTOR: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "d": 1.5, "beta2_decay": -0.7}
LAMB: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}
MUON: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}
ADAMW: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.2}


def test_adafactor_matches_torch(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        compare(
            session,
            lambda params: shardwell.optim.Adafactor(params, **ADAFACTOR),
            lambda params: torch.optim.Adafactor(params, **ADAFACTOR),
            with_elements,
            placement="tensor",
        )


def test_lamb_matches_its_reference(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        compare(
            session,
            lambda params: shardwell.optim.LAMB(params, **LAMB),
            lambda params: Lamb(params, **LAMB),
            placement="tensor",
        )


class MuonAndAdamW(torch.optim.Optimizer):
    """Runs torch's Muon for matrices and AdamW for the rest in one step."""

    def __init__(self, groups: Groups) -> None:
        self.both = [
            torch.optim.Muon(groups[0]["params"], **MUON),
            torch.optim.AdamW(groups[1]["params"], **ADAMW, fused=True),
        ]
        super().__init__([group for each in self.both for group in each.param_groups], {})

    def step(self) -> None:
        for each in self.both:
            each.step()


def muon_and_adamw(groups: Groups) -> shardwell.optim.Combined:
    return shardwell.optim.Combined(
        [
            shardwell.optim.Muon(groups[0]["params"], **MUON),
            shardwell.optim.AdamW(groups[1]["params"], **ADAMW),
        ]
    )


def test_muon_for_matrices_and_adamw_for_the_rest_match_torch(cluster: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster.address, run=uuid.uuid4().hex) as session:
        compare(
            session,
            muon_and_adamw,
            MuonAndAdamW,
            lambda model: [{"params": matrices(model)}, {"params": others(model)}],
            placement="tensor",
        )


def test_combined_optimizers_have_their_own_schedulers_and_groups(cluster_of_three: shardwell.LocalCluster) -> None:
    plain = OddModel()
    reference = MuonAndAdamW([{"params": matrices(plain)}, {"params": others(plain)}])
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.auto_wrap(OddModel(), session, shardwell.NoWrapPolicy(), placement="tensor")
        with closing(CoordinatorClient(cluster_of_three.address)) as coordinator:
            (unit,) = coordinator.call("ListUnits", coordinator_pb2.ListUnitsRequest(run=session.run)).units
            assert len({shard.server_id for shard in unit.shards}) == 3
        muon = shardwell.optim.Muon(matrices(model), **MUON)
        adamw = shardwell.optim.AdamW(others(model), **ADAMW)
        optimizer = shardwell.optim.Combined([muon, adamw])
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(muon, 0.5)]
        schedulers.append(torch.optim.lr_scheduler.ExponentialLR(reference.both[0], 0.5))
        for step in session.steps(4):
            x = torch.randn(5, 101, generator=torch.Generator().manual_seed(step.number))
            for each, trained in ((reference, plain), (optimizer, model)):
                trained(x, use_rare=True).backward()
                each.step()
                each.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        compare_weights(model, plain)


def test_cut_tensors_are_rejected_before_the_commit(cluster_of_three: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(OddModel(), session)
        model(torch.randn(5, 101), use_rare=True).backward()
        optimizer = shardwell.optim.LAMB(model.parameters())
        with pytest.raises(shardwell.InvalidRequestError, match=r"whole tensors.*wide\.weight.*placement=\"tensor\""):
            optimizer.step()
        assert session.step == 0
        shardwell.optim.SGD(model.parameters()).step()
        assert session.step == 1


def test_small_tensors_need_no_placement(cluster_of_three: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(nn.Linear(3, 3), session)
        model(torch.ones(3)).sum().backward()
        shardwell.optim.LAMB(model.parameters()).step()
        assert session.step == 1


def test_invalid_combinations_are_rejected(cluster_of_three: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(nn.Linear(3, 3), session)
        with pytest.raises(shardwell.UsageError, match=r"Muon takes matrices.*shape \(3,\).*Combined"):
            shardwell.optim.Muon(model.parameters())
        muon, adamw = shardwell.optim.Muon([model.weight]), shardwell.optim.AdamW([model.bias])
        with pytest.raises(ValueError, match="more than one parameter group"):
            shardwell.optim.Combined([muon, shardwell.optim.AdamW(model.parameters())])
        optimizer = shardwell.optim.Combined([muon, adamw])
        for call in (muon.step, lambda: adamw.clip_grad_norm_(1.0)):
            with pytest.raises(shardwell.UsageError, match=r"use .* of the Combined"):
                call()
        with pytest.raises(shardwell.UsageError, match="not combined yet"):
            shardwell.optim.Combined([muon])
        for grown in (muon, optimizer):
            with pytest.raises(shardwell.UsageError, match="add parameter groups to"):
                grown.add_param_group({"params": [model.bias]})


def test_changing_the_algorithm_of_a_parameter_is_rejected(cluster_of_three: shardwell.LocalCluster) -> None:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session:
        model = shardwell.fully_shard(nn.Linear(3, 3), session, name="layer")
        first, swapped = (
            shardwell.optim.Combined([shardwell.optim.Lion([left]), shardwell.optim.RAdam([right])])
            for left, right in ((model.weight, model.bias), (model.bias, model.weight))
        )
        model(torch.ones(3)).sum().backward()
        first.step()
        model(torch.ones(3)).sum().backward()
        with pytest.raises(shardwell.ConflictError, match=r"'layer\.weight' already has 'lion' state.*'radam'"):
            swapped.step()
        first.step()
        assert session.step == 2


def test_trainers_with_different_placements_are_rejected(cluster_of_three: shardwell.LocalCluster) -> None:
    run = uuid.uuid4().hex
    for placement, again in (("tensor", "flat"), ("flat", "tensor")):
        with shardwell.join(cluster_of_three.address, run=f"{run}-{placement}", trainer="one") as session:
            shardwell.fully_shard(nn.Linear(3, 3), session, name="layer", placement=placement)
        with (
            shardwell.join(cluster_of_three.address, run=f"{run}-{placement}", trainer="two") as session,
            pytest.raises(shardwell.UnitMismatchError, match=f"placement '{placement}', now with '{again}'"),
        ):
            shardwell.fully_shard(nn.Linear(3, 3), session, name="layer", placement=again)


def test_unknown_placement_is_rejected(cluster_of_three: shardwell.LocalCluster) -> None:
    with (
        shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as session,
        pytest.raises(shardwell.InvalidRequestError, match="placement 'TENSOR': expected one of flat, tensor"),
    ):
        shardwell.fully_shard(nn.Linear(3, 3), session, placement="TENSOR")
