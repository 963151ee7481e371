"""The tables of `docs/compare.md`: a scaling curve, and HOGWILD! against update density."""

from __future__ import annotations

from typing import Any

from results_read import has, load, markdown, show_percent

SCALING = "manyhands scaling digits --workers 1,2,4,8 --repeats 3"
DENSITY = "manyhands compare sparse --density 0.001,0.01,0.1,1 --passes 20 --repeats 3"


def scaling_speed() -> str:
    """Speed-up over the number of workers, measured, by Amdahl's fit and by the simulator, and what that shows."""
    if not has("scaling"):
        return _missing(SCALING, "scaling")
    result = load("scaling")
    rows = [
        [
            "workers",
            "samples/s",
            "least to most",
            "speed-up",
            "efficiency",
            "Amdahl's fit",
            "simulator",
            "waiting",
        ]
    ]
    for point in result["points"]:
        rows.append(
            [
                str(point["workers"]),
                f"{point['samples_per_s']:,.0f}",
                f"{point['low']:,.0f} to {point['high']:,.0f}",
                f"{point['speedup']:.2f}",
                show_percent(point["efficiency"]),
                "" if point["amdahl"] is None else f"{point['amdahl']:.2f}",
                f"{point['forecast']:.2f}",
                show_percent(point["waiting"]),
            ]
        )
    about = f"**{result['task']}, `{result['strategy']}`, {_machine(result)}, median of {result['repeats']}**"
    return f"{about}\n\n{markdown(rows)}\n\n{' '.join(result['told'])}"


def density_speed() -> str:
    """For each density a row, for each strategy its speed and loss beside the first."""
    if not has("density"):
        return _missing(DENSITY, "density")
    result = load("density")
    found = {(row["density"], row["strategy"]): row for row in result["rows"]}
    strategies = list(dict.fromkeys(strategy for _, strategy in found))
    rows = [["density", "share a feature", *(f"`{strategy}`" for strategy in strategies)]]
    for density in dict.fromkeys(density for density, _ in found):
        own = [found.get((density, strategy)) for strategy in strategies]
        shared = next(row["shared"] for row in own if row is not None)
        rows.append([f"{density:g}", f"{100 * shared:.1f} %", *map(_beside_the_first, own)])
    about = (
        f"**{result['features']:,} features, {result['workers']} workers, {_machine(result)}, median of "
        f"{result['repeats']}**; examples/s, times as fast as `{strategies[0]}`, loss above its loss"
    )
    return f"{about}, by `{result['command']}`\n\n{markdown(rows)}"


def _beside_the_first(row: dict[str, Any] | None) -> str:
    if row is None:
        return "failed"
    return f"{row['samples_per_s']:,.0f}, {row['speedup']:.2f}×, {row['excess']:+.4f}"


def _machine(result: dict[str, Any]) -> str:
    return f"{result['machine']['cores'].split()[0]} cores ({result['machine']['system']})"


def _missing(command: str, name: str) -> str:
    return f"*Not measured yet: `{command} --json benchmarks/results/{name}.json`.*"
