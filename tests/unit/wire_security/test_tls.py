"""TLS of channels: files, their replacement while a process runs, and the reasons of failed connections."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from shardwell.transport.service_client import CoordinatorClient, ServiceClient
from shardwell_server.cli import main as server_command
from shardwell_wire.connection.channel import open_channel
from shardwell_wire.errors import TlsError, UnavailableError, UsageError
from shardwell_wire.security.credentials import Credentials
from shardwell_wire.security.tls import Encryption, Tls, TlsOptions, tls_problem
from shardwell_wire.v1 import coordinator_pb2
from tests.support.certificates import TestAuthority, replace_files

PATH = "/shardwell_wire.v1.CoordinatorService/ListRuns"


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "one").make()


@pytest.fixture
def other(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path / "other").make()


@contextmanager
def served(credentials: grpc.ServerCredentials | None, address: str = "127.0.0.1:0") -> Iterator[str]:
    """Yields the address of a server whose only rpc answers with an empty message."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        handler = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
        service, _, method = PATH.strip("/").partition("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(None).wait()


def call(address: str, tls: TlsOptions | None, *, retry_for_s: float = 60.0) -> None:
    """Calls the server as a client that would retry for a minute while the server is unavailable."""
    with closing(CoordinatorClient(address, Credentials(tls=tls and Tls(tls)))) as client:
        client.call("ListRuns", coordinator_pb2.ListRunsRequest(), retry_for_s=retry_for_s)


# Options and files.


def test_options_are_read_from_the_environment() -> None:
    assert TlsOptions.from_env({"SHARDWELL_ENCRYPT": "always"}) is None, "without a file there is no TLS"
    found = TlsOptions.from_env(
        {
            "SHARDWELL_TLS_CA": "a",
            "SHARDWELL_TLS_CERT": "b",
            "SHARDWELL_TLS_KEY": "c",
            "SHARDWELL_TLS_SERVER_NAME": "d",
            "SHARDWELL_ENCRYPT": "always",
        }
    )
    assert found == TlsOptions(ca="a", cert="b", key="c", server_name="d", encrypt="always")
    assert found.encryption is Encryption.ALWAYS
    assert TlsOptions.from_env({"SHARDWELL_TLS_CA": "a"}) == TlsOptions(ca="a", encrypt="off-host")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SHARDWELL_TLS_CERT": "b", "SHARDWELL_TLS_KEY": "c"}, "set ca"),
        ({"SHARDWELL_TLS_CA": "a", "SHARDWELL_TLS_CERT": "b"}, "expected both, or neither"),
        ({"SHARDWELL_TLS_CA": "a", "SHARDWELL_ENCRYPT": "sometimes"}, "one of always, off-host, never"),
    ],
)
def test_contradicting_options_are_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TlsOptions.from_env(environment)


def encrypt_key(authority: TestAuthority) -> None:
    path = Path(authority.path("server-key"))
    key = load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda one: Path(one.path("server")).unlink(), "cannot be read: No such file"),
        (lambda one: Path(one.path("server")).write_text("hello"), "is not a PEM file"),
        (lambda one: Path(one.path("ca")).write_text("hello"), "is not a PEM file"),
        (lambda one: Path(one.path("server-key")).chmod(0o640), r"other users can access it \(mode 0640\)"),
        (lambda one: shutil.copy(one.path("client-key"), one.path("server-key")), "cannot be used together"),
        (lambda one: one.make(days=-0.01), "expired on 20"),
        (encrypt_key, "expected a key without a password"),
    ],
    ids=["missing", "no certificate", "no authority", "open key", "other key", "expired", "encrypted key"],
)
def test_unusable_file_is_named(authority: TestAuthority, damage: Callable[[Any], Any], message: str) -> None:
    Tls(authority.server())
    damage(authority)
    with pytest.raises(UsageError, match=message) as error:
        Tls(authority.server())
    assert str(authority.folder) in str(error.value)


def test_certificates_stay_in_use_until_changed_files_are_valid(
    authority: TestAuthority, other: TestAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Tls(authority.server())
    first = tls.current
    assert tls.current is first
    shutil.copy(other.path("server"), authority.path("server"))
    assert tls.current is first, "the certificate is replaced, its key is not yet"
    assert "the former TLS files stay in use" in caplog.text
    shutil.copy(other.path("server-key"), authority.path("server-key"))
    assert tls.current is not first
    assert tls.current.chain == Path(other.path("server")).read_bytes()


# Replacement of certificates while both ends run.


def test_new_connections_use_replaced_certificates(authority: TestAuthority, other: TestAuthority) -> None:
    with (
        served(Tls(authority.server(), require_client_cert=True).server_credentials()) as address,
        open_channel(address, Tls(authority.client())) as channel,
    ):
        stub = channel.unary_unary(PATH)
        assert stub(b"", timeout=20) == b""
        former = (TestAuthority(authority.folder.parent / "former"), authority)
        former[0].folder.mkdir()
        replace_files(authority, former[0])
        replace_files(other, authority)
        assert stub(b"", timeout=20) == b"", "the channel trusts the new authority, and has its certificate"
        call(address, authority.client())
        with pytest.raises(TlsError, match="unable to get local issuer certificate"):
            call(address, former[0].client())


# Why a connection is impossible.


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (lambda one, other: None, "the server requires TLS: set SHARDWELL_TLS_CA"),
        (lambda one, other: other.trusting(), "unable to get local issuer certificate.*that the authority in .*other"),
        (lambda one, other: one.trusting(server_name="elsewhere"), "not valid for 'elsewhere'"),
    ],
    ids=["plaintext", "other authority", "other name"],
)
def test_failed_handshake_is_explained_at_once(
    authority: TestAuthority, other: TestAuthority, client: Callable[..., TlsOptions | None], message: str
) -> None:
    with served(Tls(authority.server()).server_credentials()) as address:
        started = time.monotonic()
        with pytest.raises(TlsError, match=message):
            call(address, client(authority, other))
        assert time.monotonic() - started < 30, "an error of TLS is not retried"
        call(address, authority.trusting())


