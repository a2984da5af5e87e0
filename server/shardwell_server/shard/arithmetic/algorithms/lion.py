"""Lion: sign of an interpolated moment."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def lion(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Applies Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, Algorithm 2) in place.

    Args:
        parameters: Parameters, or parts of parameters.
        gradients: Their gradients.
        exp_avgs: Their moments.
        lr: Size of every element's step.
        beta1: Coefficient of the moment for computing the step.
        beta2: Coefficient of the moment for updating the moment.
        weight_decay: Decoupled weight decay.
        maximize: Maximize the objective instead of minimizing it.
    """
    for parameter, descent, moment in zip(parameters, gradients, exp_avgs, strict=True):
        gradient = -descent if maximize else descent
        parameter.mul_(1 - lr * weight_decay)
        direction = moment * beta1 + gradient * (1 - beta1)
        parameter.add_(direction.sign_(), alpha=-lr)
        moment.mul_(beta2).add_(gradient, alpha=1 - beta2)
