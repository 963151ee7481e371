"""How much of loading is hidden behind computing, from the committed results."""

from __future__ import annotations

from results_read import load, markdown


def loading_rates() -> str:
    """A step of each loop, and our rate to that of the plain loop with as many loader processes, on each machine."""
    names = ["plain loop without", "with", "`fit` without", "with", "our rate to it"]
    rows = [["data, on cores", "loader processes", *names]]
    for name in ("loading-2", "loading-16"):
        result = load(name)
        for data, case in result["cases"].items():
            steps = [f"{row['median_s'] * 1e3:.0f} ms" for row in case["contenders"].values()]
            where = f"{data}, on {result['cores']}"
            rows.append([where, str(case["loaders"]), *steps, f"**{case['rate_to_plain']:.2f}**"])
    return markdown(rows)
