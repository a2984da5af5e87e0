"""The commands that write weights and checkpoints in other formats: ``export`` and ``convert-checkpoint``.

They need torch, so they are imported when they are used.
"""

from __future__ import annotations

import argparse
import errno
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from shardwell.command.arguments import (
    INTERRUPTED,
    Subparsers,
    add_command,
    add_coordinator_arguments,
    open_coordinator,
)
from shardwell.command.output import progress_bar
from shardwell.tables import format_size
from shardwell.weights.checkpoint_conversion import checkpoint_to_dcp, dcp_to_checkpoint
from shardwell.weights.checkpoint_reader import open_checkpoint
from shardwell.weights.dcp import METADATA_NAME, write_dcp
from shardwell.weights.digest import pinned_digest
from shardwell.weights.pinned_version import PinnedVersion, pinned_version
from shardwell.weights.weight_files import Values, total_bytes, write_safetensors
from shardwell_wire.checkpoints.storage import local_path
from shardwell_wire.errors import CapacityError, ShardwellError, UsageError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNITS = {"": 1, "B": 1, **{f"{name}B": 1000**power for power, name in enumerate("KMGT", 1)}} | {
    f"{name}IB": 1024**power for power, name in enumerate("KMGT", 1)
}

_EXPORT_DESCRIPTION = """\
Writes the committed weights of a run to a new folder during training, without the model's code. All weights have
the same version: the shard servers pin a copy of it until it is read. The folder appears complete or not at all,
even after Ctrl-C or on a full disk.

Parameters have the names of the model. Tied parameters are stored once.
Persistent buffers, such as BatchNorm's statistics, are written, too.
"""
_EXPORT_EPILOG = """\
examples:
  shardwell export gpt out/                         out/model.safetensors, for transformers' from_pretrained
                                                    (save the config beside it) or safetensors.torch.load_file
  shardwell export gpt out/ --dtype bfloat16 --max-shard-size 2GB
  shardwell export gpt checkpoint/ --format dcp     for torch.distributed.checkpoint.load
"""
_DIGEST_EPILOG = """\
examples:
  shardwell digest gpt                              of the newest version
  shardwell digest gpt --version eval-3             of a published one
"""
_CONVERT_DESCRIPTION = """\
Converts a checkpoint of a run, with optimizer state, to a torch.distributed.checkpoint, or the other way round.

The torch side has the state dict of FSDP2: {"model": model_state, "optim": optimizer_state} from
torch.distributed.checkpoint.state_dict.get_state_dict. Parameters have the names of the model.

A torch checkpoint does not say how a run cuts the model into units. --like names any checkpoint of a run with the same
model, such as one that session.save_checkpoint(wait=True) has saved before the first step. Units, world and seed are
taken from it. Tracked objects, such as LR schedulers, and moving averages are not converted.
"""
_CONVERT_EPILOG = """\
examples:
  shardwell convert-checkpoint checkpoints/gpt/step-000000042-6fd1c0a2 dcp/
                                                    from a run to torch.distributed.checkpoint
  shardwell convert-checkpoint dcp/ checkpoints/ --run gpt2 --like checkpoints/gpt/step-000000000-0a12bc7f
                                                    back; then join(run="gpt2", resume="latest", ...)
"""


def add_export_parser(subparsers: Subparsers, help_line: str) -> None:
    """Adds ``shardwell export``."""
    parser = add_command(
        subparsers, "export", help_line, _export, description=_EXPORT_DESCRIPTION, epilog=_EXPORT_EPILOG
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
    _add_version(parser)
    add_coordinator_arguments(parser, what="an answer of a server, and for one unit")


def add_digest_parser(subparsers: Subparsers, help_line: str) -> None:
    """Adds ``shardwell digest``."""
    parser = add_command(
        subparsers,
        "digest",
        help_line,
        _digest,
        description="Prints a SHA-256 digest of names, dtypes, shapes and values of all parameters and buffers of one "
        "version. shardwell.weights.weights_digest(full_state_dict(model)) is the same.",
        epilog=_DIGEST_EPILOG,
    )
    parser.add_argument("run", metavar="RUN", help="name of the run")
    _add_version(parser)
    add_coordinator_arguments(parser, what="an answer of a server, and for one unit")


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--version",
        metavar="V",
        help="number of committed steps, or name of a published version (default: the newest version)",
    )


def _version(arguments: argparse.Namespace) -> int | str | None:
    text: str | None = arguments.version
    return int(text) if text is not None and text.isdecimal() else text


def add_convert_parser(subparsers: Subparsers, help_line: str) -> None:
    """Adds ``shardwell convert-checkpoint``."""
    parser = add_command(
        subparsers, "convert-checkpoint", help_line, _convert, description=_CONVERT_DESCRIPTION, epilog=_CONVERT_EPILOG
    )
    parser.add_argument(
        "source", metavar="SRC", help="checkpoint of a run (path or URL), or a torch checkpoint (folder)"
    )
    parser.add_argument(
        "destination", metavar="DST", help="new folder of a torch checkpoint, or folder of checkpoints (path or URL)"
    )
    parser.add_argument("--like", metavar="CHECKPOINT", help="from torch: a checkpoint of a run with the same model")
    parser.add_argument("--run", metavar="NAME", help="from torch: name of the run (default: that of --like)")
    parser.add_argument(
        "--step", type=int, metavar="N", help="from torch: number of committed steps (default: the optimizer's count)"
    )
    parser.add_argument(
        "--optimizer", metavar="NAME", help="from torch: the optimizer, such as adamw (default: the one that fits)"
    )


