"""Version counters of parameters: autograd raises instead of reading weights that are gone or newer.

Note: Version counters
    Autograd saves a tensor together with its version counter, and compares the counter when it reads the
    tensor. All views of a tensor share the counter, except ``Tensor.data``. While a unit is freed, the
    counter of each of its parameters is a number from ``_FREED`` on; gathering sets it back, so what was
    saved before is right again. Older graphs must not read newer weights: when graphs become unusable,
    the next use of the unit sets the counters to the next multiple of ``_STRIDE``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from shardwell_wire.errors import FreedParameterError, UsageError

if TYPE_CHECKING:
    from shardwell.module.unit import Unit

_FIRST, _STRIDE, _FREED = 1 << 20, 1 << 4, 1 << 31
"""torch keeps 32 bits; counters of tensors that nobody shards are below ``_FIRST``."""

_numbers = itertools.count(_FREED)

_OTHER_VERSION = re.compile(r"is at version (\d+); expected version (\d+) instead")
_NO_MEMORY = ("out of bounds for storage of size 0", "its data is not allocated yet")
"""What torch says of a tensor without memory where it compares no counter."""

KEEP_IN_REACH = (
    "Make it a result of the forward (a return value, or an attribute of one of the unit's modules), call backward "
    "while the unit is gathered (after module.unshard() and before module.reshard()), or have it use a clone of the "
    "parameter"
)


class VersionCounters:
    """The counters of one unit's parameters.

    Args:
        tensors: The parameters; of a ``DTensor`` also its local part.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = tuple({id(tensor): tensor for tensor in tensors}.values())
        self._freed = tuple(next(_numbers) for _ in self._tensors)
        self._values = _FIRST

    def show_values(self) -> None:
        """The values that the present graphs saved are here."""
        torch._C._autograd._unsafe_set_version_counter(self._tensors, (self._values,) * len(self._tensors))

    def show_freed(self) -> None:
        """The values are gone: autograd raises if it reads them."""
        torch._C._autograd._unsafe_set_version_counter(self._tensors, self._freed)

    def forget_graphs(self) -> None:
        """Graphs that were made before become unusable at the next ``show_values``."""
        self._values += _STRIDE


def explained(error: RuntimeError, units: Sequence[Unit]) -> UsageError | None:
    """What an error of a backward means if it is about sharded weights; None if it is about something else."""
    text = str(error)
    if (found := _OTHER_VERSION.search(text)) is None:
        freed = any(phrase in text for phrase in _NO_MEMORY) and any(unit.needs_gather for unit in units)
        return _freed(None, None) if freed else None
    now, expected = int(found[1]), int(found[2])
    if now >= _FREED:
        for unit in units:
            for index, parameter in enumerate(unit.parameters):
                if parameter._version == now:
                    return _freed(unit.name, unit.layout.parameters[index].name)
        return _freed(None, None)
    if now >= _FIRST and expected >= _FIRST:
        return UsageError(
            "backward through a graph that was made before the last optimizer.step() or in another work item: the "
            "weights that it saved are gone; run the forward again"
        )
    return None


def _freed(unit: str | None, parameter: str | None) -> FreedParameterError:
    what = (
        "weights of a sharded module, which are" if unit is None else f"parameter {parameter!r}, whose unit {unit!r} is"
    )
    return FreedParameterError(
        f"backward needs {what} freed: a tensor was computed from it that is no result of the unit's forward. "
        + KEEP_IN_REACH,
        unit=unit,
        parameter=parameter,
    )
