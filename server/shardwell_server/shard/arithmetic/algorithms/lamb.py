"""LAMB: Adam with steps scaled to the norm of each parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def lamb(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    """Applies LAMB (You et al., Large Batch Optimization for Deep Learning, 2020, Algorithm 2) in place.

    The scaling function is the identity. A step is not scaled if the norm of the values or of the step is 0. Gradients
    are not clipped.

    Args:
        parameters: Whole parameters.
        gradients: Their gradients.
        exp_avgs: Their first moments.
        exp_avg_sqs: Their second moments.
        steps: Number of updates of each parameter, which is incremented.
        lr: Learning rate.
        beta1: Coefficient of the first moment. Bias is corrected.
        beta2: Coefficient of the second moment. Bias is corrected.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, which is scaled with the step.
        maximize: Maximize the objective instead of minimizing it.
    """
    for parameter, descent, mean, square, count in zip(
        parameters, gradients, exp_avgs, exp_avg_sqs, steps, strict=True
    ):
        gradient = -descent if maximize else descent
        step = count.add_(1).item()
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (square / (1 - beta2**step)).sqrt_().add_(eps)
        direction = (mean / (1 - beta1**step)).div_(denominator)
        if weight_decay:
            direction.add_(parameter, alpha=weight_decay)
        parameter.add_(direction, alpha=-lr * _trust_ratio(parameter, direction))


def _trust_ratio(parameter: Tensor, direction: Tensor) -> float:
    value_norm, step_norm = (torch.linalg.vector_norm(tensor).item() for tensor in (parameter, direction))
    return value_norm / step_norm if value_norm and step_norm else 1.0
