"""A unit's gradients that are here and not on the servers yet: in ``parameter.grad``, or summed apart from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn

from shardwell.module.mixed_precision import Precision


class LocalGradients:
    """Takes, sums and drops the gradients of one unit's parameters.

    Args:
        parameters: Of the unit.
        precision: What becomes of a gradient's dtype.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], precision: Precision) -> None:
        self._parameters, self._precision = parameters, precision

    @property
    def exist(self) -> bool:
        """Whether there is any."""
        with torch._C.DisableTorchFunctionSubclass():
            here = any(parameter.grad is not None for parameter in self._parameters)
        return here or self._precision.has_put_by

    def take(self, indices: Iterable[int] | None = None) -> list[tuple[int, torch.Tensor]]:
        """The gradients of all or some parameters, by index, dense and as stored; not local any more."""
        taken = []
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                parameter = self._parameters[index]
                own = None if parameter.grad is None else _plain(parameter.grad)
                if (gradient := self._precision.finish(index, own)) is not None:
                    parameter.grad = None
                    taken.append((index, _local(gradient, parameter)))
        return taken

    def put_by(self) -> None:
        """Sums them in the dtype to sum in, if that is not the one they are of."""
        if not self._precision.sums_apart:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None and self._precision.put_by(index, _plain(parameter.grad)):
                    parameter.grad = None

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """Forgets those of all or some parameters."""
        self._precision.drop(indices)
        with torch._C.DisableTorchFunctionSubclass():
            for index in range(len(self._parameters)) if indices is None else indices:
                self._parameters[index].grad = None


def _plain(gradient: torch.Tensor) -> torch.Tensor:
    """Without a graph, dense and contiguous."""
    if gradient.requires_grad:
        gradient = gradient.detach()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    # Operations that do nothing are not free: each gives up the interpreter lock.
    return gradient if gradient.is_contiguous() else gradient.contiguous()


def _local(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this process holds of a parameter's gradient."""
    if (placements := getattr(parameter, "placements", None)) is None:
        return gradient
    # A DTensor's gradient may be a partial sum, such as that of a norm under sequence parallelism. It is added up
    # after the cast, as autograd has it where a parameter is cast in the forward.
    local: torch.Tensor = cast(Any, gradient).redistribute(placements=placements).to_local()
    return local.contiguous()
