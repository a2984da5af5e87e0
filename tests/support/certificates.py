"""Certificates for tests, as ``shardwell-server certs`` makes them."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwell_server.certificates import make_certificates
from shardwell_wire.security.tls import TlsOptions

HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class TestAuthority:
    """An authority with its certificates in a folder."""

    __test__ = False
    folder: Path

    def make(self, *hosts: str, days: float = 1) -> TestAuthority:
        """Makes new certificates of this authority."""
        make_certificates(self.folder, hosts or HOSTS, days=days)
        return self

    def path(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def server(self, **options: Any) -> TlsOptions:
        return TlsOptions(ca=self.path("ca"), cert=self.path("server"), key=self.path("server-key"), **options)

    def trusting(self, **options: Any) -> TlsOptions:
        """Returns the options of a client without a certificate."""
        return TlsOptions(ca=self.path("ca"), **options)

    def client(self) -> TlsOptions:
        """Returns the options of a client with a certificate."""
        return TlsOptions(ca=self.path("ca"), cert=self.path("client"), key=self.path("client-key"))

    def server_arguments(self) -> list[str]:
        """Returns the options of ``shardwell-server``."""
        return [
            *("--tls-ca", self.path("ca")),
            *("--tls-cert", self.path("server")),
            *("--tls-key", self.path("server-key")),
        ]


def replace_files(source: TestAuthority, target: TestAuthority) -> None:
    """Replaces the files of an authority by those of another one, each as a whole."""
    for path in source.folder.iterdir():
        shutil.copy(path, target.folder / f".{path.name}")
        (target.folder / f".{path.name}").rename(target.folder / path.name)
