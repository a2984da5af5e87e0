"""Optimizers that run on the shard servers. Hyper-parameters and state: ``shardwell_wire/model/optimizers.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from shardwell.module.mixed_precision import local_part
from shardwell.optimizers.sharded_optimizer import ShardedOptimizer
from shardwell_wire.errors import UsageError


def _settings(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the default settings of the groups from the ``locals()`` of a constructor, whose arguments they are.

    ``foreach`` and ``fused`` are ignored: the servers choose the implementation.
    """
    ignored = ("self", "params", "__class__", "foreach", "fused")
    return {name: value for name, value in arguments.items() if name not in ignored}


class SGD(ShardedOptimizer):
    """``torch.optim.SGD`` on the servers, with torch's fused kernel. Same arguments."""

    algorithm = "sgd"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UsageError("SGD(nesterov=True): expected momentum > 0 and dampening = 0")
        super().__init__(params, _settings(locals()))


class Adam(ShardedOptimizer):
    """``torch.optim.Adam`` on the servers, with torch's fused kernel. Same arguments."""

    algorithm = "adam"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class AdamW(Adam):
    """``torch.optim.AdamW`` on the servers, with torch's fused kernel. Same arguments."""

    algorithm = "adamw"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, **_settings(locals()))


class NAdam(ShardedOptimizer):
    """``torch.optim.NAdam`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "nadam"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum_decay: float = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class RAdam(ShardedOptimizer):
    """``torch.optim.RAdam`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "radam"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class Adamax(ShardedOptimizer):
    """``torch.optim.Adamax`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "adamax"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class RMSprop(ShardedOptimizer):
    """``torch.optim.RMSprop`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "rmsprop"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class Adagrad(ShardedOptimizer):
    """``torch.optim.Adagrad`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "adagrad"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class Adadelta(ShardedOptimizer):
    """``torch.optim.Adadelta`` on the servers, with torch's loop over parameters. Same arguments."""

    algorithm = "adadelta"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        super().__init__(params, _settings(locals()))


class Lion(ShardedOptimizer):
    """Lion on the servers (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, Algorithm 2).

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate; a third to a tenth of AdamW's.
        betas: Coefficients of the moment for computing the step and for updating the moment.
        weight_decay: Decoupled weight decay; three to ten times AdamW's.
        maximize: Maximize the objective instead of minimizing it.
    """

    algorithm = "lion"

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, _settings(locals()))


class WholeTensorOptimizer(ShardedOptimizer):
    """Base class of optimizers that need whole tensors. Do not use it directly.

    Parameters must not be cut over servers: their units need ``fully_shard(..., placement="tensor")``, unless there is
    a single server.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as in torch.

        Raises:
            UsageError: A parameter is split by tensor parallelism.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if local_part(parameter).shape != parameter.shape:
                raise UsageError(
                    f"{type(self).__name__} needs whole tensors, but a parameter of shape {tuple(parameter.shape)} is "
                    "split over tensor-parallel ranks: put it into another optimizer, shardwell.optim.Combined([...])"
                )


class LAMB(WholeTensorOptimizer):
    """LAMB on the servers (You et al., Large Batch Optimization for Deep Learning, 2020, Algorithm 2).

    Bias is corrected and the scaling function is the identity. A step is not scaled if the norm of the values or of the
    step is 0. Gradients are not clipped; use ``clip_grad_norm_``.

    Args:
        params: Parameters, or parameter groups.
        lr: Learning rate.
        betas: Coefficients of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay, which is scaled with the step.
        maximize: Maximize the objective instead of minimizing it.
    """

    algorithm = "lamb"

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
        super().__init__(params, _settings(locals()))


class Adafactor(WholeTensorOptimizer):
    """``torch.optim.Adafactor`` on the servers, with torch's loop over parameters. Same arguments.

    If the first ``eps`` is None, it is the machine epsilon of the parameters, and all parameters of a group must have
    the same dtype.
    """

    algorithm = "adafactor"

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
        super().__init__(params, _settings(locals()))

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        eps1, eps2 = group["eps"]
        if eps1 is None:
            dtypes = {parameter.dtype for parameter in group["params"]}
            if len(dtypes) > 1:
                raise UsageError(
                    "Adafactor(eps=(None, ...)): the parameters of a group have different dtypes; "
                    "set the first eps, or make a group for each dtype"
                )
            eps1 = max(torch.finfo(dtype).eps for dtype in dtypes or {torch.float32})
        return super()._hyperparameters({**group, "eps": (eps1, eps2)})


class Muon(WholeTensorOptimizer):
    """``torch.optim.Muon`` on the servers, with torch's loop over parameters. Same arguments.

    Muon takes matrices only. Use it together with an optimizer for all other parameters:

    >>> optimizer = shardwell.optim.Combined([
    ...     shardwell.optim.Muon(hidden_matrices, lr=0.02),
    ...     shardwell.optim.AdamW(all_others, lr=3e-4),
    ... ])

    Raises:
        UsageError: A parameter is not a matrix.
    """

    algorithm = "muon"

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
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise UsageError(f"adjust_lr_fn={adjust_lr_fn!r}: expected 'original' or 'match_rms_adamw'")
        super().__init__(params, _settings(locals()))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as in torch.

        Raises:
            UsageError: A parameter is not a matrix.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise UsageError(
                    f"Muon takes matrices, got a parameter of shape {tuple(parameter.shape)}: put it into another "
                    "optimizer, shardwell.optim.Combined([Muon(matrices), AdamW(others)])"
                )

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        matches_adamw = group["adjust_lr_fn"] == "match_rms_adamw"
        return super()._hyperparameters({**group, "match_rms_adamw": matches_adamw})
