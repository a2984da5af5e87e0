"""Loads a model in shapes only, and records the activations that autograd saves in its example call."""

from __future__ import annotations

import copy
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
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from shardwell.planning.activations import SavedActivations, recording
from shardwell.wrapping.auto_wrap import choose_units
from shardwell_wire.errors import UsageError


class ShapeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A mode in which operations compute shapes only. Values of real tensors are not read.

    Attributes:
        before_operation: Called before each operation.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.before_operation: Callable[[], None] = lambda: None

    def __torch_dispatch__(self, *args: Any, **kwargs: Any) -> Any:
        self.before_operation()
        return super().__torch_dispatch__(*args, **kwargs)


@dataclass(frozen=True)
class ShapeModel:
    """A model whose tensors have shapes and no memory."""

    module: nn.Module
    mode: ShapeMode
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
    mode = ShapeMode()
    sizes = {"batch": batch, "length": length}
    with mode, _default_dtype(dtype):
        if callable(target):
            made = _call(target, getattr(target, "__qualname__", repr(target)), sizes)
        elif ":" in target:
            made = _call(_imported(target), target, sizes)
        else:
            made = _from_config(Path(target), sizes, dtype)
        model, arguments, keywords = made
        if any(not isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            model = copy.deepcopy(model)  # the callable has returned a model in use, which a dry run must not change
    return ShapeModel(model, mode, arguments, keywords)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def record_activations(
    shapes: ShapeModel, *, received: Iterable[torch.Tensor] = ()
) -> tuple[SavedActivations | None, str]:
    """Records what autograd saves in one call in training.

    Args:
        shapes: The model, or a stage of it.
        received: Arguments of the call that are not counted.

    Returns:
        The activations, and if they are unknown the reason.
    """
    if not shapes.arguments and not shapes.keywords:
        return None, "there is no example call"
    chosen = [module for unit in choose_units(shapes.module) for module in unit.modules.values()]
    inside = {id(part) for module in chosen for part in module.modules() if part is not module}
    outermost = [module for module in chosen if id(module) not in inside]
    try:
        with shapes.mode, recording(shapes.module, outermost, received) as recorder:
            output = shapes.module.train()(*shapes.arguments, **shapes.keywords)
    except Exception as error:  # a user's forward may raise anything if it needs a value
        message = str(error).strip().partition("\n")[0]
        return None, f"the example call on shapes raised {type(error).__name__}: {message}"
    outputs = tuple(value for value in tree_leaves(output) if isinstance(value, torch.Tensor))
    return SavedActivations(tuple(recorder.regions), outputs), ""


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
