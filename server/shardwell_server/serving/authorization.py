"""Authorization: which roles may call which rpc, and on which run; and the audit log of what was refused or changed.

The role is checked before a byte of a message is read (``authentication.py``), the run when the message is decoded
(``Call.check`` in ``rpc.py``). A test walks the table with every role.

The audit log has a line of JSON for each refused request, and for each that changes members, runs or placements: the
time, the rpc, the peer's address, the caller's role, run and trainer, and the names, folders and addresses in the
request. It has no tokens, keys or values. Requests that are repeated in every step, such as heartbeats, pushes and
reads, are recorded only if they are refused. The size of the log is limited, and so is the number of refusals per
second.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from shardwell_wire.errors import AccessError, ShardwellError, UnauthenticatedError, wire_message
from shardwell_wire.security.tokens import Identity, Role

MAX_FILE_BYTES, FORMER_FILES = 16 << 20, 4
"""The log is renamed to ``PATH.1`` when it has this size. ``PATH.4`` is the oldest."""

MAX_REFUSALS_PER_S = 100
"""Further refusals in the same second are counted, and the next line has their number."""

_RECORDED = frozenset(
    (
        "RegisterServer",
        "DeregisterServer",
        "ForgetServer",
        "DrainServer",
        "Join",
        "Leave",
        "DeclareUnit",
        "PublishInitialUnit",
        "DeleteRun",
        "SaveCheckpoint",
        "PublishVersion",
        "SetBackups",
        "RebalanceRun",
        "VerifyRun",
        "OpenTransport",
        "PinVersion",
        "ReserveUnit",
        "ReleaseUnit",
        "PublishUnit",
        "DropRun",
        "BeginRestore",
        "BeginCheckpoint",
        "LoadShards",
        "CopyShard",
        "PromoteShards",
        "ReleaseShards",
    )
)
"""Rpcs that are recorded when they are admitted."""

_NAMES = ("run", "run_id", "trainer", "server_id", "unit", "target_server_id")
_PLACES = ("resume", "checkpoint_dir", "url", "address", "target_address")
"""Fields of requests that are recorded: names, and what the server opens or connects to."""
_LONGEST = 4096
"""Characters of a field that are recorded."""

_logger = logging.getLogger(__name__)


def start(path: str) -> None:
    """Writes the audit log of this process to a file that only this user can read. Empty: there is none.

    Raises:
        ValueError: The file cannot be written.
    """
    if not path:
        return
    try:
        handler = _PrivateFile(path, maxBytes=MAX_FILE_BYTES, backupCount=FORMER_FILES)
    except OSError as error:
        raise ValueError(f"--audit-log {path}: {error.strerror}") from error
    handler.addFilter(_RefusalLimit())
    _logger.addHandler(handler)
    _logger.setLevel(logging.INFO)
    _logger.propagate = False


def record_admitted(path: str, peer: str, request: Message) -> None:
    """Records a request that is about to be handled, unless it is of a kind that repeats."""
    if _logger.handlers and path.rpartition("/")[2] in _RECORDED:
        _write("admitted", path, peer, names=_names_in(request))


def record_refused(path: str, peer: str, error: ShardwellError) -> None:
    """Records a request that was refused."""
    if _logger.handlers:
        status = "" if error.status is None else error.status.name
        _write("refused", path, peer, status=status, reason=wire_message(error))


def _write(outcome: str, path: str, peer: str, **facts: Any) -> None:
    caller = CALLER.get()
    of_caller = (
        {}
        if caller is None
        else {"role": caller.role, "run": caller.run, "run_id": caller.run_id, "trainer": caller.member}
    )
    line = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "outcome": outcome,
        "rpc": path,
        "peer": peer,
        "caller": {name: value for name, value in of_caller.items() if value},
        **facts,
    }
    _logger.info("%s", "", extra={"line": line})


def _names_in(request: Message) -> dict[str, str]:
    """Returns the names of runs, trainers and servers in a request, and the folders and addresses."""
    fields, names = request.DESCRIPTOR.fields_by_name, dict[str, str]()
    for outer in ("context", "header", "config"):
        if outer in fields:
            names |= _names_in(getattr(request, outer))
    for name in (*_NAMES, *_PLACES):
        field = fields.get(name)
        if field is not None and field.message_type is None and (value := getattr(request, name)):
            names[name] = str(value)[:_LONGEST]
    return names


class _PrivateFile(RotatingFileHandler):
    """Writes lines to a file that only this user can read."""

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_open_private)

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(record.line, ensure_ascii=False)  # type: ignore[attr-defined]


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


class _RefusalLimit(logging.Filter):
    """Drops refusals above ``MAX_REFUSALS_PER_S`` and adds their number to the next line."""

    def __init__(self) -> None:
        super().__init__()
        self._second, self._count, self._dropped = 0, 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        line: dict[str, Any] = record.line  # type: ignore[attr-defined]
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        if line["outcome"] == "refused":
            self._count += 1
            if self._count > MAX_REFUSALS_PER_S:
                self._dropped += 1
                return False
        if self._dropped:
            line["refusals_not_recorded"], self._dropped = self._dropped, 0
        return True


CALLER: ContextVar[Identity | None] = ContextVar("caller", default=None)
"""Who called the rpc that the current task handles. None: the cluster has no key and admits every caller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Who may call one rpc."""

    roles: frozenset[Role]
    """Roles of the callers."""
    of_member: bool = False
    """True if a trainer needs the token that Join returned, and can act in its own name only."""
    names_run: bool = True
    """True if a caller whose token is for one run must name this run in the request."""


def _rule(*roles: Role, of_member: bool = False, names_run: bool = True) -> Rule:
    return Rule(roles=frozenset(roles), of_member=of_member, names_run=names_run)


_COORDINATOR, _SERVER, _OPERATOR = _rule(Role.COORDINATOR), _rule(Role.SERVER), _rule(Role.OPERATOR)
_TRAINER = _rule(Role.TRAINER, of_member=True)
_READERS = _rule(Role.READER, Role.TRAINER, Role.OPERATOR)
_READERS_AND_RELAYS = _rule(Role.READER, Role.TRAINER, Role.OPERATOR, Role.SERVER)
_HARMLESS = _rule(*Role, names_run=False)
"""Rpcs that neither read nor change a run. Lists of runs are cut to the caller's."""

