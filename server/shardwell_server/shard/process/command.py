"""The commands ``shardwell-server shard``, and ``discard``, which deletes what a stopped shard server left."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch

from shardwell_server.serving import authorization, process, server_options
from shardwell_server.serving.call_server import CallServer
from shardwell_server.serving.server_options import add_common_options, add_option, add_switch, parse_size
from shardwell_server.shard.memory.budget import default_budget_bytes
from shardwell_server.shard.memory.mapped_memory import SharedMemory
from shardwell_server.shard.memory.saved_files import SavedFiles
from shardwell_server.shard.process.process_group import STOP_S, ProcessGroup, member_settings
from shardwell_server.shard.process.registration import Registration, RelayOffer
from shardwell_server.shard.requests.inspection import ServerProcess, server_metrics
from shardwell_server.shard.requests.peers import GrpcPeers, Owners
from shardwell_server.shard.requests.relay import Relay
from shardwell_server.shard.servicer import ShardServicer, offered_transports
from shardwell_server.shard.state.shard_store import ShardStore
from shardwell_server.shard.state.taking_up import recorded_files
from shardwell_wire import fault_points
from shardwell_wire.errors import ConflictError, NotFoundError
from shardwell_wire.host.server_folders import (
    DEFAULT_DIRECTORY,
    FolderOwner,
    folders_of,
    own_identity,
    parent_identity,
    remove_remains,
    size_of,
    take_folder,
)
from shardwell_wire.security.secret_files import inherited_pipe
from shardwell_wire.security.tokens import Role
from shardwell_wire.v1 import shard_pb2

logger = logging.getLogger(__name__)

_LONGEST_DRAIN_S = 86400.0
_REMAINS_EVERY_S = 1800.0

_SHARD_EXAMPLES = """\
examples:
    shardwell-server shard --coordinator localhost:50051
    shardwell-server shard --coordinator coordinator:50051 --listen 0.0.0.0:50052 --memory-budget 12GiB
    shardwell-server shard --coordinator coordinator:50051 --listen 0.0.0.0:50052 --processes 4

Another interface than loopback needs TLS and a token: set SHARDWELL_TLS_CA, SHARDWELL_TLS_CERT, SHARDWELL_TLS_KEY and
SHARDWELL_TOKEN_FILE, or pass --insecure.

The throughput of one process is limited by its Python interpreter, so run several processes per host. On a host
dedicated to shards, raise --processes until the network is saturated, up to one process per core. The processes
divide --memory-budget, are called NAME-0, NAME-1 and so on, and listen on consecutive ports (with port 0: on free
ports). Each prints a line of JSON when it is ready. One that fails is started again with its name and port, and takes
up its shards; the others go on. The command fails if one cannot be started.

SIGTERM drains the server: its shards move to other servers with enough memory, while training goes on. Then it exits
with code 0. A second SIGTERM, SIGINT, or the end of --drain-s stops it with the shards that are left.

However a server with --id ends, the shards that are left stay in shared memory, and its next process takes them up.
With --state-dir, a stop also writes them to disk, from where they are taken up if shared memory is lost, as by a reboot
or `docker compose down`. `shardwell-server discard` deletes the shards of a stopped server, `shardwell delete-run`
those of a run. A supervisor must wait longer than --drain-s, and the time of the writing, before it sends SIGKILL.
"""

_RELAY_EXAMPLES = """\
example, on a host with several trainers and no shard server:
    shardwell-server relay --coordinator coordinator:50051

The trainers find it by themselves if they use host_cache_bytes, HYBRID_SHARD or gradient_reduction="hierarchical". It
may be stopped and started at any time: meanwhile they talk to the shard servers.
"""

_DISCARD_EXAMPLES = """\
example:
    shardwell-server discard --coordinator node0:50051 --id shard-0 --state-dir /var/lib/shardwell

