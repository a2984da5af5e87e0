"""Prepares a finished step on the shard servers. See Note: [Commit order] in ``committer.py``.

After each ``await`` the step may have advanced, or an item may have been reset: the code then compares
``Step.generation`` and ``Run.work`` with the values from before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.servers.shard_servers import ShardServers, check_recoverable
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.steps.committed_steps import changed_buffers
from shardwell_server.coordinator.steps.proposals import NormKind, PreparedGradients, committed_optimizer
from shardwell_server.coordinator.steps.step import Step
from shardwell_server.coordinator.storage.records import BackupState
from shardwell_server.optimizer_checks import allocation_key, units_that_count
from shardwell_wire.errors import IncompleteStepError, NonFiniteError, ShardwellError, StepStateError
from shardwell_wire.v1 import common_pb2, shard_pb2


class StepPreparer:
    """Makes the servers confirm and reduce the gradients of a finished step.

    Args:
        state: State of the coordinator.
        servers: The shard servers.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers) -> None:
        self._state, self._servers = state, servers

    async def prepare(self, run: Run, step: Step, *, kind: NormKind | None = None) -> PreparedGradients | None:
        """Prepares a finished step on the servers, and has one more norm computed. Concurrent callers share one call.

        In an asynchronous run, the next preparation of another step replaces this one. See ``prepare_in_turn``.

        Returns:
            The gradient norms. None if the step was committed or an item was reset meanwhile.

        Raises:
            NonFiniteError: A gradient is not finite. Every call raises this until an item is reset.
            IncompleteStepError: A server lacks contributions. Every call raises this until an item is reset.
            StepStateError: A unit was declared but not published.
            ShardwellError: Another error of a server. The next call tries again.
        """
        # The shared call may have prepared another norm or a former generation: check again after each call.
        while run.work.is_in_flight(step) and step.all_finished:
            if step.failure is not None:
                # A new exception for each caller: raising one instance again would extend its traceback every time.
                raise type(step.failure)(str(step.failure), **step.failure.data)
            if step.prepared is not None and step.prepared.find(kind) is not None:
                return step.prepared
            await run.calls.preparing(self._prepare_alone, run, step, kind)
        return None

    async def _prepare_alone(self, run: Run, step: Step, kind: NormKind | None) -> None:
        if not run.asynchronous:
            await self._prepare(run, step, kind)
            return
        async with run.calls.turn:
            await self._prepare(run, step, kind)

    async def prepare_in_turn(self, run: Run, step: Step) -> PreparedGradients | None:
        """As ``prepare_or_skip``, for a caller that holds ``StepCalls.turn`` until it has written the commit record."""
        while run.work.is_in_flight(step) and step.all_finished and step.prepared is None:
            try:
                if step.failure is not None:
                    raise type(step.failure)(str(step.failure), **step.failure.data)
                await self._prepare(run, step, None)
            except NonFiniteError as error:
                self._skip_or_raise(run, step, error)
        return step.prepared if run.work.is_in_flight(step) and step.all_finished else None

    def start(self, run: Run, step: Step) -> None:
        """Prepares a finished step in the background, while trainers learn that all items are finished.

        A failure is raised to the trainers that later ask for the norm or commit. They also prepare the step if the
        preparation of a former generation is still in flight here.
        """
        run.calls.preparing.start(self._prepare_alone, run, step, None)

    async def prepare_or_skip(self, run: Run, step: Step) -> PreparedGradients | None:
        """Calls ``prepare``. With scaled losses, skips a gradient that is not finite and prepares the step again."""
        try:
            return await self.prepare(run, step)
        except NonFiniteError as error:
            self._skip_or_raise(run, step, error)
            return await self.prepare(run, step)

    def _skip_or_raise(self, run: Run, step: Step, error: NonFiniteError) -> None:
        """Skips the gradient of a step, which is not finite, if losses are scaled. Otherwise raises the error."""
        if not run.work.is_in_flight(step) or not step.all_finished:
            raise error
        proposal = step.proposals.leading(run.work.leaders(step), run.units.layouts)
        if proposal is None or not proposal.optimizer.skip_non_finite:
            raise error
        step.skip()

    async def _prepare(self, run: Run, step: Step, kind: NormKind | None) -> None:
        generation = step.generation
        if unpublished := run.units.unpublished:
            raise StepStateError(
                f"step {step.number}: unit {unpublished[0]!r} has no initial values, because no trainer sent them: "
                "every trainer must build the same model",
                unit=unpublished[0],
            )
        await run.wait_until_updated()
        while (
            not run.asynchronous
            and step.unfenced
            and generation == step.generation
            and run.work.is_in_flight(step)
            and not run.deleted
        ):
            await run.changed.wait()  # a fence that arrives after PrepareStep discards what was prepared
        if any(item.is_twin for item in step.items.values()):
            # The servers drop the contributions of trainers that lost to a twin item. A restarted coordinator must not
            # wait for these trainers.
            await self._state.save(run)
        if generation != step.generation or not run.work.is_in_flight(step) or not step.all_finished:
            # An item was reset and is unfinished. The servers would accept an incomplete manifest.
            return
        if (lost := self._state.storage.why_lost) is not None:
            # A step may be committed whose record this coordinator could not confirm. The servers must still have what
            # they prepared for it when the next coordinator sends its update.
            raise type(lost)(str(lost), **lost.data)
        optimizer = _expected_optimizer(run, step)

        def request(server_id: str) -> shard_pb2.PrepareStepRequest:
            return shard_pb2.PrepareStepRequest(
                context=self._servers.context(run, run.committed_step),
                ranks=_manifest(run, step, server_id),
                dp=len(step.items),
                norm_type=0.0 if kind is None else kind.norm_type,
                norm_bound=0.0 if kind is None else kind.bound,
                skip=step.skipped,
                optimizer=optimizer,
            )

        for other in run.work.steps:
            if other is not step:
                other.prepared = None  # the servers prepare one step at a time
        try:
            responses = await self._servers.call_all(run.units.servers, "PrepareStep", request)
        except ShardwellError as error:
            if generation != step.generation or not run.work.is_in_flight(step):
                return  # the error is about a former attempt
            self._report(run, step, error)
            raise
        if generation != step.generation:
            return
        self.note_failed_backups(run, responses)
        prepared = (
            PreparedGradients.skipped(kind)
            if step.skipped
            else PreparedGradients.combine((norm for at in responses.values() for norm in at.units), kind)
        )
        ready = optimizer is not None and all(response.update_ready for response in responses.values())
        step.prepared = replace(
            prepared.add_norms(step.prepared),
            memory_ready_for=allocation_key(optimizer) if optimizer and ready else None,
            changed_buffers=changed_buffers(responses.values(), run.units.layouts),
        )

    def _report(self, run: Run, step: Step, error: ShardwellError) -> None:
        """Records an error that lasts until an item is reset.

        Raises:
            ConflictError: The cause is a lost shard.
            UnavailableError: The cause is that the run is being loaded from a checkpoint.
        """
        run.checkpoints.check_loaded(run.name)  # the servers have dropped the shards
        if not isinstance(error, NonFiniteError | IncompleteStepError):
            check_recoverable(run, self._state.cluster)  # a restarted server knows only that it lacks the run
            return
        step.failure = error
        self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
        run.changed.notify()

    def note_failed_backups(self, run: Run, responses: Mapping[str, Any]) -> None:
        """Marks the backups that primaries report as failed. The commit record is stored together with this."""
        failed = {
            (status.unit_index, status.start_bytes, status.server_id): status.error
            for response in responses.values()
            for status in response.failed_backups
        }
        if run.relocations.fail_backups(failed, BackupState.FORMER):
            message = (
                f"{len(failed)} backups missed step {run.committed_step} and are built again: {min(failed.values())}"
            )
            self._state.events.add(EventKind.BACKUPS_LOST, message, run=run.name)


