"""What the figures of a comparison show, in sentences.

A difference is called one only where the repeats do not overlap: every run of the one strategy on the same side of
every run of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from manyhands.engine.options import Slowdown
from manyhands.lab.compare.figures import CompareRow, Figures, Spread

_ALIKE = 1.05  # medians this near are called alike
_WAITS = 0.10  # a share of waiting worth a word
_FREE = 0.05  # and one that is none
_OF_CODECS = ("codec=", "feedback=")
_HARDLY_COMPRESS = ("fp16", "bf16", "")
"""What a codec must beat: half the bytes for next to nothing, or all of them."""


def paragraph(found: Figures, slow: Slowdown | None = None, bandwidth: str | None = None) -> list[str]:
    """All sentences; `slow` and `bandwidth` are what was made harder on purpose."""
    rows = [row for row in found.rows if row.runs]
    waiting = _waiting(rows) if slow is None else _slowed(rows, slow)
    sentences = [*_frontier(found, rows), *_target(found, rows), *_speed(rows), *waiting, *_staleness(rows)]
    sentences += [*_quality(found, rows), *_codecs(rows)]
    if bandwidth is not None:
        sentences += _network(rows, bandwidth)
    prices = [(one, row.name) for row in rows if (one := row.price_per_1000_steps) is not None]
    if found.prices is not None and prices:
        prices.sort(key=lambda one: one[0].median)
        costs = ", ".join(f"{price.median:.3g} by {name}" for price, name in prices)
        sentences.append(f"At {found.prices} an hour, 1,000 steps cost {costs}.")
    if found.about_energy and rows:
        sentences.append(found.about_energy)
    for row in found.rows:
        sentences += [f"{row.name} failed: {sentence}." for sentence in row.failures]
    if not rows:
        return ["No run finished.", *sentences]
    return sentences


def _frontier(found: Figures, rows: Sequence[CompareRow]) -> list[str]:
    """Quality and time together: who ended best, after how long, and who was faster for a worse end."""
    ranked = _by_quality(found, rows)
    if len(ranked) < 2:
        return []
    (value, best), metric = ranked[0], found.target.metric if found.target is not None else ""
    bests = [row for shown, row in ranked if shown == value]
    quick = [row for row in bests if _took(row) < _ALIKE * _took(best)]
    faster = [(best, value)]
    for shown, row in ranked:
        if _ALIKE * _took(row) < _took(faster[-1][0]):
            faster.append((row, shown))
    worse = ", ".join(f"{row.name} ({shown:.4g} after {_took(row):.2f} s)" for row, shown in faster[1:])
    rest = f"; faster, and worse: {worse}" if worse else ", and no other was faster"
    after = f"after {_took(best):.2f} s"
    if len(bests) == len(ranked):
        least = f"; {_names(quick)} took the least time, {_took(best):.2f} s"
        return [f"All ended at {metric} {value:.4g}{f' {after}' if len(quick) == len(bests) else least}."]
    if len(quick) == len(bests):
        return [f"{_names(bests)} ended best, at {metric} {value:.4g} {after}{rest}."]
    return [
        f"{_names(bests)} ended best, at {metric} {value:.4g}, {_names(quick)} {after} and the others later{rest}."
    ]


def _by_quality(found: Figures, rows: Sequence[CompareRow]) -> list[tuple[float, CompareRow]]:
    """The strategies with what they ended with, to the digits that are told: the best first, of equals the fastest."""
    if found.target is None:
        return []
    metric, sign = found.target.metric, 1 if found.target.lower else -1
    known = [
        (float(f"{row.final[metric].median:.4g}"), row) for row in rows if metric in row.final and row.seconds
    ]
    return sorted(known, key=lambda one: (sign * one[0], _took(one[1])))


def _target(found: Figures, rows: Sequence[CompareRow]) -> list[str]:
    target = found.target
    if target is None or not rows:
        return []
    there = sorted((row for row in rows if row.always_reached), key=_seconds)
    why = " (the better half ended there or better)" if target.chosen and len(rows) > 1 else ""
    if not there:
        return [f"No strategy reached {target} in every run."]
    missed = [row for row in rows if not row.always_reached]
    who = "Every strategy" if not missed else _names(there)
    said = [f"{who} reached {target}{why}{' in every run' if missed else ''}."]
    said += [f"{row.name} reached it in {row.reached} of {len(row.runs)} runs." for row in missed]
    if len(there) > 1:
        said += _first(there, found.evaluate_every)
    late = [row for row in there if all(len(run.evaluations) == 1 for run in row.runs)]
    if late and len(late) < len(rows):
        their = "their" if len(late) > 1 else "its"
        said.append(
            f"{_names(late)} could be measured at the end alone, so {their} time to it is an upper bound."
        )
    return said


def _first(there: Sequence[CompareRow], every: int) -> list[str]:
    first, second, last = there[0], there[1], there[-1]
    ratio = _seconds(second) / _seconds(first) if _seconds(first) > 0 else 1.0
    if ratio < _ALIKE:
        alike = [row for row in there if _seconds(row) < _ALIKE * _seconds(first)]
        said = [f"{_names(alike)} took equally long to it: {_s(first)}."]
    else:
        said = [
            f"{first.name} was there first, after {_s(first)}: {ratio:.1f} times as fast as {second.name} "
            f"({_s(second)}). {_certainty(first, second, first.target_s, second.target_s)}"
            f"{_resolution(first, second, every)}"
        ]
    if last not in (first, second) and _seconds(last) > _ALIKE * _seconds(second):
        said.append(f"{last.name} took longest, {_s(last)}.")
    fewest, most = (pick(map(_steps, there)) for pick in (min, max))
    if most - fewest <= every:  # in between nobody looked
        return [*said, "Counted in steps, all were there at the same evaluation or the next."]
    few, many = ([row for row in there if _steps(row) == steps] for steps in (fewest, most))
    counted = f"{_names(few)} needed fewest ({fewest:,.0f}) and {_names(many)} most ({most:,.0f})"
    return [*said, f"Counted in steps, {counted}."]


def _speed(rows: Sequence[CompareRow]) -> list[str]:
    known = [row for row in rows if row.samples_per_s]
    if len(known) < 2:
        return []
    slowest, fastest = (pick(known, key=_pace) for pick in (min, max))
    if _pace(fastest) < _ALIKE * _pace(slowest):
        return [f"All went through about {_pace(fastest):,.0f} samples a second."]
    apart = _apart(fastest.samples_per_s, slowest.samples_per_s)
    overlap = ", within the spread of the repeats" if _repeated(slowest, fastest) and not apart else ""
    return [
        f"{fastest.name} went through most samples, {_pace(fastest):,.0f} a second, and {slowest.name} through fewest, "
        f"{_pace(slowest):,.0f}{overlap}."
    ]


def _slowed(rows: Sequence[CompareRow], slow: Slowdown) -> list[str]:
    how = f"{slow.factor:g} times"
    how += f" in {100 * slow.probability:.0f} % of steps" if slow.probability < 1 else ""
    how += f" from step {slow.from_step + 1} on" if slow.from_step else ""
    held = [row for row in rows if row.waiting_for(slow.worker) >= _WAITS]
    free = [row for row in rows if row.workers > slow.worker and _wait(row) < _FREE]
    shares = ", ".join(f"{_percent(row.waiting_for(slow.worker))} under {row.name}" for row in held)
    effects = [f"of all workers' time, waiting for it took {shares}"] if held else []
    effects += [f"under {_names(free)} workers waited less than {_percent(_FREE)}"] if free else []
    return [f"Worker {slow.worker} was slowed down, {how}{': ' if effects else ''}{'; '.join(effects)}."]


def _waiting(rows: Sequence[CompareRow]) -> list[str]:
    waits = sorted((row for row in rows if _wait(row) >= _WAITS), key=_wait, reverse=True)
    if not waits:
        most = _percent(max(map(_wait, rows), default=0.0))
        return [f"No workers waited for more than {most} of their time."] if rows else []
    each = ", ".join(
        f"{_percent(_wait(row))} under {row.name}"
        + ("" if row.waits_mostly_for is None else f" (mostly for worker {row.waits_mostly_for})")
        for row in waits
    )
    return [f"Workers spent {each} of their time waiting."]


def _staleness(rows: Sequence[CompareRow]) -> list[str]:
    stale = [row for row in rows if row.staleness_max > 0]
    if not stale:
        return []
    each = "; ".join(
        f"{row.name} {row.staleness_mean.median:.2f} on average and {row.staleness_max} at most"
        for row in stale
        if row.staleness_mean is not None
    )
    others = "" if len(stale) == len(rows) else "; the other strategies had no staleness"
    return [f"Updates were computed from stale parameters: {each}{others}."]


def _quality(found: Figures, rows: Sequence[CompareRow]) -> list[str]:
    """Who ended worst by the target's metric, and whether that is chance: the best is said before. All of scores."""
    said, ranked = [], _by_quality(found, rows)
    if found.target is not None and len(ranked) > 1 and ranked[-1][0] != ranked[0][0]:
        (value, worst), best, metric = ranked[-1], ranked[0][1], found.target.metric
        worsts = [row for shown, row in ranked if shown == value]
        certainty = _certainty(best, worst, best.final[metric], worst.final[metric])
        said.append(f"{_names(worsts)} ended worst, at {metric} {value:.4g}. {certainty}")
    scores = [name for name in found.scores if found.target is None or name != found.target.metric]
    return said + [sentence for metric in scores for sentence in _ended(rows, metric)]


