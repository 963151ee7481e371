"""How wrong predictions of public tables were, table by table, for docs/internals/public-tables.md."""

from __future__ import annotations

from typing import Any

from results_read import load, markdown, show_percent

__all__ = ["public_tables"]


def _errors(one: dict[str, float], cases: int) -> str:
    mean, worst = (f"{100 * one[name]:.1f} %" for name in ("mean", "worst"))
    return mean if cases == 1 else f"{mean}, {worst}"


def public_tables() -> str:
    """Errors beside the best null model of each table, then where that one is better, and what would be chosen."""
    tables: dict[str, dict[str, Any]] = load("public-tables")["tables"]
    rows = [["table", "held out", "error: mean, worst", "best null model"]]
    for one in tables.values():
        best, cases = one["best_null"], len(one["held_out"])
        error, null = _errors(one["error"], cases), _errors(one["nulls"][best], cases)
        if one["verdict"] == "better":
            error = f"**{error}**"
        if one["verdict"] == "worse":
            null = f"**{null}**"
        rows.append([one["table"], str(cases), error, f"{null} ({best})"])
    of_verdict = {
        verdict: [one["table"] for one in tables.values() if one["verdict"] == verdict]
        for verdict in ("better", "even", "worse")
    }
    minutes = sorted(one["minutes"] for one in tables["bert-1472"]["choices"])
    picks = [choice for name in ("nanotron", "nanotron-stalls") for choice in tables[name]["choices"]]
    cost = max(picks, key=lambda one: one["regret"])
    (memory,) = tables["nanotron-memory"]["choices"]
    fits = "is said not to fit" if memory["said_not_to_fit"] else "is said to fit"
    same = sum(one["regret"] <= one["regret_of_rule"] for one in picks)
    told = (
        f"Of {len(tables)}, {len(of_verdict['better'])} are better than the best null model. "
        f"Even, within half a point: {'; '.join(of_verdict['even'])}. Worse: {'; '.join(of_verdict['worse'])}.\n\n"
        f'"47 minutes on 1,472 GPUs" is predicted as {tables["bert-1472"]["held_out"][0]["predicted"]:.1f}; fewer '
        f"calibration rows say {minutes[0]:.0f} to {minutes[-2]:.0f}, "
        f"and {minutes[-1]:.0f} where only 1 and 4 nodes do.\n\n"
        f"On nanotron's grid the choice costs nothing on {sum(not one['regret'] for one in picks)} of {len(picks)} "
        f"counts of GPUs, with and without the runs that stall, and {show_percent(cost['regret'])} at worst "
        f'({cost["gpus"]} GPUs, with them). The rule "most data parallel, then the largest micro-batch" does as well: '
        f"ours is at least equal on {same} of {len(picks)}. The run that ended out of memory {fits} "
        f"({memory['predicted']:.0f} of 80 GiB, "
        "of which 92 % may be used). Both the cost of a message, which the choice needs, and this bound came after the "
        "first run."
    )
    return markdown(rows) + "\n\n" + told
