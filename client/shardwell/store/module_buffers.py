"""Buffers of the model, such as BatchNorm statistics, and the units on the shard servers that store them.

Note: [Buffers of a step]
    Logical rank 0's values count, as in DDP. Every work item of a step starts with the same values: those of the last
    commit, or those that the training script wrote since. When rank 0's item ends, the trainer pushes the buffers that
    differ from the last commit to the shard servers, under the item's lease and attempt, before it reports the item as
    finished. The commit makes them the run's values, whichever trainer proposes it. The other trainers then read them.

    With several pipeline stages, each stage has its own buffers. The values of dp rank 0 and tensor-parallel rank 0 of
    the stage count.

    Changes are found by comparing bytes. A tensor's version counter does not count the writes of torch's batch
    normalisation, nor those through ``.data``.

Note: [Buffers that take their shape in the first step]
    A forward may register a buffer, or give it another shape, as the observers of quantization do. In the first step,
    when rank 0's item ends, its trainer declares these buffers in one more unit, whose buffers replace those of the
    same name. Items of that step that start later have the former buffers again. The other trainers find the unit with
    the first commit, and trainers that join later when they declare their buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import xxhash
from torch import nn
from torch.nn.parameter import is_lazy

from shardwell.data_plane.fetch import wait_in_place
from shardwell.data_plane.shard import RemoteShard, RemoteUnit, Wire
from shardwell.membership.membership import Membership
from shardwell.module.new_units import GridPlace
from shardwell.module.parameter_store import InitialValues
from shardwell.step.step_state import WorkItemState
from shardwell.store.item_pushes import ItemPushes
from shardwell.store.run_units import ShardMappings, UnitDeclarations
from shardwell_wire.encoding import chunk_streams
from shardwell_wire.errors import StepStateError, UsageError, VersionGoneError
from shardwell_wire.model.layout import ITEM_SIZES, Parameter, Segment, UnitLayout
from shardwell_wire.v1 import coordinator_pb2, initialization_pb2

_READ_THREADS = 8
"""Ranges of one unit that are read at the same time."""

_RESHAPED = "reshaped"
"""The unit of the buffers that took their shape in the first step."""

_UNKNOWN = -1
"""A digest that no value has."""

_KEEP_SHAPES = (
    "the forward may register a buffer, or give it another shape or dtype, in the first step of a run only. If the "
    "shape changes in later steps, register the buffer with persistent=False, or in its largest size. If the first "
    "step does not use the module, run one forward of the model before the optimizer is made. A run with such buffers "
    "that continues from a checkpoint needs the units and the tensor and pipeline axes of the checkpoint"
)

_GAP_BYTES = 64 << 10
"""Buffers with a smaller gap are read as one range: another request takes longer than these bytes."""

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
        self.sites: list[tuple[nn.Module, str]] = []
        """Modules that hold the buffer, with its name there."""

    def assign(self, value: BufferValue) -> None:
        """Sets the buffer, also to a value of another shape or dtype."""
        if self.tensor.shape == value.tensor.shape and self.tensor.dtype == value.tensor.dtype:
            set_value(self.tensor, value)
        elif self.tensor.dtype == value.tensor.dtype:
            self.tensor.data = value.tensor.to(self.tensor.device, copy=True)
        else:
            for owner, name in self.sites:
                owner._buffers[name] = value.tensor.to(self.tensor.device, copy=True)

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


def named_owners(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names in the run of all modules that may hold buffers, with the modules.

    Args:
        modules: ``(prefix, module)`` of the sharded modules, inner modules first.
    """
    named: set[int] = set()
    for prefix, module in modules:
        owners = [
            (path, owner)
            for path, owner in module.named_modules(prefix=prefix.removesuffix("."), remove_duplicate=False)
            if id(owner) not in named  # an inner sharded module has named it
        ]
        named.update(id(owner) for _, owner in owners)
        yield from owners


