"""The tables of the coordinator in etcd, which the coordinator that leads can change.

Note: [Leadership]
    One key, the leader's, exists as long as a coordinator leads. It belongs to a lease that this coordinator renews.
    The term rises in the same transaction that creates the key. Every later write is a transaction on the condition
    that the key is still the one this coordinator created, at the version that its last write left, and sets the key
    once more. So a coordinator that another one has replaced can change nothing. And after a write without an answer,
    the same transaction can be sent again: the key's version says whether the first one was made.

    A coordinator that cannot renew its lease in time, by its own clock, leads no longer and must stop. It cannot lead
    again: its memory may differ from what the next coordinator has stored.

Note: [Large writes]
    etcd limits the requests and bytes of a transaction. A write above these limits is first stored as a list of
    transactions under ``pending``. Setting the number of these transactions is the moment from which the write is made
    as a whole. They are then executed and the list is deleted. A leader finishes what an earlier one left there.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from base64 import b64decode, b64encode
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import grpc

from shardwell_server.coordinator.storage.records import KEYS, SCHEMA_VERSION, Change, Put, TableStore, Values
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.errors import ConflictError, NotFoundError, ShardwellError, UnavailableError
from shardwell_wire.host.server_folders import own_identity
from shardwell_wire.security.tls import Tls
from shardwell_wire.v1 import etcd_pb2

_TIMEOUT_S = 1.0
"""Deadline of a call. Another member of the cluster is then asked."""

_PAGE = 200
"""Most keys of one answer. With values of at most ``PART_BYTES``, the answer fits a message."""

PART_BYTES = 64 << 10
"""Longest value of a key."""

_REFUSED = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Statuses with which etcd says that it has changed nothing. After others, the outcome of a call is unknown."""


