"""The two-phase commit of a step: prepare on every server, one durable record, update on every server.

Before the record nothing changes parameters; after it the update is repeated until it is done.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.leases.trainers import Trainers
from shardwell_server.coordinator.runs import buffers as run_buffers
from shardwell_server.coordinator.runs.proposals import StepProposal, committed_optimizer
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.step import OtherNorm, Prepared, Step
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.hyperparameters import allocation_key, units_that_count
from shardwell_wire.errors import IncompleteStepError, NonFiniteError, ShardwellError, StepStateError
from shardwell_wire.partitions import runs_on_trainers
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.05, 1.0
_DELAY_WORTH_AN_EVENT_S = 1.0


class Committer:
    """Drives steps through their commit.

    Args:
        state: The runs.
        servers: The shard servers.
        trainers: Fences those whose work is vacant in the next step.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, trainers: Trainers) -> None:
        self._state, self._servers, self._trainers = state, servers, trainers

    async def prepare(self, run: Run, *, norm_type: float = 0.0) -> Prepared | None:
        """Has the gradients of the finished step reduced; who asks meanwhile shares the outcome.

        Returns:
            Their norm, or None: the step went on, or work was begun anew.

        Raises:
            NonFiniteError: A gradient is not finite. So it stays until its work is begun anew.
            IncompleteStepError: A server lacks contributions. Likewise.
            StepStateError: A unit was declared but not published.
            ShardwellError: What else a server raised; the next call tries again.
        """
        step = run.step
        while step is not None and step is run.step and step.all_finished:
            if step.failure is not None:
                raise type(step.failure)(str(step.failure), **step.failure.data)
            if step.prepared is not None and step.prepared.has(norm_type):
                return step.prepared
            await run.preparing(partial(self._prepare, run, step, norm_type))
        return None

    def start_preparing(self, run: Run) -> None:
        """Begins to have the gradients reduced while trainers are told that all work is finished.

        What goes wrong is told to those who ask for the outcome.
        """

        async def prepare() -> None:
            with suppress(ShardwellError):
                await self.prepare(run)

        self._state.tasks.start(prepare())

    async def _prepare(self, run: Run, step: Step, norm_type: float) -> None:
        generation = step.generation
        if missing := [unit.layout.unit for unit in run.units if not unit.published]:
            raise StepStateError(
                f"step {step.number}: the initial values of unit {missing[0]!r} were never sent: every trainer "
                "must build the same model",
                unit=missing[0],
            )
        await run.updated()
        if generation != step.generation or step is not run.step:
            return  # servers would take what is finished now for all that there is
        optimizer = _expected_optimizer(run)

        def request(server_id: str) -> shard_pb2.PrepareStepRequest:
            return shard_pb2.PrepareStepRequest(
                context=self._servers.context(run, step.number),
                ranks=_manifest(run, step, server_id),
                dp=run.settings.world.dp,
                norm_type=norm_type,
                skip=step.skipped,
                optimizer=optimizer,
            )

        try:
            responses = await self._servers.call_all(run.units.servers, "PrepareStep", request)
        except ShardwellError as error:
            if generation != step.generation or step is not run.step:
                return
            if not isinstance(error, NonFiniteError | IncompleteStepError):
                raise
            step.failure = error
            self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
            run.changed.notify()
            raise
        if generation != step.generation:
            return
        prepared = (
            Prepared(math.inf, OtherNorm(norm_type, math.inf) if norm_type else None)
            if step.skipped
            else combine_norms((norm for response in responses.values() for norm in response.units), norm_type)
        )
        ready = optimizer is not None and all(response.update_ready for response in responses.values())
        step.prepared = replace(
            prepared,
            ready_for=allocation_key(optimizer) if optimizer and ready else None,
            buffers=run_buffers.changed(responses.values(), run.units.layouts),
        )

    async def commit(self, run: Run) -> None:
        """Commits the step in flight if every item is finished and the hyper-parameters are there.

        Raises:
            ShardwellError: See ``prepare``; or the record could not be written. Nothing was applied.
        """
        await run.committing(lambda: self._commit(run))

    async def _commit(self, run: Run) -> None:
        step, prepared = run.step, await self.prepare_or_skip(run)
        if step is None or prepared is None or run.deleted or (decision := run.decision()) is None:
            return
        if not await self._servers_ready(run, step, decision):
            return
        if len(counted := units_that_count(decision.optimizer, len(run.units))) < len(run.units):
            prepared = norms_of(prepared, counted)
        other = prepared.other_norm
        record = CommitRecord(
            step=step.number,
            time=self._state.wall_clock(),
            decider=decision.who,
            optimizer=decision.optimizer.SerializeToString(deterministic=True),
            clip_coefficient=decision.clip_coefficient,
            unit_order=decision.unit_order,
            grad_norm=prepared.grad_norm,
            norm_type=other.norm_type if other is not None else None,
            other_norm=other.value if other is not None else None,
            skipped=step.skipped,
        )
        state = run_buffers.next_state(run, decision.state, prepared.buffers)
        run.writing_commit = True
        try:
            serialized = None if state is None or state is run.state else state.SerializeToString()
            await self._state.store(run, self._state.storage.save_commit, record, serialized)
        except ShardwellError as error:
            self._state.events.add(EventKind.STEP_FAILED, f"step {step.number}: {error}", run=run.name)
            raise
        finally:
            run.writing_commit = False
            run.changed.notify()
        run.advance(record, state)
        what = "skipped" if step.skipped else f"gradient norm {prepared.grad_norm:.6g}"
        self._state.events.add(EventKind.STEP_COMMITTED, f"step {step.number}: {what}", run=run.name)
        self.start_updates(run)
        self._trainers.start_fencing(run)

    async def prepare_or_skip(self, run: Run) -> Prepared | None:
        """``prepare``; if a gradient is not finite and the trainers want that, the step goes on without any."""
        step = run.step
        try:
            return await self.prepare(run)
        except NonFiniteError:
            if step is None or step is not run.step or not step.all_finished:
                raise
            decision = run.decision()
            if decision is None or not decision.optimizer.skip_non_finite:
                raise
            step.skipped, step.failure = True, None
            return await self.prepare(run)

    async def _servers_ready(self, run: Run, step: Step, decision: StepProposal) -> bool:
        """Has every server confirm that nothing it needs for the update is missing; False if work was begun anew.

        Note: before the commit record. What is committed must be applied, so a server must not find out afterwards
        that it lacks partitions, or memory for the optimizer's state.

        Raises:
            IncompleteStepError: Trainers did not stage all partitions.
            CapacityError: A server has no memory for the update.
        """
        generation, context = step.generation, self._servers.context(run, step.number)
        request: shard_pb2.ConfirmPartitionsRequest | shard_pb2.PrepareUpdateRequest
        if runs_on_trainers(decision.optimizer.algorithm):
            rpc_name, request = "ConfirmPartitions", shard_pb2.ConfirmPartitionsRequest(context=context)
        elif step.prepared is not None and step.prepared.ready_for == allocation_key(decision.optimizer):
            return True
        else:
            rpc_name = "PrepareUpdate"
            request = shard_pb2.PrepareUpdateRequest(context=context, optimizer=decision.optimizer)
        await self._servers.call_all(run.units.servers, rpc_name, lambda _: request)
        return generation == step.generation and not run.deleted and run.decision() == decision

    def start_updates(self, run: Run) -> None:
        """Begins to tell every server of the last commit, in the background."""
        for server_id in list(run.updates):
            self._state.tasks.start(self._update(run, run.commits[-1], server_id))

    async def _update(self, run: Run, record: CommitRecord, server_id: str) -> None:
        request = shard_pb2.UpdateRequest(
            context=self._servers.context(run, record.step),
            optimizer=common_pb2.OptimizerStep.FromString(record.optimizer),
            clip_coefficient=record.clip_coefficient,
            unit_order=record.unit_order,
        )
        pending, incarnation, delay, told = run.updates[server_id], run.units.servers[server_id], _FIRST_DELAY_S, False
        while not run.deleted and self._state.cluster.servers[server_id].incarnation == incarnation:
            try:
                await self._servers.call(server_id, "Update", request, retry_for_s=0.0)
                break
            except ShardwellError as error:
                pending.error = str(error)
            if not told and self._state.clock() - pending.since_s > _DELAY_WORTH_AN_EVENT_S:
                told = True
                message = f"step {record.step} is not updated yet: {pending.error}"
                self._state.events.add(EventKind.UPDATE_DELAYED, message, run=run.name)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _LONGEST_DELAY_S)
        run.updates.pop(server_id, None)
        run.changed.notify()


