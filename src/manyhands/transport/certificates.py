"""Makes the files that `security` reads: the certificate authority of a run, which signs one certificate per host.

Needs the `cryptography` package (`pip install manyhands[tls]`).
"""

from __future__ import annotations

import ipaddress
import math
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from manyhands.errors import UserError
from manyhands.transport.security import AUTHORITY, CERTIFICATE, KEY, TOKEN

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName

AUTHORITY_KEY: Final = "authority.key"  # where the authority's own key is kept, if it is

_MOST_DAYS: Final = 3650.0
_KEY_USES: Final = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
_CLOCKS_MAY_DIFFER: Final = timedelta(minutes=10)
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?")


class HostFolders(NamedTuple):
    """What was made: a folder for each host, in their order, and when the certificates expire."""

    folders: tuple[Path, ...]
    end: datetime


class _Authority(NamedTuple):
    key: EllipticCurvePrivateKey
    certificate: Certificate
    token: str


def make_certificates(
    directory: Path,
    hosts: Sequence[str],
    *,
    days: float = 7.0,
    keep_authority: bool = False,
    now: datetime | None = None,
) -> HostFolders:
    """Make `directory` with a folder for each host: ca.pem, cert.pem, key.pem, token.

    The authority's key is not kept unless asked for, so nobody can join later; where it was kept, folders for more
    hosts are added under the same authority. UserError names what is wrong; then nothing was made.
    """
    _check(hosts, days)
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise UserError(
            "certificates are made with the cryptography package; pip install 'manyhands[tls]', or bring your own "
            "(ca.pem, cert.pem, key.pem, token)"
        ) from error
    now = now or datetime.now(UTC)
    end = now + timedelta(days=days)
    grows = (directory / AUTHORITY_KEY).exists()
    if grows:
        authority = _read_authority(directory)
        end = min(end, authority.certificate.not_valid_after_utc)
        if end <= now:
            raise UserError(f"{directory / AUTHORITY_KEY}: its authority expired; make new ones elsewhere")
        for host in hosts:
            if (directory / host).exists():
                raise UserError(f"{directory / host} already exists; name only new hosts")
    else:
        if directory.exists() and any(directory.iterdir()):
            raise UserError(
                f"{directory} is not empty; give an empty folder, or one whose authority was kept (--keep-authority)"
            )
        authority = _new_authority(now, end)
    directory.absolute().parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.absolute().parent))  # mode 0700
    try:
        for host in hosts:
            _write_host(made / host, host, authority, now, end)
        if grows:
            for host in hosts:
                (made / host).rename(directory / host)
        else:
            if keep_authority:  # in one file: a `ca.pem` would make the directory look like a host's
                from cryptography.hazmat.primitives.serialization import Encoding

                pem = authority.certificate.public_bytes(Encoding.PEM)
                _write(made / AUTHORITY_KEY, _key_bytes(authority.key) + pem, 0o600)
                _write(made / TOKEN, authority.token.encode() + b"\n", 0o600)
            made.rename(directory)  # takes the place of an empty folder
    finally:
        shutil.rmtree(made, ignore_errors=True)  # gone already where all went well
    return HostFolders(tuple(directory / host for host in hosts), end)


def _check(hosts: Sequence[str], days: float) -> None:
    if not hosts:
        raise UserError("--hosts: name at least one host, such as --hosts node1,node2")
    for host in hosts:
        is_name = _NAME.fullmatch(host) is not None and ".." not in host
        if _address(host) is None and (not is_name or host in (AUTHORITY_KEY, TOKEN)):
            raise UserError(f"--hosts: {host!r} is neither a host name nor an address")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UserError(f"--hosts: {', '.join(twice)} is named twice")
    if not (math.isfinite(days) and 0 < days <= _MOST_DAYS):
        raise UserError(f"--days {days:g} must be above 0 and at most {_MOST_DAYS:.0f}")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _new_authority(now: datetime, end: datetime) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = f"manyhands run {secrets.token_hex(8)}"
    signs_certificates = x509.KeyUsage(**{use: use == "key_cert_sign" for use in _KEY_USES})
    certificate = (
        _builder(name, name, key, now, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs_certificates, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _Authority(key, certificate, secrets.token_hex(32))


def _builder(
    name: str, issuer: str, key: EllipticCurvePrivateKey, now: datetime, end: datetime
) -> CertificateBuilder:
    from cryptography import x509

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])

    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_MAY_DIFFER)
        .not_valid_after(end)
    )


def _write_host(folder: Path, host: str, authority: _Authority, now: datetime, end: datetime) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509 import oid

    key = ec.generate_private_key(ec.SECP256R1())
    address = _address(host)
    name: GeneralName = x509.DNSName(host) if address is None else x509.IPAddress(address)
    both_ends = [oid.ExtendedKeyUsageOID.SERVER_AUTH, oid.ExtendedKeyUsageOID.CLIENT_AUTH]
    [issuer] = authority.certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    certificate = (
        _builder(host, str(issuer.value), key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([name]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(both_ends), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), critical=False
        )
        .sign(authority.key, hashes.SHA256())
    )
    folder.mkdir(mode=0o700)
    pem = serialization.Encoding.PEM
    _write(folder / AUTHORITY, authority.certificate.public_bytes(pem), 0o644)
    _write(folder / CERTIFICATE, certificate.public_bytes(pem), 0o644)
    _write(folder / KEY, _key_bytes(key), 0o600)
    _write(folder / TOKEN, authority.token.encode() + b"\n", 0o600)


def _key_bytes(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization

    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_authority(directory: Path) -> _Authority:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    path = directory / AUTHORITY_KEY
    try:
        content = path.read_bytes()
        key = serialization.load_pem_private_key(content, None)
        [certificate] = x509.load_pem_x509_certificates(content)
        token = (directory / TOKEN).read_text("ascii").strip()
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; make new ones in another folder") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"{path} is not a key of `manyhands certificates`; make new ones in another folder")
    return _Authority(key, certificate, token)


def _write(path: Path, content: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
