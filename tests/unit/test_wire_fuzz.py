"""Damaged frames and handshakes against every reader, a few thousand of a seed; and the fuzzer finds what is broken."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.transport import messages, tls
from manyhands.transport.frames import FrameDecoder
from manyhands.transport.hub.handshake import Handshake
from wire_fuzz import TARGETS, Failure, fuzz

SEED = 20_261_115
CASES = 3000  # about 2 s


@pytest.mark.parametrize("target", TARGETS)
def test_whatever_is_damaged_is_refused_and_nothing_else_happens(target: str) -> None:
    fuzz(target, SEED, 0, max(100, int(CASES * TARGETS[target])))


def _believes_all(self: Handshake, proof: bytes, expected: bytes) -> None:
    del self, proof, expected


def _stumbles(self: Handshake, proof: bytes, expected: bytes) -> None:
    del self
    {expected: None}[proof]


def _allocates_first(self: FrameDecoder[Any], header: Any, target: memoryview) -> None:
    raise MemoryError(f"{header.body_bytes} bytes")


@pytest.mark.parametrize(
    ("target", "place", "name", "broken"),
    [
        ("frames", messages, "_text", lambda data, where: data.decode(errors="surrogateescape")),
        ("frames", FrameDecoder, "_fill", _allocates_first),
        ("handshakes", Handshake, "_compare", _believes_all),
        ("handshakes", Handshake, "_compare", _stumbles),
        ("hub", Handshake, "_compare", _stumbles),
        ("tls", tls, "why_refused", lambda error: {}[error]),
    ],
)
def test_the_fuzzer_finds_a_broken_reader(
    target: str, place: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, name, broken)
    with pytest.raises(Failure, match=f"of {target}"):
        fuzz(target, SEED, 0, CASES)
