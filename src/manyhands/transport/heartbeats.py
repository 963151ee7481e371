"""Heartbeats between processes: drive `liveness` with a socket, two threads and the state of connections in the kernel.

One thread sends, in compiled code that never takes the GIL: user code may hold it for minutes. The other receives,
asks the kernel about connections when heartbeats are missing, and ends waits through `on_lost`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import json
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numba import types

from manyhands.native.atomics import load_i64, store_i64
from manyhands.native.counters import Counter
from manyhands.native.decorators import njit
from manyhands.transport.liveness import (
    BETWEEN_HOSTS,
    COUNT_OFFSET,
    FRAME,
    PROGRESS_OFFSET,
    HeartbeatKind,
    PeerLiveness,
    PeerLost,
    RendezvousStore,
)

_log = logging.getLogger("manyhands")
_TIMES: Final = 3  # how often a final datagram is sent: datagrams get lost
_STOP, _PROGRESS = 0, 8  # words of control, then the entries
_ENTRIES: Final = 16
_ADDRESS_BYTES: Final = 32
_FRAME_BYTES: Final = FRAME.size
_ENTRY_BYTES: Final = _ADDRESS_BYTES + 8 + FRAME.size
_SLICE_MS: Final = 50
_SLICES: Final = round(BETWEEN_HOSTS.heartbeat_s * 1000 / _SLICE_MS)
_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_SIOCGIFADDR: Final = 0x8915
_LAST_DATA_RECEIVED: Final = 52  # the field tcpi_last_data_recv of struct tcp_info, in milliseconds
_TCP_INFO_BYTES: Final = 104
_STOPPED: Final = (b"T", b"t", b"Z", b"X", b"x")

_libc: Final = ctypes.CDLL(None, use_errno=True)
_sendto: Any = types.ExternalFunction(
    "sendto", types.int64(types.int32, types.int64, types.uint64, types.int32, types.int64, types.uint32)
)
_poll: Any = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class BeatPlace:
    """Where a rank receives heartbeats, the name of its host, and its process there."""

    address: str
    port: int
    host: str
    pid: int = 0
    pids: str = ""  # the kernel's name for what the number of the process is among; empty: unknown

    @property
    def words(self) -> str:
        return f"{self.host} ({self.address})"


class Heartbeats:
    """This rank's heartbeats, and its liveness monitor of the ranks in `far`; `close` says goodbye and ends both.

    `on_lost(rank, sentence)` is called in a thread, once, for the first rank that is lost; one that has left in good
    order, as `in_peace` says, is not. On one host, heartbeats are not delayed behind data, so data does not excuse
    there; but the kernel distinguishes a stopped process from one that gets no processor time.
    """

    def __init__(
        self,
        rank: int,
        own: socket.socket,
        far: Mapping[int, BeatPlace],
        secret: bytes,
        on_lost: Callable[[int, str], None],
        in_peace: Callable[[int], bool] = lambda _rank: False,
    ) -> None:
        """Own the socket; returns at once."""
        self._socket = own
        self._here: str = own.getsockname()[0]
        self._in_peace = in_peace
        self._far = far
        self._on_lost = on_lost
        self._liveness = PeerLiveness(
            rank, {peer: place.words for peer, place in far.items()}, secret, time.monotonic()
        )
        self._table = np.zeros(_ENTRIES + len(far) * _ENTRY_BYTES, np.uint8)
        for number, (peer, place) in enumerate(far.items()):
            # As the kernel wants it: sockaddr_in or sockaddr_in6.
            is_ipv6 = ":" in place.address
            family, layout = (socket.AF_INET6, "=HH4x16s4x") if is_ipv6 else (socket.AF_INET, "=HH4s8x")
            packed = socket.inet_pton(family, place.address)
            raw = struct.pack(layout, family, socket.htons(place.port), packed)
            frame = self._liveness.frame(peer, HeartbeatKind.HEARTBEAT)
            entry = struct.pack(f"<{_ADDRESS_BYTES}sQ", raw, len(raw)) + frame
            begin = _ENTRIES + number * _ENTRY_BYTES
            self._table[begin : begin + _ENTRY_BYTES] = np.frombuffer(entry, np.uint8)
        self._ended = threading.Event()
        self._stop = Counter(self._table.ctypes.data + _STOP, self._table)
        self.mark = Counter(self._table.ctypes.data + _PROGRESS, self._table).set
        """Set the number of the collective that was entered last."""
        self._used_by_the_loop = (self._table, _send_heartbeats)
        for used in self._used_by_the_loop:
            # A program that leaves without closing frees everything before its threads end.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(used))
        self._sending = os.dup(own.fileno())
        arguments = (self._table.ctypes.data, len(far), self._sending)
        self._threads = [
            threading.Thread(target=_send_heartbeats, args=arguments, name="manyhands beats", daemon=True),
            threading.Thread(target=self._listen, name="manyhands listens for beats", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        if self._ended.is_set():
            return
        self._stop.set(1)
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for used in self._used_by_the_loop:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(used))
        self._say(HeartbeatKind.GOODBYE)
        os.close(self._sending)
        self._socket.close()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while not self._ended.is_set():
            left_s = self._liveness.next_look_s - time.monotonic()
            poll.poll(1000 * min(max(left_s, 0.0), _SLICE_MS / 1000 * 4))
            lost = self._read()
            now_s = time.monotonic()
            if lost is None and now_s >= self._liveness.next_look_s:
                lost = self._look(now_s)
            if lost is not None and not self._in_peace(lost.rank):
                self._say(HeartbeatKind.GIVEN_UP, lost.rank)
                self._on_lost(lost.rank, lost.sentence)
                return

    def _read(self) -> PeerLost | None:
        """Handle all datagrams that have arrived."""
        while True:
            try:
                datagram = self._socket.recv(FRAME.size + 1)
            except BlockingIOError:
                return None
            except OSError as error:
                # An ICMP error for something sent: the peer is not there (yet), which its missing heartbeats show.
                if error.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH):
                    continue
                raise
            lost = self._liveness.handle(datagram, time.monotonic())
            if lost is not None:
                return lost

    def _look(self, now_s: float) -> PeerLost | None:
        suspects = self._liveness.suspects(now_s)
        for rank in suspects:
            place = self._far[rank]
            # A process of this host that is alive but gets no processor time.
            if place.address == self._here and place.pids == _pids() != "" and not is_stopped(place.pid):
                self._liveness.excuse(rank, now_s)
        addresses = {self._far[rank].address: host for rank, host in suspects.items()}
        addresses.pop(self._here, None)
        if addresses:
            for address, age_s in data_ages(addresses).items():
                self._liveness.data_came(addresses[address], now_s - age_s, now_s)
        for rank in self._liveness.unheard(now_s):
            _log.warning(
                "no heartbeat received from rank %d on %s; does a firewall block UDP? without heartbeats a lost "
                "connection is noticed only when a wait times out",
                rank,
                self._far[rank].words,
            )
        return self._liveness.look(now_s)

    def _say(self, kind: HeartbeatKind, blamed: int = -1) -> None:
        for _ in range(_TIMES):
            for peer, place in self._far.items():
                frame = self._liveness.frame(peer, kind, blamed=blamed)
                with suppress(OSError):  # no route: the peer hears nothing from us, which says the same
                    self._socket.sendto(frame, (place.address, place.port))


def exchange_places(
    store: RendezvousStore,
    rank: int,
    world: int,
    address: str,
    prefix: str = "",
    wait_for: Callable[[list[str]], None] = lambda _keys: None,
) -> tuple[socket.socket, dict[int, BeatPlace], bytes]:
    """Collective: own socket, all places, the group's secret; `wait_for` waits for keys where `multi_get` does not."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = socket.socket(family, socket.SOCK_DGRAM)
    try:
        own.bind((address, 0))
        own.setblocking(False)
        if rank == 0:
            store.set(f"{prefix}secret", secrets.token_hex(32))
        port, host = own.getsockname()[1], socket.gethostname()
        mine = BeatPlace(address=address, port=port, host=host, pid=os.getpid(), pids=_pids())
        store.set(f"{prefix}place/{rank}", json.dumps(asdict(mine)))
        keys = [f"{prefix}place/{other}" for other in range(world)]
        wait_for([f"{prefix}secret", *keys])
        secret, *texts = (text.decode() for text in store.multi_get([f"{prefix}secret", *keys]))
        places = {other: BeatPlace(**json.loads(text)) for other, text in enumerate(texts)}
        if store.add(f"{prefix}read", 1) == world:
            # The last leaves nothing for the next group of this name to take for its own.
            for key in (f"{prefix}secret", f"{prefix}read", *keys):
                store.delete_key(key)
        return own, places, bytes.fromhex(secret)
    except BaseException:
        own.close()
        raise


