"""An explanation as one paragraph: where the time goes, which worker is slow, and what to do about it."""

from __future__ import annotations

from manyhands.observe.analyse.explain import Explanation, Parts
from manyhands.observe.analyse.pace import Slow
from manyhands.observe.analyse.remarks import about_late, planned_waits, straggler_advice

__all__ = ["PART_WORDS", "paragraph"]

PART_WORDS = {
    "compute_ms": "compute",
    "exchange_ms": "exposed communication",
    "wait_ms": "waiting for stragglers",
    "apply_ms": "servers applying updates",
    "input_ms": "input",
    "other_ms": "other",
}  # the parts of a step, as they are called in tables and sentences

_MIN_SAID = 0.005  # parts with a smaller share are not mentioned
_WORTH_IT = 0.10  # share of a step above which advice is given
_MAX_NAMED = 3


def paragraph(found: Explanation, strategy: str = "mirrored") -> str:
    """Return the paragraph on a run under `strategy`, with the cause before the remedy."""
    sentences = [_split(found), *(_about(slow) for slow in found.slow[:_MAX_NAMED])]
    if found.late is not None and not found.slow:
        said = about_late(found.late)
        sentences.append(f"{said[:1].upper()}{said[1:]}.")
    elif len(found.workers) > 1 and not found.slow:
        sentences.append("No worker is slower than the others for long.")
    if planned := planned_waits(strategy):
        sentences.append(planned)
    overhead = found.evaluate_ms + found.checkpoint_ms
    if overhead >= _WORTH_IT / 2 * found.parts.step_ms:
        sentences.append(
            f"Evaluation ({found.evaluate_ms:.1f} ms) and checkpoints ({found.checkpoint_ms:.1f} ms) add "
            f"{overhead:.1f} ms to the average step."
        )
    if found.speedup >= 1.005:
        sentences.append(
            f"With everybody at the median speed and no exchange, a step would take {found.ideal_ms:.1f} ms: "
            f"{found.speedup:.1f} times as fast."
        )
    sentences.append(_advice(found, strategy))
    return " ".join(sentences)


def _split(found: Explanation) -> str:
    shares = _shares(found.parts)
    named = sorted(
        (field for field in shares if shares[field] >= _MIN_SAID), key=lambda field: -shares[field]
    )
    listed = ", ".join(
        f"{getattr(found.parts, field):.1f} ms ({100 * shares[field]:.0f} %) {PART_WORDS[field]}"
        for field in named
    )
    whole = f"{found.parts.step_ms:.1f} ms"
    if len(found.workers) == 1:
        return f"The median step takes {whole}: {listed}."
    if found.synchronous:
        return f"The median step takes {whole}, the time of the last worker to arrive: {listed}."
    return f"Every worker goes at its own pace; on average over them the median step takes {whole}: {listed}."


def _about(slow: Slow) -> str:
    numbers = f"{slow.ratio:.1f} times the median of the others"
    against = f"({slow.compute_ms:.1f} ms a step against {slow.others_ms:.1f} ms)"
    name = slow.name[:1].upper() + slow.name[1:]
    if slow.until_step is not None:
        when = f"from step {slow.since_step} to step {slow.until_step}"
        return f"{name} computed {numbers} {when} {against}, then no more."
    if slow.from_the_start:
        return f"{name} computes {numbers} from the start {against}."
    sentence = f"{name} computes {numbers} since step {slow.since_step} {against}"
    if slow.step_before_ms is None or slow.step_since_ms is None:
        return sentence + "."
    before, since = f"{slow.step_before_ms:.1f} ms", f"{slow.step_since_ms:.1f} ms"
    return f"{sentence}: the run's steps took {before} before, and {since} since."


def _advice(found: Explanation, strategy: str) -> str:
    """Return what to try first, by the largest part of a step that is not compute."""
    shares = _shares(found.parts)
    losses = {
        field: shares[field] for field in ("wait_ms", "exchange_ms", "apply_ms", "input_ms", "other_ms")
    }
    step_ms = found.parts.step_ms
    losses["overhead"] = (found.evaluate_ms + found.checkpoint_ms) / step_ms if step_ms > 0 else 0.0
    largest = max(losses, key=lambda field: losses[field])
    lasting = [slow for slow in found.slow if slow.until_step is None]
    if lasting and (largest == "wait_ms" or losses[largest] < _WORTH_IT):
        return _about_straggler(lasting[0], strategy if found.synchronous else "")
    if losses[largest] < _WORTH_IT:
        return "Nearly all of it is compute: only faster computing, or more workers, makes it faster."
    if largest == "wait_ms" and found.late is not None:
        return f"What worker {found.late.worker} does besides computing is what the others wait for."
    if largest == "wait_ms":
        return (
            "No worker is slow for long, they take turns at being late: a bound on staleness "
            "(ps consistency=bounded:4) hides such passing delays."
            if found.synchronous
            else "A larger bound on staleness, or consistency=async, waits less."
        )
    return {
        "exchange_ms": "Exchange is the largest loss: a larger batch gives each exchange more compute to pay for it.",
        "apply_ms": "Servers applying updates are the largest loss: more of them (ps servers=…) share the work.",
        "input_ms": "Getting the samples is the largest loss: have loader processes read ahead "
        "(Task(loading=Loading(workers=2))), or keep them in memory.",
        "other_ms": "Look at what happens around compute: the step's time is in none of its parts.",
        "overhead": "Evaluate and save less often.",
    }[largest]


def _about_straggler(slow: Slow, strategy: str) -> str:
    first = f"Look at {slow.name} first: what else runs there, and whether its core or its input is slower."
    advice = straggler_advice(strategy)
    return f"{first} {advice[:1].upper()}{advice[1:]}." if advice else first


def _shares(parts: Parts) -> dict[str, float]:
    whole = parts.step_ms
    return {field: getattr(parts, field) / whole if whole > 0 else 0.0 for field in PART_WORDS}