COORDINATOR_RPCS: Mapping[str, Rule] = {
    **dict.fromkeys(("RegisterServer", "HeartbeatServer", "DeregisterServer", "KeepServerMembership"), _SERVER),
    "Join": _rule(Role.TRAINER, Role.OPERATOR),
    **dict.fromkeys(
        (
            "Heartbeat",
            "KeepMembership",
            "Leave",
            "DeclareUnit",
            "PublishInitialUnit",
            "DeclareParallelPlan",
            "ResetWork",
            "FinishWork",
            "PrepareGradients",
            "CommitStep",
            "ExchangeAddress",
            "FindRelay",
            "AddResiduals",
        ),
        _TRAINER,
    ),
    # The stores of torchrun belong to no run, so only operators use them; see ``check``.
    **dict.fromkeys(
        ("StoreSet", "StoreGet", "StoreAdd", "StoreCheck", "StoreDelete"),
        _rule(Role.TRAINER, Role.OPERATOR, of_member=True),
    ),
    **dict.fromkeys(("SaveCheckpoint", "PublishVersion"), _rule(Role.TRAINER, Role.OPERATOR)),
    **dict.fromkeys(("DeleteRun", "ForgetServer", "SetBackups", "RebalanceRun", "VerifyRun"), _OPERATOR),
    **dict.fromkeys(("ListServers", "DescribeCluster"), _OPERATOR),
    "DrainServer": _rule(Role.SERVER, Role.OPERATOR),
    "ListRuns": _HARMLESS,
    "DescribeWorld": _READERS,
    "ListUnits": _READERS_AND_RELAYS,
    **dict.fromkeys(
        ("DescribeRun", "DescribePerformance", "DescribeWeights", "ListReaders", "ExplainStall", "WatchEvents"),
        _READERS,
    ),
}

SHARD_RPCS: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "ReserveUnit",
            "ReleaseUnit",
            "PublishUnit",
            "Fence",
            "PrepareStep",
            "ConfirmPartitions",
            "PrepareUpdate",
            "Update",
            "CopyShard",
            "PromoteShards",
            "ReleaseShards",
            "HashShards",
            "DropRun",
            "BeginCheckpoint",
            "DescribeCheckpoint",
            "AbortCheckpoint",
            "BeginRestore",
            "LoadShards",
        ),
        _COORDINATOR,
    ),
    **dict.fromkeys(("ReceiveShardState", "ReplicateStep", "ConfirmBackups"), _SERVER),
    **dict.fromkeys(
        (
            "InitializeUnit",
            "RelayUnit",
            "ReadRelayed",
            "SkipRelay",
            "OpenGradientBuffer",
            "CloseSharedBuffers",
            "ReduceGradientBuffer",
            "ReduceBatch",
            "ReadPartition",
            "StagePartition",
            "OpenStagingBuffer",
            "StageStagingBuffer",
        ),
        _TRAINER,
    ),
    "ReduceScatter": _rule(Role.TRAINER, Role.SERVER, of_member=True),
    "Gather": _READERS_AND_RELAYS,
    **dict.fromkeys(("GatherBatch", "PinVersion", "OpenTransport", "LocateShard"), _READERS),
    **dict.fromkeys(("DescribeShard", "DescribeStep", "Peek"), _READERS),
    "ListShards": _rule(Role.READER, Role.TRAINER, Role.OPERATOR, Role.COORDINATOR),
    **dict.fromkeys(("MeasureTransport", "DescribeServer"), _HARMLESS),
}