def _ended(rows: Sequence[CompareRow], metric: str) -> list[str]:
    known = [row for row in rows if metric in row.final]
    if len(known) < 2:
        return []
    ranked = sorted(known, key=lambda row: row.final[metric].median, reverse=True)
    best, worst = ranked[0], ranked[-1]
    high, low = best.final[metric], worst.final[metric]
    if f"{high.median:.4g}" == f"{low.median:.4g}":  # to the digits that are told
        return [f"All ended at {metric} {high.median:.4g}."]
    bests, worsts = ([row for row in ranked if row.final[metric].median == end.median] for end in (high, low))
    said = f"{_names(bests)} ended best, at {metric} {high.median:.4g}, and {_names(worsts)} worst, at {low.median:.4g}"
    return [f"{said}. {_certainty(best, worst, high, low)}"]


def _codecs(rows: Sequence[CompareRow]) -> list[str]:
    """Of strategies that differ by their codec alone: who was at the target before the one that hardly compresses."""
    families: dict[str, dict[str, CompareRow]] = {}
    for row in rows:
        words = row.name.split()
        codec = " ".join(word for word in words if word.startswith(_OF_CODECS)).removeprefix("codec=")
        family = " ".join(word for word in words if not word.startswith(_OF_CODECS))
        families.setdefault(family, {})[codec] = row
    said = []
    for family, by_codec in families.items():
        beside = next((codec for codec in _HARDLY_COMPRESS if codec in by_codec), None)
        if len(by_codec) < 2 or beside is None or not by_codec[beside].always_reached:
            continue
        others = [(codec or "no codec", row) for codec, row in by_codec.items() if codec != beside]
        said.append(_beside(family, beside or "no codec", by_codec[beside], others))
    return said


