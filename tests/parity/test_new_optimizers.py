"""A new optimizer for the next stage of training starts with new state, as in torch. A restarted script continues."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from tests.support.optimizer_parity import OddModel, compare_weights
from tests.support.processes import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

Parameters = Iterable[nn.Parameter]
Make = Callable[[Parameters, float], Any]

ON_SERVERS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda parameters, lr: shardwell.optim.AdamW(parameters, lr=lr),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    ),
    "RMSprop": (
        lambda parameters, lr: shardwell.optim.RMSprop(parameters, lr=lr, momentum=0.9),
        lambda parameters, lr: torch.optim.RMSprop(parameters, lr=lr, momentum=0.9, foreach=False),
    ),
    "Adagrad": (
        lambda parameters, lr: shardwell.optim.Adagrad(parameters, lr=lr, initial_accumulator_value=0.1),
        lambda parameters, lr: torch.optim.Adagrad(
            parameters, lr=lr, initial_accumulator_value=0.1, foreach=False, fused=False
        ),
    ),
    "Combined": (
        lambda parameters, lr: shardwell.optim.Combined([shardwell.optim.AdamW(parameters, lr=lr)]),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True),
    ),
}
ON_TRAINERS: dict[str, tuple[Make, Make]] = {
    "ClientSide": (
        lambda parameters, lr: shardwell.ClientSide(parameters, torch.optim.AdamW, lr=lr, foreach=False),
        lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, foreach=False),
    ),
}
STAGES = (1e-2, 1e-3, 3e-3)
STEPS = 3
"""Steps per stage. Every stage makes a new optimizer."""


@pytest.fixture
def session(cluster_of_three: shardwell.LocalCluster) -> Iterator[shardwell.Session]:
    with shardwell.join(cluster_of_three.address, run=uuid.uuid4().hex) as joined:
        yield joined


def backward(model: nn.Module, number: int) -> None:
    """``rare`` has a gradient in the second step of a stage only: its former state must not come back then."""
    x = torch.randn(5, 101, generator=torch.Generator().manual_seed(number))
    model(x, use_rare=number % STEPS == 1).backward()


def train(model: nn.Module, make: Make, stages: Iterable[float] = STAGES) -> None:
    numbers = itertools.count()
    for lr in stages:
        optimizer = make(model.parameters(), lr)
        for _ in range(STEPS):
            optimizer.zero_grad()
            backward(model, next(numbers))
            optimizer.step()


@pytest.mark.parametrize("kind", [*ON_SERVERS, *ON_TRAINERS])
def test_new_optimizer_starts_with_new_state(session: shardwell.Session, kind: str) -> None:
    make, make_plain = (ON_SERVERS | ON_TRAINERS)[kind]
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    train(plain, make_plain)
    train(model, make)
    compare_weights(model, plain)


def run_stages(address: str, run: str, make: Make, until: int, **join: Any) -> dict[str, torch.Tensor]:
    """Runs a script of several stages until a step. Started again, it continues there. Returns the weights."""
    with shardwell.join(address, run=run, **join) as session:
        model = shardwell.fully_shard(OddModel(), session)
        for stage, lr in enumerate(STAGES):
            optimizer = make(model.parameters(), lr)
            if session.step >= (stage + 1) * STEPS:
                continue
            for step in session.steps(min(until, (stage + 1) * STEPS)):
                for number in step.batches(lambda number, _: number):
                    backward(model, number)
                optimizer.step()
                optimizer.zero_grad()
            if session.step == until:
                break
        return shardwell.full_state_dict(model)


@pytest.mark.parametrize("kind", ["AdamW", "Combined", "ClientSide"])
def test_restarted_script_continues_with_its_state(cluster_of_three: shardwell.LocalCluster, kind: str) -> None:
    """Also between two stages, when no step of the new optimizer is committed."""
    make, make_plain = (ON_SERVERS | ON_TRAINERS)[kind]
    plain, run = OddModel(), uuid.uuid4().hex
    train(plain, make_plain)
    for until in range(1, len(STAGES) * STEPS + 1):
        found = run_stages(cluster_of_three.address, run, make, until)
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


def test_checkpoint_knows_which_optimizers_have_stepped(
    cluster_of_three: shardwell.LocalCluster, tmp_path: Path
) -> None:
    make, make_plain = ON_SERVERS["AdamW"]
    plain = OddModel()
    train(plain, make_plain)
    for until in (STEPS, STEPS + 1):
        folder, first, second = tmp_path / str(until), uuid.uuid4().hex, uuid.uuid4().hex
        options = {"checkpoint_dir": str(folder), "checkpoint_every": until}
        run_stages(cluster_of_three.address, first, make, until, **options)
        with shardwell.join(cluster_of_three.address, run=first) as session:
            shardwell.fully_shard(OddModel(), session)
            session.save_checkpoint(wait=True)
        found = run_stages(
            cluster_of_three.address, second, make, len(STAGES) * STEPS, checkpoint_dir=str(folder), resume="latest"
        )
        for name, value in plain.state_dict().items():
            assert torch.equal(found[name], value), name


def test_asynchronous_run_starts_anew_once(cluster_of_three: shardwell.LocalCluster) -> None:
    make, make_plain = ON_SERVERS["AdamW"]
    plain = OddModel()
    train(plain, make_plain)
    found = run_stages(
        cluster_of_three.address, uuid.uuid4().hex, make, len(STAGES) * STEPS, consistency=shardwell.ASYNCHRONOUS
    )
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


def test_moving_average_outlives_the_optimizer(session: shardwell.Session) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    averaged = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=False
    )
    for number in range(4):
        if number in (0, 2):
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
            optimizer.ema_decay = 0.9
            expected = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
        for each, own in ((model, optimizer), (plain, expected)):
            own.zero_grad()
            backward(each, number)
            own.step()
        averaged.update_parameters(plain)
    found = shardwell.full_state_dict(model, ema=True)
    for name, value in averaged.module.state_dict().items():
        assert torch.equal(found[name], value), name


def test_loaded_state_dict_continues_the_state(session: shardwell.Session) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    make, make_plain = ON_SERVERS["AdamW"]
    optimizers = make(model.parameters(), 1e-2), make_plain(plain.parameters(), 1e-2)
    for number in range(4):
        if number == 2:
            loaded = make(model.parameters(), 1e-2), make_plain(plain.parameters(), 1e-2)
            for former, each in zip(optimizers, loaded, strict=True):
                each.load_state_dict(former.state_dict())
            optimizers = loaded
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            backward(each, number)
            optimizer.step()
    compare_weights(model, plain)


def test_optimizer_for_parameters_of_an_added_group_starts_anew(session: shardwell.Session) -> None:
    models = [
        shardwell.fully_shard(OddModel(), session, name="a"),
        shardwell.fully_shard(OddModel(), session, name="b"),
    ]
    plain, (make, make_plain) = [OddModel(), OddModel()], ON_SERVERS["AdamW"]
    first = make(models[0].parameters(), 1e-2), make_plain(plain[0].parameters(), 1e-2)
    for each, optimizer in zip((models[1], plain[1]), first, strict=True):
        optimizer.add_param_group({"params": list(each.parameters())})
    second: Any = None
    for number in range(4):
        if number == 2:
            second = make(models[1].parameters(), 1e-2), make_plain(plain[1].parameters(), 1e-2)
        for own, optimizer in zip((models, plain), second or first, strict=True):
            optimizer.zero_grad()
            backward(own[1], number)
            optimizer.step()
    compare_weights(models[1], plain[1])


def test_two_optimizers_of_the_next_stage_start_anew(session: shardwell.Session) -> None:
    """The second one to be made takes the first step."""
    models, plain = [OddModel(), OddModel()], [OddModel(), OddModel()]
    models = [shardwell.fully_shard(model, session, name=f"{number}") for number, model in enumerate(models)]
    make, make_plain = ON_SERVERS["AdamW"]
    numbers = itertools.count()
    for lr in STAGES:
        optimizers = [make(model.parameters(), lr) for model in models]
        expected = [make_plain(model.parameters(), lr) for model in plain]
        for turn in (1, 0, 1, 0):
            number = next(numbers)
            for each, own in ((models, optimizers), (plain, expected)):
                own[turn].zero_grad()
                backward(each[turn], number)
                own[turn].step()
    for model, reference in zip(models, plain, strict=True):
        compare_weights(model, reference)


def test_replaced_optimizer_cannot_step_again(session: shardwell.Session) -> None:
    """In torch, each of the two optimizers would have moments of its own."""
    model = shardwell.fully_shard(OddModel(), session)
    first, second = (shardwell.optim.AdamW(model.parameters(), lr=lr) for lr in (1e-2, 1e-3))
    for optimizer in (first, first, second):
        backward(model, 0)
        optimizer.step()
    backward(model, 0)
    with pytest.raises(shardwell.UsageError, match="made later for the same parameters, has taken a step"):
        first.step()
    second.step()


def test_optimizers_without_state_may_alternate(session: shardwell.Session) -> None:
    model, plain = shardwell.fully_shard(OddModel(), session), OddModel()
    optimizers = [shardwell.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    expected = [torch.optim.SGD(plain.parameters(), lr=lr, fused=True) for lr in (0.1, 0.2)]
    for number in range(4):
        for each, own in ((model, optimizers), (plain, expected)):
            own[number % 2].zero_grad()
            backward(each, number)
            own[number % 2].step()
    compare_weights(model, plain)


def disagreeing_worker(rank: int, address: str, run: str) -> None:
    world, waits = shardwell.World(2), shardwell.WaitOptions(wait_limit_s=60)
    with shardwell.join(address, run=run, world=world, global_rank=rank, waits=waits) as session:
        model = shardwell.fully_shard(OddModel(), session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        backward(model, rank)
        optimizer.step()
        if rank == 1:
            optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
        backward(model, rank)
        if rank == 0:
            optimizer.step()
            return
        with pytest.raises(shardwell.HyperparameterMismatchError, match="make new optimizers before the same step"):
            optimizer.step()


def test_new_optimizer_on_one_rank_only_is_refused(cluster_of_three: shardwell.LocalCluster, run_name: str) -> None:
    run_ranks(disagreeing_worker, cluster_of_three.address, run_name)
