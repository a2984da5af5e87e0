"""What a work item computes on: seeds and batches as functions of (run seed, step, dp_rank) alone."""

from __future__ import annotations

from collections.abc import Callable, Sized
from functools import lru_cache
from typing import Any

import torch
from torch.utils.data import default_collate

from shardwell.seeds import derive_seed
from shardwell_wire.errors import UsageError

BatchFunction = Callable[[int, int], Any]
"""``(step, dp_rank) -> batch``."""


def batch_function(source: Any, *, seed: int, dp: int, batch_size: int | None, collate_fn: Any) -> BatchFunction:
    """Turns what a user passes to ``step.batches`` into a function of (step, dp_rank).

    Args:
        source: Such a function already, or a map-style dataset.
        seed: The run's seed.
        dp: Logical data ranks.
        batch_size: Samples per logical rank and step; for datasets only.
        collate_fn: List of samples -> batch, for datasets; torch's default collation if None.

    Raises:
        UsageError: The arguments do not fit together, or the dataset is smaller than one step.
    """
    if batch_size is None:
        if not callable(source) or collate_fn is not None:
            raise UsageError(
                "step.batches takes a function (step, dp_rank) -> batch, or a map-style dataset with batch_size=...; "
                f"got {type(source).__name__} without batch_size"
            )
        return source  # type: ignore[no-any-return]
    if not isinstance(source, Sized) or not hasattr(source, "__getitem__"):
        raise UsageError(
            f"step.batches(batch_size={batch_size}) needs a map-style dataset (__len__, __getitem__), "
            f"got {type(source).__name__}"
        )
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}")
    collate = collate_fn or default_collate
    size = len(source)

    def draw(step: int, dp_rank: int) -> Any:
        indices = sample_indices(size, batch_size=batch_size, dp=dp, seed=seed, step=step, dp_rank=dp_rank)
        return collate([source[index] for index in indices])

    return draw


def sample_indices(size: int, *, batch_size: int, dp: int, seed: int, step: int, dp_rank: int) -> list[int]:
    """The samples of one work item: without repetition within an epoch, the last partial step dropped.

    Returns:
        Indices into a dataset of ``size`` samples. [batch_size]

    Raises:
        UsageError: The dataset has fewer samples than one step takes.
    """
    steps_per_epoch = size // (batch_size * dp)
    if steps_per_epoch == 0:
        raise UsageError(f"the dataset has {size} samples; a step takes batch_size {batch_size} x dp {dp}")
    epoch, position = divmod(step, steps_per_epoch)
    start = (position * dp + dp_rank) * batch_size
    return _permutation(size, derive_seed(seed, "epoch", epoch))[start : start + batch_size].tolist()


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
