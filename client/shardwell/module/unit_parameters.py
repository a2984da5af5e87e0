"""The parameter objects of a unit: where modules hold them, where their values are stored, and when they are usable.

Note: [Version counters]
    Autograd saves a tensor together with its version counter, and compares the counter when it reads the tensor. All
    views of a tensor share the counter, except ``Tensor.data``. While a unit is freed, the counter of each of its
    parameters is a number from ``FREED_VERSION`` on, so autograd raises instead of reading released memory. Gathering
    restores the counter, so tensors that were saved before are valid again. Older graphs must not read newer weights:
    when graphs become unusable, the next use of the unit sets the counters to the next multiple of ``_STRIDE``.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwell.module.freed_parameter import OWNER_ATTRIBUTE, freed_class, watched_parameter
from shardwell.module.tensors import is_split, local_box, local_part, set_dtype
from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import Parameter, UnitLayout

FIRST_VERSION, FREED_VERSION, _STRIDE = 1 << 20, 1 << 31, 1 << 4
"""torch stores counters in 32 bits. Counters of tensors that are not sharded stay below ``FIRST_VERSION``."""

_freed_versions = itertools.count(FREED_VERSION)


@dataclass(frozen=True, slots=True)
class Site:
    """An attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    name: str


@dataclass(slots=True)
class FoundParameter:
    """A parameter with all its names and all sites that hold it."""

    parameter: nn.Parameter
    names: list[str] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)

    def describe(self) -> Parameter:
        """Returns the layout entry, for a ``DTensor`` the entry of its local part."""
        dtype = str(self.parameter.dtype).removeprefix("torch.")
        name, shape, aliases = self.names[0], tuple(local_part(self.parameter).shape), tuple(self.names[1:])
        if not is_split(self.parameter):
            return Parameter(name, shape, dtype, aliases)
        return Parameter(name, shape, dtype, aliases, tuple(self.parameter.shape), local_box(self.parameter).offsets)


