"""Runs that continue from a checkpoint of another grid have its bytes, and train on as the former grid does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwell
from shardwell_wire.errors import ConflictError, UnitMismatchError
from tests.support.cluster import cluster_fixture
from tests.support.grid_runs import assert_equal, contents, read, train
from tests.support.grid_trainer import OPTIMIZER, Block, Model, build, compute

Grid = tuple[int, int, int]
SAVED, STEPS = 2, 4


cluster = cluster_fixture(num_shards=2)


class Saved:
    """Trains in one grid, and continues from its checkpoints in others."""

    def __init__(self, cluster: shardwell.LocalCluster, folder: Path, *, on_trainers: bool = False) -> None:
        self._cluster, self._folder, self._count = cluster, folder, 0
        self._on_trainers = on_trainers

    def __call__(self, grid: Grid, steps: int, resume: str = "") -> tuple[str, dict[str, torch.Tensor]]:
        """Returns the checkpoint at the end, and the final values."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        run, _ = train(self._cluster, folder, grid, steps=steps, resume=resume, on_trainers=self._on_trainers)
        return shardwell.open_checkpoint(folder / "checkpoints", run=run).url, read(self._cluster, run)


@pytest.mark.parametrize("on_trainers", [False, True], ids=["optimizer on servers", "optimizer on trainers"])
def test_every_grid_continues_with_the_same_bytes(
    cluster: shardwell.LocalCluster, tmp_path: Path, on_trainers: bool
) -> None:
    run = Saved(cluster, tmp_path, on_trainers=on_trainers)
    first, _ = run((2, 1, 1), SAVED)
    _, expected = run((2, 1, 1), STEPS, resume=first)
    before = contents(first)
    states = {"values", "exp_avg", "exp_avg_sq", "step", "ema"}
    if on_trainers:
        states = {"values", "trainer.exp_avg", "trainer.exp_avg_sq", "trainer.step"}
    assert {name.split("|")[1] for name in before} == states

    # Stages compute the same bits as one process.
    _, staged = run((2, 1, 2), STEPS, resume=first)
    assert_equal(staged, expected)

    # Tensor parallelism does not, so it takes no step here: what it has loaded, it saves.
    split, _ = run((2, 2, 1), SAVED, resume=first)
    assert shardwell.open_checkpoint(split).manifest.world == shardwell.World(2, 2, 1)
    assert_equal(contents(split), before)
    _, joined = run((2, 1, 1), STEPS, resume=split)
    assert_equal(joined, expected)


@pytest.fixture(scope="module")
def grid_checkpoint(cluster: shardwell.LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of a grid of 1 x 2 x 2."""
    return Saved(cluster, tmp_path_factory.mktemp("grid"))((1, 2, 2), SAVED)[0]


def join(cluster: shardwell.LocalCluster, run_name: str, resume: str, **options: Any) -> shardwell.Session:
    waits = shardwell.WaitOptions(wait_limit_s=30)
    return shardwell.join(cluster.address, run=run_name, seed=7, resume=resume, waits=waits, **options)


def wrap(model: nn.Module, session: shardwell.Session) -> nn.Module:
    shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({Block}))
    return model


def step_once(model: Any, session: shardwell.Session, optimizer: Any) -> None:
    for step in session.steps(SAVED + 1):
        for item in step.batches(lambda step, dp_rank: (step, dp_rank)):
            compute(model, *item, (None, None))
        optimizer.step()


def test_one_process_continues_a_grid_with_other_units(
    cluster: shardwell.LocalCluster, run_name: str, tmp_path: Path, grid_checkpoint: str
) -> None:
    before = contents(grid_checkpoint)
    with join(cluster, run_name, grid_checkpoint, checkpoint_dir=str(tmp_path)) as session:
        assert session.step == SAVED
        model: Any = shardwell.auto_wrap(build("cpu"), session, shardwell.SizePolicy(10**9))  # one unit instead of five
        optimizer = shardwell.optim.AdamW(model.parameters(), **OPTIMIZER)
        got = shardwell.full_state_dict(model)
        assert_equal(got, {name: before[f"{name}|values"] for name in got})
        assert_equal(contents(session.save_checkpoint(wait=True)), before)
        step_once(model, session, optimizer)
        assert session.step == SAVED + 1
    with join(cluster, f"{run_name}-2", "latest", checkpoint_dir=str(tmp_path / "none")) as session:
        assert session.step == 0, "a run without a checkpoint of its own starts anew"


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 6)


class Deeper(Model):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wider, r"'head.weight' is a float32 tensor of shape \(6, 8\) in the model, but a float32 tensor of shape \(5"),
        (Deeper, r"'extra.weight' is not in checkpoint"),
    ],
)
def test_another_model_is_refused_when_it_is_wrapped(
    cluster: shardwell.LocalCluster, run_name: str, grid_checkpoint: str, model: Any, message: str
) -> None:
    with (
        join(cluster, run_name, grid_checkpoint) as session,
        pytest.raises(UnitMismatchError, match=message),
    ):
        wrap(model(), session)


def test_a_smaller_model_and_another_optimizer_are_refused_before_a_step(
    cluster: shardwell.LocalCluster, run_name: str, grid_checkpoint: str
) -> None:
    with join(cluster, run_name, grid_checkpoint) as session:
        smaller: Any = build("cpu")
        smaller.blocks = nn.ModuleDict({name: block for name, block in smaller.blocks.items() if name != "3"})
        model = wrap(smaller, session)
        optimizer = shardwell.optim.AdamW(model.parameters(), **OPTIMIZER)
        with pytest.raises(UnitMismatchError, match=r"have 0 of the 8 elements of 'blocks.3.\w+.\w+' and \d+ more"):
            step_once(model, session, optimizer)
        assert session.step == SAVED
    with join(cluster, f"{run_name}-2", grid_checkpoint) as session:
        model = wrap(build("cpu"), session)
        other = shardwell.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConflictError, match=r"has 'adamw' state in the checkpoint .* train it with 'sgd'"):
            step_once(model, session, other)
