"""The option ``--checkpoint-root`` of the coordinator and the shard servers."""

from __future__ import annotations

import argparse
import os

from shardwell_wire.checkpoints.opening import ROOT_OPTION, ROOT_VARIABLE, CheckpointRoots
from shardwell_wire.credentials import Credentials


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--checkpoint-root``."""
    parser.add_argument(
        ROOT_OPTION,
        metavar="DIR[,DIR...]",
        default=os.environ.get(ROOT_VARIABLE, ""),
        help="folders or URLs below which trainers may name folders of checkpoints, such as /checkpoints or "
        f"s3://bucket/folder; any: all that this process can open ({ROOT_VARIABLE}, default: none with --token-file, "
        "any without)",
    )


def from_arguments(arguments: argparse.Namespace, credentials: Credentials) -> CheckpointRoots:
    """Returns the folders that may be opened. Raises ValueError if the option is invalid."""
    return CheckpointRoots.from_option(arguments.checkpoint_root, is_protected=credentials.key is not None)
