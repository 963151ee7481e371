"""Progress of a run in a few words, shared by bars, log lines and notebooks."""

from __future__ import annotations

from manyhands.observe.analyse.totals import TotalsSnapshot

__all__ = ["clock", "headline", "in_order"]


def headline(snapshot: TotalsSnapshot, steps: int) -> list[str]:
    """Return the phrases on a run of `steps` steps, most important first."""
    words = [f"step {snapshot.step}/{steps}"]
    words.append("loss -" if snapshot.loss is None else f"loss {snapshot.loss:.4g}")
    if snapshot.evaluating:
        words.append("evaluating")
    elif snapshot.steps_per_s > 0:
        words.append(f"{clock((steps - snapshot.step) / snapshot.steps_per_s)} left")
    if snapshot.steps_per_s > 0:
        words.append(f"{snapshot.samples_per_s:,.0f} samples/s")
    return words


def in_order(words: list[str]) -> str:
    """Return the phrases that fit, in reading order: speed before time."""
    return "  ".join(words[:2] + words[:1:-1])


def clock(seconds: float) -> str:
    """Format seconds: `3671` as `1:01:11`, and `71` as `1:11`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
