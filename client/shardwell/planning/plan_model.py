"""Loads a model in shapes only, and finds the units of ``auto_wrap`` and the activations that autograd saves."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwell.module.fully_shard import collect_parameters
from shardwell.module.naming import GridPlace
from shardwell.module.naming import plan_units as plan_call
from shardwell.planning.activations import SavedActivations, recording
from shardwell.planning.rehearsal import PlannedCall, PlannedUnit
from shardwell.wrapping.auto_wrap import ChosenUnit, choose_units
from shardwell.wrapping.policies import WrapPolicy, supports_recomputation
from shardwell_wire.errors import UsageError
from shardwell_wire.model.layout import UnitLayout


@dataclass(frozen=True)
class ShapeModel:
    """A model whose tensors have shapes and no memory."""

    module: nn.Module
    mode: FakeTensorMode
    arguments: tuple[Any, ...] = ()
    """Arguments of an example call."""
    keywords: Mapping[str, Any] = field(default_factory=dict)


def load(target: str | Callable[..., Any], *, batch: int, length: int, dtype: torch.dtype | None = None) -> ShapeModel:
    """Builds a model without allocating its memory.

    Args:
        target: A callable, or ``module:callable``, which returns the model, ``(model, args)`` or
            ``(model, args, kwargs)`` with the tuple and the dict of an example call, or ``(model, tensor, ...)``.
            ``batch`` and ``length`` are passed if the callable has parameters with these names. Or the path of a
            Hugging Face ``config.json`` or its folder.
        batch: Sequences of the example call.
        length: Tokens per sequence.
        dtype: Default dtype of parameters; None: the default of torch or the config.

    Raises:
        UsageError: The target does not exist, or the model cannot be built without values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    sizes = {"batch": batch, "length": length}
    with mode, _default_dtype(dtype):
        if callable(target):
            made = _call(target, getattr(target, "__qualname__", repr(target)), sizes)
        elif ":" in target:
            made = _call(_imported(target), target, sizes)
        else:
            made = _from_config(Path(target), sizes, dtype)
    model, arguments, keywords = made
    return ShapeModel(model, mode, arguments, keywords)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def plan_units(
    model: nn.Module, policy: WrapPolicy | None = None, *, place: GridPlace | None = None
) -> list[PlannedUnit]:
    """Returns the units that ``auto_wrap(model, session, policy)`` would make, in that order.

    Args:
        model: The model, or a stage of it.
        policy: As in ``auto_wrap``.
        place: Place of the trainer on the pipeline axis, before tensor parallelism divides the model. None: the model
            is one stage.

    Raises:
        TiedParameterError: Stages of one trainer share a parameter.
    """
    place = place or GridPlace()
    root = ChosenUnit(place.root_name(type(model).__name__), {"": model})
    taken: list[nn.Parameter] = []
    made: list[tuple[ChosenUnit, UnitLayout]] = []
    for unit in [*choose_units(model, policy), root]:
        prefixes = [f"{name}." if name else "" for name in unit.modules]
        found = collect_parameters(list(unit.modules.values()), prefixes, taken)
        taken += [entry.parameter for entry in found]
        made += [(unit, planned.layout) for planned in plan_call(unit.name, found, "flat", place)]
    call = _calls(model, policy)
    return [
        PlannedUnit(
            layout,
            outer_units=tuple(outer.unit for other, outer in made if _contains(other, unit)),
            calls=tuple(call(name, module) for name, module in unit.modules.items()),
        )
        for unit, layout in made
    ]


def _contains(outer: ChosenUnit, inner: ChosenUnit) -> bool:
    """Whether a module of one unit contains a module of another unit."""
    return outer is not inner and any(
        not module or name.startswith(f"{module}.") for module in outer.modules for name in inner.modules
    )


def _calls(model: nn.Module, policy: WrapPolicy | None) -> Callable[[str, nn.Module], PlannedCall]:
    positions = {id(module): position for position, module in enumerate(model.modules())}
    recomputed = {id(module) for module in _outermost(model, policy).values() if supports_recomputation(module)}
    return lambda name, module: PlannedCall(positions[id(module)], name, id(module) in recomputed)


