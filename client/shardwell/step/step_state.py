"""State of the step in flight on one trainer: its work items, what was pushed for them, and how far the commit is.

Note: [States of a work item on a trainer]
    The coordinator leases a work item to a trainer, which computes one attempt after the other. An attempt is *over* as
    soon as its gradients do not count any more: its pushes are dropped, here and by the servers. The trainer may notice
    this before or after it has finished the attempt. ``ItemState`` has a member for each row:

    ========== ============================================ ========= ========= ======= ========= =========
    state      meaning                                      finish    abandon   spoil   restart   reopen
    ========== ============================================ ========= ========= ======= ========= =========
    COMPUTING  planned or computing; its pushes count       FINISHED  ABANDONED SPOILED -         -
    FINISHED   all gradients are pushed, and count          -         LOST      VOID    -         COMPUTING
    ABANDONED  over: another trainer or attempt has it      LOST      -         SPOILED COMPUTING -
    SPOILED    over: this trainer asks for another attempt  VOID      -         -       COMPUTING -
    LOST       as ABANDONED, after it was finished          -         -         VOID    FINISHED  ABANDONED
    VOID       as SPOILED, after it was finished            -         -         -       FINISHED  SPOILED
    ========== ============================================ ========= ========= ======= ========= =========

    ``give_up`` leads from SPOILED and COMPUTING to ABANDONED, and from VOID and FINISHED to LOST. The events are:

    * finish: the training thread has pushed all gradients of the attempt.
    * abandon: a server or the coordinator says that the attempt is over. This may happen in any thread.
    * spoil: weights that the attempt has read may have changed, or a sum that contains its gradients is void. This
      may happen in any thread.
    * give up: the coordinator does not grant another attempt.
    * restart: the coordinator has granted another attempt (``ResetWork``, ``FinishWork``), without any push. A finished
      item stays finished: its rank then has no gradient in the step.
    * reopen: the item is computed again.
    * The commit of the step, and joining the run again, replace all items by those of the next step.

    A *twin item* is a second run of an item that is late at another trainer. Whichever run is finished first counts.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from shardwell.data_plane.gradient_parts import GradientChecksums, GradientSample
from shardwell.step.step_commit import StepUpdate
from shardwell.transport.base import PartHeader
from shardwell_wire.errors import UsageError
from shardwell_wire.v1 import common_pb2, coordinator_pb2, shard_pb2

ParameterIndices = dict[int, set[int]]
"""Indices of parameters by unit index."""


class StepPhase(Enum):
    """Phase of the step in flight."""

    COMPUTING = auto()
    """A trainer has unfinished work items. This trainer can push gradients for its current item."""
    WORK_FINISHED = auto()
    """All trainers have finished their work items. The step's gradient is complete."""
    COMMITTING = auto()
    """``optimizer.step()`` has started. If the call raised, the step may be committed or not."""


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """What the next step needs from the step that was committed."""

    global_ranks: frozenset[int]
    """Logical ranks whose work items this trainer held."""
    pushed_units: frozenset[int]
    """Indices of the units for which this trainer pushed gradients."""
    dp_ranks: frozenset[int]
    """Data ranks whose work items this trainer computed, if the next step follows directly."""


class ItemState(Enum):
    """State of a work item. See Note: [States of a work item on a trainer]."""

    COMPUTING = auto()
    FINISHED = auto()
    ABANDONED = auto()
    SPOILED = auto()
    LOST = auto()
    VOID = auto()


_OVER = frozenset({ItemState.ABANDONED, ItemState.SPOILED, ItemState.LOST, ItemState.VOID})
_ENDED = frozenset({ItemState.FINISHED, ItemState.LOST, ItemState.VOID})

_FINISH = {
    ItemState.COMPUTING: ItemState.FINISHED,
    ItemState.ABANDONED: ItemState.LOST,
    ItemState.SPOILED: ItemState.VOID,
}
_ABANDON = {ItemState.COMPUTING: ItemState.ABANDONED, ItemState.FINISHED: ItemState.LOST}
_SPOIL = {
    ItemState.COMPUTING: ItemState.SPOILED,
    ItemState.ABANDONED: ItemState.SPOILED,
    ItemState.FINISHED: ItemState.VOID,
    ItemState.LOST: ItemState.VOID,
}
_GIVE_UP = _ABANDON | {ItemState.SPOILED: ItemState.ABANDONED, ItemState.VOID: ItemState.LOST}
_RESTART = {
    ItemState.ABANDONED: ItemState.COMPUTING,
    ItemState.SPOILED: ItemState.COMPUTING,
    ItemState.LOST: ItemState.FINISHED,
    ItemState.VOID: ItemState.FINISHED,
}
_REOPEN = {after: before for before, after in _FINISH.items()}


