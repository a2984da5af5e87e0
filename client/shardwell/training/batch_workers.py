"""Worker processes that make batches ahead, on torch's DataLoader.

Note: [Batches made ahead]
    A batch is a function of (step, dp_rank) and of the generators of torch, Python and NumPy, which are seeded from the
    two. A worker seeds them likewise, and returns their states with the batch if making the batch has changed them: the
    model then draws the same numbers as if the trainer had made the batch itself. So it does not matter who makes a
    batch, and when.

    Workers make the batches of the next steps for the ranks that the trainer plays now. Any other batch, such as that
    of a lost trainer's item or of an item that is computed again, is made by the trainer itself.
"""

from __future__ import annotations

import multiprocessing.process
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils.pin_memory import pin_memory

import shardwell_wire
from shardwell.seeds import batch_generators, derive_seed, restore_batch_generators, seed_batch
from shardwell.training.batch_sources import BatchFunction, BatchOptions
from shardwell_wire.errors import UnavailableError

_PREFETCH = 2
"""Batches that each worker makes ahead, if the script does not say."""

Made = tuple[Any, bytes | None]
"""What a worker has made, and the states of its generators afterwards. None: unchanged."""


def make_in_worker(make: Callable[[], Any], seed: int) -> Made:
    """Calls a function in a worker process with seeded generators."""
    seed_batch(seed)
    before = batch_generators()
    made, after = make(), batch_generators()
    return made, None if after == before else after


def receive(made: Made) -> Any:
    """Returns what a worker has made. This process's generators continue from the worker's."""
    result, states = made
    if states is not None:
        restore_batch_generators(states)
    return result


def pin(batch: Any, options: BatchOptions) -> Any:
    """Returns a batch in pinned memory, if the options say so and there is an accelerator."""
    return pin_memory(batch) if options.pin_memory and torch.accelerator.is_available() else batch  # type: ignore[no-untyped-call]


def start_workers(
    dataset: Dataset[Any], options: BatchOptions, num_workers: int, sampler: Iterable[Any] | None = None
) -> Iterator[Any]:
    """Starts worker processes. They end when the result is closed by ``stop_workers``, or with this process.

    Args:
        dataset: Makes a ``Made`` for each item of the sampler, or yields them.
        options: How batches are made.
        num_workers: Number of processes.
        sampler: The items, in the order of the results. None: the dataset is iterable.
    """
    # A forked process may be killed if gRPC handles forks.
    context = options.multiprocessing_context or ("spawn" if shardwell_wire.GRPC_HANDLES_FORKS else None)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        sampler=sampler,
        num_workers=num_workers,
        prefetch_factor=options.prefetch or _PREFETCH,
        collate_fn=_unchanged,
        pin_memory=options.pin_memory and torch.accelerator.is_available(),
        multiprocessing_context=context,
        worker_init_fn=partial(_start_worker, options.worker_init_fn),
        timeout=options.timeout,
        generator=torch.Generator(),  # it draws a number that must not come from the generator of the model
    )
    return iter(loader)


def _start_worker(init: Callable[[int], Any] | None, number: int) -> None:
    # torch ends a worker whose parent has ended. That of one from a fork server is the server, not the trainer.
    if (trainer := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_after, args=(trainer,), daemon=True).start()
    if init is not None:
        init(number)


def _end_after(trainer: multiprocessing.process.BaseProcess) -> None:
    trainer.join()
    os._exit(0)


def _unchanged(made: Any) -> Any:
    return made


def fetch(workers: Iterator[Any]) -> Any:
    """Returns the next result of workers.

    Raises:
        UnavailableError: A worker has ended.
    """
    try:
        return next(workers)
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise  # an error of the dataset
        raise UnavailableError(
            f"a worker process of step.batches has ended: {error} If memory ran out, make fewer batches ahead "
            "(num_workers=, prefetch=). Start this trainer again; the others continue its work"
        ) from error


def stop_workers(workers: Iterator[Any] | None) -> None:
    """Ends worker processes."""
    if workers is not None and hasattr(workers, "_shutdown_workers"):
        workers._shutdown_workers()


