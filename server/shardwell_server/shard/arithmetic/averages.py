"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


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
        return AveragedUpdate(self, dict(fresh), decay)


class AveragedUpdate:
    """One update of the averages. After an error, each method can be repeated.

    Args:
        averages: The averages to update.
        fresh: Memory for new averages, by part.
        decay: See ``Averages.start_update``.
    """

    def __init__(self, averages: Averages, fresh: dict[int, torch.Tensor], decay: float | None) -> None:
        self._target, self._fresh, self._decay = averages, fresh, decay
        self._remaining = [part for part, average in enumerate(averages._averages) if average is not None]

    def before(self) -> None:
        """Starts the averages of parts that are optimised for the first time, from their values before the update."""
        if self._target._has_started:
            self._start(self._remaining)

    def after(self) -> None:
        """Adds the updated values: ``average += (1 - decay) * (value - average)``."""
        if self._decay is None:
            return
        while self._remaining:
            average = self._target._averages[self._remaining[-1]]
            assert average is not None
            average.lerp_(self._target._values[self._remaining[-1]], 1 - self._decay)
            self._remaining.pop()
        self._start([])
        self._target._has_started = True

    def _start(self, started: list[int]) -> None:
        """Copies values to new averages and appends their parts to ``started``."""
        while self._fresh:
            part, average = next(iter(self._fresh.items()))
            average.copy_(self._target._values[part])
            self._target._averages[part] = average
            started.append(part)
            del self._fresh[part]
