"""Optimizers whose state and arithmetic live on the shard servers.

They are ``torch.optim.Optimizer`` objects: parameter groups, LR schedulers and per-group changes
between steps work as in torch. Their hyper-parameters travel with every step's commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.session import Session, session_of
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2

_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


class ShardedOptimizer(Optimizer):
    """Base of the optimizers; not to be used itself.

    Raises:
        UsageError: A parameter is not sharded: call ``fully_shard`` on the whole model first.
    """

    algorithm: ClassVar[str]
    _numbers: ClassVar[tuple[str, ...]]
    """Hyper-parameters that travel as they are."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._session = self._find_session()
        self._session.note_buffers()
        self._clip_coefficient = 1.0

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = True
    ) -> torch.Tensor:
        """Clips the step's mean gradient to a global norm over all units, servers and ranks.

        Call it between the backward and ``step``; it waits until every rank's gradient is there.

        Args:
            max_norm: Largest norm; the gradient is scaled by ``max_norm / (norm + 1e-6)`` if above.
            norm_type: 2.0 or infinity.
            error_if_nonfinite: Must be True: a step with a non-finite gradient is never committed.

        Returns:
            The norm before clipping: a 0-dim float64 tensor, the same on every trainer.

        Raises:
            NonFiniteError: A gradient has NaN or infinity; names the parameter and the ranks.
        """
        if norm_type not in (2.0, math.inf):
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type!r}): expected 2.0 or infinity")
        if not error_if_nonfinite:
            raise UsageError("clip_grad_norm_(error_if_nonfinite=False): a non-finite gradient is never committed")
        if not max_norm > 0:
            raise UsageError(f"clip_grad_norm_({max_norm!r}): expected a positive norm")
        norm = self._session.grad_norm(self._session.loop_step, float(norm_type))
        self._clip_coefficient = min(1.0, max_norm / (norm + _CLIP_EPSILON)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits the step: returns when every rank's gradient is reduced and the commit is durable.

        Args:
            closure: Reevaluates the model and returns the loss, as in torch; called once.

        Raises:
            HyperparameterMismatchError: Ranks disagree; names the value and both sides.
            NonFiniteError: A gradient has NaN or infinity; the parameters are unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._commit()
        self._clip_coefficient = 1.0
        return loss

    def _commit(self) -> None:
        self._session.commit(self._session.loop_step, self._to_proto(), self._clip_coefficient)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops this work item's gradients, also those that are on the servers already.

        After an exception in the backward nothing of it reaches the step. After the loop over
        ``step.batches`` it drops those of all items computed here: ``step`` then commits without them.
        """
        self._session.zero_grad()
        self._clip_coefficient = 1.0

    def state_dict(self) -> dict[str, Any]:
        """The hyper-parameters of every group; the state itself lives on the servers."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        return {"param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the hyper-parameters of every group."""
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(f"the state has {len(saved)} parameter groups, the optimizer {len(self.param_groups)}")
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        return {name: float(group[name]) for name in self._numbers}

    def _to_proto(self) -> common_pb2.OptimizerStep:
        units = self._session.units
        indices: dict[int, list[int]] = {unit.index: [-1] * len(unit.layout.parameters) for unit in units}
        groups = []
        for number, group in enumerate(self.param_groups):
            groups.append(common_pb2.ParameterGroup(hyperparameters=self._hyperparameters(group)))
            for parameter in group["params"]:
                unit_index, parameter_index = self._locate(parameter)
                indices[unit_index][parameter_index] = number
        return common_pb2.OptimizerStep(
            algorithm=self.algorithm,
            groups=groups,
            units=[common_pb2.UnitGroups(unit_index=index, group_indices=group) for index, group in indices.items()],
        )

    def _locate(self, parameter: torch.Tensor) -> tuple[int, int]:
        found = self._session.units.locate(parameter)
        if found is None:
            raise UsageError(
                f"a parameter of shape {tuple(parameter.shape)} is not sharded: "
                "call fully_shard on the whole model before making the optimizer"
            )
        return found

    def _find_session(self) -> Session:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in parameters:
            if (session := session_of(parameter)) is not None:
                self._session = session
                for other in parameters:
                    self._locate(other)
                return session
        raise UsageError(
            f"shardwell.optim.{type(self).__name__} got no sharded parameter: "
            "call fully_shard(model, session) first, or use torch.optim for local parameters"
        )


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
        _require_at_least_zero(lr=lr, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise UsageError("SGD(nesterov=True): expected momentum > 0 and dampening = 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)


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
        _require_at_least_zero(lr=lr, eps=eps, weight_decay=decay)
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise UsageError(f"betas[{index}]={beta!r}: expected 0 <= beta < 1")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {**super()._hyperparameters(group), "beta1": float(beta1), "beta2": float(beta2)}


class AdamW(Adam):
    """``torch.optim.AdamW`` on the servers, by torch's fused kernel; same arguments and meaning."""

    algorithm = "adamw"
    _default_weight_decay = 1e-2


def _require_at_least_zero(**values: float) -> None:
    for name, value in values.items():
        if not float(value) >= 0.0:
            raise UsageError(f"{name}={value!r}: expected at least 0")


__all__ = ["SGD", "Adam", "AdamW", "ShardedOptimizer"]
