"""Values of a model's buffers, and the units on the shard servers that store them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from shardwell.data_plane.in_place import wait_in_place
from shardwell.data_plane.interrupts import uninterrupted
from shardwell.data_plane.pushes import Pushes
from shardwell.data_plane.remote_shard import RemoteShard
from shardwell.data_plane.remote_unit import RemoteUnit
from shardwell.module.store import InitialValues
from shardwell.session.membership import Membership
from shardwell.session.run_units import ShardMappings, UnitDeclarations
from shardwell.session.step_state import WorkItemState
from shardwell_wire import chunk_streams
from shardwell_wire.errors import UsageError
from shardwell_wire.layout import ITEM_SIZES, Parameter, Segment, UnitLayout
from shardwell_wire.v1 import coordinator_pb2, initialization_pb2

_READ_THREADS = 8
"""Ranges of one unit that are read at the same time."""

_GAP_BYTES = 64 << 10
"""Buffers with a smaller gap are read as one range: another request takes longer than these bytes."""

ConnectShards = Callable[[UnitLayout, coordinator_pb2.DeclareUnitResponse], tuple[RemoteShard, ...]]


# ---- values ----


@dataclass(frozen=True, slots=True)
class BufferValue:
    """A copy of a buffer's value: a dense tensor on the CPU, and the digest of its bytes."""

    tensor: torch.Tensor
    digest: int


class LiveBuffer:
    """A buffer of the model, with its names in the run."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.names = tensor, list[str]()

    def describe(self) -> Parameter:
        """Returns the buffer's description. Raises UsageError if a run cannot store the buffer."""
        name, dtype = self.names[0], str(self.tensor.dtype).removeprefix("torch.")
        if is_lazy(self.tensor):
            raise UsageError(f"buffer {name!r} has no shape yet: run a forward before fully_shard")
        if dtype not in ITEM_SIZES or self.tensor.layout != torch.strided:
            raise UsageError(
                f"buffer {name!r} has dtype {dtype} and layout {self.tensor.layout}, which a run cannot store: "
                f"expected a dense tensor of dtype {', '.join(ITEM_SIZES)}. Register it with persistent=False if "
                "every process makes the same values",
                buffer=name,
            )
        return Parameter(name, tuple(self.tensor.shape), dtype, tuple(self.names[1:]))


@dataclass(slots=True)
class RunBuffer:
    """A declared buffer and its values on this trainer."""

    described: Parameter
    unit_index: int
    index: int
    """Index in the unit's layout."""
    committed: BufferValue
    written: BufferValue | None = None
    """Value that the training script wrote since the last commit. The step's work items start with this value."""
    pushed: BufferValue | None = None
    """Value after rank 0's item, if the item or the training script has changed the buffer since the last commit."""
    spare: torch.Tensor | None = None
    """Memory of an earlier value, reused for the next value."""

    @property
    def start(self) -> BufferValue:
        """Value with which a work item starts."""
        return self.written or self.committed

    @property
    def present(self) -> BufferValue:
        """Value of the module's buffer after the last item of this trainer."""
        return self.pushed or self.start

    def matches(self, live: LiveBuffer) -> bool:
        """True if a buffer of the model still has the declared dtype, shape and names."""
        declared, tensor = self.described, live.tensor
        return (
            tensor.dtype == self.committed.tensor.dtype
            and tensor.shape == declared.shape
            and (*live.names,) == (declared.name, *declared.aliases)
        )

    def acquire_memory(self) -> torch.Tensor:
        """Returns memory for another value."""
        memory, self.spare = self.spare, None
        return torch.empty_like(self.committed.tensor) if memory is None else memory

    def commit(self, value: BufferValue) -> None:
        """Replaces the committed value."""
        self.committed, self.spare = value, self.committed.tensor

    def forget_changes(self) -> None:
        """Forgets the values of the step that was committed."""
        self.written = self.pushed = None


