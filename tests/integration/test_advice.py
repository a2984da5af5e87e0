"""Follows the advice of error messages and reports: each wrong use is refused, and what the message advises works.

``tests/unit/test_advice.py`` checks mechanically that everything exists that messages and pages name.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import shardwell
import shardwell.testing
from shardwell.monitor.report import find_bottlenecks
from shardwell.monitor.step_times import CommitFacts, MonitoredSetup, StepPart, StepTimes
from shardwell_wire.errors import UsageError
from tests.support.hugging_face import Tokens, tiny_llama

SETUP = MonitoredSetup(
    trainer="me",
    transports="shm,socket,grpc",
    streamed={"far:1": False},
    gather_dtype="float32",
    push_dtype="float32",
    prefetch_bytes=100_000,
    keep_bytes=0,
    max_gathers_in_flight=0,
    unit_bytes=(10_000, 30_000),
    memory_bytes=40_000,
)
SETUPS = [
    SETUP,
    *(
        replace(SETUP, **changes)
        for changes in (
            {"streamed": {"here:1": True}, "transports": "socket,grpc"},
            {"prefetch_bytes": 20_000},
            {"max_gathers_in_flight": 1},
            {"gather_dtype": "bfloat16"},
            {"keep_bytes": 6_000},
        )
    ),
]


@pytest.fixture
def cluster() -> Iterator[str]:
    with shardwell.testing.in_process_cluster() as address:
        yield address


@pytest.fixture
def session(cluster: str) -> Iterator[shardwell.Session]:
    with shardwell.join() as joined:
        yield joined


class Training:
    """A model with an optimizer, sharded."""

    def __init__(self, session: shardwell.Session, folder: Path) -> None:
        self.session, self.folder = session, folder
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        shardwell.fully_shard(self.model, session)
        self.optimizer = shardwell.optim.SGD(self.model.parameters(), lr=0.1)

    def backward(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def commit(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


# ---- the report ----


def times(part: StepPart, gather_count: int) -> StepTimes:
    """Returns a step that spends half of its time in a part."""
    return StepTimes(
        step=1,
        duration_s=1.0,
        parts={each: 0.5 if each in (part, StepPart.COMPUTE) else 0.0 for each in StepPart},
        facts=CommitFacts(),
        received_bytes={},
        sent_bytes={},
        in_place_bytes=0,
        gather_count=gather_count,
        push_count=2,
        peak_gathered_bytes=39_000,
        freed_bytes=0,
        tokens=0,
        samples=0,
    )


def report_advice() -> list[str]:
    parts = (StepPart.GATHER_WAIT, StepPart.PUSH)
    found = {
        each.advice
        for setup in SETUPS
        for part in parts
        for count in (2, 8)
        for each in find_bottlenecks([times(part, count)], setup)
    }
    return sorted(advice for advice in found if advice.startswith("Pass"))


def test_every_argument_that_the_report_advises_can_be_passed(cluster: str) -> None:
    advice = report_advice()
    options = {name for each in advice for name in re.findall(r"TransferOptions\((\w+)=", each)}
    every = "keep_bytes gather_dtype push_dtype prefetch_bytes max_gathers_in_flight transports"
    assert options == set(every.split())
    for number, each in enumerate(advice):
        code = re.search(r"join\((transfers=shardwell\.TransferOptions\([^)]*\))\)", each)
        assert code is not None, each
        with eval(f"shardwell.join(run='r{number}', {code[1]})", {"shardwell": shardwell}) as session:
            model = nn.Linear(4, 2)
            shardwell.fully_shard(model, session)
            model(torch.ones(2, 4)).sum().backward()


# ---- errors of the SDK ----


def clip_with_torch(at: Training) -> object:
    at.backward()
    return nn.utils.clip_grad_norm_(at.model.parameters(), 1.0)


def clip_value(at: Training) -> object:
    at.backward()
    return nn.utils.clip_grad_value_(at.model.parameters(), 1.0)


def step_of_torch(at: Training) -> object:
    return torch.optim.AdamW(at.model.parameters()).step()


def commit_twice(at: Training) -> None:
    for _ in at.session.steps(1):
        for _ in range(2):
            at.backward()
            at.commit()


def commit_twice_as_declared(at: Training) -> None:
    for _ in at.session.steps(1, optimizer_steps=2):
        for _ in range(2):
            at.backward()
            at.commit()


def skip_a_step(at: Training) -> None:
    for _ in at.session.steps(1):
        at.backward()


def skip_a_gradient(at: Training) -> None:
    for _ in at.session.steps(1):
        at.backward()
        at.optimizer.zero_grad()
        at.optimizer.step()


def total_norm(at: Training) -> object:
    at.backward()
    return nn.utils.get_total_norm([])


def own_norm(at: Training) -> None:
    at.backward()
    assert float(at.optimizer.clip_grad_norm_(float("inf"))) > 0


def load_into_new_run(at: Training) -> None:
    shardwell.save_safetensors(at.model, at.folder)
    with shardwell.join(run="new") as other:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        shardwell.fully_shard(model, other, source=shardwell.from_safetensors(model, at.folder))
        values = shardwell.full_state_dict(model)
    assert all(torch.equal(value, values[name]) for name, value in shardwell.full_state_dict(at.model).items())


def read_state(at: Training) -> None:
    with shardwell.join(run="state", checkpoint_dir=str(at.folder)) as session:
        model = nn.Linear(4, 2)
        shardwell.fully_shard(model, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        session.save_checkpoint(wait=True)
        found = shardwell.weights.open_checkpoint(at.folder, run=session.run).optimizer_state("weight")
    assert set(found) == {"exp_avg", "exp_avg_sq", "step"}


def keep_average(at: Training) -> None:
    at.optimizer.ema_decay = 0.999
    at.backward()
    at.commit()


def read_values(at: Training) -> None:
    at.model.unshard()
    assert at.model[0].weight.sum().isfinite()
    at.model.reshard()


def shard_in_bfloat16(at: Training) -> None:
    model = nn.Linear(4, 2)
    with shardwell.join(run="bfloat16") as other:
        shardwell.fully_shard(model, other, mp_policy=shardwell.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert model(torch.ones(2, 4)).dtype is torch.bfloat16


def use_client_side(at: Training) -> None:
    model = nn.Linear(4, 2)
    with shardwell.join(run="client") as other:
        shardwell.fully_shard(model, other)
        optimizer = shardwell.ClientSide(model.parameters(), torch.optim.ASGD, lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def use_sharded_scaler(at: Training) -> None:
    scaler = shardwell.amp.GradScaler("cpu")
    scaler.scale(at.model(torch.ones(2, 4)).sum()).backward()
    scaler.step(at.optimizer)
    scaler.update()


def scale_with_torch(at: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(at.model(torch.ones(2, 4)).sum()).backward()
    scaler.step(at.optimizer)


FOLLOWED: dict[str, tuple[Callable[[Training], object], str, Callable[[Training], object]]] = {
    "clip the norm": (
        clip_with_torch,
        r"call optimizer\.clip_grad_norm_\(max_norm\)",
        lambda at: at.optimizer.clip_grad_norm_(1.0),
    ),
    "clip values": (
        clip_value,
        r"optimizer\.clip_grad_value_\(clip_value\)",
        lambda at: at.optimizer.clip_grad_value_(1.0),
    ),
    "norm": (total_norm, r"optimizer\.clip_grad_norm_\(float\('inf'\)\) returns the norm", own_norm),
    "torch's AdamW": (
        step_of_torch,
        r"Use shardwell\.optim\.AdamW$",
        lambda at: shardwell.optim.AdamW(at.model.parameters(), lr=0.1),
    ),
    "another optimizer": (
        lambda at: torch.optim.ASGD(at.model.parameters()).step(),
        r"Use shardwell\.ClientSide\(parameters, ASGD, \.\.\.\)",
        use_client_side,
    ),
    "two commits": (commit_twice, r"session\.steps\(num_steps, optimizer_steps=2\)", commit_twice_as_declared),
    "no commit": (skip_a_step, r"call optimizer\.zero_grad\(\) and then optimizer\.step\(\)", skip_a_gradient),
    "state_dict": (
        lambda at: at.model.state_dict(),
        r"use shardwell\.full_state_dict\(model\), or shardwell\.save_safetensors\(model, folder\)",
        lambda at: (shardwell.full_state_dict(at.model), shardwell.save_safetensors(at.model, at.folder)),
    ),
    "load_state_dict": (
        lambda at: at.model.load_state_dict(shardwell.full_state_dict(at.model)),
        r"fully_shard\(\.\.\., source=shardwell\.from_safetensors\(model, path\)\) in a new run",
        load_into_new_run,
    ),
    "state": (
        lambda at: at.optimizer.state[next(at.model.parameters())]["exp_avg"],
        r"save a checkpoint, and call shardwell\.weights\.open_checkpoint\(folder, run=session\.run\)\.optimizer_state",
        read_state,
    ),
    "average": (
        lambda at: torch.optim.swa_utils.AveragedModel(at.model),
        r"set optimizer\.ema_decay = 0\.999",
        keep_average,
    ),
    "values": (
        lambda at: at.model[0].weight.sum(),
        r"between module\.unshard\(\) and module\.reshard\(\)",
        read_values,
    ),
    "dtype": (
        lambda at: at.model.bfloat16(),
        r"fully_shard\(\.\.\., mp_policy=shardwell\.MixedPrecisionPolicy\(param_dtype=\.\.\.\)\)",
        shard_in_bfloat16,
    ),
    "scaler": (scale_with_torch, r"use shardwell\.amp\.GradScaler", use_sharded_scaler),
}
"""Wrong use, what its error advises, and the code that follows the advice."""


@pytest.mark.parametrize("case", FOLLOWED)
def test_advice_of_an_error_works(case: str, session: shardwell.Session, tmp_path: Path) -> None:
    wrong, advice, right = FOLLOWED[case]
    training = Training(session, tmp_path)
    with pytest.raises(shardwell.ShardwellError, match=advice):
        wrong(training)
    training.optimizer.zero_grad()
    right(training)


# ---- Hugging Face's Trainer ----


def hugging_face_losses(kind: Any, arguments: Any, folder: Path, model: nn.Module, optimizer: Any) -> list[float]:
    given = arguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        max_grad_norm=0.5,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        lr_scheduler_type="constant",
    )
    trainer = kind(model, given, train_dataset=Tokens(16), optimizers=(optimizer, None))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.filterwarnings("ignore:the .grad of parameter")
def test_advice_for_the_trainer_of_hugging_face_works(session: shardwell.Session, tmp_path: Path) -> None:
    model = tiny_llama()
    plain = torch.optim.AdamW(model.parameters(), lr=0.01)
    expected = hugging_face_losses(Trainer, TrainingArguments, tmp_path, model, plain)
    model = tiny_llama()
    shardwell.fully_shard(model, session)
    optimizer = shardwell.optim.AdamW(model.parameters(), lr=0.01)
    with pytest.raises(UsageError, match=r"Use shardwell\.integrations") as raised:
        hugging_face_losses(Trainer, TrainingArguments, tmp_path, model, optimizer)
    optimizer.zero_grad()
    advice = re.search(r"Use (\S+)\.(\w+) and (\w+) of the same module", str(raised.value))
    assert advice is not None
    module = importlib.import_module(advice[1])
    kind, arguments = getattr(module, advice[2]), getattr(module, advice[3])
    losses = hugging_face_losses(kind, arguments, tmp_path, model, optimizer)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


# ---- commands ----


@pytest.mark.parametrize("command", [["drain", "shard-9"], ["forget-server", "shard-9"]], ids=" ".join)
def test_commands_answer_an_unknown_server_with_the_known_ones(command: list[str]) -> None:
    with shardwell.LocalCluster(num_shards=2) as cluster:
        given = [sys.executable, "-m", "shardwell", *command, "--address", cluster.address]
        done = subprocess.run(given, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "server 'shard-9' is not registered: the servers are 'shard-0', 'shard-1'" in done.stderr
