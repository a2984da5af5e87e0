"""Streams of samples: division over data ranks, positions, ends of epochs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from shardwell.step.step_state import WorkItemState
from shardwell.training.batch_sources import BatchOptions, is_stream
from shardwell.training.streams import Stream, StreamReaders
from shardwell_wire.errors import InvalidRequestError, UsageError
from shardwell_wire.v1 import coordinator_pb2


class Numbers(IterableDataset[int]):
    """``size`` numbers per epoch, whose epoch is their hundreds."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(100 * self.epoch, 100 * self.epoch + self.size)


class Counter(Numbers):
    """Continues at its position."""

    position: Any = 0

    def __iter__(self) -> Iterator[int]:
        for number in islice(super().__iter__(), self.position, None):
            self.position += 1
            yield number

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def read(source: Any, count: int, dp_rank: int = 0, *, dp: int = 1, at: str = "", **options: Any) -> list[Any]:
    """Returns the first batches from a position on, with the positions after them."""
    stream = Stream(source, BatchOptions(collate_fn=list, **options), dp)
    return list(islice(stream.read(at or stream.start(), dp_rank, lambda: None), count))


def numbers(*arguments: Any, **options: Any) -> list[Any]:
    return [batch for batch, _ in read(*arguments, **options)]


def test_ranks_divide_the_samples_and_epochs_follow_each_other() -> None:
    assert numbers(Numbers(7), 3, 0, dp=2, batch_size=2) == [[0, 2], [4, 6], [100, 102]]
    assert numbers(Numbers(7), 3, 1, dp=2, batch_size=2) == [[1, 3], [101, 103], [201, 203]], "5 is dropped"
    assert numbers(Numbers(7), 3, 1, dp=2, batch_size=2, drop_last=False) == [[1, 3], [5], [101, 103]]
    assert numbers(lambda dp_rank: [dp_rank] * 2, 2, 1, dp=2, batch_size=2) == [[1, 1], [1, 1]]
    assert [
        batch
        for batch, _ in islice(
            Stream([[1], [2]], BatchOptions(), 1).read(Stream([], BatchOptions(), 1).start(), 0, lambda: None), 3
        )
    ] == [[1], [2], [1]], "a stream of batches"


