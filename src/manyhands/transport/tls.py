"""A TCP connection under TLS that is read and written like a plain non-blocking socket, and why one was refused.

OpenSSL writes into the socket itself (an `ssl.SSLSocket`): measured with 64 MiB, that costs less of a core than passing
its records through memory, and a byte that was sent is the kernel's, as it is without TLS.

OpenSSL wants two things of its caller. One connection is used by one thread at a time, so a lock stands around each
call, none of which waits. And what could not be written whole must be given again with the same beginning, which
callers do anyway: they continue after what was reported as sent, with the same bytes (see `_pieces`).
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from manyhands.errors import ManyhandsError

_RECORD_BYTES: Final = 16 << 10  # the most that TLS encrypts in one piece
_CHUNK_BYTES: Final = 8 * _RECORD_BYTES
_PER_CALL_BYTES: Final = 512 << 10  # as a kernel has of a plain one; then the caller looks at its deadline
_DRAINED_CALLS: Final = 16
_CONTENT: Final = b"\x01"  # what the accepting end says first

_ALERT_VERSION: Final = bytes([21, 3, 3, 0, 2, 2, 70])  # RFC 8446: a fatal alert, protocol_version

# Numbers of OpenSSL's verification errors, x509_vfy.h.
_NOT_YET_VALID, _EXPIRED = 9, 10
_OTHER_AUTHORITY: Final = frozenset({2, 7, 18, 19, 20, 21, 24, 27})

_SAME_FOLDERS: Final = "give both hosts folders made by the same `manyhands certificates`"
_MUST_SPEAK_TLS: Final = "it does not use TLS 1.3; start it with --tls DIR too"
_NO_TLS: Final = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL")
_REASONS: Final = {
    **dict.fromkeys(_NO_TLS, _MUST_SPEAK_TLS),
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": f"it sent no certificate; {_SAME_FOLDERS}",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it refused this end, which sent no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": f"it refused this end's certificate, which is from another authority; {_SAME_FOLDERS}",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refused this end's certificate, which has expired by its clock; make new "
    "ones with `manyhands certificates`, or set the clocks",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refused this end's certificate, which is not valid yet by its clock, or "
    "damaged; set the clocks, or make new ones with `manyhands certificates`",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it refused this end's certificate, which does not allow this use; it "
    "must allow both client and server authentication",
    "TLSV1_ALERT_DECRYPT_ERROR": f"it could not check this end's certificate; {_SAME_FOLDERS}",
    "TLSV1_ALERT_PROTOCOL_VERSION": _MUST_SPEAK_TLS,
    "UNSUPPORTED_PROTOCOL": _MUST_SPEAK_TLS,
    "DECRYPTION_FAILED_OR_BAD_RECORD_MAC": "the data was changed in transit",
}


class TlsRefused(ManyhandsError):
    """One end does not accept the other's certificate, or does not speak TLS; the sentence says which and what next."""


