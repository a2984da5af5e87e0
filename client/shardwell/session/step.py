"""One step of a training loop: hands out work items, ends when every trainer's are finished."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shardwell.seeds import derive_seed
from shardwell.session.data import BatchFunction, batch_function
from shardwell_wire.errors import UsageError

if TYPE_CHECKING:
    from shardwell.session.progress import ItemProgress
    from shardwell.session.session import Session


class Step:
    """One step, from ``session.steps``.

    Attributes:
        number: The step's number, from 0: it reads this version of the weights and makes the next.
        global_ranks: The logical ranks whose work this trainer has begun in this step, in that order. Differs from
            ``session.global_rank`` while it does a lost trainer's work.
    """

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        self.global_ranks: list[int] = []
        self._session = session

    def batches(self, source: Any, batch_size: int | None = None, *, collate_fn: Any = None) -> Iterator[Any]:
        """Yields one batch per work item: one per logical rank held, and more while standing in.

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
        if self._session.step > self.number:
            return
        progress = work.progress
        progress.in_batches = True
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
        torch.manual_seed(derive_seed(self._session.seed, self.number, dp_rank))
        yield draw(self.number, dp_rank)
        if work.progress.number != self.number:
            raise UsageError(
                f"optimizer.step() was called inside the loop over step.batches of step {self.number}: "
                "call it after the loop"
            )
        work.end_item()
