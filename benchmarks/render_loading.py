"""How much of loading is hidden behind computing, from the committed results."""

from __future__ import annotations

from results_read import load, markdown


def loading_rates() -> str:
    """A step of each loop, and our rate to that of the plain loop with as many loader processes, on each machine."""
    return "\n\n".join(_rates(name) for name in ("loading-2", "loading-16"))


def _rates(name: str) -> str:
    result = load(name)
    rows = [
        ["data", "loader processes", "plain loop without", "with", "`fit` without", "with", "our rate to it"]
    ]
    for data, case in result["cases"].items():
        steps = [f"{row['median_s'] * 1e3:.0f} ms" for row in case["contenders"].values()]
        rows.append([data, str(case["loaders"]), *steps, f"**{case['rate_to_plain']:.2f}**"])
    about = f"**{result['cores']} cores, batches of {result['batch']}, median of {result['rounds']} rounds**"
    busy = f"other work on the machine: a load of {result['load_average']:.1f} at the beginning"
    return f"{about}; {busy}\n\n{markdown(rows)}"
