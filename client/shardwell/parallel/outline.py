"""The layers of a model, the order in which its forward calls them, and the stages that hold them.

``find_parts`` finds the layers of a model and the modules around them. ``Outline`` is a copy of the model without
memory, whose forward tells the order of the calls and what crosses each cut.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from shardwell.module.guards import has_forward
from shardwell.parallel.forward_records import Record, Recording, Value, own_mode, running, stand_in
from shardwell_wire.errors import UsageError

_torchs_logger = logging.getLogger("torch._subclasses.fake_tensor")
"""Logs the operations that raise an error without values."""

_MAX_RECORDS = 64
"""Sizes of inputs whose forward is remembered."""

Names = Mapping[str, nn.Module]


def find_parts(model: nn.Module, blocks: Names) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Returns the layers of a model and the modules around them, by name and in the model's order.

    A layer belongs to stages as a whole. Layers are the blocks, and the modules beside them that have parameters or
    persistent buffers. In a model without blocks, sequences are divided into the modules in them.

    Args:
        blocks: The repeated blocks by name.
    """
    inner = {id(block) for block in blocks.values()}
    layers: dict[str, nn.Module] = {}
    around = {"": model}
    seen = {id(model)}

    def is_around(module: nn.Module) -> bool:
        if id(module) in inner:
            return False
        if not has_forward(module) or (not inner and isinstance(module, nn.Sequential)):
            return True
        return any(id(part) in inner for part in module.modules())

    def walk(module: nn.Module, prefix: str) -> None:
        for name, child in module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            if is_around(child):
                around[prefix + name] = child
                walk(child, f"{prefix}{name}.")
            elif _is_stored(child):
                layers[prefix + name] = child

    walk(model, "")
    return layers, around


def _is_stored(module: nn.Module) -> bool:
    """Returns whether a module has parameters or buffers that the run stores."""
    if any(True for _ in module.parameters()):
        return True
    return any(part._buffers.keys() - part._non_persistent_buffers_set for part in module.modules())


