"""Authorization: which roles may call which rpc, and on which run.

The role is checked before a byte of a message is read (``authentication.py``), the run when the message is decoded
(``Call.check`` in ``rpc.py``). A test walks the table with every role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from shardwell_wire.errors import AccessError, UnauthenticatedError
from shardwell_wire.tokens import Identity, Role

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
            "AddResiduals",
        ),
        _TRAINER,
    ),
    # The stores of torchrun belong to no run, so only operators use them; see ``check``.
    **dict.fromkeys(
        ("StoreSet", "StoreGet", "StoreAdd", "StoreCheck", "StoreDelete"),
        _rule(Role.TRAINER, Role.OPERATOR, of_member=True),
    ),
    "SaveCheckpoint": _rule(Role.TRAINER, Role.OPERATOR),
    **dict.fromkeys(("DeleteRun", "ForgetServer", "SetBackups", "RebalanceRun", "VerifyRun", "ListServers"), _OPERATOR),
    "DrainServer": _rule(Role.SERVER, Role.OPERATOR),
    "ListRuns": _HARMLESS,
    "DescribeWorld": _READERS,
    **dict.fromkeys(("DescribeRun", "ListUnits", "DescribeWeights", "ExplainStall", "WatchEvents"), _READERS),
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
            "ReduceScatter",
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
    **dict.fromkeys(("Gather", "GatherBatch", "PinVersion", "OpenTransport", "LocateShard"), _READERS),
    **dict.fromkeys(("ListShards", "DescribeShard", "DescribeStep", "Peek"), _READERS),
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
