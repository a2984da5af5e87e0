"""The training loop of a session: which step an iteration has, its batches, and what ``optimizer.step()`` commits."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, NoReturn, SupportsFloat

import torch
from torch.utils.data import DataLoader

from shardwell.monitor.step_times import StepPart
from shardwell.seeds import derive_seed, seed_batch
from shardwell.step.step_commit import StepUpdate
from shardwell.step.step_state import WorkItemState
from shardwell.training.batch_sources import (
    BatchFunction,
    BatchOptions,
    batch_function,
    is_stream,
    read_loader,
    steps_per_epoch,
)
from shardwell.training.batch_workers import BatchWorkers, pin
from shardwell.training.step_in_flight import StepInFlight
from shardwell.training.streams import StreamReaders
from shardwell.training.training import Training
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)


class UnknownMeans(dict[str, float]):
    """The means of a step that is not committed, or whose iteration has lost its effect: NaN for every name."""

    def __missing__(self, name: str) -> float:
        return math.nan


@dataclass(slots=True)
class LoopPosition:
    """Position of a loop over ``session.steps``."""

    number: int
    """Completed iterations of the loop body, in the whole run."""
    optimizer_steps: int
    """Calls of ``optimizer.step()`` per iteration. Each call is a commit of the run."""
    commits: int = 0
    """Calls of ``optimizer.step()`` in this iteration so far."""
    means: Mapping[str, float] = field(default_factory=UnknownMeans)
    """Means of the logged numbers in the last of these commits, by name."""
    steps_per_epoch: int = 0
    """Steps of an epoch of the loader that ``steps`` got; 0 without a loader."""
    global_ranks: list[int] = field(default_factory=list)
    twin_ranks: set[int] = field(default_factory=set)
    """``Step`` describes both."""

    @property
    def step(self) -> int:
        """The run's step that the next ``optimizer.step()`` commits, unless it is committed already."""
        return self.number * self.optimizer_steps + self.commits

    def refuse_commit(self) -> NoReturn:
        """Raises UsageError: the loop body has called ``optimizer.step()`` as often as declared."""
        raise UsageError(
            f"optimizer.step() was called {self.commits + 1} times in the loop body of step {self.number}, "
            f"expected {self.commits}: each call commits the run's next step. Call it once after all backwards, "
            "with shardwell.optim.Combined([...]) for several optimizers, or declare the number of calls: "
            f"session.steps(num_steps, optimizer_steps={self.commits + 1})"
        )

    def require_end(self) -> None:
        """Raises UsageError if the loop body has called ``optimizer.step()`` less often than declared."""
        if self.commits < self.optimizer_steps:
            calls = f": {self.commits} of {self.optimizer_steps} calls" if self.optimizer_steps > 1 else ""
            raise UsageError(
                f"the loop body of step {self.number} ended without optimizer.step(){calls}. Call it in every step, on "
                "an optimizer of the sharded model, such as shardwell.optim.AdamW(model.parameters()). To skip the "
                "gradient of a batch call optimizer.zero_grad() and then optimizer.step(). To accumulate gradients, "
                "call backward() for each micro-batch inside the loop over step.batches"
            )


