"""Runs the arithmetic of each optimizer on the parts of parameters in a shard.

Uses torch's kernels and functions where torch has them, in the variants whose bits do not depend on how a parameter is
cut. torch's optimizer classes are not used: creating the first one imports torch's compiler, which costs every server
seconds of CPU time.

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
from itertools import groupby
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

from shardwell_server.shard.arithmetic.algorithms.lamb import lamb
from shardwell_server.shard.arithmetic.algorithms.lion import lion
from shardwell_server.shard.arithmetic.update_pieces import Clipping, Piece, joint, slice_bytes, slices
from shardwell_wire.optimizers import OPTIMIZERS, StateShape, StateTensor

Settings = Mapping[str, Any]
"""Hyper-parameters as torch's functions take them."""
State = dict[str, Tensor]
"""Optimizer state of one part, by torch's names."""

_WORKSPACE_TENSORS = 5
"""Temporary tensors of the size of the values that an algorithm on whole tensors may allocate at once, and the clipped
gradient."""


@dataclass(slots=True)
class Part:
    """A parameter with a gradient in this step, or the part of it in a shard."""

    number: int
    """Index of the part in its shard."""
    values: Tensor
    gradient: Tensor
    """Same shape as ``values``."""
    state: State
    """Includes everything that ``Engine.missing`` allocated."""
    fresh: frozenset[str] = frozenset()
    """Names of the state tensors that this update creates."""

    def slices(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields the range, the values and the gradient of each slice. Each [numel]."""
        values, gradient = self.values.view(-1), self.gradient.view(-1)
        for here in slices(values):
            yield here, values[here], gradient[here]


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

    def all_pieces(self, parts: Sequence[Part], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        """Yields the pieces of the update of several parts, in place. Run each piece before the next one is requested.

        They are the same for the same parts, in every process.
        """
        for part in parts:
            yield from self.pieces(part, settings, clipping)

    def pieces(self, part: Part, settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        """Yields the pieces of the update of one part."""
        if self._whole_tensors:
            changed = (part.values, *part.state.values())
            gradient = part.gradient
            yield Piece(lambda: self._call(part, part.values, clipping.apply(gradient), part.state, settings), changed)
            return
        scalars = [name for name in self._scalars if name in part.state]
        tensors = {name: tensor.view(-1) for name, tensor in part.state.items() if name not in scalars}
        for here, values, gradient in part.slices():
            # Every slice starts from the same scalars. The last slice changes them.
            is_last = here.stop == part.values.numel()
            state = {name: part.state[name] if is_last else part.state[name].clone() for name in scalars}
            state |= {name: tensor[here] for name, tensor in tensors.items()}
            yield Piece(
                partial(self._clip_and_call, part, values, gradient, state, settings, clipping),
                (values, *state.values()),
            )

    def joint_kind(self, part: Part, settings: Settings) -> Hashable | None:
        """Returns a key that is equal for parts of which ``joint_call`` takes several. None: it takes none of them.

        Args:
            part: A part that has all state. Its gradient is not used.
            settings: The settings, of which only those matter that enable state.
        """
        return None

    def joint_call(self, values: list[Tensor], states: Sequence[State], settings: Settings) -> JointCall:
        """Returns a function that updates several parts with equal ``joint_kind`` at once, with the bits of ``pieces``.

        Args:
            values: By part. Each [numel]
            states: By part.
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


class _FusedEngine(Engine):
    """An engine whose kernel takes lists of tensors and updates one after the other.

    One call updates many small parts. The bits are those of one call per part.
    """

    def all_pieces(self, parts: Sequence[Part], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        for kind, group in groupby(parts, partial(self._kind, settings)):
            alike = list(group)
            if kind is None:
                yield from super().all_pieces(alike, settings, clipping)
                continue
            start = 0
            for count in joint(self.piece_bytes(part.values, part.state) for part in alike):
                together, start = alike[start : start + count], start + count
                if count == 1:
                    yield from self.pieces(together[0], settings, clipping)
                else:
                    yield from self._joint_pieces(together, settings, clipping)

    def joint_kind(self, part: Part, settings: Settings) -> Hashable | None:
        return self._kind(settings, part)

    def _kind(self, settings: Settings, part: Part) -> Hashable | None:
        """Returns a key that is equal for parts that one call can update. None: no call can update others with it."""
        return part.values.dtype if slice_bytes(part.values) == part.values.nbytes else None

    def _joint_pieces(self, parts: Sequence[Part], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        """Yields the pieces of the update of several small parts."""
        raise NotImplementedError


class _AdamKernel(_FusedEngine):
    """torch's fused Adam or AdamW. The kernel expects that steps are already counted."""

    def pieces(self, part: Part, settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        count = part.state["step"]
        moments = [
            [part.state[name].view(-1)] if _is_enabled(tensor, settings) else []
            for name, tensor in self._state.items()
            if name != "step"
        ]
        step = count + 1

        def run(values: Tensor, gradient: Tensor, state: list[list[Tensor]]) -> None:
            self._function([values], [clipping.apply(gradient)], *state, [step], **settings)

        for here, values, gradient in part.slices():
            state = [[tensor[here] for tensor in tensors] for tensors in moments]
            changed = (values, *(tensor for tensors in state for tensor in tensors))
            yield Piece(partial(run, values, gradient, state), changed, atomic=True)
        yield Piece(lambda: count.add_(1), (count,), atomic=True)

    def _joint_pieces(self, parts: Sequence[Part], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        counts, values = [part.state["step"] for part in parts], [part.values for part in parts]
        moments = [
            [part.state[name] for part in parts] if _is_enabled(tensor, settings) else []
            for name, tensor in self._state.items()
            if name != "step"
        ]
        steps = [count + 1 for count in counts]

        def run() -> None:
            gradients = [clipping.apply(part.gradient) for part in parts]
            self._function(values, gradients, *moments, steps, **settings)

        yield Piece(run, [*values, *(tensor for tensors in moments for tensor in tensors)], atomic=True)
        yield Piece(lambda: torch._foreach_add_(counts, 1), counts, atomic=True)

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
        if part.values.element_size() <= 2 or (kind := super()._kind(settings, part)) is None:
            return None
        return kind, "momentum_buffer" in part.fresh

    def _joint_pieces(self, parts: Sequence[Part], settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        values = [part.values for part in parts]
        buffers = [part.state["momentum_buffer"] for part in parts] if settings["momentum"] else []
        is_first_step = bool(buffers) and "momentum_buffer" in parts[0].fresh

        def run() -> None:
            gradients = [clipping.apply(part.gradient) for part in parts]
            torch._fused_sgd_(values, gradients, buffers, is_first_step=is_first_step, **settings)

        yield Piece(run, [*values, *buffers], atomic=True)

    def joint_call(self, values: list[Tensor], states: Sequence[State], settings: Settings) -> JointCall:
        buffers = [state["momentum_buffer"].view(-1) for state in states] if settings["momentum"] else []

        def call(gradients: list[Tensor], settings: Settings) -> None:
            torch._fused_sgd_(values, gradients, buffers, is_first_step=False, **settings)

        return call

    def pieces(self, part: Part, settings: Settings, clipping: Clipping) -> Iterator[Piece]:
        if part.values.element_size() <= 2:
            yield from super().pieces(part, settings, clipping)
            return
        momentum = part.state["momentum_buffer"].view(-1) if settings["momentum"] else None
        is_first_step = "momentum_buffer" in part.fresh

        def run(values: Tensor, gradient: Tensor, buffers: list[Tensor]) -> None:
            first = bool(buffers) and is_first_step
            torch._fused_sgd_([values], [clipping.apply(gradient)], buffers, is_first_step=first, **settings)

        for here, values, gradient in part.slices():
            buffers = [] if momentum is None else [momentum[here]]
            yield Piece(partial(run, values, gradient, buffers), (values, *buffers), atomic=True)

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
