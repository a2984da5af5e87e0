"""Commands that move shards between servers during training, and compare their copies."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from shardwell.command.inspect_commands import add_coordinator_arguments, open_coordinator
from shardwell.sizes import format_size
from shardwell_wire.v1 import coordinator_pb2

_POLL_S = 0.5
"""Seconds between two questions about the progress."""

_BACKUPS_DESCRIPTION = """\
Sets how many other servers keep a copy of every shard of a run, on another host where there is one. A copy takes as
much memory as its primary. Copies are built during training, a few per step. `shardwell units RUN` shows their states,
and the event `backups_in_sync` says when all are complete.
"""
_DRAIN_DESCRIPTION = """\
Moves all shards of a server to other servers, while runs train. The server gets no new shards. When it has none left,
its process can be stopped. Without --wait, the command returns at once; run it again to see what is left.
"""
_REBALANCE_DESCRIPTION = """\
Moves shards of a run until they are spread evenly over all live servers, such as a new one. Training goes on. Whole
shards move, a few per step. Without --wait, the command returns at once.
"""

Call = Callable[[str, Any], Any]


def add_parsers(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``shardwell backups``, ``drain`` and ``rebalance``."""
    backups = _parser(
        subparsers,
        "backups",
        "set how many servers keep a copy of every shard of a run",
        _BACKUPS_DESCRIPTION,
        "shardwell backups gpt 1                           the loss of one server loses nothing\n"
        "  shardwell backups gpt 0                           release the copies",
    )
    backups.add_argument("run", metavar="RUN", help="name of the run")
    backups.add_argument("count", metavar="N", type=int, help="copies of every shard; 0: none")
    backups.set_defaults(handler=_backups)
    drain = _parser(
        subparsers,
        "drain",
        "move all shards of a server to other servers",
        _DRAIN_DESCRIPTION,
        "shardwell drain shard-2 --wait                    return when the server has no shards left\n"
        "  shardwell drain shard-2 --cancel                  let the server have shards again",
    )
    drain.add_argument("server", metavar="SERVER", help="id of the shard server, as in shardwell servers")
    mode = drain.add_mutually_exclusive_group()
    mode.add_argument("--wait", action="store_true", help="show the progress, and return when no shards are left")
    mode.add_argument("--cancel", action="store_true", help="stop draining: the server may get shards again")
    drain.set_defaults(handler=_drain)
    rebalance = _parser(
        subparsers,
        "rebalance",
        "spread the shards of a run evenly over the servers",
        _REBALANCE_DESCRIPTION,
        "shardwell rebalance gpt --wait",
    )
    rebalance.add_argument("run", metavar="RUN", help="name of the run")
    rebalance.add_argument("--wait", action="store_true", help="show the progress, and return when it is done")
    rebalance.set_defaults(handler=_rebalance)


def _parser(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    help_line: str,
    description: str,
    examples: str,
) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        name,
        help=help_line,
        description=description,
        epilog=f"examples:\n  {examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_coordinator_arguments(parser)
    return parser


def _calling(arguments: argparse.Namespace, action: Callable[[Call], int]) -> int:
    """Calls ``action`` with a function that calls an rpc of the coordinator."""
    with open_coordinator(arguments) as coordinator:
        return action(lambda rpc, request: coordinator.call(rpc, request, timeout_s=arguments.timeout))


def _backups(arguments: argparse.Namespace) -> int:
    def action(call: Call) -> int:
        if not 0 <= arguments.count < 1 << 32:
            print(f"shardwell backups: {arguments.count}: expected at least 0", file=sys.stderr)
            return 1
        call("SetBackups", coordinator_pb2.SetBackupsRequest(run=arguments.run, backups=arguments.count))
        print(f"run {arguments.run!r}: {arguments.count} backups of every shard; shardwell units shows their state")
        return 0

    return _calling(arguments, action)


def _drain(arguments: argparse.Namespace) -> int:
    def action(call: Call) -> int:
        request = coordinator_pb2.DrainServerRequest(server_id=arguments.server, cancel=arguments.cancel)
        response = call("DrainServer", request)
        if arguments.cancel:
            print(f"server {arguments.server!r} is not drained: it may get shards again")
            return 0
        with _status() as status:
            while arguments.wait and response.shard_count:
                _show(status, [_left(response), *response.waiting_for])
                time.sleep(_POLL_S)
                response = call("DrainServer", request)
        print(f"server {arguments.server!r}: {_left(response) if response.shard_count else 'no shards left'}")
        for line in response.waiting_for:
            print(f"  {line}")
        return 0

    return _calling(arguments, action)


def _rebalance(arguments: argparse.Namespace) -> int:
    def action(call: Call) -> int:
        response = call("RebalanceRun", coordinator_pb2.RebalanceRunRequest(run=arguments.run))
        with _status() as status:
            while arguments.wait and response.rebalancing:
                _show(status, [_left(response)])
                time.sleep(_POLL_S)
                report = coordinator_pb2.RebalanceRunRequest(run=arguments.run, report_only=True)
                response = call("RebalanceRun", report)
        print(f"run {arguments.run!r}: {_left(response) if response.rebalancing else 'no shards to move'}")
        return 0

    return _calling(arguments, action)


def verify_run(arguments: argparse.Namespace) -> int:
    """Compares primaries and backups of a run. Returns 1 if they differ.

    Args:
        arguments: ``target`` (the run), ``address``, ``token_file`` and ``timeout`` in seconds.
    """

    def action(call: Call) -> int:
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

    return _calling(arguments, action)


def _left(response: Any) -> str:
    return f"{response.shard_count} shards ({format_size(response.size_bytes)}) are being moved"


def _status() -> Progress:
    """Returns a line with the progress, which is shown on a terminal only."""
    console = Console(stderr=True, highlight=False)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def _show(status: Progress, lines: list[str]) -> None:
    text = "; ".join(lines)
    if status.task_ids:
        status.update(status.task_ids[0], description=text)
    else:
        status.add_task(text)
