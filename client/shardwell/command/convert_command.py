"""``shardwell convert-checkpoint``: converts checkpoints to ``torch.distributed.checkpoint`` and back."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shardwell.weights.checkpoint_conversion import NoteBytes, checkpoint_to_dcp, dcp_to_checkpoint
from shardwell.weights.checkpoint_reader import open_checkpoint
from shardwell.weights.dcp import METADATA_NAME
from shardwell_wire.checkpoints.opening import local_path
from shardwell_wire.errors import UsageError

_DESCRIPTION = """\
Converts a checkpoint of a run, with optimizer state, to a torch.distributed.checkpoint, or the other way round.

The torch side has the state dict of FSDP2: {"model": model_state, "optim": optimizer_state} from
torch.distributed.checkpoint.state_dict.get_state_dict. Names of parameters are those of the model, which the run has
with `auto_wrap`.

A torch checkpoint does not say how a run cuts the model into units. --like names any checkpoint of a run with the same
model, such as one that session.save_checkpoint(wait=True) has saved before the first step. Units, world and seed are
taken from it. Tracked objects, such as LR schedulers, and moving averages are not converted.
"""
_EPILOG = """\
examples:
  shardwell convert-checkpoint checkpoints/gpt/step-000000042-6fd1c0a2 dcp/
                                                    from a run to torch.distributed.checkpoint
  shardwell convert-checkpoint dcp/ checkpoints/ --run gpt2 --like checkpoints/gpt/step-000000000-0a12bc7f
                                                    back; then join(run="gpt2", resume="latest", ...)
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], help_line: str) -> None:
    """Adds ``shardwell convert-checkpoint``."""
    parser = subparsers.add_parser(
        "convert-checkpoint",
        help=help_line,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
    parser.set_defaults(handler=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    try:
        if (Path(arguments.source) / METADATA_NAME).is_file():
            _from_torch(arguments)
        else:
            _to_torch(arguments)
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
    with _progress(checkpoint.manifest.size_bytes) as note:
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
    with _progress(None) as note:
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


@contextmanager
def _progress(total_bytes: int | None) -> Iterator[NoteBytes]:
    console = Console(stderr=True, highlight=False)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("converting", total=total_bytes)
        yield lambda size: progress.advance(task, size)