def test_failed_handshake_is_retried_if_connections_have_worked(
    authority: TestAuthority, other: TestAuthority, tmp_path: Path
) -> None:
    trusted, refusals = tmp_path / "trusted.pem", 0
    shutil.copy(authority.path("ca"), trusted)

    def trust_later() -> None:
        nonlocal refusals
        refusals += 1
        if refusals == 2:
            shutil.copy(other.path("ca"), trusted)

    with served(Tls(authority.server()).server_credentials()) as address:
        service = coordinator_pb2.DESCRIPTOR.services_by_name["CoordinatorService"]
        credentials = Credentials(tls=Tls(TlsOptions(ca=str(trusted))))
        client = ServiceClient(address, service, trust_later, credentials)
        client.call("ListRuns", coordinator_pb2.ListRunsRequest())
    with closing(client), served(Tls(other.server()).server_credentials(), address):
        with pytest.raises(UnavailableError, match="the certificate of the server is refused"):
            client.call("ListRuns", coordinator_pb2.ListRunsRequest())
        client.call("ListRuns", coordinator_pb2.ListRunsRequest(), retry_for_s=30.0)
        assert refusals >= 2


def test_expired_certificate_of_a_server_is_reported(authority: TestAuthority) -> None:
    authority.make(days=-0.01)
    pair = (Path(authority.path("server-key")).read_bytes(), Path(authority.path("server")).read_bytes())
    with (
        served(grpc.ssl_server_credentials([pair])) as address,
        pytest.raises(TlsError, match="refused: certificate has expired"),
    ):
        call(address, authority.trusting())


def test_server_without_tls_is_reported(authority: TestAuthority) -> None:
    with (
        served(None) as address,
        pytest.raises(TlsError, match="does not use TLS, and this process does: unset SHARDWELL_TLS_CA"),
    ):
        call(address, authority.trusting())


def test_server_may_require_a_client_certificate(authority: TestAuthority, other: TestAuthority) -> None:
    mixed = TlsOptions(ca=authority.path("ca"), cert=other.path("client"), key=other.path("client-key"))
    with served(Tls(authority.server(), require_client_cert=True).server_credentials()) as address:
        call(address, authority.client())
        with pytest.raises(TlsError, match="the server requires a certificate: set SHARDWELL_TLS_CERT"):
            call(address, authority.trusting())
        with pytest.raises(TlsError, match="does not trust the certificate of this process"):
            call(address, mixed)


def test_unreachable_server_is_no_problem_of_tls(authority: TestAuthority) -> None:
    assert tls_problem("127.0.0.1:1", Tls(authority.trusting())) is None
    with pytest.raises(UnavailableError, match="Connection refused"):
        call("127.0.0.1:1", authority.trusting(), retry_for_s=0.0)


# The command that makes certificates.


def test_command_keeps_the_authority_and_names_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "certs"
    assert server_command(["certs", str(folder), "--host", "node0", "--host", "10.0.0.5", "--host", "fd00::1"]) == 0
    assert "node0, 10.0.0.5, fd00::1" in capsys.readouterr().out
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {
        **dict.fromkeys(("ca.pem", "server.pem", "client.pem"), 0o644),
        **dict.fromkeys(("ca-key.pem", "server-key.pem", "client-key.pem"), 0o600),
    }
    files = TestAuthority(folder)
    authority, certificate = (Path(files.path(name)).read_bytes() for name in ("ca", "server"))
    assert server_command(["certs", str(folder), "--days", "1"]) == 0
    assert Path(files.path("ca")).read_bytes() == authority
    assert Path(files.path("server")).read_bytes() != certificate
    with served(Tls(files.server()).server_credentials()) as address:
        call(address, files.trusting())
        call(address, files.trusting(server_name="localhost"))


def test_command_keeps_valid_certificates_if_asked(
    tmp_path: Path, other: TestAuthority, capsys: pytest.CaptureFixture[str]
) -> None:
    files = TestAuthority(tmp_path / "certs")

    def is_kept(*options: str) -> bool:
        """Runs the command; returns whether it kept the certificates."""
        former = Path(files.path("server")).read_bytes()
        assert server_command(["certs", str(files.folder), "--days", "90", *options]) == 0
        return Path(files.path("server")).read_bytes() == former

    assert server_command(["certs", str(files.folder), "--host", "node0", "--days", "40"]) == 0
    assert is_kept("--renew-before", "30")
    assert is_kept("--renew-before", "30", "--host", "node0")
    assert not is_kept("--renew-before", "50")
    assert not is_kept("--renew-before", "30", "--host", "node0", "--host", "10.0.0.5")
    shutil.copy(other.path("client"), files.path("client"))
    assert not is_kept("--renew-before", "30"), "the certificate of another authority"
    for name in ("ca", "ca-key"):
        shutil.copy(other.path(name), files.path(name))
    assert not is_kept("--renew-before", "30"), "another authority"
    assert not is_kept()


def test_command_refuses_a_foreign_authority_key(
    authority: TestAuthority, other: TestAuthority, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(other.path("ca-key"), authority.path("ca-key"))
    assert server_command(["certs", str(authority.folder)]) == 1
    assert "is not the key of" in capsys.readouterr().err
    assert server_command(["certs", str(other.folder), "--host", "n\xf6de"]) == 1
    assert "is neither an IP address nor a host name" in capsys.readouterr().err