def _expected_optimizer(run: Run, step: Step) -> common_pb2.OptimizerStep | None:
    """Returns the optimizer that the step will probably be committed with. The servers allocate memory for it early."""
    if (proposal := step.proposals.leading(run.work.leaders(step), run.units.layouts)) is not None:
        return proposal.optimizer
    if (last_commit := run.commits.last) is None:
        return None
    last = committed_optimizer(last_commit.optimizer)
    if not last.units:
        return None  # the run was loaded from a checkpoint of another grid
    if len(units_that_count(last, len(run.units))) == len(run.units):
        return _next_of(last)
    # Several optimizers alternate. Expect the one that followed the last time the units of ``last`` were updated.
    committed = [committed_optimizer(record.optimizer) for record in run.commits.records]
    successors = reversed([*pairwise(committed)])
    return _next_of(next((after for before, after in successors if _same_units(before, last)), last))


def _next_of(optimizer: common_pb2.OptimizerStep) -> common_pb2.OptimizerStep:
    """Returns a committed optimizer as its next step has it: only the first one starts with new state."""
    if not optimizer.new_state:
        return optimizer
    following = common_pb2.OptimizerStep()
    following.CopyFrom(optimizer)
    following.ClearField("new_state")
    return following


def _same_units(one: common_pb2.OptimizerStep, other: common_pb2.OptimizerStep) -> bool:
    return list(one.units) == list(other.units)


def _manifest(run: Run, step: Step, server_id: str) -> list[shard_pb2.RankManifest]:
    """Returns the contributions that one server must have: every rank's attempt, and its number of parts per unit."""
    owned = {unit.index for unit in run.units if any(shard.server_id == server_id for shard in unit.shards)}
    return [
        shard_pb2.RankManifest(
            dp_rank=item.dp_rank,
            attempt=item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count, pp_rank=pp_rank)
                for (unit, pp_rank), count in sorted(item.parts(run.settings.world).items())
                if unit in owned
            ],
        )
        for item in step.items.values()
    ]