class WorkItemState:
    """One work item of this trainer. Changed by its own methods and by ``StepState``.

    Attributes:
        item: The item as the coordinator has leased it: rank, epoch, attempt.
        key: Epoch and attempt, which identify the computation of the item.
        is_over: True if the gradients of the attempt do not count any more.
        state: See Note: [States of a work item on a trainer].
        parts: Number of pushes by unit index.
        pushed: Parameters with a pushed gradient, by unit index.
        to_drop: Parameters whose earlier gradients the next push of the unit drops, by unit index.
        dropped: Parameters whose gradients of earlier steps this item drops, by unit index.
        written: Buffers that the training script had written when the item started.
        summed: Data ranks to whose gradients those of this attempt were added before they were pushed.
        shared_units: Units whose gradients other trainers of the node may have added to theirs.
        checksums: Checksums of the gradients that all tensor-parallel ranks compute. None: there are none.
        sample: Some values of the attempt's gradients, in steps in which data ranks are compared. None: there are none.
        headers: Makes the headers of the attempt's gradients. None: it has pushed none.
        scalars: Numbers that the training script has logged for the attempt, by name.
        data_position: Where the data rank's streams continue after the item. Empty: where they continued before.
    """

    def __init__(self, item: coordinator_pb2.WorkItem) -> None:
        self.item, self.state, self.is_over = item, ItemState.COMPUTING, False
        self.key = item.epoch, item.attempt
        self.parts: Counter[int] = Counter()
        self.pushed: ParameterIndices = defaultdict(set)
        self.to_drop: ParameterIndices = defaultdict(set)
        self.dropped: ParameterIndices = defaultdict(set)
        self.written: list[coordinator_pb2.WrittenBuffer] = []
        self.summed: frozenset[int] = frozenset()
        self.shared_units: set[int] = set()
        self.checksums: GradientChecksums | None = None
        self.sample: GradientSample | None = None
        self.headers: PartHeaders | None = None
        self.scalars: dict[str, float] = {}
        self.data_position = ""
        self._changing = threading.Lock()

    # ---- the state ----

    @property
    def is_twin(self) -> bool:
        """True if the item is late at another trainer, which computes it, too."""
        return self.item.copy

    @property
    def is_finished(self) -> bool:
        """True if all gradients of the attempt are pushed, whether they count or not."""
        return self.state in _ENDED

    @property
    def is_spoiled(self) -> bool:
        """True if this trainer must ask for another attempt."""
        return self.state is ItemState.SPOILED or self.state is ItemState.VOID

    def _change(self, transitions: dict[ItemState, ItemState], key: tuple[int, int] | None = None) -> None:
        """Changes the state, if the item has the attempt of the key."""
        # The training thread may finish an item while the thread of a push abandons it.
        with self._changing:
            if key is None or key == self.key:
                self.state = transitions.get(self.state, self.state)
                self.is_over = self.state in _OVER

    def finish(self) -> None:
        """Records that all gradients of the attempt are pushed."""
        self._change(_FINISH)

    def abandon(self, key: tuple[int, int]) -> None:
        """Records that an attempt is over. Harmless if the item has a later attempt. Thread-safe."""
        self._change(_ABANDON, key)

    def spoil(self, key: tuple[int, int]) -> None:
        """Records that an attempt cannot be finished and the item is restarted. Harmless for a later attempt."""
        self._change(_SPOIL, key)

    def give_up(self) -> None:
        """Records that the item cannot be restarted: another trainer has it, or its step is committed."""
        self._change(_GIVE_UP)

    def reopen(self) -> None:
        """Records that the item is computed again."""
        self._change(_REOPEN)

    def restart(self, item: coordinator_pb2.WorkItem) -> None:
        """Forgets all pushes, because the coordinator has granted another attempt."""
        with self._changing:
            self.item.CopyFrom(item)
            self.key = item.epoch, item.attempt
            self.state = _RESTART.get(self.state, self.state)
            self.is_over = self.state in _OVER
        self.headers = None
        self.summed = frozenset()
        self.shared_units.clear()
        self.parts.clear()
        self.pushed.clear()
        self.scalars.clear()
        self.sample = None
        if self.checksums is not None:
            self.checksums.clear()
        # Servers add kept gradients to each attempt anew, so its pushes name again which of them are dropped.
        self.to_drop = defaultdict(set, {unit: set(indices) for unit, indices in self.dropped.items()})

    # ---- pushes ----

    def record_push(self, unit_index: int, parameter_indices: Iterable[int] = ()) -> tuple[int, list[int]]:
        """Counts one push of a unit.

        Returns:
            The number of the part, and the parameters whose earlier gradients the push drops.
        """
        part = self.parts.get(unit_index, 0)
        self.parts[unit_index] = part + 1
        pushed = self.pushed[unit_index]
        dropped = self.to_drop.pop(unit_index, None)
        if dropped:
            pushed -= dropped
        pushed.update(parameter_indices)
        return part, sorted(dropped) if dropped else []

    def make_headers(
        self,
        context: common_pb2.RequestContext,
        excuse: Callable[[BaseException], bool],
        pp_rank: int = 0,
        cp_rank: int = 0,
    ) -> PartHeaders:
        """Returns the headers of the present attempt's pushes.

        Args:
            context: Has the prefix of their request ids.
            excuse: See ``PartHeaders.excuse``.
            pp_rank: Pipeline rank of the gradients.
            cp_rank: Context-parallel rank of the gradients.
        """
        request_id, context.request_id = context.request_id, ""
        common = shard_pb2.ReduceScatterHeader(
            context=context,
            dp_rank=self.item.dp_rank,
            attempt=self.item.attempt,
            copy=self.item.copy,
            pp_rank=pp_rank,
            cp_rank=cp_rank,
        )
        return PartHeaders(self, common, request_id, excuse)

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """Drops the gradients that earlier steps and this item have pushed for some parameters of a unit."""
        indices = set(parameter_indices)
        self.to_drop[unit_index] |= indices
        self.dropped[unit_index] |= indices

    def to_proto(self) -> coordinator_pb2.FinishedItem:
        """Returns what the coordinator must know of the finished attempt."""
        return coordinator_pb2.FinishedItem(
            global_rank=self.item.global_rank,
            epoch=self.item.epoch,
            attempt=self.item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count) for unit, count in sorted(self.parts.items())
            ],
            written_buffers=self.written,
            copy=self.is_twin,
            summed_dp_ranks=sorted(self.summed),
            gradient_checksums=self.checksums.to_proto() if self.checksums is not None else None,
            number=self.item.number,
            scalars=self.scalars,
            data_position=self.data_position,
            gradient_sample=self.sample.digest() if self.sample is not None else 0,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PartHeaders:
    """Makes the headers of pushes for one attempt at a work item."""

    state: WorkItemState
    common: shard_pb2.ReduceScatterHeader
    """See ``PartHeader``."""
    request_id: str
    """Prefix of all request ids of the attempt."""
    excuse: Callable[[BaseException], bool]
    """Returns whether a failed push does not matter, because the attempt is over. Called in any thread."""

    def start_part(self, unit_index: int, parameter_indices: Iterable[int] = ()) -> PartHeader:
        """Counts one push of a unit; returns its header."""
        part, dropped = self.state.record_push(unit_index, parameter_indices)
        return PartHeader(self.common, part, dropped, f"{self.request_id}.{unit_index}.{part}")


