"""Optimizers that need whole tensors: their units take ``fully_shard(..., placement="tensor")``.

On a single server, or where no parameter happens to be cut, any placement does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shardwell.module.tensors import local_part
from shardwell.optimizers.sharded_optimizer import ShardedOptimizer, at_least_zero, moments
from shardwell_wire.errors import UsageError


class WholeTensorOptimizer(ShardedOptimizer):
    """Base of the optimizers in this file; not to be used itself."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; refuses what is only a part of a tensor."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if local_part(parameter).shape != parameter.shape:
                raise UsageError(
                    f"{type(self).__name__} needs whole tensors, but a parameter of shape {tuple(parameter.shape)} is "
                    "split over tensor-parallel ranks: put it into another optimizer, shardwell.optim.Combined([...])"
                )


class LAMB(WholeTensorOptimizer):
    """LAMB on the servers, as published: You et al., Large Batch Optimization for Deep Learning, Algorithm 2.

    Bias is corrected, the scaling function is the identity, and a step is not scaled where the norm of the
    values or of the step is 0. Gradients are not clipped: that is ``clip_grad_norm_``.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        betas: Of the two moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled; part of the step that is scaled.
        maximize: Whether to ascend.
    """

    algorithm = "lamb"
    _numbers = ("lr", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, moments(lr, betas, eps, weight_decay, maximize))


class Adafactor(WholeTensorOptimizer):
    """``torch.optim.Adafactor`` on the servers, by torch's loop over parameters; same arguments and meaning.

    Where the first ``eps`` is None a group's parameters must have one dtype, whose epsilon it is.
    """

    algorithm = "adafactor"
    _numbers = ("lr", "beta2_decay", "d", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = at_least_zero(lr=lr, weight_decay=weight_decay)
        at_least_zero(**{f"eps[{index}]": value for index, value in enumerate(eps) if value is not None})
        if beta2_decay > 0.0:
            raise UsageError(f"beta2_decay={beta2_decay!r}: expected at most 0")
        if d < 1.0:
            raise UsageError(f"d={d!r}: expected at least 1")
        super().__init__(params, {**numbers, "beta2_decay": beta2_decay, "eps": eps, "d": d, "maximize": maximize})

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        eps1, eps2 = group["eps"]
        if eps1 is None:
            dtypes = {parameter.dtype for parameter in group["params"]}
            if len(dtypes) > 1:
                raise UsageError(
                    "Adafactor(eps=(None, ...)): the parameters of a group have different dtypes; "
                    "give the first eps, or make a group for each dtype"
                )
            eps1 = max(torch.finfo(dtype).eps for dtype in dtypes or {torch.float32})
        return {**super()._hyperparameters(group), "eps1": float(eps1), "eps2": float(eps2)}


class Muon(WholeTensorOptimizer):
    """``torch.optim.Muon`` on the servers, by torch's loop over parameters; same arguments and meaning.

    It takes matrices only. What else a model has goes into another optimizer, and both into one:

    >>> optimizer = shardwell.optim.Combined([
    ...     shardwell.optim.Muon(hidden_matrices, lr=0.02),
    ...     shardwell.optim.AdamW(all_others, lr=3e-4),
    ... ])

    Raises:
        UsageError: A parameter is not a matrix.
    """

    algorithm = "muon"
    _numbers = ("lr", "weight_decay", "momentum", "nesterov", "eps", "ns_steps")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        numbers = at_least_zero(lr=lr, weight_decay=weight_decay, momentum=momentum, eps=eps)
        if not 0 <= ns_steps < 100:
            raise UsageError(f"ns_steps={ns_steps!r}: expected 0 to 99")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise UsageError(f"adjust_lr_fn={adjust_lr_fn!r}: expected 'original' or 'match_rms_adamw'")
        defaults = {
            **numbers,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; refuses parameters that are not matrices."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise UsageError(
                    f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}: put it into another "
                    "optimizer, shardwell.optim.Combined([Muon(matrices), AdamW(others)])"
                )

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        a, b, c = map(float, group["ns_coefficients"])
        match = float(group["adjust_lr_fn"] == "match_rms_adamw")
        return {**super()._hyperparameters(group), "ns_a": a, "ns_b": b, "ns_c": c, "match_rms_adamw": match}
