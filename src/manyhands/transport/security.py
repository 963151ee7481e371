"""How the connections of a run between hosts are protected: by mutual TLS, or not at all if the user allows it.

Both ends show a certificate that the authority of the run signed (`manyhands certificates`), over TLS 1.3 only. Names
in certificates are not compared: a process with a certificate of this authority belongs to this run, and proves its
token besides. This module needs only the standard library.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import ssl
import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from manyhands.errors import UserError
from manyhands.transport.tls import End, SecureSocket, why_refused

# In DER, a sequence of two dates of 12 or 14 digits: nothing but the validity of a certificate looks like it.
_DATES: Final = re.compile(rb"\x30[\x1e-\x22]" + 2 * rb"(?:\x17\x0d|\x18\x0f)(\d{12}|\d{14})Z")
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"
_MOMENT: Final = "%Y-%m-%d %H:%M UTC"


class Validity(NamedTuple):
    """The dates of a certificate, both in UTC."""

    begin: datetime
    end: datetime

    def complaint(self, now: datetime) -> str | None:
        """What is wrong with it at `now`, and what to do; None while it is valid."""
        if now < self.begin:
            return (
                f"is not valid before {self.begin:{_MOMENT}}, but this host's clock says {now:{_MOMENT}}, "
                f"{_long(self.begin - now)} earlier; correct the wrong clock"
            )
        if now > self.end:
            return (
                f"expired on {self.end:{_MOMENT}}, {_long(now - self.end)} ago by this host's clock; make new ones "
                "with `manyhands certificates`, or set the clock"
            )
        return None


def validity(pem: str) -> Validity:
    """The dates of the first certificate in `pem`; ValueError where there is none."""
    begin = pem.find(_BEGIN)
    end = pem.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError("it has no PEM certificate")
    found = _DATES.search(ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)]))
    if found is None:
        raise ValueError("it is not an X.509 certificate")
    return Validity(*map(_date, found.groups()))


def _date(digits: bytes) -> datetime:
    text = digits.decode()
    if len(text) == 12:  # two digits of the year: 50 and above are of the last century
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC)


def _long(span: timedelta) -> str:
    hours = span.total_seconds() / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"


AUTHORITY, CERTIFICATE, KEY, TOKEN = FILES = ("ca.pem", "cert.pem", "key.pem", "token")
"""What a host's folder holds: the authority's certificate, the host's own, its key, and the run's secret."""

HANDSHAKE_S: Final = 10.0  # how long the handshake of a link may take

_SECRET: Final = (KEY, TOKEN)
_LEAST_TOKEN_CHARACTERS: Final = 32
_MOST_FILE_BYTES: Final = 1 << 20
_HANDSHAKE_ROUNDS: Final = 8


class Security:
    """How connections are protected; a value that may be sent to processes of this host, which read the files anew.

    Made by `loopback` (nothing leaves this host), `insecure` (plain everywhere, as the user said) or `from_directory`
    (TLS on every TCP connection). Unix sockets are never encrypted: they end on this host, and their user is compared.
    """

    def __init__(self, *, anywhere: bool = False, directory: Path | None = None) -> None:
        self.directory = directory  # of this host's certificate, None without TLS
        self.token = b""
        """The run's secret, which hubs prove to each other; empty without TLS, where the run makes its own."""
        self.anywhere = anywhere  # whether connections may leave this host
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        if directory is not None:
            token = _read(directory / TOKEN).strip()
            if len(token) < _LEAST_TOKEN_CHARACTERS:
                raise UserError(f"{directory / TOKEN} has {len(token)} characters; {_where_from(TOKEN)}")
            self.token = token.encode()
            self._contexts = _contexts(directory)

    @staticmethod
    def loopback() -> Security:
        return _LOOPBACK

    @staticmethod
    def insecure() -> Security:
        """Connections to anywhere in the clear: on a network where everybody may read and change what is trained."""
        return _INSECURE

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Security:
        """TLS with the files of a folder, or of this host's folder in it; UserError names the file that is wrong."""
        directory = _host_folder(Path(path))
        for name in FILES:
            _check_file(directory / name)
        return cls(anywhere=True, directory=directory)

    @property
    def tls(self) -> bool:
        return self._contexts is not None

    def check_address(self, host: str) -> None:
        """Refuse an address off loopback that is neither encrypted nor allowed by the user."""
        if not self.anywhere and not is_loopback(host):
            raise UserError(
                f"address {host!r}: it is not on loopback, and weights and gradients would be sent unencrypted; give "
                "every process --tls DIR, with the folder that `manyhands certificates` made for its host, or "
                "--insecure if you trust the network"
            )

    def begin(self, end: socket.socket, *, server_side: bool) -> End:
        """A TCP connection under TLS, whose handshake its owner takes on (`SecureSocket.shake`); else as it is."""
        if self._contexts is None or end.family == socket.AF_UNIX:
            return end
        return SecureSocket(end, self._contexts[server_side], server_side=server_side)

    def wrap(
        self, end: socket.socket, peer: str, timeout_s: float = HANDSHAKE_S, *, server_side: bool
    ) -> End:
        """An end of a connection, ready to be used; TlsRefused, and it is closed, if `peer` may not come."""
        ready = self.begin(end, server_side=server_side)
        if isinstance(ready, SecureSocket):
            try:
                ready.complete(peer, timeout_s)
            except BaseException:
                ready.close()
                raise
        return ready

    def __repr__(self) -> str:
        """Everything but the token."""
        if self.directory is not None:
            return f"Security.from_directory({str(self.directory)!r})"
        return "Security.insecure()" if self.anywhere else "Security.loopback()"

    def __reduce__(self) -> tuple[Callable[..., Security], tuple[Any, ...]]:
        """As the way to make it again: neither key nor token travels."""
        directory = str(self.directory.absolute()) if self.directory is not None else None
        return _remade, (self.anywhere, directory)  # cloudpickle would take a class method to pieces


