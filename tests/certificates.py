"""Certificates for tests: the folders of a run's hosts, made once, and TLS that checks nothing of its own."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from manyhands.transport.certificates import make_certificates
from manyhands.transport.security import Security

HOSTS = ("host-a", "host-b")


@cache
def folders(authority: str = "run") -> Path:
    """The folders of `HOSTS`, of one authority for each name; gone with this process."""
    path = Path(_kept().name) / authority
    make_certificates(path, HOSTS)
    return path


@cache
def _kept() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="manyhands-test-")


@cache
def run_security(host: str = HOSTS[0]) -> Security:
    """What a host of the run has."""
    return Security.from_directory(folders() / host)


def careless(folder: Path | None, *, server_side: bool = False) -> ssl.SSLContext:
    """Somebody who shows what it has, without looking whether it is good, and believes everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if folder is not None:
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


def careless_security(folder: Path) -> Security:
    """What a host has that does not look at its own certificate before others do."""
    security = Security(anywhere=True)
    security._contexts = careless(folder), careless(folder, server_side=True)
    return security
