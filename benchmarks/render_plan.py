"""How wrong plans were, task by task, and how fast `auto` is, for docs/plan.md."""

from __future__ import annotations

import statistics
from typing import Any

from results_read import RESULTS, load, markdown

__all__ = ["auto_speed", "link_errors", "plan_errors"]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def plan_errors() -> str:
    """The errors of all predictions, and what choosing by them cost."""
    names = [name for name in ("plan-2", "plan-16core") if (RESULTS / f"{name}.json").is_file()]
    results = [load(name) for name in names]
    rows = [
        [
            "task, workers on cores",
            "plans",
            "median error",
            "9 of 10 within",
            "worst",
            "null model",
            "chosen, over the best",
            "of 3 tried",
            "`mirrored`",
        ]
    ]
    for result in results:
        rows += [_case_row(case, _cores(result)) for case in result["cases"]]
    return "\n\n".join([*(_sentence(result) for result in results), markdown(rows)])


def _sentence(result: dict[str, Any]) -> str:
    told, held_out = result["all"], result["held_out"]
    apart = ""
    if held_out is not None and held_out == told:
        apart = " All of these tasks were named before any of them was measured."
    elif held_out is not None:
        apart = (
            f" On the tasks that were named before any of them was measured (the bound on the costs of a step "
            f"came after a first run of them): {_percent(held_out['error']['median'])} and "
            f"{_percent(held_out['error']['p90'])}, by the null model {_percent(held_out['null']['median'])} and "
            f"{_percent(held_out['null']['p90'])}."
        )
    error, null, regret = told["error"], told["null"], told["regret"]
    words = {
        "predicted": "by the prediction alone",
        "tried": f"by a trial of {result.get('tried', 'the three fastest')}",
        "all_tried": "by a trial of every plan",
        "mirrored": "by always taking `mirrored`",
        "single": "by always taking `single`",
    }
    ways = [
        f"{text} {_percent(regret[way]['within_5_percent'])} (the worst {_percent(regret[way]['worst'])})"
        for way, text in words.items()
        if way in regret
    ]
    return (
        f"On {_cores(result)} cores, {told['predictions']} predictions in {result['rounds']} rounds: the median error "
        f"of a step's time is {_percent(error['median'])}, nine of ten are within {_percent(error['p90'])}; the ± that "
        f"was said held for {_percent(told['covered'])}. The null model, the time of `single` divided by the workers, "
        f"is wrong by {_percent(null['median'])} in the median.{apart}\n\n"
        f"Choices of each round, in {_cases(told)}; those by trials are judged by the other rounds: of "
        f"{told['choices']}, these are within 5 % of the best plan that was seen: {'; '.join(ways)}."
        f"{_noise(told)}{_apart(held_out, told)}"
    )


def _cores(result: dict[str, Any]) -> str:
    cores, there = result["cores"], result.get("of_cores", result["cores"])
    return str(cores) if cores == there else f"{cores} of {there}"


def _cases(told: dict[str, Any]) -> str:
    """Older results do not say how many."""
    return (
        f"{told['cases']} cases (task, workers, constraint)"
        if "cases" in told
        else "up to six cases of each task"
    )


def _apart(held_out: dict[str, Any] | None, told: dict[str, Any]) -> str:
    """The choices on tasks that were named before they were measured."""
    if held_out is None or held_out == told:
        return ""
    regret = held_out["regret"]
    found = [
        f"{_percent(regret[way]['within_5_percent'])}, the worst {_percent(regret[way]['worst'])}"
        for way in ("predicted", "tried")
    ]
    return f" On those held-out tasks, {_cases(held_out)}: predicted {found[0]}; tried {found[1]}."


def _noise(told: dict[str, Any]) -> str:
    """How far a plan is from itself, and what of the choices is no further from the best."""
    if "repeat_noise" not in told:
        return ""
    ties = [_percent(told["regret"][way]["within_noise"]) for way in ("predicted", "tried")]
    return (
        f" The same plan differs by {_percent(told['repeat_noise'])} from round to round, in the median; where so much "
        f"is a tie, {ties[0]} of the predicted and {ties[1]} of the tried choices are the best."
    )


def _case_row(case: dict[str, Any], cores: str) -> list[str]:
    errors = sorted(abs(row["error"]) for row in case["rows"])
    equal = [one for one in case["choices"] if one["constraint"] == "equal"]

    def chosen(way: str) -> str:
        names = dict.fromkeys(f"`{one['taken'][way]}`" for one in equal)
        return f"{', '.join(names)} {worst(way)}"

    def worst(way: str) -> str:
        return _percent(max(one["regret"][way] for one in equal)) if equal else "–"

    return [
        f"{case['task']}, {case['workers']} on {cores}",
        str(len(errors)),
        _percent(statistics.median(errors)),
        _percent(errors[-(-9 * len(errors) // 10) - 1]),
        _percent(errors[-1]),
        _percent(statistics.median(abs(row["null_error"]) for row in case["rows"])),
        chosen("predicted"),
        chosen("tried"),
        worst("mirrored"),
    ]


def auto_speed() -> str:
    """Whole runs by `auto` beside the best strategy by hand."""
    result = load("auto-2")
    rows = [["task", "`auto` chose", "speed of the best by hand", "the best", "speed of `mirrored`"]]
    rows += [
        [
            case["task"],
            f"`{case['auto']}`",
            f"{case['auto_speed']:.2f}",
            f"`{case['best']}`",
            f"{case['mirrored_speed']:.2f}",
        ]
        for case in result["cases"]
    ]
    repeats = len(next(iter(result["cases"][0]["seconds"].values())))
    sentence = (
        f"Whole runs of about a minute ({repeats} of each) on {result['cores']} cores, {result['workers']} workers, "
        "planning and trials included:"
    )
    return sentence + "\n\n" + markdown(rows)


def link_errors() -> str:
    """Every plan that was measured between hosts."""
    result = load("plan-links")
    rows = [["task", "link", "strategy", "predicted", "seen", "error", "one process ÷ workers"]]
    rows += [
        [
            case["task"],
            case["rate"],
            f"`{case['strategy']}`",
            f"{case['predicted_ms']:.0f} ms",
            f"{case['seen_ms']:.0f} ms",
            f"{100 * case['error']:+.0f} %",
            f"{100 * case['null_error']:+.0f} %",
        ]
        for case in result["rows"]
    ]
    hosts = f"{result['hosts']} hosts of one worker and one core each, which are network namespaces"
    sentence = f"Between {hosts}, measured once:"
    return sentence + "\n\n" + markdown(rows)
