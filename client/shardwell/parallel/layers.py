"""The layers of a model and their kinds: attention, MLP, embedding, norm, head."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from shardwell.module.tensors import local_part
from shardwell.wrapping.policies import BlockPolicy


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
        module: The module.
        in_block: True if the module is inside one of the model's repeated blocks.
    """
    path = list(reversed(name.split(".")))
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return LayerKind.EMBEDDING
    if _NORM.search(type(module).__name__) or _NORM.search(path[0]):
        return LayerKind.NORM
    if isinstance(module, nn.MultiheadAttention):
        return LayerKind.ATTENTION
    found = _kind_by_path(path) or (_kind_in_block(path[0]) if in_block else None)
    if found is None and isinstance(module, nn.Linear) and not in_block:
        return LayerKind.HEAD
    return found or LayerKind.OTHER


def _kind_by_path(path: list[str]) -> LayerKind | None:
    for part in path:
        if _ATTENTION.search(part):
            return LayerKind.ATTENTION
        if _MLP.search(part):
            return LayerKind.MLP
    return None


def _kind_in_block(name: str) -> LayerKind | None:
    if name == "dense":  # BERT: the second layer of the MLP is output.dense, beside attention.output.dense
        return LayerKind.MLP
    return LayerKind.ATTENTION if re.search(r"proj|out", name, re.IGNORECASE) else None


def linear_layers(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear layers inside a module with their names, in the order of definition."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear):
            yield name, part
