"""Fresh simulated runs, many at a time: `python tests/simulated_campaign.py --runs 50000 --processes 16`.

They are of parameter servers, elastic all-reduce and federated rounds in turn, all with the simulator's faults.
Prints its first seed (another at every start, unless `--seed` says which), and one line for each run that broke a
promise: what to call to see it again, and the first complaint. Ends with status 1 if there was any.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from multiprocessing import get_context, resource_tracker

from elastic_model import elastic_complaints
from rounds_model import rounds_complaints
from simulated import PROMISES, complaints, drawn, ending, severed, stormy

GENERATORS = {"drawn": drawn, "stormy": stormy, "ending": ending, "severed": severed}
KINDS = ("ps", "elastic", "rounds")
CHOSEN_BY_ARRIVAL = tuple(name for name in PROMISES if "softsync" in name or name.startswith("sync:"))


@dataclass(frozen=True, slots=True)
class Case:
    """One run: `complaints(generator(seed, consistency, replicas))`, or `elastic_complaints(seed)`, or of rounds."""

    generator: str
    seed: int
    consistency: str = ""
    replicas: int = 0

    @property
    def kind(self) -> str:
        return "ps" if self.consistency else self.generator

    def __str__(self) -> str:
        if not self.consistency:
            return f"{self.generator}_complaints({self.seed})"
        return f"{self.generator}({self.seed}, {self.consistency!r}, {self.replicas})"


def cases(first_seed: int, kinds: Sequence[str] = ("ps",)) -> Iterator[Case]:
    """Those of each kind in turn."""
    sources = {
        "ps": _ps_cases(first_seed),
        "elastic": (Case("elastic", seed) for seed in count(first_seed)),
        "rounds": (Case("rounds", seed) for seed in count(first_seed)),
    }
    while True:
        for kind in kinds:
            yield next(sources[kind])


def _ps_cases(first_seed: int) -> Iterator[Case]:
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
        if case.kind != "ps":
            return case, (elastic_complaints if case.kind == "elastic" else rounds_complaints)(case.seed)
        return case, complaints(GENERATORS[case.generator](case.seed, case.consistency, case.replicas))
    except Exception as error:  # a core that raises is found like one that is wrong
        return case, [f"{type(error).__name__}: {error}"]


def fresh_seed() -> int:
    """Another one every time."""
    return time.time_ns() // 1000 % 10**12


def campaign(
    first_seed: int, runs: int, processes: int, kinds: Sequence[str] = ("ps",)
) -> tuple[Counter[str], list[tuple[Case, list[str]]]]:
    """How many runs there were of each consistency, or kind, and those that broke a promise."""
    done: Counter[str] = Counter()
    broken: list[tuple[Case, list[str]]] = []
    with get_context("spawn").Pool(processes) as pool:
        for case, found in pool.imap_unordered(judge, islice(cases(first_seed, kinds), runs), chunksize=20):
            done[case.consistency or case.kind] += 1
            if found:
                broken.append((case, found))
                print(f"{case}: {found[0]} ({len(found)} complaints)", flush=True)
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # or it would be left behind
    return done, broken


def main() -> int:
    """Parse, run, count."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; by default a fresh one")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    first_seed = fresh_seed() if asked.seed is None else asked.seed
    print(f"first seed {first_seed}", flush=True)
    begun_s = time.monotonic()
    done, broken = campaign(first_seed, asked.runs, asked.processes, asked.kinds)
    by_arrival = sum(done[name] for name in CHOSEN_BY_ARRIVAL)
    others = {kind: done[kind] for kind in KINDS[1:]}
    print(
        f"{sum(done.values())} runs from seed {first_seed} in {time.monotonic() - begun_s:.0f} s, "
        f"{sum(done.values()) - sum(others.values())} of ps ({by_arrival} of softsync and backup workers), "
        f"{others['elastic']} of elastic all-reduce, {others['rounds']} of rounds: {len(broken)} broke a promise"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
