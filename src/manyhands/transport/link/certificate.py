"""From when to when an X.509 certificate is valid, read from its file with the standard library alone.

Python's ssl tells the dates of a peer's certificate, and of authorities, but not of one's own: so the few bytes before
them are skipped here (RFC 5280, section 4.1). Whether a certificate is good is OpenSSL's to say, never this module's.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

__all__ = ["Validity", "validity"]

_SEQUENCE, _VERSION, _UTC_TIME, _TIME = 0x30, 0xA0, 0x17, 0x18
_BEGIN: Final = "-----BEGIN CERTIFICATE-----"
_END: Final = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True)
class Validity:
    """The dates of a certificate, both in UTC."""

    begin: datetime
    """Before this it is not valid yet."""

    end: datetime
    """After this it has expired."""

    def complaint(self, now: datetime) -> str | None:
        """What is wrong with it at `now`, and what to do; None while it is valid."""
        if now < self.begin:
            return (
                f"is not valid before {_said(self.begin)}, and this host's clock says {_said(now)}, "
                f"{_long(self.begin - now)} earlier; set the clock of the host that is wrong"
            )
        if now > self.end:
            return (
                f"expired on {_said(self.end)}, {_long(now - self.end)} ago by this host's clock; make new ones with "
                "`manyhands certificates`, or set the clock"
            )
        return None


def validity(pem: str) -> Validity:
    """The dates of the first certificate in `pem`; ValueError where there is none."""
    begin = pem.find(_BEGIN)
    end = pem.find(_END, begin)
    if begin < 0 or end < 0:
        raise ValueError("it has no PEM certificate")
    der = ssl.PEM_cert_to_DER_cert(pem[begin : end + len(_END)])
    certificate, _ = _open(der, _SEQUENCE)
    fields, _ = _open(certificate, _SEQUENCE)
    if fields[:1] == bytes([_VERSION]):
        fields = _skip(fields)
    for _ in ("serial number", "signature's algorithm", "issuer"):
        fields = _skip(fields)
    dates, _ = _open(fields, _SEQUENCE)
    return Validity(_date(dates), _date(_skip(dates)))


def _open(data: bytes, kind: int) -> tuple[bytes, bytes]:
    """The content of the element at the beginning of `data`, and what follows it."""
    if len(data) < 2 or data[0] != kind:
        raise ValueError("it is no X.509 certificate")
    length, at = data[1], 2
    if length & 0x80:
        at += length & 0x7F
        length = int.from_bytes(data[2:at], "big")
    if at + length > len(data):
        raise ValueError("it is cut")
    return data[at : at + length], data[at + length :]


def _skip(data: bytes) -> bytes:
    return _open(data, data[0] if data else 0)[1]


def _date(data: bytes) -> datetime:
    if data[:1] == bytes([_UTC_TIME]):  # two digits of the year: 50 and above are of the last century
        text = _open(data, _UTC_TIME)[0].decode("ascii")
        text = ("19" if text[:2] >= "50" else "20") + text
    else:
        text = _open(data, _TIME)[0].decode("ascii")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _said(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M UTC")


def _long(span: timedelta) -> str:
    hours = span.total_seconds() / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.0f} min"