@dataclass(frozen=True, slots=True)
class ItemAttempt:
    """One attempt at a work item, for background threads. Without effect when the item has a later attempt."""

    state: WorkItemState
    key: tuple[int, int]
    """``WorkItemState.key`` of the attempt."""

    @property
    def is_over(self) -> bool:
        """True if the pushes of the attempt do not count any more."""
        return self.state.is_over or self.state.key != self.key

    def note_summed(self, dp_ranks: Iterable[int]) -> None:
        """Records that the servers get sums of the attempt's gradients and those of other data ranks."""
        if self.state.key == self.key:
            self.state.summed |= frozenset(dp_ranks)

    def spoil(self) -> None:
        """Records that the item must start another attempt."""
        self.state.spoil(self.key)


class StepState:
    """The step in flight on one trainer.

    Each session has one such object, which ``advance`` moves to the next step. The phases follow each other as in
    ``StepPhase``; ``restart_item``, ``repeat_item`` and ``restart`` return to COMPUTING.

    Used by the training thread, and by autograd's threads while the training thread waits for a backward.

    Args:
        number: The step, which is the version that it reads.
        items: Work items of this trainer.
        position: Number of committed work items of this trainer's rank. None: ``number``, as in a synchronous run.
        asynchronous: Whether each work item is committed by itself.
        spare_hint: Advice for a trainer without a logical rank that computes a gradient. Empty: the usual advice.
    """

    def __init__(
        self,
        number: int,
        items: Iterable[coordinator_pb2.WorkItem],
        *,
        position: int | None = None,
        asynchronous: bool = False,
        spare_hint: str = "",
    ) -> None:
        self.asynchronous, self._spare_hint = asynchronous, spare_hint
        self.data_positions: dict[int, str] = {}
        """Where the streams of data ranks continue, as far as this trainer has computed or got their items."""
        self.item_limit: int | None = None
        """Number of items that the training loop of an asynchronous run has for each data rank. None: no loop runs."""
        self.restart(number, items, position)

    def restart(self, number: int, items: Iterable[coordinator_pb2.WorkItem], position: int | None = None) -> None:
        """Starts a step from the beginning, for example after this trainer has joined the run again."""
        self.number = number
        self.position = number if position is None else position
        self.items: dict[int, WorkItemState] = {}
        """Work items of this trainer, by global rank."""
        self.in_batches = False
        """True if ``step.batches`` yields the items; False in a plain loop."""
        self.skips_gradients = False
        """True if ``zero_grad`` was called since the step started: a commit without gradients is intended."""
        self.dropped_late: ParameterIndices = defaultdict(set)
        """Parameters whose gradients the commit drops, by unit index, because the items were finished before."""
        self.pending_update: StepUpdate | None = None
        """The update of an ``optimizer.step()`` that has not returned. None again once the step is certainly not
        committed."""
        self._dropped_for_all: ParameterIndices = defaultdict(set)
        """Parameters whose gradients of earlier steps every item drops, by unit index."""
        self.work_finished = False
        """True if all trainers' work items are finished, also while the step is committed."""
        self._current: WorkItemState | None = None
        self.add_items(items)

    @property
    def phase(self) -> StepPhase:
        """The current phase."""
        if self.pending_update is not None:
            return StepPhase.COMMITTING
        return StepPhase.WORK_FINISHED if self.work_finished else StepPhase.COMPUTING

    # ---- work items ----

    def add_items(self, items: Iterable[coordinator_pb2.WorkItem]) -> list[WorkItemState]:
        """Adds work items, such as those of a lost trainer; returns their states."""
        added = []
        for item in items:
            state = self.items[item.global_rank] = WorkItemState(item)
            self.data_positions[item.dp_rank] = item.data_position
            for unit_index, indices in self._dropped_for_all.items():
                state.drop(unit_index, indices)
            added.append(state)
        return added

    @property
    def item_name(self) -> coordinator_pb2.ItemName | None:
        """The only work item of this trainer in an asynchronous run. None: there is none, or the run is synchronous."""
        if not self.asynchronous or not self.items:
            return None
        (only,) = self.items.values()
        return coordinator_pb2.ItemName(dp_rank=only.item.dp_rank, number=only.item.number)

    @property
    def unfinished(self) -> list[WorkItemState]:
        """Work items of this trainer that are not finished."""
        return [state for state in self.items.values() if not state.is_finished]

    @property
    def current(self) -> WorkItemState | None:
        """The item to which gradients belong now. In a plain loop this is the trainer's only item."""
        if self._current is None and not self.in_batches and len(self.items) == 1:
            (only,) = self.items.values()
            return None if only.is_finished else only
        return self._current

    @current.setter
    def current(self, state: WorkItemState | None) -> None:
        self._current = state

    @property
    def is_without_effect(self) -> bool:
        """True if the current item is none of the step's. See Note: [Work without effect] in ``work_items.py``."""
        return (item := self._current) is not None and self.items.get(item.item.global_rank) is not item

    def start_item(self, state: WorkItemState) -> None:
        """Makes an item the current one in a loop over ``step.batches``."""
        self.in_batches, self._current = True, state

    def finish_item(self) -> None:
        """Finishes the current item: all its gradients are pushed."""
        if (current := self.current) is not None:
            current.finish()
        self._current = None

    def repeat_item(self, state: WorkItemState, item: coordinator_pb2.WorkItem) -> None:
        """Starts another attempt of an item that must be computed again."""
        self.restart_item(state, item)
        state.reopen()
        self._current = None
        self.dropped_late.clear()

    def restart_item(self, state: WorkItemState, item: coordinator_pb2.WorkItem) -> None:
        """Starts another attempt of an item that the coordinator has reset."""
        state.restart(item)
        self.work_finished = False

    def reopen_items(self) -> None:
        """Makes finished items of a plain loop unfinished after their gradients were dropped."""
        if not self.in_batches:
            for state in self.items.values():
                state.reopen()
                for unit_index, indices in self.dropped_late.items():
                    state.drop(unit_index, indices)
            self.dropped_late.clear()

    # ---- dropped gradients ----

    def drop(self, unit_index: int, parameter_indices: Iterable[int]) -> None:
        """Drops gradients of some parameters: of the current item, or between items those of all items."""
        if self.current is not None:
            self.current.drop(unit_index, parameter_indices)
        elif any(state.is_finished for state in self.items.values()):
            self.dropped_late[unit_index].update(parameter_indices)
        else:
            self._dropped_for_all[unit_index].update(parameter_indices)
            for state in self.items.values():
                state.drop(unit_index, parameter_indices)

    @property
    def all_dropped(self) -> bool:
        """True if the commit drops every gradient that was pushed for the finished items."""
        return all(
            indices <= self.dropped_late.get(unit_index, set())
            for state in self.items.values()
            for unit_index, indices in state.pushed.items()
        )

    # ---- the commit ----

    def advance(
        self, number: int, items: Iterable[coordinator_pb2.WorkItem], position: int | None = None
    ) -> FinishedStep:
        """Moves to the next step after the commit; returns a summary of the committed step."""
        pushed_units, dp_ranks, follows = set[int](), set[int](), number == self.number + 1
        for state in self.items.values():
            for unit_index, indices in state.pushed.items():
                if indices:
                    pushed_units.add(unit_index)
            self.data_positions[state.item.dp_rank] = state.data_position or state.item.data_position
            if follows and state.state is ItemState.FINISHED:
                dp_ranks.add(state.item.dp_rank)
            state.headers = None  # they refer to the item: a cycle would keep both until a garbage collection
        finished = FinishedStep(frozenset(self.items), frozenset(pushed_units), frozenset(dp_ranks))
        self.restart(number, items, position)
        return finished

    # ---- checks ----

    def require_current(self) -> WorkItemState:
        """Returns the item to which a gradient belongs.

        Raises:
            UsageError: No item is in progress.
        """
        if (current := self.current) is not None:
            return current
        if self.in_batches:
            raise UsageError(
                f"a backward ran after the work of step {self.number} was finished: "
                "run backward inside `for batch in step.batches(...)`, before optimizer.step()"
            )
        if any(state.is_finished for state in self.items.values()):
            raise UsageError(
                f"a backward ran after the work of step {self.number} was finished by optimizer.clip_grad_norm_(), "
                "clip_grad_value_() or an optimizer.step() that raised: call optimizer.step() to commit the step, or "
                "optimizer.zero_grad() to drop its gradient and compute another batch"
            )
        if not self.items:
            raise UsageError(
                f"a backward ran in step {self.number}, but this trainer is a spare without a logical rank: "
                + (self._spare_hint or "use `for batch in step.batches(...)`, which yields the work of lost trainers")
            )
        ranks = ", ".join(map(str, sorted(self.items)))
        raise UsageError(
            f"this trainer plays the logical ranks {ranks} in step {self.number}: "
            "use `for batch in step.batches(...)` so that each rank gets its own batch"
        )
