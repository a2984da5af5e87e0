"""``shardwell-server health``: checks a server with the gRPC health protocol, such as in a container's probe."""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardwell_wire.channel import open_channel
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
    add_tls_arguments(parser)
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server health``; prints the status."""
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    options = tls_options(arguments)
    tls = None if options is None else Tls(options)
    with open_channel(arguments.address, tls) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout)
        except grpc.RpcError as error:
            problem = tls_problem(arguments.address, tls) or f"{error.code().name}: {error.details()}"
            print(f"{arguments.address}: {problem}", file=sys.stderr)
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    return 0 if response.status == health_pb2.HealthCheckResponse.SERVING else 1
