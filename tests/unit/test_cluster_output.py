"""A child's output passes through in whole lines, its end is kept, and a lost reader ends nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from manyhands.places.local.children import KEPT_BYTES, Output


@contextmanager
def piped() -> Iterator[tuple[int, Output]]:
    reading, writing = os.pipe()
    output = Output(os.fdopen(reading, "rb"), "stdout")
    try:
        yield writing, output
    finally:
        os.close(writing)
        output.close()


def test_lines_of_two_children_do_not_mix(capsys: pytest.CaptureFixture[str]) -> None:
    with piped() as (write_one, one), piped() as (write_two, two):
        os.write(write_one, "größ".encode()[:4])
        assert one.pump()
        os.write(write_two, b"two\nhalf")
        assert two.pump()
        os.write(write_one, "größer\n".encode()[4:])
        assert one.pump()
        assert capsys.readouterr().out == "two\ngrößer\n"
    assert capsys.readouterr().out == "half"


def test_progress_bars_and_endless_lines_are_not_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    with piped() as (writing, output):
        os.write(writing, b"10 %\r20 %\r30")
        output.pump()
        assert capsys.readouterr().out == "10 %\r20 %\r"
        for _ in range(3):
            os.write(writing, b"x" * 30_000)
            output.pump()
        assert capsys.readouterr().out == "30" + "x" * 90_000


def test_the_end_is_kept_and_the_end_of_the_pipe_is_reported() -> None:
    reading, writing = os.pipe()
    output = Output(os.fdopen(reading, "rb"), "stderr")
    os.write(writing, b"x" * 5000 + b"the end\n")
    os.close(writing)
    assert not output.pump()
    assert output.last_words.endswith(b"xxthe end\n")
    assert len(output.last_words) == KEPT_BYTES
    output.close()


def test_a_closed_stream_of_ours_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with piped() as (writing, output):
        os.write(writing, b"nobody hears\n")
        with open(os.devnull, "w") as closed:
            pass
        monkeypatch.setattr(sys, "stdout", closed)
        assert output.pump()
        assert output.last_words == b"nobody hears\n"
