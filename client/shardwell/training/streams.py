"""Streams of samples: which of them belong to a data rank, and where each rank's stream continues.

Note: [Positions of streams]
    Every data rank reads a stream of its own. Where it continues after a work item is reported with the finished item,
    and is part of the commit. The coordinator sends it with the rank's next item to the trainer that computes this
    item. A trainer that has read up to this position goes on there. Any other trainer opens the stream and moves to the
    position: by the stream's ``load_state_dict``, or by reading the samples before the position once more. So the
    samples depend neither on the number of trainers nor on which of them are lost. A position also has the start of
    the last batch, from which a trainer repeats it. See Note: [Work without effect] in ``work_items.py``.
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from shardwell.seeds import derive_seed, seed_batch
from shardwell.step.step_state import WorkItemState
from shardwell.training.batch_sources import BatchOptions
from shardwell.training.batch_workers import Made, fetch, make_in_worker, pin, receive, start_workers, stop_workers
from shardwell.training.training import require_plain
from shardwell_wire.errors import UsageError
from shardwell_wire.model.names import check_data_position

logger = logging.getLogger(__name__)

Batch = tuple[Any, str]
"""A batch, and the position after it: JSON text."""


class Stream:
    """A source that is read in its own order.

    Args:
        source: An iterable, or a function from a data rank to one.
        options: How batches are made.
        dp: Size of the data axis.
    """

    def __init__(self, source: Any, options: BatchOptions, dp: int) -> None:
        self._source, self._options, self._dp = source, options, dp
        if self._is_function:
            try:
                inspect.signature(source).bind(0)
            except TypeError as error:
                raise UsageError(
                    f"step.batches(function, batch_size={options.batch_size}): with batch_size, the function takes the "
                    f"data rank and returns an iterable of samples ({error}). Without batch_size, it takes "
                    "(step, dp_rank) and returns a batch"
                ) from error
        self._has_state = self._finds_its_state(source(0) if self._is_function else source)
        self._is_divided = self._is_function or _is_hugging_face(source) or dp == 1

    @property
    def _is_function(self) -> bool:
        return callable(self._source) and not isinstance(self._source, Iterable)

    @staticmethod
    def _finds_its_state(stream: Any) -> bool:
        """True if ``load_state_dict`` continues exactly after the sample at which ``state_dict`` was called."""
        has_state = hasattr(stream, "state_dict") and hasattr(stream, "load_state_dict")
        return has_state and not (_is_hugging_face(stream) and _has_shuffle_buffer(stream))

    def _open(self, dp_rank: int, epoch: int, state: Any) -> Any:
        """Returns a data rank's stream, before its iteration starts."""
        stream: Any = self._source
        if self._is_function:
            stream = stream(dp_rank)
        elif _is_hugging_face(stream):
            split = import_module("datasets.distributed").split_dataset_by_node
            stream = copy.deepcopy(split(stream, rank=dp_rank, world_size=self._dp))
        elif self._has_state or hasattr(stream, "set_epoch"):  # several ranks of this process may be at other positions
            try:
                stream = copy.deepcopy(stream)
            except Exception as error:
                raise UsageError(
                    f"step.batches reads each data rank from a copy of the {type(stream).__name__}, which cannot be "
                    f"copied ({error}): pass a function dp_rank -> iterable, with the samples of this rank only"
                ) from error
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        if state is not None:
            stream.load_state_dict(state)
        return stream

    def start(self) -> str:
        """Returns the position before the first sample."""
        return self._position(0, 0, None)

    def _position(self, epoch: int, samples: int, stream: Any) -> str:
        state = stream.state_dict() if stream is not None and self._has_state else None
        require_plain(state, f"{type(stream).__name__}.state_dict()")
        return json.dumps({"dp": self._dp, "epoch": epoch, "samples": samples, "state": state})

    def read(self, position: str, dp_rank: int, when_found: Callable[[], None]) -> Iterator[Batch]:
        """Yields a data rank's batches from a position on, epoch after epoch.

        Args:
            position: As in ``Batch``.
            dp_rank: The data rank.
            when_found: Called when the stream was moved to the position, which may have drawn random numbers.

        Raises:
            UsageError: An epoch has no batch.
        """
        at, size, num_batches = json.loads(position), self._options.batch_size, 0
        epoch, samples, state = at["epoch"], at["samples"], at["state"]
        collate = self._options.collate_fn or (default_collate if size else None)
        while True:
            stream = self._open(dp_rank, epoch, state)
            iterator = iter(stream)
            if state is None and samples:
                logger.info("%d samples of data rank %d are read again, to continue after them", samples, dp_rank)
                deque(islice(iterator, samples), maxlen=0)
            if at is not None and (samples or not epoch):  # at a later epoch's start, it begins as without a move
                when_found()
            batch: list[Any] = []
            for sample in iterator:
                samples += 1
                if not self._is_divided and (samples - 1) % self._dp != dp_rank:
                    continue
                batch.append(sample)
                if len(batch) == (size or 1):
                    made, batch, num_batches = batch, [], num_batches + 1
                    whole = made if size else made[0]
                    yield (collate(whole) if collate else whole), self._position(epoch, samples, stream)
            if batch and not self._options.drop_last:
                num_batches += 1
                assert collate is not None
                # The stream has ended, and its state may be that of its beginning.
                yield collate(batch), self._position(epoch + 1, 0, None)
            if not num_batches and (at is None or not at["samples"]):
                raise UsageError(
                    f"the stream of data rank {dp_rank} ended after {samples} samples without a batch of {size or 1}: "
                    f"a step takes batch_size {size or 1} x dp {self._dp}"
                )
            epoch, samples, state, num_batches, at = epoch + 1, 0, None, 0, None


