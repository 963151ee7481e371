"""What workers of different hosts exchange in a loop of their own goes through: TLS, or Gloo and a warning."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from certificates import HOSTS, folders
from manyhands.engine.options import TLS_VARIABLE, Options
from manyhands.errors import UserError
from manyhands.interop.own_loop import connect
from manyhands.places.external.process_place import ProcessPlace
from manyhands.transport.link.interface import Message, Received
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.tls import SecureSocket


class NoGloo(Exception):
    """In its place, where it was asked for."""


def reach(store: Any, rank: int) -> Any:
    """The links of one of two workers, each on a host of its own as far as they know."""
    rendezvous: Any = SimpleNamespace(world=2, here=(rank,), hosts=((0,), (1,)), name="main", rank=rank)
    return connect._reach_others(rendezvous, store, ProcessPlace(rank=rank, world=2), "", "127.0.0.1", 20.0)


def both(store: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [one.result(240) for one in [threads.submit(reach, store, rank) for rank in range(2)]]


def test_with_certificates_what_they_send_is_under_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS_VARIABLE, str(folders() / HOSTS[0]))
    gloo = SimpleNamespace(_Options=lambda: pytest.fail("Gloo was asked for"))
    monkeypatch.setattr(connect, "ProcessGroupGloo", gloo)
    (first,), (second,) = (tuple(links.values()) for links in both(HashStore()))
    try:
        assert isinstance(first, TcpLink)
        assert isinstance(first._end, SecureSocket)
        first.send(Message(payload=torch.arange(1000.0), kind=1, step=7))
        outcome = second.receive(10.0)
        assert isinstance(outcome, Received)
        assert outcome.message.step == 7
    finally:
        first.close()
        second.close()


def test_without_them_one_of_all_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_gloo(*_: object) -> None:
        raise NoGloo

    monkeypatch.delenv(TLS_VARIABLE, raising=False)
    monkeypatch.setattr(connect, "ProcessGroupGloo", SimpleNamespace(_Options=no_gloo))
    with caplog.at_level(logging.WARNING, "manyhands"), pytest.raises(NoGloo):
        both(HashStore())
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("manyhands: group 'main' spans 2 hosts")
    assert TLS_VARIABLE in said
    assert "\n" not in said


def test_a_host_without_certificates_among_those_with_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one would wait for TLS and the other for Gloo."""
    monkeypatch.setenv(TLS_VARIABLE, str(folders() / HOSTS[0]))
    store = HashStore()
    store.set("tls/1", str(Options().security({}).tls))
    with pytest.raises(UserError, match=r"rank 0 has MANYHANDS_TLS, but rank 1 on another host does not"):
        reach(store, 0)
