"""Proves on a model's dataflow that one tensor-parallel rank computes its part of the model.

``trace`` runs the forward without values, once whole and once as one rank runs it, and follows which tensors are whole
and which are parts. Both runs must make the same operations over the same sizes. See Note: [Proof of a plan].

Note: [Proof of a plan]
    Layers that are split by columns turn whole values into parts (heads of the attention, or features of the MLP), and
    layers that are split by rows turn parts into whole values. Torch's styles reduce the gradients at these borders.
    The rest follows from the operations between them:

    - The rank's run has no error, so its shapes fit.
    - An operation that reduces or contracts a dimension has the same size in both runs. It never sums over the split
      dimension, as a norm over all heads would.
    - A whole tensor that meets a part has the same shape in both runs, or is a constant that does not depend on the
      position of the head. It is not a slice, such as the slopes of the first heads.
    - A parameter that meets parts only has a gradient that is a sum over the ranks. One that meets whole values only
      has the same gradient on all ranks. A parameter that meets both is refused, and so are other whole activations
      that meet parts: their gradients would be sums that nothing adds up.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardwell_wire.errors import UsageError

SEQUENCE_DIM = 1
"""Dimension of activations along the sequence: ``[batch, length, width]``."""


@dataclass(slots=True)
class SplitRoles:
    """What a plan does with the modules of a model, by their names in the model."""

    tp: int
    columns: list[str] = field(default_factory=list)
    """Linear layers that are split by columns."""
    rows: list[str] = field(default_factory=list)
    """Linear layers that are split by rows."""
    vocabulary: list[str] = field(default_factory=list)
    """The token embedding and the head, if they are split."""
    heads: list[tuple[nn.Module, str]] = field(default_factory=list)
    """``(module, attribute)`` of numbers that are divided by ``tp``."""
    norms: list[str] = field(default_factory=list)
    """Norms in the blocks and after them."""
    sequence_from: str = ""
    """The block whose input is cut along the sequence. Empty: the sequence is not split."""
    gathered: frozenset[str] = frozenset()
    """Norms that gather the sequence for layers that are split by columns."""
    gathered_locally: str = ""
    """The norm that gathers the sequence for any other module."""


@dataclass(slots=True)
class Dataflow:
    """What one run has found."""

    feeding: dict[str, str] = field(default_factory=dict)
    """The norm whose output is the input of a split layer, by the layer's name. Empty: another value is the input."""
    partial: dict[str, str] = field(default_factory=dict)
    """Name of the module that holds the parameter, by the names of the parameters whose gradients are sums over the
    ranks."""
    operations: list[_Operation] = field(default_factory=list)


def trace(model: nn.Module, roles: SplitRoles, example: Example, whole: Dataflow | None = None) -> Dataflow:
    """Runs the forward of a whole model, or of one tensor-parallel rank, without values.

    The model is unchanged afterwards.

    Args:
        roles: What the plan does with the modules.
        example: Arguments of the call.
        whole: The run of the whole model. None: this is that run.

    Raises:
        UsageError: The rank does not compute its part of the model, or this cannot be proved.
    """
    flow = _Flow(model, roles, whole)
    with _unchanged(model), _quiet(), torch.no_grad(), example.mode, example.device, flow:
        flow.patch()
        try:
            output = model(*example.arguments, **example.keywords)
        except UsageError:
            raise
        except Exception as error:  # runs the user's modules
            if whole is None:
                raise
            reason = str(error).partition("\n")[0]
            raise UsageError(
                f"{flow.module!r} fails with the part of one rank ({type(error).__name__}: {reason})"
            ) from error
        flow.finish(output)
    return flow.found


@dataclass(frozen=True, slots=True)
class Example:
    """Arguments of one call of a model, without values."""

    mode: FakeTensorMode
    device: AbstractContextManager[Any]
    """Context in which new tensors are on the model's device."""
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


BATCH = 3


