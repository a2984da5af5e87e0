"""The base class of all optimizers of sharded parameters, how they scale and clip gradients, and ``Combined``.

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

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsFloat

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from shardwell.module.parameters import USE_SHARDED_SCALER, is_called_from
from shardwell.module.unit import owner_of
from shardwell.session.session import Session, session_of
from shardwell.step.step_commit import StepUpdate
from shardwell.training.training import StateOwner
from shardwell_wire.errors import NonFiniteError, StaleEpochError, StepRestartedError, UsageError
from shardwell_wire.model.optimizers import KEPT_GROUP, NO_GROUP, OPTIMIZERS
from shardwell_wire.model.topology import runs_on_trainers
from shardwell_wire.v1 import common_pb2


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


logger = logging.getLogger(__name__)

_CHECKPOINT_MODULE = "torch.distributed.checkpoint.state_dict"

_CLIP_EPSILON = 1e-6
"""Added to the norm before the division, as in ``torch.nn.utils.clip_grad_norm_``."""


@dataclass(frozen=True, slots=True)
class _LatestUnits:
    """The units and parameter groups of the latest step. They seldom change from step to step."""

    key: list[list[int]]
    """Ids of the units and, for each group, of its parameters."""
    parts: list[list[Any]]
    """The units and parameters themselves, so that their ids are not used again."""
    message: common_pb2.OptimizerStep
    """A message with ``units`` only."""


class _StateOnServers(dict[str, Any]):
    """State of a parameter, which the servers keep. Empty."""

    def __missing__(self, name: str) -> NoReturn:
        raise UsageError(
            f"the servers keep the optimizer state, also {name!r}: to read it, save a checkpoint, and call "
            "shardwell.weights.open_checkpoint(folder, run=session.run).optimizer_state(parameter_name)"
        )


class ShardedOptimizer(Optimizer):
    """Base class of the optimizers. Do not use it directly.

    Raises:
        UsageError: A parameter is not sharded, or a hyper-parameter is out of bounds.
    """

    updates_on_servers: ClassVar[bool] = True
    """Marks the class for the checks of ``module/torch_patches.py``, which must not import it."""
    algorithm: ClassVar[str]
    """Name in ``OptimizerStep.algorithm``."""
    _combined_members: Sequence[ShardedOptimizer] = ()
    """The optimizers that this one combines."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        self._check_bounds(defaults)
        super().__init__(params, defaults)
        self.state = defaultdict(_StateOnServers)
        self._session = self._find_session()
        self._session.declare_buffers()
        self._session.optimizers.add(self)
        members = [member._state_owner for member in self._combined_members]
        self._state_owner: StateOwner = self._session.state_owners.add(self._keys(), members)
        self._latest_scaling: GradientScaling | None = None
        self.skipped = False
        """True if the last step changed no parameter because a gradient of a scaled loss was not finite."""
        self.repeats = False
        """True if the last ``step`` committed nothing, because ``session.steps`` yields the step again."""
        self._ema_decay: float | None = None
        self._latest_units: _LatestUnits | None = None
        self._combined: ShardedOptimizer | None = None
        """The ``Combined`` that this optimizer belongs to, which commits the steps."""

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Raises UsageError. torch's ``GradScaler.step`` reads this attribute first."""
        raise UsageError(USE_SHARDED_SCALER)

    @property
    def ema_decay(self) -> float | None:
        """Decay of an exponential moving average of the weights, which the servers update with every step.

        ``average += (1 - ema_decay) * (weight - average)``, as ``torch.optim.swa_utils.AveragedModel`` with
        ``get_ema_multi_avg_fn``. The first average is a copy of the weights. ``full_state_dict(model, ema=True)`` reads
        the averages. None, the default: averages do not change.
        """
        return self._ema_decay

    @ema_decay.setter
    def ema_decay(self, decay: float | None) -> None:
        self._refuse_if_combined("ema_decay")
        if decay is not None and runs_on_trainers(self.algorithm):
            raise UsageError(
                f"ema_decay={decay!r}: servers average only parameters that they update, and "
                f"{type(self).__name__} runs on the trainers"
            )
        if decay is not None and not 0.0 <= decay <= 1.0:
            raise UsageError(f"ema_decay={decay!r}: expected 0 to 1, or None")
        self._ema_decay = decay

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as in torch. May be called between steps.

        Raises:
            UsageError: A parameter is not sharded, or the optimizer belongs to a ``Combined``. No group is added.
        """
        if getattr(self, "_combined", None) is not None:
            raise UsageError(f"add parameter groups to {type(self).__name__} before it becomes part of a Combined")
        super().add_param_group(param_group)
        if hasattr(self, "_session"):
            try:
                added = [self._locate(parameter) for parameter in self.param_groups[-1]["params"]]
            except UsageError:
                self.param_groups.pop()
                raise
            self._session.state_owners.extend(self._state_owner, added)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = True, foreach: bool | None = None
    ) -> torch.Tensor:
        """Clips the step's mean gradient to a global norm over all units, servers and ranks.

        Call it between the backward and ``step``. It waits for the gradients of all ranks. As in torch, another call in
        the same step, also of ``clip_grad_value_``, clips the gradient that the calls before have left. All ranks must
        clip alike. ``max_norm=float("inf")`` changes nothing and returns the norm: any rank may call it at any time.

        Args:
            max_norm: Largest norm. A gradient with a larger norm is scaled by ``max_norm / (norm + 1e-6)``.
            norm_type: Type p of the norm: a positive number or infinity, or ``"inf"`` as in torch.
            error_if_nonfinite: Must be True: a step with a non-finite gradient is never committed.
            foreach: Ignored; for compatibility with torch.

        Returns:
            The norm before this call clips: a 0-dim float64 tensor, the same on every trainer. After
            ``GradScaler.unscale_``, the norm of the unscaled gradient, or infinity if the step will be skipped. NaN if
            it is not known: the step was committed without this trainer, or before any trainer had asked for a norm of
            this type other than 2; or ``session.steps`` is going to yield the step again.

        Raises:
            NonFiniteError: A gradient has NaN or infinity; the message names the parameter and the ranks. Or the norm
                of a finite gradient overflows a double.
        """
        self._refuse_if_combined("clip_grad_norm_")
        if not float(norm_type) > 0:
            raise UsageError(f"clip_grad_norm_(norm_type={norm_type!r}): expected a number above 0, or infinity")
        if not error_if_nonfinite:
            raise UsageError("clip_grad_norm_(error_if_nonfinite=False): a non-finite gradient is never committed")
        if not isinstance(max_norm, SupportsFloat) or not max_norm > 0:
            raise UsageError(
                f"clip_grad_norm_({max_norm!r}): expected the largest norm, a positive number, and no parameters: "
                "optimizer.clip_grad_norm_(1.0)"
            )
        scaling = self._scaling()
        try:
            norm = scaling.norm(float(norm_type), partial(self._mean_norm, scaling))
        except (StepRestartedError, StaleEpochError):
            self._drop_clipping()
            raise
        if math.isinf(norm) and scaling.loss_scale is None:
            raise NonFiniteError(
                f"the norm of type {norm_type} overflows a double, although the gradient is finite: "
                "use a smaller norm_type, or infinity"
            )
        if math.isfinite(norm):  # otherwise the norm is not known, or the step will be skipped
            scaling.multiply(min(1.0, max_norm / (norm + _CLIP_EPSILON)))
        return torch.tensor(norm, dtype=torch.float64)

    def clip_grad_value_(self, clip_value: float, foreach: bool | None = None) -> None:
        """Clamps every element of the step's mean gradient, as ``torch.nn.utils.clip_grad_value_``.

        Call it between the backward and ``step``, on all ranks. The servers clip when they apply the step. As in torch,
        another call in the same step, also of ``clip_grad_norm_``, clips the gradient that the calls before have left.

        Args:
            clip_value: Elements are clamped to ``[-clip_value, clip_value]``.
            foreach: Ignored; for compatibility with torch.

        Raises:
            UsageError: ``clip_value`` is not a positive number.
        """
        self._refuse_if_combined("clip_grad_value_")
        if not isinstance(clip_value, SupportsFloat) or not float(clip_value) > 0:
            raise UsageError(
                f"clip_grad_value_({clip_value!r}): expected a positive number, and no parameters: "
                "optimizer.clip_grad_value_(0.5)"
            )
        scaling = self._scaling()
        self._session.in_flight.end_backwards(scaling.step)
        scaling.clamp(float(clip_value))

    def _scaling(self, *, settle: bool = True) -> GradientScaling:
        """Returns how the gradients of the loop's step are scaled so far, after an interrupted step is settled."""
        if settle:
            self._session.in_flight.settle()
        step, latest = self._session.loop.step, self._latest_scaling
        if latest is None or latest.step != step:  # an interrupted step may have been committed since
            latest = self._latest_scaling = GradientScaling(step)
        return latest

    def _drop_clipping(self) -> None:
        """Forgets how the step was clipped, because its gradient is computed again. The scale of the loss stays."""
        if (latest := self._latest_scaling) is not None:
            self._latest_scaling = GradientScaling(latest.step, loss_scale=latest.loss_scale)

    def _mean_norm(self, scaling: GradientScaling, norm_type: float, bound: float) -> float:
        """Returns a norm of the mean gradient. See ``GradientScaling.norm``."""
        try:
            norm = self._session.in_flight.grad_norm(scaling.step, norm_type, bound, *self._counted_units())
        except NonFiniteError:
            if scaling.loss_scale is None:
                raise
            return math.inf
        if scaling.norm_attempts is None:
            scaling.norm_attempts = norm.attempts
        return norm.value

    def unscale(self, loss_scale: float) -> None:
        """Divides the gradients of this step by the scale of the loss.

        Called by ``shardwell.amp.GradScaler``. The division is part of the commit, like clipping. ``step`` then skips
        the update instead of raising NonFiniteError.
        """
        self._refuse_if_combined("unscale")
        self._scaling().unscale(loss_scale)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Commits the step. Returns when the gradients of all ranks are reduced and the commit is durable.

        Args:
            closure: Reevaluates the model and returns the loss, as in torch. Called once.

        Raises:
            HyperparameterMismatchError: Ranks proposed different hyper-parameters; the message has both values.
            NonFiniteError: A gradient has NaN or infinity. The parameters are unchanged.
            StepRestartedError: Only in a loop without ``step.batches``: the step's gradients are lost. Compute them
                again.
        """
        if self._combined is not None:
            self._refuse_if_combined("step")
        if self._state_owner.is_replaced and self._keeps_state():
            raise UsageError(
                f"{type(self).__name__}.step(): another optimizer of this script, which was made later for the same "
                "parameters, has taken a step. The shard servers keep one optimizer state (moments, step counts) per "
                "parameter, and it is now that of the later optimizer: use the later one from now on, or a single "
                "optimizer whose settings change between steps"
            )
        if _CHECKPOINT_MODULE in sys.modules and is_called_from("torch/distributed/checkpoint/state_dict.py"):
            raise UsageError(
                "torch.distributed.checkpoint would take a step to create optimizer state, but this "
                "optimizer's state is on the shard servers: the run's checkpoints contain it, and "
                "optimizer.state_dict() contains the hyper-parameters"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        loop = self._session.loop
        if loop.tracked.restored:
            loop.begin_commit()
        scaling = self._scaling(settle=False)  # the commit continues an interrupted step itself
        try:
            updated = loop.commit(scaling.step, self._make_update(scaling))
        except (StepRestartedError, StaleEpochError):
            self._drop_clipping()
            raise
        self.repeats = loop.iteration.voided
        self.skipped = not updated and not self.repeats
        if self.repeats:
            self._warn_about_schedulers()
        elif not self._state_owner.has_stepped:
            self._state_owner.note_step()
        self._latest_scaling = None
        return loss

    def _warn_about_schedulers(self) -> None:
        """Warns if the loop body may step an LR scheduler of this optimizer whose state cannot be restored."""
        # torch's schedulers wrap the `step` of their optimizer.
        if hasattr(self.step, "_wrapped_by_lr_sched") and not self._session.tracks_scheduler_of(self):
            logger.warning(
                "the iteration is repeated, but the LR scheduler of this %s is not tracked. It takes a step too many, "
                "and ranks may propose different learning rates: call session.track(scheduler=scheduler)",
                type(self).__name__,
            )

    def _make_update(self, scaling: GradientScaling) -> StepUpdate:
        """Returns the update that this step proposes to commit."""
        return StepUpdate(self._to_proto(scaling), scaling.factor, scaling.norm_attempts)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of this work item, including those that are already on the servers.

        Use it after an exception in the backward. After the loop over ``step.batches`` it drops the gradients of all
        items that this trainer computed, and ``step`` commits without them.
        """
        self._latest_scaling = None
        if not self._other_optimizers():
            self._session.in_flight.zero_grad()
        elif self._session.loop.step == self._session.step:  # False if a committed step is repeated
            self._session.in_flight.zero_grad_of(self._own_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns the hyper-parameters of every group, and the run and step to which the state on the servers
        belongs."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]
        run = {"run": self._session.run, "run_id": self._session.run_id, "step": self._session.step}
        return {"param_groups": groups, "ema_decay": self._ema_decay, "state_in_run": run}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the hyper-parameters of every group. Also accepts a torch optimizer's state dict without state.

        Raises:
            UsageError: The state dict contains state, has other parameter groups, or belongs to another run that has
                taken steps, whose optimizer state this run does not have.
        """
        self._refuse_if_combined("load_state_dict")
        of = state_dict.get("state_in_run")
        if of is not None and of["step"] and of["run_id"] != self._session.run_id:
            raise UsageError(
                f"the state_dict belongs to run {of['run']!r} after {of['step']} steps, and the optimizer's state "
                f"(moments, step counts) is on that run's shard servers. Run {self._session.run!r} does not have this "
                "state, so training would continue with different results. To continue, join the former run again, or "
                "on another cluster resume a checkpoint of it: shardwell.join(checkpoint_dir=..., resume='latest'). "
                "To load the hyper-parameters and start with new state, load "
                '{"param_groups": state_dict["param_groups"]}'
            )
        if state_dict.get("state"):
            raise UsageError(
                f"the state_dict has state of {len(state_dict['state'])} parameters, but an optimizer's state is "
                "stored on the shard servers and belongs to the run: joining the run again restores it. To load the "
                'hyper-parameters only, load {"param_groups": state_dict["param_groups"]}'
            )
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise UsageError(f"the state_dict has {len(saved)} parameter groups, expected {len(self.param_groups)}")
        for number, (group, values) in enumerate(zip(self.param_groups, saved, strict=True)):
            if "params" in values and len(values["params"]) != len(group["params"]):
                raise UsageError(
                    f"parameter group {number} of the state_dict has {len(values['params'])} parameters, expected "
                    f"{len(group['params'])}"
                )
        # All groups are checked before the first one changes.
        for group, values in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})
        self.ema_decay = state_dict.get("ema_decay")
        if of is not None and of["step"]:
            self._state_owner.continue_state()

    def _keeps_state(self) -> bool:
        """True if a step needs the state of former steps."""
        return self.algorithm != "sgd" or any(group["momentum"] for group in self.param_groups)

    def _hyperparameters(self, group: dict[str, Any]) -> dict[str, float]:
        """Returns a group's hyper-parameters as they are sent, by the names in the optimizer table."""
        sent = {}
        for each in OPTIMIZERS[self.algorithm].hyperparameters:
            value = group[each.argument or each.name]
            value = value[each.index] if each.argument else value
            if not isinstance(value, SupportsFloat) or (isinstance(value, torch.Tensor) and value.numel() != 1):
                raise UsageError(
                    f"a parameter group of {type(self).__name__} has {each.label}={value!r}: expected a number"
                )
            sent[each.name] = float(value)
        return sent

    def _check_bounds(self, settings: dict[str, Any]) -> None:
        """Raises UsageError for the first hyper-parameter that is out of the table's bounds."""
        spec = OPTIMIZERS.get(self.algorithm)
        for each in spec.hyperparameters if spec else ():
            value = each.value_in(settings)
            if value is not None and (violation := each.violation(float(value))):
                raise UsageError(f"{type(self).__name__}({each.label}={value!r}): {violation}")

    def _refuse_if_combined(self, method: str) -> None:
        if self._combined is not None:
            raise UsageError(
                f"this {type(self).__name__} belongs to a Combined, which commits the steps of all its members: use "
                f"{method} of the Combined"
            )

    def _group_to_proto(self, number: int) -> common_pb2.ParameterGroup:
        return common_pb2.ParameterGroup(hyperparameters=self._hyperparameters(self.param_groups[number]))

    def _to_proto(self, scaling: GradientScaling) -> common_pb2.OptimizerStep:
        groups = []
        for number in range(len(self.param_groups)):
            groups.append(self._group_to_proto(number))
        step = common_pb2.OptimizerStep(
            algorithm=self.algorithm,
            groups=groups,
            ema_decay=self._ema_decay,
            clip_value=scaling.clip_value,
            skip_non_finite=scaling.loss_scale is not None,
            generation=self._state_owner.generation,
        )
        step.MergeFrom(self._units_to_proto())
        return step

    def _units_to_proto(self) -> common_pb2.OptimizerStep:
        """Returns a message with the groups of all units' parameters. Must not be changed."""
        others = self._other_optimizers()
        kept = self._kept_parameters(others) if others else {}
        parts: list[list[Any]] = [[*self._session.units.by_name.values()]]
        for group in self.param_groups:
            parts.append([*group["params"]])
        key = []
        for part in parts:
            key.append([*map(id, part)])
        if not kept and self._latest_units is not None and self._latest_units.key == key:
            return self._latest_units.message
        indices = {unit.index: [NO_GROUP] * len(unit.layout.parameters) for unit in self._session.units}
        trainable = {unit.index: [each.is_trainable for each in unit.layout.parameters] for unit in self._session.units}
        for unit_index, parameter_indices in kept.items():
            for parameter_index in parameter_indices:
                indices[unit_index][parameter_index] = KEPT_GROUP
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                unit_index, parameter_index = self._locate(parameter)
                if trainable[unit_index][parameter_index]:
                    indices[unit_index][parameter_index] = number
        message = common_pb2.OptimizerStep(
            units=[common_pb2.UnitGroups(unit_index=index, group_indices=group) for index, group in indices.items()]
        )
        if not kept:
            self._latest_units = _LatestUnits(key, parts, message)
        return message

    def _other_optimizers(self) -> list[ShardedOptimizer]:
        """Returns the other optimizers of the session, with which this one alternates."""
        others = []
        for other in self._session.optimizers:
            if other is not self and other._combined is None:
                others.append(other)
        in_flight = self._session.in_flight
        if in_flight.several_optimizers is not bool(others):
            in_flight.share_between_optimizers(bool(others))
        return others

    def _keys(self) -> list[tuple[int, int]]:
        """Returns the unit index and the layout index of every parameter."""
        return [self._locate(parameter) for group in self.param_groups for parameter in group["params"]]

    def _own_parameters(self) -> dict[int, set[int]]:
        """Returns the layout indices of this optimizer's parameters by unit index."""
        own: dict[int, set[int]] = {}
        for unit_index, parameter_index in self._keys():
            own.setdefault(unit_index, set()).add(parameter_index)
        return own

    def _kept_parameters(self, others: Sequence[ShardedOptimizer]) -> dict[int, set[int]]:
        """Returns the layout indices of other optimizers' parameters by unit index. Steps keep their gradients."""
        kept: dict[int, set[int]] = {}
        own = self._own_parameters() if others else {}
        for other in others:
            for unit_index, indices in other._own_parameters().items():
                if left := indices - own.get(unit_index, set()):
                    kept.setdefault(unit_index, set()).update(left)
        return kept

    def _counted_units(self) -> tuple[list[int], list[int]]:
        """Returns the indices of this trainer's units over whose gradients the norm is computed, and of the others.

        Raises:
            UsageError: A unit has parameters of this optimizer and of another one.
        """
        kept = self._kept_parameters(self._other_optimizers())
        own = self._own_parameters()
        for unit in self._session.units:
            if unit.index in kept and unit.index in own:
                raise UsageError(
                    f"clip_grad_norm_ of {type(self).__name__}: unit {unit.name!r} has parameters of this optimizer "
                    "and of another one, but norms are computed per unit: shard their modules as separate units, or "
                    "combine both optimizers, shardwell.optim.Combined([...])",
                    unit=unit.name,
                )
        return [unit.index for unit in self._session.units if unit.index not in kept], sorted(kept)

    def _locate(self, parameter: torch.Tensor) -> tuple[int, int]:
        found = self._session.units.locate(parameter)
        if found is None and (owner := owner_of(parameter)) is not None:
            raise UsageError(
                f"parameter {owner.name!r} belongs to another session than the optimizer's first parameter: use one "
                "optimizer per session"
            )
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


class Combined(ShardedOptimizer):
    """Combines optimizers of different kinds, such as ``Muon`` for matrices and ``AdamW`` for all other parameters.

    The parameter groups are those of the members, in order. LR schedulers may belong to the ``Combined`` or to a
    member. ``step``, ``clip_grad_norm_``, ``zero_grad`` and ``ema_decay`` must be used on the ``Combined``.

    Args:
        optimizers: At least one. Each parameter may be in one optimizer only.

    Raises:
        UsageError: ``optimizers`` is empty, or a member already belongs to a ``Combined``.
        ValueError: A parameter is in two optimizers.
    """

    algorithm = ""

    def __init__(self, optimizers: Sequence[ShardedOptimizer]) -> None:
        self._combined_members = list(optimizers)
        if not self._combined_members:
            raise UsageError("Combined([]): expected at least one optimizer")
        for member in self._combined_members:
            if member._combined is not None or isinstance(member, Combined):
                raise UsageError(f"Combined takes optimizers that are not combined yet, got {type(member).__name__}")
            if runs_on_trainers(member.algorithm):
                raise UsageError(
                    f"{type(member).__name__} runs on the trainers: Combined takes optimizers of shardwell.optim only"
                )
            if member.ema_decay is not None:
                raise UsageError(f"set ema_decay of the Combined, not of its {type(member).__name__}")
        self._owner_of_group = [
            (member, number) for member in self._combined_members for number in range(len(member.param_groups))
        ]
        super().__init__([group for member in self._combined_members for group in member.param_groups], {})
        for member in self._combined_members:
            member._combined = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises UsageError: add parameter groups to the members before they are combined."""
        if hasattr(self, "_session"):
            raise UsageError("add parameter groups to the optimizers before they are combined")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = super().step(closure)
        for member in self._combined_members:
            # torch's schedulers read this attribute to warn about a call before the first step.
            member._opt_called = True  # type: ignore[attr-defined]
        return loss

    def _group_to_proto(self, number: int) -> common_pb2.ParameterGroup:
        member, own_number = self._owner_of_group[number]
        proto = member._group_to_proto(own_number)
        proto.algorithm = member.algorithm
        return proto
