"""Batches of work items from a framework's ``DataLoader``, in the framework's own order.

Every trainer can make the batches of every step and data rank, because they depend on nothing else. Samplers and
collate functions may draw random numbers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from shardwell.seeds import derive_seed, seed_batch
from shardwell_wire.errors import UsageError


class WorkItemBatches:
    """The micro-batches of every work item: ``batches(step, dp_rank)``.

    Args:
        loader: The loader of all data ranks, with a map-style dataset.
        shards: The batch sampler of each data rank. They have equal lengths.
        accumulation: Micro-batches per step. The last step of an epoch may have fewer.
        seed: The run's seed.
        sampler_seed: Seed of samplers that have none.

    Raises:
        UsageError: The loader has no batch.
    """

    def __init__(self, loader: Any, shards: Sequence[Any], accumulation: int, *, seed: int, sampler_seed: int) -> None:
        self._dataset, self._collate = loader.dataset, loader.collate_fn
        self._batch_sampler: Any = loader.batch_sampler
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", None)
        self._is_checked = False
        self._shards, self._accumulation = shards, accumulation
        self._seed, self._sampler_seed = seed, sampler_seed
        self._indices: dict[tuple[int, int], list[list[int]]] = {}
        """The batches of the last epoch that was asked for, by epoch and data rank."""

        if not len(shards[0]):
            raise UsageError(
                f"the training loader has no batch, though its dataset has {len(self._dataset)} samples: pass more "
                "samples, a smaller batch_size, drop_last=False or another sampler"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which each sample is used once."""
        return max(1, math.ceil(len(self._shards[0]) / self._accumulation))

    def __call__(self, step: int, dp_rank: int) -> list[Any]:
        """Returns the micro-batches of a work item, and leaves generators in a state that depends on the item only."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if (epoch, dp_rank) not in self._indices:
            self._indices = {key: value for key, value in self._indices.items() if key[0] == epoch}
            listed = self._list_epoch(epoch, dp_rank)
            if not self._is_checked and listed != self._list_epoch(epoch, dp_rank):
                names = " or ".join(type(each).__name__ for each in (self._batch_sampler, self._sampler) if each)
                raise UsageError(
                    f"{names} lists another order each time that it is iterated, so data ranks would get the same "
                    "samples: let its order depend only on the number that its method set_epoch(epoch) gets, or on "
                    "the generators of torch, random and numpy, which are seeded for each epoch"
                )
            self._is_checked = True
            self._indices[epoch, dp_rank] = listed
        first = position * self._accumulation
        chosen = self._indices[epoch, dp_rank][first : first + self._accumulation]
        seed_batch(derive_seed(self._seed, step, dp_rank))
        return [self._collate(self._samples(indices)) for indices in chosen]

    def _samples(self, indices: list[int]) -> Any:
        if hasattr(self._dataset, "__getitems__"):
            return self._dataset.__getitems__(indices)
        return [self._dataset[index] for index in indices]

    def _list_epoch(self, epoch: int, dp_rank: int) -> list[list[int]]:
        samplers = (self._batch_sampler, self._sampler)
        for each in (self._dataset, *samplers):
            if hasattr(each, "set_epoch"):
                each.set_epoch(epoch)
        seed = self._sampler_seed + epoch
        before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        for generator in (torch.default_generator, *(getattr(each, "generator", None) for each in samplers)):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        try:
            return list(self._shards[dp_rank])
        finally:
            torch.set_rng_state(before[0])
            random.setstate(before[1])
            numpy.random.set_state(before[2])
