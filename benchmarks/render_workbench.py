"""Every command of the workbench, from the committed results."""

from __future__ import annotations

from results_read import has, load, markdown


def workbench() -> str:
    """Seconds of each command with its defaults, how long it was silent, and whether it ended with what to do next."""
    if not has("workbench"):
        return "*Not measured yet: `python benchmarks/workbench.py`.*"
    result = load("workbench")
    rows = [["command", "seconds", "longest silence", "ends with what to do next"]]
    for row in result["rows"]:
        told = "yes" if row["ends_with_next"] else "no"
        seconds = f"{row['seconds']:.1f} s" if row["status"] == 0 else f"failed ({row['status']})"
        rows.append([f"`{row['command']}`", seconds, f"{row['silence_s']:.1f} s", told])
    return f"**{result['cores']} cores**\n\n{markdown(rows)}"
