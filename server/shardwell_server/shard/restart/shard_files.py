"""Shared files of shards that a new process of the server takes up: which there are, and when they are described."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwell_server.shard.arithmetic.reduction import Reduced
from shardwell_server.shard.arithmetic.shard_optimizer import (
    OptimizerContent,
    PartContent,
    ShardOptimizer,
    allocate_ordinary,
)
from shardwell_server.shard.arithmetic.update_pieces import Progress
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.shared_memory import ShardFile, SharedBuffer, SharedMemory, new_record_name
from shardwell_server.shard.restart.shard_record import (
    MAX_UPDATES,
    PartRecord,
    Prepared,
    PreparedRecord,
    ShardDescription,
    StepWord,
    TensorPlace,
    encode_spec,
    next_generation,
)
from shardwell_server.shard.restart.undo import ChangedRange, SharedProgress, UndoArea, area_bytes
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_wire import fault_points
from shardwell_wire.errors import CapacityError

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Alignment of state tensors in a file, in bytes."""


class DescribedShard(Protocol):
    """What a record says about a shard."""

    @property
    def role(self) -> Role:
        """What the server does with the shard."""
        ...

    @property
    def relocation(self) -> int:
        """``UnitShard.relocation``."""
        ...

    @property
    def version(self) -> int | None:
        """The newest published version."""
        ...

    @property
    def values_file(self) -> ShardFile | None:
        """The file of the values. None: they are in ordinary memory."""
        ...

    @property
    def optimizer(self) -> ShardOptimizer | None:
        """The optimizer. None before the first update."""
        ...

    @property
    def reduced(self) -> Reduced | None:
        """The mean gradient of the step in flight."""
        ...

    @property
    def is_described(self) -> bool:
        """False if the shard has state that a record cannot describe."""
        ...

    @property
    def recorded_segments(self) -> list[int] | None:
        """Numbers of the segments that the next update has a gradient for. None: the gradient is not in its file."""
        ...