def _is_hugging_face(stream: Any) -> bool:
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(stream, datasets.IterableDataset)


def _has_shuffle_buffer(stream: Any) -> bool:
    """True if a Hugging Face dataset has a shuffle buffer, whose samples its ``state_dict`` lacks."""
    found = [getattr(stream, "_ex_iterable", None)]
    while found:
        each = found.pop()
        if each is None or "BufferShuffled" in type(each).__name__:
            return True
        found += [each.ex_iterable] if hasattr(each, "ex_iterable") else getattr(each, "ex_iterables", [])
    return False


class _RankBatches(IterableDataset[Any]):
    """Reads one data rank's stream in a worker process."""

    def __init__(self, stream: Stream, position: str, dp_rank: int, number: int, seed: int) -> None:
        self._stream, self._position, self._dp_rank = stream, position, dp_rank
        self._number, self._seed = number, seed

    def __iter__(self) -> Iterator[Made]:
        # The stream must not divide itself over workers: this one reads all samples of the data rank.
        torch.utils.data._utils.worker._worker_info = None
        seed = derive_seed(self._seed, self._number, self._dp_rank)
        batches = self._stream.read(self._position, self._dp_rank, lambda: seed_batch(seed))
        while True:
            yield make_in_worker(partial(next, batches), seed)
            self._number += 1
            seed = derive_seed(self._seed, self._number, self._dp_rank)


@dataclass(slots=True)
class _Reader:
    """One data rank's stream in this trainer."""

    position: str
    """Where it continues."""
    number: int
    """The batch that it yields next."""
    used: int
    """When it was used last, in batches of this trainer."""
    batches: Iterator[Batch] | None
    """None: ``worker`` reads."""
    worker: Iterator[Any] | None = None


class StreamReaders:
    """Reads the streams of the data ranks that this trainer plays. See Note: [Positions of streams].

    The second batch of a rank in a row is made by a worker process, if the options allow one. A rank of a lost trainer
    that this trainer plays for one step gets none.

    Args:
        source: The source.
        options: How batches are made.
        seed: The run's seed.
        dp: Size of the data axis.
        optimizer_steps: Commits per iteration of the loop.
    """

    def __init__(self, source: Any, options: BatchOptions, *, seed: int, dp: int, optimizer_steps: int) -> None:
        self._stream, self._options, self._seed, self._dp = Stream(source, options, dp), options, seed, dp
        # Several commits of an iteration read the same batch, so a worker would read ahead of all but the last.
        self._num_workers = options.num_workers if optimizer_steps == 1 else 0
        self._readers: dict[int, _Reader] = {}
        self._count = 0

    def make(self, number: int, seed: int, item: WorkItemState, *, is_last: bool) -> Any:
        """Returns the batch of a work item, with the generators as they are after making it.

        Args:
            number: Number of the iteration; in an asynchronous run, of the item.
            seed: Seed of the generators, which the caller has set.
            item: The item. This method sets its ``data_position`` to the position after the batch.
            is_last: Whether the next commit reads the next batch. Otherwise it reads the same once more.

        Raises:
            UsageError: The position belongs to another number of data ranks.
        """
        positions: dict[str, Any] = json.loads(item.item.data_position or "{}")
        found = positions.get(self._options.name)
        if found is not None and (before := found.pop("before", None)) and before.pop("number") == number:
            found = {"dp": found["dp"], **before}  # the iteration is repeated
        if found is not None and found["dp"] != self._dp:
            raise UsageError(
                f"the run has read {self._options.name!r} with dp={found['dp']} data ranks, and now has dp={self._dp}: "
                "the samples of a stream are divided over the data ranks, so it cannot continue at the same samples. "
                f"Resume with dp={found['dp']}, or read the stream from its beginning: step.batches(name=...) with "
                "another name"
            )
        position = self._stream.start() if found is None else json.dumps(found)
        reader = self._reader(item.item.dp_rank, position, number, seed)
        try:
            if reader.worker is not None:
                batch, after = receive(fetch(reader.worker))
            else:
                assert reader.batches is not None
                batch, after = next(reader.batches)
                batch = pin(batch, self._options)
        except BaseException:
            self._stop(item.item.dp_rank)  # it is no longer at this position: a generator ends with its error
            raise
        reader.position, reader.number = after, number + 1
        if is_last:
            began = json.loads(position)
            del began["dp"]
            positions[self._options.name] = {**json.loads(after), "before": {"number": number, **began}}
            item.data_position = json.dumps(positions)
            check_data_position(item.data_position)
        return batch

    def _reader(self, dp_rank: int, position: str, number: int, seed: int) -> _Reader:
        self._count += 1
        reader = self._readers.get(dp_rank)
        if reader is None or (reader.position, reader.number) != (position, number):
            self._stop(dp_rank)
            batches = self._stream.read(position, dp_rank, lambda: seed_batch(seed))
            reader = self._readers[dp_rank] = _Reader(position, number, self._count, batches)
        elif reader.worker is None and self._num_workers:
            for idle in [rank for rank, other in self._readers.items() if self._count - other.used > 2 * self._dp]:
                self._stop(idle)
            if sum(other.worker is not None for other in self._readers.values()) < self._num_workers:
                ahead = _RankBatches(self._stream, position, dp_rank, number, self._seed)
                reader.worker, reader.batches = start_workers(ahead, self._options, 1), None
        reader.used = self._count
        return reader

    def _stop(self, dp_rank: int) -> None:
        if (reader := self._readers.pop(dp_rank, None)) is not None:
            stop_workers(reader.worker)

    def close(self) -> None:
        """Ends the worker processes."""
        for dp_rank in list(self._readers):
            self._stop(dp_rank)
