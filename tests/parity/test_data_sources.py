"""Datasets, streams and DataLoaders in ``step.batches``: equal bits for any number of workers and trainers."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import shardwell
from shardwell.training.batch_sources import sample_indices
from tests.support import transformer
from tests.support.cluster import cluster_fixture, wait_until
from tests.support.processes import run_ranks
from tests.support.reference import ADAMW, one_thread, sha256, train_plain

pytestmark = pytest.mark.usefixtures("one_thread")

DP, BATCH, SAMPLES, STEPS, LOST_AT = 2, 4, 27, 8, 4


def sample(index: int) -> torch.Tensor:
    return torch.randint(transformer.VOCABULARY, (9,), generator=torch.Generator().manual_seed(index))


def masked(samples: list[Any]) -> torch.Tensor:
    """Collates samples, and draws from torch's generator, as random transforms do."""
    tokens = torch.stack([each if isinstance(each, torch.Tensor) else sample(each["index"]) for each in samples])
    return torch.where(torch.rand(tokens.shape) < 0.2, 0, tokens)


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return sample(index)


class Stream(IterableDataset[torch.Tensor]):
    """Every epoch has another order."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return [(index * 5 + self.epoch) % SAMPLES for index in range(SAMPLES)]

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from map(sample, self.order())


class StatefulStream(Stream):
    """Tells its position, and continues there."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in islice(self.order(), self.position, None):
            self.position += 1
            yield sample(index)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def hugging_face() -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"index": list(range(SAMPLES))}).to_iterable_dataset(num_shards=3).shuffle(seed=1)


def split(dp_rank: int) -> list[torch.Tensor]:
    return [sample(index) for index in range(SAMPLES)[dp_rank::DP]]


def from_stream(dp_rank: int) -> Iterator[torch.Tensor]:
    stream = Stream()
    for epoch in count():
        stream.set_epoch(epoch)
        yield from batches([sample(index) for index in stream.order()[dp_rank::DP]])


def from_hugging_face(dp_rank: int) -> Iterator[torch.Tensor]:
    from datasets.distributed import split_dataset_by_node

    stream = split_dataset_by_node(hugging_face(), rank=dp_rank, world_size=DP)
    for epoch in count():
        stream.set_epoch(epoch)
        yield from batches(list(stream))


def from_split(dp_rank: int) -> Iterator[torch.Tensor]:
    while True:
        yield from batches(split(dp_rank))


def batches(samples: list[Any]) -> Iterator[Any]:
    """Yields the full batches of one epoch, before they are collated."""
    yield from (samples[first : first + BATCH] for first in range(0, len(samples) - BATCH + 1, BATCH))


def drawn(step: int, dp_rank: int) -> list[torch.Tensor]:
    options = {"batch_size": BATCH, "dp": DP, "seed": 0, "step": step, "dp_rank": dp_rank, "drop_last": False}
    return [sample(index) for index in sample_indices(SAMPLES, **options)]  # type: ignore[arg-type]


def in_turn(batches_of: Callable[[int], Iterator[Any]]) -> Callable[[int, int], Any]:
    return lambda step, dp_rank: next(islice(batches_of(dp_rank), step, None))


KINDS: dict[str, tuple[Callable[[int], tuple[Any, dict[str, Any]]], Callable[[int, int], Any]]] = {
    "dataset": (
        lambda workers: (
            Samples(),
            {"batch_size": BATCH, "collate_fn": masked, "num_workers": workers, "drop_last": False},
        ),
        drawn,
    ),
    "loader": (
        lambda workers: (
            DataLoader(Samples(), batch_size=BATCH, collate_fn=masked, shuffle=True, num_workers=workers),
            {},
        ),
        drawn,
    ),
    "stream": (
        lambda workers: (Stream(), {"batch_size": BATCH, "collate_fn": masked, "num_workers": workers}),
        in_turn(from_stream),
    ),
    "stateful": (
        lambda workers: (
            DataLoader(StatefulStream(), batch_size=BATCH, collate_fn=masked, num_workers=workers, drop_last=True),
            {},
        ),
        in_turn(from_stream),
    ),
    "split": (
        lambda workers: (split, {"batch_size": BATCH, "collate_fn": masked, "num_workers": workers}),
        in_turn(from_split),
    ),
    "hugging face": (
        lambda workers: (hugging_face(), {"batch_size": BATCH, "collate_fn": masked, "num_workers": workers}),
        in_turn(from_hugging_face),
    ),
}