class RunFiles:
    """Files that the shards of one run share. Used within ``HostedRun.exclusively``.

    Args:
        shared: Shared memory that outlives the process.
        memory: The server's memory budget.
    """

    def __init__(self, shared: SharedMemory, memory: Memory) -> None:
        self.shared, self.memory = shared, memory
        self.undo: UndoArea | None = None
        """None before the first update."""

    def enlarge_undo(self, copied_bytes: int) -> None:
        """Makes the undo area large enough for pieces of this size. Call while no update runs.

        Raises:
            CapacityError: It does not fit the shared memory.
        """
        size_bytes = area_bytes(copied_bytes)
        if self.undo is not None and self.undo.size_bytes >= size_bytes:
            return
        made = UndoArea(self.shared.create(size_bytes, "undo area", ".undo"))
        self.close()
        self.memory.note_shared(size_bytes)
        self.undo = made

    def take_up(self, undo: UndoArea) -> None:
        """Continues with the undo area of a former process."""
        self.memory.note_shared(undo.size_bytes)
        self.undo = undo

    @property
    def names(self) -> list[str]:
        """Names of the files."""
        return [] if self.undo is None else [self.undo.shared.name]

    def close(self) -> None:
        """Removes the files."""
        if self.undo is not None:
            self.memory.note_shared(-self.undo.size_bytes)
            self.undo.shared.unlink()
            self.undo = None


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The record in the folder, as far as a step word can continue it."""

    content: tuple[object, ...]
    """Everything that the record describes, except the numbers in a step word."""
    generation: int
    present: Sequence[int]
    update_count: int
    """``ShardOptimizer.update_count`` when the record was written."""


class ShardFiles:
    """The shared files of one shard, besides its values, and the record that describes them all.

    The state is saved whenever the shard reaches one from which another process can continue: published, prepared,
    ready to update, updated. See Note: [Records and step words] in ``step_word.py``. If something that the next update
    needs is not in shared memory, there is no record, and the shard ends with the process.

    Args:
        spec: The shard.
        run: Files of its run.
    """

    def __init__(self, spec: ShardSpec, run: RunFiles) -> None:
        self._spec, self._run = spec, run
        self._shared, self._memory = run.shared, run.memory
        self._name = new_record_name()
        self.has_record = False
        """True if there is a record."""
        self._generation = 0
        """Generation of the last record."""
        self._recorded: _Recorded | None = None
        """None: there is no record of this process."""
        self._word: StepWord | None = None
        """The last step word."""
        self._prepared = False
        """Whether a step is saved as prepared."""
        self.mean: SharedBuffer | None = None
        """The mean gradient of the step in flight, or the new values of buffers. Laid out like the shard."""
        self._arenas: list[SharedBuffer] = []
        """Files of the optimizer's state."""
        self._encoded_spec = encode_spec(spec)
        self._places: dict[tuple[object, ...], TensorPlace] = {}
        """Places of state tensors by address, dtype and shape."""

    # ---- memory ----

    def allocate(self, templates: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocates state of the optimizer; see ``Allocate``. Uses ordinary memory if shared memory is full."""
        offsets, size_bytes = [], 0
        for template in templates:
            offsets.append(size_bytes)
            size_bytes += -(-template.nbytes // _ALIGNMENT) * _ALIGNMENT
        try:
            arena = self._shared.create(size_bytes, f"optimizer state of {self._spec.what}", ".state")
        except CapacityError:
            return allocate_ordinary(templates)  # SharedMemory logs the reason
        self._arenas.append(arena)
        return [
            _view(arena, offset, template.dtype, template.shape)
            for offset, template in zip(offsets, templates, strict=True)
        ]

    def acquire_mean(self, shard: DescribedShard) -> torch.Tensor | None:
        """Returns the memory for the next mean gradient. None: shared memory is full. uint8. [size_bytes]"""
        if self._prepared:
            self.save(shard, prepared=False)  # the recorded gradient is about to be overwritten
        if self.mean is None:
            try:
                self.mean = self._shared.create(self._spec.size_bytes, f"mean gradient of {self._spec.what}", ".mean")
            except CapacityError:
                return None
            self._memory.note_shared(self._spec.size_bytes)
        return self.mean.tensor

    def replace_mean(self, shard: DescribedShard) -> None:
        """Removes the file of the mean gradient, because a stream that is no longer wanted still fills it."""
        former, self.mean = self.mean, None
        self.save(shard, prepared=False)  # names the file no longer
        if former is not None:
            former.unlink()
            self._memory.note_shared(-self._spec.size_bytes)

    def enlarge_undo(self, copied_bytes: int) -> None:
        """Makes the undo area large enough for the next update. Without one, the update cannot be continued."""
        try:
            self._run.enlarge_undo(copied_bytes)
        except CapacityError:
            self._run.close()

    def begin_update(self, shard: DescribedShard) -> bool:
        """Prepares for an update. Returns whether another process can continue it; if not, removes the record."""
        self.save(shard)  # names the current undo area
        if not self._prepared:
            self.remove_record()
        return self._prepared

    def progress(self, shard: DescribedShard) -> Progress:
        """Returns the progress of the update that is about to start, or that a former process has started."""
        values = shard.values_file
        assert shard.version is not None
        if not self.begin_update(shard):
            return Progress()
        if self._run.undo is None or values is None:
            self.remove_record()
            return Progress()
        return SharedProgress(self._run.undo, values.progress, shard.version)

    # ---- the record ----

    def save(self, shard: DescribedShard, version: int | None = None, *, prepared: bool = True) -> None:
        """Saves the shard's state, for the next process.

        Args:
            shard: The shard.
            version: The version that an update has just made. None: the published version.
            prepared: Whether to save the prepared step, if there is one.
        """
        if shard.optimizer is not None and shard.optimizer.is_updating:
            return  # the saved state is the one before the update
        if shard.version is None or shard.values_file is None or not shard.is_described:
            self.remove_record()
            return
        step = self._prepared_record(shard) if prepared and version is None else None
        version = shard.version if version is None else version
        self._prepared = step is not None
        if not self._continues_record(shard, step):
            self._replace_record(shard, shard.values_file, version, step)
        if self._recorded is not None:
            updates = _update_count(shard) - self._recorded.update_count
            kind = Prepared.NO if step is None else step.kind
            self._write_word(shard.values_file, StepWord(self._recorded.generation, version, updates, kind))

    def can_save_update(self, shard: DescribedShard) -> bool:
        """True if ``save_update`` can describe the shard after the update of the prepared step."""
        if not shard.is_described:
            return not self.has_record
        recorded = self._recorded
        return (
            self._prepared
            and recorded is not None
            and _update_count(shard) - recorded.update_count < MAX_UPDATES
            and self._continues_record(shard, self._prepared_record(shard))
        )

    def save_update(self, shard: DescribedShard, version: int) -> None:
        """As ``save`` after an update, by a step word alone. ``can_save_update`` was True before the update."""
        if self._recorded is not None and shard.values_file is not None:
            self._prepared = False
            updates = _update_count(shard) - self._recorded.update_count
            self._write_word(shard.values_file, StepWord(self._recorded.generation, version, updates, Prepared.NO))

    def range_of(self, tensor: torch.Tensor) -> ChangedRange:
        """Returns where a state tensor is."""
        try:
            arena = self._arena_of(tensor)
        except LookupError:
            return ChangedRange.of(tensor)
        return ChangedRange.of(tensor, arena.name, tensor.data_ptr() - arena.tensor.data_ptr())

    def remove_record(self) -> None:
        """Removes the record: another process cannot take up the shard."""
        self._recorded, self._word, self._prepared = None, None, False
        if self.has_record:
            self._shared.remove_record(self._name)
            self.has_record = False

    def close(self) -> None:
        """Removes the record and the files."""
        self.remove_record()
        for arena in self._arenas:
            arena.unlink()
        self._arenas.clear()
        self._places.clear()
        if self.mean is not None:
            self.mean.unlink()
            self._memory.note_shared(-self._spec.size_bytes)
            self.mean = None

    def _continues_record(self, shard: DescribedShard, step: PreparedRecord | None) -> bool:
        """Returns whether a step word can describe the state."""
        recorded = self._recorded
        if recorded is None or recorded.content != self._content(shard):
            return False
        if step is not None and step.present and step.present != recorded.present:
            return False
        return _update_count(shard) - recorded.update_count <= MAX_UPDATES

    def _content(self, shard: DescribedShard) -> tuple[object, ...]:
        optimizer = shard.optimizer
        state = None if optimizer is None else (optimizer.revision, optimizer.averages.has_started)
        return shard.role, shard.relocation, shard.values_file, self.mean, self._run.undo, optimizer, state

    def _write_word(self, values: ShardFile, word: StepWord) -> None:
        if word != self._word:
            word.write(values.step_word)
            self._word = word
            self._shared.note_use()

    def _replace_record(
        self, shard: DescribedShard, values: ShardFile, version: int, step: PreparedRecord | None
    ) -> None:
        """Writes a new record, or removes the record if the shard is not entirely in shared memory."""
        content = OptimizerContent() if shard.optimizer is None else shard.optimizer.content()
        arenas = self._used(content)
        present = step.present if step is not None else self._recorded.present if self._recorded is not None else ()
        generation = next_generation(self._generation)
        try:
            parts = [self._part_record(part) for part in content.parts]
        except LookupError:
            self.remove_record()
            return
        undo = self._run.undo
        buffers = [*arenas, *([self.mean] if self.mean else []), *([undo.shared] if undo else [])]
        description = ShardDescription(
            spec=self._spec,
            role=shard.role,
            relocation=shard.relocation,
            version=version,
            values=values.name,
            files={buffer.name: buffer.tensor.numel() for buffer in buffers},
            parts=parts,
            averages_started=content.averages_started,
            undo=undo.shared.name if undo else None,
            mean=self.mean.name if self.mean else None,
            prepared=step,
            generation=generation,
            present=present,
            counted=() if shard.optimizer is None else shard.optimizer.counted,
        )
        try:
            self.has_record = True
            self._shared.write_record(self._name, description.encode(self._encoded_spec))
        except OSError as error:
            logger.warning("%s cannot be taken up after a restart: cannot write its record: %s", self._spec.what, error)
            self.remove_record()
            return
        self._generation = generation
        self._recorded = _Recorded(self._content(shard), generation, present, _update_count(shard))
        fault_points.reach("server.record.replaced", version=version)
        self._keep_only(arenas)

    def _prepared_record(self, shard: DescribedShard) -> PreparedRecord | None:
        present = shard.recorded_segments
        if shard.reduced is None or present is None or (present and self.mean is None):
            return None
        return PreparedRecord(present, shard.reduced.skipped)

    def _part_record(self, part: PartContent) -> PartRecord:
        return PartRecord(
            part.algorithm,
            part.step_count,
            {name: self._place(tensor) for name, tensor in part.state.items()},
            None if part.average is None else self._place(part.average),
            part.fresh_algorithm,
            part.initializers,
            {name: self._place(tensor) for name, tensor in part.fresh_state.items()},
            None if part.fresh_average is None else self._place(part.fresh_average),
        )

    def _place(self, tensor: torch.Tensor) -> TensorPlace:
        """Returns where a tensor is. Raises LookupError if it is not in a shared file."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape)
        if (place := self._places.get(key)) is None:
            arena = self._arena_of(tensor)
            offset = tensor.data_ptr() - arena.tensor.data_ptr()
            place = TensorPlace(arena.name, offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            self._places[key] = place
        return place

    def _arena_of(self, tensor: torch.Tensor) -> SharedBuffer:
        for arena in self._arenas:
            if arena.tensor.data_ptr() <= tensor.data_ptr() < arena.tensor.data_ptr() + arena.tensor.numel():
                return arena
        raise LookupError("the tensor is in ordinary memory")

    def _used(self, content: OptimizerContent) -> list[SharedBuffer]:
        """Returns the files that contain state of the optimizer. Others have the state of a former optimizer."""
        if len(self._arenas) < 2:
            return list(self._arenas)
        addresses = [tensor.data_ptr() for part in content.parts for tensor in part.tensors]
        ranges = [(arena, arena.tensor.data_ptr()) for arena in self._arenas]
        return [
            arena
            for arena, start in ranges
            if any(start <= address < start + arena.tensor.numel() for address in addresses)
        ]

    def _keep_only(self, arenas: Sequence[SharedBuffer]) -> None:
        """Removes all other files of the optimizer's state, which the record no longer names."""
        for arena in [arena for arena in self._arenas if arena not in arenas]:
            arena.unlink()
            self._arenas.remove(arena)
            self._places.clear()  # another file may be mapped at the same address

    @property
    def names(self) -> list[str]:
        """Names of the shard's and the run's files, and of the record."""
        mean = [] if self.mean is None else [self.mean.name]
        return [self._name, *mean, *(arena.name for arena in self._arenas), *self._run.names]

    # ---- taking up ----

    def take_up(self, name: str, record: ShardDescription) -> None:
        """Opens the files of a record that a former process wrote. Raises OSError or ValueError if one is missing."""
        self._name, self.has_record, self._generation = name, True, record.generation
        self._prepared = record.prepared is not None
        special = {record.mean, record.undo}
        self._arenas = [self._shared.open(file, size) for file, size in record.files.items() if file not in special]
        if record.mean is not None:
            self.mean = self._shared.open(record.mean, record.files[record.mean])
            self._memory.note_shared(self._spec.size_bytes)

    def tensor_at(self, place: TensorPlace) -> torch.Tensor:
        """Returns a state tensor that a former process wrote. Raises ValueError if there is none."""
        arena = next((arena for arena in self._arenas if arena.name == place.file), None)
        if arena is None or place.offset_bytes + place.size_bytes > arena.tensor.numel():
            raise ValueError(f"its file {place.file} has no tensor at {place.offset_bytes}")
        return _view(arena, place.offset_bytes, getattr(torch, place.dtype), place.shape)


def _update_count(shard: DescribedShard) -> int:
    return 0 if shard.optimizer is None else shard.optimizer.update_count


def _view(arena: SharedBuffer, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    return arena.tensor[offset : offset + size_bytes].view(dtype).view(tuple(shape))