def _outermost(model: nn.Module, policy: WrapPolicy | None) -> dict[str, nn.Module]:
    """Returns the modules of units that are inside no other unit except the root."""
    chosen = {name: module for unit in choose_units(model, policy) for name, module in unit.modules.items()}
    inside = {id(part) for module in chosen.values() for part in module.modules() if part is not module}
    return {name: module for name, module in chosen.items() if id(module) not in inside}


@dataclass(frozen=True, slots=True)
class NotRecorded:
    """The activations are unknown."""

    reason: str


def record_activations(shapes: ShapeModel, *, received: Iterable[torch.Tensor] = ()) -> SavedActivations | NotRecorded:
    """Records what autograd saves in one call in training.

    Args:
        shapes: The model, or a stage of it.
        received: Arguments of the call that are not counted.
    """
    if not shapes.arguments and not shapes.keywords:
        return NotRecorded("there is no example call")
    try:
        with shapes.mode, recording(shapes.module, _outermost(shapes.module, None), received) as recorder:
            output = shapes.module.train()(*shapes.arguments, **shapes.keywords)
    except Exception as error:  # a user's forward may raise anything if it needs a value
        message = str(error).strip().partition("\n")[0]
        return NotRecorded(f"the example call on shapes raised {type(error).__name__}: {message}")
    outputs = tuple(value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
    return SavedActivations(tuple(recorder.regions), outputs)


_Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def _imported(target: str) -> Callable[..., Any]:
    module_name, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does
    if module_name.endswith(".py"):
        raise UsageError(f"{target!r}: expected the module's name, {module_name[:-3].replace('/', '.')}:{name}")
    with _locating_errors(f"{target!r}: cannot import {module_name}"):
        module = importlib.import_module(module_name)
    function: Callable[..., Any] | None = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{target!r}: {module_name} has no function {name!r} that makes a model")
    return function


def _call(function: Callable[..., Any], target: str, sizes: Mapping[str, int]) -> _Made:
    signature = inspect.signature(function)
    keywords = {key: value for key, value in sizes.items() if key in signature.parameters}
    try:
        signature.bind(**keywords)
    except TypeError as error:
        raise UsageError(f"{target!r}: {error}; only the parameters batch and length are passed") from None
    with _locating_errors(f"{target!r}: {target.rpartition(':')[2]} failed"):
        made = function(**keywords)
    model, *call = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{target!r} returned {type(model).__name__}, expected a module, or a tuple of a module and its arguments"
        )
    return model, *_split_call(call)


def _split_call(call: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns positional and keyword arguments of ``args``, ``args, kwargs``, or separate arguments."""
    match call:
        case [tuple() | list() as arguments]:
            return tuple(arguments), {}
        case [dict() as keywords]:
            return (), keywords
        case [tuple() | list() as arguments, dict() as keywords]:
            return tuple(arguments), keywords
    return tuple(call), {}


@contextmanager
def _locating_errors(action: str) -> Iterator[None]:
    """Context that adds the location in the user's code to errors."""
    try:
        yield
    except Exception as error:
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        raise UsageError(f"{action}: {type(error).__name__}: {error}{where}") from error


def _is_users(filename: str) -> bool:
    libraries = ("<", __file__, str(Path(inspect.__file__).parent))
    return not filename.startswith(libraries) and "site-packages" not in filename


def _from_config(path: Path, sizes: Mapping[str, int], dtype: torch.dtype | None) -> _Made:
    if not path.exists():
        raise UsageError(f"{path}: no such file; expected module:callable, or the path of a Hugging Face config.json")
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError("a Hugging Face config needs the package transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path}: {error}") from error
    config.use_cache = False
    if dtype is not None:
        config.dtype = dtype
    named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    model = (named._from_config if named else transformers.AutoModelForCausalLM.from_config)(config)
    tokens = torch.zeros(sizes["batch"], sizes["length"], dtype=torch.long)
    return model, (), {"input_ids": tokens, "labels": tokens} if "CausalLM" in type(model).__name__ else {}
