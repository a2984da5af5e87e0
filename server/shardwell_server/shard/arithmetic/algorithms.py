"""Runs the arithmetic of each optimizer on the parts of parameters in a shard.

Uses torch's kernels and functions where torch has them, in the variants whose bits do not depend on how a parameter is
cut; LAMB and Lion are written here. torch's optimizer classes are not used: creating the first one imports torch's
compiler, which costs every server seconds of CPU time.

Note: [Failed updates]
    A committed update is repeated until it succeeds, and must be applied exactly once. An engine therefore divides an
    update into pieces, always the same ones in the same order. ``Progress`` counts the pieces that are done and
    restores the piece that failed. A piece of an element-wise algorithm is a slice, so that its copies are small and
    stay in the cache. Gradients are not changed: clipping writes to temporary slices. ``Engine.missing`` names the
    state that must be allocated in advance.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice
from typing import Any

import torch
from torch import Tensor
from torch.optim._adafactor import adafactor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from shardwell_server.shard.arithmetic.update_pieces import (
    MAX_JOINT,
    Changed,
    Clipping,
    Piece,
    packed,
    slice_bytes,
    slices,
)
from shardwell_wire.model.optimizers import OPTIMIZERS, StateShape, StateTensor


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


Settings = Mapping[str, Any]
"""Hyper-parameters as torch's functions take them."""
State = dict[str, Tensor]
"""Optimizer state of one part, by torch's names."""

_WORKSPACE_TENSORS = 5
"""Temporary tensors of the size of the values that an algorithm on whole tensors may allocate at once, and the clipped
gradient."""


@dataclass(slots=True)
class Part:
    """A parameter that an update changes, or the part of it in a shard."""

    number: int
    """Index of the part in its shard."""
    values: Tensor
    state: State
    """Includes everything that ``Engine.missing`` allocated."""
    fresh: frozenset[str] = frozenset()
    """Names of the state tensors that this update creates."""


Plan = Callable[[Sequence[Tensor], Settings, Clipping], Iterator[Piece]]
"""Yields the pieces of an update of some parts, from their gradients, each [numel]. Run each piece before the next one
is requested. If no part has fresh state, the same plan serves all updates of the same tensors."""
JointCall = Callable[[list[Tensor], Settings], None]
"""Updates several parts at once: takes their clipped gradients, each [numel], and the settings of the step."""


