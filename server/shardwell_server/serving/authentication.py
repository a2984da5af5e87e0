"""Authentication: rejects rpcs whose token does not prove a role that may call them.

By default, health checks and reflection need no token, because container probes have none. They reveal only that a
server runs and which rpcs it has. ``--without-token`` requires tokens of any role for them, too.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from shardwell_server.serving import limits
from shardwell_server.serving.authorization import CALLER, check_role
from shardwell_server.serving.rpc import abort
from shardwell_wire.errors import AccessError, ShardwellError, UnauthenticatedError
from shardwell_wire.security.credentials import TOKEN_FILE_VARIABLE, token_in
from shardwell_wire.security.tokens import ClusterKey, Identity

_HEALTH, _REFLECTION = "health", "reflection"
_STANDARD_SERVICES = {
    health_pb2.DESCRIPTOR.services_by_name["Health"].full_name: _HEALTH,
    reflection.SERVICE_NAME: _REFLECTION,
    # Not served. grpcurl tries it first, and takes only UNIMPLEMENTED for an answer.
    reflection.SERVICE_NAME.replace("v1alpha", "v1"): _REFLECTION,
}
"""Services of gRPC, by their names in ``--without-token``. They neither read nor change a run."""

ALL_STANDARD = frozenset(_STANDARD_SERVICES.values())

_ADVICE = (
    f"set the file with the cluster's key or a token in {TOKEN_FILE_VARIABLE} or --token-file. The user who started a "
    "local cluster on this host gets the header for grpcurl -H from `shardwell token --address HOST:PORT`"
)


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects an rpc without a valid token, or with a wrong role, before any byte of a message is read.

    Args:
        without_token: Names of the services that need no token, such as ``health``.
    """

    def __init__(self, key: ClusterKey, without_token: Collection[str] = ALL_STANDARD) -> None:
        self._key = key
        self._open = {service for service, name in _STANDARD_SERVICES.items() if name in without_token}
        self._refusals, self._open_calls = limits.refusals(), limits.open_calls()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of an rpc. Called by gRPC when the metadata has arrived, in the task of the rpc."""
        path = handler_call_details.method
        if _service_of(path) not in self._open:
            try:
                self.admit(path, handler_call_details.invocation_metadata or ())
            except UnauthenticatedError as error:
                return self._refusal(path, UnauthenticatedError(f"{error}: {_ADVICE}", **error.data))
            except AccessError as error:
                return self._refusal(path, error)
            return await continuation(handler_call_details)
        return _counted(await continuation(handler_call_details), self._open_calls)

    def admit(self, path: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Notes the caller of an rpc for the current task.

        Raises:
            UnauthenticatedError: The rpc carries no valid token.
            AccessError: The caller's role may not call the rpc.
        """
        check_caller(self._key, path, token_in(metadata))

    def _refusal(self, path: str, reason: ShardwellError) -> grpc.RpcMethodHandler:
        async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
            self._refusals.count(str(context.peer()))
            await abort(context, path, reason)

        # A stream handler works for every kind of rpc, and does not read a message before it runs.
        return grpc.stream_stream_rpc_method_handler(refuse)


def check_caller(key: ClusterKey, path: str, token: str) -> Identity:
    """Returns the caller that a token proves, and notes it for the current task.

    Raises:
        UnauthenticatedError: The token is not valid.
        AccessError: The caller's role may not call the rpc.
    """
    caller = key.verify(token)
    CALLER.set(caller)
    if _service_of(path) not in _STANDARD_SERVICES:
        check_role(caller, path)
    return caller


def _service_of(path: str) -> str:
    return path.strip("/").partition("/")[0]


def interceptors(
    key: ClusterKey | None, without_token: Collection[str] = ALL_STANDARD
) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors for a cluster's key. A cluster without one accepts every rpc."""
    return [] if key is None else [Authentication(key, without_token)]


def _counted(handler: grpc.RpcMethodHandler | None, calls: limits.Unproven) -> grpc.RpcMethodHandler | None:
    """Returns a handler that counts its calls. None: the rpc does not exist."""
    if handler is None:
        return None
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind, handle = next((kind, found) for kind in kinds if (found := getattr(handler, kind)) is not None)

    async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with calls.handling(str(context.peer())):
            async for response in handle(request, context):
                yield response

    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with calls.handling(str(context.peer())):
            return await handle(request, context)

    # gRPC calls a handler by the kind of its function.
    return handler._replace(**{kind: stream if inspect.isasyncgenfunction(handle) else call})
