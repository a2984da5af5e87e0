"""Binds a servicer to a gRPC server: decode, call, encode, and errors as statuses.

Handlers receive raw bytes from grpc and decode them here. Bytes that cannot be decoded therefore get INVALID_ARGUMENT,
where grpcio itself returns INTERNAL, and streamed messages stay bytes for ``chunk_streams``. ``RequestLog`` rejects a
different request under a request id that was used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
import grpc.aio
import xxhash
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from shardwell_server.serving import authorization, json_log, metrics
from shardwell_server.serving.authorization import CALLER, check_request
from shardwell_server.serving.limits import MAX_LOGGED_PER_S, Rate, RequestLimits
from shardwell_wire.errors import (
    STATUS_DETAILS_KEY,
    AccessError,
    DeadlineError,
    DuplicateError,
    InternalError,
    InvalidRequestError,
    ShardwellError,
    StaleEpochError,
    TooManyRequestsError,
    UnauthenticatedError,
    UnavailableError,
    VersionGoneError,
    to_status_details,
    wire_message,
)
from shardwell_wire.model.names import RunIdentity, check_names
from shardwell_wire.security.tokens import Identity
from shardwell_wire.v1 import common_pb2

logger = logging.getLogger(__name__)

MAX_WAIT_S = 60.0
"""Maximum time that a handler waits if the caller sets no deadline."""

DEADLINE_MARGIN_S = 0.2
"""A handler stops waiting this long before the caller's deadline, so that the caller receives the reason, also from a
busy host."""


def _no_id(name: str) -> str:
    return ""


class CallContext:
    """What handlers need to know about an rpc on a call connection, as ``grpc.aio.ServicerContext`` has it.

    Args:
        peer: Address of the caller in grpc's format.
        clock: Returns seconds.
        timeout_s: Seconds until the caller's deadline.
    """

    __slots__ = ("_clock", "_deadline", "_peer")

    def __init__(self, peer: str, clock: Callable[[], float], timeout_s: float) -> None:
        self._peer, self._clock, self._deadline = peer, clock, clock() + timeout_s

    def peer(self) -> str:
        """Returns the address of the caller in grpc's format."""
        return self._peer

    def time_remaining(self) -> float:
        """Returns the seconds until the caller's deadline. A context of grpc returns None if there is none."""
        return self._deadline - self._clock()


RpcContext: TypeAlias = "CallContext | grpc.aio.ServicerContext"


@dataclass(frozen=True, slots=True)
class Call:
    """The rpc that a servicer method handles."""

    method: str
    context: RpcContext
    caller: Identity | None = field(default_factory=CALLER.get)
    """Who called. None: the cluster admits every caller."""
    run_id_of: Callable[[str], str] = _no_id
    """Returns the id of the run that has a name now. Empty: there is none."""

    def check(self, request: Message) -> None:
        """Admits a request, or the header of a stream. Raises AccessError if the caller may not send it."""
        json_log.note_request(self.method, self.peer, request)
        if self.caller is not None:
            check_request(self.caller, self.method, request, self.run_id_of)
        authorization.record_admitted(self.method, self.peer, request)

    def sees(self, run: RunIdentity) -> bool:
        """Returns whether a list for the caller may contain a run."""
        return self.caller is None or not self.caller.run or run == RunIdentity(self.caller.run, self.caller.run_id)

    @property
    def peer(self) -> str:
        """Address of the caller in grpc's format."""
        return str(self.context.peer())

    def remaining_s(self, wanted_s: float | None = None) -> float:
        """Returns how long the handler may wait: until the deadline or ``MAX_WAIT_S``, at most ``wanted_s``."""
        deadline = self.context.time_remaining()
        limits = [MAX_WAIT_S]
        if deadline is not None:
            limits = [max(0.0, deadline - DEADLINE_MARGIN_S)]
        if wanted_s is not None:
            limits.append(max(0.0, wanted_s))
        return min(limits)


