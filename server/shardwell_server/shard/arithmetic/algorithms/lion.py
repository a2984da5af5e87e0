"""Lion: one moment, and steps of one size."""

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
    """Lion as published (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, Algorithm 2), in place.

    Args:
        parameters: What is optimised.
        gradients: As many.
        exp_avgs: Their moments.
        lr: Size of each element's step.
        beta1: Of the moment as the step sees it.
        beta2: Of the moment as it is kept.
        weight_decay: Decoupled.
        maximize: Whether to ascend.
    """
    for parameter, descent, moment in zip(parameters, gradients, exp_avgs, strict=True):
        gradient = -descent if maximize else descent
        parameter.mul_(1 - lr * weight_decay)
        direction = moment * beta1 + gradient * (1 - beta1)
        parameter.add_(direction.sign_(), alpha=-lr)
        moment.mul_(beta2).add_(gradient, alpha=1 - beta2)
