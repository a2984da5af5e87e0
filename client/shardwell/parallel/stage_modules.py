"""Pipeline stages that run the model's own forward. Each stage holds its layers only.

A stage is a copy of the modules around the layers. Its forward is the model's: a layer of an earlier stage returns
tensors without values, the first layer of the stage gets what the previous stage has sent, and the forward ends when it
calls the first layer of the next stage. See Note: [Tensors without values].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from shardwell.module.guards import RUNS_IN_PART
from shardwell.parallel.forward_records import (
    Argument,
    LayerCall,
    Record,
    Value,
    current,
    own_mode,
    running,
    tensors_of,
)
from shardwell.parallel.outline import Names, Outline
from shardwell_wire.errors import UsageError

# Note: [Tensors without values]
# The code of a model between its layers runs in every stage: it computes position embeddings and masks from the
# inputs, which all stages get. Layers of earlier stages return fake tensors, which have shape, dtype and device. An
# operation with a fake tensor returns a fake tensor, so exactly the values that depend on earlier layers are fake. At
# the call of a stage's first layer, the fake tensors in its arguments become what the stage has received: the objects
# get other contents, so the forward's own variables have the values, too. A fake tensor that reaches the stage's
# output is an error, never a wrong value.

_HANDLES = "_shardwell_stage_hooks"


def _before_layer(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    """Hook of a stage's own layer."""
    if isinstance(current.run, _StageRun):
        current.run.enter(name, args, kwargs)