def find_buffers(modules: Iterable[tuple[str, nn.Module]]) -> list[LiveBuffer]:
    """Returns the persistent buffers of the model. A tied buffer is returned once.

    Args:
        modules: As for ``named_owners``.
    """
    found: dict[int, LiveBuffer] = {}
    for path, owner in named_owners(modules):
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                live = found.setdefault(id(buffer), LiveBuffer(buffer))
                live.names.append(f"{path}.{name}" if path else name)
                live.sites.append((owner, name))
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


class RemoteBuffers:
    """The run's buffers on the shard servers: rank 0 pushes values, the other trainers read them.

    Args:
        membership: The membership of this trainer.
        declarations: Declares units.
        pushes: Pushes values under work items.
        mappings: Maps shards of servers on this host.
        wire: Has no other dtypes: values travel in their stored dtypes.
        note_declared: Called with each new unit, whose shards may have moved while it was declared.
    """

    def __init__(
        self,
        membership: Membership,
        declarations: UnitDeclarations,
        pushes: ItemPushes,
        mappings: ShardMappings,
        wire: Wire,
        note_declared: Callable[[RemoteUnit], None],
    ) -> None:
        self._membership, self._declarations, self._note_declared = membership, declarations, note_declared
        self._pushes, self._mappings, self._wire = pushes, mappings, wire
        self.units: dict[int, RemoteUnit] = {}
        """The units by their index in the run."""

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        """Declares a unit of buffers and, if the coordinator selects this trainer, uploads its values.

        Returns:
            The unit's index in the run.
        """
        unit = self._declarations.declare(layout, values, step, self._wire)
        self.units[unit.index] = self._mappings.map_stored(unit)
        self._note_declared(unit)
        return unit.index

    def remap(self, unit: RemoteUnit, moved: Sequence[int], wait: bool) -> RemoteUnit:
        """Returns a unit whose shards have moved, mapped again if servers of this host share all its shards."""
        return self._mappings.map_stored(replace(unit, vector=None))

    def find(self, name: str) -> UnitLayout | None:
        """Returns the layout of a unit of the run. None: the run has no such unit."""
        request = coordinator_pb2.DescribeWeightsRequest(run=self._membership.run)
        try:
            units = self._membership.call("DescribeWeights", request).units
        except StepStateError:  # new units are being filled from a checkpoint, which has no such unit
            return None
        return next((UnitLayout.from_proto(unit.spec) for unit in units if unit.spec.name == name), None)

    def push(
        self, unit_index: int, step: int, item: WorkItemState, buffers: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """See ``ItemPushes.push_buffers``."""
        self._pushes.push_buffers(self.units[unit_index], step, item, buffers)

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Waits for a version and copies buffers from it.

        Args:
            unit_index: The unit.
            version: The version.
            wanted: ``(layout index, target)``; targets are dense tensors on the CPU.

        Raises:
            VersionGoneError: A later version has replaced it.
        """
        self._membership.check()
        present = [(index, target) for index, target in wanted if target.nbytes]
        if not present:
            return
        vector = wait_in_place(lambda: self.units[unit_index], version, self._pushes.stats)
        unit = self.units[unit_index]
        if vector is not None:
            _copy_buffers(unit.layout, vector.bytes, present)
            # The server may have begun the next version while the buffers were copied.
            vector.check(version)
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


logger = logging.getLogger(__name__)


class RunBuffers:
    """The persistent buffers of all sharded modules. See Note: [Buffers of a step].

    Args:
        modules: Returns ``(prefix, module)`` of every sharded module, inner modules first. The name of a buffer in the
            run is the prefix and its name in the module.
        store: Stores the values.
        state: The run's state when this trainer joined.
        place: Place of this trainer in the grid.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        store: RemoteBuffers,
        state: coordinator_pb2.RunState,
        place: GridPlace,
    ) -> None:
        self._modules, self._store, self._place = modules, store, place
        self.by_name: dict[str, RunBuffer] = {}
        """The declared buffers. Empty: the model has none."""
        self.find_model_names: Callable[[], Mapping[str, tuple[str, ...]]] = dict
        """Returns the names in the model that differ from those in the run, by the latter. See ``model_names``."""
        self._unit_count = 0
        self._changed_in = _versions(state)
        self._version: int | None = None
        """Version of the committed values on this trainer. None: unknown, so all values are read again."""
        self._source: tuple[int, int] | None = None
        """Epoch and attempt of the item whose buffers count, if it ended on this trainer in this step."""
        self._item_started = False
        """True if an item of the step started on this trainer."""
        self._undisturbed = False
        """True if no buffer of the model can have changed since it had the value ``RunBuffer.present``."""
        self._is_declaring = False
        """True if buffers are declared whose values were not read yet."""
        self._is_first_step = False
        """True until this trainer sees a commit, if it has declared its buffers before."""
        self._reshaped: dict[str, RunBuffer] = {}
        """In the first step: buffers that rank 0's item on this trainer has registered or given another shape."""
        self._unset: set[tuple[nn.Module, str]] = set()
        """In the first step: modules with the names of buffers that were None when the optimizer was made."""
        self._must_adopt = False
        """True if the run may have buffers of the first step that this trainer does not know."""
        self._has_adopted = False

    def declare(self, step: int, *, has_work: bool) -> None:
        """Declares the model's new buffers in the run, and sets them to the run's values.

        Args:
            step: The step in flight.
            has_work: Whether this trainer has an item of the step, which delays the commit until the call returns.
        """
        new = [found for found in find_buffers(self._modules()) if found.names[0] not in self.by_name]
        if new:
            described, values = [found.describe() for found in new], [copy_value(found.tensor) for found in new]
            self.by_name |= self._declare(self._place.buffers_name(self._unit_count), described, values, step)
            self._unit_count += 1
            self._is_declaring = True
        self._is_first_step, self._must_adopt = not step, step > 0 and not self._has_adopted
        if self._is_first_step:
            self._unset = {
                (owner, name)
                for _, owner in named_owners(self._modules())
                for name, tensor in owner._buffers.items()
                if tensor is None
            }
        self._adopt_reshaped(step)
        if self._is_declaring:  # now, or in a call that failed
            self._version = None
            self._read_changes(step, has_work=has_work)
            self._restore()
            self._is_declaring = False

    def _declare(
        self, unit: str, described: Sequence[Parameter], values: Sequence[BufferValue], step: int
    ) -> dict[str, RunBuffer]:
        layout = UnitLayout(unit, tuple(described), kind="buffers", pp_ranks=(self._place.pp_rank,))
        unit_index = self._store.declare(layout, InitialBuffers(values), step)
        return {
            (plain := parameter.plain).name: RunBuffer(plain, unit_index, index, value)
            for index, (parameter, value) in enumerate(zip(described, values, strict=True))
        }

    # ---- the first step. See Note: [Buffers that take their shape in the first step] ----

    @property
    def _present(self) -> Mapping[str, RunBuffer]:
        """The buffers that the model has after the last item of this trainer, by name."""
        return self.by_name | self._reshaped if self._reshaped else self.by_name

    def _declare_reshaped(self, step: int) -> None:
        """Declares the buffers that rank 0's item has registered or given another shape."""
        new = [
            found
            for found in find_buffers(self._modules())
            if (declared := self.by_name.get(found.names[0])) is None or not declared.matches(found)
        ]
        if new:
            names, values = self.find_model_names(), [copy_value(found.tensor) for found in new]
            described = [replace(found.describe(), model_names=names.get(found.names[0], ())).reshaped for found in new]
            self._reshaped = self._declare(self._place.buffers_name(_RESHAPED), described, values, step)
            for buffer, value in zip(self._reshaped.values(), values, strict=True):
                buffer.committed, buffer.pushed = BufferValue(torch.zeros_like(value.tensor), _UNKNOWN), value

    def _adopt_reshaped(self, step: int) -> None:
        """Gives the model the buffers that took their shape in the first step, if this trainer may not know them."""
        if not self._must_adopt:
            return
        layout = None if self._reshaped else self._store.find(self._place.buffers_name(_RESHAPED))
        if layout is not None:
            values = [
                BufferValue(torch.zeros(each.shape, dtype=getattr(torch, each.dtype)), _UNKNOWN)
                for each in layout.parameters
            ]
            self._reshaped = self._declare(layout.unit, layout.parameters, values, step)
            self._is_declaring = True
        self._must_adopt = False
        if self._reshaped:
            self.by_name, self._reshaped, self._has_adopted = {**self._present}, {}, True
            self._assign({name: buffer.present for name, buffer in self.by_name.items()})

    def _assign(self, values: Mapping[str, BufferValue]) -> None:
        """Gives the model exactly these buffers, whatever their shapes are."""
        missing = dict(values)
        for found in find_buffers(self._modules()):
            if (value := missing.pop(found.names[0], None)) is not None:
                found.assign(value)
                continue
            for owner, name in found.sites:
                owner._buffers.pop(name)
                if (owner, name) in self._unset:
                    owner._buffers[name] = None
        owners = dict(named_owners(self._modules())) if missing else {}
        for name, value in missing.items():
            tensor = value.tensor.clone()
            for path in (name, *self._present[name].described.aliases):
                prefix, _, own_name = path.rpartition(".")
                if (holder := owners.get(prefix)) is None:
                    raise UsageError(
                        f"the run has buffer {path!r} since its first step, but the model has no module {prefix!r}: "
                        "every trainer must build the same model",
                        buffer=path,
                    )
                holder._buffers[own_name] = tensor.to(_device_of(holder))

    # ---- work items ----

    def _counts(self, item: WorkItemState) -> bool:
        """True if the buffers at the end of an item become the run's values, on this pipeline stage."""
        return item.item.dp_rank == 0 and self._place.tp_rank == 0 and self._place.cp_rank == 0

    def start_item(self, step: int, item: WorkItemState) -> None:
        """Sets the buffers to the values with which all items of the step start."""
        self._adopt_reshaped(step)
        if self._is_first_step and self._item_started:
            self.undo_items()
        if not self.by_name:
            self._item_started = True
            return
        live = self._checked(self.by_name)
        if not self._item_started:
            self._find_written(live)
        if self._item_started or self._version != step:
            if self._version != step:
                self._read_changes(step, has_work=True)
            for name, buffer in self.by_name.items():
                set_value(live[name], buffer.start)
        if self._counts(item):
            self._source, self._reshaped = None, {}
            for buffer in self.by_name.values():
                buffer.pushed = None
        self._item_started, self._undisturbed = True, False

    def _find_written(self, live: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self.by_name.items():
            digest = digest_of(live[name])
            if digest != buffer.committed.digest:
                buffer.written = BufferValue(dense(live[name]).clone(), digest)

    def written(self) -> list[coordinator_pb2.WrittenBuffer]:
        """Returns the buffers that the training script wrote before the step's first item started."""
        return [
            coordinator_pb2.WrittenBuffer(
                unit_index=buffer.unit_index,
                buffer_index=buffer.index,
                checksum=xxhash.xxh3_64_intdigest(memory_of(buffer.written.tensor)),
            )
            for buffer in self.by_name.values()
            if buffer.written is not None
        ]

    def end_item(self, step: int, item: WorkItemState) -> None:
        """Pushes the buffers after the item whose values count; undoes the changes of any other item."""
        if not self.by_name and not have_buffers(module for _, module in self._modules()):
            return
        if self._counts(item):
            if self._is_first_step:
                self._declare_reshaped(step)
            live = self._checked(self._present)
            for name, buffer in self.by_name.items():
                if name not in self._reshaped:
                    buffer.pushed = changed_value(live[name], buffer)
            self._push(step, item)
        else:
            self._undo()
        self._undisturbed = True

    def abandon_item(self) -> None:
        """Undoes the changes of an item whose attempt is over."""
        if self.by_name or self._is_first_step:
            self._undo()
            self._undisturbed = True

    def undo_items(self) -> None:
        """Sets the buffers to the values with which the step's items start: the items are computed again."""
        starts, self._undisturbed = {name: buffer.start for name, buffer in self.by_name.items()}, False
        if self._is_first_step:
            self._assign(starts)
        elif starts:
            live = self._checked(self.by_name)
            for name, value in starts.items():
                set_value(live[name], value)

    def _undo(self) -> None:
        """Undoes the changes of an item whose values do not count."""
        if self._is_first_step:
            self._assign({name: buffer.present for name, buffer in self._present.items()})
            return
        live = self._checked(self.by_name)
        for name, buffer in self.by_name.items():
            set_value(live[name], buffer.present)

    def rejoin(self, state: coordinator_pb2.RunState | None, step: int, *, has_work: bool) -> None:
        """Called when this trainer has joined the run again.

        Args:
            state: The run's state. None: nothing was committed meanwhile.
            step: The step in flight.
            has_work: Whether this trainer has an item of the step.
        """
        self._source = None
        if state is None:
            return
        self._changed_in, self._version, self._item_started = _versions(state), None, False
        self._note_reshaped(step)
        if not self.by_name:
            return
        for buffer in self.by_name.values():
            buffer.forget_changes()
        self._read_changes(step, has_work=has_work)
        self._restore()

    def push_again(self, step: int, item: WorkItemState) -> None:
        """Repeats the push of the finished item whose values count. It was withdrawn with the item's gradients."""
        if self._counts(item):
            self._push(step, item)

    def _push(self, step: int, item: WorkItemState) -> None:
        by_unit: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for buffer in self._present.values():
            if buffer.pushed is not None:
                by_unit.setdefault(buffer.unit_index, []).append((buffer.index, buffer.pushed.tensor))
        for unit_index, values in by_unit.items():
            self._store.push(unit_index, step, item, values)
        self._source = item.item.epoch, item.item.attempt

    # ---- commits ----

    def check_untouched(self, step: int) -> None:
        """Raises UsageError if a buffer was written after the step's work on this trainer was finished.

        Such a write is too late for this step, and the commit would overwrite it.
        """
        if not self._item_started:
            return
        live = self._checked(self._present)
        for name, buffer in self._present.items():
            if digest_of(live[name]) != buffer.present.digest:
                shown = self._shown(name)
                raise UsageError(
                    f"buffer {shown!r} was changed after the work of step {step} was finished and before its commit: "
                    "change it in the loop over step.batches, or after optimizer.step()",
                    buffer=shown,
                )
        self._undisturbed = True

    def commit(self, state: coordinator_pb2.RunState, step: int, version: int, *, has_work: bool) -> None:
        """Sets the buffers to the values of a commit. Not needed if there are none.

        Args:
            state: The run's state after the commit.
            step: The step that was committed.
            version: The next step; more than ``step + 1`` if this trainer has fallen behind.
            has_work: Whether this trainer has an item of the next step.
        """
        self._changed_in = _versions(state)
        if not step:
            self._note_reshaped(version)
        present = {name: buffer.present.digest for name, buffer in self.by_name.items()}
        if self._version is not None and (state.buffer_source.epoch, state.buffer_source.attempt) == self._source:
            self._commit_own(step + 1)
        for buffer in self.by_name.values():
            buffer.forget_changes()
        undisturbed, self._item_started, self._source = self._undisturbed, False, None
        self._read_changes(version, has_work=has_work)
        self._restore(present if undisturbed else None)

    def _note_reshaped(self, step: int) -> None:
        """Called at the first commit that this trainer sees: buffers may have taken their shape before."""
        self._is_first_step = False
        known = {buffer.unit_index for buffer in self.by_name.values()}
        self._must_adopt = bool(self._reshaped or self._changed_in.keys() - known) and not self._has_adopted
        self._adopt_reshaped(step)

    def _commit_own(self, version: int) -> None:
        """Makes the values that this trainer has pushed the committed values, without reading them."""
        changed = [buffer for buffer in self.by_name.values() if self._version_of_change(buffer) == version]
        if self._version != version - 1 or any(buffer.pushed is None for buffer in changed):
            return
        for buffer in changed:
            assert buffer.pushed is not None
            buffer.commit(buffer.pushed)
        self._version = version

    def restore(self) -> None:
        """Undoes all writes since the last commit. Called while a committed step is repeated."""
        self._item_started = False
        for buffer in self.by_name.values():
            buffer.forget_changes()
        if self.by_name:
            self._restore()

    def _read_changes(self, version: int, *, has_work: bool) -> None:
        """Reads the buffers that have changed since the committed values on this trainer."""
        former, self._version = self._version, None
        by_unit: dict[int, list[RunBuffer]] = {}
        for buffer in self.by_name.values():
            if former is None or self._version_of_change(buffer) > former:
                by_unit.setdefault(buffer.unit_index, []).append(buffer)
        try:
            for unit_index, buffers in by_unit.items():
                targets = [(buffer.index, buffer.acquire_memory()) for buffer in buffers]
                self._store.read(unit_index, version, targets)
                for buffer, (_, target) in zip(buffers, targets, strict=True):
                    buffer.commit(BufferValue(target, digest_of(target)))
        except VersionGoneError as error:
            if has_work:
                raise
            logger.info("buffers of version %d are read later: %s", version, error)  # the run goes on
            return
        self._version = version

    def _restore(self, present: Mapping[str, int] | None = None) -> None:
        """Sets the model's buffers to the committed values.

        Args:
            present: Digests of the buffers' present values, if known.
        """
        if self._is_first_step:
            self._reshaped = {}
            self._assign({name: buffer.committed for name, buffer in self.by_name.items()})
        live = self._checked(self.by_name)
        for name, buffer in self.by_name.items():
            if present is None:
                set_value(live[name], buffer.committed)
            elif present[name] != buffer.committed.digest:
                write_value(live[name], buffer.committed)
        self._undisturbed = False

    def _version_of_change(self, buffer: RunBuffer) -> int:
        """Returns the version in which the buffer last changed."""
        versions = self._changed_in.get(buffer.unit_index)
        return versions[buffer.index] if versions else 0

    # ---- the model ----

    def _shown(self, name: str) -> str:
        return self.find_model_names().get(name, (name,))[0]

    def _checked(self, buffers: Mapping[str, RunBuffer]) -> dict[str, torch.Tensor]:
        """Returns the model's buffers by name.

        Raises:
            UsageError: They differ from the declared buffers.
        """
        live = {found.names[0]: found for found in find_buffers(self._modules())}
        for name, buffer in buffers.items():
            found = live.get(name)
            if found is None or not buffer.matches(found):
                shown = self._shown(name)
                now = "has no such buffer now" if found is None else f"now has {describe(found.describe())}"
                raise UsageError(
                    f"buffer {shown!r} was {describe(buffer.described)} when the step started, but the model {now}: "
                    f"{_KEEP_SHAPES}",
                    buffer=shown,
                )
        if len(live) > len(buffers):
            new = next(name for name in live if name not in buffers)
            shown = self._shown(new)
            raise UsageError(
                f"buffer {shown!r} was registered after the optimizer was made: {_KEEP_SHAPES}", buffer=shown
            )
        return {name: found.tensor for name, found in live.items()}


def _device_of(module: nn.Module) -> torch.device:
    """Returns the device of a module's tensors."""
    tensors = (*module.parameters(), *module.buffers())
    return tensors[0].device if tensors else torch.device("cpu")


def _versions(state: coordinator_pb2.RunState) -> dict[int, Sequence[int]]:
    """Returns the version of each buffer's last change, by unit index."""
    return {unit.unit_index: unit.versions for unit in state.buffer_versions}
