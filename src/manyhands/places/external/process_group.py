"""The process group of an externally started run, at its leader and at every other process.

    leader                                            another process
      with lead_group(…) as group:                      with join_group(…) as member:
          group.gather()                all have joined      member.connection
          group.control_server                               …
          group.give("run", …)          the result           member.connection.take("run", …)

When the leader's block ends, whatever the cause, the other processes are told why and end too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Self

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from manyhands.errors import ManyhandsError, PeerTimeout, UserError, WorkerFailed, first_line
from manyhands.native.closeable import Closeable
from manyhands.native.version import __version__
from manyhands.places.external.control_connection import ControlConnection, RunEnding, open_control_connection
from manyhands.places.external.control_messages import Term
from manyhands.places.external.control_server import ControlEvent, ControlServer, ProcessRejected, Warned
from manyhands.places.external.links import address_towards
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.external.run_store import comes_true
from manyhands.places.external.specification import listening_at
from manyhands.places.local.host import host_identity
from manyhands.places.local.rendezvous import hosts_of, ranks_named
from manyhands.places.local.roster import Ended, Started
from manyhands.transport.hub.hub_events import Settings
from manyhands.transport.liveness import LivenessTimes
from manyhands.transport.security import Security, is_loopback

_TICK_S: Final = 0.1
_SHUTDOWN_S: Final = 30.0
_BREAK_OFF_S: Final = 3.0
_STARTING_S: Final = 5.0
_LAST_RUN_S: Final = 10.0


@dataclass
class ProcessGroup:
    """All processes of a run, at its leader; a context manager. Call it from one thread at a time."""

    place: ProcessPlace
    control_server: ControlServer
    token: bytes
    address: str  # where links of this process listen for other hosts; empty if there are none
    security: Security
    timeout_s: float
    early: list[ControlEvent] = field(default_factory=list, init=False)
    """Events that arrived before every member had joined."""

    def gather(self, notice: Callable[[str], None] = lambda _sentence: None) -> None:
        """Wait for every rank but later ones; UserError for one of another run, PeerTimeout for those that are late."""
        began, spec, register = time.monotonic(), self.place.cluster, self.control_server.register
        needed = self.place.world - self.place.later

        def named(rank: int) -> str:
            role = spec.ranked[rank] if spec is not None else None
            return f"rank {rank}" if spec is None or role is None else f"{role} at {spec.address(role)}"

        while any(rank < needed for rank in register.missing):
            waited_s = time.monotonic() - began
            if waited_s >= self.timeout_s:
                raise PeerTimeout(register.late("join", waited_s, named), register.missing[0])
            for event in self.control_server.poll(_TICK_S):
                match event:
                    case Started():
                        pass
                    case Warned(_, sentence):
                        notice(sentence)
                    case ProcessRejected(sentence, field) if field != "rank":
                        # Before the run is given up, let processes that are about to join do so: they are told why.
                        deadline = time.monotonic() + min(_STARTING_S, self.timeout_s)
                        while register.missing and time.monotonic() < deadline:
                            self.control_server.poll(_TICK_S)
                        raise UserError(sentence)
                    case Ended(failure=failure) if failure is not None:
                        raise failure.error()
                    case _:
                        self.early.append(event)

    @property
    def num_hosts(self) -> int:
        """Over how many hosts the processes are, once all have joined."""
        others = {self.control_server.host_of(rank) for rank in self.control_server.known}
        return len(others | {host_identity()})

    def tell_all(self, payload: Mapping[str, Any]) -> None:
        for rank in range(1, self.place.world):
            self.control_server.tell(rank, payload)

    def give(self, name: str, chunks: Callable[[], Iterable[Any]]) -> None:
        """Give every member that joined a large object; `chunks` produces its buffers anew for each member."""
        for rank in range(1, self.place.world):
            if rank < self.place.world - self.place.later or rank in self.control_server.known:
                self.control_server.give(rank, name, chunks())

    def shutdown(self) -> None:
        """Wait until every member has taken what was given and left; ManyhandsError names those that have not."""
        for rank in self.control_server.shutdown(max(_SHUTDOWN_S, self.timeout_s)):
            name = self.control_server.name_of(rank)
            raise ManyhandsError(f"{name} did not receive the result of the run in time")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                rank = error.worker_rank if isinstance(error, WorkerFailed) else 0
                sentence = first_line(error)
                if not isinstance(error, ManyhandsError):
                    sentence = f"{self.place.name} ended with {type(error).__name__}: {sentence}"
                self.control_server.break_off(rank, sentence)  # and wait briefly for members to leave
                self.control_server.shutdown(_BREAK_OFF_S)
        finally:
            self.control_server.close()


@dataclass
class GroupMember(Closeable):
    """One process's membership in a run that another process leads; a context manager."""

    place: ProcessPlace
    connection: ControlConnection
    token: bytes
    address: str
    security: Security
    timeout_s: float

    def close(self) -> None:
        self.connection.close()


