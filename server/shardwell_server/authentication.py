"""Authentication: rejects rpcs without the cluster's token.

Health checks and reflection need no token, because container probes have none. They reveal only that a server runs and
which rpcs it has.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from shardwell_server import encryption
from shardwell_server.rpc import abort
from shardwell_wire.credentials import NO_CREDENTIALS, TOKEN_FILE_VARIABLE, Credentials, read_token_file
from shardwell_wire.errors import UnauthenticatedError

OPEN_SERVICES = frozenset({health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME})
"""Services that need no token."""

_ADVICE = (
    f"set the file with the cluster's token in {TOKEN_FILE_VARIABLE} or --token-file. The user who started a "
    "local cluster on this host gets the header for grpcurl -H from `shardwell token --address HOST:PORT`"
)


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Rejects an rpc without the cluster's token before any byte of a message is read.

    Args:
        credentials: Credentials of the cluster.
    """

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the handler of an rpc. Called by gRPC when the metadata has arrived."""
        path = handler_call_details.method
        if path.strip("/").partition("/")[0] not in OPEN_SERVICES:
            problem = self._credentials.problem(handler_call_details.invocation_metadata or ())
            if problem is not None:
                return _refusal(path, problem)
        return await continuation(handler_call_details)


def interceptors(credentials: Credentials) -> list[grpc.aio.ServerInterceptor]:
    """Returns the interceptors for a cluster's credentials. A cluster without a token accepts every rpc."""
    return [Authentication(credentials)] if credentials else []


def _refusal(path: str, problem: str) -> grpc.RpcMethodHandler:
    async def refuse(_: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await abort(context, path, UnauthenticatedError(f"{problem}: {_ADVICE}"))

    # A stream handler works for every kind of rpc, and does not read a message before it runs.
    return grpc.stream_stream_rpc_method_handler(refuse)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--token-file``."""
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get(TOKEN_FILE_VARIABLE, ""),
        help="file with the cluster's token, readable by this user only; every rpc must carry the token "
        f"({TOKEN_FILE_VARIABLE}, default: none, all rpcs are accepted)",
    )


def from_arguments(arguments: argparse.Namespace) -> Credentials:
    """Returns the credentials in ``--token-file`` and the server's TLS. Raises UsageError if a file cannot be used."""
    credentials = read_token_file(arguments.token_file) if arguments.token_file else NO_CREDENTIALS
    return replace(credentials, tls=encryption.from_arguments(arguments))
