"""Epochs over links, in threads: members meet as a view says, a newcomer gets its state, and a loss ends every wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from certificates import run_security
from manyhands.errors import ManyhandsError
from manyhands.places.external.control_messages import Wakeup
from manyhands.places.local.status import NOBODY, State
from manyhands.strategies.allreduce.elastic.elastic_membership import EpochSeat, EpochView, LeaveEpoch
from manyhands.strategies.allreduce.elastic.epochs import LinkedEpochs, Wiring
from manyhands.strategies.allreduce.elastic.exchange import LOST
from manyhands.strategies.allreduce.elastic.member_control import ORDERS, MemberLine
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.transport.security import Security
from manyhands.wire.parcels import Parcel

TOKEN = b"the secret of this run, 32 bytes"
TIMEOUT_S = 20.0


class Reports:
    """A member's context whose launcher is the test."""

    name, rank, world, stopping = "worker", 0, 1, False

    def __init__(self) -> None:
        self._wakeup, self._orders, self._lock = Wakeup(), [], threading.Lock()
        self.said: list[Mapping[str, Any]] = []

    def order(self, message: object) -> None:
        with self._lock:
            self._orders.append(ORDERS.write(message))
        self._wakeup.ring()

    def received(self) -> list[Mapping[str, Any]]:
        self._wakeup.clear()
        with self._lock:
            orders, self._orders = self._orders, []
        return orders

    def send(self, payload: Mapping[str, Any]) -> None:
        self.said.append(payload)

    def mark(
        self, step: int, state: State, waiting_for: int = NOBODY, *, place: tuple[int, int] | None = None
    ) -> None:
        raise AssertionError("nobody computes here")

    def stop_requested(self) -> bool:
        return self.stopping

    def control_fileno(self) -> int:
        return self._wakeup.descriptor


class Party:
    """Members that listen, and the views of them."""

    def __init__(self, stack: ExitStack, count: int, security: Security) -> None:
        wiring = Wiring(address="127.0.0.1", token=TOKEN, security=security)
        self.epochs = [stack.enter_context(closing(LinkedEpochs(wiring, TIMEOUT_S))) for _ in range(count)]
        self.contexts = [Reports() for _ in range(count)]
        self.lines = [
            stack.enter_context(closing(MemberLine(context, member, TIMEOUT_S)))
            for member, context in enumerate(self.contexts)
        ]

    def view(
        self, epoch: int, members: Sequence[int], fresh: Sequence[int] = (), hosts: str = "aabb"
    ) -> EpochView:
        seats = tuple(
            EpochSeat(
                slot=member,
                member=member,
                fresh=member in fresh,
                host=hosts[member],
                address=self.epochs[member].ready(member).address,
            )
            for member in members
        )
        donor = next((member for member in members if member not in fresh), None) if fresh else None
        return EpochView(epoch=epoch, seats=seats, donor=donor)

    def each(self, members: Sequence[int], deed: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(members)) as pool:
            return list(pool.map(deed, members))


@pytest.mark.parametrize("security", [Security.insecure, run_security])
@pytest.mark.parametrize("strategy", [AllReduce(elastic=True), AllReduce(elastic=True, algorithm="ring")])
def test_members_of_two_hosts_sum_and_a_newcomer_has_the_donors_state(
    security: Callable[[], Security], strategy: AllReduce
) -> None:
    state = {
        "step": 3,
        "model": {"w": torch.arange(5.0)},
        "optimizer": {"state": {}},
        "extra": {"samples": 7},
    }
    with ExitStack() as stack:
        party = Party(stack, 4, security())

        def lives(member: int, view: EpochView) -> tuple[list[float], Any]:
            with closing(party.epochs[member].open(view, party.lines[member])) as epoch:
                taken = None
                if view.seats[view.rank_of(member)].fresh:
                    taken = epoch.take()
                elif view.has_fresh:
                    epoch.hand_over(state if member == view.donor else None)
                collective, confirm = epoch.collective(strategy)
                (bucket,) = collective.allocate([Parcel.whole(0, 4, torch.float64, exact=True)])
                bucket.fill_(member + 1.0)
                collective.launch(0)
                collective.finish()
                assert confirm is not None
                confirm()
                summed = bucket.tolist()
                collective.close()
                return summed, taken

        for epoch, (members, fresh) in enumerate(
            [((0, 1, 2), ()), ((0, 2), ()), ((0, 1, 2, 3), (1, 3)), ((3,), ())], 1
        ):
            view = party.view(epoch, members, fresh)
            found = party.each(members, lambda member, view=view: lives(member, view))
            assert [summed for summed, _ in found] == [[sum(members) + len(members) + 0.0] * 4] * len(members)
            for member, (_, taken) in zip(members, found, strict=True):
                assert (taken is not None) is (member in fresh)
                if taken is not None:
                    assert (taken.step, taken.extra) == (3, {"samples": 7})
                    assert torch.equal(taken.model["w"], torch.arange(5.0))


def test_a_loss_ends_the_waits_of_those_who_meet_and_of_those_who_exchange() -> None:
    with ExitStack() as stack:
        party = Party(stack, 3, Security.insecure())
        view = party.view(1, (0, 1, 2))  # member 2 listens, and never answers

        def meets(member: int) -> float:
            began = time.monotonic()
            with pytest.raises(LOST):
                party.epochs[member].open(view, party.lines[member])
            return time.monotonic() - began

        with ThreadPoolExecutor(2) as pool:
            waiting = [pool.submit(meets, member) for member in (0, 1)]
            time.sleep(0.3)
            assert not any(one.done() for one in waiting)
            for member in (0, 1):
                party.contexts[member].order(LeaveEpoch(epoch=1))
            assert all(one.result() < TIMEOUT_S / 2 for one in waiting)

        view = party.view(2, (0, 1))
        opened = party.each((0, 1), lambda member: party.epochs[member].open(view, party.lines[member]))

        def exchanges() -> None:
            collective, _ = opened[0].collective(AllReduce(elastic=True))
            collective.allocate([Parcel.whole(0, 4, torch.float64, exact=True)])
            collective.launch(0)
            with pytest.raises(LOST):
                collective.finish()  # member 1 does not

        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(exchanges)
            time.sleep(0.3)
            assert not waits.done()
            party.contexts[0].order(LeaveEpoch(epoch=2))
            waits.result(TIMEOUT_S / 2)
        for one in opened:
            one.close()


def test_a_member_that_nobody_reaches_though_it_lives_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.strategies.allreduce.elastic.epochs._BLAME_S", 0.2)
    with ExitStack() as stack, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        party = Party(stack, 2, Security.insecure())
        view = party.view(1, (0, 1))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        cut = EpochView(epoch=1, seats=(EpochSeat(slot=0, member=0, host="a", address=where), view.seats[1]))
        with pytest.raises(ManyhandsError, match=rf"rank 1 cannot connect to rank 0 at {where}: .* firewall"):
            party.epochs[1].open(cut, party.lines[1])
