"""``shardwell-server coordinator``: starts a coordinator."""

from __future__ import annotations

import argparse
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.servicer import CoordinatorServicer
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.shard_client import GrpcShardCalls
from shardwell_server.coordinator.storage import Storage
from shardwell_server.process import Endpoint, run, serve
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

_EXAMPLES = """\
examples:
  shardwell-server coordinator --listen 0.0.0.0:50051 --advertise node0 --state-dir /var/lib/shardwell
  shardwell-server coordinator --listen 127.0.0.1:0        # a free port; the first line of output names it

Options that are not given are taken from SHARDWELL_LISTEN, SHARDWELL_ADVERTISE, SHARDWELL_STATE_DIR,
SHARDWELL_LEASE_S, SHARDWELL_MIN_SERVERS, SHARDWELL_MIN_SHARD_BYTES and SHARDWELL_LOG_LEVEL.
"""

_LOG_LEVELS = ("debug", "info", "warning", "error")

_SIZE_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``coordinator`` subcommand."""
    parser = subparsers.add_parser(
        "coordinator",
        help="start a coordinator: it assigns ranks and shards and commits steps",
        description="Starts a coordinator: it assigns logical ranks to trainers and shards to servers, and "
        "commits each step. One per cluster. Prints a line of JSON with its address once it serves.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--listen", metavar="HOST:PORT", help="where to listen; port 0 takes a free one (default: 127.0.0.1:50051)")
    add("--advertise", metavar="HOST", help="host that others shall use (default: the one listened on)")
    add(
        "--state-dir",
        metavar="DIR",
        help="where runs survive a restart of the coordinator (default: a temporary directory, lost at exit)",
    )
    add("--lease-s", metavar="S", help="trainers and servers silent for longer are taken to be lost (default: 10)")
    add("--min-servers", metavar="N", help="shard servers to wait for before a unit is placed (default: 1)")
    add("--min-shard-bytes", metavar="SIZE", help="units are not cut smaller than this, such as 64KiB (the default)")
    add("--log-level", metavar="LEVEL", help="debug, info, warning or error (default: info)")
    add("--exit-with-parent", action="store_true", help="stop when standard input closes")
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server coordinator`` until it is told to stop."""
    endpoint = Endpoint(
        bind=_option(arguments, "listen", str, "127.0.0.1:50051"),
        advertise=_option(arguments, "advertise", str, ""),
        exit_with_parent=arguments.exit_with_parent,
    )
    settings = Settings(
        lease_s=_option(arguments, "lease_s", float, 10.0),
        min_servers=_option(arguments, "min_servers", int, 1),
        min_shard_bytes=_option(arguments, "min_shard_bytes", parse_size, 64 << 10),
    )
    state_dir = _option(arguments, "state_dir", str, "")
    log_level = _option(arguments, "log_level", _log_level, "info")
    with nullcontext(state_dir) if state_dir else tempfile.TemporaryDirectory(prefix="shardwell-") as directory:
        run(coordinate(settings, Path(directory), endpoint, keeps_state=bool(state_dir)), log_level=log_level)
    return 0


async def coordinate(settings: Settings, directory: Path, endpoint: Endpoint, *, keeps_state: bool) -> None:
    """Serves ``CoordinatorService`` until the process is told to stop."""
    if not keeps_state:
        logger.warning("no --state-dir: runs are kept in %s and lost when the coordinator stops", directory)
    storage, calls = Storage(directory), GrpcShardCalls()
    try:
        coordinator = await Coordinator.load(settings, storage, calls)

        @asynccontextmanager
        async def background(_: str) -> AsyncIterator[None]:
            async with coordinator.running():
                yield

        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        await serve(service, CoordinatorServicer(coordinator), endpoint, background)
    finally:
        await calls.close()
        storage.close()


def _option(arguments: argparse.Namespace, name: str, read: Callable[[str], Value], default: Value) -> Value:
    """An option from the command line, else from the environment, else the default."""
    given = getattr(arguments, name)
    text, source = (given, "--" + name.replace("_", "-")) if given else (None, f"SHARDWELL_{name.upper()}")
    text = text or os.environ.get(source, "")
    if not text:
        return default
    try:
        return read(text)
    except ValueError as error:
        raise ValueError(f"{source}={text!r}: {error}") from None


def parse_size(text: str) -> int:
    """Bytes from text such as ``65536``, ``64KiB`` or ``1.5 GB``."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].upper() not in _SIZE_UNITS:
        raise ValueError("expected a size such as 65536, 64KiB or 1GB")
    return int(float(match[1]) * _SIZE_UNITS[match[2].upper()])


def _log_level(text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise ValueError(f"expected one of {', '.join(_LOG_LEVELS)}")
    return text.lower()