def examples(model: nn.Module, tp: int, given: Any = None) -> Iterator[Example]:
    """Yields examples with which a model may be called: the given one, or token ids of a few lengths.

    Args:
        tp: Number of tensor-parallel ranks.
        given: A tensor, or a tuple of positional or a dict of keyword arguments. None: not known.
    """
    parameter = next(model.parameters())
    mode = parameter.fake_mode if isinstance(parameter, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    device = parameter.device

    def made(*arguments: Any, **keywords: Any) -> Example:
        def fake(value: torch.Tensor) -> torch.Tensor:
            with mode:
                return torch.empty(value.shape, dtype=value.dtype, device=device)

        arguments, keywords = tree_map_only(torch.Tensor, fake, (arguments, keywords))
        return Example(mode, torch.device(device) if device.type != "cpu" else nullcontext(), arguments, keywords)

    if isinstance(given, Mapping):
        yield made(**given)
    elif given is not None:
        yield made(*(given if isinstance(given, tuple) else (given,)))
    elif getattr(model, "main_input_name", "") == "pixel_values":  # Hugging Face
        config: Any = model.config
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        pixels = torch.empty(BATCH, config.num_channels, *size, device="meta", dtype=parameter.dtype)
        yield made(pixel_values=pixels)
    else:
        for length in (2 * tp, tp):  # the longer one fails if the model has a short context
            yield made(torch.empty(BATCH, length, dtype=torch.int64, device="meta"))


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores what a run writes into the attributes, buffers and hooks of modules."""
    modules = list(model.modules())
    before = [vars(module).copy() for module in modules]
    contents = [
        (value, value.copy()) for attributes in before for value in attributes.values() if isinstance(value, dict)
    ]
    try:
        yield
    finally:
        for module, attributes in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
        for value, former in contents:
            value.clear()
            value.update(former)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's report of an operation that does not fit, which becomes an error here."""
    log = logging.getLogger(FakeTensorMode.__module__)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


class _Kind(enum.Enum):
    WHOLE = "a value that every rank holds whole"
    HEADS = "a part of the heads or features"
    SEQUENCE = "a part of the sequence"
    GATHERED = "the gathered output of a norm"


_ACTIVATION = ""
"""A source that is no parameter: the gradient goes on to other layers."""


@dataclass(frozen=True, slots=True)
class _Label:
    kind: _Kind = _Kind.WHOLE
    sources: frozenset[str] = frozenset()
    """Parameters from which a whole value is computed, and ``_ACTIVATION`` if their gradients are known to be whole."""
    norm: str = ""
    """The norm whose output this is."""
    depends_on_rank: bool = False
    """Whether a whole value may have other values in another rank: it is computed from the number of heads."""


@dataclass(frozen=True, slots=True)
class _Operation:
    name: str
    module: str
    size: int
    """Number of elements that the operation adds up or compares for an element of its result. 0: one."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of inputs and outputs."""


class _Flow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the parts through the operations of one run."""

    def __init__(self, model: nn.Module, roles: SplitRoles, whole: Dataflow | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Dataflow()
        self._model, self._roles, self._whole = model, roles, whole
        self._tp = 1 if whole is None else roles.tp
        self._named = dict(model.named_modules())
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._split = {
            id(parameter): name
            for name in (*roles.columns, *roles.rows, *roles.vocabulary)
            for parameter in self._named[name].parameters()
        }
        self._owners: dict[str, set[str]] = {}
        for owner, module in self._named.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(self._parameters[id(parameter)], set()).add(owner)
        self._labels: dict[int, _Label] = {}
        self._alive: list[torch.Tensor] = []
        self._stack: list[str] = []
        self._used_outside: dict[str, str] = {}
        """The calling module, by the names of parameters that are used outside of their own module's forward."""
        self._used_whole: set[str] = set()
        self._is_paused = False

    def patch(self) -> None:
        """Replaces the forwards of split layers, and divides the numbers of heads."""
        roles, split = self._roles, self._whole is not None and bool(self._roles.sequence_from)
        for name, module in self._named.items():
            module._compiled_call_impl = None  # of `module.compile()`, which would compile the run
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            module.register_forward_hook(self._leave)
        for name in roles.norms:
            self._named[name].register_forward_hook(partial(self._note_norm, name))
        for names, border in (
            (roles.columns, self._column),
            (roles.rows, self._row),
            (roles.vocabulary, self._vocabulary),
        ):
            for name in names:
                self._named[name].forward = partial(border, name, self._named[name])
        if split:
            self._named[roles.sequence_from].register_forward_pre_hook(self._cut)
            for name in {*roles.gathered, roles.gathered_locally} - {""}:
                self._named[name].register_forward_hook(partial(self._gather, name))
        for holder, attribute in roles.heads if self._whole is not None else ():
            setattr(holder, attribute, getattr(holder, attribute) // self._tp)

    # Hooks and borders

    def _enter(self, name: str, *_: Any) -> None:
        self._stack.append(name)

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def _note_norm(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self._set(output, replace(self._label(output), norm=name))

    def _column(self, name: str, layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        self._require_whole(name, value)
        return self._border(value, (*value.shape[:-1], layer.out_features // self._tp), _Kind.HEADS)

    def _row(self, name: str, layer: nn.Linear, value: torch.Tensor) -> torch.Tensor:
        kind, width = self._label(value).kind, layer.in_features // self._tp
        if kind is not _Kind.HEADS or value.shape[-1] != width:
            raise UsageError(
                f"{name!r} is split by columns of its weight and needs the part of one rank, {width} features of the "
                f"layers before it, but its input is {kind.value} with {value.shape[-1]} features"
            )
        shape, output = (*value.shape[:-1], layer.out_features), _Kind.WHOLE
        if self._whole is not None and self._roles.sequence_from:
            shape, output = self._part_of(name, shape), _Kind.SEQUENCE
        return self._border(value, shape, output)

    def _vocabulary(self, name: str, layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
        self._require_whole(name, value)
        if isinstance(layer, nn.Embedding):
            return self._border(layer.weight, (*value.shape, layer.embedding_dim), _Kind.WHOLE)
        return self._border(value, (*value.shape[:-1], layer.out_features), _Kind.WHOLE)  # type: ignore[arg-type]

    def _require_whole(self, name: str, value: torch.Tensor) -> None:
        label = self._label(value)
        self.found.feeding[name] = label.norm
        if label.kind not in (_Kind.WHOLE, _Kind.GATHERED):
            raise UsageError(f"the input of {name!r} is {label.kind.value}, expected a whole value")
        self._use_whole(label.sources)

    def _cut(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        name = self._roles.sequence_from
        if not inputs or not isinstance(inputs[0], torch.Tensor) or inputs[0].dim() != 3:
            raise UsageError(f"{name!r} does not get [batch, length, width] as its first positional argument")
        self._use_whole(self._label(inputs[0]).sources)
        part = self._border(inputs[0], self._part_of(name, inputs[0].shape), _Kind.SEQUENCE)
        return (part, *inputs[1:])

    def _gather(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        kind = self._label(output).kind
        if kind is not _Kind.SEQUENCE:
            raise UsageError(f"the input of the norm {name!r} is {kind.value}, expected a part of the sequence")
        shape = list(output.shape)
        shape[SEQUENCE_DIM] *= self._tp
        whole = self._border(
            output, tuple(shape), _Kind.WHOLE if name == self._roles.gathered_locally else _Kind.GATHERED
        )
        self._set(whole, replace(self._label(whole), norm=name))
        return whole

    def _part_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        parts = list(shape)
        if len(parts) != 3 or parts[SEQUENCE_DIM] % self._tp:
            raise UsageError(
                f"tp={self._tp} does not divide the length {parts[SEQUENCE_DIM]} of the sequence at {name!r}"
                if len(parts) == 3
                else f"values at {name!r} have the shape {parts}, expected [batch, length, width]"
            )
        parts[SEQUENCE_DIM] //= self._tp
        return tuple(parts)

    def _border(self, like: torch.Tensor, shape: Sequence[int], kind: _Kind) -> torch.Tensor:
        self._is_paused = True
        try:
            output = like.new_empty(tuple(shape))
        finally:
            self._is_paused = False
        self._set(output, _Label(kind, frozenset() if kind is _Kind.HEADS else frozenset({_ACTIVATION})))
        return output

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        labels = [self._label_of_input(value) for value in inputs]
        result = func(*args, **kwargs)
        outputs = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        name = func.overloadpacket.__name__
        size = _reduced_size(name, args, kwargs, inputs, outputs)
        shapes = tuple(tuple(value.shape) for value in (*inputs, *outputs))
        operation = _Operation(name, self.module, size, shapes)
        if name not in _COPIES:
            self._compare(operation)
            self.found.operations.append(operation)
        label = self._join(operation, inputs, labels, outputs)
        memory = set(map(_key, inputs))
        for output in outputs:
            if func._schema.is_mutable or _key(output) not in memory or _key(output) not in self._labels:
                self._set(output, label)  # otherwise it is a view, and has the label of its base
        return result

    def _join(
        self,
        operation: _Operation,
        inputs: Sequence[torch.Tensor],
        labels: Sequence[_Label],
        outputs: Sequence[torch.Tensor],
    ) -> _Label:
        kinds = {label.kind for label in labels} - {_Kind.WHOLE}
        if _Kind.GATHERED in kinds and any(_key(output) not in set(map(_key, inputs)) for output in outputs):
            norm = next(label.norm for label in labels if label.kind is _Kind.GATHERED)
            raise UsageError(
                f"the output of the norm {norm!r} is used in {self.module!r} ({operation.name}), but it is gathered "
                "for layers that are split by columns only"
            )
        if len(kinds) > 1:
            found = " and ".join(sorted(kind.value for kind in kinds))
            raise UsageError(f"an operation in {self.module!r} ({operation.name}) joins {found}")
        whole = [label for label in labels if label.kind is _Kind.WHOLE]
        sources = frozenset[str]().union(*(label.sources for label in whole))
        depends = any(label.depends_on_rank for label in whole)
        if not kinds:
            if _ACTIVATION in sources:
                self._use_whole(sources)
                sources = frozenset({_ACTIVATION})
            depends = depends or self._is_new_dependence(operation, inputs, labels)
            return _Label(_Kind.WHOLE, sources, depends_on_rank=depends)
        (kind,) = kinds
        if depends:
            raise UsageError(
                f"an operation in {self.module!r} ({operation.name}) joins {kind.value} with a value that is computed "
                "from the number of heads or positions of one rank, such as the slopes of a position bias"
            )
        if _ACTIVATION in sources:
            raise UsageError(
                f"an operation in {self.module!r} ({operation.name}) joins {kind.value} with an activation that every "
                "rank holds whole, whose gradient would differ between the ranks"
            )
        for name in sources:
            self.found.partial[name] = next(iter(self._owners[name]))
        return _Label(kind)

    def _is_new_dependence(
        self, operation: _Operation, inputs: Sequence[torch.Tensor], labels: Sequence[_Label]
    ) -> bool:
        """Returns whether a whole result may depend on the rank, although the inputs do not."""
        if self._whole is None or operation.name in _FILLS or operation.name in _COPIES:
            return False
        former = self._whole.operations[len(self.found.operations) - 1].shapes
        if former == operation.shapes:
            return False
        return former[: len(inputs)] == operation.shapes[: len(inputs)]  # else it follows from an equal fill

    def _compare(self, operation: _Operation) -> None:
        """Compares an operation with the same one of the whole model's run."""
        if self._whole is None:
            return
        number = len(self.found.operations)
        expected = self._whole.operations[number] if number < len(self._whole.operations) else None
        if expected is None or expected.name != operation.name:
            raise UsageError(
                f"with divided heads, {self.module!r} makes other operations ({operation.name} instead of "
                f"{'none' if expected is None else expected.name}): it computes each head by operations or parameters "
                "of its own"
            )
        if expected.size != operation.size:
            raise UsageError(
                f"{operation.name} in {self.module!r} works over {expected.size} values together, but one rank has "
                f"{operation.size} of them, such as in a norm over all heads"
            )

    def _label_of_input(self, value: torch.Tensor) -> _Label:
        name = self._parameters.get(id(value))
        if name is None:
            return self._label(value)
        if id(value) in self._split:
            raise UsageError(
                f"the parameter {name!r} is split, but {self.module!r} uses it outside of the forward of "
                f"{self._split[id(value)]!r}"
            )
        if not self._owners[name].intersection(self._stack):
            self._used_outside[name] = self.module
        return _Label(_Kind.WHOLE, frozenset({name}) if value.requires_grad else frozenset())

    def _use_whole(self, sources: frozenset[str]) -> None:
        self._used_whole |= sources - {_ACTIVATION}

    def finish(self, output: Any) -> None:
        """Checks the outputs of the model, and all parameters."""
        for value in (leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor)):
            label = self._label(value)
            if label.kind not in (_Kind.WHOLE, _Kind.GATHERED):
                raise UsageError(f"an output of the model is {label.kind.value}")
            self._use_whole(label.sources)
        for name in self.found.partial:
            if name in self._used_whole:
                raise UsageError(
                    f"the parameter {name!r} is used with whole values and with parts: its gradient on a rank is "
                    "neither whole nor a summand"
                )
            if name in self._used_outside or len(self._owners[name]) != 1:
                user = self._used_outside.get(name, "another module")
                raise UsageError(
                    f"the gradient of the parameter {name!r} is a sum over the ranks, which needs one module that "
                    f"holds it and uses it in its own forward, but {user!r} uses it"
                )
        if self._whole is not None and len(self.found.operations) != len(self._whole.operations):
            raise UsageError("with divided heads, the forward makes fewer operations")
        if missing := [
            name for name in (*self._roles.columns, *self._roles.vocabulary) if name not in self.found.feeding
        ]:
            raise UsageError(f"the forward does not call {missing[0]!r}")

    @property
    def module(self) -> str:
        """Name of the module whose forward runs."""
        return (self._stack and self._stack[-1]) or type(self._model).__name__

    def _label(self, value: torch.Tensor) -> _Label:
        name = self._parameters.get(id(value))
        if name is not None:
            return _Label(_Kind.WHOLE, frozenset({name}))
        return self._labels.get(_key(value), _Label())

    def _set(self, value: torch.Tensor, label: _Label) -> None:
        self._alive.append(value)  # memory of a freed tensor would be used again, with its label
        self._labels[_key(value)] = label


_COPIES = {
    "view",
    "_unsafe_view",
    "reshape",
    "expand",
    "clone",
    "alias",
    "detach",
    "lift_fresh",
    "device",
    "contiguous",
}
"""Operations that one run may need and the other may not, because of the memory layout. They compute nothing."""

_FILLS = {"empty", "zeros", "ones", "full", "scalar_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "repeat"}
_FILLS |= {"empty_like", "zeros_like", "ones_like", "full_like", "empty_strided", "new_empty_strided", "fill", "fill_"}
"""Operations whose results have equal values along dimensions that differ in size between the runs."""

_CONTRACTIONS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addbmm": 1, "addmv": 1}
"""Position of the input whose last dimension is contracted."""

_ALONG_DIM = {
    "_softmax",
    "_log_softmax",
    "_safe_softmax",
    "cumsum",
    "cumprod",
    "sort",
    "topk",
    "logcumsumexp",
    "flip",
    "roll",
}


def _reduced_size(
    name: str, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
) -> int:
    """Returns how many elements an operation adds up or compares for one element of its result. 0: one."""
    if name in _CONTRACTIONS:
        return int(inputs[_CONTRACTIONS[name]].shape[-1])
    if "scaled_dot_product" in name:
        return inputs[0].shape[-1]
    if name in _ALONG_DIM and inputs[0].dim():
        dim = kwargs.get("dim", next((value for value in args[1:] if isinstance(value, int)), -1))
        return int(inputs[0].shape[dim])
    if "layer_norm" in name or "rms_norm" in name:
        sizes = next(value for value in args[1:] if isinstance(value, (list, tuple)))
        return int(prod(sizes))
    if name in _REDUCTIONS and outputs and outputs[0].numel():
        return inputs[0].numel() // outputs[0].numel()
    return 0


_REDUCTIONS = {
    "mean",
    "sum",
    "var",
    "var_mean",
    "std",
    "amax",
    "amin",
    "max",
    "min",
    "prod",
    "norm",
    "logsumexp",
    "any",
}
_REDUCTIONS |= {"linalg_vector_norm", "argmax", "argmin", "all", "aminmax", "std_mean"}


def _key(value: torch.Tensor) -> int:
    """Identifies the memory of a tensor: views have the label of what they are views of."""
    return int(value.untyped_storage()._cdata)


def _leaves(output: Any) -> list[Any]:
    if isinstance(output, Mapping):  # Hugging Face's outputs, whether or not torch knows them as trees
        return [leaf for value in output.values() for leaf in _leaves(value)]
    return tree_leaves(output)