_ORDINARY = (DeadlineError, StaleEpochError, UnavailableError, VersionGoneError)
"""Answers that belong to a run without faults: a poll that ends, a membership that ends, weights that are newer."""

_REFUSALS = (AccessError, TooManyRequestsError, UnauthenticatedError)
"""Errors of callers that may not do what they ask for."""

_MakeCall = Callable[[str, RpcContext], Call]

UnaryRpc = Callable[[bytes, RpcContext], Awaitable[bytes]]
"""Handles a unary rpc: takes and returns an encoded message. Raises the errors of the servicer."""
StreamingRpc = Callable[[bytes, RpcContext], AsyncIterator[bytes]]
"""Handles an rpc with a streamed answer in the same way."""

_logged = Rate(MAX_LOGGED_PER_S, MAX_LOGGED_PER_S)
"""Limits the lines about rejected requests in the log of this process."""


def add_service(
    server: grpc.aio.Server, descriptor: ServiceDescriptor, servicer: Any, limits: RequestLimits | None = None
) -> None:
    """Registers every rpc of a service.

    Args:
        server: A server that has not been started.
        descriptor: The service, from the generated module's ``DESCRIPTOR``.
        servicer: Object with one method ``(request, call)`` per rpc, of the same name. A unary request is a message, a
            streamed one an ``AsyncIterator[bytes]``. A unary response is returned as a message, a streamed one is
            yielded as bytes or messages. A method that takes a stream passes its header to ``call.check``. The object
            may have a method ``run_id_of``, see ``Call.run_id_of``.
        limits: Limits of callers and runs. None: those of this package.
    """
    handlers, limits = {}, limits or RequestLimits()
    make_call = partial(Call, run_id_of=getattr(servicer, "run_id_of", _no_id))
    unary = unary_rpcs(descriptor, servicer, limits)
    for method in descriptor.methods:
        implementation = getattr(servicer, method.name)
        path = f"/{descriptor.full_name}/{method.name}"
        if method.client_streaming and not method.server_streaming:
            handlers[method.name] = grpc.stream_unary_rpc_method_handler(
                _stream_unary(path, implementation, make_call, limits)
            )
        elif method.server_streaming and not method.client_streaming:
            handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                _unary_stream(path, method, implementation, make_call, limits, abort)
            )
        elif not method.client_streaming:
            handlers[method.name] = grpc.unary_unary_rpc_method_handler(_unary_unary(path, unary[path]))
        else:
            raise NotImplementedError(f"{path}: bidirectional streams are not supported")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(descriptor.full_name, handlers),))


def unary_rpcs(descriptor: ServiceDescriptor, servicer: Any, limits: RequestLimits) -> dict[str, UnaryRpc]:
    """Returns the handlers of a service's unary rpcs by path. Arguments as those of ``add_service``."""
    make_call = partial(Call, run_id_of=getattr(servicer, "run_id_of", _no_id))
    paths = {f"/{descriptor.full_name}/{method.name}": method for method in descriptor.methods}
    return {
        path: _unary_rpc(path, method, getattr(servicer, method.name), make_call, limits)
        for path, method in paths.items()
        if not (method.client_streaming or method.server_streaming)
    }


def _decode(method: MethodDescriptor, data: bytes) -> Message:
    try:
        message: Message = GetMessageClass(method.input_type).FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"the request cannot be decoded as {method.input_type.full_name}") from error
    check_names(message)
    return message


def _unary_rpc(
    path: str,
    method: MethodDescriptor,
    implementation: Callable[[Any, Call], Awaitable[Message]],
    make_call: _MakeCall,
    limits: RequestLimits,
) -> UnaryRpc:
    durations = metrics.rpc_durations(path)

    async def respond(data: bytes, context: RpcContext) -> bytes:
        call, start_s = make_call(path, context), time.perf_counter()
        async with limits.request(call.caller, call.peer, len(data)):
            request = _decode(method, data)
            call.check(request)
            answer = (await implementation(request, call)).SerializeToString()
        durations.add(time.perf_counter() - start_s)
        return answer

    return respond


