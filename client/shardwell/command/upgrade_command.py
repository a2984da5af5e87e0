"""``shardwell upgrade``: restarts a cluster's shard servers one by one, and then its coordinator, during training."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import time
from collections.abc import Callable

from shardwell.command.arguments import Subparsers, add_command, add_coordinator_arguments, open_coordinator
from shardwell.tables import format_seconds
from shardwell.transport.service_client import CoordinatorClient
from shardwell_wire.errors import (
    ConflictError,
    CorruptDataError,
    DeadlineError,
    NotFoundError,
    ShardwellError,
    UnavailableError,
)
from shardwell_wire.model.names import nearest
from shardwell_wire.v1 import coordinator_pb2

_POLL_S, _ANSWER_S = 0.5, 10.0
"""Seconds between two questions, and for each answer."""
_BACKUPS = re.compile(r"\d+ backups? (is|are)")
"""How a problem begins that counts backups which are missing."""
_DESCRIPTION = """\
Restarts the shard servers of a cluster one by one, and then the coordinator, while runs train. Install the new version
on all hosts before. Each server is restarted by a command of yours, which must return; its supervisor (systemd, docker,
Kubernetes) may do the rest. Then `shardwell upgrade` waits until the new process has registered, its shards are
available, every backup is in sync, and equals its primary as in `shardwell verify RUN`. It stops at the first failure,
and says what is left to do. A cluster that is degraded is not upgraded.

In the commands, {server}, {host} and {port} stand for the id of the server, and for the address at which it is known. A
server that has been restarted along with a former one, such as another one of its host, is not restarted again.
"""
_EPILOG = """\
examples:
  shardwell upgrade --restart-command 'ssh {host} systemctl kill -s INT "shardwell-shard@*"' \\
      --coordinator-command 'ssh {host} systemctl restart shardwell-coordinator'
  shardwell upgrade shard-2 shard-3 --restart-command 'ssh {host} ./restart.sh {server}'    these only

