"""The rpcs about checkpoints: writing this server's file, and loading a run from a checkpoint."""

from __future__ import annotations

import asyncio

from shardwell_server.shard.checkpoints.contents import in_expected_order, parts_of, pieces_of
from shardwell_server.shard.checkpoints.files import CheckpointWriting, FileContents, OpenedCheckpoints, ShardLoading
from shardwell_server.shard.state.runs import HostedRun
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.unit.portable_state import CapturedShard, VersionCapture, export
from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.errors import InvalidRequestError, NotFoundError, StaleEpochError, StepStateError
from shardwell_wire.v1 import shard_pb2


class CheckpointRequests:
    """Checkpoints and loading of the runs on this server. Used on the event loop.

    Args:
        server_id: Name of this server.
        store: The server's runs.
        roots: The folders that may be opened.
    """

    def __init__(self, server_id: str, store: ShardStore, roots: CheckpointRoots) -> None:
        self._server_id, self._store, self._roots = server_id, store, roots
        self._writing: dict[str, CheckpointWriting] = {}
        """The newest checkpoint of each run, by run id."""
        self._loading: dict[str, ShardLoading] = {}
        """The newest attempt to load all units of each run, by run id."""
        self._loading_units: dict[tuple[str, str], ShardLoading] = {}
        """Units that are being loaded one by one, by run id and name."""
        self._opened = OpenedCheckpoints(roots)

    # ---- writing ----

    async def begin(self, run: HostedRun, request: shard_pb2.BeginCheckpointRequest) -> None:
        """Captures the current version of all primaries and starts writing it. Idempotent.

        Raises:
            StepStateError: A shard has another version, or another checkpoint is being written.
        """
        async with run.exclusively():
            self._begin(run, request)

    def _begin(self, run: HostedRun, request: shard_pb2.BeginCheckpointRequest) -> None:
        former = self._writing.get(run.identity.run_id)
        if former is not None and former.checkpoint_id == request.checkpoint_id:
            return
        if former is not None and not former.progress.ended.is_set():
            raise StepStateError(
                f"checkpoint {former.checkpoint_id} of run {run.name!r} is still being written: begin another one when "
                "it has ended",
                run=run.name,
            )
        if not request.checkpoint_id or not request.url:
            raise InvalidRequestError("checkpoint_id or url is empty: name the checkpoint and its folder")
        version, shards = request.context.step, run.published
        for shard in shards:
            if shard.version != version:
                raise StepStateError(
                    f"version {version} cannot be saved: {shard.what} is at version {shard.version}", unit=shard.unit
                )
        found = [(shard, export(shard)) for shard in shards]
        order = in_expected_order([(shard.index, state) for shard, state in found], request.unit_order)
        pieces, captured = [], []
        for shard, state in (found[number] for number in order):
            named = list(pieces_of(state))
            pieces.append([piece for piece, _ in named])
            captured.append(CapturedShard(shard, [tensor for _, tensor in named], self._store.memory))
        capture = VersionCapture(version, captured, self._store.in_thread)
        contents = FileContents(
            server_id=self._server_id,
            url=request.url,
            run_id=run.identity.run_id,
            version=version,
            parts=[part for _, state in found for part in parts_of(state)],
            averages_begun=any(state.averages_begun for _, state in found),
            pieces=pieces,
        )
        writing = CheckpointWriting(request.checkpoint_id, capture, contents, self._roots)
        self._writing[run.identity.run_id] = writing
        run.capture = capture
        writing.start()

    async def describe(
        self, request: shard_pb2.DescribeCheckpointRequest, wait_s: float
    ) -> shard_pb2.DescribeCheckpointResponse:
        """Returns the progress of a checkpoint. Waits until its file is complete or has failed.

        Raises:
            NotFoundError: This process writes no such checkpoint.
        """
        writing = self._writing.get(request.context.run_id)
        if writing is None or writing.checkpoint_id != request.checkpoint_id:
            raise NotFoundError(
                f"this server process writes no checkpoint {request.checkpoint_id!r} of run {request.context.run!r}"
            )
        progress = writing.progress
        await _wait(progress.ended, wait_s)
        return shard_pb2.DescribeCheckpointResponse(
            written_bytes=progress.written_bytes,
            total_bytes=progress.total_bytes,
            file_json=progress.file_json,
            error=progress.error,
        )

    async def abort(self, request: shard_pb2.AbortCheckpointRequest, wait_s: float) -> None:
        """Stops writing a checkpoint. Returns when the file is removed, or after ``wait_s``."""
        writing = self._writing.get(request.context.run_id)
        if writing is not None and writing.checkpoint_id == request.checkpoint_id:
            writing.abort()
            await _wait(writing.progress.ended, wait_s)

    # ---- loading ----

    async def begin_restore(self, request: shard_pb2.BeginRestoreRequest) -> None:
        """Drops all shards of a run and rejects older epochs. Idempotent.

        Raises:
            StaleEpochError: A later attempt to load the run has begun.
        """
        run_id = request.context.run_id
        if (loading := self._loading.get(run_id)) is not None and loading.restore < request.restore:
            loading.stop()
        self._stop_units(run_id)
        await self._store.begin_restore(request.context, request.restore, request.min_epoch)

    async def load(
        self, run: HostedRun, request: shard_pb2.LoadShardsRequest, wait_s: float
    ) -> shard_pb2.LoadShardsResponse:
        """Loads the reserved shards of a run or of one unit in the background, and waits for the end.

        Raises:
            StaleEpochError: Another attempt to load the run has begun.
            CorruptDataError: A file is missing or damaged.
            UnitMismatchError: The checkpoint lacks a parameter, or has another tensor of its name.
            CapacityError: There is no memory for the state.
        """
        run_id = request.context.run_id
        if request.unit:
            return await self._load_unit(run, request, wait_s)
        if request.restore != run.restore:
            raise StaleEpochError(
                f"run {run.name!r} is loaded by attempt {run.restore}, but the request belongs to attempt "
                f"{request.restore}",
                run=run.name,
            )
        loading = self._loading.get(run_id)
        if loading is None or loading.restore != request.restore:
            source = self._opened.source(request.url, request.context.step)
            loading = self._loading[run_id] = ShardLoading(run, source, restore=request.restore)
            loading.start()
        await _wait(loading.ended, wait_s)
        loading.check()
        return _progress(loading)

    async def _load_unit(
        self, run: HostedRun, request: shard_pb2.LoadShardsRequest, wait_s: float
    ) -> shard_pb2.LoadShardsResponse:
        key = (request.context.run_id, request.unit)
        loading = self._loading_units.get(key)
        # A success that nobody has asked for may be older than the present reservation. Starting again reads nothing if
        # the shards have their values.
        if loading is None or (loading.ended.is_set() and loading.error is None):
            source = self._opened.source(request.url, request.context.step)
            loading = ShardLoading(run, source, unit=request.unit, discard=self._store.empty)
            self._loading_units[key] = loading
            loading.start()
        await _wait(loading.ended, wait_s)
        if loading.ended.is_set() and self._loading_units.get(key) is loading:
            del self._loading_units[key]
        loading.check()
        return _progress(loading)

    async def stop_loading(self, run_id: str, unit: str) -> None:
        """Stops loading a unit whose reservation is about to change. Returns when nothing writes to its memory."""
        if (loading := self._loading_units.get((run_id, unit))) is not None:
            loading.stop()
            await loading.ended.wait()

    def _stop_units(self, run_id: str) -> None:
        for (other, _), loading in self._loading_units.items():
            if other == run_id:
                loading.stop()

    def forget(self, run_id: str) -> None:
        """Ends everything for a run that is being deleted."""
        if (writing := self._writing.pop(run_id, None)) is not None:
            writing.abort()
        if (loading := self._loading.pop(run_id, None)) is not None:
            loading.stop()
        self._stop_units(run_id)


def _progress(loading: ShardLoading) -> shard_pb2.LoadShardsResponse:
    return shard_pb2.LoadShardsResponse(
        loaded=loading.ended.is_set(), loaded_bytes=loading.loaded_bytes, total_bytes=loading.total_bytes
    )


async def _wait(event: asyncio.Event, wait_s: float) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await event.wait()
    except TimeoutError:
        return