# ---- export ----


def parse_size(text: str) -> int:
    """Parses a number of bytes such as ``5GB``, ``500MiB`` or ``1000000``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a size such as 5GB or 500MiB")
    return max(1, int(float(found[1]) * _UNITS[found[2].upper()]))


def _export(arguments: argparse.Namespace) -> int:
    _check_empty(arguments.folder)
    try:
        with (
            open_coordinator(arguments) as coordinator,
            pinned_version(
                coordinator, arguments.run, timeout_s=arguments.timeout, version=_version(arguments)
            ) as pinned,
        ):
            dtype: str | None = arguments.dtype
            tensors = {stored.name: _as(stored.meta, dtype) for stored in (*pinned.parameters, *pinned.buffers)}
            _check_room(arguments.folder, total_bytes(tensors))
            with progress_bar("exporting", total_bytes(tensors)) as count:
                paths = _write(arguments, pinned, tensors, _cast(pinned, dtype, count))
    except KeyboardInterrupt:
        print(f"shardwell export: interrupted; nothing was written to {arguments.folder}", file=sys.stderr)
        return INTERRUPTED
    except ShardwellError:  # some are OSErrors, too
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason += " (--dtype bfloat16 halves the size of float32 tensors)"
        print(
            f"shardwell export: cannot write to {arguments.folder}: {reason}; the folder is unchanged", file=sys.stderr
        )
        return 1
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths)} files in {arguments.folder}"
    what = f"{len(tensors)} tensors, {format_size(total_bytes(tensors))}"
    buffers = f", {len(pinned.buffers)} of them buffers" if pinned.buffers else ""
    print(f"run {pinned.run!r} after {pinned.version} steps: {what}{buffers}, in {where}")
    return 0


def _digest(arguments: argparse.Namespace) -> int:
    with (
        open_coordinator(arguments) as coordinator,
        pinned_version(coordinator, arguments.run, timeout_s=arguments.timeout, version=_version(arguments)) as pinned,
    ):
        print(f"{pinned_digest(pinned)}  {pinned.run} version {pinned.version}")
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


def _cast(pinned: PinnedVersion, dtype: str | None, count: Callable[[int], None]) -> Values:
    """Yields names and values to write. Counts the bytes of each value when it is written."""
    for name, value in pinned.values():
        cast = _as(value, dtype)
        del value
        yield name, cast
        count(cast.nbytes)


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


# ---- conversion ----


def _convert(arguments: argparse.Namespace) -> int:
    try:
        if (Path(arguments.source) / METADATA_NAME).is_file():
            _from_torch(arguments)
        else:
            _to_torch(arguments)
    except ShardwellError:  # some are OSErrors, too
        raise
    except OSError as error:
        print(f"shardwell convert-checkpoint: {error}", file=sys.stderr)
        return 1
    return 0


def _to_torch(arguments: argparse.Namespace) -> None:
    given = [name for name in ("like", "run", "step", "optimizer") if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"--{given[0]} is for torch checkpoints, and {arguments.source} has no {METADATA_NAME} file")
    folder = local_path(arguments.destination)
    if folder is None:
        raise UsageError(f"{arguments.destination} is a URL: torch checkpoints are written to a local folder. Name one")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"{folder} is not an empty folder: name a new folder")
    checkpoint = open_checkpoint(arguments.source)
    with progress_bar("converting", checkpoint.manifest.size_bytes) as note:
        checkpoint_to_dcp(checkpoint, folder, note=note)
    print(f"step {checkpoint.step} of run {checkpoint.run!r} is written to {folder}")


def _from_torch(arguments: argparse.Namespace) -> None:
    if arguments.like is None:
        raise UsageError(
            f"{arguments.source} is a torch checkpoint, which does not say how a run cuts the model into units: pass "
            "--like CHECKPOINT, any checkpoint of a run with the same model. If there is none, make one with the "
            "model, the wrapping, the world and the seed of the run that will continue. No training is needed:\n"
            '  session = shardwell.join(run="layout", checkpoint_dir="layouts")\n'
            "  shardwell.auto_wrap(model, session)\n"
            "  optimizer = shardwell.optim.AdamW(model.parameters())\n"
            "  print(session.save_checkpoint(wait=True))  # pass this path to --like"
        )
    like = open_checkpoint(arguments.like)
    if arguments.step is not None and arguments.step < 0:
        raise UsageError(f"--step {arguments.step}: expected at least 0")
    with progress_bar("converting", None) as note:
        url = dcp_to_checkpoint(
            arguments.source,
            arguments.destination,
            like=like,
            run=arguments.run,
            step=arguments.step,
            optimizer=arguments.optimizer,
            note=note,
        )
    checkpoint = open_checkpoint(url)
    print(f"step {checkpoint.step} of run {checkpoint.run!r} is written to {url}")
