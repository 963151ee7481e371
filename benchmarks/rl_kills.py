"""Kill actors and learners of runs of reinforcement learning, and see what is lost and what is learned.

    python benchmarks/rl_kills.py [--kills 10] [--seeds 5] [--steps 4000] [--parallel 1]
        [--deadline-s 1200] [--json FILE]

PPO on CartPole-v1 with its own settings, four actors and the usual lag of 1, by `manyhands train rl`, under each of
three strategies with each seed. Kills are SIGKILL, when the run has come to steps that are drawn from all of its
length; every fifth is of a learner: under `single` the process of the run itself, under `mirrored` one of its workers,
under `ps` one of its workers or servers. A run that ends by one is continued with `--resume`; `ps` goes on by itself.
At the end `manyhands audit` finds a rollout or an update that was learned from twice or never, `manyhands replay`
repeats the run, and the return is put beside that of a run with the same seed that nobody disturbed.

`--json FILE` has the results of all pairs that are done, is written after each, and is continued where it is there
already. What does not end before the deadline is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from manyhands.workloads.rl.run_tickets import audit_run_tickets

STRATEGIES = {"single": 1, "mirrored": 2, "ps servers=2 replicas=1 consistency=bounded:2": 2}
EVERY_LEARNER = 5  # a learner is every so manieth kill
ACTORS = 4
LOOK_S = 0.02
OVERDUE = "not at its end before the deadline"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run to disturb, and the same one in peace."""

    strategy: str
    seed: int
    kills: int
    steps: int
    deadline: float  # by the monotonic clock

    def command(self, out: Path) -> list[str]:
        """Train from the beginning, or from the newest checkpoint."""
        options = {
            "algorithm": "ppo",
            "actors": ACTORS,
            "replacements": 1000,
            "strategy": self.strategy,
            "workers": STRATEGIES[self.strategy],
            "steps": self.steps,
            "seed": self.seed,
            "checkpoint-every": max(1, self.steps // 50),
            "evaluate-every": self.steps,
            "progress": "none",
            "out": out,
        }
        words = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        resume = ["--resume"] if (out / "config.json").exists() else []
        return [*manyhands("train", "rl", "--allow-overload"), *words, *resume]

    def moments(self) -> list[int]:
        """The steps of the kills."""
        draw = random.Random(self.seed)
        return sorted(draw.randrange(self.steps // 50, self.steps * 9 // 10) for _ in range(self.kills))


def manyhands(*words: str) -> list[str]:
    return [sys.executable, "-m", "manyhands", *words]


def started(command: Sequence[str], out: Path) -> subprocess.Popen[bytes]:
    with Path(f"{out}.log").open("ab") as log:
        return subprocess.Popen(command, stderr=log, stdout=log, start_new_session=True)


class Process(NamedTuple):
    pid: int
    name: str
    ticks: int = 0  # of a processor that it has used


def processes(root: int) -> list[Process]:
    """Those that descend from `root`, itself first."""
    children: dict[int, list[Process]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        _, parent, *fields = after.split()
        found = Process(int(path.parent.name), before.partition("(")[2], int(fields[9]) + int(fields[10]))
        children.setdefault(int(parent), []).append(found)
    family = [Process(root, "run")]
    for one in family:
        family += children.get(one.pid, [])
    return family


def victims(root: int, strategy: str, out: Path, *, learner: bool) -> list[Process]:
    """Whom to kill one of, once all are there. Actors are those that workers have begotten, and have acted."""
    known = processes(root)
    if not learner:
        born = [one for one in known if one.name.startswith(("mh child", "actor "))]
        actors = sorted((one for one in born if one.ticks), key=lambda one: -one.ticks)[:ACTORS]
        return actors if len(actors) == ACTORS else []
    if strategy == "single":
        return known[:1]
    learners = [one for one in known if one.name.startswith(("worker ", "server "))]
    return learners if is_whole(out) else []


def is_whole(out: Path) -> bool:
    """Whether everybody that died has been replaced, where members are."""
    path = out / "members.jsonl"
    events = [json.loads(line)["event"] for line in lines(path)] if path.exists() else []
    return events.count("recovered") >= events.count("died")


def reached(out: Path) -> int:
    """The last step of which the history tells."""
    path = out / "metrics.jsonl"
    with path.open("rb") if path.exists() else open(os.devnull, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
        rows = file.read().split(b"\n")[1:-1]
    return json.loads(rows[-1])["step"] if rows else 0


def lines(path: Path) -> list[str]:
    """A last one that is being written is left out."""
    return path.read_text().split("\n")[:-1]


def trained(pair: Pair, out: Path, moments: Sequence[int]) -> dict[str, Any]:
    """Train, with kills at these steps; RuntimeError where the run ends otherwise."""
    draw, begun = random.Random(pair.seed), time.monotonic()
    killed = Counter({"actors": 0, "workers": 0, "servers": 0})
    run, resumed, due = started(pair.command(out), out), 0, list(moments)
    try:
        while (status := run.poll()) is None or status:
            if time.monotonic() > pair.deadline:
                raise RuntimeError(OVERDUE)
            if status is not None:
                resumed += 1
                if resumed > killed["workers"]:
                    raise RuntimeError(f"the run ended by itself: {Path(f'{out}.log').read_text()[-2000:]}")
                run = started(pair.command(out), out)
            time.sleep(LOOK_S)
            if not due or reached(out) < due[0]:
                continue
            is_learner = killed.total() % EVERY_LEARNER == EVERY_LEARNER - 1
            if found := victims(run.pid, pair.strategy, out, learner=is_learner):
                struck = draw.choice(found)
                os.kill(struck.pid, signal.SIGKILL)
                who = "servers" if struck.name.startswith("server") else "workers"
                killed[who if is_learner else "actors"] += 1
                due.pop(0)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return {"killed": killed, "resumed": resumed, "seconds": time.monotonic() - begun}


def said(pair: Pair, *words: str) -> tuple[int, str]:
    """The exit status of a command, and the last line that it prints."""
    left = max(1.0, pair.deadline - time.monotonic())
    try:
        done = subprocess.run(manyhands(*words), capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(OVERDUE) from None
    return done.returncode, [*done.stdout.splitlines(), *done.stderr.splitlines(), ""][-2]


def measured(pair: Pair) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        out, beside = Path(folder, "disturbed"), Path(folder, "undisturbed")
        found = trained(pair, out, pair.moments())
        quiet = trained(pair, beside, ())
        audit, replay = said(pair, "audit", str(out)), said(pair, "replay", str(out))
        audited = audit_run_tickets(out)
        assert audited is not None, "a run with actors has a log"
        summaries = [json.loads((one / "summary.json").read_text()) for one in (out, beside)]
        history = {row["step"] for row in map(json.loads, lines(out / "metrics.jsonl")) if "loss" in row}
    returns = [one["final"]["return"] for one in summaries]
    return {
        "strategy": pair.strategy,
        "seed": pair.seed,
        "steps": pair.steps,
        "kills": pair.kills,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **found,
        "verdict": audited.verdict,
        "said": [*audited.broken, *audited.missing],
        "audit": {"status": audit[0], "said": audit[1]},
        "replay": {"status": replay[0], "said": replay[1]},
        "batches": sum(log.batches for log in audited.logs),
        "starts": sum(log.starts for log in audited.logs),
        "dropped": sum(log.dropped for log in audited.logs),
        "largest lag": max(max(log.lags) for log in audited.logs),
        "steps in the history": len(history),
        "return": returns[0],
        "return undisturbed": returns[1],
        "seconds undisturbed": quiet["seconds"],
    }


class Results:
    """Those of pairs that are done, in a file where one is given."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self.known: list[dict[str, Any]] = (
            json.loads(path.read_text()) if path is not None and path.exists() else []
        )

    def have(self, pair: Pair) -> bool:
        names = ("strategy", "seed", "kills", "steps")
        return any(all(one[name] == getattr(pair, name) for name in names) for one in self.known)

    def take(self, pair: Pair) -> None:
        try:
            found = measured(pair)
        except RuntimeError as error:
            print(f"{pair.strategy}, seed {pair.seed}: {error}", file=sys.stderr, flush=True)
            return
        with self._lock:
            self.known.append(found)
            order = {strategy: place for place, strategy in enumerate(STRATEGIES)}
            self.known.sort(key=lambda one: (order[one["strategy"]], one["seed"]))
            if self._path is not None:
                fresh = self._path.with_suffix(".new")
                fresh.write_text(json.dumps(self.known, indent=1) + "\n")
                fresh.replace(self._path)
            shown = (
                "strategy",
                "seed",
                "killed",
                "seconds",
                "return",
                "return undisturbed",
                "audit",
                "replay",
            )
            print(json.dumps({name: found[name] for name in shown}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="of each run")
    parser.add_argument("--seeds", type=int, default=5, help="of each strategy")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--parallel", type=int, default=1, help="pairs of runs at a time")
    parser.add_argument("--deadline-s", type=float, default=1200)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that runs are ended as well
    deadline = time.monotonic() + asked.deadline_s
    pairs = [
        Pair(strategy=strategy, seed=seed, kills=asked.kills, steps=asked.steps, deadline=deadline)
        for seed in range(asked.seeds)
        for strategy in STRATEGIES
    ]
    results = Results(asked.json)
    with ThreadPoolExecutor(asked.parallel) as pool:
        list(pool.map(results.take, [pair for pair in pairs if not results.have(pair)]))


if __name__ == "__main__":
    main()
