"""A coordinator with its state in etcd waits as a stand-by until it leads. See Note: [Leadership] in ``etcd_store``.

A stand-by looks at the leader's key several times per second. It also keeps a TCP connection to the leader. If this
connection closes and the leader's port then refuses connections, the leader's process has ended, and the stand-by ends
its lease. The same holds if the leader was an earlier process of the stand-by itself. The duration of the lease
therefore counts only when a host or a network falls silent. A mistake does no harm: the former leader can change
nothing and stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

from shardwell_server.coordinator.storage.etcd_store import EtcdClient, EtcdStore, Leader, find_leader, try_to_lead
from shardwell_server.serving import process
from shardwell_wire.connection.channel import check_address
from shardwell_wire.errors import UnavailableError, UsageError
from shardwell_wire.host.server_folders import has_ended
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.security.tls import Tls, TlsOptions
from shardwell_wire.v1 import coordinator_pb2

logger = logging.getLogger(__name__)

_POLL_S = 0.1
"""Pause between two looks at the leader's key."""
_CONNECT_TIMEOUT_S = 2.0
_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""Beginning of a connection of HTTP/2, with empty settings. A server that stops waits for connections without it."""
_SCHEME = "etcd"
DEFAULT_LEASE_S = 5
"""Several times as long as an etcd cluster needs to replace its own leader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EtcdState:
    """Where several coordinators keep their state in common."""

    addresses: tuple[str, ...]
    """host:port of the members of the etcd cluster."""
    prefix: str
    """Start of all keys, with a slash in front and none at the end."""
    lease_s: int
    """Seconds for which a coordinator leads that falls silent."""
    tls: Tls | None = None
    """TLS of the connections to etcd. None: they are not encrypted."""

    @classmethod
    def from_options(cls, url: str, options: Mapping[str, Any]) -> Self:
        """Returns the state that ``--state`` and the options ``etcd_*`` name. Raises UsageError if one is invalid."""
        found = urlsplit(url)
        addresses, prefix = tuple(found.netloc.split(",")), found.path.rstrip("/")
        if found.scheme != _SCHEME or not prefix or found.query or found.fragment:
            raise UsageError(f"--state {url!r}: expected etcd://HOST:PORT[,HOST:PORT...]/PREFIX")
        for address in addresses:
            check_address(address)
        lease_s = int(options["etcd_lease_s"])
        if not 2 <= lease_s <= 3600:
            raise UsageError(f"--etcd-lease-s {lease_s}: expected 2 to 3600 seconds")
        files = {name: options[f"etcd_{name}"] for name in ("ca", "cert", "key")}
        return cls(
            addresses=addresses,
            prefix=prefix,
            lease_s=lease_s,
            tls=Tls(TlsOptions(**files)) if any(files.values()) else None,
        )


async def lead(
    state: EtcdState, endpoint: process.Endpoint, stop: asyncio.Event, credentials: Credentials
) -> EtcdStore | None:
    """Waits until this coordinator leads. Until then, it listens as a stand-by, see ``process.standing_by``.

    Args:
        endpoint: Where this coordinator will serve.
        stop: Ends the wait.

    Returns:
        The state, which this coordinator can change. None: ``stop`` was set.
    """
    etcd = EtcdClient(state.addresses, state.tls)
    address = endpoint.address(int(endpoint.bind.rpartition(":")[2]))
    service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
    store: EtcdStore | None = None
    try:
        async with process.standing_by(service, endpoint, credentials):
            waiting = asyncio.ensure_future(_until_leading(etcd, state, address, credentials.tls))
            if await process.done_before(waiting, stop):
                store = waiting.result()
    finally:
        if store is None:
            etcd.close()
    if store is not None:
        logger.info("this coordinator leads, with term %d", store.term)
    return store


async def _until_leading(etcd: EtcdClient, state: EtcdState, address: str, tls: Tls | None) -> EtcdStore:
    shown, watch = "", None
    watched: Leader | None = None
    try:
        while True:
            try:
                leader = await asyncio.to_thread(find_leader, etcd, state.prefix)
                if leader is None:
                    store = await asyncio.to_thread(try_to_lead, etcd, state.prefix, address, state.lease_s)
                    if store is not None:
                        return store
                elif watched is None or leader.lease != watched.lease:
                    watched, watch = leader, _replace(watch, _until_refused(leader.address, tls))
                elif (watch is not None and watch.done()) or (leader.address == address and has_ended(leader.process)):
                    logger.warning("the coordinator at %s has ended: taking over from it", leader.address)
                    await asyncio.to_thread(etcd.revoke, leader.lease)
                    continue
                news = f"the coordinator at {leader.address} leads with term {leader.term}" if leader else ""
            except UnavailableError as error:
                news = str(error)
            if news and news != shown:
                logger.info("waiting as a stand-by: %s", news)
            shown = news
            await asyncio.sleep(_POLL_S)
    finally:
        if watch is not None:
            watch.cancel()


def _replace(former: asyncio.Future[None] | None, work: Any) -> asyncio.Future[None]:
    if former is not None:
        former.cancel()
    new: asyncio.Future[None] = asyncio.ensure_future(work)
    return new


async def _until_refused(address: str, tls: Tls | None) -> None:
    """Returns when a process that has listened at host:port does so no longer, while its host answers."""
    host, _, port = address.rpartition(":")
    security: dict[str, Any] = {}
    reached = False
    while True:
        try:
            if tls is not None:
                security = {"ssl": tls.current.client_context, "server_hostname": tls.server_name(address)}
                security["ssl"].set_alpn_protocols(["h2"])
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), **security)
        except ConnectionRefusedError:
            if reached:
                return
        except OSError:
            pass
        else:
            reached = True
            with suppress(OSError):
                writer.write(_HTTP2_PREFACE)
                while await reader.read(1 << 10):  # the server closes a connection that does not answer its pings
                    pass
            writer.close()
            continue
        await asyncio.sleep(_POLL_S)