def _beside(family: str, name: str, base: CompareRow, others: Sequence[tuple[str, CompareRow]]) -> str:
    """Each of `others`, by the name of its codec, beside one of the same family."""
    times = {codec: _seconds(base) / max(_seconds(row), 1e-9) for codec, row in others if row.always_reached}
    groups = {
        "paid": [f"{codec} ({ratio:.1f} times as fast)" for codec, ratio in times.items() if ratio > _ALIKE],
        "made no difference": [codec for codec, ratio in times.items() if 1 / _ALIKE <= ratio <= _ALIKE],
        "lost": [f"{codec} ({1 / x:.1f} times as long)" for codec, x in times.items() if x < 1 / _ALIKE],
    }
    groups["lost"] += [f"{codec} (not there in every run)" for codec, _ in others if codec not in times]
    each = "; ".join(f"{', '.join(who)} {what}" for what, who in groups.items() if who)
    return f"Under {family}, beside {name} and by the time to the target: {each}."


def _network(rows: Sequence[CompareRow], bandwidth: str) -> list[str]:
    touched = [row for row in rows if row.strategy.uses_network]
    not_touched = [row for row in rows if not row.strategy.uses_network]
    said = [f"TCP was limited to {bandwidth}, all of it together."] if touched else []
    if not_touched:
        do, them = ("do", "them") if len(not_touched) > 1 else ("does", "it")
        said.append(
            f"{_names(not_touched)} {do} not use the network on one host, so --bandwidth did not affect {them}."
        )
    return said


def _apart(one: Spread | None, other: Spread | None) -> bool:
    """Whether every value of the one is on the same side of every value of the other."""
    return one is not None and other is not None and (one.high < other.low or other.high < one.low)


def _certainty(one: CompareRow, other: CompareRow, first: Spread | None, second: Spread | None) -> str:
    """Whether a difference is more than chance, as far as repeats can tell."""
    if not _repeated(one, other):
        return "With one run each, the effect of chance was not measured."
    if _apart(first, second):
        runs = min(len(one.runs), len(other.runs))
        return f"The difference exceeds the spread: each of {runs} runs of the one beat each of the other."
    return "The difference is within the spread of the repeats."


def _resolution(first: CompareRow, second: CompareRow, every: int) -> str:
    """A caveat where two are apart by less than the time between evaluations; none where they took as many steps."""
    if _steps(first) == _steps(second):
        return ""
    between_s = max(
        run.seconds / run.steps * every for row in (first, second) for run in row.runs if run.steps
    )
    if _seconds(second) - _seconds(first) >= between_s:
        return ""
    return f" The difference is less than the time between two evaluations, {between_s:.2f} s."


def _repeated(one: CompareRow, other: CompareRow) -> bool:
    return min(len(one.runs), len(other.runs)) > 1


def _median(pick: Callable[[CompareRow], Spread | None]) -> Callable[[CompareRow], float]:
    def median(row: CompareRow) -> float:
        spread = pick(row)
        return spread.median if spread is not None else 0.0

    return median


_took = _median(lambda row: row.seconds)
_seconds = _median(lambda row: row.target_s)
_steps = _median(lambda row: row.target_steps)
_pace = _median(lambda row: row.samples_per_s)
_wait = _median(lambda row: row.waiting)


def _names(rows: Sequence[CompareRow]) -> str:
    *others, last = [row.name for row in rows]
    return f"{', '.join(others)} and {last}" if others else last


def _s(row: CompareRow) -> str:
    return f"{_seconds(row):.2f} s" if _seconds(row) < 100 else f"{_seconds(row):.0f} s"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
