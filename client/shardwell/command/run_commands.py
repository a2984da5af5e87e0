"""The commands that save, list and verify checkpoints, and that move the shards of a run during training."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.text import Text

from shardwell.command.arguments import Subparsers, add_command, add_coordinator_arguments, calling
from shardwell.command.output import Answer, add_output_arguments, byte_columns, progress, progress_bar, show
from shardwell.tables import Listing, format_size
from shardwell.transport.service_client import save_checkpoint
from shardwell_wire.checkpoints.folder import Entry, entries_below, verify
from shardwell_wire.checkpoints.storage import absolute, local_path, open_storage
from shardwell_wire.errors import NotFoundError, UsageError
from shardwell_wire.v1 import coordinator_pb2

_POLL_S = 0.5
"""Seconds between two questions about the progress."""
_LATEST_S = datetime(9999, 1, 1).timestamp()
"""Limit of the times that can be printed. A manifest may have any number."""

_VERIFY_DESCRIPTION = """\
Reads every byte of a checkpoint and compares all checksums. Prints one line for each damaged or missing file and
tensor.

With the name of a run, compares the parameters and optimizer states of the run's primaries and backups instead, during
training. Prints one line for each difference.

The exit code is 1 if anything is damaged, is missing or differs.
"""
_VERIFY_EPILOG = """\
examples:
  shardwell verify /mnt/checkpoints                 every checkpoint in the folder
  shardwell verify s3://bucket/gpt-runs/gpt/step-000000042-6fd1c0a2
  shardwell verify gpt                              the shards of the live run "gpt"
"""
_SAVE_EPILOG = """\
examples:
  shardwell checkpoint gpt                          return when the servers have begun
  shardwell checkpoint gpt --wait                   return when the checkpoint is complete
"""
_LIST_EPILOG = """\
examples:
  shardwell checkpoints /mnt/checkpoints
  shardwell checkpoints s3://bucket/gpt-runs --json
"""


_BACKUPS_DESCRIPTION = """\
Sets how many other servers keep a copy of every shard of a run, on another host where there is one. A copy takes as
much memory as its primary. Copies are built during training, a few per step. `shardwell units RUN` shows their states,
and the event `backups_in_sync` says when all are complete.
"""
_BACKUPS_EPILOG = """\
examples:
  shardwell backups gpt 1                           the loss of one server loses nothing
  shardwell backups gpt 0                           release the copies
"""
_PUBLISH_DESCRIPTION = """\
Names a version of a run that was created with join(keep_versions=N). The version stays readable until the name is
removed. Published versions use the memory of the N kept ones. Without NAME, lists the published and kept versions.
"""
_PUBLISH_EPILOG = """\
examples:
  shardwell publish gpt eval-3                      name the newest version
  shardwell publish gpt eval-3 --version 1200       name an older one that the run keeps
  shardwell publish gpt eval-3 --remove             let the run forget it
  shardwell digest gpt --version eval-3             what a copy of it must have
"""
_DRAIN_DESCRIPTION = """\
Moves all shards of a server to other servers, while runs train. The server gets no new shards. When it has none left,
its process can be stopped. Without --wait, the command returns at once; run it again to see what is left.
"""
_DRAIN_EPILOG = """\
examples:
  shardwell drain shard-2 --wait                    return when the server has no shards left
  shardwell drain shard-2 --cancel                  let the server have shards again