def plain(kind: str) -> str:
    model = transformer.build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    draw = KINDS[kind][1]
    train_plain(model, optimizer, lambda step, dp_rank: masked(draw(step, dp_rank)), dp=DP, steps=STEPS)
    return sha256(model.state_dict())


def train(
    session: shardwell.Session,
    kind: str,
    workers: int,
    *,
    steps: int = STEPS,
    when_computed: Callable[[int], object] = lambda step: None,
) -> str:
    model = transformer.build()
    shardwell.auto_wrap(model, session, shardwell.ModuleTypePolicy({transformer.Block}))
    optimizer = shardwell.optim.AdamW(model.parameters(), **ADAMW)
    source, options = KINDS[kind][0](workers)
    for step in session.steps(steps):
        for tokens in step.batches(source, **options):
            model(tokens).backward()
            when_computed(step.number)
        optimizer.step()
        optimizer.zero_grad()
    return sha256(shardwell.full_state_dict(model))


cluster = cluster_fixture(num_shards=2)


def join(address: str, run: str, **options: Any) -> shardwell.Session:
    return shardwell.join(
        address, run=run, world=shardwell.World(dp=DP), waits=shardwell.WaitOptions(wait_limit_s=60), **options
    )


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.mark.parametrize("kind", KINDS)
def test_one_trainer_has_the_bits_of_plain_pytorch_with_any_number_of_workers(
    cluster: shardwell.LocalCluster, kind: str
) -> None:
    expected, before = plain(kind), children()
    for workers in (0, 2):
        numbers = set[int]()
        with join(cluster.address, uuid.uuid4().hex, min_trainers=1) as session:
            found = train(session, kind, workers, when_computed=lambda _, numbers=numbers: numbers.add(len(children())))
            assert found == expected
            assert max(numbers) - len(before) == workers
            assert children() == before, "the workers end with the loop"


@pytest.mark.parametrize("kind", ["dataset", "stream", "stateful", "hugging face"])
def test_run_that_is_resumed_reads_on_where_the_checkpoint_was_saved(
    cluster: shardwell.LocalCluster, tmp_path: Path, kind: str
) -> None:
    with join(cluster.address, uuid.uuid4().hex, min_trainers=1, checkpoint_dir=str(tmp_path)) as session:
        train(session, kind, 2, steps=LOST_AT)
        url = session.save_checkpoint(wait=True)
    with join(cluster.address, uuid.uuid4().hex, min_trainers=1, resume=url) as session:
        assert session.step == LOST_AT
        assert train(session, kind, 2) == plain(kind)


def lose_one(rank: int, address: str, run: str, kind: str, workers: int, folder: Path) -> None:
    """Trains in three processes, of which the last one is a spare. The process with rank 1 is lost."""

    def when_computed(step: int) -> None:
        (folder / "started").touch()
        if (rank, step) == (1, LOST_AT):
            (folder / "workers").write_text(" ".join(str(child.pid) for child in children()))
            os._exit(0)

    multiprocessing.set_start_method("fork", force=True)  # as in a trainer that was not made by a fork server
    if rank == 2:
        wait_until((folder / "started").exists, "a step of the others", timeout_s=90.0)
    with one_thread(), join(address, run, trainer=f"t{rank}") as session:
        found = train(session, kind, workers, when_computed=when_computed)
        (folder / f"result{rank}").write_text(found)


@pytest.mark.parametrize(("kind", "workers"), [("dataset", 2), ("stateful", 0), ("hugging face", 2)])
def test_lost_trainer_changes_no_bit(cluster: shardwell.LocalCluster, tmp_path: Path, kind: str, workers: int) -> None:
    run_ranks(lose_one, cluster.address, uuid.uuid4().hex, kind, workers, tmp_path, count=3)
    assert [path.read_text() for path in sorted(tmp_path.glob("result*"))] == [plain(kind)] * 2
    orphans = list(map(int, (tmp_path / "workers").read_text().split()))
    assert bool(orphans) == bool(workers)
    wait_until(lambda: not any(map(psutil.pid_exists, orphans)), "the workers of the lost trainer have ended")
