"""What ``step.batches`` reads: functions, map-style datasets, streams, and what it takes from a DataLoader.

The samples of a work item are a function of (seed, step, dp_rank), so every trainer finds them alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from inspect import signature
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from shardwell.seeds import derive_seed
from shardwell_wire.errors import UsageError

BatchFunction = Callable[[int, int], Any]
"""``(step, dp_rank) -> batch``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOptions:
    """How batches are made of a source's samples. See ``Step.batches``."""

    batch_size: int | None = None
    collate_fn: Any = None
    shuffle: bool = True
    drop_last: bool = True
    num_workers: int = 0
    prefetch: int | None = None
    pin_memory: bool = False
    name: str = "data"
    multiprocessing_context: Any = None
    """Of a DataLoader, like the two below."""
    worker_init_fn: Any = None
    timeout: float = 0

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise UsageError(f"batch_size must be at least 1, got {self.batch_size}")
        if self.num_workers < 0:
            raise UsageError(f"num_workers must be at least 0, got {self.num_workers}")
        if self.prefetch is not None and (self.prefetch < 1 or not self.num_workers):
            raise UsageError(
                f"prefetch={self.prefetch}, num_workers={self.num_workers}: prefetch is the number of batches, at "
                "least 1, that each worker process makes ahead, so it needs num_workers=1 or more"
            )


_LOADER_OWNS = tuple(field.name for field in fields(BatchOptions) if field.name != "name")


def read_loader(loader: DataLoader[Any], options: BatchOptions) -> tuple[Any, BatchOptions]:
    """Returns a DataLoader's dataset, and its settings as options.

    Raises:
        UsageError: It has a sampler of its own, or ``step.batches`` got settings that the DataLoader has, too.
    """
    default = BatchOptions()
    if given := [name for name in _LOADER_OWNS if getattr(options, name) != getattr(default, name)]:
        raise UsageError(
            f"step.batches(loader, {given[0]}=...): the DataLoader has this setting: set it there, or pass the dataset "
            "itself, step.batches(loader.dataset, ...)"
        )
    sampler, is_stream = loader.sampler, isinstance(loader.dataset, IterableDataset)
    batch_sampler: Any = loader.batch_sampler
    known = type(sampler) in (RandomSampler, SequentialSampler) and type(batch_sampler) is BatchSampler
    if isinstance(sampler, RandomSampler):
        known = known and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    if not is_stream and not known:
        own = sampler if batch_sampler is None or type(batch_sampler) is BatchSampler else batch_sampler
        raise UsageError(
            f"step.batches cannot use the {type(own).__name__} of the DataLoader: any trainer may have to make the "
            "batch of any data rank, so its samples are a function of (seed, step, dp_rank), already divided over the "
            "data ranks. Pass DataLoader(dataset, batch_size=..., shuffle=True), or your own choice of samples as a "
            "function (step, dp_rank) -> batch"
        )
    return loader.dataset, replace(
        options,
        batch_size=loader.batch_size,
        collate_fn=loader.collate_fn,
        shuffle=isinstance(sampler, RandomSampler),
        drop_last=loader.drop_last,
        num_workers=loader.num_workers,
        prefetch=loader.prefetch_factor if loader.num_workers else None,
        pin_memory=loader.pin_memory,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
    )


def steps_per_epoch(loader: DataLoader[Any], dp: int) -> int:
    """Returns how many steps an epoch of a DataLoader has.

    Raises:
        UsageError: The loader has a stream, a sampler of its own, or fewer samples than a step takes.
    """
    source, options = read_loader(loader, BatchOptions())
    if isinstance(source, IterableDataset) or not hasattr(source, "__len__") or options.batch_size is None:
        raise UsageError(
            "steps(loader): an epoch of a stream, of a dataset without a length, or of a loader without batch_size has "
            "no known number of steps: pass the number of all steps, session.steps(1000)"
        )
    return _num_steps(len(source), options.batch_size * dp, drop_last=options.drop_last, of=options.batch_size)


