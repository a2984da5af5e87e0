"""Rpcs that describe or change runs and the cluster: checkpoints, backups, drained servers, stalls and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version

from shardwell_server.coordinator.checkpoints.saving import add_report
from shardwell_server.coordinator.inspection import describe
from shardwell_server.coordinator.inspection.stall import server_problems
from shardwell_server.coordinator.placed_units import Unit
from shardwell_server.coordinator.rpcs.coordinator_rpcs import CoordinatorRpcs, check_seconds, fingerprint, wait_limit
from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import check_backups, check_layers
from shardwell_server.coordinator.signals import poll
from shardwell_server.coordinator.storage.records import BackupRecord, ShardRecord
from shardwell_server.serving.rpc import Call
from shardwell_wire.errors import InvalidRequestError, NotFoundError, StepStateError, UnavailableError
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2, shard_pb2

_Hashes = Mapping[tuple[str, str, int], shard_pb2.ShardHash]
"""Hashes by server, unit and first byte."""

_VERIFY_S = 20.0
"""Longest wait for the servers to reach the committed version, and for shards that move, in seconds."""
_VERIFY_PAUSE_S = 0.05


class AdministrationRpcs(CoordinatorRpcs):
    """Rpcs that change runs and the cluster outside of steps."""

    async def DeleteRun(
        self, request: coordinator_pb2.DeleteRunRequest, call: Call
    ) -> coordinator_pb2.DeleteRunResponse:
        repeated = self._requests.check(request.request_id, fingerprint(request))
        try:
            run = self._state.require_run(request.run, request.run_id)
        except NotFoundError:
            if repeated:
                return coordinator_pb2.DeleteRunResponse()
            raise
        freed_bytes = await self._coordinator.delete_run(run, force=request.force)
        return coordinator_pb2.DeleteRunResponse(freed_bytes=freed_bytes)

    async def SaveCheckpoint(
        self, request: coordinator_pb2.SaveCheckpointRequest, call: Call
    ) -> coordinator_pb2.SaveCheckpointResponse:
        run = self._state.require_run(request.run, request.run_id)
        checkpoint_id = request.checkpoint_id or self._coordinator.checkpoints.request(run).checkpoint_id

        async def check() -> coordinator_pb2.CheckpointProgress | None:
            progress = describe.checkpoint_progress(run, checkpoint_id)
            return None if progress.state == coordinator_pb2.CHECKPOINT_STATE_WRITING else progress

        ended = await poll(run.changed, check, wait_limit(call, request.wait_s))
        run.check_not_deleted()
        return coordinator_pb2.SaveCheckpointResponse(
            checkpoint=ended or describe.checkpoint_progress(run, checkpoint_id)
        )

    async def AddResiduals(
        self, request: coordinator_pb2.AddResidualsRequest, call: Call
    ) -> coordinator_pb2.AddResidualsResponse:
        run, member = self._member(request)
        with member.serving_rpc(self._state.clock):
            add_report(run, member, request)
        return coordinator_pb2.AddResidualsResponse()

    async def SetBackups(
        self, request: coordinator_pb2.SetBackupsRequest, call: Call
    ) -> coordinator_pb2.SetBackupsResponse:
        run = self._state.require_run(request.run)
        check_backups(request.backups)
        self._coordinator.backups.set_count(run, request.backups)
        await self._state.save(run)
        return coordinator_pb2.SetBackupsResponse()

    async def VerifyRun(
        self, request: coordinator_pb2.VerifyRunRequest, call: Call
    ) -> coordinator_pb2.VerifyRunResponse:
        run, give_up_s = self._state.require_run(request.run), self._state.clock() + _VERIFY_S
        while (response := await self._compare_copies(run)) is None:
            if self._state.clock() >= give_up_s:
                raise UnavailableError(
                    f"run {run.name!r}: its shards moved during every comparison for {_VERIFY_S:g} s: try again later",
                    run=run.name,
                )
            await run.changed.wait(_VERIFY_PAUSE_S)
        return response

    async def _compare_copies(self, run: Run) -> coordinator_pb2.VerifyRunResponse | None:
        """Compares all backups that are in sync with their primaries, at one version. No step is committed meanwhile.

        Returns:
            None if shards moved meanwhile.

        Raises:
            UnavailableError: The servers did not reach the committed version.
        """
        async with run.checkpoints.boundary:  # no commit record is written while this is held
            try:
                async with asyncio.timeout(_VERIFY_S):
                    await run.wait_until_updated()
            except TimeoutError:
                raise UnavailableError(
                    f"run {run.name!r}: its servers did not reach version {run.committed_step} within {_VERIFY_S:g} s: "
                    "see shardwell stall, and try again",
                    run=run.name,
                ) from None
            version, placement = run.committed_step, run.relocations.count
            request = shard_pb2.HashShardsRequest(
                context=self._coordinator.servers.context(run, version), version=version
            )
            pairs = [
                (unit, unit.shard_at(backup.start_bytes), backup)
                for unit in run.units
                for backup in unit.backups
                if backup.in_sync and unit.published
            ]
            servers = {shard.server_id for _, primary, backup in pairs for shard in (primary, backup)}
            try:
                answers = await self._coordinator.servers.call_all(sorted(servers), "HashShards", request)
            except StepStateError:
                if run.relocations.count == placement:
                    raise
        if run.relocations.count != placement:
            return None
        hashes = {
            (server_id, each.unit, each.start_bytes): each
            for server_id, answer in answers.items()
            for each in answer.shards
        }
        differences = [line for pair in pairs for line in _differences(hashes, version, *pair)]
        protected = {(unit.index, backup.start_bytes) for unit, _, backup in pairs}
        return coordinator_pb2.VerifyRunResponse(
            version=version,
            compared_shards=len(pairs),
            compared_bytes=sum(primary.size_bytes for _, primary, _ in pairs),
            differences=differences,
            unprotected_shards=sum(len(unit.shards) for unit in run.units) - len(protected),
        )

    async def RebalanceRun(
        self, request: coordinator_pb2.RebalanceRunRequest, call: Call
    ) -> coordinator_pb2.RebalanceRunResponse:
        run = self._state.require_run(request.run)
        return await self._coordinator.backups.rebalance(run, report_only=request.report_only)

    async def DrainServer(
        self, request: coordinator_pb2.DrainServerRequest, call: Call
    ) -> coordinator_pb2.DrainServerResponse:
        return await self._coordinator.backups.drain(request.server_id, epoch=request.epoch, cancel=request.cancel)

    async def ForgetServer(
        self, request: coordinator_pb2.ForgetServerRequest, call: Call
    ) -> coordinator_pb2.ForgetServerResponse:
        await self._coordinator.server_leases.forget(request.server_id)
        return coordinator_pb2.ForgetServerResponse()


def _differences(hashes: _Hashes, version: int, unit: Unit, primary: ShardRecord, backup: BackupRecord) -> list[str]:
    """Returns one line per difference between a backup and its primary."""
    where = (
        f"unit {unit.layout.unit!r}, bytes {backup.start_bytes} to {backup.stop_bytes}: the backup on server "
        f"{backup.server_id!r}"
    )
    found = [hashes.get((at.server_id, unit.layout.unit, at.start_bytes)) for at in (primary, backup)]
    ours, theirs = found
    if ours is None or theirs is None:
        missing = primary if ours is None else backup
        return [f"{where} cannot be compared: server {missing.server_id!r} does not have the shard"]
    if (ours.version, theirs.version) != (version, version):
        return [f"{where} has version {theirs.version}, the primary {ours.version}: expected {version}"]
    left, right = ({(tensor.parameter, tensor.name): tensor.xxh3 for tensor in each.tensors} for each in (ours, theirs))
    different = [
        f"{parameter} {name}"
        for parameter, name in left | right
        if left.get((parameter, name)) != right.get((parameter, name))
    ]
    if not different:
        return []
    return [f"{where} differs from the primary on {primary.server_id!r} in {', '.join(different[:8])}"]


class InspectionRpcs(CoordinatorRpcs):
    """Rpcs that describe runs and the cluster."""

    async def ListRuns(self, request: coordinator_pb2.ListRunsRequest, call: Call) -> coordinator_pb2.ListRunsResponse:
        cluster, now = self._state.cluster, self._state.clock()
        return coordinator_pb2.ListRunsResponse(
            runs=[
                describe.summarize_run(run, cluster, now)
                for _, run in sorted(self._state.runs.items())
                if call.sees(run.identity)
            ]
        )

    async def DescribeCluster(
        self, request: coordinator_pb2.DescribeClusterRequest, call: Call
    ) -> coordinator_pb2.DescribeClusterResponse:
        state, now = self._state, self._state.clock()
        runs = [state.require_run(request.run)] if request.run else [run for _, run in sorted(state.runs.items())]
        return coordinator_pb2.DescribeClusterResponse(
            shardwell_version=version("shardwell"),
            term=state.term,
            servers=describe.list_servers(state.cluster, state.runs.values(), now).servers,
            runs=[describe.describe_health(run, state.cluster, self._explain_stall(run), now) for run in runs],
            problems=server_problems(state.cluster),
        )

    async def DescribeRun(
        self, request: coordinator_pb2.DescribeRunRequest, call: Call
    ) -> coordinator_pb2.DescribeRunResponse:
        return describe.describe_run(self._state.require_run(request.run), self._state.cluster, self._state.clock())

    async def DescribeWorld(
        self, request: coordinator_pb2.DescribeWorldRequest, call: Call
    ) -> coordinator_pb2.DescribeWorldResponse:
        if bool(request.run) == request.HasField("world"):
            raise InvalidRequestError("a DescribeWorld request must name either a run or a world, and not both")
        if request.run:
            run = self._state.require_run(request.run)
            described = describe.describe_world(run.settings.world, run)
            await self._state.save(run)  # a restarted coordinator must not issue the epochs of replicas again
            return described
        world = World.from_proto(request.world)
        check_layers(world, request.num_layers)
        return describe.describe_world(world, None)

    async def ListUnits(
        self, request: coordinator_pb2.ListUnitsRequest, call: Call
    ) -> coordinator_pb2.ListUnitsResponse:
        run = self._state.require_run(request.run)
        run.checkpoints.check_loadable(run.name)
        run.checkpoints.check_loaded(run.name)
        await self._state.save(run)  # the shards may have moved, and the response names their servers
        return describe.list_units(run, self._state.cluster)

    async def DescribeWeights(
        self, request: coordinator_pb2.DescribeWeightsRequest, call: Call
    ) -> coordinator_pb2.DescribeWeightsResponse:
        run = self._state.require_run(request.run)
        wanted = request.version if request.HasField("version") else None
        has_weights = bool(run.units) and not run.units.unpublished  # without, `attach` fails
        if request.HasField("reader") and has_weights:
            run.readers.note(request.reader, self._state.clock(), wanted)
            if request.reader.hold_s:
                run.changed.notify()
        try:
            found = await describe.describe_weights(run, self._state.cluster, request, wait_limit(call, request.wait_s))
            calls = self._calls if request.HasField("reader") else None
            if calls is not None and (offer := calls.offer(call.caller, is_reader=True)) is not None:
                found.calls.CopyFrom(offer)
            return found
        finally:
            run.readers.note_answered(request.reader.reader_id, self._state.clock())

    async def ListReaders(
        self, request: coordinator_pb2.ListReadersRequest, call: Call
    ) -> coordinator_pb2.ListReadersResponse:
        run = self._state.require_run(request.run)
        return coordinator_pb2.ListReadersResponse(
            newest=run.committed_step, readers=run.readers.describe(run.committed_step, self._state.clock())
        )

    async def PublishVersion(
        self, request: coordinator_pb2.PublishVersionRequest, call: Call
    ) -> coordinator_pb2.PublishVersionResponse:
        run = self._state.require_run(request.run)
        run.checkpoints.check_loaded(run.name)
        if request.remove:
            version = run.kept_versions.remove(request.name, run.committed_step)
        else:
            version = request.version if request.HasField("version") else run.committed_step
            run.kept_versions.publish(request.name, version, run.committed_step)
        run.changes.touch()
        await self._state.save(run)
        return coordinator_pb2.PublishVersionResponse(version=version)

    async def ListServers(
        self, request: coordinator_pb2.ListServersRequest, call: Call
    ) -> coordinator_pb2.ListServersResponse:
        response = describe.list_servers(self._state.cluster, self._state.runs.values(), self._state.clock())
        response.coordinator_insecure = self._state.settings.insecure
        return response

    async def ExplainStall(
        self, request: coordinator_pb2.ExplainStallRequest, call: Call
    ) -> coordinator_pb2.ExplainStallResponse:
        run = self._state.require_run(request.run)
        return describe.describe_stall(run, self._explain_stall(run))

    async def DescribePerformance(
        self, request: coordinator_pb2.DescribePerformanceRequest, call: Call
    ) -> coordinator_pb2.DescribePerformanceResponse:
        return describe.describe_performance(self._state.require_run(request.run), request.logged_count)

    async def WatchEvents(
        self, request: coordinator_pb2.WatchEventsRequest, call: Call
    ) -> AsyncIterator[coordinator_pb2.WatchEventsResponse]:
        check_seconds("duration_s", request.duration_s)
        async for event in self._state.events.watch(request.run, request.duration_s or None):
            yield event