class Step:
    """One step, from ``session.steps``.

    Attributes:
        number: Number of the step, from 0. With one ``optimizer.step()`` in the loop body, the step reads the weights
            of this version and makes the next version.
        global_ranks: Before ``optimizer.step()``, the logical ranks whose work items this trainer has started in this
            step, in this order, also those of lost trainers. After ``optimizer.step()``, the ranks whose committed work
            it has computed, and those of trainers that are gone. One trainer has rank 0 then, to print, log and save.
            No trainer has a rank in an iteration that has lost its effect.
        twin_ranks: Before ``optimizer.step()``, those of them whose trainer is late, and computes the same work.

    Args:
        loop: Position of the loop.
        work: The step in flight.
        feeds: Finds the batches.
        seed: The run's seed.
    """

    def __init__(self, loop: LoopPosition, work: StepInFlight, feeds: BatchFeeds, *, seed: int) -> None:
        self.number = loop.number
        self.global_ranks, self.twin_ranks = loop.global_ranks, loop.twin_ranks
        self._loop, self._work, self._feeds, self._seed = loop, work, feeds, seed
        self._looped_for: int | None = None
        """Commit, counted in the iteration, for whose work items a loop over ``batches`` has ended."""
        self._has_batches = False
        """Whether the last loop over ``batches`` has yielded a batch."""

    def __repr__(self) -> str:
        return f"<shardwell.Step {self.number}>"

    def __format__(self, specification: str) -> str:
        return self._refuse_number() if specification else repr(self)

    def _refuse_number(self, *_: object) -> NoReturn:
        raise UsageError(
            "the step of `for step in session.steps(...)` was used as a number: use step.number, which is "
            f"{self.number}"
        )

    def __eq__(self, other: object) -> bool:
        return self._refuse_number() if isinstance(other, Number) else self is other

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __floordiv__ = _refuse_number
    __rtruediv__ = __rfloordiv__ = __rmod__ = __mod__ = __lt__ = __le__ = __gt__ = __ge__ = __index__ = __int__ = (
        __float__
    ) = _refuse_number

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0. Only of ``session.steps(loader, epochs=...)``."""
        return self._divide_by_epoch()[0]

    @property
    def ends_epoch(self) -> bool:
        """True in the last step of an epoch. Only of ``session.steps(loader, epochs=...)``."""
        return self._divide_by_epoch()[1] == self._loop.steps_per_epoch - 1

    def _divide_by_epoch(self) -> tuple[int, int]:
        if not self._loop.steps_per_epoch:
            raise UsageError(
                "steps(num_steps) does not say how many steps an epoch has: use session.steps(loader, epochs=...), or "
                "divide step.number by the number of steps of an epoch"
            )
        return divmod(self.number, self._loop.steps_per_epoch)

    def batches(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Any = None,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch: int | None = None,
        pin_memory: bool = False,
        name: str = "data",
    ) -> Iterator[Any]:
        """Yields one batch per work item of this trainer: one per logical rank, and those of lost trainers.

        A second call after an ``optimizer.step()`` in the same loop body yields the same batches again.

        A batch is yielded again if its gradients are lost together with a shard server. If this trainer loses its
        place in the run, it computes the rest of the batch without effect, then joins again and continues.

        Before each batch, the generators of torch, Python and NumPy are seeded as a function of (run seed, step,
        dp_rank). Random transforms and dropout are therefore the same on every trainer that computes the item. The loop
        ends when all trainers have finished the step's work. It yields nothing on a spare that is not needed. If the
        work of a trainer's rank is done already, the rank's batch is yielded all the same, and its gradients dropped.

        Args:
            source: A function ``(step, dp_rank) -> batch``; a map-style dataset; a stream, such as an
                ``IterableDataset`` or a streaming dataset of Hugging Face, or a function from a data rank to a stream;
                or a ``DataLoader``, whose settings replace the other arguments. Samples of a map-style dataset are
                drawn without repetition within an epoch. A stream must yield the same samples whenever it is iterated.
                Its position is part of each commit.
            batch_size: Samples per batch, of one data rank. Only with a dataset or a stream. A stream without it yields
                batches.
            collate_fn: Function from a list of samples to a batch. Only with a dataset or a stream. Default: torch's
                collation.
            shuffle: Whether each epoch of a map-style dataset has its own order. False: the order of the dataset.
            drop_last: Whether an epoch drops the samples that do not fill a step; of a stream, a batch. Otherwise the
                data ranks share the last samples of a map-style dataset evenly, and the last batch of each rank's
                stream is smaller.
            num_workers: Processes that make the batches of the next steps. Of a stream, each reads one data rank.
            prefetch: Batches that each process makes ahead. Default: 2.
            pin_memory: Whether batches are in pinned memory, if there is an accelerator.
            name: Name of the stream in the commits, or of a source with ``num_workers``, if a loop uses several.

        Raises:
            UsageError: The arguments do not fit together, a backward ran before the loop, or a stream cannot be
                continued.
            UnavailableError: A worker process has ended.
            DeadlineError: Other trainers did not finish in time. The message names them.
        """
        options = BatchOptions(
            batch_size=batch_size,
            collate_fn=collate_fn,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=num_workers,
            prefetch=prefetch,
            pin_memory=pin_memory,
            name=name,
        )
        if isinstance(source, DataLoader):
            source, options = read_loader(source, options)
        return self._batches(self._feeds.function(source, options, self._loop), options.batch_size or 0)

    def log(self, **scalars: float | torch.Tensor | None) -> None:
        """Logs numbers of this trainer's work item, such as its loss. ``means`` has their means over the data ranks.

        Call it in the loop over ``batches``. A later value of the same name replaces the earlier one. Numbers of a work
        item that is computed again are logged again, so the means do not depend on which trainers are lost.

        Args:
            scalars: Numbers or tensors with one element, by name. None: this trainer has no value, such as the loss of
                a pipeline on trainers without the last stage. Of a replica, the trainer of the lowest rank that has
                logged a name counts.

        Raises:
            UsageError: A value is no number, or is a ``DTensor`` of which each rank has a part only, or the call is
                outside of a work item.
            InvalidRequestError: The item has more than 64 names, or a name is too long.
        """
        found = {name: _number(name, value) for name, value in scalars.items() if value is not None}
        self._work.log(self._loop.step, found)

    @property
    def means(self) -> Mapping[str, float]:
        """Means over the data ranks of the numbers that ``log`` was called with, after ``optimizer.step()``.

        They are equal on all trainers, and part of the commit record: a loop that repeats the last committed step,
        after joining a run with tracked objects, reads them again. The values are added in the order of the data ranks.
        Before the commit, and in an iteration that has lost its effect because this trainer lost its place in the run,
        the mapping is empty and gives NaN for every name.
        """
        return self._loop.means

    def _batches(self, make_batch: BatchFunction, num_samples: int) -> Iterator[Any]:
        work, state = self._work, self._work.state
        work.settle()
        self._has_batches = False
        if self._looped_for not in (None, self._loop.commits):
            self.global_ranks.clear()
            self.twin_ranks.clear()
        has_effect = work.rejoining.join_again() and not work.iteration.voided
        if not has_effect or (state.position > self._loop.step and not state.asynchronous):
            yield from self._compute_without_effect(make_batch, num_samples)
            self._looped_for = self._loop.commits
            return
        if self._looped_for == self._loop.commits and work.state.items and not work.state.unfinished:
            raise UsageError(
                f"a second loop over step.batches in step {self.number} would get no batch: the first one has "
                "computed the work of the step. Read all data of the step in one loop, such as step.batches(lambda "
                "step, dp_rank: (first(step, dp_rank), second(step, dp_rank))), and evaluate on batches of your own"
            )
        work.items.start_batches()
        if not state.items and not state.asynchronous:  # at once, while other trainers compute its ranks' work
            yield from self._compute_without_effect(make_batch, num_samples)
        items = deque(state.unfinished)
        while True:
            while items:
                yield from self._compute(items.popleft(), make_batch, num_samples)
            more = work.items.finish_work(accept_work=True)
            if not more:
                break
            items.extend(more)
        if not self._has_batches:
            yield from self._compute_without_effect(make_batch, num_samples)
        self._looped_for = self._loop.commits

    def _compute_without_effect(self, make_batch: BatchFunction, num_samples: int) -> Iterator[Any]:
        """Yields the batches of this trainer's ranks. See Note: [Work without effect]."""
        work = self._work
        work.items.start_batches()
        try:
            for item in work.items.without_effect(self.number):
                yield from self._compute(item, make_batch, num_samples)
        finally:  # also if the loop ends early
            if work.state.is_without_effect:
                work.items.drop_current()
            if work.state.position > self._loop.step:
                work.state.in_batches = False  # of the step in flight, which comes next

    def _compute(self, item: WorkItemState, make_batch: BatchFunction, num_samples: int) -> Iterator[Any]:
        work, dp_rank, counts = self._work, item.item.dp_rank, not item.is_over
        if not work.items.start_item(item):
            return
        if item.item.global_rank not in self.global_ranks:
            self.global_ranks.append(item.item.global_rank)
        (self.twin_ranks.add if item.is_twin else self.twin_ranks.discard)(item.item.global_rank)
        step, commits = work.state.number, self._loop.commits
        # The step of an asynchronous item is the version that it reads, which depends on timing. Its number does not.
        is_asynchronous, number = work.state.asynchronous, item.item.number
        seed_batch(derive_seed(self._seed, number if is_asynchronous else self._loop.step, dp_rank))
        try:
            batch = self._make(make_batch, number if is_asynchronous else self.number, dp_rank, counts * num_samples)
            work.items.agree_on_item(item, batch)
            self._has_batches = True
            yield batch
            if self._loop.commits != commits or (counts and work.state.number != step):
                raise UsageError(
                    f"optimizer.step() was called inside the loop over step.batches of step {self.number}: "
                    "call it after the loop"
                )
            work.items.end_item()
        except BaseException:
            work.items.stop_item()
            raise

    def _make(self, make_batch: BatchFunction, number: int, dp_rank: int, num_samples: int) -> Any:
        """Returns a batch. Measures how long it takes to make."""
        started, monitor = time.perf_counter(), self._work.monitor
        batch = make_batch(number, dp_rank)
        monitor.add(StepPart.DATA, time.perf_counter() - started)
        monitor.count(samples=num_samples)
        return batch


