"""Shared files of shards that a new process of the server takes up: which there are, and when they are described."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardwell_server.shard.arithmetic.shard_optimizer import (
    OptimizerContent,
    PartContent,
    ShardOptimizer,
    allocate_ordinary,
)
from shardwell_server.shard.arithmetic.update_pieces import Progress
from shardwell_server.shard.memory.budget import Memory
from shardwell_server.shard.memory.mapped_memory import ShardFile, SharedBuffer, SharedMemory, new_record_name
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
from shardwell_server.shard.restart.undo import SharedProgress, UndoLog, mapped
from shardwell_server.shard.shard_spec import Role, ShardSpec
from shardwell_wire import fault_points
from shardwell_wire.errors import CapacityError

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Alignment of state tensors in a file, in bytes."""


class RecordedState(NamedTuple):
    """What a record and its step words say about a shard. A tuple, because every step makes some for each shard."""

    role: Role
    relocation: int
    """``UnitShard.relocation``."""
    version: int
    """The newest version."""
    values: ShardFile
    optimizer: ShardOptimizer | None
    """None before the first update."""
    prepared: PreparedRecord | None
    """None: no step is prepared, or its gradient is not in its file."""
    held: tuple[str, ...] = ()
    """Files of older versions."""

    @property
    def update_count(self) -> int:
        """Number of updates of the optimizer."""
        return 0 if self.optimizer is None else self.optimizer.update_count


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
    ready to update, updated. See Note: [Records and step words] in ``shard_record.py``. If something that the next
    update needs is not in shared memory, there is no record, and the shard ends with the process.

    Args:
        shared: Shared memory that outlives the process.
        undo: The log of the shard's run.
    """

    def __init__(self, spec: ShardSpec, memory: Memory, shared: SharedMemory, undo: UndoLog) -> None:
        self._spec, self._memory, self._shared, self._undo = spec, memory, shared, undo
        self._name = new_record_name()
        self.has_record = False
        """True if there is a record."""
        self._generation = 0
        """Generation of the last record."""
        self._recorded: _Recorded | None = None
        """None: there is no record of this process."""
        self._values: ShardFile | None = None
        """File of the values, which has the step word."""
        self._word: StepWord | None = None
        """The last step word of the last record."""
        self._prepared = False
        """Whether a step is saved as prepared."""
        self.mean: SharedBuffer | None = None
        """The mean gradient of the step in flight, or the new values of buffers. Laid out like the shard."""
        self._former_means: list[SharedBuffer] = []
        """Former files of the mean gradient, until no record names them."""
        self.arenas: list[SharedBuffer] = []
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
        self.arenas.append(arena)
        return [
            _view(arena, offset, template.dtype, template.shape)
            for offset, template in zip(offsets, templates, strict=True)
        ]

    def acquire_mean(self, filling: torch.Tensor | None = None) -> torch.Tensor | None:
        """Returns the memory for the next mean gradient. None: shared memory is full. uint8. [size_bytes]

        Args:
            filling: Memory that a stream may still fill, although it is no longer wanted. It is not returned.
        """
        if self._prepared and self._word is not None and self._values is not None:
            # The recorded gradient is about to be overwritten.
            self._prepared = False
            self._write_word(self._values, replace(self._word, prepared=Prepared.NO))
        if self.mean is not None and self.mean.tensor is filling:
            self._former_means.append(self.mean)
            self.mean = None
        if self.mean is None:
            try:
                self.mean = self._shared.create(self._spec.size_bytes, f"mean gradient of {self._spec.what}", ".mean")
            except CapacityError:
                return None
            self._memory.note_shared(self._spec.size_bytes)
        return self.mean.tensor

    def reserve_undo(self, piece_bytes: int) -> None:
        """Makes the undo log large enough for the next update. Without it, no process continues the update."""
        self._undo.reserve_pieces(piece_bytes)

    def begin_update(self, state: RecordedState | None) -> bool:
        """Prepares for an update. Returns whether another process can continue it; if not, removes the record."""
        self.save(state)
        if not self._prepared:
            self.remove_record()
        return self._prepared

    def progress(self, state: RecordedState | None, piece_bytes: int) -> Progress:
        """Returns the progress of the update that is about to start, or that a former process has started.

        Args:
            state: The shard before the update.
            piece_bytes: Size of the tensors that a piece changes, at most.
        """
        lasts, undo = self.begin_update(state) and self._undo.reserve_pieces(piece_bytes), self._undo
        if not lasts:
            self.remove_record()
            if state is None:
                return Progress()
            # No other process continues the update, but a former one may have applied pieces of it.
            undo = UndoLog()
            undo.reserve_pieces(piece_bytes)
        assert state is not None
        files = mapped([state.values.shared, *self.arenas])
        return SharedProgress(undo, state.values.progress, state.version, files)

    # ---- the record ----

    def save(self, state: RecordedState | None) -> None:
        """Saves a shard's state, for the next process. None: a record cannot describe it."""
        if state is None:
            self.remove_record()
            return
        if state.optimizer is not None and state.optimizer.is_updating:
            return  # the saved state is the one before the update
        self._prepared, self._values = state.prepared is not None, state.values
        if not self._continues_record(state):
            self._replace_record(state)
        if self._recorded is not None:
            self._save_word(state.version, state.update_count, state.prepared)

    def can_save_update(self, state: RecordedState | None) -> bool:
        """True if ``save_update`` can describe the shard after the update of the prepared step."""
        if state is None:
            return not self.has_record
        recorded = self._recorded
        return (
            self._prepared
            and state.prepared is not None
            and recorded is not None
            and state.update_count - recorded.update_count < MAX_UPDATES
            and self._continues_record(state)
        )

    def save_update(self, version: int, update_count: int) -> None:
        """As ``save`` after an update, by a step word alone. ``can_save_update`` was True before the update.

        Args:
            update_count: ``ShardOptimizer.update_count``.
        """
        if self._recorded is not None:
            self._prepared = False
            self._save_word(version, update_count, None)

    def remove_record(self) -> None:
        """Removes the record: another process cannot take up the shard."""
        self._recorded, self._word, self._prepared = None, None, False
        if self.has_record:
            self._shared.remove_record(self._name)
            self.has_record = False
        self._remove_former_means()

    def close(self) -> None:
        """Removes the record and the files."""
        self.remove_record()
        for arena in self.arenas:
            arena.unlink()
        self.arenas.clear()
        self._places.clear()
        if self.mean is not None:
            self._former_means.append(self.mean)
            self.mean = None
        self._remove_former_means()

    def _remove_former_means(self) -> None:
        for former in self._former_means:
            former.unlink()
            self._memory.note_shared(-self._spec.size_bytes)
        self._former_means.clear()

    def _continues_record(self, state: RecordedState) -> bool:
        """Returns whether a step word can describe the state."""
        recorded = self._recorded
        if recorded is None or recorded.content != self._content(state):
            return False
        step = state.prepared
        if step is not None and step.present and step.present != recorded.present:
            return False
        return state.update_count - recorded.update_count <= MAX_UPDATES

    def _content(self, state: RecordedState) -> tuple[object, ...]:
        optimizer = state.optimizer
        described = None if optimizer is None else (optimizer.revision, optimizer.averages.has_started)
        return state.role, state.relocation, state.values, self.mean, optimizer, described, state.held

    def _save_word(self, version: int, update_count: int, step: PreparedRecord | None) -> None:
        assert self._recorded is not None and self._values is not None
        updates = update_count - self._recorded.update_count
        kind = Prepared.NO if step is None else step.kind
        self._write_word(self._values, StepWord(self._recorded.generation, version, updates, kind))

    def _write_word(self, values: ShardFile, word: StepWord) -> None:
        if word != self._word:
            word.write(values.step_word)
            self._word = word
            self._shared.note_use()

    def _replace_record(self, state: RecordedState) -> None:
        """Writes a new record, or removes the record if the shard is not entirely in shared memory."""
        content = OptimizerContent() if state.optimizer is None else state.optimizer.content()
        arenas = self._used(content)
        step, recorded = state.prepared, self._recorded
        present = step.present if step is not None else recorded.present if recorded is not None else ()
        generation = next_generation(self._generation)
        try:
            parts = [self._part_record(part) for part in content.parts]
        except LookupError:
            self.remove_record()
            return
        buffers = [*arenas, *([self.mean] if self.mean else [])]
        description = ShardDescription(
            spec=self._spec,
            role=state.role,
            relocation=state.relocation,
            version=state.version,
            values=state.values.name,
            files={buffer.name: buffer.tensor.numel() for buffer in buffers},
            parts=parts,
            averages_started=content.averages_started,
            mean=self.mean.name if self.mean else None,
            prepared=step,
            generation=generation,
            present=present,
            counted=() if state.optimizer is None else state.optimizer.counted,
            held=state.held,
        )
        try:
            # A write that fails may leave a record, which must then be removed.
            self.has_record = True
            self._shared.write_record(self._name, description.encode(self._encoded_spec))
        except OSError as error:
            logger.warning("%s cannot be taken up after a restart: cannot write its record: %s", self._spec.what, error)
            self.remove_record()
            return
        self._generation = generation
        self._recorded = _Recorded(self._content(state), generation, present, state.update_count)
        fault_points.reach("server.record.replaced", version=state.version)
        # The former record named these files until the new record was written.
        self._keep_only(arenas)
        self._remove_former_means()

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
        for arena in self.arenas:
            if arena.tensor.data_ptr() <= tensor.data_ptr() < arena.tensor.data_ptr() + arena.tensor.numel():
                return arena
        raise LookupError("the tensor is in ordinary memory")

    def _used(self, content: OptimizerContent) -> list[SharedBuffer]:
        """Returns the files that contain state of the optimizer. Others have the state of a former optimizer."""
        if len(self.arenas) < 2:
            return list(self.arenas)
        addresses = [tensor.data_ptr() for part in content.parts for tensor in part.tensors]
        ranges = [(arena, arena.tensor.data_ptr()) for arena in self.arenas]
        return [
            arena
            for arena, start in ranges
            if any(start <= address < start + arena.tensor.numel() for address in addresses)
        ]

    def _keep_only(self, arenas: Sequence[SharedBuffer]) -> None:
        """Removes all other files of the optimizer's state, which the record no longer names."""
        for arena in [arena for arena in self.arenas if arena not in arenas]:
            arena.unlink()
            self.arenas.remove(arena)
            self._places.clear()  # another file may be mapped at the same address

    @property
    def names(self) -> list[str]:
        """Names of the shard's files, and of the record."""
        mean = [] if self.mean is None else [self.mean.name]
        return [self._name, *mean, *(arena.name for arena in self.arenas)]

    # ---- taking up ----

    def take_up(self, name: str, record: ShardDescription, values: ShardFile) -> None:
        """Opens the files of a record that a former process wrote, continued by its last step word.

        Raises:
            OSError, ValueError: A file is missing.
        """
        self._name, self.has_record, self._generation = name, True, record.generation
        self._prepared, self._values = record.prepared is not None, values
        word = StepWord.read(values.step_word)
        is_own = word.generation == record.generation
        self._word = word if is_own else StepWord(record.generation, record.version, 0, Prepared.NO)
        self.arenas = [self._shared.open(file, size) for file, size in record.files.items() if file != record.mean]
        if record.mean is not None:
            self.mean = self._shared.open(record.mean, record.files[record.mean])
            self._memory.note_shared(self._spec.size_bytes)

    def tensor_at(self, place: TensorPlace) -> torch.Tensor:
        """Returns a state tensor that a former process wrote. Raises ValueError if there is none."""
        arena = next((arena for arena in self.arenas if arena.name == place.file), None)
        if arena is None or place.offset_bytes + place.size_bytes > arena.tensor.numel():
            raise ValueError(f"its file {place.file} has no tensor at {place.offset_bytes}")
        return _view(arena, place.offset_bytes, getattr(torch, place.dtype), place.shape)


def _view(arena: SharedBuffer, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    return arena.tensor[offset : offset + size_bytes].view(dtype).view(tuple(shape))
