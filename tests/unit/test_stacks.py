"""Where a role is, told in one line of its stack."""

from __future__ import annotations

from pathlib import Path

import manyhands
from manyhands.places.local import entry
from manyhands.places.local.stacks import Frame, call_of

OURS = Path(manyhands.__file__).resolve().parent


def frames(*files: str | Path) -> list[Frame]:
    return [Frame(file=str(file), line=7, function="step") for file in files]


def test_the_users_own_line_comes_first_and_then_the_call_of_the_strategy() -> None:
    exchange, begins = OURS / "strategies" / "allreduce" / "exchange.py", Path(entry.__file__).resolve()
    assert call_of(frames(exchange, "/home/me/train.py", begins)) == "in step (train.py:7)"
    assert call_of(frames(exchange, begins)) == "in step() (strategies/allreduce/exchange.py:7)"
    assert call_of([]) == "at an unknown place"


def test_whoever_started_the_process_of_a_role_is_not_taken_for_the_user() -> None:
    stack = frames(
        OURS / "strategies" / "allreduce" / "exchange.py", Path(entry.__file__).resolve(), "/opt/starter.py"
    )
    assert call_of(stack) == "in step() (strategies/allreduce/exchange.py:7)"
