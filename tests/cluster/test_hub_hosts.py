"""Hubs of two hosts, over a cable that is listened to: what passes in the clear, and who is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from certificates import HOSTS, careless_security, folders, run_security
from hosts import Hosts, Wiretap, standing_on, two_hosts
from hubs import TOKEN, Number, Party
from manyhands.errors import UserError
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost, Rejected, Settings
from manyhands.transport.security import Security

__all__ = ["two_hosts"]


@pytest.fixture
def party() -> Iterator[Party]:
    party = Party()
    yield party
    party.close()


def meet(party: Party, hosts: Hosts, first: Security, second: Security) -> tuple[Hub, Hub]:
    """Member 1 on the first host, which listens on all its addresses, and member 2 on the second, which dials."""
    one, two = (
        party.add(number, settings=Settings(security=each)) for number, each in ((1, first), (2, second))
    )
    with standing_on(hosts.names[0]):
        port = one.listen("tcp:0.0.0.0:0").rpartition(":")[2]
    with standing_on(hosts.names[1]):
        two.connect(1, f"tcp:{hosts.address(0)}:{port}")
    return one, two


def test_packets_between_hosts_show_tensors_only_where_the_user_said_so(two_hosts: Hosts) -> None:
    content = os.urandom(300_000)
    pieces = [content[at : at + 16] for at in range(0, len(content) - 16, 1000)]
    seen = {}
    ways = {"insecure": (Security.insecure(),) * 2, "tls": (run_security(HOSTS[0]), run_security(HOSTS[1]))}
    for name, (first, second) in ways.items():
        party = Party()
        with Wiretap(two_hosts.names[0]) as tap:
            _, two = meet(party, two_hosts, first, second)
            assert party.one(2, Joined).member == 1
            assert two.send(1, Number(value=1), [content])
            assert bytes(party.one(1, Arrived).payload) == content
            party.close()
            heard = tap.heard()
        assert len(heard) > len(content)
        seen[name] = sum(piece in heard for piece in pieces)
        assert (b"role 2" in heard) is (name == "insecure")
        assert TOKEN not in heard
    assert seen["insecure"] > 0.9 * len(pieces)  # the others lie in two packets
    assert seen["tls"] == 0


def test_a_role_without_the_runs_certificate_is_refused_with_its_address(
    party: Party, two_hosts: Hosts
) -> None:
    foreign_row = careless_security(folders("other") / HOSTS[1])
    one, two = meet(party, two_hosts, run_security(), foreign_row)
    remote = party.one(1, Rejected)
    assert remote.reason.startswith(f"{two_hosts.address(1)}: its certificate is from another authority")
    assert "it refused this end's certificate" in party.one(2, Lost).reason
    assert one.members() == two.members() == ()


def test_a_hub_beyond_loopback_is_refused_without_tls_unless_the_user_says_so(
    party: Party, two_hosts: Hosts
) -> None:
    hub = party.add(3)
    with standing_on(two_hosts.names[0]):
        for address in ("tcp:0.0.0.0:0", f"tcp:{two_hosts.address(0)}:0"):
            with pytest.raises(UserError, match=r"--tls DIR.*manyhands certificates.*--insecure"):
                hub.listen(address)
        with pytest.raises(UserError, match=r"--tls DIR.*manyhands certificates.*--insecure"):
            hub.connect(1, f"tcp:{two_hosts.address(1)}:80")
    meet(party, two_hosts, Security.insecure(), Security.insecure())
    assert party.one(2, Joined).member == 1
