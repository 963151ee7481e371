"""Who has been silent for too long, with times from nowhere but here."""

from __future__ import annotations

import pytest

from manyhands.errors import UserError
from manyhands.transport.liveness import LivenessMonitor, LivenessTimes

SILENCE = LivenessTimes(heartbeat_s=0.5, silence_s=5.0, handshake_s=2.0)


def look_often(vigil: LivenessMonitor[str], begin_s: float, end_s: float) -> dict[str, float]:
    """Look every 0.25 s; who was given up, and when."""
    lost: dict[str, float] = {}
    for quarter in range(int(begin_s * 4), int(end_s * 4) + 1):
        for peer, _ in vigil.look(quarter / 4):
            lost.setdefault(peer, quarter / 4)
            vigil.left(peer)
    return lost


def test_a_silent_peer_is_given_up_at_the_limit_and_no_other() -> None:
    vigil: LivenessMonitor[str] = LivenessMonitor(SILENCE, 0.0)
    for peer in ("silent", "alive"):
        vigil.heard(peer, 0.0)
    assert look_often(vigil, 0.0, 4.75) == {}
    vigil.heard("alive", 4.75)
    assert look_often(vigil, 5.0, 9.5) == {"silent": 5.0}


def test_a_newcomer_must_say_who_it_is() -> None:
    vigil: LivenessMonitor[str] = LivenessMonitor(SILENCE, 0.0)
    vigil.arrived("stranger", 0.0)
    vigil.arrived("friend", 0.0)
    vigil.heard("friend", 1.0)
    assert look_often(vigil, 0.0, 4.0) == {"stranger": 2.0}


def test_after_not_looking_for_long_each_peer_is_spared_once() -> None:
    vigil: LivenessMonitor[str] = LivenessMonitor(SILENCE, 0.0)
    vigil.heard("peer", 0.0)
    assert vigil.look(60.0) == []
    assert look_often(vigil, 60.25, 62.0) == {"peer": 60.5}


def test_rare_looks_do_not_spare_for_ever() -> None:
    vigil: LivenessMonitor[str] = LivenessMonitor(SILENCE, 0.0)
    vigil.heard("peer", 0.0)
    assert vigil.look(60.0) == []
    assert [peer for peer, _ in vigil.look(120.0)] == ["peer"]


def test_a_spared_peer_that_is_heard_has_its_whole_time_again() -> None:
    vigil: LivenessMonitor[str] = LivenessMonitor(SILENCE, 0.0)
    vigil.heard("peer", 0.0)
    assert vigil.look(60.0) == []
    vigil.heard("peer", 60.25)
    assert look_often(vigil, 60.5, 66.0) == {"peer": 65.25}


@pytest.mark.parametrize(
    "wrong", [{"heartbeat_s": 0.0}, {"silence_s": -1.0}, {"handshake_s": float("nan")}, {"heartbeat_s": 3.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        LivenessTimes(**wrong)
