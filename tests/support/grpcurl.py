"""Runs ``grpcurl``, which the development packages install."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwell.find_credentials import find_credentials
from shardwell_wire.security.credentials import Credentials

TIMEOUT_S = 20.0


class GrpcurlError(Exception):
    """The call failed. The text has the status and its message."""


class Grpcurl:
    """grpcurl at one address.

    Args:
        address: host:port.
        credentials: A token, and the TLS of the connection. None: those of this user's local cluster.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._credentials = find_credentials(address) if credentials is None else credentials

    def list(self) -> list[str]:
        """Returns the services: ``grpcurl ADDRESS list``."""
        return self._run(self._address, "list").split()

    def describe(self, service: str) -> list[str]:
        """Returns the rpcs of a service: ``grpcurl ADDRESS describe SERVICE``."""
        return re.findall(r"^\s*rpc (\w+)", self._run(self._address, "describe", service), re.MULTILINE)

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the responses of ``grpcurl -d REQUEST ADDRESS SERVICE/RPC``, with proto field names.

        Raises:
            GrpcurlError: The status is not OK.
        """
        text = self._run("-emit-defaults", "-d", json.dumps(request), self._address, method)
        decoder, responses = json.JSONDecoder(), []
        while text := text.lstrip():
            response, end = decoder.raw_decode(text)
            responses.append({_snake_case(name): value for name, value in response.items()})
            text = text[end:]
        return responses

    def _run(self, *arguments: str) -> str:
        tls = self._credentials.tls
        command = [str(Path(sys.executable).with_name("grpcurl")), "-max-time", str(TIMEOUT_S)]
        command += ["-plaintext"] if tls is None else ["-cacert", tls.options.ca]
        if header := self._credentials.header:
            command += ["-H", header]
        command += arguments
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * TIMEOUT_S)
        if done.returncode != 0:
            raise GrpcurlError(done.stderr)
        return done.stdout


def _snake_case(name: str) -> str:
    """Converts a name to snake case. grpcurl prints JSON names or proto names, depending on the descriptors."""
    return re.sub(r"(?<=[a-z])[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
