"""``shardwell-server discard``: deletes the shards that a stopped shard server left on this host."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from shardwell_server.shard.memory.saved_files import SavedFiles
from shardwell_wire.errors import ConflictError, NotFoundError
from shardwell_wire.host.server_folders import DEFAULT_DIRECTORY, FolderOwner, folders_of, size_of, take_folder

_EXAMPLES = """\
example:
    shardwell-server discard --coordinator node0:50051 --id shard-0 --state-dir /var/lib/shardwell

Give the options with which the server was started. Runs with shards on the server wait for it until they go back to a
checkpoint or are deleted. `shardwell delete-run NAME` deletes one run on all servers instead.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``discard`` subcommand."""
    parser = subparsers.add_parser(
        "discard",
        help="delete the shards that a stopped shard server left",
        description="Deletes what a stopped shard server left for its next process, in shared memory and on disk.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env = os.environ.get
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        default=env("SHARDWELL_COORDINATOR"),
        required="SHARDWELL_COORDINATOR" not in os.environ,
        help="address of the coordinator, as the server was given it (SHARDWELL_COORDINATOR)",
    )
    parser.add_argument(
        "--id",
        metavar="NAME",
        default=env("SHARDWELL_ID"),
        required="SHARDWELL_ID" not in os.environ,
        help="name of the server; with --processes, that of one process, such as NAME-0 (SHARDWELL_ID)",
    )
    parser.add_argument(
        "--shm-dir",
        metavar="DIR",
        type=Path,
        default=env("SHARDWELL_SHM_DIR", str(DEFAULT_DIRECTORY)),
        help="memory file system of the server (SHARDWELL_SHM_DIR, default %(default)s)",
    )
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        default=env("SHARDWELL_STATE_DIR", ""),
        help="directory in which a stop saved shards (SHARDWELL_STATE_DIR, default: none)",
    )
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server discard``; prints what was deleted."""
    owner = FolderOwner(server_id=arguments.id, coordinator=arguments.coordinator)
    saved = SavedFiles(Path(arguments.state_dir), owner) if arguments.state_dir else None
    found = folders_of(arguments.shm_dir, owner)
    if saved is not None and (source := saved.find()) is not None:
        found.append(source)
    if not found:
        places = " and ".join(str(place) for place in (arguments.shm_dir, arguments.state_dir) if str(place))
        raise NotFoundError(
            f"server {arguments.id!r} of the coordinator at {arguments.coordinator} left nothing in {places}: give the "
            "options with which the server was started"
        )
    sizes = {path: size_of(path) for path in found}
    folder = take_folder(arguments.shm_dir, owner)
    if folder is not None:
        folder.remove()
    if folders_of(arguments.shm_dir, owner):
        raise ConflictError(f"server {arguments.id!r} runs on this host: stop it first", server=arguments.id)
    if saved is not None:
        saved.remove()
    for path, size_bytes in sizes.items():
        print(f"deleted {path} with {size_bytes} bytes")
    return 0
