"""Runs that continue from a checkpoint of another grid, with shard servers that store no values."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwell_server.coordinator.checkpoints.manifests import has_units_of
from shardwell_wire.checkpoints.format import Piece
from shardwell_wire.checkpoints.manifest import message_from_dict, message_to_dict
from shardwell_wire.checkpoints.reading import read_manifest
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    RunMismatchError,
    StepStateError,
    UnavailableError,
    UnitMismatchError,
)
from shardwell_wire.model.layout import Parameter, UnitLayout
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import common_pb2
from tests.support.checkpoints import write_checkpoint
from tests.support.coordinator import SGD, Harness, Trainer, config, take_step

STEP, SEED, WORLD = 3, 3, World(dp=1)


def half(rank: int, shape: tuple[int, int] = (64, 32)) -> Parameter:
    return Parameter("w", shape, "float32", whole_shape=(64, 64), offsets=(0, 32 * rank))


FORMER = (
    UnitLayout("norm", (Parameter("b", (64,), "float32"),)),
    UnitLayout("linear@tp0", (half(0),), tp_rank=0),
    UnitLayout("linear@tp1", (half(1),), tp_rank=1),
    UnitLayout("~buffers", (Parameter("mean", (4,), "float32"),), kind="buffers"),
)
"""Units of a run with tp=2."""
LINEAR = UnitLayout("linear", (Parameter("w", (64, 64), "float32"), Parameter("b", (64,), "float32")))
BUFFERS = UnitLayout("~buffers", (Parameter("mean", (4,), "float32"),), kind="buffers")


def sgd(units: Sequence[UnitLayout], algorithm: str = "sgd") -> common_pb2.OptimizerStep:
    hyperparameters = SGD if algorithm == "sgd" else {**SGD, "lr_decay": 0.0}
    groups = [
        common_pb2.UnitGroups(unit_index=index, group_indices=[0] * len(unit.parameters))
        for index, unit in enumerate(units)
        if not unit.holds_buffers
    ]
    return common_pb2.OptimizerStep(
        algorithm=algorithm, groups=[common_pb2.ParameterGroup(hyperparameters=hyperparameters)], units=groups
    )


def saved(folder: Path, dp: int = 1, *, tp: int = 2, units: Sequence[UnitLayout] = FORMER) -> str:
    """Writes a checkpoint. Returns its path."""
    tensors = {
        Piece(at.key, "values", 0, at.numel, "float32", (at.numel,)): torch.zeros(at.numel)
        for unit in units
        for at in unit.parameters
    }
    optimizer = message_to_dict(sgd(units))
    return write_checkpoint(
        folder / "checkpoints", STEP, files=[tensors], units=units, optimizer=optimizer, world=World(dp=dp, tp=tp)
    )


async def resume(cluster: Harness, url: str, world: World = WORLD, **fields: Any) -> Trainer:
    trainer = await cluster.join("a", config=config(world, seed=SEED), resume=url, wait_s=5.0, **fields)
    assert trainer.joined.started and trainer.joined.committed_step == STEP
    return trainer


def run_of(cluster: Harness) -> Any:
    return cluster.state.runs["r"]


async def test_declared_units_are_filled_from_the_checkpoint(cluster: Harness, tmp_path: Path) -> None:
    url = saved(tmp_path)
    trainer = await resume(cluster, url)
    assert not len(run_of(cluster).units)
    assert trainer.joined.state.tracked_json == {"schedule": '{"last": 3}'}
    assert trainer.joined.checkpoint_url == url
    declared = await trainer.declare(LINEAR.to_proto())
    assert (declared.version, declared.initialize, declared.unit_index) == (STEP, False, 0)
    versions = [unit.version for shard in cluster.shards.values() for unit in shard.runs["r"].primaries]
    assert versions and set(versions) == {STEP}
    await cluster.restart()
    assert (await trainer.declare(LINEAR.to_proto())).version == STEP
    assert (await trainer.declare(BUFFERS.to_proto())).version == STEP
    committed = await take_step([trainer], STEP, optimizer=sgd([LINEAR, BUFFERS]))
    assert committed.version == STEP + 1
    await cluster.settle()
    with pytest.raises(StepStateError, match="unit 'late' is new, but run 'r' has committed 4 steps"):
        await trainer.declare(UnitLayout("late", (Parameter("c", (4,), "float32"),)).to_proto())


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (Parameter("v", (64, 64), "float32"), "'v' is not in checkpoint"),
        (Parameter("w", (64, 32), "float32"), r"'w' is a float32 tensor of shape \(64, 32\) in the model"),
        (Parameter("w", (64, 64), "bfloat16"), "'w' is a bfloat16 tensor"),
        (Parameter("mean", (4,), "float32"), "'mean' is not in checkpoint"),
    ],
)
async def test_units_that_the_checkpoint_lacks_are_refused(
    cluster: Harness, tmp_path: Path, parameter: Parameter, message: str
) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    with pytest.raises(UnitMismatchError, match=message):
        await trainer.declare(UnitLayout("u", (parameter,)).to_proto())
    assert not len(run_of(cluster).units)


async def test_the_first_step_needs_all_values_of_the_checkpoint(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    part = UnitLayout("linear@tp0", (half(0),), tp_rank=0)
    await trainer.declare(part.to_proto())
    await trainer.declare(BUFFERS.to_proto())
    await trainer.finish(STEP)
    with pytest.raises(UnitMismatchError, match=r"have 0 of the 64 elements of 'b' and 1 more in checkpoint"):
        await trainer.commit(STEP, optimizer=sgd([part]))
    await trainer.declare(FORMER[0].to_proto())
    with pytest.raises(UnitMismatchError, match=r"have 2048 of the 4096 elements of 'w' in checkpoint"):
        await trainer.commit(STEP, optimizer=sgd([part]))
    assert run_of(cluster).committed_step == STEP


async def test_another_optimizer_is_refused(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    for layout in (LINEAR, BUFFERS):
        await trainer.declare(layout.to_proto())
    await trainer.finish(STEP)
    other = sgd([LINEAR])
    other.algorithm = "adagrad"
    other.groups[0].hyperparameters.clear()
    settings = {"lr": 0.1, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10}
    other.groups[0].hyperparameters.update({**settings, "maximize": 0.0})
    with pytest.raises(ConflictError, match=r"parameter 'w' has 'sgd' state in the checkpoint .* 'adagrad'"):
        await trainer.commit(STEP, optimizer=other)


async def test_seed_must_be_that_of_the_checkpoint(cluster: Harness, tmp_path: Path) -> None:
    with pytest.raises(RunMismatchError, match="the checkpoint has seed=3"):
        await cluster.join("a", config=config(WORLD, seed=4), resume=saved(tmp_path))


async def test_reduction_groups_must_be_those_of_the_checkpoint_with_as_many_data_ranks(
    cluster: Harness, tmp_path: Path
) -> None:
    settings = config(World(dp=4, tp=2), seed=SEED, min_trainers=2)
    settings.reduction_groups.extend((2, 2))
    with pytest.raises(RunMismatchError, match=r"the checkpoint has reduction_groups=\(\)"):
        await cluster.try_join("a", config=settings, resume=saved(tmp_path / "four", dp=4))
    joined = await cluster.try_join("a", config=settings, resume=saved(tmp_path / "two", dp=2))
    assert joined.config.reduction_groups == [2, 2]


@pytest.mark.parametrize("world", [World(dp=2), World(dp=2, tp=2)], ids=str)
async def test_a_run_with_other_data_ranks_continues_and_says_what_differs(
    cluster: Harness, tmp_path: Path, world: World
) -> None:
    url = saved(tmp_path)
    settings = config(world, seed=SEED, min_trainers=world.tp)
    await asyncio.gather(*(cluster.try_join(name, config=settings, resume=url) for name in "ab"[: world.tp]))
    messages = list[str]()

    def is_loaded() -> bool:
        messages[:] = [text for kind, text in cluster.events() if kind == "data_ranks_changed"]
        return bool(messages)

    await cluster.until(is_loaded, "the run is loaded")
    run = run_of(cluster)
    assert (run.committed_step, sorted(run.work.steps[0].items)) == (STEP, [0, 1])
    names = [unit.layout.unit for unit in run.units]
    assert names == ([] if world.tp == 1 else [layout.unit for layout in FORMER])
    assert len(messages) == 1
    assert "the checkpoint has dp=1, and this run dp=2: from step 3 on" in messages[0]


async def test_state_that_cannot_be_cut_for_other_data_ranks_is_an_error_of_join(
    cluster: Harness, tmp_path: Path
) -> None:
    cluster.shards["s0"].fail = fail_once("LoadShards", UnitMismatchError("the state 'm' of 'w' is a whole"))
    settings = config(World(dp=2, tp=2), seed=SEED, min_trainers=2)
    with pytest.raises(ConflictError, match=r"run 'r' cannot be loaded: .* the state 'm' of 'w' is a whole"):
        await cluster.try_join("a", config=settings, resume=saved(tmp_path), wait_s=5.0)


async def test_a_checkpoint_before_the_first_step_has_commit_records_for_its_own_units(
    cluster: Harness, tmp_path: Path
) -> None:
    settings = config(World(dp=1), seed=SEED)
    settings.checkpoint_dir = str(tmp_path / "new")
    trainer = await cluster.join("a", config=settings, resume=saved(tmp_path), wait_s=5.0)
    await trainer.declare(LINEAR.to_proto())
    refused = await cluster.call("SaveCheckpoint", run="r", wait_s=5.0)
    assert "0 of the 4 elements of 'mean'" in refused.checkpoint.error
    await trainer.declare(BUFFERS.to_proto())
    found = await cluster.call("SaveCheckpoint", run="r", wait_s=5.0)
    manifest = read_manifest(open_storage(found.checkpoint.url))
    (commit,) = manifest.commits
    assert (manifest.step, commit["step"], commit["unit_order"]) == (STEP, STEP - 1, [0])
    optimizer = message_from_dict(commit["optimizer"], common_pb2.OptimizerStep())
    assert [(at.unit_index, list(at.group_indices)) for at in optimizer.units] == [(0, [0, 0])]


def fail_once(rpc_name: str, error: Exception) -> Any:
    waiting = [error]

    def fail(name: str, request: Any) -> None:
        if name == rpc_name and waiting:
            raise waiting.pop()

    return fail


async def test_a_damaged_file_is_an_error_that_ends_when_the_file_is_brought_back(
    cluster: Harness, tmp_path: Path
) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    cluster.shards["s0"].fail = fail_once("LoadShards", CorruptDataError("tensor 'w' is damaged"))
    with pytest.raises(CorruptDataError, match="tensor 'w' is damaged"):
        await trainer.declare(LINEAR.to_proto())
    assert any(kind == "checkpoint_damaged" for kind, _ in cluster.events())
    assert (await trainer.declare(LINEAR.to_proto())).version == STEP


async def test_a_unit_is_placed_again_if_a_server_ends_before_it_is_filled(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    shard, asked = cluster.shards["s0"], asyncio.Event()

    def refuse(rpc_name: str, request: Any) -> None:
        if rpc_name == "LoadShards":
            asked.set()
            raise UnavailableError("connection refused")

    shard.fail = refuse
    declaring = asyncio.create_task(trainer.declare(LINEAR.to_proto()))
    await asked.wait()
    shard.restart("2")
    await cluster.register("s0", "2")
    shard.fail = lambda rpc_name, request: None
    declared = await declaring
    assert not declared.HasField("version") and "is read from checkpoint" in declared.loading
    declared = await trainer.declare(LINEAR.to_proto())
    assert declared.version == STEP
    incarnations = {at.server_id: at.incarnation for unit in run_of(cluster).units for at in unit.shards}
    assert incarnations.get("s0", "2") == "2"


async def test_a_rollback_loads_the_units_of_the_run(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path))
    for layout in (LINEAR, BUFFERS):
        await trainer.declare(layout.to_proto())
    await take_step([trainer], STEP, optimizer=sgd([LINEAR, BUFFERS]))
    await cluster.settle()
    run = run_of(cluster)
    await cluster.coordinator.restorer.roll_back(run, "server 's0' has ended")
    await cluster.until(lambda: run.checkpoints.rollback_count == 1, "the rollback")
    assert (run.committed_step, [unit.layout for unit in run.units]) == (STEP, [LINEAR, BUFFERS])
    assert not run.units.unpublished
    again = await resume(cluster, "")
    assert (await again.declare(LINEAR.to_proto())).version == STEP
    await take_step([again], STEP, optimizer=sgd([LINEAR, BUFFERS]))
    await asyncio.sleep(0)


WRAPPED_BEFORE = (
    UnitLayout("norm", (Parameter("b", (64,), "float32"),)),
    UnitLayout("linear", (Parameter("w", (64, 64), "float32"),)),
    BUFFERS,
)
"""The parameters of ``LINEAR`` in two units."""


async def test_a_model_that_is_wrapped_differently_needs_rewrap(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path, tp=1, units=WRAPPED_BEFORE))
    assert [unit.layout for unit in run_of(cluster).units] == list(WRAPPED_BEFORE)
    with pytest.raises(UnitMismatchError, match=r"'linear' .* continue in a new run with join\(..., rewrap"):
        await trainer.declare(LINEAR.to_proto())
    other = UnitLayout("all", LINEAR.parameters)
    with pytest.raises(StepStateError, match=r"'all' is new, .* continue in a new run with join\(..., rewrap"):
        await trainer.declare(other.to_proto())


async def test_rewrapped_units_are_filled_and_kept_in_a_rollback(cluster: Harness, tmp_path: Path) -> None:
    trainer = await resume(cluster, saved(tmp_path, tp=1, units=WRAPPED_BEFORE), rewrap=True)
    run = run_of(cluster)
    assert not len(run.units)
    await cluster.coordinator.restorer.roll_back(run, "server 's0' has ended")
    await cluster.until(lambda: run.checkpoints.rollback_count == 1, "the first rollback")
    assert not len(run.units), "the trainers have declared none"
    trainer = await resume(cluster, "")
    for layout in (LINEAR, BUFFERS):
        assert (await trainer.declare(layout.to_proto())).version == STEP
    await take_step([trainer], STEP, optimizer=sgd([LINEAR, BUFFERS]))
    await cluster.settle()
    await cluster.coordinator.restorer.roll_back(run, "server 's0' has ended")
    await cluster.until(lambda: run.checkpoints.rollback_count == 2, "the second rollback")
    assert (run.committed_step, [unit.layout for unit in run.units]) == (STEP, [LINEAR, BUFFERS])


async def test_an_interrupted_load_of_a_rewrapped_run_goes_on_after_a_restart(cluster: Harness, tmp_path: Path) -> None:
    url, settings = saved(tmp_path, tp=1, units=WRAPPED_BEFORE), config(WORLD, seed=SEED)

    def refuse(rpc_name: str, request: Any) -> None:
        if rpc_name == "BeginRestore":
            raise UnavailableError("connection refused")

    for shard in cluster.shards.values():
        shard.fail = refuse
    await cluster.try_join("a", config=settings, resume=url, rewrap=True)
    await cluster.restart()
    for name, shard in cluster.shards.items():
        shard.fail = lambda rpc_name, request: None
        await cluster.register(name)
    trainer = await resume(cluster, "")
    assert not len(run_of(cluster).units)
    assert (await trainer.declare(LINEAR.to_proto())).version == STEP


@pytest.mark.parametrize(
    ("world", "layouts", "expected"),
    [
        (World(dp=3), (), True),
        (World(dp=1), (WRAPPED_BEFORE[1],), True),
        (World(dp=1), (WRAPPED_BEFORE[1], UnitLayout("late", (Parameter("c", (4,), "float32"),))), True),
        (World(dp=1), (LINEAR,), False),
        (World(dp=1), (UnitLayout("all", WRAPPED_BEFORE[1].parameters),), False),
        (World(dp=1, tp=2), (), False),
        (World(dp=1, pp=2), (), False),
    ],
)
def test_has_units_of(tmp_path: Path, world: World, layouts: Sequence[UnitLayout], expected: bool) -> None:
    manifest = read_manifest(open_storage(saved(tmp_path, tp=1, units=WRAPPED_BEFORE)))
    assert has_units_of(manifest, world, layouts) is expected
