"""``grpcurl``: the installed program, or a Python substitute.

The substitute does not use Shardwell's stubs. Like grpcurl, it reads services and descriptors by server reflection, and
takes and prints JSON.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from shardwell.find_credentials import find_credentials
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.security.credentials import Credentials

TIMEOUT_S = 20.0


class Grpcurl(Protocol):
    """The calls of grpcurl that the tests use, at one address."""

    def list(self) -> list[str]:
        """Returns the services: ``grpcurl ADDRESS list``."""
        ...

    def describe(self, service: str) -> list[str]:
        """Returns the rpcs of a service: ``grpcurl ADDRESS describe SERVICE``."""
        ...

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the responses of ``grpcurl -d REQUEST ADDRESS SERVICE/RPC``, with proto field names.

        Raises:
            GrpcurlError: The status is not OK.
        """
        ...


class GrpcurlError(Exception):
    """The call failed. The text has the status and its message."""


def at(address: str, credentials: Credentials | None = None) -> Grpcurl:
    """Returns the real grpcurl if it is on PATH, else the Python substitute.

    Args:
        address: host:port.
        credentials: A token, and the TLS of the connection. None: those of this user's local cluster.
    """
    kind = RealGrpcurl if shutil.which("grpcurl") else ReflectionClient
    return kind(address, find_credentials(address) if credentials is None else credentials)


class RealGrpcurl:
    """Runs the real program."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._address, self._credentials = address, credentials

    def list(self) -> list[str]:
        return self._run(self._address, "list").split()

    def describe(self, service: str) -> list[str]:
        return re.findall(r"^\s*rpc (\w+)", self._run(self._address, "describe", service), re.MULTILINE)

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        text = self._run("-emit-defaults", "-d", json.dumps(request), self._address, method)
        decoder, responses = json.JSONDecoder(), []
        while text := text.lstrip():
            response, end = decoder.raw_decode(text)
            responses.append({_snake_case(name): value for name, value in response.items()})
            text = text[end:]
        return responses

    def _run(self, *arguments: str) -> str:
        tls = self._credentials.tls
        command = ["grpcurl", "-max-time", str(TIMEOUT_S)]
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


class _WithMetadata(grpc.StreamStreamClientInterceptor):
    """Adds metadata to the rpcs of reflection, as grpcurl's ``-H`` does."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_stream_stream(self, continuation: Any, details: Any, requests: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), requests)


class ReflectionClient:
    """Imitates grpcurl in Python."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._address = address
        self._credentials = find_credentials(address) if credentials is None else credentials

    def list(self) -> list[str]:
        with self._channel() as channel:
            return sorted(ProtoReflectionDescriptorDatabase(channel).get_services())

    def describe(self, service: str) -> list[str]:
        with self._channel() as channel:
            return [method.name for method in self._pool(channel).FindServiceByName(service).methods]

    def call(self, method: str, request: dict[str, Any]) -> list[dict[str, Any]]:
        service, _, name = method.partition("/")
        with self._channel() as channel:
            descriptor = self._pool(channel).FindServiceByName(service).methods_by_name[name]
            message = ParseDict(request, GetMessageClass(descriptor.input_type)())
            stub = (channel.unary_stream if descriptor.server_streaming else channel.unary_unary)(
                f"/{service}/{name}",
                request_serializer=type(message).SerializeToString,
                response_deserializer=GetMessageClass(descriptor.output_type).FromString,
            )
            try:
                answer = stub(message, timeout=TIMEOUT_S, metadata=self._credentials.metadata)
                responses = list(answer) if descriptor.server_streaming else [answer]
            except grpc.RpcError as error:
                raise GrpcurlError(f"Code: {error.code().name} Message: {error.details()}") from error
        return [
            MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            for response in responses
        ]

    def _channel(self) -> grpc.Channel:
        channel = open_channel(self._address, self._credentials.tls)
        return grpc.intercept_channel(channel, _WithMetadata(self._credentials.metadata))

    @staticmethod
    def _pool(channel: grpc.Channel) -> DescriptorPool:
        return DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
