"""Calls an etcd cluster over its gRPC API: keys, transactions and leases."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import grpc

from shardwell_wire.connection.channel import open_channel
from shardwell_wire.errors import ConflictError, NotFoundError, UnavailableError
from shardwell_wire.security.tls import Tls
from shardwell_wire.v1 import etcd_pb2

logger = logging.getLogger(__name__)

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
        addresses: host:port of the members.
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