class InitialBuffers:
    """``InitialValues`` of buffers that this trainer holds.

    Args:
        values: Values by index in the unit's layout.
    """

    draws: Mapping[int, initialization_pb2.ParameterDraw] = {}

    def __init__(self, values: Sequence[BufferValue]) -> None:
        self._values = values

    def read(self, segment: Segment) -> Iterator[bytes | memoryview]:
        tensor = self._values[segment.parameter_index].tensor
        yield chunk_streams.memory_at(
            tensor.data_ptr() + segment.start_element * tensor.element_size(), segment.size_bytes, tensor
        )


def have_buffers(modules: Iterable[nn.Module]) -> bool:
    """Returns whether there is any buffer, persistent or not, in the modules or in modules inside them."""
    waiting, seen = list(modules), set[int]()
    while waiting:
        module = waiting.pop()
        if module._buffers:
            return True
        for part in module._modules.values():
            if part is not None and id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)
    return False


def find_buffers(modules: Iterable[tuple[str, nn.Module]]) -> list[LiveBuffer]:
    """Returns the persistent buffers of the model. A tied buffer is returned once.

    Args:
        modules: ``(prefix, module)`` of the sharded modules, inner modules first.
    """
    found: dict[int, LiveBuffer] = {}
    named: set[int] = set()
    for prefix, module in modules:
        owners = {
            path: owner
            for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
            if id(owner) not in named  # an inner sharded module has named it
        }
        named.update(map(id, owners.values()))
        for path, owner in owners.items():
            for name, buffer in owner._buffers.items():
                if buffer is not None and name not in owner._non_persistent_buffers_set:
                    found.setdefault(id(buffer), LiveBuffer(buffer)).names.append(f"{path}.{name}" if path else name)
    return list(found.values())


def describe(parameter: Parameter) -> str:
    """Returns a buffer's dtype, shape and further names, for messages."""
    also = f", also named {', '.join(map(repr, parameter.aliases))}" if parameter.aliases else ""
    return f"{parameter.dtype} {list(parameter.shape)}{also}"


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as a contiguous tensor on the CPU, without a copy if possible."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def memory_of(values: torch.Tensor) -> memoryview:
    """Returns the bytes of a dense tensor on the CPU."""
    return chunk_streams.memory_at(values.data_ptr(), values.nbytes, values)


def digest_of(tensor: torch.Tensor) -> int:
    """Returns a digest of the tensor's bytes. NaN and -0.0 are compared by their bytes, too."""
    return xxhash.xxh3_128_intdigest(memory_of(dense(tensor)))


def copy_value(tensor: torch.Tensor) -> BufferValue:
    """Returns a copy of a buffer's present value."""
    copy = dense(tensor).clone()
    return BufferValue(copy, digest_of(copy))


def changed_value(tensor: torch.Tensor, buffer: RunBuffer) -> BufferValue | None:
    """Returns a copy of a buffer's value after rank 0's item; None if the buffer has not changed since the commit."""
    digest = digest_of(tensor)
    if digest == buffer.committed.digest and buffer.written is None:
        return None
    return BufferValue(buffer.acquire_memory().copy_(tensor.detach()), digest)


def set_value(live: torch.Tensor, value: BufferValue) -> None:
    """Sets a buffer. A buffer that has the value already keeps its version counter."""
    if digest_of(live) != value.digest:
        write_value(live, value)


def write_value(live: torch.Tensor, value: BufferValue) -> None:
    """Sets a buffer without a comparison."""
    with torch.no_grad():
        live.copy_(value.tensor)


# ---- the store ----