_HEARD_S: Final = 2.0
_TOKEN_BYTES: Final = 32
_PATIENT: Final = LivenessTimes(silence_s=20.0, handshake_s=10.0)
"""One long call of a process that trains may delay the thread of its heartbeats."""


def lead_group(
    place: ProcessPlace,
    terms: Sequence[Term],
    name: str,
    *,
    security: Security,
    timeout_s: float,
    comes_again: bool = False,
) -> ProcessGroup:
    """Become the leader of the run `name` and publish its address; no member has joined yet.

    If that is impossible, the waiting processes are told why. `comes_again`: a lost process may rejoin, or be replaced.
    """
    settings = _settings(security, comes_again)
    if place.leader is not None:
        token = _token(place.leader, security)
        with ExitStack() as stack:
            control_server = stack.enter_context(ControlServer(place, terms, token, settings=settings))
            _listen(control_server, place.leader)
            stack.pop_all()
        host = place.leader.rpartition(":")[0]
        return ProcessGroup(place, control_server, token, host, security, timeout_s)
    store = PrefixStore(f"manyhands/{name}", place.open_store(timeout_s))
    _sit_down(store, place)
    try:
        hosts = _wait_for_all(store, place, timeout_s)
        address = _own_address(place, security) if len(hosts) > 1 else ""
        if not address and (comes_again or place.later):  # for other hosts that come later, if possible
            with suppress(UserError):
                address = _own_address(place, security)
        token = security.token or secrets.token_bytes(_TOKEN_BYTES)
        with ExitStack() as stack:
            control_server = stack.enter_context(ControlServer(place, terms, token, settings=settings))
            offer = {"unix": control_server.listen("unix")}
            if address:
                offer["tcp"] = control_server.listen(f"tcp:{address}:0")
            if not security.token:
                offer["token"] = token.hex()
            store.set("leader", json.dumps({**_mine(place), **offer}))
            stack.pop_all()
        return ProcessGroup(place, control_server, token, address, security, timeout_s)
    except ManyhandsError as error:
        store.set("leader", json.dumps({**_mine(place), "refused": str(error)}))
        _await_readers(store, place)
        raise


def join_group(
    place: ProcessPlace,
    terms: Sequence[Term],
    name: str,
    *,
    security: Security,
    timeout_s: float,
    comes_again: bool = False,
) -> GroupMember:
    """Find the leader of the run `name` and open the control connection to it; see `lead_group`."""
    settings = _settings(security, comes_again)
    if place.leader is not None:
        token = _token(place.leader, security)
        address = _near(place.leader) or f"tcp:{place.leader}"
        leader, deadline = f"the leader at {place.leader}", time.monotonic() + min(_LAST_RUN_S, timeout_s)
        while True:
            try:
                connection = open_control_connection(
                    place, leader, address, token, terms, timeout_s=timeout_s, settings=settings
                )
                break
            except RunEnding:  # the leader may still be closing its run before this one, at the same address
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_TICK_S)
        address = address_towards(place.leader.rpartition(":")[0])
        return GroupMember(place, connection, token, address, security, timeout_s)
    store = PrefixStore(f"manyhands/{name}", place.open_store(timeout_s))
    _sit_down(store, place, follows_another=comes_again)
    offer = _read_leader(store, place, timeout_s)
    token = security.token or bytes.fromhex(str(offer.get("token", "")))
    if not token:
        raise UserError(
            f"{place.name} has no certificate, but the leader, {offer['name']}, has one; give every process --tls DIR, "
            "with the folder that `manyhands certificates` made for its host"
        )
    near = offer["host"] == host_identity()
    if not near and "tcp" not in offer:
        raise UserError(
            f"{place.name} cannot join: the run started on one host, that of {offer['name']}, and listens only there; "
            "start it with --tls DIR, or with --insecure if you trust the network, and let workers join later"
        )
    address = offer["unix"] if near else offer["tcp"]
    connection = open_control_connection(
        place, offer["name"], address, token, terms, timeout_s=timeout_s, settings=settings
    )
    address = address_towards(offer["tcp"].split(":")[1]) if "tcp" in offer else ""
    return GroupMember(place, connection, token, address, security, timeout_s)


def _mine(place: ProcessPlace) -> dict[str, str]:
    return {
        "name": place.name,
        "host": host_identity(),
        "version": __version__,
        "process": f"process {os.getpid()} ({place.name})",
    }


