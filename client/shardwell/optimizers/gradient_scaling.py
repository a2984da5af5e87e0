"""How the mean gradient of a step is scaled and clipped before the optimizer uses it.

Note: [Several clippings in a step]
    As in torch, each operation changes the gradient that the one before has left. Every sequence of factors and clamps
    equals one factor and then one clamp, because clamping to b and multiplying by c is multiplying by c and clamping to
    c * b. A step proposal therefore has one coefficient and one value, however often a script clips.

    Norms are computed from the mean gradient on the servers. For an unclamped gradient they are multiplied by the
    factor. For a clamped one, the servers clamp the mean gradient to the bound divided by the factor, and the norm of
    the result is multiplied.

    torch rounds every element after every operation, Shardwell once. Elements and norms may thus differ from torch's by
    one rounding per operation after the first. There is no such difference for a single factor, which a clamp may
    follow, and for any number of clamps.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class GradientScaling:
    """How the gradients of one step are scaled and clipped. See Note: [Several clippings in a step]."""

    step: int
    """The step of the training loop."""
    coefficient: float = 1.0
    """Factor from clipping by norm."""
    clip_value: float | None = None
    """Largest absolute value after all factors. None: any."""
    norm_attempts: int | None = None
    """``GradNorm.attempts`` of the first norm that was requested: the gradient must not have changed since. None: no
    norm was requested."""
    loss_scale: float | None = None
    """The gradient is divided by it. None: losses are not scaled."""

    @property
    def factor(self) -> float:
        """Factor of the mean gradient, applied before ``clip_value``."""
        return self.coefficient / (self.loss_scale or 1.0)

    def multiply(self, factor: float) -> None:
        """Multiplies the gradient as it is now by a factor of at most 1."""
        self.coefficient *= factor
        if self.clip_value is not None:
            self.clip_value = max(self.clip_value * factor, sys.float_info.min)

    def clamp(self, value: float) -> None:
        """Clamps the gradient as it is now."""
        self.clip_value = value if self.clip_value is None else min(value, self.clip_value)

    def unscale(self, loss_scale: float) -> None:
        """Divides the gradient as it is now by the scale of the loss."""
        self.loss_scale = loss_scale
        if self.clip_value is not None:
            self.clip_value = max(self.clip_value / loss_scale, sys.float_info.min)

    def norm(self, norm_type: float, compute: Callable[[float, float], float]) -> float:
        """Returns a norm of the gradient as it is now.

        Args:
            norm_type: The norm's p.
            compute: ``compute(norm_type, bound)`` returns a norm of the mean gradient whose elements are clamped to
                ``[-bound, bound]``. Bound 0: not clamped.
        """
        scale, bound = self.loss_scale or 1.0, self.clip_value
        if bound is None or norm_type == math.inf:
            norm = compute(norm_type, 0.0)
            scaled = norm * self.coefficient / scale
            return scaled if bound is None or not math.isfinite(norm) else min(scaled, bound)
        mean_bound = bound / self.factor if self.factor else math.inf
        norm = compute(norm_type, mean_bound if math.isfinite(mean_bound) else 0.0)
        return norm * self.coefficient / scale