class EtcdClient:
    """Calls the members of one etcd cluster, each call the one that has answered last. All methods block. Thread-safe.

    Every method raises UnavailableError if the member does not answer, after which the next call goes to another one;
    and ConflictError if etcd refuses the call.

    Args:
        tls: TLS of the connections. None: they are not encrypted.
    """

    def __init__(self, addresses: Sequence[str], tls: Tls | None = None) -> None:
        self.name = f"etcd at {','.join(addresses)}"
        self._channels = [open_channel(address, tls) for address in addresses]
        self._current = 0

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()

    def get(self, key: bytes) -> Any | None:
        """Returns a key with its value. None: it does not exist."""
        return next(iter(self._range(etcd_pb2.EtcdRangeRequest(key=key)).kvs), None)

    def scan(self, prefix: bytes) -> Iterator[Any]:
        """Yields all keys that begin with a prefix, in their order."""
        request = etcd_pb2.EtcdRangeRequest(key=prefix, range_end=end_of(prefix), limit=_PAGE)
        while True:
            answer = self._range(request)
            yield from answer.kvs
            if not answer.more:
                return
            request.key = answer.kvs[-1].key + b"\x00"

    def _range(self, request: etcd_pb2.EtcdRangeRequest) -> Any:
        return self._call("KV/Range", request, etcd_pb2.EtcdRangeResponse)

    def transact(self, request: etcd_pb2.EtcdTxnRequest) -> Any:
        """Makes a transaction; returns its answer. After an UnavailableError, the outcome is unknown."""
        return self._call("KV/Txn", request, etcd_pb2.EtcdTxnResponse)

    def grant(self, ttl_s: int) -> tuple[int, int]:
        """Begins a lease; returns its id and duration in seconds."""
        answer = self._call(
            "Lease/LeaseGrant", etcd_pb2.EtcdLeaseGrantRequest(ttl=ttl_s), etcd_pb2.EtcdLeaseGrantResponse
        )
        return answer.id, answer.ttl

    def revoke(self, lease: int) -> None:
        """Ends a lease, and deletes its keys. Harmless to repeat."""
        try:
            self._call("Lease/LeaseRevoke", etcd_pb2.EtcdLeaseRevokeRequest(id=lease), etcd_pb2.EtcdLeaseRevokeResponse)
        except NotFoundError:
            return

    def keep_alive(self, lease: int, timeout_s: float) -> int:
        """Renews a lease; returns its duration in seconds. 0: the lease has ended."""
        request = etcd_pb2.EtcdLeaseKeepAliveRequest(id=lease)

        def call(channel: grpc.Channel) -> Any:
            stub = channel.stream_stream(
                "/etcdserverpb.Lease/LeaseKeepAlive",
                request_serializer=etcd_pb2.EtcdLeaseKeepAliveRequest.SerializeToString,
                response_deserializer=etcd_pb2.EtcdLeaseKeepAliveResponse.FromString,
            )
            answers = stub(iter([request]), timeout=timeout_s)
            try:
                return next(answers)
            finally:
                answers.cancel()

        return int(self._attempt(call).ttl)

    def _call(self, path: str, request: Any, answer: Any) -> Any:
        def call(channel: grpc.Channel) -> Any:
            stub = channel.unary_unary(
                f"/etcdserverpb.{path}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return stub(request, timeout=_TIMEOUT_S)

        return self._attempt(call)

    def _attempt(self, call: Callable[[grpc.Channel], Any]) -> Any:
        current = self._current
        try:
            return call(self._channels[current])
        except grpc.RpcError as error:
            message = f"{self.name}: {error.details() or error.code().name}"
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFoundError(message) from error
            if error.code() in _REFUSED:
                raise ConflictError(message) from error
            self._current = (current + 1) % len(self._channels)
            raise UnavailableError(message) from error


def end_of(prefix: bytes) -> bytes:
    """Returns the end of the range of all keys that begin with a prefix."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def put(key: bytes, value: bytes, lease: int = 0) -> etcd_pb2.EtcdRequestOp:
    """Returns a request of a transaction that sets a key."""
    return etcd_pb2.EtcdRequestOp(request_put=etcd_pb2.EtcdPutRequest(key=key, value=value, lease=lease))


def delete(key: bytes, end: bytes = b"") -> etcd_pb2.EtcdRequestOp:
    """Returns a request of a transaction that deletes a key, or all keys from ``key`` to ``end``."""
    return etcd_pb2.EtcdRequestOp(request_delete_range=etcd_pb2.EtcdDeleteRangeRequest(key=key, range_end=end))


def read(key: bytes) -> etcd_pb2.EtcdRequestOp:
    """Returns a request of a transaction that reads a key."""
    return etcd_pb2.EtcdRequestOp(request_range=etcd_pb2.EtcdRangeRequest(key=key))


_MOST_OPS, _MOST_BYTES = 120, 1 << 20
"""Limits of one transaction, below the defaults of etcd: 128 requests and 1.5 MiB."""


def grouped(ops: Iterable[etcd_pb2.EtcdRequestOp]) -> list[list[etcd_pb2.EtcdRequestOp]]:
    """Divides requests into groups that fit one transaction each."""
    groups: list[list[etcd_pb2.EtcdRequestOp]] = []
    size_bytes = 0
    for op in ops:
        op_bytes = op.ByteSize()
        if not groups or len(groups[-1]) >= _MOST_OPS or size_bytes + op_bytes > _MOST_BYTES:
            groups.append([])
            size_bytes = 0
        groups[-1].append(op)
        size_bytes += op_bytes
    return groups


logger = logging.getLogger(__name__)

_PAUSE_S = 0.05
"""Pause before a call that etcd did not answer is repeated."""
_RENEWALS = 5
"""Renewals of the lease per duration of the lease."""

_VERSION_TARGET, _CREATE_TARGET, _MOD_TARGET = range(3)


@dataclass(frozen=True, slots=True)
class Leader:
    """The coordinator that leads, as its key in etcd says."""

    address: str
    """host:port at which it serves."""
    term: int
    process: str
    """Its identity, as returned by ``server_folders.own_identity``."""
    lease: int
    """Id of its lease. Its end ends the leadership."""


_READABLE_SCHEMAS = (19, SCHEMA_VERSION)
"""Schema 20 appends columns to the rows of schema 19, so this version reads both, and writes schema 20."""


def find_leader(etcd: EtcdClient, prefix: str) -> Leader | None:
    """Returns the coordinator that leads. None: no coordinator does."""
    found = etcd.get(_leader_key(prefix))
    return None if found is None else Leader(**json.loads(found.value), lease=found.lease)


def try_to_lead(etcd: EtcdClient, prefix: str, address: str, lease_s: int) -> EtcdStore | None:
    """Makes this process the leader if no coordinator leads.

    Args:
        etcd: The cluster.
        prefix: Start of all keys.
        address: host:port at which this process will serve.

    Returns:
        The store. None: another coordinator leads.

    Raises:
        UnavailableError: etcd does not answer.
        ConflictError: The tables have another schema version.
    """
    found_schema = etcd.get(_key(prefix, "schema"))
    if found_schema is not None and int(found_schema.value) not in _READABLE_SCHEMAS:
        raise ConflictError(
            f"{etcd.name}{prefix} has schema version {int(found_schema.value)}, expected {SCHEMA_VERSION}: "
            "use the version of Shardwell that wrote it, or another prefix in --state"
        )
    leader, term_key = _leader_key(prefix), _row_key(prefix, "facts", ("term",))
    found_term = etcd.get(term_key + _part(0))
    term = 1 if found_term is None else _decode(found_term.value)[1] + 1
    granted_s = time.monotonic()
    lease, ttl_s = etcd.grant(lease_s)
    request = etcd_pb2.EtcdTxnRequest(
        compare=[
            etcd_pb2.EtcdCompare(target=_CREATE_TARGET, key=leader, create_revision=0),
            etcd_pb2.EtcdCompare(
                target=_MOD_TARGET,
                key=term_key + _part(0),
                mod_revision=0 if found_term is None else found_term.mod_revision,
            ),
        ],
        success=[
            put(leader, json.dumps({"address": address, "term": term, "process": own_identity()}).encode(), lease),
            put(term_key + _part(0), _encode(("term", term))),
            put(_key(prefix, "schema"), str(SCHEMA_VERSION).encode()),
        ],
    )
    try:
        etcd.transact(request)
    except UnavailableError as error:
        logger.info("reading whether this coordinator leads, because etcd did not answer: %s", error)
    found = etcd.get(leader)
    if found is None or found.lease != lease:
        etcd.revoke(lease)
        return None
    return EtcdStore(etcd, prefix, found, term, granted_s + ttl_s, ttl_s)


class EtcdStore(TableStore):
    """The tables in etcd. ``try_to_lead`` makes one.

    Args:
        etcd: The cluster. ``close`` closes its connections.
        prefix: Start of all keys.
        leader: The leader's key, which this process has created.
        term: Term of this coordinator.
        ends_s: End of the lease by ``time.monotonic``.
    """

    def __init__(self, etcd: EtcdClient, prefix: str, leader: Any, term: int, ends_s: float, lease_s: float) -> None:
        self.term = term
        self._etcd, self._prefix, self._leader = etcd, prefix, leader
        self._version: int = leader.version
        """Version of the leader's key after the last write."""
        self._ends_s, self._lease_s = ends_s, lease_s
        self._closed = threading.Event()
        self._renewing = threading.Thread(target=self._renew, name="shardwell-etcd-lease", daemon=True)
        self._renewing.start()
        self._values: dict[bytes, bytes] = {}
        """The encoded rows by their keys in etcd, without the numbers of parts. No other process changes them."""
        self._keys: list[bytes] = []
        """The keys of ``_values``, sorted."""
        try:
            self._finish_pending()
            self._load()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed.set()
        self._renewing.join()
        try:
            self._etcd.revoke(self._leader.lease)  # the next coordinator need not wait for the end of the lease
        except ShardwellError as error:
            logger.info("the lease of this coordinator ends by itself: %s", error)
        self._etcd.close()

    def rows(self, table: str, *first: object) -> list[Any]:
        width = len(KEYS[table])
        found = (_decode(self._values[key]) for key in self._keys_of(_row_key(self._prefix, table, first)))
        return sorted(found, key=lambda row: row[:width])

    def write(self, changes: Sequence[Change]) -> None:
        if self.lost is not None:
            raise self.lost
        former: dict[bytes, bytes | None] = {}
        """Values before this write of the rows that it changes."""
        for change in changes:
            if isinstance(change, Put):
                width = len(KEYS[change.table])
                for row in change.rows:
                    self._set(_row_key(self._prefix, change.table, row[:width]), _encode(row), former)
            else:
                for first in change.keys:
                    for key in self._keys_of(_row_key(self._prefix, change.table, first)):
                        self._set(key, None, former)
        try:
            self._store(grouped(self._requests(former)))
        except BaseException:
            for key, value in former.items():
                self._set(key, value, {})
            raise

    def _set(self, key: bytes, value: bytes | None, former: dict[bytes, bytes | None]) -> None:
        """Changes a row in memory, and notes its former value."""
        before = self._values.get(key)
        former.setdefault(key, before)
        if value is None:
            if before is not None:
                del self._values[key], self._keys[bisect_left(self._keys, key)]
            return
        if before is None:
            insort(self._keys, key)
        self._values[key] = value

    def _keys_of(self, prefix: bytes) -> list[bytes]:
        return self._keys[bisect_left(self._keys, prefix) : bisect_left(self._keys, end_of(prefix))]

    def _requests(self, former: dict[bytes, bytes | None]) -> Iterator[etcd_pb2.EtcdRequestOp]:
        """Yields the requests that store the rows that have changed."""
        for key, before in former.items():
            value = self._values.get(key)
            if value == before:
                continue
            count = _count_parts(value)
            for index in range(count):
                assert value is not None
                yield put(key + _part(index), value[index * PART_BYTES : (index + 1) * PART_BYTES])
            for index in range(count, _count_parts(before)):
                yield delete(key + _part(index))

    def _store(self, groups: list[list[etcd_pb2.EtcdRequestOp]]) -> None:
        """Executes requests, all or none. See Note: [Large writes]."""
        if len(groups) <= 1:
            if groups:
                self._transact(groups[0])
            return
        for index, group in enumerate(groups):
            stored = etcd_pb2.EtcdTxnRequest(success=group).SerializeToString()
            self._transact([put(_key(self._prefix, "pending", str(index)), stored)])
        self._transact([put(_key(self._prefix, "pending"), str(len(groups)).encode())])
        try:
            self._execute_pending(groups)
        except UnavailableError as error:
            raise self._lose(f"a write is stored, but not finished: {error}") from error

    def _execute_pending(self, groups: list[list[etcd_pb2.EtcdRequestOp]]) -> None:
        for group in groups:
            self._transact(group)
        pending = _key(self._prefix, "pending")
        self._transact([delete(pending, end_of(pending))])

    def _finish_pending(self) -> None:
        """Makes a write that an earlier leader has stored as pending, and deletes what it stored of another one."""
        pending = _key(self._prefix, "pending")
        found = {each.key: each.value for each in self._retry(lambda: list(self._etcd.scan(pending)))}
        if not found:
            return
        count = int(found.get(pending, b"0"))
        stored = (found[_key(self._prefix, "pending", str(index))] for index in range(count))
        self._execute_pending([list(etcd_pb2.EtcdTxnRequest.FromString(each).success) for each in stored])

    def _load(self) -> None:
        """Reads all rows."""
        parts: dict[bytes, list[bytes]] = {}
        for each in self._retry(lambda: list(self._etcd.scan(_key(self._prefix, "rows") + b"/"))):
            key, separator, _ = each.key.rpartition(b"/")
            parts.setdefault(key + separator, []).append(each.value)
        self._values = {key: b"".join(values) for key, values in parts.items()}
        self._keys = sorted(self._values)

    def _retry(self, action: Any) -> Any:
        """Calls ``action`` until etcd answers or the lease has ended."""
        while True:
            try:
                return action()
            except UnavailableError:
                if self.lost is not None:
                    raise
                time.sleep(_PAUSE_S)

    def _transact(self, requests: list[etcd_pb2.EtcdRequestOp]) -> None:
        """Executes requests in one transaction if this coordinator leads. See Note: [Leadership].

        Raises:
            UnavailableError: etcd refused the transaction, which changed nothing; or ``lost`` is set.
        """
        key, lead = self._leader.key, self._leader
        transaction = etcd_pb2.EtcdTxnRequest(
            compare=[
                etcd_pb2.EtcdCompare(target=_CREATE_TARGET, key=key, create_revision=lead.create_revision),
                etcd_pb2.EtcdCompare(target=_VERSION_TARGET, key=key, version=self._version),
            ],
            success=[*requests, put(key, lead.value, lead.lease)],
            failure=[read(key)],
        )
        while True:
            if self.lost is not None:
                raise self.lost
            try:
                answer = self._etcd.transact(transaction)
                break
            except UnavailableError as error:
                logger.info("sending a write again, because etcd did not answer: %s", error)
                time.sleep(_PAUSE_S)
            except NotFoundError as error:
                raise self._lose(f"its lease has ended: {error}") from error
            except ConflictError as error:
                raise UnavailableError(
                    f"the coordinator cannot write its state: {error}: this request changed nothing; give etcd the "
                    "space or the rights that it names, then retry"
                ) from error
        if not answer.succeeded:
            found = next(iter(answer.responses[0].response_range.kvs), None)
            if found is None or (found.create_revision, found.version) != (lead.create_revision, self._version + 1):
                raise self._lose("another coordinator has taken over, or its lease has ended")
        self._version += 1

    def _lose(self, why: str) -> UnavailableError:
        """Sets ``lost``, and returns it."""
        if self.lost is None:
            self.lost = UnavailableError(
                f"this coordinator leads no longer: {why}: it stops; start it again, and it waits until it can lead"
            )
            self.when_lost()
        return self.lost

    def _renew(self) -> None:
        """Renews the lease until the store is closed. Runs in a thread."""
        pause_s = self._lease_s / _RENEWALS
        while not self._closed.wait(pause_s) and self.lost is None:
            sent_s = time.monotonic()
            left_s = self._ends_s - sent_s
            if left_s <= 0:
                self._lose(f"{self._etcd.name} has not renewed its lease for {self._lease_s:g} s")
                return
            try:
                ttl_s = self._etcd.keep_alive(self._leader.lease, min(1.0, left_s))
            except ShardwellError as error:
                level = logging.DEBUG if pause_s == _PAUSE_S else logging.WARNING  # the first of several failures
                logger.log(level, "the lease of this coordinator was not renewed, %.1f s are left: %s", left_s, error)
                pause_s = _PAUSE_S
                continue
            if ttl_s <= 0:
                self._lose("its lease has ended")
                return
            self._ends_s, pause_s = sent_s + ttl_s, self._lease_s / _RENEWALS


def _key(prefix: str, *names: str) -> bytes:
    return "/".join((prefix, *names)).encode()


def _leader_key(prefix: str) -> bytes:
    return _key(prefix, "leader")


def _row_key(prefix: str, table: str, columns: Sequence[object]) -> bytes:
    """Returns the key of a row, or the start of the keys of all rows with these first columns."""
    return _key(prefix, "rows", table, *(quote(str(column), safe="") for column in columns), "")


def _part(index: int) -> bytes:
    """Returns the last part of a key of a row. Parts are in the order of their numbers."""
    return b"%06d" % index


def _count_parts(value: bytes | None) -> int:
    return 0 if value is None else math.ceil(len(value) / PART_BYTES)


def _encode(row: Values) -> bytes:
    return json.dumps(row, default=_encode_bytes, separators=(",", ":")).encode()


def _encode_bytes(value: object) -> dict[str, str]:
    assert isinstance(value, bytes), value
    return {"base64": b64encode(value).decode()}


def _decode(value: bytes) -> Any:
    return tuple(json.loads(value, object_hook=lambda found: b64decode(found["base64"])))
