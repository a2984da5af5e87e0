"""Fills the units of a run that continues from a checkpoint with other units.

Note: [Resuming in another grid]
    A run with other tensor or pipeline parallelism than its checkpoint has other units, which are known only when
    trainers declare them. So has a run whose model is wrapped differently, which its first trainer announces with
    ``JoinRequest.rewrap``. Loading such a run therefore loads commit records and tracked state, but no unit. It stores
    the checkpoint as ``RunCheckpoints.source``. When a trainer declares a unit, the unit is placed as in a new run, but
    no trainer sends initial values: the servers read values and state from the checkpoint's files (``LoadShards``),
    by the names of parameters and the places of elements, and publish the checkpoint's version.

    The first step after the checkpoint is committed only if all values of the checkpoint are in units, so that no
    parameter is lost without notice.

    A rollback to a checkpoint with other units loads all units of the run at once, like any other rollback.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shardwell_server.coordinator.checkpoints.choosing import open_manifest
from shardwell_server.coordinator.checkpoints.files import CheckpointFiles
from shardwell_server.coordinator.checkpoints.grids import (
    for_units,
    require_all_declared,
    require_in_checkpoint,
    require_same_optimizer,
)
from shardwell_server.coordinator.checkpoints.manifests import commits_in
from shardwell_server.coordinator.inspection.events import EventKind
from shardwell_server.coordinator.runs.checkpoints import CheckpointSource
from shardwell_server.coordinator.runs.run import Run
from shardwell_server.coordinator.runs.units import Unit
from shardwell_server.coordinator.servers.shard_servers import ShardServers
from shardwell_server.coordinator.state import CoordinatorState
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_server.coordinator.waiting import poll
from shardwell_wire.checkpoints.manifest import Manifest
from shardwell_wire.errors import CorruptDataError, NotFoundError, ShardwellError, UnavailableError
from shardwell_wire.layout import UnitLayout
from shardwell_wire.v1 import common_pb2, shard_pb2

logger = logging.getLogger(__name__)

_POLL_S = 1.0
"""Seconds that a server waits in ``LoadShards`` for the end."""


class UnitFiller:
    """Fills declared units from checkpoints. See Note: [Resuming in another grid].

    Args:
        state: State of the coordinator.
        servers: The shard servers.
        files: Runs work on checkpoint folders.
    """

    def __init__(self, state: CoordinatorState, servers: ShardServers, files: CheckpointFiles) -> None:
        self._state, self._servers, self._files = state, servers, files
        self._manifests: dict[CheckpointSource, Manifest] = {}
        """Manifests of the checkpoints from which units are filled."""

    async def check(self, run: Run, layout: UnitLayout) -> None:
        """Checks a unit before it is placed, if it is to be filled.

        Raises:
            UnitMismatchError: The checkpoint lacks a parameter, or has another tensor of its name.
        """
        if (source := run.filled_from) is not None and run.units.find(layout.unit) is None:
            require_in_checkpoint(await self._manifest(source), layout, source.url)

    async def fill(self, run: Run, unit: Unit, wait_s: float) -> None:
        """Fills and publishes a unit that is to be filled. Returns when it is published, or after ``wait_s``.

        Returns early, too, if a server is unavailable or was restarted: the caller must place the unit again.

        Raises:
            CorruptDataError: A file is missing or damaged; the message names it.
            ShardwellError: Another error of a server.
        """
        source = run.filled_from
        if source is None:
            return

        async def check() -> bool | None:
            if not unit.published:
                await unit.publishing(lambda: self._fill(run, unit, source))
            return True

        try:
            await poll(run.changed, check, wait_s)
        except (UnavailableError, NotFoundError) as error:  # not found: a new process of a server that has ended
            logger.info("unit %r is not filled yet: %s", unit.layout.unit, error)
        except CorruptDataError as error:
            self._report_damaged(run, source, error)
            raise

    async def check_step(self, run: Run, optimizer: common_pb2.OptimizerStep) -> None:
        """Checks a step proposal before the first commit after the checkpoint.

        Raises:
            UnitMismatchError: The run's units lack a parameter of the checkpoint.
            ConflictError: A parameter has state of another optimizer.
        """
        if (source := run.filled_from) is not None:
            manifest, layouts = await self._manifest(source), run.units.layouts
            require_all_declared(manifest, layouts, source.url)
            require_same_optimizer(manifest, commits_in(manifest, source.url), layouts, optimizer)

    async def commits(self, run: Run) -> Sequence[CommitRecord]:
        """Returns the run's most recent commit records, oldest first, for a checkpoint.

        Those of a checkpoint of another grid get the units of this run.

        Raises:
            UnitMismatchError: Not all values of the checkpoint are in units of this run yet.
        """
        if (source := run.filled_from) is None:
            return run.commits.records
        manifest, layouts = await self._manifest(source), run.units.layouts
        require_all_declared(manifest, layouts, source.url)
        return for_units(commits_in(manifest, source.url), manifest.units, layouts)

    async def _manifest(self, source: CheckpointSource) -> Manifest:
        if source not in self._manifests:
            manifest = await self._files(lambda: open_manifest(self._files.open(source.url)))
            wanted = {at.filled_from for at in self._state.runs.values()}
            self._manifests = {each: self._manifests[each] for each in self._manifests if each in wanted}
            self._manifests[source] = manifest
        return self._manifests[source]

    async def _fill(self, run: Run, unit: Unit, source: CheckpointSource) -> None:
        shards, progress = unit.shards, dict[str, tuple[int, int]]()
        request = shard_pb2.LoadShardsRequest(
            context=self._servers.context(run, source.step), url=source.url, wait_s=_POLL_S, unit=unit.layout.unit
        )

        async def load(server_id: str) -> None:
            while not run.deleted:
                answer = await self._servers.call(server_id, "LoadShards", request)
                progress[server_id] = (answer.loaded_bytes, answer.total_bytes)
                run.checkpoints.note_filling(unit.layout.unit, progress.values())
                if answer.loaded:
                    return

        outcomes = await asyncio.gather(*map(load, sorted(unit.owners)), return_exceptions=True)
        run.checkpoints.note_filled(unit.layout.unit)
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:  # all servers have ended their work, so the unit may be placed again
            raise min(errors, key=lambda error: isinstance(error, UnavailableError))
        async with run.units.placement_lock:
            if unit.shards != shards or run.checkpoints.restore is not None:
                return  # the unit was placed again, or the run is loaded from a checkpoint
            await self._state.save_unit(run, unit, published=True)
            unit.mark_published()
        message = f"unit {unit.layout.unit!r} is version {source.step} of checkpoint {source.url}"
        self._state.events.add(EventKind.UNIT_PUBLISHED, message, run=run.name)
        run.changed.notify()

    def _report_damaged(self, run: Run, source: CheckpointSource, error: ShardwellError) -> None:
        logger.error("run %r: checkpoint %s cannot be loaded: %s", run.name, source.url, error)
        self._state.events.add(EventKind.CHECKPOINT_DAMAGED, f"{source.url}: {error}", run=run.name)
