"""The options of a server's TLS, and what a server requires before it listens on a network.

Authentication: rejects rpcs whose token does not prove a role that may call them.

By default, health checks and reflection need no token, because container probes have none. They reveal only that a
server runs and which rpcs it has. ``--without-token`` requires tokens of any role for them, too.
"""

from __future__ import annotations

import argparse
import inspect
import ipaddress
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from shardwell_server.serving import limits
from shardwell_server.serving.authorization import CALLER, check_role
from shardwell_server.serving.rpc import abort
from shardwell_wire.errors import AccessError, ShardwellError, UnauthenticatedError, UsageError
from shardwell_wire.security.credentials import (
    NO_CREDENTIALS,
    TOKEN_FILE_VARIABLE,
    Credentials,
    read_key_file,
    token_in,
)
from shardwell_wire.security.tls import (
    CERT_VARIABLE,
    ENCRYPT_CHOICES,
    ENCRYPT_VARIABLE,
    KEY_VARIABLE,
    Encryption,
    Tls,
    add_tls_arguments,
    tls_options,
)
from shardwell_wire.security.tokens import ClusterKey, Identity

logger = logging.getLogger(__name__)

_INSECURE_VARIABLE = "SHARDWELL_INSECURE"
_REQUIRE_VARIABLE = "SHARDWELL_TLS_REQUIRE_CLIENT_CERT"


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of TLS."""
    env = os.environ.get
    add_tls_arguments(parser)
    parser.add_argument(
        "--tls-require-client-cert",
        action=argparse.BooleanOptionalAction,
        default=env(_REQUIRE_VARIABLE, "") == "1",
        help=f"accept only clients with a certificate of --tls-ca (mutual TLS; {_REQUIRE_VARIABLE}=1)",
    )
    parser.add_argument(
        "--encrypt",
        choices=ENCRYPT_CHOICES,
        default=env(ENCRYPT_VARIABLE, Encryption.OFF_HOST.text),
        help=f"with TLS: connections of the socket transport that are encrypted; rpcs always are ({ENCRYPT_VARIABLE}, "
        "default %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action=argparse.BooleanOptionalAction,
        default=env(_INSECURE_VARIABLE, "") == "1",
        help=f"listen on a network although TLS or the token is missing ({_INSECURE_VARIABLE}=1)",
    )


def insecurity(host: str, credentials: Credentials, arguments: argparse.Namespace) -> str:
    """Returns what a server lacks although it listens on a network, such as ``no TLS``. Empty: nothing.

    Args:
        host: Host to listen on.
        credentials: Credentials of the server.
        arguments: Its options.

    Raises:
        UsageError: Something is missing, and ``--insecure`` is not given.
    """
    missing = [*([] if credentials.tls else ["no TLS"]), *([] if credentials else ["no token"])]
    if not missing or _is_loopback(host):
        return ""
    lacks = " and ".join(missing)
    if not arguments.insecure:
        raise UsageError(
            f"--listen {host} is not a loopback address, and the server has {lacks}: anyone in the network could read "
            "or change its runs. Set --tls-ca, --tls-cert and --tls-key (`shardwell-server certs` makes them) and "
            f"--token-file, or accept this with --insecure ({_INSECURE_VARIABLE}=1)"
        )
    return lacks


def warn(bind: str, insecure: str) -> None:
    """Logs at the start of a server what ``insecurity`` returned."""
    if insecure:
        logger.warning("INSECURE: the server listens on %s with %s", bind, insecure)


def _is_loopback(host: str) -> bool:
    """Returns whether all addresses of a host are loopback addresses. A host without an address cannot be bound."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)


def tls_from_arguments(arguments: argparse.Namespace) -> Tls | None:
    """Returns the TLS of a server. None: it has none. Raises UsageError if an option or a file is invalid."""
    options = tls_options(arguments)
    if options is None:
        if arguments.tls_require_client_cert:
            raise UsageError("--tls-require-client-cert needs --tls-ca, --tls-cert and --tls-key")
        return None
    if not options.cert:
        raise UsageError(
            f"a server with TLS needs a certificate: set --tls-cert ({CERT_VARIABLE}) and --tls-key ({KEY_VARIABLE})"
        )
    return Tls(replace(options, encrypt=arguments.encrypt), require_client_cert=arguments.tls_require_client_cert)


WITHOUT_TOKEN_VARIABLE = "SHARDWELL_WITHOUT_TOKEN"

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
        key: Key of the cluster.
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


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--token-file`` and ``--without-token``."""
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get(TOKEN_FILE_VARIABLE, ""),
        help="file with the cluster's key, readable by this user only; every rpc must carry a token that was made with "
        f"it ({TOKEN_FILE_VARIABLE}, default: none, all rpcs are accepted)",
    )
    parser.add_argument(
        "--without-token",
        metavar="NAMES",
        type=_parse_names,
        default=os.environ.get(WITHOUT_TOKEN_VARIABLE, ",".join(sorted(ALL_STANDARD))),
        help="services that need no token although the server has a key: health, reflection, both (with a comma) or "
        f"none. With none, container probes need a token ({WITHOUT_TOKEN_VARIABLE}, default %(default)s)",
    )


def _parse_names(text: str) -> str:
    names = {name.strip() for name in text.split(",")}
    if names != {"none"} and not names <= ALL_STANDARD:
        raise argparse.ArgumentTypeError(f"expected health, reflection, both with a comma, or none, got {text!r}")
    return ",".join(sorted(names))


def without_token(arguments: argparse.Namespace) -> frozenset[str]:
    """Returns the names in ``--without-token``."""
    return ALL_STANDARD & set(arguments.without_token.split(","))


def from_arguments(arguments: argparse.Namespace) -> Credentials:
    """Returns the key in ``--token-file`` and the server's TLS. Raises UsageError if a file cannot be used."""
    credentials = read_key_file(arguments.token_file) if arguments.token_file else NO_CREDENTIALS
    return replace(credentials, tls=tls_from_arguments(arguments))
