"""The layers of a model, the order in which its forward calls them, and the stages that hold them.

``find_parts`` finds the layers of a model and the modules around them. ``Outline`` is a copy of the model without
memory, whose forward tells the order of the calls and what crosses each cut.

``list_layers`` names the kind of every layer of any model. ``analyse`` finds the attention, MLP, embedding and head of
a transformer, whose parts tensor parallelism splits, and raises if it does not know the role of a layer.
"""

from __future__ import annotations

import copy
import enum
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
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
from shardwell.module.mixed_precision import local_part
from shardwell.parallel.forward_records import Record, Recording, Value, own_mode, running, stand_in
from shardwell.wrapping.policies import BlockPolicy
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


class LayerKind(enum.Enum):
    """What a layer does."""

    ATTENTION = "attention"
    MLP = "mlp"
    EMBEDDING = "embedding"
    NORM = "norm"
    HEAD = "head"
    """A linear layer outside the blocks, such as the projection to the vocabulary."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Layer:
    """A module that holds parameters of its own."""

    name: str
    """The module's name in the model."""
    kind: LayerKind
    class_name: str
    num_parameters: int
    """Elements of the module's own parameters in this process."""
    size_bytes: int
    """Bytes of these parameters."""


_NORM = re.compile(r"norm(\d+d)?$|_ln$|^ln(_|$)|^ln\d|layer_?norm", re.IGNORECASE)
_ATTENTION = re.compile(
    r"attn|attention|^(q|k|v|o)(_proj|_lin)?$|^qkv|^w(q|k|v|o|qkv)$|^(query|key|value)(_key_value)?$", re.IGNORECASE
)
_MLP = re.compile(r"mlp|ffn|feed_?forward|^intermediate$|^fc\d?$|^(up|down|gate)(_proj)?$|^w[123]$", re.IGNORECASE)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the repeated blocks of a model by name, in the model's order; empty if there are none."""
    names = {id(module): name for name, module in model.named_modules()}
    blocks = BlockPolicy(model).blocks()
    counts = Counter(map(type, blocks))
    repeated = [block for block in blocks if counts[type(block)] > 1]  # Hugging Face also names embeddings
    return {names[id(block)]: block for block in repeated or blocks}


def list_layers(model: nn.Module) -> list[Layer]:
    """Returns every module of a model that has parameters of its own, in the model's order.

    A parameter that several modules hold counts for the first one.
    """
    blocks = tuple(f"{name}." for name in find_blocks(model))
    seen: set[int] = set()
    found = []
    for name, module in model.named_modules():
        own = [parameter for parameter in module.parameters(recurse=False) if id(parameter) not in seen]
        seen.update(map(id, own))
        if own:
            parts = [local_part(parameter) for parameter in own]
            num_parameters = sum(part.numel() for part in parts)
            size_bytes = sum(part.numel() * part.element_size() for part in parts)
            kind = kind_of(name, module, in_block=name.startswith(blocks) if blocks else False)
            found.append(Layer(name, kind, type(module).__name__, num_parameters, size_bytes))
    return found


def kind_of(name: str, module: nn.Module, *, in_block: bool) -> LayerKind:
    """Returns the kind of a module, by its class and by the names on the path to it, the last one first.

    Args:
        name: Name of the module in the model.
        in_block: True if the module is inside one of the model's repeated blocks.
    """
    path = list(reversed(name.split(".")))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return LayerKind.EMBEDDING
    if _NORM.search(type(module).__name__) or _NORM.search(path[0]):
        return LayerKind.NORM
    if isinstance(module, nn.MultiheadAttention):
        return LayerKind.ATTENTION
    found = next((kind for part in path if (kind := _kind_of_part(part)) is not None), None)
    if found is None and in_block:
        found = _kind_in_block(path[0])
    elif found is None and isinstance(module, nn.Linear):
        found = LayerKind.HEAD
    return found or LayerKind.OTHER


def _kind_of_part(part: str) -> LayerKind | None:
    if _ATTENTION.search(part):
        return LayerKind.ATTENTION
    return LayerKind.MLP if _MLP.search(part) else None


def _kind_in_block(name: str) -> LayerKind | None:
    if name == "dense":  # BERT: the second layer of the MLP is output.dense, beside attention.output.dense
        return LayerKind.MLP
    return LayerKind.ATTENTION if re.search(r"proj|out", name, re.IGNORECASE) else None


