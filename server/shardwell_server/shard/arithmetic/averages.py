"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch

from shardwell_server.shard.arithmetic.update_pieces import Changed, Piece, slices


class Averages:
    """Averages, as in ``torch.optim.swa_utils.AveragedModel``: the first average is a copy of the values.

    A parameter that is not optimised has no average. Its average equals its value.

    Args:
        values: The parts of parameters, which change in place.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self._averages: list[torch.Tensor | None] = [None] * len(values)
        self._has_started = False

    def __getitem__(self, part: int) -> torch.Tensor | None:
        return self._averages[part]

    @property
    def has_started(self) -> bool:
        """True once a step has updated the averages."""
        return self._has_started

    @property
    def count(self) -> int:
        return sum(average is not None for average in self._averages)

    @property
    def size_bytes(self) -> int:
        return sum(average.nbytes for average in self._averages if average is not None)

    def missing(self, optimised: Sequence[bool], *, averaged: bool) -> list[int]:
        """Returns the parts for which the next update must allocate an average.

        Args:
            optimised: Whether each part is optimised.
            averaged: Whether the update changes the averages.
        """
        if not (self._has_started or averaged):
            return []
        return [part for part, average in enumerate(self._averages) if optimised[part] and average is None]

    def start_update(self, fresh: Mapping[int, torch.Tensor], decay: float | None) -> AveragedUpdate:
        """Returns the changes that one update of the values makes to the averages.

        Args:
            fresh: Memory for the averages that ``missing`` returned, by part.
            decay: Weight of the previous average. None: averages do not change.
        """
        existing = {part: average for part, average in enumerate(self._averages) if average is not None}
        ordered = dict(sorted(fresh.items()))  # the pieces have the same order in every process
        return AveragedUpdate(self._values, existing, ordered, decay, has_started=self._has_started)

    def settle(self, update: AveragedUpdate) -> None:
        """Records the averages that an update has started."""
        for part, average in update.fresh.items():
            self._averages[part] = average
        self._has_started |= update.decay is not None

    def restore(self, averages: Mapping[int, torch.Tensor], *, has_started: bool) -> None:
        """Sets the averages, by part."""
        self._averages = [averages.get(part) for part in range(len(self._values))]
        self._has_started = has_started


class AveragedUpdate:
    """The pieces of one update of the averages; see ``update_pieces.py``.

    Args:
        values: The parts of parameters.
        existing: Averages that the update changes, by part.
        fresh: Memory for new averages, by part.
        decay: See ``Averages.start_update``.
        has_started: True if a former update has started the averages.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        existing: Mapping[int, torch.Tensor],
        fresh: Mapping[int, torch.Tensor],
        decay: float | None,
        *,
        has_started: bool,
    ) -> None:
        self.fresh, self.decay = fresh, decay
        self._values, self._existing, self._has_started = values, existing, has_started

    def before(self) -> Iterator[Piece]:
        """Starts the averages of parts that are optimised for the first time, from their values before the update."""
        if self._has_started:
            yield from self._start()

    def after(self) -> Iterator[Piece]:
        """Adds the updated values: ``average += (1 - decay) * (value - average)``."""
        if self.decay is None:
            return
        for part, average in {**self._existing, **(self.fresh if self._has_started else {})}.items():
            flat, values = average.view(-1), self._values[part].view(-1)
            for here in slices(flat):
                run = partial(flat[here].lerp_, values[here], 1 - self.decay)
                yield Piece(run, Changed([flat[here]]), atomic=True)
        if not self._has_started:
            yield from self._start()

    def _start(self) -> Iterator[Piece]:
        # The values do not change before all of these pieces are done, so the copies can be repeated.
        for part, average in self.fresh.items():
            yield Piece(partial(average.copy_, self._values[part]))