class BufferStore(Protocol):
    """Stores the run's buffers."""

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        """Declares a unit of buffers and, if the coordinator selects this trainer, uploads its values.

        Returns:
            The unit's index in the run.
        """
        ...

    def push(
        self, unit_index: int, step: int, item: WorkItemState, buffers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Starts to send new values.

        Args:
            unit_index: The unit.
            step: The step in flight.
            item: Work item of logical rank 0.
            buffers: ``(layout index, value)`` by increasing index. The values do not change until the commit.
        """
        ...

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Waits for a version and copies buffers from it.

        Args:
            unit_index: The unit.
            version: The version.
            wanted: ``(layout index, target)``; targets are dense tensors on the CPU.

        Raises:
            VersionGoneError: A later version has replaced it.
        """
        ...


class RemoteBuffers:
    """A ``BufferStore`` on the shard servers: rank 0 pushes values, the other trainers read them.

    Args:
        membership: The membership of this trainer.
        declarations: Declares units.
        connect: Connects to the shards of a declared unit. Values travel in their stored dtypes.
        pushes: Pushes values.
        mappings: Maps shards of servers on this host.
        excuse: Returns whether a failed push of an item's attempt does not matter. Called in any thread.
    """

    def __init__(
        self,
        membership: Membership,
        declarations: UnitDeclarations,
        connect: ConnectShards,
        pushes: Pushes,
        mappings: ShardMappings,
        excuse: Callable[[WorkItemState, tuple[int, int], BaseException], bool],
    ) -> None:
        self._excuse = excuse
        self._membership, self._declarations, self._connect = membership, declarations, connect
        self._pushes, self._mappings = pushes, mappings
        self.units: dict[int, RemoteUnit] = {}
        """The units by their index in the run."""

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        """See ``BufferStore.declare``."""
        unit = self._declarations.declare(layout, values, step, lambda declared: self._connect(layout, declared))
        self.units[unit.index] = self._mappings.map_stored(unit)
        return unit.index

    def remap(self, unit: RemoteUnit, moved: Sequence[int], wait: bool) -> RemoteUnit:
        """Returns a unit whose shards have moved, mapped again if servers of this host share all its shards."""
        return self._mappings.map_stored(replace(unit, vector=None))

    def push(
        self, unit_index: int, step: int, item: WorkItemState, buffers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """See ``BufferStore.push``. A failure is raised by the next push or drain."""
        self._membership.check()
        if item.abandoned or self._membership.lapsed:
            return
        unit = self.units[unit_index]
        with uninterrupted:  # the servers wait for every part that is counted
            header = item.headers(self._membership.context(step, item.item)).start_part(unit_index)
            values = [(index, tensor.reshape(-1)) for index, tensor in buffers]
            self._pushes.push(unit, header, values, partial(self._excuse, item, item.key))

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        """See ``BufferStore.read``."""
        self._membership.check()
        unit = self.units[unit_index]
        present = [(index, target) for index, target in wanted if target.nbytes]
        if not present:
            return
        if unit.vector is not None:
            wait_in_place(unit, version, self._pushes.stats)
            _copy_buffers(unit.layout, unit.vector.bytes, present)
            unit.vector.check(version)
            return
        flat = torch.empty(unit.layout.size_bytes, dtype=torch.uint8)
        ranges = list(_ranges(unit, sorted(index for index, _ in present)))

        def fetch(shard: RemoteShard) -> int:
            size_bytes = shard.stop_bytes - shard.start_bytes
            return shard.fetch(version, chunk_streams.memory_at(flat.data_ptr() + shard.start_bytes, size_bytes, flat))

        if len(ranges) == 1:
            fetch(ranges[0])
        else:
            with ThreadPoolExecutor(min(_READ_THREADS, len(ranges)), thread_name_prefix="shardwell-buffers") as reads:
                list(reads.map(fetch, ranges))
        _copy_buffers(unit.layout, flat, present)


def _copy_buffers(layout: UnitLayout, flat: torch.Tensor, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
    """Copies buffers out of a unit's flat vector. uint8. [size_bytes]"""
    for index, target in wanted:
        start = layout.starts[index]
        target.view(-1).view(torch.uint8).copy_(flat[start : start + target.nbytes])


def _ranges(unit: RemoteUnit, indices: Sequence[int]) -> Iterator[RemoteShard]:
    """Yields the parts of shards that store the buffers with these indices."""
    layout = unit.layout
    spans = [(layout.starts[index], layout.starts[index] + layout.parameters[index].size_bytes) for index in indices]
    cuts = [0, *(n for n, (before, after) in enumerate(pairwise(spans), 1) if after[0] - before[1] > _GAP_BYTES)]
    for first, stop in pairwise([*cuts, len(spans)]):
        low, high = spans[first][0], spans[stop - 1][1]
        for shard in unit.shards:
            start, end = max(low, shard.start_bytes), min(high, shard.stop_bytes)
            if start < end:
                yield shard.narrowed(start, end)