_QUERY = re.compile(r"^(q|query|wq|to_q)(_proj|_lin)?$", re.IGNORECASE)
_KEY_OR_VALUE = re.compile(r"^(k|v|key|value|wk|wv|to_k|to_v)(_proj|_lin)?$", re.IGNORECASE)
_FUSED = re.compile(r"^(qkv|w_?qkv|c_attn|query_key_value|attn_qkv)(_proj)?$", re.IGNORECASE)
_UP = re.compile(r"^(up|gate|w1|w3|fc1|c_fc|lin1)(_proj)?$", re.IGNORECASE)

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_WIDTHS = ("all_head_size",)
"""Attributes with the width of all heads together."""


@dataclass(slots=True)
class Attention:
    """The linear layers of one attention, by their names in the model."""

    inputs: list[str]
    """Query, key and value, or one fused projection."""
    output: str
    is_fused: bool
    num_heads: int
    num_key_value_heads: int
    attributes: list[tuple[nn.Module, str]] = field(default_factory=list)
    """``(module, attribute)`` of every number of heads, or width of all heads, that a forward may read."""


@dataclass(slots=True)
class FeedForward:
    """The linear layers of one MLP, by their names in the model."""

    ups: list[str]
    """Layers from the model's width to the hidden size: one, or two with a gate."""
    down: str
    hidden_size: int


@dataclass(slots=True)
class BlockParts:
    """The parts of one block."""

    name: str
    width: int
    """Size of the last dimension of the block's input."""
    attention: Attention
    feed_forward: FeedForward
    norms: list[str]


@dataclass(slots=True)
class Transformer:
    """The parts of a model."""

    blocks: list[BlockParts]
    vocabulary_size: int | None
    embedding: str | None
    """The token embedding."""
    head: str | None
    """The projection to the vocabulary."""
    final_norms: list[str]
    """Norms after the blocks."""


def analyse(model: nn.Module) -> Transformer:
    """Finds the parts of a GPT-, Llama- or BERT-like model.

    Raises:
        UsageError: The model has no repeated blocks, or a layer of a block has an unknown role.
    """
    blocks = find_blocks(model)
    if not blocks:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks, expected a transformer with blocks in an nn.ModuleList or "
            "nn.Sequential: write a plan of torch's parallel styles and call parallelize_module"
        )
    named, prefixes = dict(model.named_modules()), tuple(f"{name}." for name in blocks)
    outside = [(name, part) for name, part in named.items() if name not in blocks and not name.startswith(prefixes)]
    order, last_block = {name: number for number, name in enumerate(named)}, list(blocks)[-1]
    embedding = _token_embedding(model, outside)
    size = None if embedding is None else embedding[1].num_embeddings
    heads = [name for name, part in outside if isinstance(part, nn.Linear) and part.out_features == size]
    return Transformer(
        blocks=[_block(model, name, block) for name, block in blocks.items()],
        vocabulary_size=size,
        embedding=None if embedding is None else embedding[0],
        head=heads[-1] if heads else None,
        final_norms=[name for name, part in outside if _is_norm(part) and order[name] > order[last_block]],
    )


def _token_embedding(model: nn.Module, outside: Sequence[tuple[str, nn.Module]]) -> tuple[str, nn.Embedding] | None:
    found = [(name, part) for name, part in outside if isinstance(part, nn.Embedding)]
    get_embedding: Any = getattr(model, "get_input_embeddings", None)
    by_model = get_embedding() if callable(get_embedding) else None
    for name, part in found:
        if part is by_model:
            return name, part
    return max(found, key=lambda entry: entry[1].num_embeddings, default=None)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.lower().endswith("norm") and any(True for _ in module.parameters(recurse=False))


def _block(model: nn.Module, name: str, block: nn.Module) -> BlockParts:
    for inner, part in block.named_modules():
        if type(part).__name__ == "Conv1D" or isinstance(part, nn.MultiheadAttention):
            raise UsageError(
                f"{name}.{inner} is a {type(part).__name__}, which torch's parallel styles do not split: use a model "
                "whose projections are nn.Linear"
            )
    linears = [(f"{name}.{inner}", part) for inner, part in block.named_modules() if isinstance(part, nn.Linear)]
    attention, rest, width = _attention(model, name, block, linears)
    norms = [f"{name}.{inner}" for inner, part in block.named_modules() if _is_norm(part)]
    return BlockParts(name, width, attention, _feed_forward(name, rest, width), norms)


