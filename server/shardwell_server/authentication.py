"""Authentication: rejects rpcs whose token does not prove a role that may call them.

Health checks and reflection need no token, because container probes have none. They reveal only that a server runs and
which rpcs it has.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from shardwell_server import encryption
from shardwell_server.authorization import CALLER, check_role
from shardwell_server.rpc import abort
from shardwell_wire.credentials import NO_CREDENTIALS, TOKEN_FILE_VARIABLE, Credentials, read_key_file, token_in
from shardwell_wire.errors import AccessError, ShardwellError, UnauthenticatedError
from shardwell_wire.tokens import ClusterKey

OPEN_SERVICES = frozenset({health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME})
"""Services that need no token."""

_ADVICE = (
    f"set the file with the cluster's key or a token in {TOKEN_FILE_VARIABLE} or --token-file. The user who started a "
    "local cluster on this host gets the header for grpcurl -H from `shardwell token --address HOST:PORT`"
)


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects an rpc without a valid token, or with a wrong role, before any byte of a message is read.

    Args:
        key: Key of the cluster.
    """

    def __init__(self, key: ClusterKey) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of an rpc. Called by gRPC when the metadata has arrived, in the task of the rpc."""
        path = handler_call_details.method
        if path.strip("/").partition("/")[0] not in OPEN_SERVICES:
            try:
                self.admit(path, handler_call_details.invocation_metadata or ())
            except UnauthenticatedError as error:
                return _refusal(path, UnauthenticatedError(f"{error}: {_ADVICE}", **error.data))
            except AccessError as error:
                return _refusal(path, error)
        return await continuation(handler_call_details)

    def admit(self, path: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Notes the caller of an rpc for the current task.

        Raises:
            UnauthenticatedError: The rpc carries no valid token.
            AccessError: The caller's role may not call the rpc.
        """
        caller = self._key.verify(token_in(metadata))
        CALLER.set(caller)
        check_role(caller, path)


def interceptors(key: ClusterKey | None) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors for a cluster's key. A cluster without one accepts every rpc."""
    return [] if key is None else [Authentication(key)]


def _refusal(path: str, reason: ShardwellError) -> grpc.RpcMethodHandler:
    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await abort(context, path, reason)

    # A stream handler works for every kind of rpc, and does not read a message before it runs.
    return grpc.stream_stream_rpc_method_handler(refuse)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--token-file``."""
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get(TOKEN_FILE_VARIABLE, ""),
        help="file with the cluster's key, readable by this user only; every rpc must carry a token that was made with "
        f"it ({TOKEN_FILE_VARIABLE}, default: none, all rpcs are accepted)",
    )


def from_arguments(arguments: argparse.Namespace) -> Credentials:
    """Returns the key in ``--token-file`` and the server's TLS. Raises UsageError if a file cannot be used."""
    credentials = read_key_file(arguments.token_file) if arguments.token_file else NO_CREDENTIALS
    return replace(credentials, tls=encryption.from_arguments(arguments))
