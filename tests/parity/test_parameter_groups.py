"""Parameter groups that change between steps match torch; state_dict holds hyper-parameters only."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.optimizer_parity import OddModel, compare_weights

STEPS = 7

Groups = list[dict[str, Any]]
Change = Callable[[torch.optim.Optimizer, nn.Module], None]


@pytest.fixture
def session(cluster_of_three: shardwell.LocalCluster) -> Iterator[shardwell.Session]:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as joined:
        yield joined


MAKERS: dict[str, tuple[Callable[[Groups], Any], Callable[[Groups], torch.optim.Optimizer]]] = {
    "servers": (
        lambda groups: shardwell.optim.AdamW(groups, lr=0.01),
        lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    ),
    "trainers": (
        lambda groups: shardwell.ClientSide(groups, torch.optim.AdamW, lr=0.01),
        lambda groups: torch.optim.AdamW(groups, lr=0.01),
    ),
}


def parameters_of(model: nn.Module, *names: str) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.partition(".")[0] in names]


def change(number: int, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Changes the groups of an optimizer before a step."""
    groups = optimizer.param_groups
    if number == 1:
        groups[0].update(lr=0.03, betas=(0.8, 0.9), weight_decay=0.2)
    if number == 2:
        groups[0].update(maximize=True, eps=1e-6)
        optimizer.add_param_group({"params": parameters_of(model, "tall", "rare"), "lr": 0.02, "amsgrad": True})
    if number == 3:
        groups[0].update(maximize=False, lr=torch.tensor(0.005))
        optimizer.add_param_group({"params": parameters_of(model, "scale", "empty")})
    if number == 4:
        groups[1].update(lr=0.001)
        groups[2]["params"], groups[1]["params"] = groups[1]["params"], groups[2]["params"]
        groups[1]["amsgrad"], groups[2]["amsgrad"] = groups[2]["amsgrad"], groups[1]["amsgrad"]
    if number == 5:
        optimizer.taken = groups.pop()  # type: ignore[attr-defined]
    if number == 6:
        optimizer.add_param_group(optimizer.taken)  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", MAKERS)
def test_changes_of_groups_between_steps_match_torch(session: shardwell.Session, where: str) -> None:
    """Every kind of setting changes. Groups are added, changed, removed and added again with their state."""
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    make, make_plain = MAKERS[where]
    optimizers = [
        (optimizer, each)
        for optimizer, each in (
            (make([{"params": parameters_of(model, "wide")}]), model),
            (make_plain([{"params": parameters_of(plain, "wide")}]), plain),
        )
    ]
    for number in range(STEPS):
        x = torch.randn(5, 101, generator=torch.Generator().manual_seed(number))
        for optimizer, each in optimizers:
            change(number, optimizer, each)
            each(x, use_rare=True).backward()
            optimizer.step()
            each.zero_grad() if each is plain else optimizer.zero_grad()
    compare_weights(model, plain)


def test_group_of_unsharded_parameters_is_rejected(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(OddModel(), session)
    optimizer = shardwell.optim.SGD(parameters_of(model, "wide"), lr=0.1)
    with pytest.raises(shardwell.UsageError, match=r"of shape .*7.* is not sharded: call fully_shard"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": parameters_of(model, "wide")})


def test_hyper_parameters_are_saved_and_loaded(session: shardwell.Session) -> None:
    model = shardwell.fully_shard(OddModel(), session)
    groups = [{"params": parameters_of(model, "wide", "tall"), "lr": 0.3}, {"params": parameters_of(model, "rare")}]
    optimizer = shardwell.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    saved = copy.deepcopy(optimizer.state_dict())
    assert [group["lr"] for group in saved["param_groups"]] == [0.3, 0.01]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for group in optimizer.param_groups:
        group.update(lr=1.0, betas=(0.1, 0.2), weight_decay=0.5)
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.01]
    assert all(group["betas"] == (0.8, 0.9) and group["weight_decay"] == 1e-2 for group in optimizer.param_groups)
    model(torch.ones(5, 101), use_rare=True).backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.15, 0.005], "the scheduler still changes the groups"


def test_loading_optimizer_state_is_rejected(session: shardwell.Session) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=0.7)
    plain(torch.ones(5, 101), use_rare=True).backward()
    fresh = copy.deepcopy(reference.state_dict())
    reference.step()
    with pytest.raises(shardwell.UsageError, match=r"has state of 7 parameters.*joining the run again restores it"):
        optimizer.load_state_dict(reference.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.01
    optimizer.load_state_dict(fresh)
    assert optimizer.param_groups[0]["lr"] == 0.7
    with pytest.raises(shardwell.UsageError, match="has 2 parameter groups, expected 1"):
        optimizer.load_state_dict({"param_groups": [{}, {}]})
    with pytest.raises(shardwell.UsageError, match="parameter group 0 of the state_dict has 1 parameters, expected 7"):
        optimizer.load_state_dict({"param_groups": [{"params": [0]}]})
