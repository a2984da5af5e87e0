"""Log of recent request ids. Rejects a different request under a used id."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import xxhash
from google.protobuf.message import Message

from shardwell_wire.errors import DuplicateError, InvalidRequestError
from shardwell_wire.v1 import common_pb2

MAX_REQUEST_ID_LENGTH = 128
"""Maximum length of a request id. The log stores every id."""


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError if a request id is too long to be stored."""
    if len(request_id) > MAX_REQUEST_ID_LENGTH:
        raise InvalidRequestError(
            f"request_id has {len(request_id)} characters, expected at most {MAX_REQUEST_ID_LENGTH}"
        )


class RequestLog:
    """The last request ids and fingerprints of their requests. Used on one event loop or in one thread.

    Args:
        capacity: Number of ids to keep. The least recently used id is removed first.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._fingerprints: OrderedDict[str, Hashable] = OrderedDict()

    def check(self, request_id: str, fingerprint: Hashable) -> bool:
        """Records a request.

        Args:
            request_id: Empty: the request is not checked.
            fingerprint: Small value that is equal for a retry and different for another request.

        Returns:
            True if the request is a retry.

        Raises:
            DuplicateError: The id was used for another request.
            InvalidRequestError: The id is too long.
        """
        if not request_id:
            return False
        check_request_id(request_id)
        known = self._fingerprints.get(request_id)
        if known is not None and known != fingerprint:
            raise DuplicateError(
                f"request id {request_id!r} was used for another request: use a new id for every request, and the same "
                "id only for a retry",
                request_id=request_id,
            )
        self._fingerprints[request_id] = fingerprint
        self._fingerprints.move_to_end(request_id)
        if len(self._fingerprints) > self._capacity:
            self._fingerprints.popitem(last=False)
        return known is not None

    def check_content(self, method: str, context: common_pb2.RequestContext, content: Message) -> None:
        """Records a request by the digest of its content; raises as ``check`` does.

        Args:
            method: Name of the rpc.
            context: Context of the request. A request without an id is not recorded.
            content: Message that is equal in a retry.
        """
        if context.request_id:
            digest = xxhash.xxh3_128(content.SerializeToString(deterministic=True)).digest()
            self.check(context.request_id, (method, digest))
