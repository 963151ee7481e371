"""How far a run is, in a few words: the same beside a bar, in a line of a log and in a notebook."""

from __future__ import annotations

from manyhands.observe.analyse.totals import TotalsSnapshot

__all__ = ["clock", "headline", "in_order"]


def headline(snapshot: TotalsSnapshot, steps: int) -> list[str]:
    """What there is to say of a run of `steps` steps, the most important first."""
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
    """Those that have room, as one reads them: speed stands before time."""
    return "  ".join(words[:2] + words[:1:-1])


def clock(seconds: float) -> str:
    """`3671` as `1:01:11`, and `71` as `1:11`."""
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
