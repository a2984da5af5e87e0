"""Several optimizers that commit steps together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell_wire.errors import UsageError
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2


class Combined(ShardedOptimizer):
    """Combines optimizers of different kinds, such as ``Muon`` for matrices and ``AdamW`` for all other parameters.

    The parameter groups are those of the members, in order. LR schedulers may belong to the ``Combined`` or to a
    member. ``step``, ``clip_grad_norm_``, ``zero_grad`` and ``ema_decay`` must be used on the ``Combined``.

    Args:
        optimizers: At least one. Each parameter may be in one optimizer only.

    Raises:
        UsageError: ``optimizers`` is empty, or a member already belongs to a ``Combined``.
        ValueError: A parameter is in two optimizers.
    """

    algorithm = ""

    def __init__(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._combined_members = list(optimizers)
        if not self._combined_members:
            raise UsageError("Combined([]): expected at least one optimizer")
        for member in self._combined_members:
            if member._combined is not None or isinstance(member, Combined):
                raise UsageError(f"Combined takes optimizers that are not combined yet, got {type(member).__name__}")
            if runs_on_trainers(member.algorithm):
                raise UsageError(
                    f"{type(member).__name__} runs on the trainers: Combined takes optimizers of shardwell.optim only"
                )
            if member.ema_decay is not None:
                raise UsageError(f"set ema_decay of the Combined, not of its {type(member).__name__}")
        self._owner_of_group = [
            (member, number) for member in self._combined_members for number in range(len(member.param_groups))
        ]
        super().__init__([group for member in self._combined_members for group in member.param_groups], {})
        for member in self._combined_members:
            member._combined = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: add parameter groups to the members before they are combined."""
        if hasattr(self, "_session"):
            raise UsageError("add parameter groups to the optimizers before they are combined")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """See ``ShardedOptimizer.step``."""
        loss = super().step(closure)
        for member in self._combined_members:
            # torch's schedulers read this attribute to warn about a call before the first step.
            member._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _group_to_proto(self, number: int) -> common_pb2.ParameterGroup:
        member, own_number = self._owner_of_group[number]
        proto = member._group_to_proto(own_number)
        proto.algorithm = member.algorithm
        return proto