def _sit_down(store: Store, place: ProcessPlace, *, follows_another: bool = False) -> None:
    mine = json.dumps({**_mine(place), "nonce": secrets.token_hex(8)})
    there = store.compare_set(f"here/{place.rank}", "", mine).decode()
    if there == mine:
        return
    other = json.loads(there)
    if (other["host"], other["process"]) == (host_identity(), _mine(place)["process"]):
        return  # this same process, which lost its control connection and rejoins
    if follows_another:
        store.set(f"here/{place.rank}", mine)  # only the leader can tell whether the other process is dead
        return
    raise UserError(
        f"two processes have rank {place.rank}: {other['process']} and {_mine(place)['process']}; give each its own "
        "rank, or each job its own port"
    )


def _settings(security: Security, comes_again: bool) -> Settings:
    # If a lost process may rejoin, a wrong verdict is cheap, so the liveness times are shorter.
    return Settings(liveness=LivenessTimes() if comes_again else _PATIENT, security=security)


def _own_address(place: ProcessPlace, security: Security) -> str:
    """Where other hosts reach the leader; UserError if they cannot, or must not."""
    if place.master is None:
        raise UserError(f"{place.name} does not know the address at which other hosts can reach it")
    address = address_towards(place.master)
    if is_loopback(address):
        raise UserError(
            f"MASTER_ADDR={place.master} is {address} on {place.host}, the host of rank 0, which no other host can "
            "reach; give an address that all hosts can reach"
        )
    security.check_address(address)
    return address


def _wait_for_all(store: Store, place: ProcessPlace, timeout_s: float) -> tuple[tuple[int, ...], ...]:
    keys = [f"here/{rank}" for rank in range(place.world - place.later)]
    if not comes_true(lambda: store.check(keys), timeout_s):
        late = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if late:
            raise PeerTimeout(
                f"{ranks_named(late)} of {place.world} did not connect within {timeout_s:.0f} s; check that it was "
                "started with the same MASTER_ADDR and MASTER_PORT, and that it did not fail before it called fit",
                late[0],
            )
    seats = [json.loads(seat.decode()) for seat in store.multi_get(keys)]
    for seat in seats:
        _require_version(seat, place)
    return hosts_of([seat["host"] for seat in seats])


def _await_readers(store: Store, place: ProcessPlace) -> None:
    """Wait briefly until all present processes have read the reason: the store's server may end with this process."""
    if not isinstance(store, PrefixStore) or not isinstance(store.underlying_store, TCPStore):
        return
    others = (rank for rank in range(place.world - place.later) if rank != place.rank)
    heard = [f"heard/{rank}" for rank in others if store.check([f"here/{rank}"])]
    comes_true(lambda: not heard or store.check(heard), _HEARD_S)


def _require_version(other: Mapping[str, str], place: ProcessPlace) -> None:
    if other["version"] != __version__:
        raise UserError(
            f"{other['name']} runs manyhands {other['version']}, but {place.name} runs {__version__}; install "
            "the same release on all hosts"
        )


def _read_leader(store: Store, place: ProcessPlace, timeout_s: float) -> dict[str, str]:
    # Slightly longer than the leader waits for all ranks: its answer then names the missing ones.
    patience_s = timeout_s + 5.0
    if not comes_true(lambda: store.check(["leader"]), patience_s):
        raise PeerTimeout(
            f"{place.name} (rank {place.rank}): rank 0, the leader, did not connect within {patience_s:.0f} s; "
            "check that it was started, and that it did not fail before it called fit",
            0,
        )
    offer: dict[str, str] = json.loads(store.get("leader").decode())
    _require_version(offer, place)
    if "refused" in offer:
        store.set(f"heard/{place.rank}", "")
        raise ManyhandsError(f"the leader, {offer['name']}, cannot start: {offer['refused']}")
    return offer


def _listen(control_server: ControlServer, leader: str) -> None:
    near = _near(leader)
    try:
        control_server.listen(near or listening_at(leader))
    except UserError as error:
        cause = error.__cause__
        if near is None or not isinstance(cause, OSError) or cause.errno != errno.EADDRINUSE:
            raise
        raise UserError(
            f"address {leader!r}: cannot listen there: it is in use by another run that this host leads; give "
            "the leader another port"
        ) from error


def _near(leader: str) -> str | None:
    """The Unix socket of a leader that only its own host reaches, where users are compared; None for any other."""
    if not is_loopback(leader.rpartition(":")[0]):
        return None
    return f"unix:manyhands-{hashlib.sha256(leader.encode()).hexdigest()[:32]}"


def _token(leader: str, security: Security) -> bytes:
    """The run's secret; without certificates, where processes share only the address, one that is not secret."""
    return (
        security.token
        or hashlib.sha256(f"manyhands without certificates, led from {leader}".encode()).digest()
    )
