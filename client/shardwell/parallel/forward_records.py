"""What the forward of a model does, seen from a copy without memory: the calls of its layers, and what crosses a cut.

``Recording`` observes a forward whose layers compute no values, and makes its ``Record``. See Note: [Tensors without
values] in ``stage_modules.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardwell_wire.errors import UsageError


@cache
def own_mode() -> FakeTensorMode:
    """Returns the mode of tensors without values, unless the caller has one of its own."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor without values."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Value:
        return Value(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def on(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)

    def on_meta(self) -> torch.Tensor:
        value = torch.empty(self.size, dtype=self.dtype, device="meta")
        return value.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class Argument:
    """An output of a layer that is one of its arguments."""

    position: int


@dataclass(slots=True)
class LayerCall:
    """A call of a layer."""

    layer: str
    passed: dict[int, Value]
    """Arguments that only earlier layers and random numbers determine, by their position in the flattened arguments."""
    outputs: list[Any] = field(default_factory=list)
    """What the layer returns, flattened: a ``Value``, an ``Argument`` or an object."""
    structure: TreeSpec | None = None
    is_assumed: bool = False
    """True if the layer needs values, so that its output is taken to be like its first tensor."""


@dataclass(slots=True)
class Record:
    """What one forward does, for inputs of certain shapes."""

    calls: list[LayerCall] = field(default_factory=list)
    outputs: tuple[Value, ...] = ()
    """What the model returns."""
    reads: set[tuple[str, int]] = field(default_factory=set)
    """``(name, number of calls before)`` of each read of a parameter outside of the layers' forwards."""
    lost: set[int] = field(default_factory=set)
    """Calls before which the forward computes a value that it uses afterwards and that is no argument of the call."""
    draws: bool = False
    """Whether the forward draws random numbers outside of layers."""
    changes: set[str] = field(default_factory=set)
    """Buffers outside of the layers that the run stores and the forward changes."""


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes a forward of the copy without memory.

    Args:
        names: Names of parameters by ``id``.
        fill: The value of all random numbers that the forward draws outside of layers.
    """

    def __init__(self, names: Mapping[int, str], fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._names, self._fill = names, fill
        self._in_layer = False
        self._random: set[int] = set()
        self._tensors: dict[int, torch.Tensor] = {}
        """Keeps tensors alive, so that no identity is reused."""
        self._lives: dict[int, list[int]] = {}
        """Numbers of calls before a value was computed, and before its last use."""
        self._arguments: list[set[int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._in_layer:
            return func(*args, **kwargs)
        found = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in found)
        if is_fake and isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            self._check_written(func, args, kwargs)
        output = func(*args, **kwargs)
        for tensor in found:
            self._use(tensor, len(self.record.calls))
        is_random = any(id(tensor) in self._random for tensor in found)
        if not is_fake and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            is_random = self.record.draws = True
            for tensor in tree_leaves(output):
                tensor.fill_(self._fill)
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and (is_random or isinstance(tensor, FakeTensor)):
                self._add(tensor, len(self.record.calls), is_random=is_random and not isinstance(tensor, FakeTensor))
        return output

    def _check_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
                raise UsageError("it writes what layers compute into a tensor that no layer computes")

    def _add(self, tensor: torch.Tensor, born: int, *, is_random: bool = False) -> None:
        if id(tensor) not in self._lives:
            self._tensors[id(tensor)] = tensor
            self._lives[id(tensor)] = [born, born]
        if is_random:
            self._random.add(id(tensor))

    def _use(self, tensor: torch.Tensor, when: int) -> None:
        if (name := self._names.get(id(tensor))) is not None:
            self.record.reads.add((name, when))
        elif (life := self._lives.get(id(tensor))) is not None:
            life[1] = max(life[1], when)

    def call(self, layer: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs the forward of a layer, and records the call."""
        if self._in_layer:
            return forward(*args, **kwargs)
        number, leaves = len(self.record.calls), tree_leaves((args, kwargs))
        call, positions, passed = LayerCall(layer, {}), dict[int, int](), set[int]()
        for position, leaf in enumerate(leaves):
            first = positions.setdefault(id(leaf), position)
            if isinstance(leaf, torch.Tensor):
                self._use(leaf, number + 1)
                if first == position and id(leaf) in self._lives:
                    call.passed[position] = Value.of(leaf)
                    passed.add(id(leaf))
        self._in_layer = True
        try:
            output = forward(*args, **kwargs)
        except Exception:  # an operation needs values, such as the tokens of an expert, or has no shape function
            like = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), None)
            if like is None:
                raise
            call.is_assumed, output = True, like.clone()
        finally:
            self._in_layer = False
        outputs, structure = tree_flatten(output)
        self.record.calls.append(call)
        self._arguments.append(passed)
        for index, leaf in enumerate(outputs):
            if id(leaf) in positions and not isinstance(leaf, bool | int | float | str | None):
                call.outputs.append(Argument(positions[id(leaf)]))
            elif isinstance(leaf, torch.Tensor):
                outputs[index] = leaf if isinstance(leaf, FakeTensor) else own_mode().from_tensor(leaf)
                self._add(outputs[index], number + 1)
                call.outputs.append(Value.of(outputs[index]))
            else:
                call.outputs.append(leaf)
        call.structure = structure
        return tree_unflatten(outputs, structure)

    def finish(self, output: Any) -> Record:
        """Returns the record of the forward that has returned a value."""
        record, outputs = self.record, tensors_of(output)
        for value in outputs:
            self._use(value, len(record.calls))
        for key, (born, used) in self._lives.items():
            numbers = range(born, min(used, len(record.calls)))
            record.lost.update(number for number in numbers if key not in self._arguments[number])
        record.outputs = tuple(map(Value.of, outputs))
        return record


def tensors_of(output: Any) -> tuple[torch.Tensor, ...]:
    """Returns the tensors that the last stage returns for a model's output.

    Of an output of Hugging Face's models, these are ``loss`` if there is one, and ``logits``; without logits, the first
    tensor. Of a tuple, all that is not None.
    """
    if isinstance(output, Mapping):
        named = [output.get(name) for name in ("loss", "logits")]
        found = [value for value in named if isinstance(value, torch.Tensor)]
        output = found or [value for value in output.values() if isinstance(value, torch.Tensor)][:1]
    values = output if isinstance(output, list | tuple) else (output,)
    found = [value for value in values if value is not None]
    for value in found:
        if not isinstance(value, torch.Tensor):
            raise UsageError(f"it returns a {type(value).__name__}, expected tensors")
    return tuple(found)


class _Current(threading.local):
    run: Any = None


current = _Current()
"""The thread's ``Recording``, or its forward of a stage. Its ``call`` takes the calls of layers without memory."""


@contextmanager
def running(run: Any) -> Iterator[None]:
    """Context in which layers report their calls to a run."""
    outer, current.run = current.run, run
    try:
        yield
    finally:
        current.run = outer


def stand_in(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Forward of a layer without memory."""
    return current.run.call(name, forward, args, kwargs)
