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
                own = None if parameter.grad is None else _plain(parameter.grad, parameter)
                if (gradient := self._precision.finish(index, own)) is not None:
                    parameter.grad = None
                    taken.append((index, gradient))
        return taken

    def put_by(self) -> None:
        """Sums them in the dtype to sum in, if that is not the one they are of."""
        if not self._precision.sums_apart:
            return
        with torch._C.DisableTorchFunctionSubclass():
            for index, parameter in enumerate(self._parameters):
                if parameter.grad is not None and self._precision.put_by(index, _plain(parameter.grad, parameter)):
                    parameter.grad = None

    def drop(self) -> None:
        """Forgets them."""
        self._precision.drop()
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in self._parameters:
                parameter.grad = None


def _plain(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if gradient.requires_grad:
        gradient = gradient.detach()
    if (placements := getattr(parameter, "placements", None)) is not None:
        # A DTensor's gradient may be a partial sum, such as that of a norm under sequence parallelism.
        gradient = cast(Any, gradient).redistribute(placements=placements).to_local()
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()
    return gradient.contiguous()
