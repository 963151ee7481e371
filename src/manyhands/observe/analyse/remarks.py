"""Progress of a run and warnings about it in plain sentences, shared by the page, the terminal and the table.

A sentence names the role, since when, the cost to the others and, where the strategy has one, a remedy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.errors import UserError, format_bytes
from manyhands.observe.analyse.slow_workers import Late, Straggler
from manyhands.observe.analyse.totals import TotalsSnapshot
from manyhands.observe.record.checked_values import number, text, whole
from manyhands.strategy import Strategy
from manyhands.wire.choice import CHOSEN, codec_sentence

_MAX_NAMED = 3
_NOBODY_WAITS = 0.01
_MOST = 2.0  # multiple of its even share of applying above which a server is mentioned


def headline(snapshot: TotalsSnapshot, steps: int) -> list[str]:
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


def straggler_advice(strategy: str) -> str:
    """Return how a straggler need not block others; empty where nothing helps, and for an unknown strategy."""
    try:
        return Strategy.parse(strategy).facts.straggler_advice
    except UserError:
        return ""


def planned_waits(strategy: str) -> str:
    """Return which waiting is inherent to a strategy; empty where none is, and for an unknown strategy."""
    try:
        return Strategy.parse(strategy).planned_waits()
    except UserError:
        return ""


def about_workers(slow: Sequence[Straggler], late: Late | None, strategy: str = "") -> list[str]:
    if slow:
        return [_about_straggler(straggler, strategy) for straggler in slow[:_MAX_NAMED]]
    return [about_late(late)] if late is not None else []


def about_late(late: Late) -> str:
    return (
        f"the others wait {_percent(late.others_wait)} of their median step for worker {late.worker}, which computes "
        "no longer than they do; look at its data loading, evaluation and checkpoints"
    )


def about_imbalance(applying: Sequence[tuple[str, float]]) -> list[str]:
    """Return the warning on an overloaded server; `applying` has each server's name and share of the total."""
    if len(applying) < 2:
        return []
    name, share = max(applying, key=lambda one: one[1])
    even = 1 / len(applying)
    if share < min(_MOST * even, (1 + even) / 2):
        return []
    return [
        f"{name} does {_percent(share)} of the applying instead of {_percent(even)}: the parameters are spread "
        "unevenly over the servers; use more servers (servers=)"
    ]


def about_quiet(seconds: float, last_seen: Sequence[tuple[str, str]]) -> str:
    seen = "; ".join(f"{name} was last seen {doing}" for name, doing in last_seen[:_MAX_NAMED])
    more = len(last_seen) - _MAX_NAMED
    others = f"; and {more} more" if more > 0 else ""
    return f"nothing has happened for {seconds:.0f} s, and the run has not ended: {seen}{others}"


def _about_straggler(straggler: Straggler, strategy: str) -> str:
    times = f"{straggler.ratio:.1f} times slower than the median of the others"
    who = f"worker {straggler.worker}"
    waiting = straggler.others_wait >= _NOBODY_WAITS
    if straggler.until_step is not None:
        when = f"from step {straggler.since_step} to step {straggler.until_step}"
        waited = f"the others waited {_percent(straggler.others_wait)} of their time"
        return f"{who} was {times} {when}: {waited if waiting else 'no worker waited'}"
    when = "from the start" if straggler.from_the_start else f"since step {straggler.since_step}"
    if not waiting:
        return f"{who} is {times} {when}: no worker waits for it"
    sentence = f"{who} is {times} {when}: the others wait {_percent(straggler.others_wait)} of their time"
    return "; ".join(part for part in (sentence, straggler_advice(strategy)) if part)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def layers_sent(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the traffic of each layer, in model order, and how it is sliced; malformed rows are left out.

    Bytes and messages are means over the training steps, summed over all workers.
    """
    found = []
    for row in _rows(summary.get("layers")):
        amounts = {name: number(row.get(name)) for name in ("forward_bytes", "backward_bytes", "messages")}
        if None not in amounts.values():
            found.append({name: text(row.get(name)) for name in ("layer", "how")} | amounts)
    return found


def _rows(found: Any) -> list[Mapping[str, Any]]:
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def privacy_words(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on the privacy guarantee, and on a run that ended because its privacy budget was used up."""
    found = summary.get("privacy")
    if not isinstance(found, Mapping):
        return []
    said = [found.get(name) for name in ("sentence", "ended")]
    words = [text(one) for one in said if isinstance(one, str) and one]
    return [f"{one[:1].upper()}{one[1:]}." for one in words]


def codec_words(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentence on the last choice in a summary, if any; malformed entries are ignored."""
    if CHOSEN not in summary:
        return []
    found = summary[CHOSEN]
    choices = [
        {"step": step, "codec": text(str(row.get("codec"))), "why": text(str(row.get("why")))}
        for row in _rows(found)
        if (step := whole(row.get("step"))) is not None
    ]
    return [f"{codec_sentence(choices if isinstance(found, list) else None)}."]


def speed_words(summary: Mapping[str, Any]) -> str:
    """Of a run of text: tokens a second, MFU and the peak of memory; malformed entries are ignored."""
    tokens, memory = number(summary.get("tokens_per_s")), whole(summary.get("peak_memory_bytes"))
    if tokens is None:
        return ""
    words, mfu = [f"{tokens:,.0f} tokens/s in the median step"], summary.get("mfu")
    if isinstance(mfu, Mapping):
        share, peak = number(mfu.get("share")), number(mfu.get("peak_flops"))
        if share is not None and peak is not None:
            formula = text(mfu.get("formula"))
            words.append(f"MFU {share:.1%} of {peak / 1e12:,.0f} TFLOP/s, by {formula}")
    if memory is not None and memory >= 0:
        where = "GPU" if "device_name" in summary else "process"
        words.append(f"peak memory of a worker's {where} {format_bytes(memory)}")
    return " · ".join(words)
