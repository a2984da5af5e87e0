"""``shardwell-server`` as the next version of Shardwell, which speaks one protocol version more."""

from __future__ import annotations

import sys

from shardwell_server import cli
from shardwell_server.coordinator.rpcs import operators
from shardwell_wire.connection import protocol_versions

VERSION = "99.0"


def main() -> int:
    protocol_versions.NEWEST += 1
    operators.version = lambda _: VERSION  # type: ignore[assignment]
    if "shard" in sys.argv:
        from shardwell_server.shard.process import registration

        registration.installed_version = lambda _: VERSION  # type: ignore[assignment]
    return cli.main()
