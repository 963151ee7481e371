"""Fresh simulated runs, many at a time: `python tests/simulated_campaign.py --runs 50000 --processes 16`.

Prints its first seed (another at every start, unless `--seed` says which), and one line for each run that broke a
promise: what to call to see it again, and the first complaint. Ends with status 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

from simulated import PROMISES, complaints, drawn, ending, severed, stormy

GENERATORS = {"drawn": drawn, "stormy": stormy, "ending": ending, "severed": severed}
CHOSEN_BY_ARRIVAL = tuple(name for name in PROMISES if "softsync" in name or name.startswith("sync:"))


@dataclass(frozen=True, slots=True)
class Case:
    """One run: `complaints(generator(seed, consistency, replicas))`."""

    generator: str
    seed: int
    consistency: str
    replicas: int

    def __str__(self) -> str:
        return f"{self.generator}({self.seed}, {self.consistency!r}, {self.replicas})"


def cases(first_seed: int) -> Iterator[Case]:
    """Every consistency with and without replicas, seed after seed, twice as often from the worst generator."""
    seed = first_seed
    while True:
        for generator in ("stormy", "drawn", "stormy", "ending", "severed"):
            for consistency in PROMISES:
                for replicas in (0, 1):
                    yield Case(generator, seed, consistency, replicas)
            seed += 1


def judge(case: Case) -> tuple[Case, list[str]]:
    """What is wrong with a run, an exception of a core included."""
    try:
        return case, complaints(GENERATORS[case.generator](case.seed, case.consistency, case.replicas))
    except Exception as error:  # a core that raises is found like one that is wrong
        return case, [f"{type(error).__name__}: {error}"]


def fresh_seed() -> int:
    """Another one every time."""
    return time.time_ns() // 1000 % 10**12


def campaign(first_seed: int, runs: int, processes: int) -> tuple[Counter[str], list[tuple[Case, list[str]]]]:
    """How many runs there were of each consistency, and those that broke a promise."""
    done: Counter[str] = Counter()
    broken: list[tuple[Case, list[str]]] = []
    with get_context("spawn").Pool(processes) as pool:
        for case, found in pool.imap_unordered(judge, islice(cases(first_seed), runs), chunksize=20):
            done[case.consistency] += 1
            if found:
                broken.append((case, found))
                print(f"{case}: {found[0]} ({len(found)} complaints)", flush=True)
    return done, broken


def main() -> int:
    """Parse, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; by default a fresh one")
    asked = parser.parse_args()
    first_seed = fresh_seed() if asked.seed is None else asked.seed
    print(f"first seed {first_seed}", flush=True)
    begun_s = time.monotonic()
    done, broken = campaign(first_seed, asked.runs, asked.processes)
    by_arrival = sum(done[name] for name in CHOSEN_BY_ARRIVAL)
    print(
        f"{sum(done.values())} runs from seed {first_seed} in {time.monotonic() - begun_s:.0f} s, {by_arrival} of "
        f"them of softsync and backup workers: {len(broken)} broke a promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
