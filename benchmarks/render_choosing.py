"""The table of `docs/choosing.md`: which strategy for which situation, with a measured example of each."""

from __future__ import annotations

from typing import Any

from manyhands.errors import format_bytes
from results_read import load, markdown, show_percent

Situation = tuple[str, str, str, str]
"""When, what to use, the example, and the result that it is from."""


def choosing() -> str:
    """The whole table."""
    cores = {
        "step-16core-8": load("step-16core-8")["cores"],
        "central-memory": load("central-memory")["cores"],
        "compare-traffic": load("compare-traffic")["machine"]["cores"].split()[0],
        "compare": load("compare")["machine"]["cores"].split()[0],
        "stragglers": load("stragglers")["cores"],
        "glove-16core": load("glove-16core")["workers"]["cores"],
    }
    rows = [*_on_one_host(), *_over_a_network(), *_with_stragglers(), _sparse()]
    table = markdown(
        [
            ["situation", "use", "measured example", "cores", "result"],
            *(
                [when, what, example, str(cores[file]), f"[{file}](../benchmarks/results/{file}.json)"]
                for when, what, example, file in rows
            ),
        ]
    )
    return table.replace("---:", "---")  # sentences, which begin at the left


def _on_one_host() -> list[Situation]:
    mlp, cnn = ({name: cell["samples_per_s"] for name, cell in row["contenders"].items()}
                for row in load("step-16core-8")["results"][:2])  # fmt: skip
    memory = {row["strategy"]: format_bytes(row["peak"]["total"]) for row in load("central-memory")["rows"]}
    return [
        (
            "One process is fast enough, or a step is little but moving weights",
            "`single`",
            f"a perceptron of 25 M parameters, batches of 64: {mlp['single']:,.0f} samples/s in one process, "
            f"{mlp['mirrored']:,.0f} on 8 workers",
            "step-16core-8",
        ),
        (
            "One host, and a step is mostly arithmetic",
            "`mirrored`",
            f"a small CNN, batches of 128: {cnn['mirrored']:,.0f} samples/s on 8 workers, {cnn['single']:,.0f} in one "
            f"process, {cnn['ddp']:,.0f} with DDP on Gloo",
            "step-16core-8",
        ),
        (
            "One host, and a copy of weights and optimizer state for each worker is too much memory",
            "`central`",
            f"4 workers, 100 M parameters, AdamW: {memory['central']} against {memory['mirrored']} with `mirrored`",
            "central-memory",
        ),
    ]


def _over_a_network() -> list[Situation]:
    traffic = {row["strategy"]: row for row in load("compare-traffic")["strategies"]}
    ring, master, local = (
        traffic[name] for name in ("allreduce algorithm=ring", "allreduce algorithm=master-worker", "local")
    )

    def sent(row: dict[str, Any], name: str) -> str:
        return format_bytes(row[name]["median"])

    def accuracy(row: dict[str, Any]) -> str:
        return f"{row['final']['accuracy']['median']:.3f}"

    return [
        (
            "Several hosts",
            "`allreduce`, [under torchrun](machines.md); a loop of your own by [`mh.join`](own-loop.md)",
            f"4 workers: in each step the busiest of a ring sends {sent(ring, 'busiest_bytes_per_step')}, of a master "
            f"with its workers {sent(master, 'busiest_bytes_per_step')}; in total both send "
            f"{sent(ring, 'bytes_per_step')}",
            "compare-traffic",
        ),
        (
            "The network is slow, and a little drift between replicas does no harm",
            "`local steps=8`",
            f"4 workers, AdamW: {sent(local, 'bytes_per_step')} a step in total, accuracy {accuracy(local)} at "
            f"the end; a ring {sent(ring, 'bytes_per_step')} and {accuracy(ring)}",
            "compare-traffic",
        ),
    ]


def _with_stragglers() -> list[Situation]:
    slowed = {row["strategy"]: row["target_s"]["median"] for row in load("compare")["strategies"]}
    passing = {row["consistency"]: row["live"] for row in load("stragglers")["scenarios"]["passing"]}
    return [
        (
            "A worker stays slower than the others; workers may die, come and go",
            "`ps consistency=async`, with `replicas=1` if servers may die, too",
            f"one of 2 workers 5 times slower: {slowed['ps consistency=async']:.2f} s to the target accuracy, "
            f"{slowed['allreduce']:.2f} s with `allreduce`",
            "compare",
        ),
        (
            "Different workers are late at times, and updates must not be too stale",
            "`ps consistency=bounded:4`",
            f"every tenth step 5 times as long: {passing['bounded:4']['updates_per_s']:.0f} updates/s and "
            f"{show_percent(passing['bounded:4']['waiting'])} waiting, "
            f"{passing['bounded:0']['updates_per_s']:.0f} and {show_percent(passing['bounded:0']['waiting'])} in step",
            "stragglers",
        ),
    ]


def _sparse() -> Situation:
    rows = load("glove-16core")["workers"]["rows"]
    hogwild = max((row for row in rows if row["order"] == "HOGWILD!"), key=lambda row: row["workers"])
    return (
        "One host, and a batch touches few rows of large tables",
        "`hogwild`",
        f"GloVe on {hogwild['workers']} workers: {hogwild['speedup']:.1f} times one worker's speed, at "
        f"{hogwild['cost_over_serial']:.3f} times its cost",
        "glove-16core",
    )
