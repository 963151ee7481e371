"""What somebody else said, made fit to be shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import printable


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("plain, ä, 猫 and \N{GRINNING FACE}", "plain, ä, 猫 and \N{GRINNING FACE}"),
        ("\x1b[2J\x07", r"\x1b[2J\x07"),
        ("two\nlines\r\t", r"two\nlines\r\t"),
        ("\ud800", r"\ud800"),
        ("\u202e\u2028\x9b", r"\u202e\u2028\x9b"),
        ("", ""),
    ],
)
def test_what_a_terminal_would_obey_is_written_out(said: str, shown: str) -> None:
    assert printable(said) == shown


def test_what_is_long_is_cut() -> None:
    assert printable("x" * 500, 10) == "x" * 10 + "…"


@given(st.text(st.characters(codec=None)), st.integers(0, 50))
def test_whatever_is_said_is_one_short_line_of_text(said: str, at_most: int) -> None:
    shown = printable(said, at_most)
    assert shown.isprintable()
    assert shown.encode().decode() == shown
    assert len(shown) <= 10 * at_most + 1
