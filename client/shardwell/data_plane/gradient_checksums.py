"""Checksums of gradients that all tensor-parallel ranks of a replica compute, and that one of them pushes.

Note: [Checksums of gradients]
    A gradient on the CPU is hashed where it is. Of a gradient on a GPU, the bits are summed there as integers. This
    takes one kernel, and the host waits for it only when the work item is finished, after all its pushes. The ranks of
    a replica compute on devices of one kind, so they use the same function.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from shardwell_wire.chunk_streams import memory_at
from shardwell_wire.v1 import coordinator_pb2

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by item size."""

_FACTOR = 31
"""Makes a checksum depend on the order of several gradients of one parameter."""

_MASK = (1 << 64) - 1


class GradientChecksums:
    """The checksums of one work item, by unit index and parameter index."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], int | torch.Tensor] = {}

    def add(self, unit_index: int, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Adds the gradients of one backward.

        Args:
            unit_index: The unit.
            gradients: ``(parameter index, gradient)``; each dense and contiguous.
        """
        for index, gradient in gradients:
            key = unit_index, index
            self._found[key] = _checksum(gradient, self._found.get(key, 0))

    def clear(self) -> None:
        """Forgets all checksums, because the work item is restarted."""
        self._found.clear()

    def to_proto(self) -> list[coordinator_pb2.GradientChecksums]:
        """Returns the checksums by unit. Waits for those that a GPU computes."""
        self._fetch()
        units: dict[int, coordinator_pb2.GradientChecksums] = {}
        for (unit_index, index), value in sorted(self._found.items()):
            unit = units.setdefault(unit_index, coordinator_pb2.GradientChecksums(unit_index=unit_index))
            unit.parameter_indices.append(index)
            unit.checksums.append(int(value) & _MASK)
        return list(units.values())

    def _fetch(self) -> None:
        """Copies the checksums that are on a GPU to the host."""
        waiting = {key: value for key, value in self._found.items() if isinstance(value, torch.Tensor)}
        if waiting:
            values = torch.stack(list(waiting.values())).tolist()
            self._found.update(zip(waiting, values, strict=True))


def _checksum(gradient: torch.Tensor, former: int | torch.Tensor) -> int | torch.Tensor:
    """Returns the checksum of a gradient, combined with that of the gradients before. 0: there are none."""
    if gradient.device.type == "cpu" and isinstance(former, int):
        return xxhash.xxh3_64_intdigest(memory_at(gradient.data_ptr(), gradient.nbytes, gradient), former & _MASK)
    total = gradient.detach().view(_INTEGERS[gradient.element_size()]).sum(dtype=torch.int64)
    if isinstance(former, int):
        former = torch.tensor(former) if former else total.new_zeros(())
    return total + former.to(total.device) * _FACTOR
