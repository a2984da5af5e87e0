"""Buffers of the model, such as BatchNorm statistics: the same on every trainer, and part of the run's state.

Note: Buffers of a step
    Logical rank 0's values count, as in DDP. Every work item of a step begins with the same values: those of the last
    commit, or those that the training script wrote since. When rank 0's item ends, the buffers that differ from the
    last commit's are pushed to the shard servers under the item's lease and attempt, before the item is reported as
    finished. They become the run's with the commit, whoever proposes it; the other trainers read them then.

    Differences are found by comparing bytes: the version counter of a tensor misses what torch's own batch
    normalisation writes, and what is written through ``.data``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
import xxhash
from torch import nn

from shardwell.module.store import InitialValues
from shardwell.session.buffer_values import (
    BufferValue,
    InitialBuffers,
    LiveBuffer,
    RunBuffer,
    copy_value,
    dense,
    digest_of,
    find_buffers,
    memory_of,
    new_value,
    set_value,
    text_of,
    write_value,
)
from shardwell.session.progress import ItemProgress
from shardwell_wire.errors import UsageError, VersionGoneError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)


class BufferStore(Protocol):
    """Where the run's buffers are kept."""

    def declare(self, layout: UnitLayout, values: InitialValues, step: int) -> int:
        """Makes a unit of buffers known, and uploads its values where this trainer is the one to do it.

        Returns:
            The unit's index in the run.
        """
        ...

    def push(self, unit_index: int, step: int, item: ItemProgress, buffers: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Starts to send new values ``(layout index, value)``, by rising index; they do not change until the commit."""
        ...

    def read(self, unit_index: int, version: int, wanted: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Waits for a version and copies buffers ``(layout index, target)`` of it; targets are dense, on the CPU.

        Raises:
            VersionGoneError: A later version has taken its place.
        """
        ...


class RunBuffers:
    """The persistent buffers of all sharded modules.

    Args:
        modules: Gives ``(prefix, module)`` of every sharded module, inner ones first, whenever asked. A buffer's name
            in the run is the prefix and its name in the module.
        store: Keeps their values.
        state: The run's when this trainer joined.
    """

    def __init__(
        self,
        modules: Callable[[], Iterable[tuple[str, nn.Module]]],
        store: BufferStore,
        state: coordinator_pb2.RunState,
    ) -> None:
        self._modules, self._store = modules, store
        self._buffers: dict[str, RunBuffer] = {}
        self._unit_count = 0
        self._changed_in = _versions(state)
        self._version: int | None = None
        """That the committed values here are of; None: they have to be read again."""
        self._source: tuple[int, int] | None = None
        """Epoch and attempt of the item of rank 0 that ended here in this step."""
        self._begun = False
        """Whether an item of the step began here."""
        self._undisturbed = False
        """Whether the model's buffers are known to hold ``present``."""

    def declare(self, step: int, *, has_work: bool) -> None:
        """Adds buffers that are not known yet to the run, and takes over the run's values of them.

        Args:
            step: The step in flight.
            has_work: Whether this trainer has an item of it, so that it cannot be committed meanwhile.
        """
        new = [found for found in find_buffers(self._modules()) if found.names[0] not in self._buffers]
        if not new:
            return
        described = [found.describe() for found in new]
        values = [copy_value(found.tensor) for found in new]
        layout = UnitLayout(f"buffers:{self._unit_count}", tuple(described), kind="buffers")
        unit_index = self._store.declare(layout, InitialBuffers(values), step)
        self._unit_count += 1
        for index, (parameter, value) in enumerate(zip(described, values, strict=True)):
            self._buffers[parameter.name] = RunBuffer(parameter, unit_index, index, value)
        self._version = None
        self._catch_up(step, has_work=has_work)
        self._restore()

    # ---- work items ----

    def begin_item(self, step: int, item: ItemProgress) -> None:
        """Has an item begin with the values that all items of the step begin with."""
        if not self._buffers:
            return
        live = self._checked()
        if not self._begun:
            self._note_written(live)
        if self._begun or self._version != step:
            if self._version != step:
                self._catch_up(step, has_work=True)
            for name, buffer in self._buffers.items():
                set_value(live[name], buffer.start)
        if item.item.global_rank == 0:
            self._source = None
            for buffer in self._buffers.values():
                buffer.pushed = None
        self._begun, self._undisturbed = True, False

    def _note_written(self, live: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self._buffers.items():
            digest = digest_of(live[name])
            if digest != buffer.committed.digest:
                buffer.written = BufferValue(dense(live[name]).clone(), digest)

    def written(self) -> list[coordinator_pb2.WrittenBuffer]:
        """The buffers that the training script wrote before the step's work began here."""
        return [
            coordinator_pb2.WrittenBuffer(
                unit_index=buffer.unit_index,
                buffer_index=buffer.index,
                checksum=xxhash.xxh3_64_intdigest(memory_of(buffer.written.tensor)),
            )
            for buffer in self._buffers.values()
            if buffer.written is not None
        ]

    def end_item(self, step: int, item: ItemProgress) -> None:
        """Pushes what rank 0's item left behind; what another's did is undone."""
        if not self._buffers:
            _refuse_new(find_buffers(self._modules()), {})
            return
        live = self._checked()
        if item.item.global_rank == 0:
            for name, buffer in self._buffers.items():
                buffer.pushed = new_value(live[name], buffer)
            self._push(step, item)
        else:
            for name, buffer in self._buffers.items():
                set_value(live[name], buffer.present)
        self._undisturbed = True

    def push_again(self, step: int, item: ItemProgress) -> None:
        """Pushes what a finished item of rank 0 left behind once more: it was withdrawn with the item's gradients."""
        if item.item.global_rank == 0:
            self._push(step, item)

    def _push(self, step: int, item: ItemProgress) -> None:
        by_unit: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for buffer in self._buffers.values():
            if buffer.pushed is not None:
                by_unit.setdefault(buffer.unit_index, []).append((buffer.index, buffer.pushed.tensor))
        for unit_index, values in by_unit.items():
            self._store.push(unit_index, step, item, values)
        self._source = item.item.epoch, item.item.attempt

    # ---- commits ----

    def check_untouched(self, step: int) -> None:
        """Raises UsageError if a buffer was written since the step's work here was finished.

        It is too late for this step, and the commit would overwrite it.
        """
        if not self._begun:
            return
        live = self._checked()
        for name, buffer in self._buffers.items():
            if digest_of(live[name]) != buffer.present.digest:
                raise UsageError(
                    f"buffer {name!r} was changed after the work of step {step} was finished and before its commit: "
                    "change it in the loop over step.batches, or after optimizer.step()",
                    buffer=name,
                )
        self._undisturbed = True

    def committed(self, state: coordinator_pb2.RunState, step: int, version: int, *, has_work: bool) -> None:
        """Takes over the values that a commit made the run's.

        Args:
            state: The run's.
            step: The step that was committed.
            version: The next step; more than ``step + 1`` if this trainer has fallen behind.
            has_work: Whether it has an item of the next step.
        """
        if not self._buffers:
            return
        self._changed_in = _versions(state)
        present = {name: buffer.present.digest for name, buffer in self._buffers.items()}
        if self._version is not None and (state.buffer_source.epoch, state.buffer_source.attempt) == self._source:
            self._take_own(step + 1)
        for buffer in self._buffers.values():
            buffer.written = buffer.pushed = None
        undisturbed, self._begun, self._source = self._undisturbed, False, None
        self._catch_up(version, has_work=has_work)
        self._restore(present if undisturbed else None)

    def _take_own(self, version: int) -> None:
        """What was pushed from here is committed: it need not be read."""
        changed = [buffer for buffer in self._buffers.values() if self._changed(buffer) == version]
        if self._version != version - 1 or any(buffer.pushed is None for buffer in changed):
            return
        for buffer in changed:
            assert buffer.pushed is not None
            buffer.commit(buffer.pushed)
        self._version = version

    def restore(self) -> None:
        """Undoes what the training script wrote since the commit, in a step that is committed and only gone through."""
        if self._buffers:
            self._restore()

    def _catch_up(self, version: int, *, has_work: bool) -> None:
        """Reads what has changed since the values here were committed."""
        former, self._version = self._version, None
        by_unit: dict[int, list[RunBuffer]] = {}
        for buffer in self._buffers.values():
            if former is None or self._changed(buffer) > former:
                by_unit.setdefault(buffer.unit_index, []).append(buffer)
        try:
            for unit_index, buffers in by_unit.items():
                targets = [(buffer.index, buffer.take_room()) for buffer in buffers]
                self._store.read(unit_index, version, targets)
                for buffer, (_, target) in zip(buffers, targets, strict=True):
                    buffer.commit(BufferValue(target, digest_of(target)))
        except VersionGoneError as error:
            if has_work:
                raise
            logger.info("buffers of version %d are read later: %s", version, error)  # nobody waits for this trainer
            return
        self._version = version

    def _restore(self, present: Mapping[str, int] | None = None) -> None:
        """Sets the model's buffers to the committed values.

        Args:
            present: Digests of what they hold, if that is known.
        """
        live = self._checked()
        for name, buffer in self._buffers.items():
            if present is None:
                set_value(live[name], buffer.committed)
            elif present[name] != buffer.committed.digest:
                write_value(live[name], buffer.committed)
        self._undisturbed = False

    def _changed(self, buffer: RunBuffer) -> int:
        versions = self._changed_in.get(buffer.unit_index)
        return versions[buffer.index] if versions else 0

    # ---- the model ----

    def _checked(self) -> dict[str, torch.Tensor]:
        """The model's buffers by name.

        Raises:
            UsageError: They are not those that were declared.
        """
        live = {found.names[0]: found for found in find_buffers(self._modules())}
        for name, buffer in self._buffers.items():
            found = live.get(name)
            if found is None or not buffer.fits(found):
                now = "has it no more" if found is None else f"has {text_of(found.describe())} there now"
                raise UsageError(
                    f"buffer {name!r} was {text_of(buffer.described)} when the optimizer was made, and the model "
                    f"{now}: a buffer of a run keeps its shape, its dtype and its other names. Register it with "
                    "persistent=False if it is no part of the run's state",
                    buffer=name,
                )
        if len(live) > len(self._buffers):
            _refuse_new(live.values(), self._buffers)
        return {name: found.tensor for name, found in live.items()}


def _refuse_new(live: Iterable[LiveBuffer], known: Mapping[str, RunBuffer]) -> None:
    """Raises UsageError if there is a buffer that was not declared."""
    for found in live:
        if (name := found.names[0]) not in known:
            raise UsageError(
                f"buffer {name!r} was registered after the optimizer was made: register every buffer before, so that "
                "all trainers begin with the same, or with persistent=False if it is no part of the run's state",
                buffer=name,
            )


def _versions(state: coordinator_pb2.RunState) -> dict[int, Sequence[int]]:
    return {unit.unit_index: unit.versions for unit in state.buffer_versions}
