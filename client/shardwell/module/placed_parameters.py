"""The parameter objects of a unit: where their values lie, whether they may be used, and what was done to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from shardwell.module.collect import FoundParameter
from shardwell.module.parameter import freed_class
from shardwell.module.tensors import local_part, set_dtype
from shardwell.module.version_counters import VersionCounters
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import UnitLayout


class PlacedParameters:
    """The parameters of one unit, which stay in their modules whether their values are here or not.

    Args:
        layout: Their names.
        found: They, in layout order.
    """

    def __init__(self, layout: UnitLayout, found: Sequence[FoundParameter]) -> None:
        self._layout = layout
        parameters = [entry.parameter for entry in found]
        # Of a DTensor the part of this process: sharding and tensor parallelism need not know of each other.
        self._locals = [local_part(parameter) for parameter in parameters]
        self._classes = [(parameter, type(parameter), freed_class(type(parameter))) for parameter in parameters]
        self._holders = [
            (site.module._parameters, site.name, index) for index, entry in enumerate(found) for site in entry.sites
        ]
        self._loaded: list[tuple[int, int]] = []
        self._counters = VersionCounters([*parameters, *self._locals])

    def lie_in(self, places: Sequence[torch.Tensor]) -> None:
        """From now on the values of all are these tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, place in enumerate(places):
                self.lie_at(index, place)

    def lie_at(self, index: int, place: torch.Tensor) -> None:
        """From now on the values of one are this tensor."""
        self._locals[index].data = place
        set_dtype(self._classes[index][0], place.dtype)

    def copy_to(self, places: Sequence[torch.Tensor], *, but: Collection[int]) -> None:
        """Copies the values of all, but for some."""
        with torch.no_grad():
            for index, (place, local) in enumerate(zip(places, self._locals, strict=True)):
                if index not in but:
                    place.copy_(local)

    def depart(self) -> None:
        """The values go: autograd raises if it reads them."""
        self._counters.show_freed()

    def forget_graphs(self) -> None:
        """What was saved of the values becomes unusable at the next ``allow``."""
        self._counters.forget_graphs()

    def allow(self) -> None:
        """The values are here: they may be used, also by autograd, and writes are noticed from now on."""
        self._counters.show_values()
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
        self._loaded = self._fingerprints()

    def forbid(self) -> None:
        """The values are not here, or not to be used: doing so raises."""
        for parameter, _, freed in self._classes:
            parameter.__class__ = freed

    def written(self) -> list[int]:
        """Indices of those that were written in place, or given other data, since ``allow``."""
        return [
            index
            for index, (now, before) in enumerate(zip(self._fingerprints(), self._loaded, strict=True))
            if now != before
        ]

    def check_holders(self) -> None:
        """Raises UsageError if a module holds another parameter than the one that was sharded."""
        for held, name, index in self._holders:
            if held.get(name) is not self._classes[index][0]:
                unit, parameter = self._layout.unit, self._layout.parameters[index].name
                raise UsageError(
                    f"parameter {parameter!r} of unit {unit!r} was replaced or removed after fully_shard (by an "
                    "assignment, load_state_dict(assign=True) or functional_call); the values on the shard servers "
                    "are not those: change parameters before fully_shard",
                    unit=unit,
                    parameter=parameter,
                )

    def _fingerprints(self) -> list[tuple[int, int]]:
        """Where each lies and how often it was written; gathering counts as no write."""
        return [(local.data_ptr(), local._version) for local in self._locals]