def _after_layer(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """Hook of a stage's own layer."""
    return current.run.leave(name, args, kwargs, output) if isinstance(current.run, _StageRun) else None


class _End(BaseException):
    """Ends the forward of a stage where the next stage begins."""

    def __init__(self, values: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.values = values


class _StageRun:
    """One forward of a stage.

    Args:
        outline: The model without memory.
        record: What the forward does.
        received: What the previous stage has sent.
        device: The device to compute on.
    """

    def __init__(
        self, outline: Outline, record: Record, index: int, received: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._outline, self._calls, self._index, self._received = outline, record.calls, index, received
        self._first, self._stop = outline.cuts(record)[index : index + 2]
        self._number, self._device = 0, device
        if index and len(received) != len(record.calls[self._first].passed):
            raise UsageError(
                f"stage {index} got {len(received)} activations, expected {len(record.calls[self._first].passed)}: "
                "pass all that the previous stage returns"
            )
        ambient = detect_fake_mode(received)
        self._mode = own_mode() if ambient is None else ambient
        reference = next((value for value in received if value.is_floating_point()), None)
        expected = record.calls[self._first].passed.values() if index else ()
        stored = next((value.dtype for value in expected if value.dtype.is_floating_point), None)
        # Mixed precision: masks have the dtype of the activations, which the values of earlier stages must have, too.
        self.dtype = None if reference is None or reference.dtype == stored else reference.dtype
        outline.place(self._mode, device, self.dtype)

    def _next(self, name: str, args: Any, kwargs: Any) -> LayerCall:
        """Returns the record of the next call. Ends the forward at the next stage's first call."""
        call = self._calls[self._number] if self._number < len(self._calls) else None
        if call is None or call.layer != name:
            expected = "no layer" if call is None else f"{call.layer!r}"
            raise UsageError(
                f"stage {self._index} calls layer {name!r} where the forward called {expected} before: the forward "
                "must call the same layers in the same order for all inputs of a shape"
            )
        if self._number == self._stop:
            leaves = tree_leaves((args, kwargs))
            raise _End(tuple(leaves[position] for position in call.passed))
        self._number += 1
        return call

    def enter(self, name: str, args: Any, kwargs: Any) -> None:
        """Called before a layer of the stage."""
        if name in self._outline.nested and self._calls[min(self._number, len(self._calls) - 1)].layer != name:
            return
        self._receive(self._next(name, args, kwargs), args, kwargs)

    def leave(self, name: str, args: Any, kwargs: Any, output: Any) -> Any:
        """Called after a layer of the stage. Returns what replaces its output; None: nothing."""
        call = self._calls[max(0, self._number - 1)]
        if call.layer != name:
            return None  # inside another layer
        if self._number - 1 < self._first:  # an earlier stage has made the call, too
            return self._without_values(call, args, kwargs)
        expected = call.outputs[0]
        if call.is_assumed and not (isinstance(output, torch.Tensor) and tuple(output.shape) == expected.size):
            raise UsageError(
                f"layer {name!r} returns {_kind_of(output)}, expected a tensor like its first argument "
                f"({list(expected.size)}), because the layer needs values to compute shapes: build the stages by hand "
                "and pass them to shardwell.parallel.ModelSplit.from_modules"
            )
        return None

    def _receive(self, call: LayerCall, args: Any, kwargs: Any) -> None:
        """Gives the arguments of the stage's first call what the stage has received."""
        if not self._index or self._number - 1 != self._first:
            return
        leaves = tree_leaves((args, kwargs))
        for (position, like), value in zip(call.passed.items(), self._received, strict=True):
            _become(leaves[position], _in_order(value, like.stride))

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Called for a layer of another stage."""
        call = self._next(name, args, kwargs)
        assert self._number - 1 < self._first, name
        return self._without_values(call, args, kwargs)

    def _without_values(self, call: LayerCall, args: Any, kwargs: Any) -> Any:
        """Returns what a call has returned, without values."""
        assert call.structure is not None
        leaves = tree_leaves((args, kwargs))
        with self._mode:
            outputs = [
                leaves[output.position]
                if isinstance(output, Argument)
                else self._cast(output).on(self._device)
                if isinstance(output, Value)
                else output
                for output in call.outputs
            ]
        return tree_unflatten(outputs, call.structure)

    def _cast(self, value: Value) -> Value:
        if self.dtype is None or not value.dtype.is_floating_point:
            return value
        return Value(value.size, value.stride, self.dtype, value.requires_grad)

    def check(self, values: Sequence[torch.Tensor]) -> None:
        """Raises UsageError if a value depends on an earlier stage's value that the stage has not received."""
        if self._mode is own_mode() and any(isinstance(value, FakeTensor) for value in values):
            raise UsageError(
                f"stage {self._index} returns a value that depends on layers of earlier stages in a way that was not "
                "noticed before: build the stages by hand and pass them to shardwell.parallel.ModelSplit.from_modules"
            )


def _kind_of(output: Any) -> str:
    return f"a tensor of {list(output.shape)}" if isinstance(output, torch.Tensor) else f"a {type(output).__name__}"


def _in_order(value: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Returns a tensor whose dimensions are in memory in the order of the strides: kernels may round differently."""
    order = sorted(range(value.ndim), key=lambda dim: stride[dim], reverse=True)
    if order == list(range(value.ndim)):
        return value
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.ndim)])


def _become(target: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a tensor object the contents of another tensor. See Note: [Tensors without values].

    ``torch.utils.swap_tensors`` would refuse a fake tensor to which its mode has a weak reference.
    """
    view = value.view_as(value)  # the object that was received stays a leaf of autograd
    target.__class__, view.__class__ = view.__class__, target.__class__
    target.__dict__, view.__dict__ = view.__dict__, target.__dict__
    torch._C._swap_tensor_impl(target, view)


class StageModule(nn.Module):
    """Methods of the root of each stage. Not constructed directly."""

    _shardwell_outline: Outline
    _shardwell_stage: int
    _shardwell_class: type[nn.Module]
    _shardwell_around: list[tuple[str, nn.Module]]

    def forward(self, *values: Any, **keywords: Any) -> Any:
        """Runs the model's forward from the stage's first layer to the first layer of the next stage.

        Args:
            values: In the first stage, the arguments of the model's forward. In the others, what the previous stage
                returns: activations, then the arguments of the model's forward.
            keywords: Keyword arguments of the model's forward, the same in all stages.
        """
        outline, index = self._shardwell_outline, self._shardwell_stage
        if not outline.starts:
            return _as_result(tensors_of(self._shardwell_class.forward(self, *values, **keywords)))
        received: tuple[Any, ...] = ()
        inputs = values
        if index == 0:
            outline.num_inputs = len(inputs)
        else:
            if outline.num_inputs is None:
                raise UsageError(
                    f"stage {index} does not know its inputs: call split.examples with a micro-batch first"
                )
            stop = len(values) - outline.num_inputs
            received, inputs = values[:stop], values[stop:]
        record = outline.record(inputs, keywords, training=self.training)
        device = next(value.device for value in tree_leaves((values, keywords)) if isinstance(value, torch.Tensor))
        run = _StageRun(outline, record, index, received, device)
        with running(run), self._whole():
            try:
                outputs = tensors_of(self._shardwell_class.forward(self, *inputs, **keywords))
            except _End as end:
                outputs = tuple(value.contiguous() for value in (*end.values, *inputs))  # as torch's sends require
        run.check(outputs)
        return _as_result(outputs)

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Puts the layers without memory in the places of the other stages' layers."""
        former: list[tuple[nn.Module, Any, Any]] = []
        try:
            for name, module in self._shardwell_around:
                former.append((module, module._modules, module._parameters))
                other = self._shardwell_outline.get(name)
                own, values = module._modules, module._parameters
                in_order = {key: own.get(key, child) for key, child in other._modules.items()}
                module.__dict__["_modules"] = {**in_order, **own}
                module.__dict__["_parameters"] = {**other._parameters, **values}
            yield
        finally:
            for module, modules_, parameters in former:
                module.__dict__["_modules"], module.__dict__["_parameters"] = modules_, parameters


def _as_result(values: tuple[torch.Tensor, ...]) -> Any:
    return values[0] if len(values) == 1 else values


def make_stage(model: nn.Module, outline: Outline, index: int, layers: Names, around: Names) -> nn.Module:
    """Returns a stage. Its layers are the model's, under the same names.

    Args:
        outline: The model without memory, which knows the stages of each layer.
        around: The modules around them by name.
    """
    mine = {name: layer for name, layer in layers.items() if index in outline.stages[name]}
    foreign = {id(layer) for name, layer in layers.items() if name not in mine}
    copies = {id(module): _copied(module) for module in around.values()}
    for name, module in around.items():
        made = copies[id(module)]
        made.__dict__[RUNS_IN_PART] = True
        made._parameters = {
            own: parameter
            for own, parameter in module._parameters.items()
            if index in outline.stages[f"{name}.{own}" if name else own]
        }
        if index:  # stage 0 stores them
            made._non_persistent_buffers_set = {*module._non_persistent_buffers_set, *module._buffers}
        made._modules = {
            key: child if child is None else copies.get(id(child), child)
            for key, child in module._modules.items()
            if id(child) not in foreign
        }
    stage = copies[id(model)]
    del stage.__dict__[RUNS_IN_PART]
    stage.__class__ = type(f"{type(model).__name__}Stage{index}", (StageModule, type(model)), {})
    assert isinstance(stage, StageModule)
    stage.__dict__["_shardwell_around"] = [(name, copies[id(module)]) for name, module in around.items()]
    stage._shardwell_outline, stage._shardwell_stage, stage._shardwell_class = outline, index, type(model)
    for name, layer in mine.items():
        for handle in layer.__dict__.pop(_HANDLES, ()):
            handle.remove()
        layer.__dict__[_HANDLES] = (
            layer.register_forward_pre_hook(partial(_before_layer, name), with_kwargs=True),
            layer.register_forward_hook(partial(_after_layer, name), with_kwargs=True),
        )
    return stage


def _copied(module: nn.Module) -> nn.Module:
    """Returns a shallow copy of a module, with dictionaries of its own for hooks, modules, parameters and buffers."""
    made = copy.copy(module)
    for name in vars(nn.Module()):
        if isinstance(value := made.__dict__.get(name), dict | set):
            made.__dict__[name] = copy.copy(value)
    return made
