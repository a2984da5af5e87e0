"""Gradients of a replica, pushed in buckets while the backward goes on."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

Gradients = Sequence[tuple[int, torch.Tensor]]
"""``(parameter index, gradient)`` by rising index."""


class GradientBuckets:
    """Collects a unit's gradients in the order in which a backward completes them.

    No order of an earlier step is relied on, so a parameter that is not used holds up no other. A gradient is pushed
    when a later one is complete, or with the rest of the unit: by then the user's own hooks on it have run.

    Args:
        unit: A unit whose gradients are pushed in buckets.
        bucket_bytes: Returns how many bytes make a bucket; None while they shall wait for the rest of the unit.
        push: Pushes the gradients of the parameters with these indices.
    """

    def __init__(
        self, unit: Unit, bucket_bytes: Callable[[], int | None], push: Callable[[Sequence[int]], None]
    ) -> None:
        self._sizes = [specification.size_bytes for specification in unit.layout.parameters]
        self._bucket_bytes, self._push = bucket_bytes, push
        self._complete: dict[int, None] = {}
        # Weak, since the garbage collector does not see what torch keeps such a hook by: the model would stay for ever.
        completed: weakref.ref[Callable[[int], None]] = weakref.WeakMethod(self._completed)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_note, completed, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(unit.parameters)
            if parameter.requires_grad
        ]

    def clear(self) -> None:
        """What was collected is pushed with the rest of the unit, or dropped."""
        self._complete.clear()

    def remove(self) -> None:
        """Collects no more."""
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def _completed(self, index: int) -> None:
        limit_bytes = self._bucket_bytes()
        if limit_bytes is None:
            return
        if sum(self._sizes[complete] for complete in self._complete) >= limit_bytes:
            indices = sorted(self._complete)
            self._complete.clear()
            self._push(indices)
        self._complete[index] = None


def _note(completed: weakref.ref[Callable[[int], None]], index: int, parameter: torch.Tensor) -> None:
    if (note := completed()) is not None:
        note(index)


def cut(gradients: Gradients, bucket_bytes: int | None) -> Iterator[Gradients]:
    """Cuts gradients into buckets that are each as large as given, but for the last; None: into one."""
    bucket: list[tuple[int, torch.Tensor]] = []
    for index, gradient in gradients:
        bucket.append((index, gradient))
        if bucket_bytes is not None and sum(held.nbytes for _, held in bucket) >= bucket_bytes:
            yield bucket
            bucket = []
    if bucket:
        yield bucket