class Outline:
    """A model without memory: the order of its layers' calls, and what a stage receives.

    Attributes:
        starts: Names of the layers with which stages 1, 2, ... begin.
        stages: The stages that hold each layer, and each parameter of the modules around layers.
        num_inputs: Number of positional arguments of the model's forward. None: not known yet.

    Args:
        model: The model. Not kept.
        around: The modules around them by name.

    Raises:
        UsageError: The model cannot be copied.
    """

    def __init__(self, model: nn.Module, layers: Names, around: Names) -> None:
        self._class_name = type(model).__name__
        if "forward" in vars(model):
            raise UsageError(
                f"{self._class_name} has a forward of its own instance: split the model before wrapping it"
            )
        self.starts: list[str] = []
        self.stages: dict[str, set[int]] = {}
        self.num_inputs: int | None = None
        self._around = list(around)
        tensors = [*model.parameters(), *model.buffers()]
        memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for tensor in tensors}
        try:
            self._model = copy.deepcopy(model, memo)
        except Exception as error:  # an attribute of the user's model
            raise UsageError(f"{self._class_name} cannot be copied: {error}. {_BY_HAND}") from error
        for part in self._model.modules():
            part._forward_hooks, part._forward_pre_hooks = OrderedDict(), OrderedDict()
        self._layers = {name: self._model.get_submodule(name) for name in layers}
        inside = [set(map(id, layer.modules())) - {id(layer)} for layer in self._layers.values()]
        self.nested = {name for name, layer in self._layers.items() if any(id(layer) in ids for ids in inside)}
        """Layers that are also inside another layer, whose calls are not observed there."""
        for name, layer in self._layers.items():
            layer.forward = partial(stand_in, name, layer.forward)
        self._blank = {id(part) for layer in self._layers.values() for part in layer.modules()}
        self._placed: tuple[object, ...] = ()
        self._names: dict[int, str] = {}
        self._records: dict[tuple[Any, ...], Record] = {}

    def get(self, name: str) -> nn.Module:
        """Returns a module of the copy, whose parameters have no values."""
        return self._model.get_submodule(name)

    def place(self, mode: FakeTensorMode, device: torch.device, dtype: torch.dtype | None) -> None:
        """Gives the parameters a device and a dtype. Buffers outside of layers are zeros.

        Args:
            mode: Mode of the tensors without values.
            dtype: Dtype of floating-point parameters. None: the model's.
        """
        if self._placed == (mode, device, dtype):
            return
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the id of the former tensor, which it keeps alive
        self._names.clear()
        for name, part in self._model.named_modules():
            for values in (part._parameters, part._buffers):
                for own, tensor in values.items():
                    if tensor is None:
                        continue
                    is_blank = values is part._parameters or id(part) in self._blank
                    if id(tensor) not in made:
                        made[id(tensor)] = tensor, _placed(tensor, mode if is_blank else None, device, dtype)
                    values[own] = made[id(tensor)][1]
                    if values is part._parameters:
                        self._names.setdefault(id(values[own]), f"{name}.{own}" if name else own)
        self._placed = mode, device, dtype

    def record(
        self,
        inputs: Sequence[Any],
        keywords: Mapping[str, Any],
        *,
        training: bool = True,
        dtype: torch.dtype | None = None,
    ) -> Record:
        """Returns what a forward does with inputs of these shapes. Computes no values of layers.

        Args:
            inputs: Positional arguments of the model's forward.
            keywords: Its keyword arguments.
            training: Whether the model is in training mode.
            dtype: Dtype of floating-point parameters. None: the model's.

        Raises:
            UsageError: The forward needs values of layers or random numbers to decide what to do, or it calls the
                layers in another order than that of the stages.
        """
        leaves, structure = tree_flatten((tuple(inputs), dict(keywords)))
        key = (str(structure), *map(_signature, leaves), training, dtype)
        if key not in self._records:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=[]):
                first = self._record(leaves, structure, training, dtype, fill=0)
                if first.draws:
                    other = self._record(leaves, structure, training, dtype, fill=1)
                    if [call.layer for call in first.calls] != [call.layer for call in other.calls]:
                        self._refuse("random numbers decide which layers it calls")
            self._check(first)
            if len(self._records) >= _MAX_RECORDS:
                del self._records[next(iter(self._records))]
            self._records[key] = first
        return self._records[key]

    def divide(self, starts: Sequence[str], record: Record | None) -> None:
        """Divides the layers into stages.

        A layer belongs to the stages that call it or read its parameters. A layer that the forward does not use belongs
        to the stage of the layer before it in the model.

        Args:
            starts: Names of the layers with which stages 1, 2, ... begin.
            record: What the forward does. None: it calls the layers in the order of their definition.
        """
        self.starts = list(starts)
        self.stages = {}
        if record is not None:
            cuts = self.cuts(record)
            for number, call in enumerate(record.calls):
                self.stages.setdefault(call.layer, set()).add(_stage_of(cuts, number, is_call=True))
            for name, number in record.reads:
                self.stages.setdefault(self.holder(name), set()).add(_stage_of(cuts, number, is_call=False))
        stage = 0
        for name in self._layers:
            if record is None:
                stage += name in self.starts
            stage = min(self.stages.setdefault(name, {stage}))
        for name in self._around:
            inside = [layer for layer in self._layers if layer.startswith(f"{name}." if name else "")]
            first = min(self.stages[inside[0]]) if inside else 0
            for own in self.get(name)._parameters:
                self.stages.setdefault(f"{name}.{own}" if name else own, {first})
        self._records.clear()
        if record is not None:
            self._check(record)

    def _record(
        self, leaves: Sequence[Any], structure: TreeSpec, training: bool, dtype: torch.dtype | None, *, fill: int
    ) -> Record:
        real = [_real(leaf) for leaf in leaves]
        device = next((leaf.device for leaf in real if isinstance(leaf, torch.Tensor)), torch.device("cpu"))
        self.place(own_mode(), device, dtype)
        self._model.train(training)
        inputs, keywords = tree_unflatten(real, structure)
        recording, was_disabled = Recording(self._names, fill), _torchs_logger.disabled
        _torchs_logger.disabled = True
        before = self._stored_buffers()
        try:
            with device, torch.enable_grad(), recording, running(recording):
                record = recording.finish(self._model(*inputs, **keywords))
            after = self._stored_buffers()
            record.changes = {name for name, state in before.items() if after.get(name) != state}
            return record
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            self._refuse("it decides by values that layers compute", error)
        except UsageError as error:
            self._refuse(str(error), error)
        except Exception as error:  # the user's forward
            self._refuse(f"{type(error).__name__}: {error}", error)
        finally:
            _torchs_logger.disabled = was_disabled

    def _stored_buffers(self) -> dict[str, tuple[int, int]]:
        """Returns identity and number of changes of each persistent buffer of the modules around the layers."""
        return {
            f"{name}.{own}" if name else own: (id(buffer), buffer._version)
            for name, part in [(name, self.get(name)) for name in self._around]
            for own, buffer in part._buffers.items()
            if buffer is not None and own not in part._non_persistent_buffers_set
        }

    def _refuse(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        raise UsageError(
            f"the forward of {self._class_name} cannot be divided into stages: {reason}. {_BY_HAND}"
        ) from cause

    def cuts(self, record: Record) -> list[int]:
        """Returns the number of the first call of each stage, and the number of calls."""
        numbers, next_number = [0], 0
        for start in self.starts:
            while next_number < len(record.calls) and record.calls[next_number].layer != start:
                next_number += 1
            numbers.append(next_number)
        return [*numbers, len(record.calls)]

    def _check(self, record: Record) -> None:
        """Raises UsageError unless the stages can run the forward."""
        if not self.stages:
            return
        if self.starts and record.changes:
            names = ", ".join(map(repr, sorted(record.changes)))
            self._refuse(
                f"it changes the buffer {names} outside of its layers, of which each stage would have a value of its "
                "own. Move the buffer, and the code that changes it, into a module that the forward calls"
            )
        cuts = self.cuts(record)
        for stage, (start, number) in enumerate(zip(self.starts, cuts[1:-1], strict=True), start=1):
            if number == len(record.calls):
                self._refuse(f"it does not call layer {start!r}, the first of stage {stage}, after the earlier layers")
            if number in record.lost:
                self._refuse(
                    f"before layer {start!r}, the first of stage {stage}, it computes a value that it uses afterwards "
                    "and that is no argument of this layer. Choose another first layer with starts=, or pass the value "
                    "to the layer"
                )
        for number, call in enumerate(record.calls):
            self._check_held(call.layer, _stage_of(cuts, number, is_call=True), "calls")
        for name, number in record.reads:
            self._check_held(self.holder(name), _stage_of(cuts, number, is_call=False), "reads")

    def _check_held(self, name: str, stage: int, verb: str) -> None:
        if stage not in self.stages[name]:
            raise UsageError(
                f"stage {stage} {verb} {name!r}, which is in stage "
                f"{', '.join(map(str, sorted(self.stages[name])))} because of its place in the model: pass "
                "split_model(..., example=) the arguments of the forward for one micro-batch, which tell its order"
            )

    def holder(self, parameter: str) -> str:
        """Returns the layer that holds a parameter; the parameter's name if no layer holds it."""
        name = parameter.rpartition(".")[0]
        while name and name not in self._layers:
            name = name.rpartition(".")[0]
        return name or parameter


_BY_HAND = "Change the forward, or build the stages by hand and pass them to shardwell.parallel.ModelSplit.from_modules"


def _stage_of(cuts: Sequence[int], number: int, *, is_call: bool) -> int:
    """Returns the stage of a call, or of what the forward does after a number of calls."""
    return sum(1 for cut in cuts[1:-1] if (cut <= number if is_call else cut < number))


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _placed(
    tensor: torch.Tensor, mode: FakeTensorMode | None, device: torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    kind = tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
    with mode or nullcontext():
        made = torch.zeros(tensor.shape, dtype=kind, device=device)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def _real(leaf: Any) -> Any:
    """Returns an input with values, which may be zeros."""
    if isinstance(leaf, torch.Tensor) and (leaf.is_meta or isinstance(leaf, FakeTensor)):
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu" if leaf.is_meta else leaf.device)
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype, "cpu" if leaf.is_meta else str(leaf.device)
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)


def stage_examples(
    outline: Outline, inputs: Sequence[torch.Tensor], keywords: Mapping[str, torch.Tensor], training: bool
) -> list[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]:
    """Returns what every stage gets and returns for a micro-batch, as tensors on the meta device.

    Args:
        outline: The model without memory.
        inputs: Positional arguments of the model's forward. Only shapes and dtypes are used.
        keywords: Its keyword arguments.
        training: Whether the model is in training mode.

    Raises:
        UsageError: The forward cannot be divided into the stages.
    """
    record = outline.record(tuple(inputs), dict(keywords), training=training)
    outline.num_inputs = len(inputs)
    own = tuple(Value.of(value).on_meta() for value in inputs)
    crossing = [own]
    for number in outline.cuts(record)[1:-1]:
        crossing.append((*(value.on_meta() for value in record.calls[number].passed.values()), *own))
    crossing.append(tuple(value.on_meta() for value in record.outputs))
    return list(pairwise(crossing))
