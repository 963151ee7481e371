"""All sentences that a user can be shown are in one file, which is current."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "docs" / "collect_sentences.py"))


def test_the_file_is_current() -> None:
    written = (ROOT / "docs" / "sentences.txt").read_text(encoding="utf-8")
    assert written == SCRIPT["collect"](), "run `python docs/collect_sentences.py`, and read what is new"


def test_nobody_meets_one_worker_in_the_plural() -> None:
    assert "1 workers" not in (ROOT / "docs" / "sentences.txt").read_text(encoding="utf-8")


def test_a_sentence_is_found_wherever_it_is_given_to_a_call() -> None:
    source = '''
def f(a):
    """A docstring is not shown to users."""
    raise UserError(f"steps is {a}; it must " "be an integer")
    print("one thing " + "and then four more words here" if a else "nothing that is of any use")
    assert a, "an assertion is not shown to users"
    g("two words")
'''
    assert list(SCRIPT["_sentences"](ast.parse(source))) == [
        "steps is {…}; it must be an integer",
        "and then four more words here",
        "nothing that is of any use",
    ]
