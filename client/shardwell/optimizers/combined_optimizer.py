"""Several optimizers that commit a step together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell_wire.errors import UsageError
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import common_pb2


class Combined(ShardedOptimizer):
    """Optimizers of different kinds as one, such as ``Muon`` for matrices and ``AdamW`` for the rest.

    Its parameter groups are theirs, in order. LR schedulers may be of the whole or of a part;
    ``step``, ``clip_grad_norm_``, ``zero_grad`` and ``ema_decay`` are used here.

    Args:
        optimizers: At least one; no parameter may be in two.

    Raises:
        UsageError: There is none, or one is part of a ``Combined`` already.
        ValueError: A parameter is in two.
    """

    algorithm = ""

    def __init__(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._parts = list(optimizers)
        if not self._parts:
            raise UsageError("Combined([]): expected at least one optimizer")
        for part in self._parts:
            if part._combined is not None or isinstance(part, Combined):
                raise UsageError(f"Combined takes optimizers that are not combined yet, got {type(part).__name__}")
            if runs_on_trainers(part.algorithm):
                raise UsageError(f"{type(part).__name__} runs on the trainers and can not be combined with others")
            if part.ema_decay is not None:
                raise UsageError(f"set ema_decay of the Combined, not of its {type(part).__name__}")
        self._group_parts = [(part, number) for part in self._parts for number in range(len(part.param_groups))]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part._combined = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: which optimizer would it be for?"""
        if hasattr(self, "_session"):
            raise UsageError("add parameter groups to the optimizers before they are combined")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See ``ShardedOptimizer.step``."""
        loss = super().step(closure)
        for part in self._parts:
            # Schedulers of a part ask for it, to warn of being called before the first step.
            part._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _group_to_proto(self, number: int) -> common_pb2.ParameterGroup:
        part, own_number = self._group_parts[number]
        proto = part._group_to_proto(own_number)
        proto.algorithm = part.algorithm
        return proto