class Resetting(Counter):
    """Its state is that of its beginning when an iteration has ended."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.position = 0


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("source", [Numbers(7), Counter(7), Resetting(7)], ids=["without state", "with state", "reset"])
def test_stream_continues_after_every_position(source: Any, drop_last: bool) -> None:
    for dp_rank in range(2):
        whole = read(source, 12, dp_rank, dp=2, batch_size=2, drop_last=drop_last)
        for index, (_, position) in enumerate(whole):
            rest = read(source, 12, dp_rank, dp=2, at=position, batch_size=2, drop_last=drop_last)
            assert rest[: 11 - index] == whole[index + 1 :]
            state, samples = json.loads(position)["state"], json.loads(position)["samples"]
            assert state is None if type(source) is Numbers or not samples else state["position"] == samples
    assert getattr(source, "position", 0) == 0, "each rank reads a copy"


@pytest.mark.parametrize("kind", ["filter", "batched", "interleave", "buffer"])
def test_hugging_face_stream_continues_after_every_position(kind: str) -> None:
    datasets = pytest.importorskip("datasets")
    base = datasets.Dataset.from_dict({"x": list(range(17))}).to_iterable_dataset(num_shards=2)
    source = {
        "filter": lambda: base.filter(lambda row: row["x"] % 3),
        "batched": lambda: base.map(lambda rows: {"x": rows["x"] + rows["x"]}, batched=True, batch_size=3),
        "interleave": lambda: datasets.interleave_datasets([base, base.take(9)], probabilities=[0.6, 0.4], seed=1),
        "buffer": lambda: base.shuffle(seed=2, buffer_size=5),
    }[kind]()
    for dp in (2, 3):  # with two shards, three ranks divide the samples
        whole = read(source, 9, dp - 1, dp=dp, batch_size=2)
        for index, (_, position) in enumerate(whole):
            rest = numbers(source, 8 - index, dp - 1, dp=dp, at=position, batch_size=2)
            assert rest == [batch for batch, _ in whole[index + 1 :]]
            assert (json.loads(position)["state"] is None) == (kind == "buffer"), "the state lacks the buffer"


def test_streams_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(UsageError, match="list_iterator, which can be read only once"):
        is_stream(iter([1]), BatchOptions(batch_size=1))
    with pytest.raises(UsageError, match=r"rank 1 ended after 3 samples without a batch of 2: .* batch_size 2 x dp 2"):
        read(Numbers(3), 1, 1, dp=2, batch_size=2)
    with pytest.raises(UsageError, match=r"with batch_size, the function takes the data rank .* Without batch_size"):
        read(lambda step, dp_rank: [], 1, batch_size=2)
    odd = Counter(5)
    odd.position = threading.Lock()
    with pytest.raises(UsageError, match=r"a copy of the Counter, which cannot be copied .* pass a function dp_rank"):
        read(odd, 1, batch_size=2)


def item(position: str = "") -> WorkItemState:
    return WorkItemState(coordinator_pb2.WorkItem(dp_rank=1, data_position=position))


def readers(source: Any, *, dp: int = 2, **options: Any) -> StreamReaders:
    return StreamReaders(
        source, BatchOptions(batch_size=2, collate_fn=list, **options), seed=0, dp=dp, optimizer_steps=1
    )


def test_position_is_reported_with_the_last_commit_of_an_iteration() -> None:
    reader, first = readers(Counter(9)), item()
    assert reader.make(0, 0, first, is_last=False) == [1, 3] and first.data_position == ""
    assert reader.make(0, 0, first, is_last=True) == [1, 3], "the same batch once more"
    second = item(first.data_position)
    assert reader.make(1, 0, second, is_last=True) == readers(Counter(9)).make(1, 0, second, is_last=True) == [5, 7]
    other = item(second.data_position)
    assert readers(Numbers(9), name="other").make(2, 0, other, is_last=True) == [1, 3], "each name has its own position"
    assert set(json.loads(other.data_position)) == {"data", "other"}
    assert reader.make(2, 0, item(other.data_position), is_last=True) == [101, 103]


def test_positions_that_do_not_fit_are_refused() -> None:
    first = item()
    readers(Counter(9)).make(0, 0, first, is_last=True)
    with pytest.raises(UsageError, match=r"'data' with dp=2 data ranks, and now has dp=3: .*batches\(name=...\) with"):
        readers(Counter(9), dp=3).make(1, 0, item(first.data_position), is_last=True)
    large, odd = Counter(9), Counter(9)
    large.load_state_dict({"position": 0})
    large.state_dict = lambda: {"x": "y" * 40_000}  # type: ignore[method-assign]
    with pytest.raises(InvalidRequestError, match=r"has 40[0-9]+ bytes: expected at most 32768"):
        readers(large, dp=1).make(0, 0, item(), is_last=True)
    odd.state_dict = lambda: {"x": b"y"}  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"Counter.state_dict\(\)\['x'\] is a bytes"):
        readers(odd, dp=1).make(0, 0, item(), is_last=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_is_read_again_after_an_error(tmp_path: Path, workers: int) -> None:
    def collate(samples: list[int]) -> list[int]:
        if samples == [5, 7] and not (tmp_path / "failed").exists():
            (tmp_path / "failed").touch()
            raise OSError("no such sample")
        return samples

    reader = StreamReaders(
        Numbers(9), BatchOptions(batch_size=2, collate_fn=collate, num_workers=workers), seed=0, dp=2, optimizer_steps=1
    )
    first = item()
    reader.make(0, 0, first, is_last=True)
    with pytest.raises(OSError, match="no such sample"):
        reader.make(1, 0, item(first.data_position), is_last=True)
    assert reader.make(1, 0, item(first.data_position), is_last=True) == [5, 7]
    reader.close()
