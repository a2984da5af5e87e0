"""``shardwell export``: writes the weights of a live run to files during training."""

from __future__ import annotations

import argparse
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from shardwell.command.inspect_commands import (
    DEFAULT_ADDRESS,
    add_credentials_arguments,
    open_coordinator,
    positive_seconds,
)
from shardwell.sizes import format_size
from shardwell.weights.checkpoint_reader import Values, total_bytes, write_dcp, write_safetensors
from shardwell.weights.pinned_version import PinnedVersion, pinned_version
from shardwell_wire.errors import CapacityError, UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"": 1, "B": 1, **{f"{name}B": 1000**power for power, name in enumerate("KMGT", 1)}} | {
    f"{name}IB": 1024**power for power, name in enumerate("KMGT", 1)
}
_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended, as shells expect."""

_DESCRIPTION = """\
Writes the committed weights of a run to a new folder during training, without the model's code. All weights have
the same version: the shard servers pin a copy of it until it is read. The folder appears complete or not at all,
even after Ctrl-C or on a full disk.

Parameters have the names of the run. With `auto_wrap` these are the model's names. Tied parameters are stored once.
Persistent buffers, such as BatchNorm's statistics, are written, too.
"""
_EPILOG = """\
examples:
  shardwell export gpt out/                         out/model.safetensors, for transformers' from_pretrained
                                                    (save the config beside it) or safetensors.torch.load_file
  shardwell export gpt out/ --dtype bfloat16 --max-shard-size 2GB
  shardwell export gpt checkpoint/ --format dcp     for torch.distributed.checkpoint.load
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], help_line: str) -> None:
    """Adds ``shardwell export``."""
    parser = subparsers.add_parser(
        "export",
        help=help_line,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to write; must be empty or not exist")
    parser.add_argument(
        "--format",
        choices=("safetensors", "dcp"),
        default="safetensors",
        help="Hugging Face's sharded safetensors, or torch.distributed.checkpoint (default: safetensors)",
    )
    parser.add_argument(
        "--dtype", choices=sorted(_DTYPES), help="round floating-point tensors to this dtype (default: no rounding)"
    )
    parser.add_argument(
        "--max-shard-size",
        type=parse_size,
        default=parse_size("5GB"),
        metavar="SIZE",
        help="maximum size of one safetensors file, such as 5GB or 500MiB (default: 5GB)",
    )
    parser.add_argument(
        "--address",
        default=os.environ.get("SHARDWELL_ADDRESS") or DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="address of the coordinator (default: SHARDWELL_ADDRESS, else localhost:50051)",
    )
    add_credentials_arguments(parser)
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for an answer of a server, and for one unit (default: 60)",
    )
    parser.set_defaults(handler=_export)


def parse_size(text: str) -> int:
    """Parses a number of bytes such as ``5GB``, ``500MiB`` or ``1000000``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a size such as 5GB or 500MiB")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))


def _export(arguments: argparse.Namespace) -> int:
    console = Console(stderr=True, highlight=False)
    _check_empty(arguments.folder)
    try:
        with (
            open_coordinator(arguments) as coordinator,
            pinned_version(coordinator, arguments.run, timeout_s=arguments.timeout) as pinned,
        ):
            tensors = _tensors(pinned, arguments.dtype)
            _check_room(arguments.folder, total_bytes(tensors))
            with _progress(console, total_bytes(tensors)) as (progress, task):
                paths = _write(arguments, pinned, tensors, _counted(_cast(pinned, arguments.dtype), progress, task))
    except KeyboardInterrupt:
        print(f"shardwell export: interrupted; nothing was written to {arguments.folder}", file=sys.stderr)
        return _INTERRUPTED
    except OSError as error:
        print(f"shardwell export: {_explain(arguments.folder, error)}; the folder is unchanged", file=sys.stderr)
        return 1
    _report(arguments, pinned, tensors, paths)
    return 0


def _check_empty(folder: Path) -> None:
    if folder.is_file():
        raise UsageError(f"{folder} is a file: name a folder")
    if folder.is_dir() and (present := sorted(path.name for path in folder.iterdir())):
        more = f" and {len(present) - 3} more" if len(present) > 3 else ""
        raise UsageError(f"{folder} is not empty ({', '.join(present[:3])}{more}): name a new folder")


def _check_room(folder: Path, needed_bytes: int) -> None:
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < needed_bytes:
        raise CapacityError(
            f"the weights are {format_size(needed_bytes)}, but the disk of {folder} has {format_size(free_bytes)} "
            "free: nothing was written. --dtype bfloat16 halves the size of float32 tensors"
        )


def _tensors(pinned: PinnedVersion, dtype: str | None) -> dict[str, torch.Tensor]:
    """Returns the tensors to write by name, without values, in the order of the values."""
    return {stored.name: _as(stored.meta, dtype) for stored in (*pinned.parameters, *pinned.buffers)}


def _cast(pinned: PinnedVersion, dtype: str | None) -> Values:
    return ((name, _as(value, dtype)) for name, value in pinned.values())


def _as(tensor: torch.Tensor, dtype: str | None) -> torch.Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(_DTYPES[dtype])


def _write(
    arguments: argparse.Namespace, pinned: PinnedVersion, tensors: Mapping[str, torch.Tensor], values: Values
) -> list[Path]:
    if arguments.format == "dcp":
        write_dcp(arguments.folder, tensors, values)
        return [arguments.folder]
    metadata = {"run": pinned.run, "step": str(pinned.version)}
    return write_safetensors(
        arguments.folder, tensors, values, max_shard_bytes=arguments.max_shard_size, metadata=metadata
    )


@contextmanager
def _progress(console: Console, size_bytes: int) -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar on a terminal, and removes it at the end."""
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task("exporting", total=size_bytes)


def _counted(values: Values, progress: Progress, task: TaskID) -> Values:
    for name, value in values:
        yield name, value
        progress.advance(task, value.nbytes)


def _report(
    arguments: argparse.Namespace, pinned: PinnedVersion, tensors: Mapping[str, torch.Tensor], paths: list[Path]
) -> None:
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {arguments.folder}"
    what = f"{len(tensors)} tensors, {format_size(total_bytes(tensors))}"
    buffers = f", {len(pinned.buffers)} of them buffers" if pinned.buffers else ""
    print(f"run {pinned.run!r} after {pinned.version} steps: {what}{buffers}, in {where}")


def _explain(folder: Path, error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += " (--dtype bfloat16 halves the size of float32 tensors)"
    return f"cannot write to {folder}: {reason}"
