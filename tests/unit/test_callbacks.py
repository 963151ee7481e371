"""Which callback hears what of a run, in which order, and what follows from what it returns or raises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.engine.callbacks import Beginning, Listeners, StopRequest
from manyhands.errors import UserError

FRESH = Beginning(config={}, history=(), resumed=False, path=None)


class Noted(mh.Callback):
    """Writes down what it hears; returns and raises what it is told to."""

    def __init__(self, returns: Mapping[str, Any] | None = None, raises: str = "") -> None:
        self.heard: list[Any] = []
        self._returns, self._raises = returns or {}, raises

    def _take(self, name: str, *what: Any) -> Any:
        self.heard.append((name, *what))
        if name == self._raises:
            raise RuntimeError(f"{name} is broken")
        return self._returns.get(name)

    def on_begin(self, beginning: Beginning) -> None:
        self._take("begin", beginning.resumed)

    def on_step(self, row: Mapping[str, Any]) -> bool | None:
        return self._take("step", row["step"])  # type: ignore[no-any-return]

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:
        return self._take("evaluate", row["step"])  # type: ignore[no-any-return]

    def on_checkpoint(self, step: int, path: Path) -> bool | None:
        return self._take("checkpoint", step, path.name)  # type: ignore[no-any-return]

    def on_end(self, run: Any, error: BaseException | None) -> None:
        self._take("end", run, type(error).__name__)


def step(number: int) -> dict[str, Any]:
    return {"step": number, "loss": 1.0, "seconds": 0.1, "at_s": 0.1}


def test_each_hears_everything_in_order_and_a_checkpoint_after_the_steps_that_it_has_seen() -> None:
    first, second = Noted(), Noted()
    listeners = Listeners([first, second])
    listeners.begin(FRESH)
    listeners.rows([step(1)])
    listeners.saved(2, Path("step-2"))  # its rows come from another worker, and later
    listeners.rows([step(2), {"step": 2, "metrics": {"accuracy": 0.5}}])
    listeners.saved(2, Path("again"))
    listeners.end(None, None)
    assert first.heard == second.heard
    assert first.heard == [
        ("begin", False),
        ("step", 1),
        ("step", 2),
        ("evaluate", 2),
        ("checkpoint", 2, "step-2"),
        ("checkpoint", 2, "again"),
        ("end", None, "NoneType"),
    ]
    assert listeners.stop_request is None


def test_a_resumed_run_has_seen_the_steps_before_it() -> None:
    noted = Noted()
    listeners = Listeners([noted])
    listeners.begin(Beginning(config={}, history=[step(1), step(2)], resumed=True, path=None))
    listeners.saved(2, Path("step-2"))
    assert noted.heard == [("begin", True), ("checkpoint", 2, "step-2")]


@pytest.mark.parametrize("event", ["step", "evaluate", "checkpoint"])
def test_the_first_that_returns_true_is_the_one_who_asked(event: str) -> None:
    listeners = Listeners([Noted(), Noted({event: True}), Noted({event: True})])
    listeners.rows([step(1), {"step": 1, "metrics": {}}])
    listeners.saved(1, Path("step-1"))
    assert listeners.stop_request == StopRequest(name="Noted", step=1)


def test_false_asks_for_nothing_and_anything_else_is_refused() -> None:
    listeners = Listeners([Noted({"step": False})])
    listeners.rows([step(1)])
    assert listeners.stop_request is None
    with pytest.raises(UserError, match=r"Noted.on_step returned 'stop'; return True to ask the run to stop"):
        Listeners([Noted({"step": "stop"})]).rows([step(1)])
    with pytest.raises(UserError, match=r"each must be an instance of a subclass of manyhands\.Callback"):
        mh.Options(callbacks=[print])  # type: ignore[list-item]


def test_after_one_has_raised_all_hear_the_end_and_nothing_else() -> None:
    broken, other = Noted(raises="step"), Noted()
    listeners = Listeners([broken, other])
    with pytest.raises(RuntimeError, match="step is broken") as raised:
        listeners.rows([step(1)])
    assert listeners.broken is broken
    listeners.rows([step(2)])
    listeners.saved(2, Path("step-2"))
    listeners.end(None, raised.value)
    assert broken.heard == [("step", 1), ("end", None, "RuntimeError")]
    assert other.heard == [("end", None, "RuntimeError")]


def test_what_is_raised_at_the_end_is_told_and_keeps_nobody_from_hearing_of_it() -> None:
    broken, other = Noted(raises="end"), Noted()
    with pytest.raises(RuntimeError, match="end is broken"):
        Listeners([broken, other]).end(None, None)
    assert other.heard
    first = ValueError("first")
    Listeners([broken]).end(None, first)
    assert "Noted.on_end raised RuntimeError('end is broken')" in first.__notes__[0]
