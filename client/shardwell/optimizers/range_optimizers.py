"""Optimizers that go element by element: parameters may be cut over servers anywhere."""

from __future__ import annotations

from typing import ClassVar

from torch.optim.optimizer import ParamsT

from shardwell.optimizers.sharded_optimizer import ShardedOptimizer, at_least_zero, moments, require_betas
from shardwell_wire.errors import UsageError


class SGD(ShardedOptimizer):
    """``torch.optim.SGD`` on the servers, by torch's fused kernel; same arguments and meaning."""

    algorithm = "sgd"
    _numbers = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")

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
    ) -> None:
        numbers = at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UsageError("SGD(nesterov=True): expected momentum > 0 and dampening = 0")
        super().__init__(params, {**numbers, "dampening": dampening, "nesterov": nesterov, "maximize": maximize})


class Adam(ShardedOptimizer):
    """``torch.optim.Adam`` on the servers, by torch's fused kernel; same arguments and meaning."""

    algorithm = "adam"
    _numbers = ("lr", "eps", "weight_decay", "amsgrad", "maximize")
    _default_weight_decay: ClassVar[float] = 0.0

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        decay = self._default_weight_decay if weight_decay is None else weight_decay
        super().__init__(params, {**moments(lr, betas, eps, decay, maximize), "amsgrad": amsgrad})


class AdamW(Adam):
    """``torch.optim.AdamW`` on the servers, by torch's fused kernel; same arguments and meaning."""

    algorithm = "adamw"
    _default_weight_decay = 1e-2


class NAdam(ShardedOptimizer):
    """``torch.optim.NAdam`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "nadam"
    _numbers = ("lr", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize")

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
    ) -> None:
        numbers = {**moments(lr, betas, eps, weight_decay, maximize), **at_least_zero(momentum_decay=momentum_decay)}
        super().__init__(params, {**numbers, "decoupled_weight_decay": decoupled_weight_decay})


class RAdam(ShardedOptimizer):
    """``torch.optim.RAdam`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "radam"
    _numbers = ("lr", "eps", "weight_decay", "decoupled_weight_decay", "maximize")

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
    ) -> None:
        numbers = moments(lr, betas, eps, weight_decay, maximize)
        super().__init__(params, {**numbers, "decoupled_weight_decay": decoupled_weight_decay})


class Adamax(ShardedOptimizer):
    """``torch.optim.Adamax`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "adamax"
    _numbers = ("lr", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, moments(lr, betas, eps, weight_decay, maximize))


class RMSprop(ShardedOptimizer):
    """``torch.optim.RMSprop`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "rmsprop"
    _numbers = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize")

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
    ) -> None:
        numbers = at_least_zero(lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
        super().__init__(params, {**numbers, "centered": centered, "maximize": maximize})


class Adagrad(ShardedOptimizer):
    """``torch.optim.Adagrad`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "adagrad"
    _numbers = ("lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value", "maximize")

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
    ) -> None:
        numbers = at_least_zero(
            lr=lr,
            lr_decay=lr_decay,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
            eps=eps,
        )
        super().__init__(params, {**numbers, "maximize": maximize})


class Adadelta(ShardedOptimizer):
    """``torch.optim.Adadelta`` on the servers, by torch's loop over parameters; same arguments and meaning."""

    algorithm = "adadelta"
    _numbers = ("lr", "rho", "eps", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1.0,
        rho: float = 0.9,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay)
        if not 0.0 <= rho <= 1.0:
            raise UsageError(f"rho={rho!r}: expected 0 <= rho <= 1")
        super().__init__(params, {**numbers, "rho": rho, "maximize": maximize})


class Lion(ShardedOptimizer):
    """Lion on the servers, as published: Chen et al., Symbolic Discovery of Optimization Algorithms, Algorithm 2.

    Args:
        params: Parameters, or groups of them.
        lr: Size of each element's step; a third to a tenth of AdamW's.
        betas: Of the moment as the step sees it, and as it is kept.
        weight_decay: Decoupled; three to ten times AdamW's.
        maximize: Whether to ascend.
    """

    algorithm = "lion"
    _numbers = ("lr", "weight_decay", "maximize")

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        require_betas(betas)
        numbers = at_least_zero(lr=lr, weight_decay=weight_decay)
        super().__init__(params, {**numbers, "betas": betas, "maximize": maximize})