def _num_steps(size: int, per_step: int, *, drop_last: bool, of: int) -> int:
    """Returns the steps of an epoch. At least one."""
    if not (found := size // per_step if drop_last else -(-size // per_step)):
        raise UsageError(f"the dataset has {size} samples; a step takes batch_size {of} x dp {per_step // of}")
    return found


def is_stream(source: Any, options: BatchOptions) -> bool:
    """True if a source is read in its own order, and not by index or by step.

    Raises:
        UsageError: It is an iterator, which can be read only once.
    """
    if isinstance(source, Iterator):
        raise UsageError(
            f"step.batches got a {type(source).__name__}, which can be read only once, so no other trainer could "
            "continue its work: pass an iterable, whose __iter__ starts again, or a function dp_rank -> iterable"
        )
    if isinstance(source, IterableDataset):
        return True
    has_index = hasattr(source, "__getitem__")
    return not has_index and (options.batch_size is not None if callable(source) else hasattr(source, "__iter__"))


def batch_function(source: Any, options: BatchOptions, *, seed: int, dp: int) -> BatchFunction:
    """Returns the function (step, dp_rank) -> batch for the arguments of ``step.batches``.

    Args:
        source: A map-style dataset, or such a function.
        options: How batches are made.
        seed: The run's seed.
        dp: Size of the data axis.

    Raises:
        UsageError: The arguments do not fit together, or the dataset is smaller than one step.
    """
    if options.batch_size is None:
        if not callable(source) or options.collate_fn is not None:
            raise UsageError(
                "step.batches takes a function (step, dp_rank) -> batch, a DataLoader, or a dataset with "
                f"batch_size=...; got {type(source).__name__} without batch_size"
            )
        try:
            signature(source).bind(0, 0)
        except TypeError as error:
            raise UsageError(f"step.batches calls the function {source!r} with (step, dp_rank): {error}") from None
        except ValueError:
            pass  # a builtin does not tell its arguments
        return source  # type: ignore[no-any-return]
    if not isinstance(source, Sized) or not hasattr(source, "__getitem__"):
        raise UsageError(
            f"step.batches(batch_size={options.batch_size}) needs a map-style dataset (__len__, __getitem__) or a "
            f"stream (__iter__), got {type(source).__name__}"
        )
    return partial(_draw, source, options, seed, dp)


def _draw(source: Any, options: BatchOptions, seed: int, dp: int, step: int, dp_rank: int) -> Any:
    assert options.batch_size is not None
    collate = options.collate_fn or default_collate
    indices = sample_indices(
        len(source),
        batch_size=options.batch_size,
        dp=dp,
        seed=seed,
        step=step,
        dp_rank=dp_rank,
        shuffle=options.shuffle,
        drop_last=options.drop_last,
    )
    return collate([source[index] for index in indices])


def sample_indices(
    size: int,
    *,
    batch_size: int,
    dp: int,
    seed: int,
    step: int,
    dp_rank: int,
    shuffle: bool = True,
    drop_last: bool = True,
) -> list[int]:
    """Returns the samples of one work item. An epoch repeats no sample, except to make its last step even.

    Args:
        size: Number of samples.
        batch_size: Samples per logical rank and step.
        dp: Size of the data axis.
        seed: The run's seed.
        step: Number of the step.
        dp_rank: Data rank of the item.
        shuffle: Whether each epoch has an order of its own. Otherwise all have the dataset's.
        drop_last: Whether an epoch drops its last partial step. Otherwise all ranks share the rest evenly; if they
            cannot, the last ranks get first samples of the epoch once more.

    Returns:
        Indices into the dataset. [batch_size], or fewer in the last step

    Raises:
        UsageError: The dataset has fewer samples than one step takes.
    """
    per_step = batch_size * dp
    epoch, position = divmod(step, _num_steps(size, per_step, drop_last=drop_last, of=batch_size))
    first = position * per_step
    count = min(batch_size, -(-(size - first) // dp))
    start, stop = first + dp_rank * count, first + (dp_rank + 1) * count
    if not shuffle:
        return [index % size for index in range(start, stop)]
    order = _permutation(size, derive_seed(seed, "epoch", epoch))
    found: list[int] = order[start:stop].tolist()
    return found if stop <= size else [*found, *(int(order[index % size]) for index in range(max(start, size), stop))]


@lru_cache(maxsize=2)
def _permutation(size: int, seed: int) -> torch.Tensor:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))
