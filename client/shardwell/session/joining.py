"""What ``join`` checks before it calls the cluster, and the line that it shows.

A mistake in the environment or the address is reported at once, and nothing that decides what is trained stays
invisible: which run, whether it is new, and whether the cluster is a private one.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path

from torch.utils.data import get_worker_info

from shardwell.options import run_of_script
from shardwell_wire.connection.channel import check_address
from shardwell_wire.errors import UnavailableError, UsageError
from shardwell_wire.host.variables import NAMES, PREFIX
from shardwell_wire.model.topology import World
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_RESOLVE_S = 10.0
"""How long a host name may be unknown: in docker compose and Kubernetes, names appear with their containers."""
_PROBE_S = 2.0
_PAUSE_S = 0.5

_OF_DEPLOYMENTS = (
    "CONFIG CONTEXT FOLDER LIVE_OUTPUT PORT PYTHON RESTARTS SERVER_PACKAGES SHARDS SHARD_CPUS "
    "SHARD_MEMORY SHM_SIZE TEST_FAULTS TOKEN TRAINERS TRAIN_DIR TRAIN_PACKAGES"
)
"""Names without prefix of the variables that cannot be in a configuration file: of deployments, tests and secrets."""


def announce(text: str) -> None:
    """Shows a line that every user must see: in the log if the script shows messages of this level, else on stderr."""
    if logger.isEnabledFor(logging.INFO):
        logger.info(text)
    elif logger.isEnabledFor(logging.WARNING):  # not if the script has silenced the package
        print(f"[shardwell] {text}", file=sys.stderr, flush=True)


_ADVICE = (
    "Name the coordinator's address with join(address=) or SHARDWELL_ADDRESS, start one with `shardwell-server "
    "coordinator`, or a whole cluster with `docker compose up`"
)

# ---- the process and its environment ----


def check_process() -> None:
    """Raises UsageError in a child process that is no trainer: it only runs the script again, or loads data."""
    if get_worker_info() is not None:
        raise UsageError(
            "shardwell.join() was called in a worker process of a DataLoader: join in the process that trains, and let "
            "the dataset use no session"
        )
    frame = sys._getframe()
    while frame is not None:  # a child process has no multiprocessing.parent_process() yet when it imports the script
        if frame.f_globals.get("__name__") == "__mp_main__" and frame.f_code.co_name == "<module>":
            raise UsageError(
                "a child process, such as a worker of a DataLoader, imports the training script, and the script calls "
                "shardwell.join() at module level, so that each child would become a trainer. Put the training into a "
                'function, and call it under `if __name__ == "__main__":`'
            )
        frame = frame.f_back  # type: ignore[assignment]


def check_variables(environment: Mapping[str, str] | None = None) -> None:
    """Warns about ``SHARDWELL_*`` variables that nothing reads, such as one without the S of SHARDWELL_BACKUPS."""
    own = {f"{PREFIX}{name.upper()}" for name in NAMES}
    known = own | {f"{PREFIX}{name}" for name in _OF_DEPLOYMENTS.split()}
    for name in sorted(os.environ if environment is None else environment):
        if name.startswith(PREFIX) and name not in known:
            nearest = get_close_matches(name, sorted(own), 1, 0.0)
            logger.warning("nothing reads the variable %s: is %s meant?", name, nearest[0])


def name_run() -> str:
    """Returns the name of the run of a script that names none, on a shared cluster: the script's name.

    Raises:
        UsageError: The process runs no script.
    """
    main = sys.modules.get("__main__")
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if path is not None and Path(path).stem == "__main__" and spec is not None and spec.parent:
        return str(spec.parent).rpartition(".")[2]  # python -m package
    if path is not None:
        return run_of_script(path)
    raise UsageError(
        "this process runs no script whose name the run could have, so name the run: join(run=NAME), or set "
        "SHARDWELL_RUN. A name that exists continues the run of this name"
    )


# ---- the address ----


def check_reachable(address: str, error: UnavailableError) -> str:
    """Returns advice to a trainer whose first call does not reach the coordinator. Raises if waiting is pointless.

    An address that refuses connections may belong to a cluster that is starting.

    Args:
        address: The coordinator's host:port, or several with commas.
        error: Why the coordinator could not be reached.

    Raises:
        UnavailableError: No name of a host is known, or other servers than coordinators listen at all addresses.
    """
    if error.data.get("peer") is None:
        return ""  # the coordinator has answered, and a server behind it is not available
    reasons = [_why_hopeless(each) for each in check_address(address)]
    if all(reasons):
        raise UnavailableError(f"{'; '.join(reasons)}. {_ADVICE}", **error.data) from error
    return f". {_ADVICE}"


def _why_hopeless(address: str) -> str:
    """Returns why no coordinator can be at an address. Empty: one may be."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + _RESOLVE_S / 2  # gRPC has tried for as long
    while True:
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            break
        except OSError as error:
            if time.monotonic() > deadline:
                return f"the name of the host {host!r} is not known ({error})"
        time.sleep(_PAUSE_S)
    for family, kind, protocol, _, where in found:
        with socket.socket(family, kind, protocol) as connected:
            try:
                connected.settimeout(_PROBE_S)
                connected.connect(where)
                connected.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)))
                answer = connected.recv(64)
            except OSError:
                return ""
        # A server of gRPC answers with a frame of settings, and a server with TLS with an alert.
        if answer and answer[3:4] != b"\x04" and answer[:1] != b"\x15":
            return f"the server at {address} does not speak gRPC: it answers {answer[:24]!r}"
    return ""


# ---- the line about the run ----


def describe_join(joined: coordinator_pb2.JoinResponse, run: str, world: World) -> str:
    """Returns the line that tells which run a trainer has joined, and where it starts."""
    where = f"run {run!r} ({world})"
    ranks = [assignment.coordinates.global_rank for assignment in joined.rank_assignments]
    plays = f"plays {_listed(ranks)}" if ranks else "is a spare: it trains when another trainer is lost"
    me = f"trainer {joined.trainer!r} {plays}"
    if not joined.committed_step:
        return f"new {where}: {me}"
    by = f" by trainer {joined.created_by!r} on host {joined.created_on}" if joined.created_by else ""
    return (
        f"{where} continues at step {joined.committed_step}, with its weights and optimizer state. It was made "
        f"{_ago(joined.created.seconds)}{by}: {me}. To train anew, name another run, join(run=NAME), or delete this "
        f"one (shardwell delete-run {run})"
    )


def _listed(ranks: Iterable[int]) -> str:
    names = list(map(str, ranks))
    return f"rank {names[0]}" if len(names) == 1 else f"the ranks {', '.join(names)}"


def _ago(seconds: float) -> str:
    passed_s = max(0.0, time.time() - seconds)
    for unit, size in (("days", 86400), ("h", 3600), ("min", 60)):
        if passed_s >= 2 * size:
            return f"{passed_s // size:.0f} {unit} ago"
    return f"{passed_s:.0f} s ago"