def _unary_unary(path: str, respond: UnaryRpc) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return await respond(data, context)
        except Exception as error:
            await abort(context, path, error)

    return handle


def streaming_rpcs(descriptor: ServiceDescriptor, servicer: Any, limits: RequestLimits) -> dict[str, StreamingRpc]:
    """Returns the handlers of a service's rpcs that answer one request with a stream, as ``unary_rpcs`` does."""
    make_call = partial(Call, run_id_of=getattr(servicer, "run_id_of", _no_id))
    paths = {f"/{descriptor.full_name}/{method.name}": method for method in descriptor.methods}
    return {
        path: _unary_stream(path, method, getattr(servicer, method.name), make_call, limits, _raise)
        for path, method in paths.items()
        if method.server_streaming and not method.client_streaming
    }


async def _raise(context: RpcContext, path: str, error: Exception) -> NoReturn:
    raise error


def _stream_unary(
    path: str,
    implementation: Callable[[AsyncIterator[bytes], Call], Awaitable[Message]],
    make_call: _MakeCall,
    limits: RequestLimits,
) -> Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[bytes]]:
    durations = metrics.rpc_durations(path)

    async def handle(stream: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        try:
            call, start_s = make_call(path, context), time.perf_counter()
            async with limits.request(call.caller, call.peer):
                answer = (await implementation(stream, call)).SerializeToString()
            durations.add(time.perf_counter() - start_s)
            return answer
        except Exception as error:
            await abort(context, path, error)

    return handle


def _unary_stream(
    path: str,
    method: MethodDescriptor,
    implementation: Callable[[Any, Call], AsyncIterator[bytes | Message]],
    make_call: _MakeCall,
    limits: RequestLimits,
    fail: Callable[[Any, str, Exception], Awaitable[NoReturn]],
) -> StreamingRpc:
    durations = metrics.rpc_durations(path)

    async def handle(data: bytes, context: RpcContext) -> AsyncIterator[bytes]:
        try:
            call, start_s = make_call(path, context), time.perf_counter()
            async with limits.request(call.caller, call.peer, len(data)):
                request = _decode(method, data)
                call.check(request)
                async for message in implementation(request, call):
                    yield message if isinstance(message, bytes) else message.SerializeToString()
            durations.add(time.perf_counter() - start_s)
        except Exception as error:
            await fail(context, path, error)

    return handle


def reported_error(path: str, error: Exception, peer: str) -> ShardwellError:
    """Returns the error to send to the caller. A defect is logged, and the caller gets a fixed text.

    Args:
        path: Name of the rpc.
        error: Error that the handler raised.
        peer: Address of the caller, for the log.
    """
    metrics.count_failed(path, _status_of(error).name)
    if isinstance(error, AccessError | TooManyRequestsError):
        authorization.record_refused(path, peer, error)
    if not isinstance(error, ShardwellError) or error.status is None:
        logger.error("%s from %s failed", path, peer, exc_info=error)
        return InternalError(f"{path}: internal error; the server's log has the details")
    if isinstance(error, _ORDINARY):
        logger.debug("%s from %s answered: %s: %s", path, peer, type(error).__name__, wire_message(error))
    elif _logged.admit(""):
        level = logging.WARNING if isinstance(error, _REFUSALS) else logging.INFO
        logger.log(level, "%s from %s rejected: %s: %s", path, peer, type(error).__name__, wire_message(error))
    return error


def _status_of(error: Exception) -> grpc.StatusCode:
    known = error.status if isinstance(error, ShardwellError) else None
    return known or grpc.StatusCode.INTERNAL


async def abort(context: grpc.aio.ServicerContext, path: str, error: Exception) -> NoReturn:
    """Ends the rpc with the status of ``error``."""
    if isinstance(error, grpc.aio.AbortError | asyncio.CancelledError):
        raise error
    error = reported_error(path, error, str(context.peer()))
    await context.abort(_status_of(error), wire_message(error), ((STATUS_DETAILS_KEY, to_status_details(error)),))
    raise AssertionError("abort returned")


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
