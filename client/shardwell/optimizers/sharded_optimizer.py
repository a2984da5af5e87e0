"""What all optimizers share whose state and arithmetic live on the shard servers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.module.freed_parameter import USE_SHARDED_SCALER, is_called_from
from shardwell.module.unit import owner_of
from shardwell.session.session import Session, session_of
from shardwell.session.step_commit import KEPT, UNUSED, StepUpdate
from shardwell_wire.errors import NonFiniteError, UsageError
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import common_pb2

_CLIP_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


@dataclass(slots=True)
class _Scaling:
    """How the gradients of one step are scaled and clipped."""

    coefficient: float = 1.0
    """What clipping by the norm multiplies them by."""
    norm_attempts: int | None = None
    """``GradNorm.attempts`` of that norm; None: it was not asked for."""
    clip_value: float | None = None
    loss_scale: float | None = None


class ShardedOptimizer(Optimizer):
    """Base of the optimizers; not to be used itself.

    Raises:
        UsageError: A parameter is not sharded: call ``fully_shard`` on the whole model first.
    """

    updates_on_servers: ClassVar[bool] = True
    """Marks the class for the checks of ``module/torch_patches.py``, which must not import it."""
    algorithm: ClassVar[str]
    """Its name in an ``OptimizerStep``."""
    _numbers: ClassVar[tuple[str, ...]]
    """Hyper-parameters that travel as they are."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self._session = self._find_session()
        self._session.declare_buffers()
        self._session.optimizers.add(self)
        self._scaling = _Scaling()
        self.skipped = False
        """Whether the last step changed no parameter, since a gradient of a scaled loss was not finite."""
        self._ema_decay: float | None = None
        self._combined: ShardedOptimizer | None = None
        """The optimizer that this one is a part of: it commits the steps."""

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """torch's ``GradScaler.step`` asks for it first."""
        raise UsageError(USE_SHARDED_SCALER)

    @property
    def ema_decay(self) -> float | None:
        """Has the servers keep an exponential moving average of the weights, from the next step on.

        After every step ``average += (1 - ema_decay) * (weight - average)``, as
        ``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``; the first is a copy of the weights.
        ``full_state_dict(model, ema=True)`` reads it. None, the default, leaves averages as they are.
        """
        return self._ema_decay

    @ema_decay.setter
    def ema_decay(self, decay: float | None) -> None:
        self._refuse_if_combined("ema_decay")
        if decay is not None and runs_on_trainers(self.algorithm):
            raise UsageError("ema_decay: the servers average only what they update, not what an optimizer here does")
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise UsageError(f"ema_decay={decay!r}: expected 0 to 1, or None")
        self._ema_decay = decay

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, also between steps; not once the optimizer is part of a ``Combined``.

        Raises:
            UsageError: A parameter is not sharded; there is no new group then.
        """
        if getattr(self, "_combined", None) is not None:
            raise UsageError(f"add parameter groups to {type(self).__name__} before it becomes part of a Combined")
        super().add_param_group(param_group)
        if hasattr(self, "_session"):
            try:
                for parameter in self.param_groups[-1]["params"]:
                    self._locate(parameter)
            except UsageError:
                self.param_groups.pop()
                raise

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clips the step's mean gradient to a global norm over all units, servers and ranks.

        Call it between the backward and ``step``; it waits until every rank's gradient is there.

        Args:
            max_norm: Largest norm; the gradient is scaled by ``max_norm / (norm + 1e-6)`` if above.
            norm_type: The norm's p, above 0, or infinity; ``"inf"`` as in torch. All ranks must take the same.
            error_if_nonfinite: Must be True: a step with a non-finite gradient is never committed.
            foreach: Has no effect; torch's functions take it.

        Returns:
            The norm before clipping: a 0-dim float64 tensor, the same on every trainer. After
            ``GradScaler.unscale_`` it is that of the unscaled gradient, and infinity if the step will be skipped.

        Raises:
            NonFiniteError: A gradient has NaN or infinity; names the parameter and the ranks. Or its norm is beyond
                what a double holds, though it has none.
        """
        self._refuse_if_combined("clip_grad_norm_")
        if not float(norm_type) > 0:
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type!r}): expected a number above 0, or infinity")
        if not error_if_nonfinite:
            raise UsageError("clip_grad_norm_(error_if_nonfinite=False): a non-finite gradient is never committed")
        if not max_norm > 0:
            raise UsageError(f"clip_grad_norm_({max_norm!r}): expected a positive norm")
        if self._scaling.clip_value is not None:
            raise UsageError("clip_grad_norm_ after clip_grad_value_: a step clips by one of them")
        self._session.in_flight.settle()
        norm = self._grad_norm(float(norm_type))
        # NaN stands for that of a step committed before this trainer joined: nobody knows it any more.
        if math.isinf(norm) and self._scaling.loss_scale is None:
            raise NonFiniteError(
                f"the norm of type {norm_type} is beyond what a double holds, though the gradient is finite: "
                "take a smaller norm_type, or infinity"
            )
        self._scaling.coefficient = min(1.0, max_norm / (norm + _CLIP_EPSILON)) if math.isfinite(norm) else 1.0
        return torch.tensor(norm, dtype=torch.float64)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clips every element of the step's mean gradient, as ``torch.nn.utils.clip_grad_value_``.

        Call it between the backward and ``step``. It is done where the optimizer runs, with the step, and does not
        wait for anything.

        Args:
            clip_value: Elements are brought into ``[-clip_value, clip_value]``. The same on all ranks.
            foreach: Has no effect; torch's function takes it.

        Raises:
            UsageError: It is not a positive number, or the step's gradient is clipped by its norm already.
        """
        self._refuse_if_combined("clip_grad_value_")
        if not float(clip_value) > 0:
            raise UsageError(f"clip_grad_value_({clip_value!r}): expected a positive number")
        if self._scaling.norm_attempts is not None:
            raise UsageError("clip_grad_value_ after clip_grad_norm_: a step clips by one of them")
        self._scaling.clip_value = float(clip_value)

    def _grad_norm(self, norm_type: float) -> float:
        """Of the unscaled mean gradient."""
        loss_scale = self._scaling.loss_scale
        try:
            norm = self._session.in_flight.grad_norm(self._session.loop_step, norm_type, self._counted_units())
        except NonFiniteError:
            if loss_scale is None:
                raise
            return math.inf
        self._scaling.norm_attempts = norm.attempts
        return norm.value if loss_scale is None else norm.value / loss_scale

    def unscale(self, loss_scale: float) -> None:
        """From now until the end of the step gradients count as divided by the scale that the loss had.

        ``shardwell.amp.GradScaler`` calls it. The division travels with the commit, as clipping does, and ``step``
        skips the update instead of raising NonFiniteError.
        """
        self._refuse_if_combined("unscale")
        self._scaling.loss_scale = loss_scale

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits the step: returns when every rank's gradient is reduced and the commit is durable.

        Args:
            closure: Reevaluates the model and returns the loss, as in torch; called once.

        Raises:
            HyperparameterMismatchError: Ranks disagree; names the value and both sides.
            NonFiniteError: A gradient has NaN or infinity; the parameters are unchanged.
        """
        self._refuse_if_combined("step")
        if is_called_from("torch/distributed/checkpoint/state_dict.py"):
            raise UsageError(
                "torch.distributed.checkpoint would take a step to find the state of an optimizer whose state is on "
                "the shard servers: the run's checkpoints hold it, and optimizer.state_dict() the hyper-parameters"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.skipped = not self._session.commit(self._make_update())
        self._scaling = _Scaling()
        return loss

    def _make_update(self) -> StepUpdate:
        """What the commit is asked for."""
        scaling = self._scaling
        coefficient = scaling.coefficient / (scaling.loss_scale or 1.0)
        return StepUpdate(self._to_proto(), coefficient, scaling.norm_attempts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops this work item's gradients, also those that are on the servers already.

        After an exception in the backward nothing of it reaches the step. After the loop over
        ``step.batches`` it drops those of all items computed here: ``step`` then commits without them.
        """
        self._scaling = _Scaling()
        if not self._others():
            self._session.in_flight.zero_grad()
        elif self._session.loop_step == self._session.step:  # a step gone through again had its zero_grad before
            self._session.in_flight.zero_grad_of(self._own_parameters())

    def state_dict(self) -> dict[str, Any]:
        """The hyper-parameters of every group, and the run and step whose servers have the state itself."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        run = {"run": self._session.run, "run_id": self._session.run_id, "step": self._session.step}
        return {"param_groups": groups, "ema_decay": self._ema_decay, "state_in_run": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the hyper-parameters of every group, also those of a torch optimizer that has no state yet.

        Raises:
            UsageError: It has state, or is of another run that has taken steps: this run's state would begin anew. Or
                it has other parameter groups.
        """
        self._refuse_if_combined("load_state_dict")
        of = state_dict.get("state_in_run")
        if of is not None and of["step"] and of["run_id"] != self._session.run_id:
            raise UsageError(
                f"the state_dict is of run {of['run']!r} after {of['step']} steps, and the optimizer's state (moments, "
                f"step counts) is on that run's shard servers. Run {self._session.run!r} has none of it, so training "
                "would go on with other results. Join the former run again to go on there. To take over the "
                'hyper-parameters and begin with new state, load {"param_groups": state_dict["param_groups"]}'
            )
        if state_dict.get("state"):
            raise UsageError(
                f"the state_dict has state of {len(state_dict['state'])} parameters, but an optimizer's state lives "
                "on the shard servers and belongs to the run: joining the run again restores it. To take over the "
                'hyper-parameters only, load {"param_groups": state_dict["param_groups"]}'
            )
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(f"the state has {len(saved)} parameter groups, the optimizer {len(self.param_groups)}")
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            if "params" in values and len(values["params"]) != len(group["params"]):
                raise UsageError(
                    f"parameter group {number} of the state has {len(values['params'])} parameters, the optimizer's "
                    f"{len(group['params'])}"
                )
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        self.ema_decay = state_dict.get("ema_decay")

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        numbers = {name: float(group[name]) for name in self._numbers}
        if "betas" in group:
            numbers["beta1"], numbers["beta2"] = map(float, group["betas"])
        return numbers

    def _refuse_if_combined(self, method: str) -> None:
        if self._combined is not None:
            raise UsageError(
                f"this {type(self).__name__} is part of a Combined, and one step commits all of it: use {method} of "
                "the Combined"
            )

    def _group_to_proto(self, number: int) -> common_pb2.ParameterGroup:
        return common_pb2.ParameterGroup(hyperparameters=self._hyperparameters(self.param_groups[number]))

    def _to_proto(self) -> common_pb2.OptimizerStep:
        units = self._session.units
        indices: dict[int, list[int]] = {unit.index: [UNUSED] * len(unit.layout.parameters) for unit in units}
        for unit_index, kept in self._kept_parameters().items():
            for parameter_index in kept:
                indices[unit_index][parameter_index] = KEPT
        groups = []
        for number, group in enumerate(self.param_groups):
            groups.append(self._group_to_proto(number))
            for parameter in group["params"]:
                unit_index, parameter_index = self._locate(parameter)
                indices[unit_index][parameter_index] = number
        return common_pb2.OptimizerStep(
            algorithm=self.algorithm,
            groups=groups,
            ema_decay=self._ema_decay,
            clip_value=self._scaling.clip_value,
            skip_non_finite=self._scaling.loss_scale is not None,
            units=[common_pb2.UnitGroups(unit_index=index, group_indices=group) for index, group in indices.items()],
        )

    def _others(self) -> list[ShardedOptimizer]:
        """The optimizers of the session that take turns with this one."""
        session = self._session
        others = [other for other in session.optimizers if other is not self and other._combined is None]
        session.in_flight.several_optimizers = bool(others)
        return others

    def _own_parameters(self) -> dict[int, set[int]]:
        """Indices of its parameters by unit index."""
        own: dict[int, set[int]] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                unit_index, parameter_index = self._locate(parameter)
                own.setdefault(unit_index, set()).add(parameter_index)
        return own

    def _kept_parameters(self) -> dict[int, set[int]]:
        """Indices of other optimizers' parameters by unit index: this one's steps leave their gradients alone."""
        kept: dict[int, set[int]] = {}
        if others := self._others():
            own = self._own_parameters()
            for other in others:
                for unit_index, indices in other._own_parameters().items():
                    if left := indices - own.get(unit_index, set()):
                        kept.setdefault(unit_index, set()).update(left)
        return kept

    def _counted_units(self) -> list[int]:
        """The units over whose gradients the norm is taken; empty: all.

        Raises:
            UsageError: A unit has parameters of this optimizer and of another one.
        """
        if not (kept := self._kept_parameters()):
            return []
        own = self._own_parameters()
        for unit in self._session.units:
            if unit.index in kept and unit.index in own:
                raise UsageError(
                    f"clip_grad_norm_ of {type(self).__name__}: unit {unit.name!r} has parameters of this optimizer "
                    "and of another one, but norms are known per unit only: shard their modules as units of their own, "
                    "or make one optimizer of both, shardwell.optim.Combined([...])",
                    unit=unit.name,
                )
        return [unit.index for unit in self._session.units if unit.index not in kept]

    def _locate(self, parameter: torch.Tensor) -> tuple[int, int]:
        found = self._session.units.locate(parameter)
        if found is None and (owner := owner_of(parameter)) is not None:
            raise UsageError(f"parameter {owner.name!r} belongs to another session than the first of this optimizer")
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
        if any(owner_of(parameter) is not None for parameter in parameters):
            raise UsageError(f"{type(self).__name__}: the session of these parameters is closed; join again")
        raise UsageError(
            f"shardwell.optim.{type(self).__name__} got no sharded parameter: "
            "call fully_shard(model, session) first, or use torch.optim for local parameters"
        )


def at_least_zero(**values: float) -> dict[str, float]:
    """Some hyper-parameters; raises UsageError naming the first that is negative or not a number."""
    for name, value in values.items():
        if not float(value) >= 0.0:
            raise UsageError(f"{name}={value!r}: expected at least 0")
    return values


def require_betas(betas: tuple[float, float]) -> None:
    """Raises UsageError unless both are in [0, 1)."""
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise UsageError(f"betas[{index}]={beta!r}: expected 0 <= beta < 1")


def moments(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, maximize: bool) -> dict[str, Any]:
    """What all descendants of Adam have; raises UsageError as the checks do."""
    require_betas(betas)
    return {**at_least_zero(lr=lr, eps=eps, weight_decay=weight_decay), "betas": betas, "maximize": maximize}
