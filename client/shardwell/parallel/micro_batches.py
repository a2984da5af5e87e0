"""Micro-batches of a pipeline: checks the arguments of a work item, and merges what the last stage returns.

``sends_parts`` and ``sequence_parts`` tell the shapes that stages send with sequence parallelism.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwell.parallel.description import SplitLayer, StageDescription
from shardwell_wire.errors import UsageError

SEQUENCE_DIM = 1
"""Dimension of activations along the sequence: ``[batch, length, width]``."""


class KeywordNames:
    """The keyword arguments that a function takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._names = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

    def __contains__(self, name: str) -> bool:
        return self._takes_all or name in self._names


def count_samples(
    inputs: Sequence[torch.Tensor], target: torch.Tensor | None, keywords: Mapping[str, Any]
) -> int | None:
    """Returns the number of samples of a work item. None: there are no tensors.

    Args:
        inputs: Positional arguments of the first stage.
        target: Target of the loss. None: this trainer does not need it.
        keywords: Keyword arguments of the stages.

    Raises:
        UsageError: The tensors have different numbers of samples.
    """
    named = {f"input {index}": value for index, value in enumerate(inputs)}
    named |= {} if target is None else {"target": target}
    found = [(f"keyword argument {name!r}", leaf) for name in keywords for leaf in pytree.tree_leaves(keywords[name])]
    sizes = [
        (what, value.shape[0] if value.ndim else None)
        for what, value in (*named.items(), *found)
        if isinstance(value, torch.Tensor)
    ]
    for what, size in sizes:
        if size != sizes[0][1] or size is None:
            raise UsageError(
                f"{what} has {size or 'no'} samples in its first dimension, but {sizes[0][0]} has {sizes[0][1]}: the "
                "first dimension of every tensor is cut into micro-batches. Expand a tensor that is equal for all "
                "samples, or keep it in a buffer of the module"
            )
    return sizes[0][1] if sizes else None


def check_shapes(inputs: Sequence[torch.Tensor], example: Sequence[torch.Tensor], *, count: int) -> None:
    """Checks the arguments of the first stage against its example.

    Args:
        inputs: Positional arguments of the first stage, for the whole work item.
        example: Those of one micro-batch.
        count: Number of micro-batches.

    Raises:
        UsageError: Their number differs, or a shape.
    """
    if len(inputs) != len(example):
        raise UsageError(f"the first stage takes {len(example)} inputs, got {len(inputs)}")
    for index, (value, other) in enumerate(zip(inputs, example, strict=True)):
        expected = [count * other.shape[0], *other.shape[1:]]
        if list(value.shape) != expected:
            raise UsageError(
                f"input {index} has the shape {list(value.shape)}, expected {expected}: {count} micro-batches of the "
                f"example's shape {list(other.shape)}. All work items must have the size of the example"
            )


def check_names(keywords: Collection[str], takers: Sequence[KeywordNames]) -> None:
    """Raises UsageError if no stage takes one of the keyword arguments."""
    for name in keywords:
        if not any(name in taker for taker in takers):
            raise UsageError(
                f"no stage of this trainer takes the keyword argument {name!r}: pass it only on trainers that have a "
                f"stage with forward(..., {name}=...)"
            )


def merge(outputs: Sequence[Any]) -> Any:
    """Returns the outputs of all micro-batches as one: tensors are joined at their first dimension.

    Tensors without dimensions are stacked, and other values become lists. [num_micro_batches]
    """
    return pytree.tree_map(_merge_leaves, *outputs)


def detached(output: Any) -> Any:
    """Returns an output whose tensors have no graph."""
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _merge_leaves(*leaves: Any) -> Any:
    if not isinstance(leaves[0], torch.Tensor):
        return list(leaves)
    return torch.cat(leaves) if leaves[0].ndim else torch.stack(leaves)


def sends_parts(stages: Sequence[StageDescription], layers: Sequence[SplitLayer]) -> list[bool]:
    """Returns for each stage whether it sends parts of the sequence: from the first block to the last norm.

    Args:
        stages: What each stage holds.
        layers: What a sequence-parallel plan does, in the model's order.
    """
    cut = [layer.name for layer in layers if layer.style == "input"]
    gathered = [layer.name for layer in layers if layer.style == "sequence"]
    first, last = (_stage_of(stages, names) for names in (cut[:1], gathered[-1:]))
    return [first <= stage.index < last for stage in stages]


def _stage_of(stages: Sequence[StageDescription], names: Sequence[str]) -> int:
    """Returns the index of the stage that holds a module; the number of stages if none does."""
    held = (
        stage.index
        for stage in stages
        for name in names
        if any(f"{layer.name}.".startswith(f"{name}.") for layer in stage.layers)
    )
    return next(held, len(stages))


def sequence_parts(values: Sequence[torch.Tensor], tp: int) -> tuple[torch.Tensor, ...]:
    """Returns tensors without memory that have the shapes of one rank's parts of activations.

    Values without gradients, such as position embeddings, stay whole.

    Args:
        values: Activations that stages send. [batch, length, ...]
        tp: Number of tensor-parallel ranks.

    Raises:
        UsageError: ``tp`` does not divide the length.
    """
    parts = []
    for value in values:
        if not value.requires_grad or value.ndim <= SEQUENCE_DIM:
            parts.append(value)
            continue
        batch, length, *others = value.shape
        if length % tp:
            raise UsageError(
                f"sequence_parallel=True: tp={tp} does not divide the {length} tokens of a sequence in the example: "
                f"use a multiple of {tp} tokens"
            )
        part = torch.empty(batch, length // tp, *others, dtype=value.dtype, device=value.device)
        parts.append(part.requires_grad_())
    return tuple(parts)
