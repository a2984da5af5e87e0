"""``shardwell-server health``: checks a server with the gRPC health protocol, such as in a container's probe."""

from __future__ import annotations

import argparse
import os
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardwell_wire.channel import open_channel
from shardwell_wire.credentials import TOKEN_FILE_VARIABLE, read_token_file
from shardwell_wire.tls import Tls
from shardwell_wire.tls_arguments import add_tls_arguments, tls_options
from shardwell_wire.tls_problems import tls_problem


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``health`` subcommand."""
    parser = subparsers.add_parser(
        "health",
        help="check the health of a server",
        description="Exits with 0 if the server reports SERVING over the gRPC health protocol, otherwise with 1.",
        epilog="example:\n  shardwell-server health localhost:50051",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument(
        "--service", default="", help="such as shardwell_wire.v1.ShardService (default: the server as a whole)"
    )
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="seconds to wait (default: 2)")
    parser.add_argument(
        "--token-file",
        metavar="PATH",
        default=os.environ.get(TOKEN_FILE_VARIABLE, ""),
        help="file with the cluster's key or a token, for a server that requires one for health checks "
        f"({TOKEN_FILE_VARIABLE})",
    )
    add_tls_arguments(parser)
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server health``; prints the status."""
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    options = tls_options(arguments)
    tls = None if options is None else Tls(options)
    with open_channel(arguments.address, tls) as channel:
        try:
            response = _check(channel, request, arguments)
        except grpc.RpcError as error:
            problem = tls_problem(arguments.address, tls) or f"{error.code().name}: {error.details()}"
            print(f"{arguments.address}: {problem}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1


def _check(
    channel: grpc.Channel, request: health_pb2.HealthCheckRequest, arguments: argparse.Namespace
) -> health_pb2.HealthCheckResponse:
    """Sends the token only to a server that requires one."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        return stub.Check(request, timeout=arguments.timeout)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED or not arguments.token_file:
            raise
    return stub.Check(request, timeout=arguments.timeout, metadata=read_token_file(arguments.token_file).metadata)
