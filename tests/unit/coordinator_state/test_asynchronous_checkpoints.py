"""Checkpoints of runs whose work items are committed one by one, on fake shard servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwell_server.coordinator.checkpoints import restoring
from shardwell_wire.checkpoints.reading import read_manifest
from shardwell_wire.checkpoints.storage import open_storage
from shardwell_wire.errors import RunMismatchError
from shardwell_wire.model.topology import ASYNCHRONOUS, BOUNDED_STALENESS, SYNCHRONOUS, Consistency, World
from shardwell_wire.v1 import coordinator_pb2
from tests.support.asynchronous import commits, take_item, team
from tests.support.coordinator import Harness, Trainer, config, harness, take_step


@pytest.fixture(autouse=True)
def _files_without_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "open_manifest", read_manifest)


def settings(
    directory: Path, *, dp: int = 2, consistency: Consistency = ASYNCHRONOUS, min_trainers: int = 2
) -> coordinator_pb2.RunConfig:
    found = config(World(dp=dp), min_trainers=min_trainers, consistency=consistency)
    found.MergeFrom(coordinator_pb2.RunConfig(checkpoint_dir=str(directory / "checkpoints")))
    return found


async def save(cluster: Harness, directory: Path, trainer: Trainer) -> coordinator_pb2.CheckpointProgress:
    """Saves a checkpoint of the run ``r``, which a trainer has given a folder."""
    run = cluster.state.runs["r"]
    run.checkpoints.set_options(run.checkpoints.options.changed_by(settings(directory)))
    await cluster.settle()
    saved: coordinator_pb2.CheckpointProgress = (await cluster.call("SaveCheckpoint", run="r", wait_s=5.0)).checkpoint
    assert saved.state == coordinator_pb2.CHECKPOINT_STATE_SAVED, saved
    return saved


async def three_items(cluster: Harness) -> list[Trainer]:
    """Returns two trainers. Rank 0 has committed two items, and rank 1 one, which has read version 0."""
    a, b = await team(cluster, "a", "b", consistency=ASYNCHRONOUS)
    for trainer in (a, a, b):
        await take_item(trainer)
    return [a, b]


async def test_a_checkpoint_has_the_next_item_of_each_rank(cluster: Harness, tmp_path: Path) -> None:
    a, _ = await three_items(cluster)
    saved = await save(cluster, tmp_path, a)
    manifest = read_manifest(open_storage(saved.url))
    assert (manifest.step, manifest.item_numbers, manifest.consistency) == (3, (2, 1), ASYNCHRONOUS)


async def test_a_rollback_continues_with_the_items_of_the_checkpoint(cluster: Harness, tmp_path: Path) -> None:
    a, b = await three_items(cluster)
    await save(cluster, tmp_path, a)
    await take_item(b)
    await take_item(b)
    assert (await a.finish(a.version, wait_s=5)).all_finished, "a's item is not committed"
    run = cluster.state.runs["r"]
    assert await cluster.coordinator.restorer.roll_back(run, "a test")
    await cluster.until(lambda: run.checkpoints.restore is None, "the end of the rollback")
    again = [await cluster.try_join(name, incarnation=name, config=settings(tmp_path)) for name in ("a", "b")]
    assert not all(joined.started for joined in again[:1])
    a, b = [await cluster.join(name, incarnation=name, config=settings(tmp_path), wait_s=5.0) for name in ("a", "b")]
    assert [(trainer.version, trainer.joined.work.position) for trainer in (a, b)] == [(3, 2), (3, 1)]
    await take_item(b)
    await take_item(a)
    assert commits(cluster)[2:] == [(2, 1, 0, 0), (3, 1, 1, 3), (4, 0, 2, 3)]


@pytest.mark.parametrize("restarted", [False, True])
async def test_a_new_run_continues_with_the_items_of_the_checkpoint(
    cluster: Harness, tmp_path: Path, restarted: bool
) -> None:
    a, _ = await three_items(cluster)
    saved = await save(cluster, tmp_path, a)
    limited = settings(tmp_path, consistency=BOUNDED_STALENESS(0))
    first = await cluster.try_join("a", run="s", incarnation="a", config=limited, resume=saved.url)
    assert not first.started
    await cluster.until(lambda: cluster.state.runs["s"].checkpoints.restore is None, "the run is loaded")
    if restarted:
        await cluster.restart_all()
    await cluster.try_join("b", run="s", incarnation="b", config=limited)
    a, b = [await cluster.join(name, run="s", incarnation=name, config=limited, wait_s=5) for name in ("a", "b")]
    assert (a.version, a.joined.work.position, len(a.items)) == (3, 2, 0), "rank 0 is one item ahead"
    assert [(item.dp_rank, item.number) for item in b.items.values()] == [(1, 1)]
    await take_item(b)
    assert [item.number for item in (await a.finish(a.version, [])).work.items] == [2]


async def test_all_ranks_of_another_number_continue_at_the_lowest_item(cluster: Harness, tmp_path: Path) -> None:
    a, _ = await three_items(cluster)
    saved = await save(cluster, tmp_path, a)
    single = settings(tmp_path, dp=3, min_trainers=1)
    joined = await cluster.join("a", run="s", config=single, resume=saved.url, wait_s=5)
    assert [(item.dp_rank, item.number) for item in joined.items.values()] == [(0, 1)]
    message = dict(cluster.events())["data_ranks_changed"]
    assert "all data ranks continue at work item 1" in message
    await cluster.restart()  # the commit records of the checkpoint name items of other data ranks
    for name in cluster.shards:
        await cluster.register(name)
    await take_item(joined)
    assert [(item.dp_rank, item.number) for item in joined.items.values()] == [(1, 1)]


async def test_the_first_item_of_other_data_ranks_is_answered_with_its_own_commit(
    cluster: Harness, tmp_path: Path
) -> None:
    a, _ = await team(cluster, "a", "b", consistency=ASYNCHRONOUS)
    for _ in range(2):
        await take_item(a)
    saved = await save(cluster, tmp_path, a)
    single = settings(tmp_path, dp=3, min_trainers=1)
    joined = await cluster.join("a", run="s", config=single, resume=saved.url, wait_s=5)
    assert [(item.dp_rank, item.number) for item in joined.items.values()] == [(0, 0)]
    answer = await take_item(joined)
    assert (answer.version, answer.HasField("staleness"), answer.staleness) == (3, True, 0)


async def test_a_loaded_run_keeps_its_settings_before_it_starts(cluster: Harness, tmp_path: Path) -> None:
    a, _ = await three_items(cluster)
    saved = await save(cluster, tmp_path, a)
    first = await cluster.try_join("a", run="s", incarnation="a", config=settings(tmp_path), resume=saved.url)
    assert not first.started
    await cluster.until(lambda: cluster.state.runs["s"].checkpoints.restore is None, "the run is loaded")
    await cluster.call("Leave", run="s", run_id=first.run_id, trainer="a", epoch=first.epoch)
    with pytest.raises(RunMismatchError, match="dp"):
        await cluster.join("a", run="s", config=settings(tmp_path, dp=3, min_trainers=1), wait_s=5)


async def test_a_synchronous_and_an_asynchronous_run_cannot_continue_each_other(tmp_path: Path) -> None:
    async with harness(tmp_path) as cluster:
        a, _ = await three_items(cluster)
        saved = await save(cluster, tmp_path, a)
        other = settings(tmp_path, consistency=SYNCHRONOUS)
        with pytest.raises(RunMismatchError, match=r"has consistency=ASYNCHRONOUS, but .* consistency=SYNCHRONOUS"):
            await cluster.try_join("a", run="s", config=other, resume=saved.url)

    async with harness(tmp_path / "2") as cluster:
        trainers = await cluster.team_with_unit("a", "b")
        await take_step(trainers, 0)
        saved = await save(cluster, tmp_path, trainers[0])
        with pytest.raises(RunMismatchError, match=r"has consistency=SYNCHRONOUS, but .* consistency=ASYNCHRONOUS"):
            await cluster.try_join("a", run="s", config=settings(tmp_path), resume=saved.url)