def is_stopped(pid: int) -> bool:
    """Whether a process of this host was stopped (SIGSTOP, a debugger), or is gone: it sends nothing, however long."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in _STOPPED
    except (FileNotFoundError, ProcessLookupError):
        return True


def _pids() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def address_of_interface(name: str) -> str | None:
    """The IPv4 address of a network interface of this host; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def data_ages(addresses: Iterable[str]) -> dict[str, float]:
    """Seconds since data came from each of these addresses over TCP, where this process has such a connection.

    Gloo's connections are its own, so they are found among this process's descriptors, and only looked at: by plain
    system calls, for a Python socket around a descriptor may change its settings.
    """
    wanted = {ipaddress.ip_address(address): address for address in addresses}
    ages: dict[str, float] = {}
    for name in os.listdir("/proc/self/fd"):
        raw, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
        peer: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None  # not a connected internet socket
        if _libc.getpeername(int(name), raw, ctypes.byref(length)) == 0:
            (family,) = struct.unpack_from("=H", raw)
            if family == socket.AF_INET:
                peer = ipaddress.IPv4Address(raw.raw[4:8])
            elif family == socket.AF_INET6:
                full = ipaddress.IPv6Address(raw.raw[8:24])
                peer = full.ipv4_mapped or full
        info, size = ctypes.create_string_buffer(_TCP_INFO_BYTES), ctypes.c_uint32(_TCP_INFO_BYTES)
        option = (socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
        if peer in wanted and _libc.getsockopt(int(name), *option) == 0:
            (age_ms,) = struct.unpack_from("=I", info, _LAST_DATA_RECEIVED)
            address = wanted[peer]
            ages[address] = min(ages.get(address, float("inf")), age_ms / 1000)
    return ages


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def _send_heartbeats(table, peers, descriptor):  # type: ignore[no-untyped-def]
    """Send every peer a heartbeat, with its number and the progress of this process, until told to stop."""
    count = 0
    while load_i64(table + _STOP) == 0:
        progress = load_i64(table + _PROGRESS)
        for number in range(peers):
            entry = table + _ENTRIES + number * _ENTRY_BYTES
            frame = entry + _ADDRESS_BYTES + 8
            store_i64(frame + COUNT_OFFSET, count)
            store_i64(frame + PROGRESS_OFFSET, progress)
            length = load_i64(entry + _ADDRESS_BYTES)
            _sendto(
                types.int32(descriptor),
                frame,
                types.uint64(_FRAME_BYTES),
                types.int32(_FLAGS),
                entry,
                types.uint32(length),
            )
        count += 1
        for _ in range(_SLICES):
            _poll(0, types.uint64(0), types.int32(_SLICE_MS))
            if load_i64(table + _STOP) != 0:
                break
