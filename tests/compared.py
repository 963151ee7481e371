"""Runs of a comparison that were never run, for tests of what is made of them."""

from collections.abc import Sequence
from typing import Any

from manyhands.lab.compare.comparison import Target, parse_strategies
from manyhands.lab.compare.figures import FailedTrial, Figures, Measured, Point, figures
from manyhands.lab.compare.findings import paragraph
from manyhands.strategy import Strategy

TWO = parse_strategies("allreduce; ps consistency=async")


def measured(
    place: int = 0, repeat: int = 0, *, step_s: float = 0.1, final: float = 0.9, **changes: object
) -> Measured:
    """A run of 20 steps, evaluated every 5: accuracy grows evenly to its final value."""
    values = {
        "place": place,
        "repeat": repeat,
        "steps": 20,
        "samples": 200,
        "seconds": 20 * step_s,
        "losses": tuple(Point(step=n, at_s=n * step_s, values={"loss": 1 / n}) for n in range(1, 21)),
        "evaluations": tuple(
            Point(step=n, at_s=n * step_s, values={"evaluation_loss": 2 / n, "accuracy": final * n / 20})
            for n in (5, 10, 15, 20)
        ),
        "accounted_s": 4.0,
        "waited_s": 0.0,
        "waited_for_s": {},
        "messages": 40,
        "num_bytes": 4000,
        "busiest_bytes": 3000,
    }
    return Measured(**{**values, **changes})


def found(
    *runs: Measured | FailedTrial, target: Target | None = None, strategies: Sequence[Strategy] = TWO
) -> Figures:
    """The figures of such runs, with two workers each."""
    return figures([(strategy, 2) for strategy in strategies], runs, target, 5)


def reported(one: Figures, **conditions: Any) -> str:
    """What is said of them."""
    return " ".join(paragraph(one, **conditions))
