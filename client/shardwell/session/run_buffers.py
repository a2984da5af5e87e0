"""Buffers of the model, such as BatchNorm statistics: the same on every trainer, and part of the run's state.

Note: [Buffers of a step]
    Logical rank 0's values count, as in DDP. Every work item of a step starts with the same values: those of the last
    commit, or those that the training script wrote since. When rank 0's item ends, the trainer pushes the buffers that
    differ from the last commit to the shard servers, under the item's lease and attempt, before it reports the item as
    finished. The commit makes them the run's values, whichever trainer proposes it. The other trainers then read them.

    With several pipeline stages, each stage has its own buffers. The values of dp rank 0 and tensor-parallel rank 0 of
    the stage count.

    Changes are found by comparing bytes. A tensor's version counter does not count the writes of torch's batch
    normalisation, nor those through ``.data``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import xxhash
from torch import nn

from shardwell.module.naming import GridPlace
from shardwell.session.buffer_store import (
    BufferStore,
    BufferValue,
    InitialBuffers,
    LiveBuffer,
    RunBuffer,
    changed_value,
    copy_value,
    dense,
    describe,
    digest_of,
    find_buffers,
    have_buffers,
    memory_of,
    set_value,
    write_value,
)
from shardwell.session.step_state import WorkItemState
from shardwell_wire.errors import UsageError, VersionGoneError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import coordinator_pb2

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
        store: BufferStore,
        state: coordinator_pb2.RunState,
        place: GridPlace,
    ) -> None:
        self._modules, self._store, self._place = modules, store, place
        self._buffers: dict[str, RunBuffer] = {}
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

    def declare(self, step: int, *, has_work: bool) -> None:
        """Declares the model's new buffers in the run, and sets them to the run's values.

        Args:
            step: The step in flight.
            has_work: Whether this trainer has an item of the step, which delays the commit until the call returns.
        """
        new = [found for found in find_buffers(self._modules()) if found.names[0] not in self._buffers]
        if new:
            self._declare(new, step)
        if self._is_declaring:  # now, or in a call that failed
            self._version = None
            self._read_changes(step, has_work=has_work)
            self._restore()
            self._is_declaring = False

    def _declare(self, new: Sequence[LiveBuffer], step: int) -> None:
        described = [found.describe() for found in new]
        values = [copy_value(found.tensor) for found in new]
        name = self._place.buffers_name(self._unit_count)
        layout = UnitLayout(name, tuple(described), kind="buffers", pp_ranks=(self._place.pp_rank,))
        unit_index = self._store.declare(layout, InitialBuffers(values), step)
        self._unit_count += 1
        for index, (parameter, value) in enumerate(zip(described, values, strict=True)):
            self._buffers[parameter.name] = RunBuffer(parameter, unit_index, index, value)
        self._is_declaring = True

    # ---- work items ----

    def _counts(self, item: WorkItemState) -> bool:
        """True if the buffers at the end of an item become the run's values, on this pipeline stage."""
        return item.item.dp_rank == 0 and self._place.tp_rank == 0

    def start_item(self, step: int, item: WorkItemState) -> None:
        """Sets the buffers to the values with which all items of the step start."""
        if not self._buffers:
            return
        live = self._checked()
        if not self._item_started:
            self._find_written(live)
        if self._item_started or self._version != step:
            if self._version != step:
                self._read_changes(step, has_work=True)
            for name, buffer in self._buffers.items():
                set_value(live[name], buffer.start)
        if self._counts(item):
            self._source = None
            for buffer in self._buffers.values():
                buffer.pushed = None
        self._item_started, self._undisturbed = True, False

    def _find_written(self, live: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self._buffers.items():
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
            for buffer in self._buffers.values()
            if buffer.written is not None
        ]

    def end_item(self, step: int, item: WorkItemState) -> None:
        """Pushes the buffers after the item whose values count; undoes the changes of any other item."""
        if not self._buffers:
            if have_buffers(module for _, module in self._modules()):
                _reject_new(find_buffers(self._modules()), {})
            return
        live = self._checked()
        if self._counts(item):
            for name, buffer in self._buffers.items():
                buffer.pushed = changed_value(live[name], buffer)
            self._push(step, item)
        else:
            for name, buffer in self._buffers.items():
                set_value(live[name], buffer.present)
        self._undisturbed = True

    def abandon_item(self) -> None:
        """Undoes the changes of an item whose attempt is over."""
        if self._buffers:
            live = self._checked()
            for name, buffer in self._buffers.items():
                set_value(live[name], buffer.present)
            self._undisturbed = True

    def rejoin(self, state: coordinator_pb2.RunState | None, step: int, *, has_work: bool) -> None:
        """Called when this trainer has joined the run again.

        Args:
            state: The run's state. None: nothing was committed meanwhile.
            step: The step in flight.
            has_work: Whether this trainer has an item of the step.
        """
        self._source = None
        if state is None or not self._buffers:
            return
        self._changed_in, self._version, self._item_started = _versions(state), None, False
        for buffer in self._buffers.values():
            buffer.forget_changes()
        self._read_changes(step, has_work=has_work)
        self._restore()

    def push_again(self, step: int, item: WorkItemState) -> None:
        """Repeats the push of the finished item whose values count. It was withdrawn with the item's gradients."""
        if self._counts(item):
            self._push(step, item)

    def _push(self, step: int, item: WorkItemState) -> None:
        by_unit: dict[int, list[tuple[int, torch.Tensor]]] = {}
        for buffer in self._buffers.values():
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
        live = self._checked()
        for name, buffer in self._buffers.items():
            if digest_of(live[name]) != buffer.present.digest:
                raise UsageError(
                    f"buffer {name!r} was changed after the work of step {step} was finished and before its commit: "
                    "change it in the loop over step.batches, or after optimizer.step()",
                    buffer=name,
                )
        self._undisturbed = True

    def commit(self, state: coordinator_pb2.RunState, step: int, version: int, *, has_work: bool) -> None:
        """Sets the buffers to the values of a commit.

        Args:
            state: The run's state after the commit.
            step: The step that was committed.
            version: The next step; more than ``step + 1`` if this trainer has fallen behind.
            has_work: Whether this trainer has an item of the next step.
        """
        if not self._buffers:
            return
        self._changed_in = _versions(state)
        present = {name: buffer.present.digest for name, buffer in self._buffers.items()}
        if self._version is not None and (state.buffer_source.epoch, state.buffer_source.attempt) == self._source:
            self._commit_own(step + 1)
        for buffer in self._buffers.values():
            buffer.forget_changes()
        undisturbed, self._item_started, self._source = self._undisturbed, False, None
        self._read_changes(version, has_work=has_work)
        self._restore(present if undisturbed else None)

    def _commit_own(self, version: int) -> None:
        """Makes the values that this trainer has pushed the committed values, without reading them."""
        changed = [buffer for buffer in self._buffers.values() if self._version_of_change(buffer) == version]
        if self._version != version - 1 or any(buffer.pushed is None for buffer in changed):
            return
        for buffer in changed:
            assert buffer.pushed is not None
            buffer.commit(buffer.pushed)
        self._version = version

    def restore(self) -> None:
        """Undoes the script's writes since the last commit. Called while a committed step is repeated."""
        if self._buffers:
            self._restore()

    def _read_changes(self, version: int, *, has_work: bool) -> None:
        """Reads the buffers that have changed since the committed values on this trainer."""
        former, self._version = self._version, None
        by_unit: dict[int, list[RunBuffer]] = {}
        for buffer in self._buffers.values():
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
        live = self._checked()
        for name, buffer in self._buffers.items():
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

    def _checked(self) -> dict[str, torch.Tensor]:
        """Returns the model's buffers by name.

        Raises:
            UsageError: They differ from the declared buffers.
        """
        live = {found.names[0]: found for found in find_buffers(self._modules())}
        for name, buffer in self._buffers.items():
            found = live.get(name)
            if found is None or not buffer.matches(found):
                now = "has no such buffer now" if found is None else f"now has {describe(found.describe())}"
                raise UsageError(
                    f"buffer {name!r} was {describe(buffer.described)} when the optimizer was made, but the model "
                    f"{now}: a buffer of a run keeps its shape, its dtype and its other names. Register it with "
                    "persistent=False if it is no part of the run's state",
                    buffer=name,
                )
        if len(live) > len(self._buffers):
            _reject_new(live.values(), self._buffers)
        return {name: found.tensor for name, found in live.items()}


def _reject_new(live: Iterable[LiveBuffer], declared: Mapping[str, RunBuffer]) -> None:
    """Raises UsageError if there is a buffer that was not declared."""
    for found in live:
        if (name := found.names[0]) not in declared:
            raise UsageError(
                f"buffer {name!r} was registered after the optimizer was made: register all buffers before, so that "
                "all trainers start with the same buffers, or use persistent=False if it is no part of the run's state",
                buffer=name,
            )


def _versions(state: coordinator_pb2.RunState) -> dict[int, Sequence[int]]:
    """Returns the version of each buffer's last change, by unit index."""
    return {unit.unit_index: unit.versions for unit in state.buffer_versions}