def why_refused(error: ssl.SSLError) -> str:
    """A sentence about the other end, `it`, for an error of OpenSSL."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code == _EXPIRED:
            return "its certificate has expired; make new ones with `manyhands certificates`, or set this host's clock"
        if error.verify_code == _NOT_YET_VALID:
            return "its certificate is not valid yet: this host's clock is behind that of the host that made it; set it"
        if error.verify_code in _OTHER_AUTHORITY:
            return f"its certificate is from another authority; {_SAME_FOLDERS}"
        return f"its certificate is not accepted: {error.verify_message}"
    reason = _reason(error)
    return _REASONS.get(reason, f"TLS failed ({reason.replace('_', ' ').lower() or error})")


def _reason(error: ssl.SSLError) -> str:
    return getattr(error, "reason", None) or ""  # one that OpenSSL has not made has no such attribute


class SecureSocket:
    """The parts of a socket that links and hubs use, encrypted; nothing of it waits but `complete`.

    It owns `end`, which may still be connecting: `shake` is called when it is connected, and again whenever it can
    continue, until it returns 0. Only then is anything sent or received. Where a plain socket would raise, so does this
    one; TlsRefused besides, for what the other end must not do.
    """

    def __init__(self, end: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        end.setblocking(False)
        self.family = end.family
        self._end = end
        self._context = context
        self._server_side = server_side
        self._lock = threading.Lock()
        self._tls: ssl.SSLSocket | None = None
        self._shaken = False
        self._failed: TlsRefused | None = None

    def shake(self) -> int:
        """Continue the handshake; 0 once it is done, else what to wait for: select.POLLIN or POLLOUT.

        The accepting end then confirms, and the connecting end waits for that: in TLS 1.3 it would otherwise learn
        only later, if at all, that its certificate was refused.
        """
        if self._failed is not None:
            raise self._failed
        try:
            with self._lock:
                return self._shake()
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError("it ended the connection in the middle of the TLS handshake") from None
        except ssl.SSLError as error:
            self._failed = TlsRefused(why_refused(error))
            if self._server_side and _reason(error) in _NO_TLS:
                # Say, as TLS does, that nothing else is spoken here; OpenSSL says nothing where it sees no TLS.
                with suppress(OSError):  # it is gone, or never reads
                    socket.socket.send(self._end, _ALERT_VERSION)
            raise self._failed from error

    def _shake(self) -> int:
        if self._tls is None:
            self._end.getpeername()  # OSError if nobody is there any more: ssl would take the descriptor with it
            self._end = self._tls = self._context.wrap_socket(
                self._end, server_side=self._server_side, do_handshake_on_connect=False
            )
        self._tls.do_handshake()
        if self._server_side:
            self._tls.send(_CONTENT)
        elif (first := self._tls.recv(1)) != _CONTENT:
            raise ssl.SSLError(0, "it sent something other than the handshake") if first else ssl.SSLEOFError
        self._shaken = True
        return 0

    def complete(self, peer: str, timeout_s: float) -> None:
        """Wait until the handshake is done; TlsRefused names `peer`."""
        deadline_s = time.monotonic() + timeout_s
        poll = select.poll()
        try:
            while events := self.shake():
                poll.register(self.fileno(), events)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not poll.poll(max(1, int(left_s * 1000))):
                    raise TlsRefused(f"did not finish the TLS handshake within {timeout_s:g} s")
        except TlsRefused as refused:
            raise TlsRefused(f"{peer}: {refused}") from refused
        except OSError as error:
            raise TlsRefused(f"{peer}: the connection broke in the TLS handshake: {error}") from error

    def sendmsg(self, parts: Sequence[bytes | memoryview]) -> int:
        """How many bytes of the parts the kernel took, encrypted; BlockingIOError if none."""
        tls, sent = self._ready(), 0
        for piece in _pieces(parts):
            try:
                with self._lock:
                    tls.send(piece)
            except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
                break
            except ssl.SSLError as error:
                raise ConnectionResetError(why_refused(error)) from error
            sent += len(piece)
            if sent >= _PER_CALL_BYTES:
                break
        if not sent:
            raise BlockingIOError("the connection takes nothing now")
        return sent

    def recv_into(self, room: memoryview) -> int:
        """How many bytes were decrypted into `room`; 0 at the end of the stream, BlockingIOError if none are there.

        Fewer than there is room for means that the kernel has no more, or that these were many. Where the room is
        full, `pending` bytes may wait here, of which the kernel knows nothing.
        """
        tls, filled = self._ready(), 0
        if self._failed is not None:
            raise self._failed
        while filled < len(room) and filled < _PER_CALL_BYTES:
            try:
                with self._lock:
                    came = tls.recv_into(room[filled:])
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if filled:
                    return filled
                raise BlockingIOError("nothing has arrived") from None
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                return filled
            except ssl.SSLError as error:
                self._failed = TlsRefused(why_refused(error))
                if filled:
                    return filled
                raise self._failed from error
            except OSError:
                if filled:
                    return filled  # the next call meets it again
                raise
            if came == 0:
                break
            filled += came
        return filled

    def pending(self) -> int:
        return 0 if self._tls is None else self._tls.pending()

    def fileno(self) -> int:
        """The descriptor, the same for as long as this lives; to wait on, not to read from."""
        return self._end.fileno()

    def getsockopt(self, level: int, option: int) -> int:
        return self._end.getsockopt(level, option)

    def setblocking(self, flag: bool) -> None:
        """Only False: nothing here waits."""
        if flag:
            raise ValueError("a secure socket never waits")

    def shutdown(self, how: int) -> None:
        """Shut the connection down beneath TLS, so that waits for it end; the next read returns its end."""
        socket.socket.shutdown(self._end, how)  # that of SSLSocket would go on without TLS

    def close(self) -> None:
        with suppress(OSError):  # nothing more, or nobody
            # Take what has arrived from the kernel: if it were left, closing would take our last word away as well.
            for _ in range(_DRAINED_CALLS if self._failed is not None else 0):
                if not socket.socket.recv(self._end, _RECORD_BYTES):
                    break
        self._end.close()

    def _ready(self) -> ssl.SSLSocket:
        if self._tls is None or not self._shaken:
            raise RuntimeError("nothing may be sent or received before the TLS handshake is done")
        return self._tls


End = socket.socket | SecureSocket
"""A connection as links and hubs use it: in the clear on one host, or encrypted."""


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    # The bytes of `parts` in order, as they are encrypted: small ones joined into one record, large ones not copied. A
    # piece that OpenSSL could not write whole is given to it again by the next call, which begins at the same byte and
    # has the same bytes or more: the piece is then the same, or longer.
    joined: list[bytes | memoryview] = []
    room = _RECORD_BYTES
    for part in parts:
        view = memoryview(part)
        if not len(view):
            continue
        if joined or len(view) < _RECORD_BYTES:
            joined.append(view[:room])
            room -= len(joined[-1])
            view = view[len(joined[-1]) :]
            if room:
                continue
            yield b"".join(joined)
            joined, room = [], _RECORD_BYTES
        whole = len(view) if len(view) >= _RECORD_BYTES else 0
        for begin in range(0, whole, _CHUNK_BYTES):
            yield view[begin : begin + _CHUNK_BYTES]
        if len(view) > whole:
            joined.append(view)
            room -= len(view)
    if room < _RECORD_BYTES:
        yield b"".join(joined)
