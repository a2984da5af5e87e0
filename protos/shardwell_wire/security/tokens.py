"""Tokens of a cluster: who a caller is, proved by a MAC under the cluster's key.

The coordinator and the shard servers hold the key and verify tokens without asking anyone. A holder of the key makes
tokens. The key itself is never sent. A token is one line of text, without spaces::

    sw1.KEY.ROLE.RUN.RUN_ID.MEMBER.EXPIRES.MAC

``KEY`` identifies the key. ``RUN`` and ``MEMBER`` are percent-encoded. ``EXPIRES`` is in seconds since 1970. ``MAC`` is
the HMAC-SHA256 of everything before its dot, in URL-safe base64. Fields that do not apply are empty.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import quote, unquote

from shardwell_wire.errors import AccessError, UnauthenticatedError

LIFETIME_S = 3600
"""Seconds for which a token is valid if its maker does not choose another time. Holders of the key make a new one, and
trainers get one with a heartbeat, when half of the time is over."""

PROOF_BYTES = 16
"""Size of a lease proof."""

_VERSION = "sw1"
_MAX_VERIFIED = 4096
_MAX_LENGTH = 4096


class Role(StrEnum):
    """What the holder of a token may do. ``shardwell_server/serving/authorization.py`` lists the rpcs of each role."""

    COORDINATOR = "coordinator"
    """Tells shard servers what to do."""
    SERVER = "server"
    """Registers as a shard server, and sends copies of shards to other servers."""
    OPERATOR = "operator"
    """Reads, changes and deletes all runs, and changes the cluster."""
    TRAINER = "trainer"
    """Joins one run. With a member: trains it under the member's name."""
    READER = "reader"
    """Reads one run."""


_ROLES_OF_A_RUN = (Role.TRAINER, Role.READER)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Who a caller is."""

    role: Role
    run: str = ""
    """Name of the run that the caller may use. Empty: all runs (roles without a run)."""
    run_id: str = ""
    """Id of that run. Empty: all runs (roles without a run)."""
    member: str = ""
    """Name of the trainer in the run. Empty: the token admits to the run, but proves no membership."""
    expires_s: int
    """End of the token's validity in seconds since 1970."""

    def __str__(self) -> str:
        of_run = f" of run {self.run!r}" if self.run else ""
        return f"{self.role} {self.member!r}{of_run}" if self.member else f"{self.role}{of_run}"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """The secret of a cluster's coordinator and shard servers. Makes and verifies tokens. Thread-safe.

    Args:
        secret: At least 16 characters.
        clock: Returns seconds since 1970.
    """

    secret: str = field(repr=False)
    clock: Callable[[], float] = field(default=time.time, repr=False, compare=False)
    _verified: OrderedDict[str, Identity] = field(default_factory=OrderedDict, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Identifies the key without disclosing it: 8 hexadecimal digits."""
        return self._mac(b"name").hex()[:8]

    def mint(
        self, role: Role, *, run: str = "", run_id: str = "", member: str = "", lifetime_s: float = LIFETIME_S
    ) -> str:
        """Returns a new token.

        Args:
            role: Role of the holder.
            run: Name of the holder's run. Required for trainers and readers, empty for other roles.
            run_id: Id of the run. Required with ``run``: the token does not open a later run of the same name.
            member: Name of the trainer in the run. Empty: the holder may join the run.
            lifetime_s: Seconds for which the token is valid.
        """
        if bool(run) != (role in _ROLES_OF_A_RUN):
            raise ValueError(f"a token for a {role} must {'not ' if run else ''}name a run")
        if bool(run) != bool(run_id):
            raise ValueError(f"a token for a {role} has run={run!r} and run_id={run_id!r}, expected both or neither")
        expires = int(self.clock() + lifetime_s)
        text = ".".join((_VERSION, self.name, role, _encoded(run), run_id, _encoded(member), str(expires)))
        return f"{text}.{self._signature(text)}"

    def verify(self, token: str) -> Identity:
        """Returns the identity that a token proves.

        Raises:
            UnauthenticatedError: The token is malformed, was not made with this key, or has expired.
        """
        identity = self._verified.get(token)
        if identity is None:
            identity = self._verified[token] = self._parse(token)
            while len(self._verified) > _MAX_VERIFIED:
                self._verified.popitem(last=False)
        if self.clock() >= identity.expires_s:
            raise UnauthenticatedError(f"the token of {identity} has expired", expired_s=identity.expires_s)
        return identity

    def _parse(self, token: str) -> Identity:
        text, _, mac = token.rpartition(".")
        fields = text.split(".")
        if len(token) > _MAX_LENGTH or len(fields) != 7 or fields[0] != _VERSION:
            raise UnauthenticatedError("the rpc carries something else than a token of this version")
        if fields[1] != self.name:
            raise UnauthenticatedError("the rpc carries a token of another cluster")
        if not hmac.compare_digest(mac.encode(), self._signature(text).encode()):
            raise UnauthenticatedError("the rpc carries a forged token: its MAC does not match")
        _, _, role, run, run_id, member, expires = fields
        if role in _ROLES_OF_A_RUN and not run_id:
            raise UnauthenticatedError("the rpc carries a token for a run that does not have the run's id")
        return Identity(
            role=Role(role), run=unquote(run), run_id=run_id, member=unquote(member), expires_s=int(expires)
        )

    # ---- leases ----

    def lease_proof(self, run_id: str, lease: int | str, epoch: int) -> bytes:
        """Returns what shows that the coordinator leased something to the sender of a request.

        Args:
            lease: The dp rank that was leased, or ``INITIALIZER``.
        """
        return self._mac(b"lease", f"{run_id}.{lease}.{epoch}".encode())[:PROOF_BYTES]

    def check_lease(self, run_id: str, lease: int | str, epoch: int, proof: bytes) -> None:
        """Raises AccessError unless the coordinator leased something under this epoch to whoever has the proof."""
        if not hmac.compare_digest(self.lease_proof(run_id, lease, epoch), proof):
            what = "initial values" if lease == INITIALIZER else f"rank {lease}"
            raise AccessError(
                f"the request does not prove that {what} was leased to the sender under epoch {epoch}: send the "
                "lease_proof that came with the lease",
                epoch=epoch,
            )

    # ---- answers of the coordinator ----

    def answer_proof(self, nonce: bytes, answer: bytes) -> bytes:
        """Returns what shows that a holder of the key has sent an answer.

        Args:
            nonce: Random bytes from the request.
            answer: The serialised answer without a proof.
        """
        return self._mac(b"answer", nonce + answer)

    def _signature(self, text: str) -> str:
        return urlsafe_b64encode(self._mac(b"token", text.encode())).rstrip(b"=").decode()

    def _mac(self, purpose: bytes, data: bytes = b"") -> bytes:
        # The purpose has no NUL and a fixed place, so no two purposes have the same input.
        return hmac.digest(self.secret.encode(), purpose + b"\0" + data, hashlib.sha256)


INITIALIZER = "initializer"
"""The lease under which a trainer sends the initial values of a unit."""


def is_token(text: str) -> bool:
    """True if a text is a token rather than a key."""
    return text.startswith(f"{_VERSION}.")


def _encoded(name: str) -> str:
    return quote(name, safe="").replace(".", "%2E")
