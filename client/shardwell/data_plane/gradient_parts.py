"""Gradients as transports push them: one part of a contribution, cut to one shard, and checksums of shared ones.

Note: [Checksums of gradients]
    A gradient on the CPU is hashed where it is. Of a gradient on a GPU, the bits are summed there as integers. This
    takes one kernel, and the host waits for it only when the work item is finished, after all its pushes. The ranks of
    a replica compute on devices of one kind, so they use the same function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from shardwell.memory.buffers import BufferPool
from shardwell_wire.encoding.chunk_streams import memory_at
from shardwell_wire.encoding.quantization_blocks import bytes_tensor
from shardwell_wire.encoding.streams import InParameters, InVector, RangePlans, StreamPlan
from shardwell_wire.encoding.wire_dtypes import AS_STORED, WireDtype
from shardwell_wire.v1 import coordinator_pb2

_SMALL_BYTES = 128 << 10
"""Segments up to this size are copied without releasing the interpreter lock, for which this thread may have to wait
afterwards."""


@dataclass(slots=True, eq=False)
class FlatGradients:
    """Whole gradients of parameters, of which the shard's range is pushed. A ``GradientPart``."""

    plans: RangePlans
    indices: tuple[int, ...]
    wire_dtype: WireDtype
    start_bytes: int
    flats: Mapping[int, torch.Tensor]
    buffers: BufferPool

    def write_to(self, memory: memoryview) -> None:
        if self.wire_dtype != AS_STORED:
            self._plan().round_trip(self._values(), InVector(memory, self.start_bytes))
            return
        # Not with torch: its copies of bytes take 1.1 to 1.6 times as long for 1 MB, and five times for small segments.
        with self.stream() as pieces:
            for at, piece in zip(self.plans.segments(self.indices), pieces, strict=True):
                target = memory[at.start_bytes - self.start_bytes : at.stop_bytes - self.start_bytes]
                if len(piece) <= _SMALL_BYTES:
                    target[:] = piece
                else:
                    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(piece, np.uint8))

    def stream(self) -> AbstractContextManager[Sequence[memoryview]]:
        if self.wire_dtype != AS_STORED:
            return self._encoding()
        pieces = []
        for at in self.plans.segments(self.indices):
            flat = self.flats[at.parameter_index]
            address, size_bytes = flat.data_ptr() + at.start_element * flat.itemsize, at.stop_bytes - at.start_bytes
            pieces.append(memory_at(address, size_bytes, flat))  # gRPC may read it after its rpc has failed
        return nullcontext(pieces)

    @contextmanager
    def _encoding(self) -> Iterator[Sequence[memoryview]]:
        plan = self._plan()
        with self.buffers.acquired(plan.size_bytes) as encoded:
            plan.encode(self._values(), encoded)
            yield [encoded]

    def _plan(self) -> StreamPlan:
        return self.plans.plan(self.indices, self.wire_dtype)

    def _values(self) -> InParameters:
        return InParameters({index: flat.view(-1) for index, flat in self.flats.items()})


@dataclass(slots=True, eq=False)
class EncodedPart:
    """The shard's part of gradients that are encoded already. A ``GradientPart``."""

    plans: RangePlans
    indices: tuple[int, ...]
    wire_dtype: WireDtype
    start_bytes: int
    pieces: Sequence[memoryview]
    """The stream."""

    def write_to(self, memory: memoryview) -> None:
        encoded = self.pieces[0] if len(self.pieces) == 1 else bytearray().join(self.pieces)
        self.plans.plan(self.indices, self.wire_dtype).decode(encoded, InVector(memory, self.start_bytes))

    def stream(self) -> AbstractContextManager[Sequence[memoryview]]:
        return nullcontext(self.pieces)


@dataclass(slots=True, eq=False)
class VectorPart:
    """A ``GradientPart`` whose gradients lie in one buffer, at the positions that they have in the shard."""

    plans: RangePlans
    indices: tuple[int, ...]
    start_bytes: int
    memory: torch.Tensor
    wire_dtype: WireDtype = AS_STORED

    def write_to(self, memory: memoryview) -> None:
        bytes_tensor(memory).copy_(self.memory)

    def stream(self) -> AbstractContextManager[Sequence[memoryview]]:
        whole = memory_at(self.memory.data_ptr(), self.memory.numel(), self.memory)
        segments = self.plans.segments(self.indices)
        return nullcontext(
            [whole[at.start_bytes - self.start_bytes : at.stop_bytes - self.start_bytes] for at in segments]
        )


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


_SAMPLED_VALUES = 64
"""Most values of one gradient that a sample contains."""


class GradientSample:
    """Some values of each gradient of one work item. They tell whether two items probably have equal gradients."""

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self._digest: int | None = None

    def add(self, gradients: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Adds the gradients of one backward: ``(parameter index, gradient)``."""
        for _, gradient in gradients:
            if gradient.is_contiguous() and gradient.is_floating_point():
                flat = gradient.detach().view(-1)
                self._parts.append(flat[:: flat.numel() // _SAMPLED_VALUES + 1].to(torch.float32, copy=True))

    def digest(self) -> int:
        """Returns a checksum of the values after the last ``add``. 0: all of them are 0, or one is not finite."""
        if self._digest is None and self._parts:
            values = torch.cat([part.to(self._parts[0].device) for part in self._parts]).cpu()
            is_telling = bool(values.isfinite().all()) and bool(values.any())
            self._digest = xxhash.xxh3_64_intdigest(memory_at(values.data_ptr(), values.nbytes, values))
            self._digest = self._digest if is_telling else 0
            self._parts.clear()
        return self._digest or 0


def _checksum(gradient: torch.Tensor, former: int | torch.Tensor) -> int | torch.Tensor:
    """Returns the checksum of a gradient, combined with that of the gradients before. 0: there are none."""
    if gradient.device.type == "cpu" and isinstance(former, int):
        return xxhash.xxh3_64_intdigest(memory_at(gradient.data_ptr(), gradient.nbytes, gradient), former & _MASK)
    total = gradient.detach().view(_INTEGERS[gradient.element_size()]).sum(dtype=torch.int64)
    if isinstance(former, int):
        former = torch.tensor(former) if former else total.new_zeros(())
    return total + former.to(total.device) * _FACTOR
