"""Converts a run to the manifest of a checkpoint, and back. Folders are read and written in threads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from google.protobuf import json_format

from shardwell_server.coordinator.run import Run
from shardwell_server.coordinator.settings import RunSettings
from shardwell_server.coordinator.steps.work import AsynchronousWork
from shardwell_server.coordinator.storage.records import CommitRecord
from shardwell_wire.checkpoints.folder import RunFolder
from shardwell_wire.checkpoints.manifest import (
    CONSISTENCY,
    ITEM_NUMBERS,
    REDUCTION_GROUPS,
    RESIDUAL_RANKS,
    FileRecord,
    Manifest,
    message_from_dict,
    message_to_dict,
)
from shardwell_wire.checkpoints.opening import CheckpointRoots
from shardwell_wire.checkpoints.storage import Storage
from shardwell_wire.errors import CorruptDataError, InternalError, RunMismatchError, ShardwellError, UnavailableError
from shardwell_wire.v1 import common_pb2, coordinator_pb2

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class CheckpointFiles:
    """Opens folders of checkpoints, and runs blocking work on them in threads.

    The threads are their own, because a bucket that does not answer must not block anything else.

    Args:
        roots: The folders that may be opened.
    """

    def __init__(self, roots: CheckpointRoots) -> None:
        self._roots = roots
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="shardwell-checkpoints")
        self._closed = False

    async def __call__(
        self, work: Callable[Arguments, Result], *args: Arguments.args, **options: Arguments.kwargs
    ) -> Result:
        """Returns the result of a call in a thread. Unexpected errors of storage libraries become InternalError."""
        if self._closed:
            raise UnavailableError("the coordinator is stopping")
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **options))
        except (ShardwellError, asyncio.CancelledError):
            raise
        except Exception as error:
            logger.exception("unexpected error in the storage of checkpoints")
            raise InternalError(f"the storage of checkpoints failed: {type(error).__name__}: {error}") from error

    def open(self, url: str) -> Storage:
        """Returns the storage at a path or URL. Blocks.

        Raises:
            ShardwellError: See ``CheckpointRoots.open``.
        """
        return self._roots.open(url)

    def open_run(self, url: str, run: str) -> RunFolder:
        """Returns the folder of a run in a folder of checkpoints. Blocks. Raises as ``open``."""
        return RunFolder(self._roots.open(url), run)

    def close(self) -> None:
        """Lets running work end, and starts no more."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)


def manifest_of(run: Run, checkpoint_id: str, created: float, commits: Iterable[CommitRecord]) -> Manifest:
    """Returns the manifest of a checkpoint of a run's current version, without files.

    Args:
        run: The run.
        checkpoint_id: Random id of the checkpoint.
        created: Seconds since 1970.
        commits: The most recent commit records, oldest first.
    """
    return Manifest(
        run=run.name,
        run_id=run.identity.run_id,
        checkpoint_id=checkpoint_id,
        step=run.committed_step,
        created=created,
        world=run.settings.world,
        seed=run.settings.seed,
        units=tuple(run.units.layouts),
        files=(),
        commits=tuple(map(_commit_to_dict, commits)),
        run_state=run.commits.state,
        lineage=run.checkpoints.lineage,
        extra={
            "num_layers": run.settings.num_layers,
            "min_trainers": run.settings.min_trainers,
            REDUCTION_GROUPS: list(run.settings.reduction_groups),
            **_asynchronous_facts(run),
        },
    )


def _asynchronous_facts(run: Run) -> dict[str, Any]:
    """Returns what the manifest of an asynchronous run has in addition."""
    if not isinstance(run.work, AsynchronousWork):
        return {}
    return {CONSISTENCY: str(run.settings.consistency), ITEM_NUMBERS: run.work.numbers}


def with_files(manifest: Manifest, files: Sequence[FileRecord], residual_ranks: Collection[int]) -> Manifest:
    """Returns a manifest with the files of all servers and trainers.

    Args:
        manifest: The manifest without files.
        files: The files.
        residual_ranks: Data ranks whose residuals of error feedback the files have.
    """
    extra = {**manifest.extra, RESIDUAL_RANKS: sorted(residual_ranks)} if residual_ranks else manifest.extra
    return replace(manifest, files=tuple(files), extra=extra)


