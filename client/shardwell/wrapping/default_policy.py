"""Which modules become units when nobody says so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwell.module.guards import has_forward
from shardwell.wrapping.candidates import Candidates

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_MIN_NUM_PARAMS = 1 << 20
"""In a model without repeated blocks modules of this size are units: smaller ones cost more waiting than memory."""


@dataclass(frozen=True)
class BlockPolicy:
    """A unit for every block of a model, and for what is as large as one.

    Blocks are what the model itself names (``_no_split_modules``, as Hugging Face's models do), else the outermost
    modules of one class of which a container, such as the ``nn.ModuleList`` of a transformer's layers, holds several.
    Embeddings, heads and other modules beside them that are at least as large as the largest block are units too. In a
    model without blocks all modules with a million parameters are.

    Args:
        model: The whole model.
    """

    model: nn.Module

    def choose(self, candidates: Candidates) -> Collection[nn.Module]:
        found, size = {id(block) for block in self.blocks()}, candidates.num_parameters
        blocks = [module for module in candidates if id(module) in found]
        limit = max(map(size, blocks), default=_MIN_NUM_PARAMS)
        around = {id(module) for module in self.model.modules() if _holds_any(module, blocks)}
        inside = {id(part) for block in blocks for part in block.modules()}
        beside = [module for module in candidates if id(module) not in around | inside]
        large = [module for module in beside if size(module) >= limit]
        return [*blocks, *_innermost(large)]

    def blocks(self) -> list[nn.Module]:
        """The repeated modules alone, in the model's order."""
        return _named_blocks(self.model) or _repeated_blocks(self.model)


def _named_blocks(model: nn.Module) -> list[nn.Module]:
    """Modules of the classes that Hugging Face's models name as not to be split over devices."""
    names = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    return [module for module in model.modules() if type(module).__name__ in names and has_forward(module)]


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    blocks: dict[int, nn.Module] = {}
    for block in _outermost_repeated(model, set()):
        blocks[id(block)] = block
    return list(blocks.values())


def _outermost_repeated(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    children = [child for child in module.children() if id(child) not in seen]
    seen.update(map(id, children))
    repeated = _repeated_classes(children) if isinstance(module, _CONTAINERS) else set()
    for child in children:
        if type(child) in repeated:
            yield child
        else:
            yield from _outermost_repeated(child, seen)


def _repeated_classes(modules: Sequence[nn.Module]) -> set[type[nn.Module]]:
    can_be_units = [module for module in modules if has_forward(module) and any(True for _ in module.parameters())]
    counts = Counter(type(module) for module in can_be_units if not isinstance(module, _CONTAINERS))
    return {kind for kind, count in counts.items() if count > 1}


def _holds_any(module: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    wanted = {id(block) for block in blocks}
    return any(id(part) in wanted and part is not module for part in module.modules())


def _innermost(modules: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that hold no other of them."""
    return [module for module in modules if not _holds_any(module, modules)]
