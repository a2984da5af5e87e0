"""Versions of the protocol between coordinator, shard servers and trainers.

Processes of different versions of Shardwell work together while a cluster is updated, one process after the other. Each
process states the range of versions that it speaks. The coordinator chooses the newest version that both speak. The
version rises when a message changes its meaning; new fields and rpcs do not raise it. See docs/upgrading.md.
"""

from __future__ import annotations

from shardwell_wire.errors import ConflictError
from shardwell_wire.v1 import coordinator_pb2

OLDEST, NEWEST = 1, 1
"""Versions that this software speaks."""


def own_versions() -> coordinator_pb2.ProtocolVersions:
    """Returns the versions that this process speaks, for a request."""
    return coordinator_pb2.ProtocolVersions(oldest=OLDEST, newest=NEWEST)


def negotiate(offered: coordinator_pb2.ProtocolVersions, who: str) -> int:
    """Returns the newest version that this process and another one speak.

    Args:
        offered: Versions of the other process. Unset: version 1.
        who: The other process, for the message.

    Raises:
        ConflictError: There is no such version.
    """
    oldest, newest = offered.oldest or 1, offered.newest or 1
    agreed = min(newest, NEWEST)
    if agreed < max(oldest, OLDEST):
        raise ConflictError(
            f"{who} speaks protocol versions {oldest} to {newest}, but this coordinator speaks {OLDEST} to {NEWEST}: "
            "update the older of the two. Update the shard servers one by one, then the coordinator, then the trainers",
            oldest=oldest,
            newest=newest,
        )
    return agreed


def check_chosen(version: int, coordinator: str) -> None:
    """Checks the version that a coordinator chose. 0: a coordinator that does not negotiate, which speaks version 1.

    Raises:
        ConflictError: This process does not speak it.
    """
    if not OLDEST <= (version or 1) <= NEWEST:
        raise ConflictError(
            f"the coordinator at {coordinator} chose protocol version {version or 1}, but this process speaks {OLDEST} "
            f"to {NEWEST}: update the older of the two",
            version=version,
        )