def commits_in(manifest: Manifest, where: str) -> list[CommitRecord]:
    """Returns the most recent commit records, oldest first.

    Raises:
        CorruptDataError: A record is invalid, or they do not end with the manifest's step.
    """
    try:
        commits = [_commit_from_dict(commit) for commit in manifest.commits]
    except (KeyError, TypeError, ValueError, json_format.ParseError) as error:
        raise CorruptDataError(f"the manifest of {where} has an invalid commit record: {error}") from error
    steps = [commit.step for commit in commits]
    if steps != list(range(manifest.step - len(steps), manifest.step)) or (manifest.step and not steps):
        raise CorruptDataError(f"the manifest of {where} has commit records {steps}, but step {manifest.step}")
    return commits


def first_items_in(manifest: Manifest, settings: RunSettings) -> tuple[int, ...]:
    """Returns the number of each data rank's first work item in a run that is loaded from a checkpoint.

    With another number of data ranks, all continue at the lowest number of the checkpoint: no number is left out.

    Returns:
        One number for each data rank of the run. Empty: the run is synchronous.
    """
    if not settings.consistency.asynchronous:
        return ()
    numbers, dp = manifest.item_numbers, settings.world.dp
    return numbers if len(numbers) == dp else (min(numbers),) * dp


def run_state_in(manifest: Manifest) -> coordinator_pb2.RunState | None:
    """Returns the state of a run that is loaded from a checkpoint.

    The trainer that pushed the newest buffers cannot recognise them by lease and attempt any more, so all trainers
    fetch them.
    """
    if manifest.run_state is None:
        return None
    state = coordinator_pb2.RunState()
    state.CopyFrom(manifest.run_state)
    state.ClearField("buffer_source")
    return state


def require_same_run(manifest: Manifest, run: str, settings: RunSettings, where: str) -> None:
    """Raises RunMismatchError unless a run with these settings can continue from a checkpoint.

    The world may differ, see Note: [Resuming in another grid] and Note: [Resuming with other data ranks]. Reduction
    groups belong to a number of data ranks. The batches of a synchronous run depend on the step, and those of an
    asynchronous run on the numbers of the data ranks' work items. Therefore, neither can continue from the other.
    """
    if settings.consistency.asynchronous != manifest.consistency.asynchronous:
        raise RunMismatchError(
            f"run {run!r} cannot continue from checkpoint {where}: the checkpoint has "
            f"consistency={manifest.consistency}, but this trainer asks for consistency={settings.consistency}, whose "
            f"batches are numbered otherwise. Pass consistency={manifest.consistency} to join, or start a new run with "
            "the weights of the checkpoint (shardwell convert-checkpoint)",
            run=run,
            name="consistency",
            expected=manifest.consistency,
            actual=settings.consistency,
        )
    facts: list[tuple[str, object, object]] = [("seed", settings.seed, manifest.seed)]
    if settings.world.dp == manifest.world.dp:
        facts.append(("reduction_groups", settings.reduction_groups, manifest.reduction_groups))
    for name, ours, theirs in facts:
        if ours != theirs:
            raise RunMismatchError(
                f"run {run!r} cannot continue from checkpoint {where}: the checkpoint has {name}={theirs}, but this "
                f"trainer asks for {name}={ours}. Pass the checkpoint's value to join; the world and the numbers of "
                "trainers and servers may differ",
                run=run,
                name=name,
                expected=theirs,
                actual=ours,
            )


def _commit_to_dict(record: CommitRecord) -> dict[str, Any]:
    optimizer = common_pb2.OptimizerStep.FromString(record.optimizer)
    return {**asdict(record), "unit_order": list(record.unit_order), "optimizer": message_to_dict(optimizer)}


def _commit_from_dict(content: Mapping[str, Any]) -> CommitRecord:
    fields = dict(content)
    optimizer = message_from_dict(fields.pop("optimizer"), common_pb2.OptimizerStep())
    return CommitRecord(
        step=int(fields["step"]),
        time=float(fields["time"]),
        leader=str(fields["leader"]),
        optimizer=optimizer.SerializeToString(deterministic=True),
        clip_coefficient=float(fields["clip_coefficient"]),
        unit_order=tuple(map(int, fields["unit_order"])),
        grad_norm=float(fields["grad_norm"]),
        other_norms=tuple(
            (float(of), float(bound), float(value)) for of, bound, value in fields.get("other_norms", ())
        ),
        skipped=bool(fields["skipped"]),
        trainer=str(fields.get("trainer", "")),
        dp_rank=int(fields.get("dp_rank", 0)),
        item=int(fields.get("item", 0)),
        base_version=int(fields.get("base_version", 0)),
    )
