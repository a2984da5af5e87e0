#!/usr/bin/env python3
"""Runs grpcurl on the cluster of docker compose, with its certificate and a new token of an operator.

The arguments are those of grpcurl. The address is the coordinator's, unless it is given as HOST:PORT:

  docker compose run --rm grpcurl list
  docker compose run --rm grpcurl -d '{"run": "gpt"}' shardwell_wire.v1.CoordinatorService/DescribeRun
  docker compose run --rm grpcurl shardwell-shard-2:50052 shardwell_wire.v1.ShardService/DescribeServer
"""

import os
import re
import subprocess
import sys

_SWITCHES = {
    "-v",
    "-vv",
    "-emit-defaults",
    "-msg-template",
    "-use-reflection",
    "-allow-unknown-fields",
    "-format-error",
}
"""Options of grpcurl without a value."""


def divide(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Returns the options with their values, and the other arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-"):
        name, equals, _ = arguments[at].replace("--", "-", 1).partition("=")
        at += 1 if equals or name in _SWITCHES else 2
    return arguments[:at], arguments[at:]


def main() -> None:
    """Replaces this process by grpcurl."""
    options, words = divide(sys.argv[1:])
    if not words or {"-help", "--help", "-h"} & set(options):
        sys.exit(__doc__.partition("\n")[2].strip())
    address = words.pop(0) if re.fullmatch(r"[\w.-]+:\d+", words[0]) else os.environ["SHARDWELL_ADDRESS"]
    token = subprocess.run(["shardwell", "token"], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    connection = ["-cacert", os.environ["SHARDWELL_TLS_CA"], "-authority", os.environ["SHARDWELL_TLS_SERVER_NAME"]]
    os.execvp("grpcurl", ["grpcurl", *connection, "-H", token, *options, address, *words])


if __name__ == "__main__":
    main()
