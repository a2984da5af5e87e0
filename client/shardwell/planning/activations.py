"""Records which activations autograd saves in a forward, and computes their peak with checkpoints and offloading."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from shardwell.wrapping.policies import supports_recomputation

Sizes = dict[int, int]
"""Bytes of storages by identity: a storage that is saved twice counts once."""


@dataclass(slots=True)
class _Region:
    """A call of one module, or the computation between two such calls."""

    in_module: bool = False
    can_recompute: bool = False
    inputs: Sizes = field(default_factory=dict)
    saved: Sizes = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationBytes:
    """Size of the activations of one forward."""

    held: int
    """Between the forward and the backward."""
    peak: int
    """At most, until the end of the backward."""


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """The tensors that one forward in training saves, without parameters and buffers."""

    regions: tuple[_Region, ...]
    """Regions in the order of the forward."""
    outputs: tuple[torch.Tensor, ...] = ()
    """The tensors that the forward returned."""

    def sizes(self, *, recomputes: bool = False, moved_min_bytes: int | None = None) -> ActivationBytes:
        """Returns the size of the saved tensors.

        Args:
            recomputes: Whether modules save only their inputs and are recomputed in the backward, one at a time, if
                they can be.
            moved_min_bytes: Size from which the activations of modules are offloaded. None: they are not.
        """
        held: Sizes = {}
        peak = 0
        for region in self.regions:
            kept = region.inputs if recomputes and region.can_recompute else region.saved
            # In the backward of a region, its activations and those of all earlier regions are in memory.
            peak = max(peak, sum((held | kept | region.saved).values()))
            moves = region.in_module and moved_min_bytes is not None
            held |= {key: size for key, size in kept.items() if not (moves and size >= (moved_min_bytes or 0))}
        total = sum(held.values())
        return ActivationBytes(held=total, peak=max(peak, total))


class _Recorder:
    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._alive: list[torch.UntypedStorage] = []
        """Keeps storages alive, so that no identity is reused."""
        self.regions = [_Region()]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._add(tensor, self.regions[-1].saved)
        return tensor

    def enter(self, module: nn.Module, arguments: object) -> None:
        self.regions.append(_Region(in_module=True, can_recompute=supports_recomputation(module)))
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, self.regions[-1].inputs)

    def leave(self) -> None:
        self.regions.append(_Region())

    def _add(self, tensor: torch.Tensor, sizes: Sizes) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._alive.append(storage)
            sizes[storage._cdata] = storage.nbytes()


@contextmanager
def recording(
    model: nn.Module, modules: Iterable[nn.Module], uncounted: Iterable[torch.Tensor] = ()
) -> Iterator[_Recorder]:
    """Context that records the regions of a forward.

    Args:
        model: The whole model, or a stage of it.
        modules: Modules of the model, none inside another one.
        uncounted: Tensors that are not counted, beside parameters and buffers.
    """
    recorder = _Recorder([*model.parameters(), *model.buffers(), *uncounted])
    hooks: list[Any] = []
    for module in modules:
        hooks += [
            module.register_forward_pre_hook(
                lambda module, args, kwargs: recorder.enter(module, (args, kwargs)), with_kwargs=True
            ),
            module.register_forward_hook(lambda *_: recorder.leave()),
        ]
    try:
        with saved_tensors_hooks(recorder.save, lambda tensor: tensor):
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()
