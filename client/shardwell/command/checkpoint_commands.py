"""``shardwell checkpoint``, ``checkpoints`` and ``verify``: save and list checkpoints, and compare their checksums."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from shardwell.command.inspect_commands import (
    add_coordinator_arguments,
    open_coordinator,
)
from shardwell.command.relocation_commands import verify_run
from shardwell.session.checkpoints import follow_checkpoint, is_writing, request_checkpoint, require_not_failed
from shardwell.sizes import format_size
from shardwell_wire.checkpoints.folder import Entry, entries_below, verify
from shardwell_wire.checkpoints.opening import absolute, local_path, open_storage
from shardwell_wire.errors import NotFoundError

_PIPE_WIDTH = 200
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


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``shardwell checkpoint``, ``shardwell checkpoints`` and ``shardwell verify``."""
    _add_save_parser(subparsers)
    listing = subparsers.add_parser(
        "checkpoints",
        help="list the checkpoints in a folder or bucket",
        description="Lists checkpoints with run, step, time, size and state. An incomplete checkpoint is being "
        "written, or was given up. A damaged one lacks a file, or a file has another size.",
        epilog=_LIST_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    listing.add_argument("folder", metavar="DIR", help="folder or URL, as in join(checkpoint_dir=)")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(handler=_list)
    verifying = subparsers.add_parser(
        "verify",
        help="compare the checksums of a checkpoint, or primaries and backups of a run",
        description=_VERIFY_DESCRIPTION,
        epilog=_VERIFY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verifying.add_argument(
        "target",
        metavar="TARGET",
        help="path or URL of a checkpoint or of a folder of checkpoints, or the name of a run, if there is no such "
        "folder",
    )
    add_coordinator_arguments(verifying, "for a run: ")
    verifying.set_defaults(handler=_verify)


def _add_save_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    saving = subparsers.add_parser(
        "checkpoint",
        help="save a checkpoint of a run during training",
        description="Saves a checkpoint of the newest committed version. The servers write it while training goes on.",
        epilog=_SAVE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    saving.add_argument("run", metavar="RUN", help="name of a run that a trainer has joined with checkpoint_dir")
    saving.add_argument("--wait", action="store_true", help="show the progress, and return when it is complete")
    add_coordinator_arguments(saving)
    saving.set_defaults(handler=_save)


# ---- saving ----


def _save(arguments: argparse.Namespace) -> int:
    run: str = arguments.run
    with open_coordinator(arguments) as coordinator:
        call = partial(coordinator.call, timeout_s=arguments.timeout)
        progress = request_checkpoint(call, run)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True, highlight=False)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("saving", total=None)
            while is_writing(progress) and (arguments.wait or not progress.url):
                progress = follow_checkpoint(call, run, progress)
                bar.update(task, completed=progress.written_bytes, total=progress.total_bytes or None)
    require_not_failed(progress, run)
    what = "is being written to" if is_writing(progress) else "is complete:"
    print(f"the checkpoint of step {progress.step} of run {run!r} {what} {progress.url}")
    return 0


# ---- the list ----


def _list(arguments: argparse.Namespace) -> int:
    entries = _entries(arguments.folder)
    if arguments.json:
        print(json.dumps([_as_json(entry) for entry in entries], indent=2))
        return 0
    headings = ("run", "step", "time", "size", "files", "state", "folder")
    table = Table(*headings, box=None, header_style="bold", pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    for entry in entries:
        table.add_row(*_row(entry))
    is_terminal = Console().is_terminal
    console = Console(width=None if is_terminal else _PIPE_WIDTH, highlight=False)
    console.print(table)
    for entry in entries:
        if entry.problem and not entry.is_incomplete:
            console.print(f"\nstep {entry.step} of run {entry.run!r} is damaged: {entry.problem}", soft_wrap=True)
    return 0


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
        return verify_run(arguments)
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
    """Returns what is wrong with a checkpoint, with a progress bar on a terminal."""
    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        total = entry.manifest.size_bytes if entry.manifest else None
        task = progress.add_task(f"step {entry.step}", total=total)
        return list(verify(open_storage(entry.url), lambda size: progress.advance(task, size)))