def _expected_optimizer(run: Run) -> common_pb2.OptimizerStep | None:
    """The optimizer that the step in flight is likely to be committed with: the servers make room for it early."""
    if (decision := run.decision()) is not None:
        return decision.optimizer
    if not run.commits:
        return None
    last = committed_optimizer(run.commits[-1].optimizer)
    if len(units_that_count(last, len(run.units))) == len(run.units):
        return last
    # Several optimizers take turns: the one that followed the last one before.
    known = [committed_optimizer(record.optimizer) for record in run.commits]
    turns = reversed([*pairwise(known)])
    return next((after for before, after in turns if _same_turn(before, last)), last)


def _same_turn(one: common_pb2.OptimizerStep, other: common_pb2.OptimizerStep) -> bool:
    return list(one.units) == list(other.units)


def _manifest(run: Run, step: Step, server_id: str) -> list[shard_pb2.RankManifest]:
    """What every logical rank pushed to one server."""
    here = {unit.index for unit in run.units if any(shard.server_id == server_id for shard in unit.shards)}
    return [
        shard_pb2.RankManifest(
            dp_rank=item.dp_rank,
            attempt=item.attempt,
            units=[
                common_pb2.UnitParts(unit_index=unit, part_count=count)
                for unit, count in sorted(item.parts.items())
                if unit in here
            ],
        )
        for item in step.items.values()
    ]


