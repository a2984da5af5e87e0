"""The ``shardwell-server coordinator`` command."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwell_server.coordinator.coordinator import Coordinator
from shardwell_server.coordinator.leadership import DEFAULT_LEASE_S, EtcdState, lead
from shardwell_server.coordinator.rpcs.servicer import CoordinatorServicer
from shardwell_server.coordinator.servers.shard_client import ShardCalls
from shardwell_server.coordinator.settings import Settings
from shardwell_server.coordinator.storage.database import Database
from shardwell_server.coordinator.storage.durable_state import Storage
from shardwell_server.coordinator.storage.records import TableStore
from shardwell_server.serving import authorization, process, server_options
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.server_options import add_common_options, add_option, parse_port, parse_size
from shardwell_wire.errors import UsageError
from shardwell_wire.host.server_folders import temporary_folder
from shardwell_wire.security.credentials import NO_CREDENTIALS, Credentials
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_EXAMPLES = """\
examples:
    shardwell-server coordinator --listen 0.0.0.0:50051 --advertise node0 --state-dir /var/lib/shardwell
    shardwell-server coordinator --listen 127.0.0.1:0     # a free port, printed in the first line of output
    shardwell-server coordinator --listen 0.0.0.0:50051 --advertise node0 --state etcd://node1:2379/shardwell

Another interface than loopback needs TLS and a token: set SHARDWELL_TLS_CA, SHARDWELL_TLS_CERT, SHARDWELL_TLS_KEY and
SHARDWELL_TOKEN_FILE, or pass --insecure.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the subcommand."""
    parser = subparsers.add_parser(
        "coordinator",
        help="assign ranks and shards, and commit steps",
        description="Assigns logical ranks to trainers and shards to servers, and commits each step. One per cluster "
        "serves. "
        "Prints one line of JSON with its address once it serves.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    defaults = Settings()
    add_option(
        parser,
        "--state-dir",
        "directory for state that survives a restart",
        shown="a temporary directory",
        metavar="DIR",
    )
    add_option(
        parser,
        "--state",
        "instead of --state-dir: an etcd cluster, such as etcd://node1:2379,node2:2379,node3:2379/shardwell. One of "
        "the coordinators with the same value leads, and the others are stand-bys",
        shown="none",
        metavar="URL",
    )
    add_option(
        parser,
        "--etcd-lease-s",
        "seconds after which a stand-by takes over from a coordinator whose host is silent",
        DEFAULT_LEASE_S,
        type=int,
        metavar="S",
    )
    path: dict[str, Any] = {"shown": "none", "metavar": "PATH"}
    add_option(parser, "--etcd-ca", "PEM file with the authorities of etcd's certificates, for TLS to etcd", **path)
    add_option(parser, "--etcd-cert", "PEM file with the certificate of this process for etcd", **path)
    add_option(parser, "--etcd-key", "PEM file with its private key, readable by this user only", **path)
    add_option(
        parser,
        "--lease-s",
        "seconds of silence after which a trainer or shard server is considered lost",
        defaults.lease_s,
        type=float,
        metavar="S",
    )
    add_option(
        parser,
        "--min-servers",
        "live shard servers required before units are placed",
        defaults.min_servers,
        type=int,
        metavar="N",
    )
    add_option(
        parser,
        "--min-shard-bytes",
        "smallest shard into which a unit is cut",
        f"{defaults.min_shard_bytes >> 20}MiB",
        type=parse_size,
        metavar="SIZE",
    )
    add_option(
        parser,
        "--restart-wait-s",
        "seconds that a run waits for the restart of a server that has left its only copies of shards, before it goes "
        "back to its last checkpoint; without a checkpoint, it waits until the server is started",
        defaults.restart_wait_s,
        type=float,
        metavar="S",
    )
    add_common_options(parser, listen="127.0.0.1:50051")
    add_option(
        parser,
        "--dashboard-port",
        "port of a web page about runs and servers, with the TLS and the tokens of the rpcs; 0: a free port",
        shown="none, no page is served",
        type=parse_port,
        metavar="PORT",
    )
    add_option(parser, "--dashboard-host", "host of --dashboard-port to listen on", "127.0.0.1", metavar="HOST")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    endpoint, credentials = server_options.endpoint_of(arguments), server_options.credentials_of(arguments)
    insecure = server_options.insecurity(endpoint.host, credentials, arguments)
    if endpoint.dashboard_bind:
        host, option = arguments.dashboard_host, "--dashboard-host"
        insecure = insecure or server_options.insecurity(host, credentials, arguments, option=option)
    settings = Settings(
        lease_s=arguments.lease_s,
        min_servers=arguments.min_servers,
        min_shard_bytes=arguments.min_shard_bytes,
        checkpoint_roots=server_options.roots_of(arguments, credentials),
        restart_wait_s=arguments.restart_wait_s,
        insecure=insecure,
    )
    authorization.start(arguments.audit_log)
    if arguments.state and arguments.state_dir:
        raise UsageError("--state and --state-dir (SHARDWELL_STATE and SHARDWELL_STATE_DIR) exclude each other")
    keeps_state = bool(arguments.state or arguments.state_dir)
    with nullcontext(arguments.state_dir) if keeps_state else temporary_folder() as path:
        state = EtcdState.from_options(arguments.state, vars(arguments)) if arguments.state else Path(path)
        process.run(
            coordinate(settings, state, endpoint, keeps_state=keeps_state, credentials=credentials),
            log_level=arguments.log_level,
            log_format=arguments.log_format,
            name="coordinator",
        )
    return 0


async def until_lost(storage: Storage) -> None:
    """Raises UnavailableError when this coordinator can change the stored state no longer."""
    await storage.lost.wait()
    assert storage.why_lost is not None
    raise storage.why_lost


async def coordinate(
    settings: Settings,
    state: Path | EtcdState,
    endpoint: process.Endpoint,
    *,
    keeps_state: bool,
    credentials: Credentials = NO_CREDENTIALS,
) -> None:
    """Serves ``CoordinatorService`` until the process is stopped.

    Args:
        state: State directory, or the state that several coordinators share. The coordinator serves when it leads.
        endpoint: Where to listen, and how to stop.
        keeps_state: False if ``state`` is a temporary directory.
        credentials: The key with which tokens are verified and issued, and the TLS of the server.
    """
    server_options.warn(" and ".join(filter(None, (endpoint.bind, endpoint.dashboard_bind))), settings.insecure)
    if not keeps_state:
        logger.warning("no --state-dir: runs are stored in %s and deleted when the coordinator stops", state)
    if isinstance(state, EtcdState):
        endpoint = replace(endpoint, stop=endpoint.stop or process.stop_event(endpoint))
        assert endpoint.stop is not None
        store: TableStore | None = await lead(state, endpoint, endpoint.stop, credentials)
        if store is None:
            return
    else:
        store = Database(state)
    storage, calls = Storage(store), ShardCalls(credentials.of_role(Role.COORDINATOR))
    try:
        coordinator = await Coordinator.load(settings, storage, calls)

        @asynccontextmanager
        async def background(_: str) -> AsyncIterator[asyncio.Future[None]]:
            async with coordinator.running():
                yield asyncio.ensure_future(until_lost(storage))

        service, call_server = (
            coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"],
            CallServer(endpoint.host),
        )
        await process.serve(
            service,
            CoordinatorServicer(coordinator, credentials.key, call_server),
            endpoint,
            background,
            credentials=credentials,
            calls=call_server,
            end_standing=coordinator.state.stop,
            read_metrics=coordinator.metrics,
        )
    finally:
        await calls.close()
        storage.close()