Give the options with which the server was started. Runs with shards on the server wait for it until they go back to a
checkpoint or are deleted. `shardwell delete-run NAME` deletes one run on all servers instead.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``shard`` subcommand."""
    parser = subparsers.add_parser(
        "shard",
        help="store shards of models and serve them",
        description="Stores shards of models with their optimizer state, and serves ShardService.",
        epilog=_SHARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_process_options(parser, "server", "shards")
    _add_memory_options(parser)
    add_option(parser, "--processes", "number of shard servers to run, see below", 1, type=int, metavar="N")
    add_option(
        parser,
        "--drain-s",
        "longest time after SIGTERM in which the shards of the server move to other servers, before it exits; 0: they "
        "do not move",
        20,
        type=float,
        metavar="S",
    )
    parser.add_argument("--supervisor", default=None, help=argparse.SUPPRESS)
    parser.set_defaults(handler=_run, owns_nothing=False)


def add_relay_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``relay`` subcommand."""
    parser = subparsers.add_parser(
        "relay",
        help="relay weights and gradients for the trainers of this host",
        description="Relays for the trainers of this host: fetches each weight once for all of them, and adds their "
        "gradients before they cross the network. A shard server does the same for the trainers of its host.",
        epilog=_RELAY_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_process_options(parser, "relay", "weights and gradients")
    add_option(
        parser,
        "--shm-dir",
        "memory file system that this process shares with the trainers",
        DEFAULT_DIRECTORY,
        type=_directory,
        metavar="DIR",
    )
    parser.set_defaults(
        handler=_run,
        owns_nothing=True,
        processes=1,
        servers_on_host=1,
        own_memory_limit=False,
        drain_s=0.0,
        state_dir="",
        supervisor=None,
    )


def _add_process_options(parser: argparse.ArgumentParser, role: str, content: str) -> None:
    """Adds what shard servers and relays have in common. ``content``: what its memory is for."""
    add_option(
        parser,
        "--coordinator",
        "address of the coordinator, or of all, with commas",
        required=True,
        metavar="HOST:PORT",
    )
    add_common_options(parser, listen="127.0.0.1:0")
    what = f"name of the {role}, stable across restarts"
    add_option(parser, "--id", what, shown="host and process id", metavar="NAME")
    add_option(
        parser,
        "--memory-budget",
        f"memory for {content}, such as 12GiB",
        None,
        shown="80%% of the memory that the process may use",
        type=parse_size,
        metavar="SIZE",
    )
    add_option(parser, "--threads", "torch threads per tensor operation", 1, type=int, metavar="N")
    add_option(
        parser,
        "--host",
        "name of the host whose trainers this server relays for, as the trainers give it to join",
        shown="this machine's name",
        metavar="NAME",
    )


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    add_option(
        parser,
        "--servers-on-host",
        "number of shard servers that are started separately on this host; divides the default budget",
        1,
        type=int,
        metavar="N",
    )
    add_switch(
        parser,
        "--own-memory-limit",
        "the memory limit of this process's cgroup is for it alone, as in a container with one server: "
        "--servers-on-host divides the host's memory only",
    )
    add_option(
        parser,
        "--shm-dir",
        "memory file system in which trainers on this host read shards in place and leave gradients; none: they use "
        "the network",
        DEFAULT_DIRECTORY if DEFAULT_DIRECTORY.is_dir() else "none",
        type=_directory,
        metavar="DIR",
    )
    add_option(
        parser,
        "--state-dir",
        "directory on a disk in which a stop saves the shards that are left; needs --id and shared memory",
        shown="they are in shared memory only",
        metavar="DIR",
    )


def add_discard_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``discard`` subcommand."""
    parser = subparsers.add_parser(
        "discard",
        help="delete the shards that a stopped shard server left",
        description="Deletes what a stopped shard server left for its next process, in shared memory and on disk.",
        epilog=_DISCARD_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    name = "name of the server; with --processes, that of one process, such as NAME-0"
    coordinator = "address of the coordinator, as the server was given it"
    add_option(parser, "--coordinator", coordinator, required=True, metavar="HOST:PORT")
    add_option(parser, "--id", name, required=True, metavar="NAME")
    add_option(parser, "--shm-dir", "memory file system of the server", DEFAULT_DIRECTORY, type=Path, metavar="DIR")
    add_option(parser, "--state-dir", "directory in which a stop saved shards", shown="none", metavar="DIR")
    parser.set_defaults(handler=discard)


def _directory(text: str) -> str:
    if text != "none" and not Path(text).is_dir():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a directory: expected the directory of a memory file system, or none"
        )
    return text


def _run(arguments: argparse.Namespace) -> int:
    endpoint = server_options.endpoint_of(arguments)
    if arguments.threads < 1:
        raise ValueError(f"--threads is {arguments.threads}, expected at least 1")
    if arguments.servers_on_host < 1:
        raise ValueError(f"--servers-on-host is {arguments.servers_on_host}, expected at least 1")
    if arguments.processes < 1:
        raise ValueError(f"--processes is {arguments.processes}, expected at least 1")
    if not 0 <= arguments.drain_s <= _LONGEST_DRAIN_S:
        raise ValueError(f"--drain-s is {arguments.drain_s}, expected 0 to {_LONGEST_DRAIN_S:g} seconds")
    if arguments.processes > 1 and inherited_pipe(arguments.token_file) is not None:
        raise ValueError(
            f"--token-file {arguments.token_file} is a pipe, which one process can read: name a file for "
            f"--processes {arguments.processes}"
        )
    if arguments.state_dir and (not arguments.id or arguments.shm_dir == "none"):
        raise ValueError(f"--state-dir {arguments.state_dir} needs --id and --shm-dir: only shared memory is saved")
    # Before a group starts, whose members would each fail.
    credentials = server_options.credentials_of(arguments)
    server_options.insecurity(endpoint.host, credentials, arguments)
    server_options.roots_of(arguments, credentials)
    if arguments.processes > 1:
        return _run_group(arguments, endpoint)
    authorization.start(arguments.audit_log)
    torch.set_num_threads(arguments.threads)
    process.run(
        serve(arguments, endpoint),
        log_level=arguments.log_level,
        log_format=arguments.log_format,
        name=_server_id(arguments),
    )
    return 0


def _server_id(arguments: argparse.Namespace) -> str:
    return arguments.id or f"{socket.gethostname()}-{os.getpid()}"


def _run_group(arguments: argparse.Namespace, endpoint: process.Endpoint) -> int:
    settings = {
        name: value for name, value in vars(arguments).items() if name not in ("command", "handler", "owns_nothing")
    }
    members = member_settings(
        settings,
        server_id=_server_id(arguments),
        memory_budget_bytes=_budget_bytes(arguments),
        bind=endpoint.bind,
        # Without a name of its own, no later group has the same members.
        supervisor=_supervisor(arguments) if arguments.id else own_identity(),
    )
    group = ProcessGroup(members, stop_limit_s=None if arguments.state_dir else arguments.drain_s + STOP_S)
    return process.run(
        group.run(endpoint), log_level=arguments.log_level, log_format=arguments.log_format, name=_server_id(arguments)
    )


def _budget_bytes(arguments: argparse.Namespace) -> int:
    given: int | None = arguments.memory_budget
    return given or default_budget_bytes(arguments.servers_on_host, own_limits=arguments.own_memory_limit)


async def serve(arguments: argparse.Namespace, endpoint: process.Endpoint) -> None:
    """Serves ``ShardService`` with the command's arguments until the process is asked to stop."""
    server_id = _server_id(arguments)
    fault_points.describe_process(server=server_id)
    credentials = server_options.credentials_of(arguments)
    insecure = server_options.insecurity(endpoint.host, credentials, arguments)
    server_options.warn(endpoint.bind, insecure)
    with ExitStack() as stack:
        shared = stack.enter_context(_shared_memory(arguments))
        # Left before shared memory: the next process may take up the files once no thread changes them any more.
        threads = stack.enter_context(ThreadPoolExecutor(2, thread_name_prefix="tensor-work"))
        store = ShardStore(_budget_bytes(arguments), threads, shared, credentials.key)
        calls = CallServer(endpoint.host)
        offer = None if shared is None else RelayOffer(arguments.host or socket.gethostname(), arguments.owns_nothing)
        registration = Registration(arguments.coordinator, server_id, store, credentials, insecure, calls, offer)
        service = shard_pb2.DESCRIPTOR.services_by_name["ShardService"]
        transports = offered_transports(server_id, store, endpoint.host, credentials.tls)
        async with transports.serving():
            peers = GrpcPeers(credentials.of_role(Role.SERVER))
            relay = None if shared is None else Relay(store, shared, Owners(registration.list_units, peers))
            servicer = ShardServicer(
                ServerProcess(server_id, registration.incarnation),
                store,
                registration.term,
                transports,
                peers,
                server_options.roots_of(arguments, credentials),
                relay,
            )
            await process.serve(
                service,
                servicer,
                endpoint,
                registration.running,
                credentials=credentials,
                calls=calls,
                end_standing=servicer.end_standing_streams,
                read_metrics=partial(server_metrics, store),
                leave=(lambda: registration.drain(arguments.drain_s)) if arguments.drain_s else None,
            )
            await servicer.close()
            await peers.close()


def _folder_owner(arguments: argparse.Namespace) -> FolderOwner | None:
    """Returns the owner of the server's shared memory. None: no later process needs it.

    Without ``--id``, no later process has the same id. A relay has nothing that it could not fetch again, so the next
    server on the host removes what a killed relay has left.
    """
    if not arguments.id or arguments.owns_nothing:
        return None
    return FolderOwner(server_id=arguments.id, coordinator=arguments.coordinator, supervisor=_supervisor(arguments))


def _supervisor(arguments: argparse.Namespace) -> str:
    """Returns the identity of the process that starts the server again. Empty: not known."""
    if arguments.supervisor is not None:
        return str(arguments.supervisor)
    return parent_identity() if arguments.exit_with_parent else ""


@contextmanager
def _shared_memory(arguments: argparse.Namespace) -> Iterator[SharedMemory | None]:
    owner = _folder_owner(arguments)
    if arguments.shm_dir == "none":
        yield None
        return
    saved = SavedFiles(Path(arguments.state_dir), owner) if arguments.state_dir and owner is not None else None
    try:
        shared = SharedMemory(Path(arguments.shm_dir), owner, saved)
    except OSError as error:
        # Without shared memory this server could not take up its shards, and their runs would lose them.
        left = [] if owner is None else folders_of(Path(arguments.shm_dir), owner)
        if left or (saved is not None and saved.find() is not None):
            raise
        logger.warning("shared memory is disabled, trainers on this host use the network: %s", error)
        yield None
        return
    cleaning = asyncio.ensure_future(_remove_remains(Path(arguments.shm_dir)))
    try:
        yield shared if shared.keeps_shards or shared.offered() else None
    finally:
        cleaning.cancel()
        try:
            if shared.keeps_shards:
                files = recorded_files(shared)
                shared.remove_all_but(files)
                shared.save(files)
        finally:
            shared.close()


async def _remove_remains(directory: Path) -> None:
    """Removes the folders of other servers that nobody takes up again, from time to time."""
    while True:
        await asyncio.sleep(_REMAINS_EVERY_S)
        await asyncio.to_thread(remove_remains, directory)


def discard(arguments: argparse.Namespace) -> int:
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
