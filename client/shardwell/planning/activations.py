"""Records which activations autograd saves in a forward, and computes their peak with checkpoints and offloading."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

Sizes = dict[int, int]
"""Bytes of storages by identity: a storage that is saved twice counts once."""


@dataclass(slots=True)
class _Region:
    """A call of one module, or the computation between two such calls."""

    module: str | None
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

    def sizes(
        self,
        *,
        recomputed: Collection[str] = (),
        moved: Collection[str] = (),
        moved_min_bytes: int = 1,
    ) -> ActivationBytes:
        """Returns the size of the saved tensors.

        Args:
            recomputed: Modules that save only their inputs and are recomputed in the backward, one at a time.
            moved: Modules whose activations are offloaded.
            moved_min_bytes: Smaller activations are not offloaded.
        """
        held: Sizes = {}
        peak = 0
        for region in self.regions:
            kept = region.inputs if region.module in recomputed else region.saved
            # In the backward of a region, its activations and those of all earlier regions are in memory.
            peak = max(peak, sum((held | kept | region.saved).values()))
            moves = region.module in moved
            held |= {key: size for key, size in kept.items() if not (moves and size >= moved_min_bytes)}
        total = sum(held.values())
        return ActivationBytes(held=total, peak=max(peak, total))


class _Recorder:
    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._own = {tensor.untyped_storage()._cdata for tensor in own}
        self._alive: list[torch.UntypedStorage] = []
        """Keeps storages alive, so that no identity is reused."""
        self.regions = [_Region(None)]

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        self._add(tensor, self.regions[-1].saved)
        return tensor

    def enter(self, module: str, arguments: object) -> None:
        self.regions.append(_Region(module))
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf, self.regions[-1].inputs)

    def leave(self) -> None:
        self.regions.append(_Region(None))

    def _add(self, tensor: torch.Tensor, sizes: Sizes) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._alive.append(storage)
            sizes[storage._cdata] = storage.nbytes()


@contextmanager
def recording(
    model: nn.Module, modules: Mapping[str, nn.Module], uncounted: Iterable[torch.Tensor] = ()
) -> Iterator[_Recorder]:
    """Context that records the regions of a forward.

    Args:
        model: The whole model, or a stage of it.
        modules: Modules of the model by name, none inside another one.
        uncounted: Tensors that are not counted, beside parameters and buffers.
    """
    recorder = _Recorder([*model.parameters(), *model.buffers(), *uncounted])
    hooks: list[Any] = []
    for name, module in modules.items():
        hooks += [
            module.register_forward_pre_hook(_entering(recorder, name), with_kwargs=True),
            module.register_forward_hook(lambda *_: recorder.leave()),
        ]
    try:
        with saved_tensors_hooks(recorder.save, lambda tensor: tensor):
            yield recorder
    finally:
        for hook in hooks:
            hook.remove()


def _entering(recorder: _Recorder, name: str) -> Any:
    return lambda module, args, kwargs: recorder.enter(name, (args, kwargs))