def _number(name: str, value: float | torch.Tensor) -> float:
    if isinstance(value, torch.Tensor):
        # A loss that tensor-parallel ranks compute together is a DTensor, whose class takes long to import.
        placements = getattr(value, "placements", ())
        if any(not placement.is_replicate() for placement in placements):
            raise UsageError(
                f"step.log({name}=...): the value is a DTensor of which each rank has a part only (placements "
                f"{', '.join(map(str, placements))}), and only a collective on all ranks of its mesh joins the parts: "
                f"call {name} = {name}.full_tensor() on all of them, and log the result"
            )
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if whole.numel() == 1 and not whole.is_complex():
            return float(whole.item())
    elif isinstance(value, SupportsFloat):
        return float(value)
    what = f"tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise UsageError(f"step.log({name}=...): expected a number or a tensor with one element, got a {what}")


class BatchFeeds:
    """Finds the batches of a loop's work items, and has the worker processes and streams that the loop uses.

    Args:
        work: The step in flight.
        seed: The run's seed.
        dp: Size of the data axis.
        optimizer_steps: Commits per iteration of the loop.
    """

    def __init__(self, work: StepInFlight, *, seed: int, dp: int, optimizer_steps: int) -> None:
        self._work, self._seed, self._dp, self._optimizer_steps = work, seed, dp, optimizer_steps
        self._open: dict[str, tuple[Any, BatchOptions, StreamReaders | BatchWorkers]] = {}
        """Source, options, and what reads the source, by name."""

    def function(self, source: Any, options: BatchOptions, loop: LoopPosition) -> BatchFunction:
        """Returns the function (step, dp_rank) -> batch for the arguments of ``step.batches``.

        It is called when the generators were seeded for the current work item.
        """
        if not (streams := is_stream(source, options)) and not options.num_workers:
            make_batch = batch_function(source, options, seed=self._seed, dp=self._dp)
            return (lambda *at: pin(make_batch(*at), options)) if options.pin_memory else make_batch
        known, known_options, feed = self._open.get(options.name, (source, options, None))
        if known_options != options or (known is not source and not (callable(source) and known == source)):
            raise UsageError(
                f"step.batches got another {'stream' if streams else 'source'} or other options than before in this "
                "loop: a stream, or a source with num_workers=, is opened once. Make it before the loop, and give each "
                "of several sources its own name=..."
            )
        if feed is None:
            feed = self._make_feed(source, options, streams=streams)
            self._open[options.name] = source, options, feed
        return partial(self._make, feed, loop)

    def _make_feed(self, source: Any, options: BatchOptions, *, streams: bool) -> StreamReaders | BatchWorkers:
        if streams:
            return StreamReaders(source, options, seed=self._seed, dp=self._dp, optimizer_steps=self._optimizer_steps)
        return BatchWorkers(
            batch_function(source, options, seed=self._seed, dp=self._dp),
            options,
            seed=self._seed,
            optimizer_steps=self._optimizer_steps,
            dp_ranks=lambda: sorted(item.item.dp_rank for item in self._work.state.items.values()),
        )

    def _make(self, feed: StreamReaders | BatchWorkers, loop: LoopPosition, number: int, dp_rank: int) -> Any:
        item, commit = self._work.state.require_current(), number if self._work.state.asynchronous else loop.step
        if isinstance(feed, BatchWorkers):
            return feed.make(number, commit, dp_rank)
        seed, is_last = derive_seed(self._seed, commit, dp_rank), loop.commits == loop.optimizer_steps - 1
        return feed.make(number, seed, item, is_last=is_last)

    def close(self) -> None:
        """Ends the worker processes."""
        for _, _, feed in self._open.values():
            feed.close()
        self._open.clear()


