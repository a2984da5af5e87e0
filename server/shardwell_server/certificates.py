"""``shardwell-server certs``: makes a certificate authority for development, and certificates that it signs."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shardwell_wire.errors import UsageError
from shardwell_wire.security.secret_files import read_secret_file

_LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
_CLOCK_SLACK = timedelta(hours=1)
"""Certificates are valid this long before they are made, for hosts whose clock is slow."""
_CA_DAYS = 3650
_MAX_KEY_BYTES = 1 << 16

_EXAMPLES = """\
examples:
    shardwell-server certs ~/shardwell-certs --host node0 --host 10.0.0.5
    shardwell-server certs ~/shardwell-certs        # again: new certificates of the same authority
    shardwell-server certs ~/shardwell-certs --renew-before 30      # again: only if they expire within 30 days

DIR then has these files, those with -key in their name readable by this user only:
    ca.pem, ca-key.pem          the authority; ca-key.pem can sign certificates that the whole cluster trusts
    server.pem, server-key.pem  for --tls-cert and --tls-key of every server
    client.pem, client-key.pem  for SHARDWELL_TLS_CERT and SHARDWELL_TLS_KEY of clients, if servers require it
Running processes read changed files again. For production, use certificates of your own authority.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the ``certs`` subcommand."""
    parser = subparsers.add_parser(
        "certs",
        help="make certificates for TLS, for development",
        description="Makes a certificate authority and certificates for TLS, for development. Keeps an authority that "
        "DIR has already.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="folder for the files; created if it does not exist"
    )
    parser.add_argument(
        "--host",
        metavar="NAME",
        action="append",
        default=[],
        help="further host name or IP address of the servers, may be repeated (always included: localhost and this "
        "host's name)",
    )
    parser.add_argument(
        "--days", metavar="N", type=int, default=365, help="days for which the certificates are valid (default: 365)"
    )
    parser.add_argument(
        "--renew-before",
        metavar="N",
        type=int,
        help="keep the certificates in DIR if they are valid for more than N days and for the same hosts (default: "
        "always make new ones)",
    )
    parser.set_defaults(handler=main)


def main(arguments: argparse.Namespace) -> int:
    """Runs ``shardwell-server certs``; prints the folder and the hosts."""
    if arguments.days < 1:
        raise UsageError(f"--days is {arguments.days}, expected at least 1")
    hosts = list(dict.fromkeys([*_LOCAL_HOSTS, socket.gethostname(), *arguments.host]))
    if arguments.renew_before is not None and _is_current(arguments.directory, arguments.host, arguments.renew_before):
        print(
            f"{arguments.directory}: the certificates stay, they are valid for more than {arguments.renew_before} days"
        )
        return 0
    make_certificates(arguments.directory, hosts, days=arguments.days)
    print(f"{arguments.directory}: certificates for {', '.join(hosts)}, valid for {arguments.days} days")
    return 0


def _is_current(directory: Path, hosts: Sequence[str], days: int) -> bool:
    """Returns whether the folder has certificates of its authority which are valid for some hosts and for more days.

    This host's own name does not count: in a container, it changes with each start.
    """
    end = datetime.now(UTC) + timedelta(days=days)
    try:
        authority, server, client = (
            x509.load_pem_x509_certificate((directory / f"{name}.pem").read_bytes())
            for name in ("ca", "server", "client")
        )
        for certificate in (server, client):
            certificate.verify_directly_issued_by(authority)
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    is_valid = min(each.not_valid_after_utc for each in (authority, server, client)) > end
    return is_valid and {_general_name(host) for host in (*_LOCAL_HOSTS, *hosts)} <= set(names)


def make_certificates(directory: Path, hosts: Sequence[str], *, days: float = 365) -> None:
    """Writes an authority, if the folder has none, and new certificates for servers and clients.

    Args:
        directory: The folder. Created if it does not exist.
        hosts: Host names and IP addresses of the servers.
        days: Days for which the certificates are valid.

    Raises:
        UsageError: A host is malformed, or the authority in the folder cannot be used.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority, authority_key = _authority(directory)
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    names = [_general_name(host) for host in hosts]
    for name, certificate_usages, alternative_names in (("server", usages, names), ("client", usages[1:], [])):
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            _builder(f"shardwell {name}", key.public_key(), days)
            .issuer_name(authority.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(certificate_usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )
        if alternative_names:
            builder = builder.add_extension(x509.SubjectAlternativeName(alternative_names), critical=False)
        _write_pair(directory, name, builder.sign(authority_key, hashes.SHA256()), key)


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Returns the authority in the folder, or a new one."""
    path, key_path = directory / "ca.pem", directory / "ca-key.pem"
    if path.exists():
        try:
            found = load_pem_private_key(
                read_secret_file(key_path, "key file", max_bytes=_MAX_KEY_BYTES), password=None
            )
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (ValueError, TypeError) as error:
            raise UsageError(f"the authority in {directory} cannot be used: {error}") from error
        if not isinstance(found, ec.EllipticCurvePrivateKey) or found.public_key() != certificate.public_key():
            raise UsageError(f"{key_path} is not the key of {path}: remove both to make a new authority")
        return certificate, found
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("shardwell development authority", key.public_key(), _CA_DAYS)
    certificate = (
        builder.issuer_name(_name("shardwell development authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_pair(directory, "ca", certificate, key)
    return certificate, key


def _builder(name: str, public_key: ec.EllipticCurvePublicKey, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SLACK)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise UsageError(f"--host {host!r} is neither an IP address nor a host name of ASCII characters") from error


def _write_pair(directory: Path, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write(directory / f"{name}-key.pem", secret, 0o600)
    _write(directory / f"{name}.pem", certificate.public_bytes(Encoding.PEM), 0o644)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replaces a file as a whole, so that no process reads a part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