def _attention(
    model: nn.Module, name: str, block: nn.Module, linears: Sequence[tuple[str, nn.Linear]]
) -> tuple[Attention, list[tuple[str, nn.Linear]], int]:
    """Returns the attention of a block, the remaining linear layers, and the block's width."""

    def matches(pattern: re.Pattern[str]) -> list[int]:
        return [index for index, (path, _) in enumerate(linears) if pattern.match(path.rpartition(".")[2])]

    fused, query = matches(_FUSED), matches(_QUERY)
    inputs = fused or sorted(query + matches(_KEY_OR_VALUE))
    if len(fused) > 1 or (not fused and (len(query) != 1 or len(inputs) != 3)):
        raise UsageError(
            f"block {name!r} has the linear layers {[path for path, _ in linears]}: expected one query, one key "
            "and one value projection (q_proj, k_proj, v_proj; query, key, value; wq, wk, wv), or one fused "
            "projection (qkv)"
        )
    width = linears[inputs[0]][1].in_features
    output = next(
        (index for index in range(inputs[-1] + 1, len(linears)) if linears[index][1].out_features == width), None
    )
    if output is None:
        raise UsageError(
            f"block {name!r} has no linear layer after {linears[inputs[-1]][0]!r} whose output has the width {width}: "
            "expected the output projection of the attention"
        )
    first = linears[query[0] if query else inputs[0]]
    attention = Attention(
        inputs=[linears[index][0] for index in inputs],
        output=linears[output][0],
        is_fused=bool(fused),
        num_heads=0,
        num_key_value_heads=0,
    )
    _count_heads(model, name, block, first, attention)
    rest = [entry for index, entry in enumerate(linears) if index not in (*inputs, output)]
    return attention, rest, width


def _count_heads(
    model: nn.Module, name: str, block: nn.Module, query: tuple[str, nn.Linear], attention: Attention
) -> None:
    """Sets the numbers of heads of an attention, and the attributes that hold them."""
    path = query[0].removeprefix(f"{name}.").split(".")[:-1]
    holders = [block.get_submodule(".".join(path[:depth])) for depth in range(len(path), -1, -1)]
    sources: list[object] = [*holders]
    sources += [config for module in [*holders, model] if (config := getattr(module, "config", None)) is not None]
    num_heads = _first_number(sources, _HEADS)
    if num_heads is None:
        raise UsageError(
            f"the attention of block {name!r} does not say how many heads it has: expected an attribute {_HEADS[0]!r} "
            f"(or {', '.join(_HEADS[1:])}) of the module that holds {query[0]!r}"
        )
    attention.num_heads = num_heads
    attention.num_key_value_heads = _first_number(sources, _KEY_VALUE_HEADS) or num_heads
    values = dict.fromkeys(_HEADS, num_heads)
    values |= dict.fromkeys(_KEY_VALUE_HEADS, attention.num_key_value_heads)
    values |= dict.fromkeys(_WIDTHS, query[1].out_features)
    attention.attributes = [
        (module, attribute)
        for module in holders
        for attribute, value in values.items()
        if module.__dict__.get(attribute) == value
    ]


def _first_number(sources: Sequence[object], names: Sequence[str]) -> int | None:
    for source in sources:
        for name in names:
            if isinstance(value := getattr(source, name, None), int):
                return value
    return None


def _feed_forward(name: str, linears: Sequence[tuple[str, nn.Linear]], width: int) -> FeedForward:
    ups = [(path, layer) for path, layer in linears if _is_up(path, layer, width)]
    downs = [(path, layer) for path, layer in linears if (path, layer) not in ups]
    sizes = {layer.out_features for _, layer in ups}
    if len(downs) != 1 or sizes != {downs[0][1].in_features} or downs[0][1].out_features != width:
        found = [f"{path} ({layer.in_features} -> {layer.out_features})" for path, layer in linears]
        raise UsageError(
            f"block {name!r} has, beside its attention, the linear layers {found}: expected an MLP with one "
            f"or two layers from width {width} to a hidden size and one layer back. A gate must be a layer of its own "
            "(gate_proj and up_proj instead of gate_up_proj)"
        )
    return FeedForward([path for path, _ in ups], downs[0][0], downs[0][1].in_features)


def _is_up(path: str, layer: nn.Linear, width: int) -> bool:
    if layer.in_features != layer.out_features:
        return layer.in_features == width
    return _UP.match(path.rpartition(".")[2]) is not None
