"""How wrong plans were, task by task, and how fast `auto` is, for docs/plan.md."""

from __future__ import annotations

import statistics
from typing import Any

from results_read import RENAMED, RESULTS, load, markdown

__all__ = ["auto_speed", "plan_errors"]


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
            "verified",
            "`mirrored`",
        ]
    ]
    for result in results:
        rows += [_case_row(case, result["cores"]) for case in result["cases"]]
    return "\n\n".join([*(_sentence(result) for result in results), markdown(rows)])


def _sentence(result: dict[str, Any]) -> str:
    told, held_out = result["all"], result["held_out"]
    apart = ""
    if held_out is not None:
        apart = (
            f" On the tasks that were named before any of them was measured (the bound on the costs of a step "
            f"came after a first run of them): {_percent(held_out['error']['median'])} and "
            f"{_percent(held_out['error']['p90'])}, by the null model {_percent(held_out['null']['median'])} and "
            f"{_percent(held_out['null']['p90'])}."
        )
    error, null, picks = told["error"], told["null"], ("regret", "verified", "mirrored")
    within = [_percent(told[name]["within_5_percent"]) for name in picks]
    worst = [_percent(told[name]["worst"]) for name in picks]
    return (
        f"On {result['cores']} cores, {told['predictions']} predictions in {result['rounds']} rounds: the median error "
        f"of a step's time is {_percent(error['median'])}, nine of ten are within {_percent(error['p90'])}; the ± that "
        f"was said held for {_percent(told['covered'])}. The null model, the time of `single` divided by the workers, "
        f"is wrong by {_percent(null['median'])} in the median.{apart} Of {told['choices']} choices (up to six "
        f"constraints for a task), {within[0]} are within 5 % of the best plan that was seen, by `--verify 3` "
        f"{within[1]}, by always taking `mirrored` {within[2]}; the worst are {worst[0]}, {worst[1]} and {worst[2]} "
        "slower."
    )


def _case_row(case: dict[str, Any], cores: int) -> list[str]:
    errors = sorted(abs(row["error"]) for row in case["rows"])
    equal = next(one for one in case["choices"] if one["constraint"] == "equal")
    mirrored = equal["mirrored_regret"]
    return [
        f"{RENAMED.get(case['task'], case['task'])}, {case['workers']} on {cores}",
        str(len(errors)),
        _percent(statistics.median(errors)),
        _percent(errors[-(-9 * len(errors) // 10) - 1]),
        _percent(errors[-1]),
        _percent(statistics.median(abs(row["null_error"]) for row in case["rows"])),
        f"`{equal['predicted']}` {_percent(equal['regret'])}",
        f"`{equal['verified']}` {_percent(equal['verified_regret'])}",
        "–" if mirrored is None else _percent(mirrored),
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