def _check_counts(num_steps: Any, epochs: int | None, optimizer_steps: int) -> None:
    if optimizer_steps < 1:
        raise UsageError(f"steps(optimizer_steps={optimizer_steps!r}): expected at least 1")
    is_loader = isinstance(num_steps, DataLoader)
    if epochs is not None and (not hasattr(epochs, "__index__") or epochs < 1):
        raise UsageError(f"steps(epochs={epochs!r}): expected the number of all epochs of the run, at least 1")
    if is_loader != (epochs is not None) or not (
        is_loader or isinstance(num_steps, float) or hasattr(num_steps, "__index__")
    ):
        raise UsageError(
            f"steps({num_steps if isinstance(num_steps, int) else type(num_steps).__name__}"
            f"{'' if epochs is None else f', epochs={epochs}'}): expected the number of all steps of the run, "
            "session.steps(1000), or a DataLoader and all its epochs, session.steps(loader, epochs=3)"
        )


class TrainingLoop:
    """Yields the steps of a run, and commits them.

    Args:
        in_flight: The step in flight.
        training: The model in training.
    """

    def __init__(self, in_flight: StepInFlight, training: Training) -> None:
        self._in_flight, self.iteration = in_flight, in_flight.iteration
        self.tracked, self._membership = training.tracked, training.membership
        self._feeds: BatchFeeds | None = None
        self._position: LoopPosition | None = None
        """Position of the loop over ``steps``. None: there is no such loop."""

    def steps(self, num_steps: Any, epochs: int | None, optimizer_steps: int) -> Iterator[Step]:
        """Yields the steps from the committed one up to step ``num_steps``; see ``Session.steps``."""
        _check_counts(num_steps, epochs, optimizer_steps)
        per_epoch = 0 if epochs is None else steps_per_epoch(num_steps, self._membership.world.dp)
        num_steps = num_steps if epochs is None else per_epoch * epochs
        if self._committed >= num_steps * optimizer_steps:
            logger.warning(
                "run %r has committed %d steps, so steps(%d) has none left to train: the number counts all steps of "
                "the run, also those of earlier loops. Ask for more steps, or start a new run under another name",
                self._membership.run,
                self._committed,
                num_steps,
            )
        if optimizer_steps > 1 and self._in_flight.state.asynchronous:
            raise UsageError(
                f"steps(optimizer_steps={optimizer_steps}) in a run that commits each work item by itself: call "
                "optimizer.step() once in the loop body"
            )
        number = self._first_iteration(optimizer_steps)
        if number * optimizer_steps < self._committed and not self._in_flight.state.asynchronous:
            logger.warning(
                "the loop body of step %d runs again, because the run was interrupted in it after optimizer.step(): "
                "the gradients of its batches are dropped, and step.means has the numbers of the commit",
                number,
            )
        loop: LoopPosition | None = None
        state, membership = self._in_flight.state, self._membership
        self.close()
        feeds = self._feeds = BatchFeeds(
            self._in_flight, seed=membership.seed, dp=membership.world.dp, optimizer_steps=optimizer_steps
        )
        state.item_limit = num_steps if state.asynchronous else None
        self._membership.note_loop(ended_step=None)
        try:
            while number < num_steps:
                loop = self._position = LoopPosition(number, optimizer_steps, steps_per_epoch=per_epoch)
                self._in_flight.enter()
                step = Step(loop, self._in_flight, feeds, seed=membership.seed)
                yield step
                self._in_flight.leave()
                if self.iteration.voided:
                    number = self._first_iteration(optimizer_steps) if self.iteration.resume() else number
                else:
                    loop.require_end()
                    number += 1
                    self.tracked.restored = False
                    if self.tracked and 0 in step.global_ranks and not state.asynchronous:
                        self._membership.report_iteration(state.number - 1, self.tracked.to_json())
                if state.asynchronous:
                    number = self._committed
            if not state.asynchronous:
                self._membership.note_loop(ended_step=state.number)
        finally:
            feeds.close()
            if self._position is loop:  # another loop may have started
                self._position = None
                self.iteration.end()

    def close(self) -> None:
        """Ends the worker processes of the loop."""
        if self._feeds is not None:
            self._feeds.close()

    def _first_iteration(self, optimizer_steps: int) -> int:
        """Returns the iteration with which a loop starts. Restored objects need the end of the last committed step."""
        committed = self._committed
        return max(0, committed - 1 if self.tracked.restored else committed) // optimizer_steps

    @property
    def _committed(self) -> int:
        """Number of committed steps; in an asynchronous run, of committed work items of this trainer's rank."""
        return self._in_flight.state.position

    @property
    def step(self) -> int:
        """The step that ``optimizer.step()`` commits; a committed step while an iteration is repeated."""
        if self._position is None or self._in_flight.state.asynchronous:
            return self._committed
        return self._position.step

    def begin_commit(self) -> None:
        """Called by ``optimizer.step()`` in a repeated iteration. Tracked objects get the state of the commit."""
        if self._position is not None and self._position.step == self._committed - 1:
            self.tracked.restore(self.tracked.stored)

    def commit(self, step: int, update: StepUpdate) -> bool:
        """Commits the loop's step; returns whether parameters were updated. See ``StepInFlight.commit``."""
        position = self._position
        if position is not None and not self.iteration.voided and position.commits == position.optimizer_steps:
            position.refuse_commit()
        updated, voided = self._in_flight.commit(step, update), self.iteration.voided
        if position is None:
            return updated
        if not voided:
            position.commits, position.means = position.commits + 1, self._in_flight.means
        acting = coordinator_pb2.ActingRanks() if voided else self._in_flight.acting
        if acting is not None:
            position.global_ranks[:] = acting.global_ranks
            position.twin_ranks.clear()
        return updated
