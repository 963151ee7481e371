"""The tables of `rl_speed.py`, `rl_learning.py` and `rl_kills.py` in the documents."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from results_read import RESULTS, load, markdown, show_ratio

_SIMULATED = {
    "ours": "ours",
    "vector": "gymnasium's vector",
    "sync": "gymnasium's SyncVectorEnv",
    "loop": "loop over gymnasium.make",
}
_LEARNED = {
    "sb3-a2c": "Stable-Baselines3, A2C",
    "sb3-ppo": "Stable-Baselines3, PPO",
    "sample-factory": "Sample Factory 2, APPO",
}

_INFERRED = ("ours, IMPALA", "ours, IMPALA, central inference")


def rl_simulation() -> str:
    result = load("rl-speed")
    rows = [["environments", *_SIMULATED.values()]]
    for count, found in result["simulation"].items():
        rows.append([count, *(f"{median(found[name]):,.0f}" for name in _SIMULATED)])
    about = f"**1 of {result['cores']} cores ({result['machine']}), gymnasium {result['gymnasium']}**"
    return f"{about}\n\n{markdown(rows)}"


def rl_learning() -> str:
    result = load("rl-speed")
    rates = {name: median(found) for name, found in result["learning"].items()}
    rows = [["", "frames/s", "least to most", "to Stable-Baselines3's", "to Sample Factory"]]
    for name, found in result["learning"].items():
        spread = f"{min(found):,.0f} to {max(found):,.0f}"
        ratios = ["", ""]
        if name not in _LEARNED:
            same = rates["sb3-ppo" if "PPO" in name else "sb3-a2c"]
            ratios = [show_ratio(rates[name] / one) for one in (same, rates["sample-factory"])]
        rows.append([_LEARNED.get(name, name), f"{rates[name]:,.0f}", spread, *ratios])
    about = f"**{result['cores']} cores ({result['machine']}), torch {result['torch']}**"
    return f"{about}\n\n{markdown(rows)}"


def rl_inference() -> str:
    """IMPALA by where actions are computed, for every machine on which that was measured."""
    rows = [["observations", "learner on", "cores", "by actors", "central", "ratio"]]
    for path in sorted(RESULTS.glob("rl-inference-*.json"), reverse=True):
        result = load(path.stem)
        own, central = (median(result["learning"][name]) for name in _INFERRED)
        shown = (
            f"{median(found):,.0f} ({min(found):,.0f} to {max(found):,.0f})"
            for found in (result["learning"][name] for name in _INFERRED)
        )
        device = result["device"].upper() if result["device"] == "cpu" else result["device"]
        about = [result["observations"], device, str(result["cores"])]
        rows.append([*about, *shown, show_ratio(central / own)])
    return markdown(rows)


def rl_returns() -> str:
    rows = [["", "", "frames", "seeds", "return", "95 % interval", "least", "seconds"]]
    machines = []
    for env, file in (("CartPole-v1", "rl-learning"), ("Acrobot-v1", "rl-acrobot")):
        result = load(file)
        machines.append(f"{env}: {_machine(result)}")
        for name in ("A2C", "A3C", "IMPALA", "PPO"):
            one = result[env][name]
            rows.append([env, name, f"{one['frames']:,}", str(one["seeds"]), *_reached(one)])
            rows[-1].append(f"{one['seconds']:.0f}")
    return f"**{'; '.join(machines)}**\n\n{markdown(rows)}"


def rl_lags() -> str:
    """V-trace on and off, by the bound on the lag: the return at the end, and at each quarter of a run."""
    result = load("rl-lags")
    found = result["CartPole-v1"]
    rows = [
        ["bound", "lag, mean", "V-trace", "seeds", "return", "95 % interval", "least", "after each quarter"]
    ]
    for lag in (0, 4, 16, 64):
        for kind in ("with", "without"):
            one = found[f"lag {lag} {kind} V-trace"]
            curve = ", ".join(f"{value:.0f}" for value in one["curve"])
            rows.append([str(lag), f"{one['lag']:.1f}", kind, str(one["seeds"]), *_reached(one), curve])
    return f"**{_machine(result)}**\n\n{markdown(rows)}"


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{machine['cores']} cores ({machine['processor']}), torch {machine['torch']}"


def _reached(one: dict[str, Any]) -> list[str]:
    interval = f"{one['low']:.1f} to {one['high']:.1f}"
    return [f"{one['interquartile_mean']:.1f}", interval, f"{one['least']:.1f}"]


def rl_kills() -> str:
    """Kills of runs of each strategy, what was found at their ends, and what they and undisturbed ones had learned."""
    found = load("rl-kills")
    killed = ("actors", "workers", "servers")
    head = [f"{who} killed" for who in killed]
    rows = [
        ["", "runs", *head, "rollouts dropped", "audit complete", "same bytes again", "return", "undisturbed"]
    ]
    for strategy in dict.fromkeys(one["strategy"] for one in found):
        runs = [one for one in found if one["strategy"] == strategy]
        counts = [sum(one["killed"][who] for one in runs) for who in killed]
        dropped = sum(one["dropped"] for one in runs)
        kept = [sum(one[what]["status"] == 0 for one in runs) for what in ("audit", "replay")]
        returns = [_each(one[name] for one in runs) for name in ("return", "return undisturbed")]
        rows.append([f"`{strategy}`", *map(str, (len(runs), *counts, dropped, *kept)), *returns])
    about = f"**{found[0]['cores']} cores, torch {found[0]['torch']}; {found[0]['steps']:,} steps a run**"
    return f"{about}\n\n{markdown(rows)}"


def _each(values: Iterable[float]) -> str:
    return ", ".join(f"{one:.0f}" for one in sorted(values))
