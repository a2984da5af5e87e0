"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


class Averages:
    """Averages as ``torch.optim.swa_utils.AveragedModel`` keeps them: the first is a copy of the values.

    What is not optimised has no average: it is its value.

    Args:
        values: The parts of parameters, which change in place.
    """

    def __init__(self, values: Sequence[torch.Tensor]) -> None:
        self._values = values
        self._averages: list[torch.Tensor | None] = [None] * len(values)
        self._begun = False

    def __getitem__(self, part: int) -> torch.Tensor | None:
        return self._averages[part]

    @property
    def begun(self) -> bool:
        """Whether a step was averaged."""
        return self._begun

    @property
    def count(self) -> int:
        return sum(average is not None for average in self._averages)

    @property
    def size_bytes(self) -> int:
        return sum(average.nbytes for average in self._averages if average is not None)

    def missing(self, optimised: Sequence[bool], *, averaged: bool) -> list[int]:
        """The parts that need an average for the next update and have none.

        Args:
            optimised: Whether each part is optimised.
            averaged: Whether the update is averaged.
        """
        if not (self._begun or averaged):
            return []
        return [part for part, average in enumerate(self._averages) if optimised[part] and average is None]

    def updating(self, fresh: Mapping[int, torch.Tensor], decay: float | None) -> AveragedUpdate:
        """What one update does to the averages.

        Args:
            fresh: Memory for the averages that ``missing`` names.
            decay: Weight of what an average was before; None: averages stay as they are.
        """
        return AveragedUpdate(self, dict(fresh), decay)


class AveragedUpdate:
    """One update of averages. Each of its methods can be repeated if it raised.

    Args:
        averages: What is updated.
        fresh: Memory for averages that begin, by part.
        decay: See ``Averages.updating``.
    """

    def __init__(self, averages: Averages, fresh: dict[int, torch.Tensor], decay: float | None) -> None:
        self._of, self._fresh, self._decay = averages, fresh, decay
        self._left = [part for part, average in enumerate(averages._averages) if average is not None]

    def before(self) -> None:
        """Averages of what is optimised for the first time begin with what it was until now."""
        if self._of._begun:
            self._begin(self._left)

    def after(self) -> None:
        """Takes the new values in: ``average += (1 - decay) * (value - average)``."""
        if self._decay is None:
            return
        while self._left:
            average = self._of._averages[self._left[-1]]
            assert average is not None
            average.lerp_(self._of._values[self._left[-1]], 1 - self._decay)
            self._left.pop()
        self._begin([])
        self._of._begun = True

    def _begin(self, noted: list[int]) -> None:
        while self._fresh:
            part, average = next(iter(self._fresh.items()))
            average.copy_(self._of._values[part])
            self._of._averages[part] = average
            noted.append(part)
            del self._fresh[part]