class Engine:
    """Runs one optimizer. The state is stored with the parts, not in the engine.

    Args:
        name: Name in the table of optimizers, which describes the state.
        function: Updates values in place. Takes lists of values, of gradients and of each state tensor, in the table's
            order, and the settings.
        **options: Options that select a variant of ``function``.
    """

    def __init__(self, name: str, function: Callable[..., None], **options: Any) -> None:
        self.name, spec = name, OPTIMIZERS[name]
        self._function, self._options = function, options
        self._state = {tensor.name: tensor for tensor in spec.state}
        self._scalars = [tensor.name for tensor in spec.state if tensor.shape is StateShape.SCALAR]
        self._initializers, self._whole_tensors = spec.initializers, spec.needs_whole_tensors

    def missing(self, values: Tensor, state: Mapping[str, Tensor], settings: Settings) -> State:
        """Returns the state tensors that the next update of a part needs and ``state`` does not have.

        The tensors are on the meta device: they have a shape and no memory. ``initial`` returns their content.
        """
        shapes = {
            name: _shape(tensor, values.to("meta"))
            for name, tensor in self._state.items()
            if name not in state and _is_enabled(tensor, settings)
        }
        return {name: tensor for name, tensor in shapes.items() if tensor is not None}

    def initial(self, name: str, settings: Settings) -> float:
        """Returns the value that every element of a new state tensor has."""
        value = self._state[name].initial
        return float(settings[value] if isinstance(value, str) else value)

    def initializers(self, settings: Settings) -> dict[str, Any]:
        """Returns the settings that determine the initial values of state."""
        return {name: settings[name] for name in self._initializers}

    def workspace_bytes(self, values: Tensor, state: Mapping[str, Tensor]) -> int:
        """Returns the temporary memory of an update of one part. The memory of a few slices counts as 0."""
        if not self._whole_tensors:
            return 0
        return _WORKSPACE_TENSORS * values.nbytes + sum(tensor.nbytes for tensor in (values, *state.values()))

    def piece_bytes(self, values: Tensor, state: Mapping[str, Tensor]) -> int:
        """Returns the size of the largest copy that undoing a piece of one part needs."""
        if self._whole_tensors:
            return sum(tensor.nbytes for tensor in (values, *state.values()))
        return slice_bytes(values) * (1 + len(state)) + sum(
            state[name].nbytes for name in self._scalars if name in state
        )

    def plan(self, parts: Sequence[Part], settings: Settings) -> Plan:
        """Returns how several parts are updated, in place.

        The pieces are the same for the same parts, in every process.

        Args:
            settings: The settings. Only settings that enable state matter.
        """

        def pieces(gradients: Sequence[Tensor], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
            for part, gradient in zip(parts, gradients, strict=True):
                yield from self.pieces(part, gradient, settings, clipping)

        return pieces

    def pieces(self, part: Part, gradient: Tensor, settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        """Yields the pieces of the update of one part. [numel]"""
        if not part.values.numel():
            return  # torch's Adafactor and Muon would divide by the number of elements
        if self._whole_tensors:
            changed, whole = Changed((part.values, *part.state.values())), gradient.view_as(part.values)
            yield Piece(lambda: self._call(part, part.values, clipping.apply(whole), part.state, settings), changed)
            return
        scalars = [name for name in self._scalars if name in part.state]
        tensors = {name: tensor.view(-1) for name, tensor in part.state.items() if name not in scalars}
        flat = part.values.view(-1)
        for here in slices(flat):
            # Every slice starts from the same scalars. The last slice changes them.
            is_last = here.stop == part.values.numel()
            state = {name: part.state[name] if is_last else part.state[name].clone() for name in scalars}
            state |= {name: tensor[here] for name, tensor in tensors.items()}
            yield Piece(
                partial(self._clip_and_call, part, flat[here], gradient[here], state, settings, clipping),
                Changed((flat[here], *state.values())),
            )

    def joint_kind(self, part: Part, settings: Settings) -> Hashable | None:
        """Returns a key that is equal for parts of which ``joint_call`` takes several. None: it takes none of them.

        Args:
            part: A part that has all state.
            settings: The settings. Only settings that enable state matter.
        """
        return None

    def joint_call(self, values: list[Tensor], states: Sequence[State], settings: Settings) -> JointCall:
        """Returns a function that updates several parts with equal ``joint_kind`` at once, with the bits of ``pieces``.

        Args:
            values: By part. Each [numel]
            settings: As in ``joint_kind``.
        """
        raise NotImplementedError

    def _clip_and_call(
        self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings, clipping: Clipping
    ) -> None:
        self._call(part, values, clipping.apply(gradient), state, settings)

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        lists = [[state.get(name)] if _is_enabled(tensor, settings) else [] for name, tensor in self._state.items()]
        chosen = {name: value for name, value in settings.items() if name not in self._initializers}
        self._function([values], [gradient], *lists, **self._options, **chosen)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Slices of several parts that one piece updates."""

    ranges: list[tuple[int, slice]]
    """Number of the part, and the range of its elements, of each slice."""
    values: list[Tensor]
    state: list[list[Tensor]]
    """By state tensor in the table's order, without scalars. Empty lists for state that is not enabled."""
    changed: Changed
    """Values and state."""

    def gradients(self, of_parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the gradient of each slice."""
        return [of_parts[number][here] for number, here in self.ranges]


class _FusedEngine(Engine):
    """An engine whose kernel takes lists of tensors and updates one after the other.

    A piece updates slices of several parts by one call. The bits are those of one call per part.
    """

    def plan(self, parts: Sequence[Part], settings: Settings) -> Plan:
        plans: list[tuple[int, Plan]] = []
        for kind, group in groupby(parts, partial(self._kind, settings)):
            alike = list(group)
            plans.append((len(alike), (super().plan if kind is None else self._joint_plan)(alike, settings)))

        def pieces(gradients: Sequence[Tensor], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
            left = iter(gradients)
            for count, plan in plans:
                yield from plan(list(islice(left, count)), settings, clipping)

        return pieces

    def joint_kind(self, part: Part, settings: Settings) -> Hashable | None:
        return self._kind(settings, part)

    def _kind(self, settings: Settings, part: Part) -> Hashable | None:
        """Returns a key that is equal for parts that one call can update. None: the kernel takes none of them."""
        return part.values.dtype

    def _joint_plan(self, parts: Sequence[Part], settings: Settings) -> Plan:
        """As ``plan``, for parts of one kind."""
        raise NotImplementedError

    def _cut(self, parts: Sequence[Part], settings: Settings) -> list[_Cut]:
        """Divides parts of one kind into pieces."""
        columns = [[part.values.view(-1) for part in parts]]
        for name, tensor in self._state.items():
            if name not in self._scalars:
                columns.append([part.state[name].view(-1) for part in parts] if _is_enabled(tensor, settings) else [])
        found = []
        for ranges in packed(columns[0]):
            cut = [[column[number][here] for number, here in ranges] if column else [] for column in columns]
            found.append(_Cut(ranges, cut[0], cut[1:], Changed(chain.from_iterable(cut))))
        return found


class _AdamKernel(_FusedEngine):
    """torch's fused Adam or AdamW. The kernel expects that steps are already counted."""

    def _joint_plan(self, parts: Sequence[Part], settings: Settings) -> Plan:
        cuts, counts = self._cut(parts, settings), [part.state["step"] for part in parts]
        counted = [counts[start : start + MAX_JOINT] for start in range(0, len(counts), MAX_JOINT)]
        counts_changed = [Changed(some) for some in counted]

        def pieces(gradients: Sequence[Tensor], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
            steps = torch._foreach_add(counts, 1)

            def run(cut: _Cut) -> None:
                own, clipped = [steps[number] for number, _ in cut.ranges], clipping.apply_all(cut.gradients(gradients))
                self._function(cut.values, clipped, *cut.state, own, **settings)

            for cut in cuts:
                yield Piece(partial(run, cut), cut.changed, atomic=True)
            for some, changed in zip(counted, counts_changed, strict=True):
                yield Piece(partial(torch._foreach_add_, some, 1), changed, atomic=True)

        return pieces

    def joint_call(self, values: list[Tensor], states: Sequence[State], settings: Settings) -> JointCall:
        counts = [state["step"] for state in states]
        moments = [
            [state[name].view(-1) for state in states] if _is_enabled(tensor, settings) else []
            for name, tensor in self._state.items()
            if name != "step"
        ]

        def call(gradients: list[Tensor], settings: Settings) -> None:
            torch._foreach_add_(counts, 1)
            self._function(values, gradients, *moments, counts, **settings)

        return call


class _Sgd(_FusedEngine):
    """torch's fused SGD.

    The kernel leaves all but the last few elements of 16-bit parameters unchanged (torch 2.13, CPU), so these take the
    plain loop.
    """

    def _kind(self, settings: Settings, part: Part) -> Hashable | None:
        if part.values.element_size() <= 2:
            return None
        return part.values.dtype, "momentum_buffer" in part.fresh

    def _joint_plan(self, parts: Sequence[Part], settings: Settings) -> Plan:
        cuts = self._cut(parts, settings)
        is_first_step = bool(settings["momentum"]) and "momentum_buffer" in parts[0].fresh

        def pieces(gradients: Sequence[Tensor], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
            def run(cut: _Cut) -> None:
                clipped, (buffers,) = clipping.apply_all(cut.gradients(gradients)), cut.state
                torch._fused_sgd_(cut.values, clipped, buffers, is_first_step=is_first_step, **settings)

            for cut in cuts:
                yield Piece(partial(run, cut), cut.changed, atomic=True)

        return pieces

    def joint_call(self, values: list[Tensor], states: Sequence[State], settings: Settings) -> JointCall:
        buffers = [state["momentum_buffer"].view(-1) for state in states] if settings["momentum"] else []

        def call(gradients: list[Tensor], settings: Settings) -> None:
            torch._fused_sgd_(values, gradients, buffers, is_first_step=False, **settings)

        return call

    def _call(self, part: Part, values: Tensor, gradient: Tensor, state: State, settings: Settings) -> None:
        momentum = state.get("momentum_buffer")
        buffers = [None if "momentum_buffer" in part.fresh else momentum]
        sgd([values], [gradient], buffers, foreach=False, fused=False, **settings)
        if momentum is not None and buffers[0] is not None:
            momentum.copy_(buffers[0])


def _muon(*lists: list[Tensor], **settings: Any) -> None:
    from torch.optim._muon import muon  # the oldest supported torch lacks this module

    muon(*lists, has_complex=False, **settings)


def _is_enabled(tensor: StateTensor, settings: Settings) -> bool:
    return not tensor.enabled_by or bool(settings[tensor.enabled_by])


def _shape(tensor: StateTensor, values: Tensor) -> Tensor | None:
    """Returns a state tensor of a part on the meta device; None if a parameter of this shape has no such tensor."""
    match tensor.shape:
        case StateShape.SCALAR:
            return torch.empty((), device=values.device)
        case StateShape.ROWS:
            return values.new_empty(*values.shape[:-1], 1) if values.ndim > 1 else None
        case StateShape.COLUMNS:
            return values.new_empty(*values.shape[:-2], 1, values.shape[-1]) if values.ndim > 1 else None
        case StateShape.VECTOR:
            return torch.empty_like(values) if values.ndim <= 1 else None
    return torch.empty_like(values)


# With `foreach=False` torch processes parameters one by one.
_ENGINES: tuple[Engine, ...] = (
    _Sgd("sgd", sgd),
    _AdamKernel("adam", torch._fused_adam_),
    _AdamKernel("adamw", torch._fused_adamw_),
    Engine("nadam", nadam, foreach=False),
    Engine("radam", radam, foreach=False),
    Engine("adamax", adamax, foreach=False),
    Engine("rmsprop", rmsprop, foreach=False),
    Engine("adagrad", adagrad, foreach=False, fused=False),
    Engine("adadelta", adadelta, foreach=False),
    Engine("lion", lion),
    Engine("lamb", lamb),
    Engine("adafactor", adafactor, foreach=False),
    Engine("muon", _muon),
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in _ENGINES}
"""The engine of every optimizer in the table."""


def torch_settings(algorithm: str, hyperparameters: Mapping[str, float]) -> dict[str, Any]:
    """Converts the hyper-parameters of a group to the arguments of torch's functions."""
    values: dict[str, Any] = {
        each.name: bool(value) if each.is_flag else int(value) if each.is_integer else value
        for each in OPTIMIZERS[algorithm].hyperparameters
        for value in (hyperparameters[each.name],)
    }
    if algorithm == "muon":
        values["ns_coefficients"] = tuple(values.pop(name) for name in ("ns_a", "ns_b", "ns_c"))
        values["adjust_lr_fn"] = "match_rms_adamw" if values.pop("match_rms_adamw") else "original"
    return values