_COORDINATOR_SERVICE, _SHARD_SERVICE = "/shardwell_wire.v1.CoordinatorService", "/shardwell_wire.v1.ShardService"

RULES: Mapping[str, Rule] = {
    **{f"{_COORDINATOR_SERVICE}/{name}": rule for name, rule in COORDINATOR_RPCS.items()},
    **{f"{_SHARD_SERVICE}/{name}": rule for name, rule in SHARD_RPCS.items()},
}
"""The rule of every rpc, by its path."""


def check_role(caller: Identity, path: str) -> None:
    """Raises AccessError if a caller may not call an rpc, whatever the request is."""
    rule = RULES.get(path)
    if rule is None:
        raise AccessError(f"no role may call {path}, which this server does not know")
    if caller.role not in rule.roles:
        allowed = ", ".join(sorted(rule.roles))
        raise AccessError(f"{path} is for the roles {allowed}, but the token is of a {caller}", role=caller.role)
    if rule.of_member and caller.role is Role.TRAINER and not caller.member:
        raise AccessError(f"{path} needs the token that Join returned, but the token is of a {caller}")


def check_session(caller: Identity, rpc_name: str) -> None:
    """Admits a request over a transport session, which stands for an rpc of ``ShardService``.

    Args:
        caller: Who opened the session.
        rpc_name: Name of the rpc.

    Raises:
        UnauthenticatedError: The caller's token has expired. The sessions of a trainer last as long as its leases.
        AccessError: The caller's role may not call the rpc.
    """
    if not caller.member and time.time() >= caller.expires_s:
        raise UnauthenticatedError(f"the token of {caller} has expired: open another session with a new token")
    check_role(caller, f"{_SHARD_SERVICE}/{rpc_name}")


def check_request(caller: Identity, path: str, request: Message, run_id_of: Callable[[str], str]) -> None:
    """Raises AccessError if a caller may not send a request.

    Args:
        caller: The caller, whom ``check_role`` has admitted.
        path: The rpc.
        request: The request, or the header of a stream.
        run_id_of: Returns the id of the run that has a name now. Empty: there is none.
    """
    rule, shape = RULES[path], _shape_of(request.DESCRIPTOR)
    if shape.has_rendezvous:
        _check_rendezvous(caller, request)
    if not caller.run or not rule.names_run or not shape.names_run(request):
        return
    named: Any = request
    for field in shape.path:
        named = getattr(named, field)
    if named.run != caller.run:
        run = f"run {named.run!r}" if named.run else "no run"
        raise AccessError(f"the token is of a {caller}, but the request names {run}", run=named.run)
    run_id = (named.run_id if shape.has_run_id else "") or run_id_of(named.run)
    if caller.run_id and run_id and run_id != caller.run_id:
        raise AccessError(
            f"the token is of a {caller} with id {caller.run_id}, but this run has id {run_id}: ask an operator for a "
            "token of this run",
            run=named.run,
            run_id=run_id,
        )
    if shape.has_trainer:
        _check_trainer(caller, rule, request)


def _check_trainer(caller: Identity, rule: Rule, request: Any) -> None:
    if request.trainer == caller.member:
        return
    if rule.of_member:
        raise AccessError(f"the token is of a {caller}, but the request is in the name of trainer {request.trainer!r}")
    if getattr(request, "replaced_epoch", 0):
        raise AccessError(
            f"the request takes the place of trainer {request.trainer!r}, which needs this trainer's own token, but "
            f"the token is of a {caller}"
        )


def _check_rendezvous(caller: Identity, request: Any) -> None:
    if bool(request.rendezvous) != (caller.role is Role.OPERATOR):
        store, users = (
            ("a rendezvous of torchrun", "operators") if request.rendezvous else ("a replica", "its trainers")
        )
        raise AccessError(f"the store of {store} is for {users}, but the token is of a {caller}")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where the requests of one type name their run and their sender."""

    path: tuple[str, ...]
    """Fields that lead to the message with the fields ``run`` and ``run_id``."""
    has_run: bool
    has_run_id: bool
    has_trainer: bool
    has_rendezvous: bool
    has_world: bool
    """True if a request may describe a world without a run."""

    def names_run(self, request: Any) -> bool:
        """Returns whether a request concerns a run. Its name may still be empty."""
        return self.has_run and not (self.has_world and request.HasField("world"))


@cache
def _shape_of(descriptor: Descriptor) -> _Shape:
    path, named = [], descriptor
    while outer := next((name for name in ("context", "header", "partition") if name in named.fields_by_name), None):
        path.append(outer)
        message_type = named.fields_by_name[outer].message_type
        assert message_type is not None
        named = message_type
    own = descriptor.fields_by_name
    return _Shape(
        path=tuple(path),
        has_run="run" in named.fields_by_name,
        has_run_id="run_id" in named.fields_by_name,
        has_trainer="trainer" in own,
        has_rendezvous="rendezvous" in own,
        has_world="world" in own,
    )