A server that is stopped with SIGINT keeps its shards for its next process. SIGTERM moves them to other servers before;
`shardwell rebalance RUN` then spreads them again.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Adds ``shardwell upgrade``."""
    parser = add_command(
        subparsers,
        "upgrade",
        "restart the servers of a cluster one by one during training",
        _upgrade,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "servers", metavar="SERVER", nargs="*", help="ids of the shard servers to restart (default: all but relays)"
    )
    parser.add_argument(
        "--restart-command", required=True, metavar="COMMAND", help="line for the shell that restarts a shard server"
    )
    parser.add_argument(
        "--coordinator-command",
        metavar="COMMAND",
        help="line for the shell that restarts the coordinator (default: the coordinator is not restarted)",
    )
    parser.add_argument("--force", action="store_true", help="upgrade a degraded cluster, if it gets no worse")
    add_coordinator_arguments(parser, timeout_s=600.0, what="each server after its restart")


def _upgrade(arguments: argparse.Namespace) -> int:
    with open_coordinator(arguments) as coordinator:
        upgrade = _Upgrade(coordinator, arguments)
        left = [*arguments.servers] or upgrade.servers
        try:
            while left:
                upgrade.restart_server(left[0])
                del left[0]
            upgrade.restart_coordinator()
        except ShardwellError as error:
            rest = (
                f"The coordinator and these servers are not done: when `shardwell status` says healthy again, continue "
                f"with `shardwell upgrade {' '.join(left)}` and the same options"
                if left
                else "All shard servers are done: start the coordinator by hand"
            )
            raise type(error)(f"{error}. {rest}") from error
        upgrade.end()
    return 0


class _Upgrade:
    """The servers of a cluster, before and while they are restarted.

    Raises:
        ConflictError: Something is wrong with the cluster already.
        NotFoundError: A named server does not exist.
    """

    def __init__(self, coordinator: CoordinatorClient, arguments: argparse.Namespace) -> None:
        self._coordinator, self._arguments = coordinator, arguments
        self._before = self._describe()
        self._server_ids = {server.server_id: server for server in self._before.servers}
        self.servers = [
            server.server_id
            for server in self._before.servers
            if not server.owns_nothing and server.state != coordinator_pb2.SERVER_STATE_LEFT
        ]
        for name in arguments.servers:
            if name not in self._server_ids:
                raise NotFoundError(f"there is no server {name!r}, only {nearest(name, self._server_ids)}", server=name)
        if (problems := _problems(self._before)) and not arguments.force:
            raise ConflictError(
                f"the cluster is degraded: {'; '.join(problems)}. Repair this first, because a restart could make it "
                "worse; --force restarts the servers nevertheless"
            )

    def restart_server(self, name: str) -> None:
        """Restarts a server; returns when nothing is worse than before."""
        before, started_s = self._server_ids[name], time.monotonic()

        def missing(now: coordinator_pb2.DescribeClusterResponse) -> str:
            server = _server(now, name)
            if server.epoch == before.epoch:
                return f"no new process of server {name!r} has registered: see its supervisor and log"
            return "" if server.live else f"server {name!r} at {server.address} is not live"

        if _server(self._describe(), name).epoch == before.epoch:
            print(f"{name}: restarting", flush=True)
            self._run(self._arguments.restart_command, name, before.address)
        else:
            print(f"{name}: has been restarted with another server", flush=True)
        now = self._wait(missing)
        for run in now.runs:
            if run.summary.config.backups and run.summary.committed_step:
                self._verify(run.summary.run)
        versions = dict.fromkeys(filter(None, (before.shardwell_version, _server(now, name).shardwell_version)))
        took = format_seconds(time.monotonic() - started_s)
        print(f"{name}: version {' -> '.join(versions)}, in sync after {took}", flush=True)

    def restart_coordinator(self) -> None:
        """Restarts the coordinator; returns when all servers have found it."""
        if not self._arguments.coordinator_command:
            print("coordinator: not restarted, because there is no --coordinator-command: restart it now")
            return
        print("coordinator: restarting", flush=True)
        before = self._describe()
        self._run(self._arguments.coordinator_command, "coordinator", self._coordinator.present_address)
        now = self._wait(lambda now: "" if now.term > before.term else "no new coordinator has started: see its log")
        versions = dict.fromkeys((before.shardwell_version, now.shardwell_version))
        print(f"coordinator: version {' -> '.join(versions)}, term {now.term}", flush=True)

    def end(self) -> None:
        """Prints what the operator may do next."""
        now = self._describe()
        emptied = [
            name
            for name, each in self._server_ids.items()
            if each.primary_count and not _server(now, name).primary_count
        ]
        if emptied:
            print(f"the shards of {', '.join(emptied)} have moved: `shardwell rebalance RUN` spreads them again")

    def _describe(self) -> coordinator_pb2.DescribeClusterResponse:
        request, timeout_s = coordinator_pb2.DescribeClusterRequest(), min(_ANSWER_S, self._arguments.timeout)
        response: coordinator_pb2.DescribeClusterResponse = self._coordinator.call(
            "DescribeCluster", request, timeout_s=timeout_s
        )
        return response

    def _run(self, command: str, server: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        for name, value in (("server", server), ("host", host.strip("[]")), ("port", port)):
            command = command.replace(f"{{{name}}}", shlex.quote(value))
        code = subprocess.run(command, shell=True, check=False).returncode
        if code:
            raise ConflictError(f"the command for {server} ended with exit code {code}: {command}", server=server)

    def _wait(
        self, missing: Callable[[coordinator_pb2.DescribeClusterResponse], str]
    ) -> coordinator_pb2.DescribeClusterResponse:
        """Waits until nothing is missing and nothing is worse than before; returns the state of the cluster."""
        deadline = time.monotonic() + self._arguments.timeout
        while True:
            try:
                now = self._describe()
                self._check_runs(now)
                waits_for = missing(now) or "; ".join(new_problems(now, self._before))
            except (UnavailableError, DeadlineError) as error:
                waits_for = str(error)
            if not waits_for:
                return now
            if time.monotonic() > deadline:
                raise DeadlineError(f"after {self._arguments.timeout:g} s: {waits_for}")
            time.sleep(_POLL_S)

    def _check_runs(self, now: coordinator_pb2.DescribeClusterResponse) -> None:
        """Raises ConflictError if a run went back to a checkpoint, because a restart has lost shards."""
        known = {run.summary.run_id: run.checkpoints.rollback_count for run in self._before.runs}
        for run in now.runs:
            if run.checkpoints.rollback_count > known.get(run.summary.run_id, run.checkpoints.rollback_count):
                raise ConflictError(
                    f"run {run.summary.run!r} went back to its checkpoint of step {run.summary.committed_step}: a "
                    "server did not take up its shards. It needs --id and shared memory for this: docs/durability.md",
                    run=run.summary.run,
                )

    def _verify(self, run: str) -> None:
        request = coordinator_pb2.VerifyRunRequest(run=run)
        response = self._coordinator.call(
            "VerifyRun", request, timeout_s=self._arguments.timeout, retry_for_s=self._arguments.timeout
        )
        if response.differences:
            raise CorruptDataError(f"backups of run {run!r} differ from their primaries: {response.differences[0]}")


def new_problems(
    now: coordinator_pb2.DescribeClusterResponse, before: coordinator_pb2.DescribeClusterResponse
) -> list[str]:
    """Returns the problems of a cluster that it did not have before. Numbers, such as times, may differ."""
    known = {_without_numbers(line) for line in _problems(before)}
    missing = {run.summary.run_id: run.summary.missing_backup_count for run in before.runs}
    return [
        *(line for line in now.problems if _without_numbers(line) not in known),
        *(
            line
            for run in now.runs
            for line in run.problems
            if _without_numbers(line) not in known
            or (_BACKUPS.match(line) and run.summary.missing_backup_count > missing.get(run.summary.run_id, 0))
        ),
    ]


def _without_numbers(line: str) -> str:
    """Returns a problem without its numbers, except those in quoted names."""
    return re.sub(r"('[^']*')|\d[\d.]*", lambda found: found[1] or "N", _BACKUPS.sub("backups are", line))


def _problems(response: coordinator_pb2.DescribeClusterResponse) -> list[str]:
    """Returns what is wrong with a cluster, one line each."""
    return [*response.problems, *(line for run in response.runs for line in run.problems)]


def _server(response: coordinator_pb2.DescribeClusterResponse, name: str) -> coordinator_pb2.ServerSummary:
    """Returns a server. One that is not registered has epoch 0."""
    return next((each for each in response.servers if each.server_id == name), coordinator_pb2.ServerSummary())
