"""Remembers recent request ids, so that another request under a used id is refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import xxhash
from google.protobuf.message import Message

from shardwell_wire.errors import DuplicateError, InvalidRequestError
from shardwell_wire.v1 import common_pb2

MAX_REQUEST_ID_LENGTH = 128
"""Longer ids are refused: the log keeps every id it sees."""


class RequestLog:
    """The last request ids seen, each with what it was used for. For one event loop or thread.

    Args:
        capacity: Ids kept; the least recently seen is forgotten first.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._fingerprints: OrderedDict[str, Hashable] = OrderedDict()

    def check(self, request_id: str, fingerprint: Hashable) -> bool:
        """Notes a request.

        Args:
            request_id: Empty: the caller wants no check.
            fingerprint: Equal for a retry, different for another request; small, for it is kept.

        Returns:
            Whether this is a repetition.

        Raises:
            DuplicateError: The id was used for another request.
            InvalidRequestError: The id is too long.
        """
        if not request_id:
            return False
        if len(request_id) > MAX_REQUEST_ID_LENGTH:
            raise InvalidRequestError(
                f"request_id has {len(request_id)} characters; at most {MAX_REQUEST_ID_LENGTH} are allowed"
            )
        known = self._fingerprints.get(request_id)
        if known is not None and known != fingerprint:
            raise DuplicateError(
                f"request id {request_id!r} was used for another request: take a new id for every request, "
                "and the same one only to repeat it",
                request_id=request_id,
            )
        self._fingerprints[request_id] = fingerprint
        self._fingerprints.move_to_end(request_id)
        if len(self._fingerprints) > self._capacity:
            self._fingerprints.popitem(last=False)
        return known is not None

    def check_content(self, method: str, context: common_pb2.RequestContext, content: Message) -> None:
        """Notes a request by what it says; raises as ``check`` does.

        Args:
            method: Name of the rpc.
            context: Of the request; one without an id is not noted.
            content: What a repetition has in common with it.
        """
        if context.request_id:
            digest = xxhash.xxh3_128(content.SerializeToString(deterministic=True)).digest()
            self.check(context.request_id, (method, digest))
