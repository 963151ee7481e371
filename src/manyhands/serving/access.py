"""Access control for pages served on this machine.

Web pages of other origins run in the same browser and can reach loopback addresses, so listening on 127.0.0.1 does
not protect by itself. A request must meet five conditions: its length is given in one way only; its `Host` is a name
and a port of this server (which excludes DNS rebinding); its `Origin`, if any, is that host; its method fits the
path; and it has the run's token in a header. Cookies are not used: a browser sends the cookies of 127.0.0.1 to every
port of that address, including servers of other users. Content that is the same for everyone and reveals nothing of
the run needs no token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Guard", "GuardRefusal"]

READING = ("GET", "HEAD")  # methods of what is shown

_DOES = {"GET": "shows", "POST": "answers what it is sent"}
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([\w.-]+))(?::[0-9]{0,5})?", re.ASCII)
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class GuardRefusal:
    """Why a request is rejected: an HTTP status and one sentence."""

    status: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules for one server: pure decisions about the method, the headers and the address of a request.

    `names` are the host names it is reached by, besides those of loopback. With `any_address` every literal IP
    address will do as well: a name is what an attacker can re-bind, an address is not.
    """

    token: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)
    names: frozenset[str] = frozenset()
    any_address: bool = False

    def refusal(
        self,
        method: str,
        headers: Mapping[str, str],
        *,
        needs_token: bool = True,
        methods: tuple[str, ...] = READING,
    ) -> GuardRefusal | None:
        """Return why a request is rejected, or None; header names are in lower case, `methods` are those allowed."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # Request smuggling: a proxy may use one length and this server the other.
            return GuardRefusal(
                400, "A request has Content-Length or Transfer-Encoding, not both; leave one of them out."
            )
        host = headers.get("host", "")
        name = _host_name(host)
        if host and name is None:
            return GuardRefusal(
                400, "The Host header is not a name and a port; use the address that was printed."
            )
        ours = name in _LOOPBACK_NAMES or name in self.names or (self.any_address and _is_address(name))
        if not ours:
            return GuardRefusal(403, "This server does not go by that name; use the address that it printed.")
        origin = headers.get("origin")
        if origin is not None and origin != f"http://{host}":
            return GuardRefusal(403, "Pages of other origins cannot read this one.")
        if method not in methods:
            return GuardRefusal(405, f"This address only {_DOES[methods[0]]}; use {methods[0]}.")
        if needs_token and not self.has_token(headers):
            return GuardRefusal(
                401,
                "The token is missing or wrong; open the whole address that was printed, or send "
                "Authorization: Bearer TOKEN.",
            )
        return None

    def has_token(self, headers: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(bearer.encode(), self.token.encode())


def _host_name(host: str) -> str | None:
    """Return `::1` for `[::1]:80`, `localhost` for `LocalHost:80`; None for anything but a name and a port."""
    found = _HOST.fullmatch(host.lower())
    return None if found is None else found[1] or found[2]


def _is_address(name: str | None) -> bool:
    try:
        ipaddress.ip_address(name or "")
    except ValueError:
        return False
    return True