def combine_norms(norms: Iterable[shard_pb2.UnitNorm], norm_type: float = 0.0) -> Prepared:
    """The norms over all units and servers: partial sums are added without rounding."""
    found = tuple(norms)
    grad_norm = math.sqrt(_exact_sum(partial for norm in found for partial in norm.square_partials))
    if not norm_type:
        return Prepared(grad_norm, norms=found)
    if norm_type == math.inf:
        return Prepared(grad_norm, OtherNorm(norm_type, max((norm.max_abs for norm in found), default=0.0)), found)
    powers = _exact_sum(partial for norm in found for partial in norm.power_partials)
    return Prepared(grad_norm, OtherNorm(norm_type, _root(powers, norm_type)), found)


def norms_of(prepared: Prepared, unit_indices: Collection[int]) -> Prepared:
    """The norms of a prepared step over some units only."""
    if not prepared.norms:
        return prepared  # of a step that is skipped, or that is committed
    norms = (norm for norm in prepared.norms if norm.unit_index in unit_indices)
    found = combine_norms(norms, prepared.other_norm.norm_type if prepared.other_norm is not None else 0.0)
    return replace(prepared, grad_norm=found.grad_norm, other_norm=found.other_norm)


def _root(value: float, norm_type: float) -> float:
    try:
        return float(value ** (1.0 / norm_type))
    except OverflowError:  # of a norm_type near 0
        return math.inf


def _exact_sum(partials: Iterable[float]) -> float:
    found = list(partials)
    if any(map(math.isnan, found)):
        raise NonFiniteError("a server reports a gradient norm that is not a number")
    try:
        return math.inf if math.inf in found else math.fsum(found)
    except OverflowError:
        return math.inf