class _Remote(Dataset[Any]):
    """Makes batches in a worker."""

    def __init__(self, make_batch: BatchFunction, seed: int, optimizer_steps: int) -> None:
        self._make_batch, self._seed, self._optimizer_steps = make_batch, seed, optimizer_steps

    def __getitem__(self, key: tuple[int, int]) -> Made:
        commit, dp_rank = key
        step = commit // self._optimizer_steps
        try:
            return make_in_worker(lambda: self._make_batch(step, dp_rank), derive_seed(self._seed, commit, dp_rank))
        except Exception:
            # As a result, so that an error that torch raises in the trainer is one of receiving results.
            where = f"in a worker process, in the batch of step {step} and data rank {dp_rank}"
            return ExceptionWrapper(where=where), None  # type: ignore[no-untyped-call]


class BatchWorkers:
    """Makes batches ahead in worker processes. See Note: [Batches made ahead].

    Args:
        make_batch: Returns the batch of a step and a data rank.
        options: How batches are made.
        seed: The run's seed.
        optimizer_steps: Commits per iteration of the loop. Generators are seeded by commit, and batches depend on the
            iteration.
        dp_ranks: Returns the data ranks that this trainer plays.
    """

    def __init__(
        self,
        make_batch: BatchFunction,
        options: BatchOptions,
        *,
        seed: int,
        optimizer_steps: int,
        dp_ranks: Callable[[], list[int]],
    ) -> None:
        self._make_batch, self._options, self._dp_ranks = make_batch, options, dp_ranks
        self._remote = _Remote(make_batch, seed, optimizer_steps)
        self._workers: Iterator[Any] | None = None
        self._planned: deque[tuple[int, int]] = deque()
        """The next batches to make, by commit and data rank."""
        self._asked: deque[tuple[int, int]] = deque()
        """Batches that the workers make now or have made, in the order in which they are fetched."""
        self._made: dict[tuple[int, int], Made] = {}
        """Batches that were fetched before they were needed."""
        self._first = self._next = 0
        """The commits ``[first, next)`` are planned, asked for or made."""

    def make(self, number: int, commit: int, dp_rank: int) -> Any:
        """Returns a batch, with the generators as they are after making it. The caller has seeded them.

        Args:
            number: Iteration of the loop.
            commit: The commit for which the batch is made.
            dp_rank: Data rank.
        """
        key, ranks = (commit, dp_rank), self._dp_ranks()
        if self._workers is None or not self._first - 1 <= commit <= self._next:
            later = ranks[ranks.index(dp_rank) + 1 :] if dp_rank in ranks else []
            self._planned = deque((commit, rank) for rank in later)
            self._next = commit + 1
            for _ in range(len(self._asked)):
                self._fetch(key)
        self._first = commit
        if self._workers is None:
            self._workers = start_workers(self._remote, self._options, self._options.num_workers, self._plan())
        while self._asked and (key in self._asked or self._asked[0][0] < commit):
            self._fetch(key)
        self._made = {at: made for at, made in self._made.items() if at[0] >= commit}
        if (found := self._made.pop(key, None)) is not None:
            return receive(found)
        return pin(self._make_batch(number, dp_rank), self._options)

    def _plan(self) -> Iterator[tuple[int, int]]:
        """Yields batches for the workers to make, one whenever they have room."""
        while True:
            if not self._planned:
                self._planned.extend((self._next, rank) for rank in self._dp_ranks() or [0])
                self._next += 1
            key = self._planned.popleft()
            self._asked.append(key)
            yield key

    def _fetch(self, wanted: tuple[int, int]) -> None:
        """Fetches one batch. An error of the source counts only if the batch is wanted now."""
        assert self._workers is not None
        try:
            key, made = self._asked.popleft(), fetch(self._workers)
        except BaseException:
            self.close()  # torch may still yield the result, such as after a timeout, and it would get the next key
            raise
        if not isinstance(made[0], ExceptionWrapper):
            self._made[key] = made
        elif key == wanted:
            made[0].reraise()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Ends the worker processes."""
        stop_workers(self._workers)
        self._workers = None
        self._asked.clear()
