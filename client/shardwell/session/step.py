"""One step of a training loop: hands out work items, ends when every trainer's are finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwell.seeds import derive_seed
from shardwell.session.data import BatchFunction, batch_function
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.progress import ItemProgress
    from shardwell.session.session import Session


@dataclass(slots=True)
class LoopPosition:
    """Where a loop over ``session.steps`` is."""

    number: int
    """How often the loop body ran before, in the whole run."""
    optimizer_steps: int
    """How often the body calls ``optimizer.step()``: commits of the run."""
    commits: int = 0
    """How often it did."""

    @property
    def step(self) -> int:
        """The run's step that the next ``optimizer.step()`` commits, or finds committed."""
        return self.number * self.optimizer_steps + self.commits

    def require_open(self) -> None:
        """Raises UsageError if the body has called ``optimizer.step()`` as often as it said."""
        if self.commits == self.optimizer_steps:
            raise UsageError(
                f"optimizer.step() was called {self.commits + 1} times in the loop body of step {self.number}, "
                f"expected {self.commits}: each call commits the run's next step. Call it once after all backwards, "
                "with shardwell.optim.Combined([...]) for several optimizers, or say how often the body calls it: "
                f"session.steps(num_steps, optimizer_steps={self.commits + 1})"
            )

    def require_end(self) -> None:
        """Raises UsageError if the body has called ``optimizer.step()`` less often than it said."""
        if self.commits < self.optimizer_steps:
            calls = f": {self.commits} of {self.optimizer_steps} calls" if self.optimizer_steps > 1 else ""
            raise UsageError(
                f"the loop body of step {self.number} ended without optimizer.step(){calls}. To skip the gradient of a "
                "batch call optimizer.zero_grad() and then optimizer.step()"
            )


class Step:
    """One step, from ``session.steps``.

    Attributes:
        number: The step's number, from 0. With one ``optimizer.step()`` in the loop body the step reads this version of
            the weights and makes the next.
        global_ranks: The logical ranks whose work this trainer has begun in this step, in that order. Differs from
            ``session.global_rank`` while it does a lost trainer's work.
    """

    def __init__(self, session: Session, loop: LoopPosition) -> None:
        self.number = loop.number
        self.global_ranks: list[int] = []
        self._session, self._loop = session, loop

    def batches(self, source: Any, batch_size: int | None = None, *, collate_fn: Any = None) -> Iterator[Any]:
        """Yields one batch per work item: one per logical rank held, and more while standing in.

        Called again after an ``optimizer.step()`` in the same loop body, it yields the same batches for the next one.

        Before each batch torch's generators are seeded as a function of (run seed, step, dp_rank), so
        dropout is the same wherever the item runs. The loop ends when the step's work is finished by
        all trainers; until then a lost trainer's item may come here. It yields nothing on a spare
        that is not needed, and in the first step after joining a run with tracked objects.

        Args:
            source: A function ``(step, dp_rank) -> batch``, or a map-style dataset, drawn without
                repetition within an epoch.
            batch_size: Samples per batch; with a dataset only.
            collate_fn: List of samples -> batch; with a dataset only. torch's default if None.

        Raises:
            UsageError: The arguments do not fit together, or this is not the step in flight.
            DeadlineError: The others did not finish in time; the message says who.
        """
        draw = batch_function(
            source,
            seed=self._session.seed,
            dp=self._session.world.dp,
            batch_size=batch_size,
            collate_fn=collate_fn,
        )
        return self._batches(draw)

    def _batches(self, draw: BatchFunction) -> Iterator[Any]:
        work = self._session.in_flight
        work.settle()
        if self._session.step > self._loop.step:
            return
        work.begin_batches()
        progress = work.progress
        waiting = deque(progress.unfinished)
        while True:
            while waiting:
                yield from self._compute(waiting.popleft(), draw)
            lost = work.finish_work(accept_work=True)
            if not lost:
                return
            waiting.extend(lost)

    def _compute(self, item: ItemProgress, draw: BatchFunction) -> Iterator[Any]:
        work, dp_rank = self._session.in_flight, item.item.dp_rank
        work.begin_item(item)
        if item.item.global_rank not in self.global_ranks:
            self.global_ranks.append(item.item.global_rank)
        step = work.progress.number
        torch.manual_seed(derive_seed(self._session.seed, step, dp_rank))
        yield draw(self.number, dp_rank)
        if work.progress.number != step:
            raise UsageError(
                f"optimizer.step() was called inside the loop over step.batches of step {self.number}: "
                "call it after the loop"
            )
        work.end_item()
