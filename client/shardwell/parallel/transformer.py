"""The layers of a model by name and class: their kinds, and the parts that tensor parallelism splits.

``list_layers`` names the kind of every layer of any model. ``analyse`` finds the attention, MLP, embedding and head of
a transformer, and raises if it does not know the role of a layer.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwell.module.mixed_precision import local_part
from shardwell.wrapping.policies import BlockPolicy
from shardwell_wire.errors import UsageError


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