_LOOPBACK: Final = Security()
_INSECURE: Final = Security(anywhere=True)


def _remade(anywhere: bool, directory: str | None) -> Security:
    fixed = _INSECURE if anywhere else _LOOPBACK
    return fixed if directory is None else Security.from_directory(directory)


def is_loopback(host: str) -> bool:
    """Whether an address or name certainly stays on this host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name: what it means is up to others


def _host_folder(path: Path) -> Path:
    """`path`, or the folder of this host in it, where it holds one for each."""
    if not path.is_dir():
        raise UserError(f"--tls {path}: this folder does not exist; make it with `manyhands certificates`")
    if (path / AUTHORITY).exists():
        return path
    name = socket.gethostname()
    for candidate in (name, name.partition(".")[0]):
        if (path / candidate / AUTHORITY).exists():
            return path / candidate
    folders = sorted(one.name for one in path.iterdir() if (one / AUTHORITY).exists())
    if folders:
        raise UserError(
            f"--tls {path} has folders for {', '.join(folders)} but not for this host, {name}; give --tls the one to "
            f"use, or make one with `manyhands certificates {path} --hosts {name},…`"
        )
    raise UserError(f"{path / AUTHORITY} is missing; copy this host's folder of `manyhands certificates`")


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {_where_from(path.name)}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} must be a file")
    if found.st_size > _MOST_FILE_BYTES:
        raise UserError(f"{path} has {found.st_size} bytes, too many for a {path.name}")
    if path.name in _SECRET and found.st_mode & stat.S_IRWXO:
        raise UserError(
            f"{path}: every user of this host can read or change it (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"chmod 600 {path}, and make new ones if others may have read it"
        )


def _where_from(name: str) -> str:
    if name == TOKEN:
        return (
            "every host needs the same one, 32 characters or more: copy it from another host, or write the output of "
            "`python -c 'import secrets; print(secrets.token_hex())'` there"
        )
    return "copy this host's folder of `manyhands certificates` here, or put your own certificate there"


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For connecting and accepting ends, tried out against each other."""
    for name in (AUTHORITY, CERTIFICATE):
        path = directory / name
        try:
            complaint = validity(_read(path)).complaint(datetime.now(UTC))
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path}: {error}; {_where_from(name)}") from None
        if complaint is not None:
            raise UserError(f"{path} {complaint}")
    contexts = _context(directory, server_side=False), _context(directory, server_side=True)
    _try_out(*contexts, directory)
    return contexts


def _context(directory: Path, *, server_side: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the run's authority signs for this run only
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # ca.pem may be an authority below another
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if server_side:
        context.num_tickets = 0  # a connection is never resumed
    key = directory / KEY

    def refuse() -> str:
        raise UserError(f"{key} is encrypted; write it without a password (openssl pkey -in …), mode 0600")

    try:
        context.load_verify_locations(directory / AUTHORITY)
    except ssl.SSLError as error:
        raise UserError(
            f"{directory / AUTHORITY}: {error.reason or error}; it must be a PEM certificate"
        ) from None
    try:
        context.load_cert_chain(directory / CERTIFICATE, key, refuse)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"{key} is not the key of {CERTIFICATE}; copy both from the same folder"
            ) from None
        raise UserError(
            f"{key} with {CERTIFICATE}: {error.reason or 'not a PEM key'}; both must be PEM files of this host"
        ) from None
    return context


def _try_out(client: ssl.SSLContext, server: ssl.SSLContext, directory: Path) -> None:
    """Let a host's certificate meet itself, in memory: what others would refuse is refused here, with its file."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    for number in range(_HANDSHAKE_ROUNDS):
        try:
            ends[number % 2].do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"{directory / CERTIFICATE} is not valid under {AUTHORITY}: {error.verify_message}; copy both from "
                "the same folder of `manyhands certificates`"
            ) from None
        except ssl.SSLError as error:
            raise UserError(f"{directory / CERTIFICATE}: {why_refused(error)}") from None
