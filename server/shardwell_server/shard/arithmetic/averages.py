"""Exponential moving averages of parameters."""

from __future__ import annotations

from collections.abc import Sequence

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

    def before_update(self, optimised: Sequence[bool]) -> None:
        """Averages of what is optimised for the first time begin with what it was until now."""
        for part, value in enumerate(self._values):
            if self._begun and optimised[part] and self._averages[part] is None:
                self._averages[part] = value.clone()

    def after_update(self, optimised: Sequence[bool], decay: float) -> None:
        """Takes the new values in: ``average += (1 - decay) * (value - average)``."""
        for part, value in enumerate(self._values):
            average = self._averages[part]
            if average is not None:
                average.lerp_(value, 1 - decay)
            elif optimised[part]:
                self._averages[part] = value.clone()
        self._begun = True