"""
_REBALANCE_DESCRIPTION = """\
Moves shards of a run until they are spread evenly over all live servers, such as a new one. Training goes on. Whole
shards move, a few per step. Without --wait, the command returns at once.
"""


def add_parsers(subparsers: Subparsers) -> None:
    """Adds ``shardwell checkpoint``, ``checkpoints``, ``verify``, ``backups``, ``drain`` and ``rebalance``."""
    saving = add_command(
        subparsers,
        "checkpoint",
        "save a checkpoint of a run during training",
        _save,
        description="Saves a checkpoint of the newest committed version. The servers write it while training goes on.",
        epilog=_SAVE_EPILOG,
    )
    saving.add_argument("run", metavar="RUN", help="name of a run that a trainer has joined with checkpoint_dir")
    saving.add_argument("--wait", action="store_true", help="show the progress, and return when it is complete")
    add_coordinator_arguments(saving)
    listing = add_command(
        subparsers,
        "checkpoints",
        "list the checkpoints in a folder or bucket",
        _list,
        description="Lists checkpoints with run, step, time, size and state. An incomplete checkpoint is being "
        "written, or was given up. A damaged one lacks a file, or a file has another size.",
        epilog=_LIST_EPILOG,
    )
    listing.add_argument("folder", metavar="DIR", help="folder or URL, as in join(checkpoint_dir=)")
    add_output_arguments(listing)
    verifying = add_command(
        subparsers,
        "verify",
        "compare the checksums of a checkpoint, or primaries and backups of a run",
        _verify,
        description=_VERIFY_DESCRIPTION,
        epilog=_VERIFY_EPILOG,
    )
    verifying.add_argument(
        "target",
        metavar="TARGET",
        help="path or URL of a checkpoint or of a folder of checkpoints, or the name of a run, if there is no such "
        "folder",
    )
    add_coordinator_arguments(verifying, "for a run: ")
    backups = add_command(
        subparsers,
        "backups",
        "set how many servers keep a copy of every shard of a run",
        _backups,
        description=_BACKUPS_DESCRIPTION,
        epilog=_BACKUPS_EPILOG,
    )
    add_coordinator_arguments(backups)
    backups.add_argument("run", metavar="RUN", help="name of the run")
    backups.add_argument("count", metavar="N", type=int, help="copies of every shard; 0: none")
    publish = add_command(
        subparsers,
        "publish",
        "name a version of a run, which then stays readable",
        _publish,
        description=_PUBLISH_DESCRIPTION,
        epilog=_PUBLISH_EPILOG,
    )
    add_coordinator_arguments(publish)
    publish.add_argument("run", metavar="RUN", help="name of the run")
    publish.add_argument("name", metavar="NAME", nargs="?", help="name of the version; without one, list all")
    publish.add_argument("--version", type=int, help="number of committed steps (default: the newest version)")
    publish.add_argument("--remove", action="store_true", help="remove the name instead")
    drain = add_command(
        subparsers,
        "drain",
        "move all shards of a server to other servers",
        _drain,
        description=_DRAIN_DESCRIPTION,
        epilog=_DRAIN_EPILOG,
    )
    add_coordinator_arguments(drain)
    drain.add_argument("server", metavar="SERVER", help="id of the shard server, as in shardwell servers")
    mode = drain.add_mutually_exclusive_group()
    mode.add_argument("--wait", action="store_true", help="show the progress, and return when no shards are left")
    mode.add_argument("--cancel", action="store_true", help="stop draining: the server may get shards again")
    rebalance = add_command(
        subparsers,
        "rebalance",
        "spread the shards of a run evenly over the servers",
        _rebalance,
        description=_REBALANCE_DESCRIPTION,
        epilog="examples:\n  shardwell rebalance gpt --wait",
    )
    add_coordinator_arguments(rebalance)
    rebalance.add_argument("run", metavar="RUN", help="name of the run")
    rebalance.add_argument("--wait", action="store_true", help="show the progress, and return when it is done")


# ---- saving ----


def _save(arguments: argparse.Namespace) -> int:
    run: str = arguments.run
    with calling(arguments) as call, progress(*byte_columns()) as bar:
        task = bar.add_task("saving", total=None)
        for found in save_checkpoint(call, run, wait=arguments.wait):
            bar.update(task, completed=found.written_bytes, total=found.total_bytes or None)
    what = "is being written to" if found.state == coordinator_pb2.CHECKPOINT_STATE_WRITING else "is complete:"
    print(f"the checkpoint of step {found.step} of run {run!r} {what} {found.url}")
    return 0


# ---- the list ----


def _list(arguments: argparse.Namespace) -> int:
    return show(arguments, lambda: _listed(_entries(arguments.folder)))


def _listed(entries: Sequence[Entry]) -> Answer:
    listing = Listing("RUN", "STEP", "TIME", "SIZE", "FILES", "STATE", "FOLDER", optional=("FILES", "TIME"))
    for entry in entries:
        listing.add_row(*_row(entry))
    damaged = [
        f"\nstep {entry.step} of run {entry.run!r} is damaged: {entry.problem}"
        for entry in entries
        if entry.problem and not entry.is_incomplete
    ]
    return Answer(([_as_json(entry) for entry in entries],), Group(listing, *damaged))


def _entries(folder: str) -> list[Entry]:
    entries = entries_below(folder)
    if not entries:
        path = local_path(folder)
        problem = "contains no checkpoints" if path is None or path.exists() else "does not exist"
        raise NotFoundError(f"{folder} {problem}", path=folder)
    return entries


def _row(entry: Entry) -> tuple[str | Text, ...]:
    colors = {"complete": "green", "incomplete": "yellow", "damaged": "red"}
    state, manifest = Text(_state(entry), colors[_state(entry)]), entry.manifest
    if manifest is None:
        return entry.run, str(entry.step), "", "", "", state, entry.folder
    time = datetime.fromtimestamp(min(manifest.created, _LATEST_S)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    size, count = format_size(manifest.size_bytes), str(len(manifest.files))
    return entry.run, str(entry.step), time, size, count, state, entry.folder


def _state(entry: Entry) -> str:
    return "incomplete" if entry.is_incomplete else "damaged" if entry.problem else "complete"


def _as_json(entry: Entry) -> dict[str, Any]:
    manifest = entry.manifest
    return {
        "run": entry.run,
        "step": entry.step,
        "checkpoint_id": entry.checkpoint_id,
        "path": entry.url,
        "state": _state(entry),
        "problem": entry.problem,
        "run_id": manifest.run_id if manifest else None,
        "created": manifest.created if manifest else None,
        "size_bytes": manifest.size_bytes if manifest else None,
        "files": [file.name for file in manifest.files] if manifest else [],
    }


# ---- verification ----


def _verify(arguments: argparse.Namespace) -> int:
    target: str = arguments.target
    if "/" not in target and not Path(target).is_dir():
        return _verify_run(arguments)
    damaged = 0
    for entry in _entries(target):
        if entry.is_incomplete and entry.url.rstrip("/") != absolute(target).rstrip("/"):
            print(f"{entry.url}: incomplete, so it is never loaded; skipped")
        elif problems := _problems(entry):
            damaged += 1
            for problem in problems:
                print(f"{entry.url}: {problem}")
        else:
            assert entry.manifest is not None
            size = format_size(entry.manifest.size_bytes)
            print(f"{entry.url}: step {entry.step} of run {entry.run!r} is intact, {size}")
    if damaged:
        print(f"shardwell verify: {damaged} damaged", file=sys.stderr)
    return 1 if damaged else 0


def _problems(entry: Entry) -> list[str]:
    """Returns what is wrong with a checkpoint."""
    with progress_bar(f"step {entry.step}", entry.manifest.size_bytes if entry.manifest else None) as count:
        return list(verify(open_storage(entry.url), count))


# ---- moving shards ----


def _backups(arguments: argparse.Namespace) -> int:
    with calling(arguments) as call:
        if not 0 <= arguments.count < 1 << 32:
            print(f"shardwell backups: {arguments.count}: expected at least 0", file=sys.stderr)
            return 1
        call("SetBackups", coordinator_pb2.SetBackupsRequest(run=arguments.run, backups=arguments.count))
        print(f"run {arguments.run!r}: {arguments.count} backups of every shard; shardwell units shows their state")
        return 0


def _publish(arguments: argparse.Namespace) -> int:
    with calling(arguments) as call:
        if arguments.name is None and (arguments.remove or arguments.version is not None):
            raise UsageError("name the version: shardwell publish RUN NAME")
        if arguments.name is None:
            described = call("DescribeWeights", coordinator_pb2.DescribeWeightsRequest(run=arguments.run))
            print(f"run {arguments.run!r}: newest version {described.newest}")
            print(f"kept: {', '.join(map(str, described.kept_versions)) or 'none'}")
            for name, version in sorted(described.published.items()):
                print(f"{name}: version {version}")
            for name, lost in sorted(described.lost.items()):
                print(f"{name}: lost, {lost}")
            return 0
        request = coordinator_pb2.PublishVersionRequest(
            run=arguments.run, name=arguments.name, version=arguments.version, remove=arguments.remove
        )
        version = call("PublishVersion", request).version
        what = "is no longer" if arguments.remove else "is"
        print(f"version {version} of run {arguments.run!r} {what} published as {arguments.name!r}")
        return 0


def _drain(arguments: argparse.Namespace) -> int:
    with calling(arguments) as call:
        request = coordinator_pb2.DrainServerRequest(server_id=arguments.server, cancel=arguments.cancel)
        response = call("DrainServer", request)
        if arguments.cancel:
            print(f"server {arguments.server!r} is not drained: it may get shards again")
            return 0
        with progress(SpinnerColumn(), TextColumn("{task.description}")) as status:
            while arguments.wait and response.shard_count:
                _show(status, [_left(response), *response.waiting_for])
                time.sleep(_POLL_S)
                response = call("DrainServer", request)
        print(f"server {arguments.server!r}: {_left(response) if response.shard_count else 'no shards left'}")
        for line in response.waiting_for:
            print(f"  {line}")
        return 0


def _rebalance(arguments: argparse.Namespace) -> int:
    with calling(arguments) as call:
        response = call("RebalanceRun", coordinator_pb2.RebalanceRunRequest(run=arguments.run))
        with progress(SpinnerColumn(), TextColumn("{task.description}")) as status:
            while arguments.wait and response.rebalancing:
                _show(status, [_left(response)])
                time.sleep(_POLL_S)
                report = coordinator_pb2.RebalanceRunRequest(run=arguments.run, report_only=True)
                response = call("RebalanceRun", report)
        print(f"run {arguments.run!r}: {_left(response) if response.rebalancing else 'no shards to move'}")
        return 0


def _verify_run(arguments: argparse.Namespace) -> int:
    """Compares primaries and backups of a run. Returns 1 if they differ.

    Args:
        arguments: ``target`` (the run), ``address``, ``token_file`` and ``timeout`` in seconds.
    """
    with calling(arguments) as call:
        response = call("VerifyRun", coordinator_pb2.VerifyRunRequest(run=arguments.target))
        for line in response.differences:
            print(line)
        if response.differences:
            print(f"shardwell verify: {len(response.differences)} differences", file=sys.stderr)
            return 1
        print(
            f"run {arguments.target!r}, version {response.version}: {response.compared_shards} backups "
            f"({format_size(response.compared_bytes)}) equal their primaries"
        )
        if response.unprotected_shards:
            print(f"{response.unprotected_shards} shards have no backup in sync")
        return 0


def _left(response: Any) -> str:
    return f"{response.shard_count} shards ({format_size(response.size_bytes)}) are being moved"


def _show(status: Progress, lines: list[str]) -> None:
    text = "; ".join(lines)
    if status.task_ids:
        status.update(status.task_ids[0], description=text)
    else:
        status.add_task(text)
