"""Optimizers on the trainers whose process is killed in the middle of an update."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch

import shardwell
from tests.support.flat_updates import FLAT_ADAM, flat_adam


def client_side(
    name: str, kill_in_update: int | None, after: int
) -> Callable[[Iterable[torch.nn.Parameter]], shardwell.optim.ShardedOptimizer]:
    """Returns a function that makes a client-side optimizer.

    Args:
        name: Name of torch's optimizer, or ``flat_adam``.
        kill_in_update: Step in whose update the process is killed. None: it is not killed.
        after: Number of segments of partitions that are updated before.
    """
    flat = name == flat_adam.__name__
    base: Any = shardwell.FlatClientSide if flat else shardwell.ClientSide

    class Mortal(base):  # type: ignore[misc]
        updates = 0

        def _update(self, *arguments: Any) -> None:
            super()._update(*arguments)
            if self._session.step == kill_in_update:
                self.updates += 1
                if self.updates == after:
                    os.kill(os.getpid(), signal.SIGKILL)

    if flat:
        return lambda parameters: Mortal(parameters, flat_adam, **FLAT_ADAM)
    return lambda parameters: Mortal(parameters, getattr(torch.optim, name))