class UnitParameters:
    """The parameters of one unit. The objects stay in their modules, whether the unit is gathered or freed.

    Args:
        layout: Their names.
        found: The parameters, in layout order.
    """

    def __init__(self, layout: UnitLayout, found: Sequence[FoundParameter]) -> None:
        self._layout = layout
        parameters = [entry.parameter for entry in found]
        # A unit stores the local part of a DTensor, so sharding and tensor parallelism are independent.
        self._locals = [local_part(parameter) for parameter in parameters]
        self._classes = [(parameter, type(parameter), freed_class(type(parameter))) for parameter in parameters]
        self._holders = [
            (site.module._parameters, site.name, entry.parameter, index)
            for index, entry in enumerate(found)
            for site in entry.sites
        ]
        self._valid_fingerprints: list[tuple[int, int]] = []
        """Address and write count of each parameter since it is valid. Gathering does not change them."""
        self._counters = VersionCounters([*parameters, *self._locals])
        self._is_watched = False
        self._sums_at_read: dict[int, int] = {}
        """Checksums of the parameters whose ``data`` was read since ``allow``: its writes change no fingerprint."""

    def place_all(self, places: Sequence[torch.Tensor]) -> None:
        """Makes all parameters use the memory of the given tensors, in layout order."""
        with torch._C.DisableTorchFunctionSubclass():
            for index, place in enumerate(places):
                self.place(index, place)

    def place(self, index: int, place: torch.Tensor) -> None:
        """Makes one parameter use the memory of a tensor."""
        self._locals[index].data = place
        set_dtype(self._classes[index][0], place.dtype)

    def detach(self, values: Sequence[torch.Tensor]) -> None:
        """Makes all parameters ordinary ones with the given values. Existing graphs become unusable."""
        self._counters.reset()
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
            delattr(parameter, OWNER_ATTRIBUTE)
        self.place_all(values)

    def copy_to(self, places: Sequence[torch.Tensor], *, skip: Collection[int]) -> None:
        """Copies the values of all parameters, except those with an index in ``skip``, to the given tensors."""
        with torch.no_grad():
            for index, (place, local) in enumerate(zip(places, self._locals, strict=True)):
                if index not in skip:
                    place.copy_(local)

    def mark_freed(self) -> None:
        """Makes autograd raise if it reads the values, which are about to be released."""
        self._counters.mark_freed()

    def forget_graphs(self) -> None:
        """Makes tensors that existing graphs saved unusable from the next ``allow`` on."""
        self._counters.forget_graphs()

    def allow(self) -> None:
        """Makes the parameters usable, also by autograd. ``written`` reports writes from now on, or since ``forbid``.

        Raises:
            UsageError: See ``check_holders``. The forward would silently use another parameter.
        """
        self.check_holders()
        for parameter, original, _ in self._classes:
            parameter.__class__ = original
        if not self._counters.are_valid:
            self._counters.mark_valid()
            # Last, because the fingerprints contain the counters.
            self._valid_fingerprints = [(local.data_ptr(), local._version) for local in self._locals]

    def note_data_read(self, index: int) -> None:
        """Makes ``written`` compare a parameter's values with the present ones, until ``forbid``."""
        if index not in self._sums_at_read:
            self._sums_at_read[index] = _checksum(self._locals[index])

    def forbid(self) -> None:
        """Makes every use of the parameters' values raise."""
        self._is_watched = False
        self._sums_at_read.clear()
        for parameter, _, freed in self._classes:
            parameter.__class__ = freed

    def watch(self) -> None:
        """Makes ``.grad`` of usable parameters warn, until ``end_watch`` or ``forbid``."""
        self._is_watched, watched = True, watched_parameter()
        for parameter, original, _ in self._classes:
            if original is nn.Parameter:
                parameter.__class__ = watched

    def end_watch(self) -> None:
        """Ends ``watch``."""
        if self._is_watched:
            self._is_watched = False
            for parameter, original, _ in self._classes:
                parameter.__class__ = original

    def written(self) -> list[int]:
        """Returns the indices of the parameters that were written in place or given other data since ``allow``."""
        return [
            index
            for index, (local, (address, version)) in enumerate(
                zip(self._locals, self._valid_fingerprints, strict=True)
            )
            if local._version != version
            or local.data_ptr() != address
            or (index in self._sums_at_read and self._sums_at_read[index] != _checksum(local))
        ]

    def check_holders(self) -> None:
        """Raises UsageError if a module holds another parameter than the one that was sharded."""
        for attributes, name, held, index in self._holders:
            if attributes.get(name) is not held:
                unit, parameter = self._layout.unit, self._layout.parameters[index].name
                raise UsageError(
                    f"parameter {parameter!r} of unit {unit!r} was replaced or removed after fully_shard (by an "
                    "assignment, load_state_dict(assign=True) or functional_call), but the shard servers still have "
                    "the old values: change parameters before fully_shard",
                    unit=unit,
                    parameter=parameter,
                )


def _checksum(values: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        on_cpu = values.detach().cpu()
        return zlib.crc32(memory_at(on_cpu.data_ptr(), on_cpu.nbytes))


class VersionCounters:
    """The version counters of one unit's parameters. See Note: [Version counters].

    Args:
        tensors: The parameters, and for a ``DTensor`` also its local part.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._freed = tuple(next(_freed_versions) for _ in self._tensors)
        self._valid = FIRST_VERSION
        self.are_valid = False
        """True if the tensors have the counters that current graphs have saved, or higher ones after a write."""

    def mark_valid(self) -> None:
        """Sets the counters that current graphs have saved."""
        torch._C._autograd._unsafe_set_version_counter(self._tensors, (self._valid,) * len(self._tensors))
        self.are_valid = True

    def mark_freed(self) -> None:
        """Sets counters with which autograd raises."""
        torch._C._autograd._unsafe_set_version_counter(self._tensors, self._freed)
        self.are_valid = False

    def forget_graphs(self) -> None:
        """Makes existing graphs unusable from the next ``mark_valid`` on."""
        self._valid += _STRIDE
        self.are_valid = False

    def reset(self) -> None:
        """Sets the counters of ordinary tensors. Existing graphs become unusable."""
        self.are_valid = False
        torch._C._autograd._unsafe_set_version_counter(self._tensors, (0,) * len(self._tensors))
