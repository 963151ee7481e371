"""How wrong plans were, task by task, for docs/plan.md."""

from __future__ import annotations

from results_read import load, markdown

__all__ = ["plan_errors"]


def plan_errors() -> str:
    """The errors of all predictions, and what choosing by them cost."""
    result = load("plan-2")
    told, cores = result["summary"], result["cores"]
    rows = [
        ["task", "fastest plan, as predicted", "time over the best", "of `mirrored`", "median error", "worst"]
    ]
    for case in result["cases"]:
        errors = sorted(abs(row["error"]) for row in case["rows"])
        rows.append(
            [
                case["task"],
                f"`{case['chosen']}`",
                f"{100 * case['regret']:.0f} %",
                f"{100 * case['regret_of_mirrored']:.0f} %",
                f"{100 * errors[len(errors) // 2]:.0f} %",
                f"{100 * errors[-1]:.0f} %",
            ]
        )
    sentence = (
        f"On {cores} cores, {result['workers']} workers, every plan of each task run for {result['steps']} steps "
        f"({result['repeats']} repeats; nothing was fitted to them): the median error of a step's time is "
        f"{100 * told['median']:.0f} %, one in ten is above {100 * told['p90']:.0f} %. Dividing the time of `single` "
        f"by the workers is wrong by {100 * told['null_median']:.0f} % in the median. Links between hosts, GPUs and "
        "described machines were not measured."
    )
    return sentence + "\n\n" + markdown(rows)
