"""How long a `fit` takes to its first step, from the committed results."""

from __future__ import annotations

from results_read import load, markdown


def startup_times() -> str:
    """The first `fit` of a process and the next one, beside one `import torch`; with and without `mh.warm()`."""
    names = ["cores", "strategy", "workers", "import torch", "first fit", "after `mh.warm()`"]
    table = [[*names, "next fit"]]
    for name in ("startup", "startup-16"):
        result = load(name)
        found = {(row["tree"], row["strategy"], row["workers"]): row for row in result["rows"]}
        for (tree, strategy, workers), row in found.items():
            warm = found.get(("this warm", strategy, workers))
            if tree != "this":
                continue
            table.append(
                [
                    str(result["cores"]),
                    f"`{strategy}`",
                    str(workers),
                    f"{row['torch']:.2f} s",
                    f"{row['first']:.2f} s",
                    "" if warm is None else f"{warm['first']:.2f} s",
                    f"{row['next']:.2f} s",
                ]
            )
    return markdown(table)
