"""Kill actors and learners of a run of reinforcement learning, and see what is lost and what is learned.

    python benchmarks/rl_kills.py [--strategy single] [--kills 50] [--steps 2000] [--seed 0]
        [--deadline-s 600] [--json FILE]

PPO on CartPole-v1 with four actors and a lag of 2. Kills are SIGKILL at random moments; every fifth is of a learner:
under `single` the process of the run itself, otherwise one of its workers. A run that ends by one is continued by
`resume=True`; servers of parameters replace a worker by themselves. At the end the log of tickets is audited, which
finds a rollout that was learned from twice or never, and the return is put beside that of a run with the same seed
that nobody disturbed. A kill takes 1 to 3 seconds
on two cores. `--json FILE` adds the result to those of the file.
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
import time
from pathlib import Path
from typing import Any

import torch

import manyhands as mh
from manyhands.workloads.rl.rl_task import RLOptions, rl
from manyhands.workloads.rl.run_tickets import audit_run_tickets

WORKERS = {"single": 1, "mirrored": 2, "ps consistency=bounded:2": 2}
EVERY_LEARNER = 5  # a learner is every so manieth kill
PAUSES_S = 0.1, 0.7  # between two kills


def train(out: Path, strategy: str, steps: int, seed: int) -> None:
    """In a process of its own: from the beginning, or from the newest checkpoint."""
    options = RLOptions(algorithm="ppo", actors=4, lag=2, replacements=1000, environments=16, length=64)
    keeping = mh.Options(progress="none", allow_overload=True, checkpoint_every=steps // 50)
    resume = (out / "config.json").exists()
    mh.fit(
        rl(options),
        strategy,
        workers=WORKERS[strategy],
        steps=steps,
        seed=seed,
        out=out,
        resume=resume,
        options=keeping,
    )


def started(out: Path, strategy: str, steps: int, seed: int) -> subprocess.Popen[bytes]:
    one = [sys.executable, __file__, "--train", str(out), "--strategy", strategy]
    with Path(f"{out}.log").open("ab") as log:
        return subprocess.Popen(
            [*one, "--steps", str(steps), "--seed", str(seed)], stderr=log, stdout=log, start_new_session=True
        )


def processes(root: int) -> list[tuple[int, str]]:
    """The processes that descend from `root`, itself first, and their names."""
    parents: dict[int, list[tuple[int, str]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:  # it has ended
            continue
        parents.setdefault(int(after.split()[1]), []).append(
            (int(path.parent.name), before.partition("(")[2])
        )
    found = [(root, "the run")]
    for pid, _ in found:
        found += parents.get(pid, [])
    return found


def victims(root: int, strategy: str, *, learner: bool) -> list[int]:
    """Actors are those that workers have begotten, a spare one for the next death included."""
    known = processes(root)
    if learner and strategy == "single":
        return [root]
    names = ("worker ",) if learner else ("mh child", "actor ")
    return [pid for pid, name in known if name.startswith(names)]


def disturbed(
    out: Path, strategy: str, kills: int, steps: int, seed: int, deadline_s: float
) -> dict[str, Any]:
    """Train with so many kills."""
    draw, begun = random.Random(seed), time.monotonic()
    run, killed, resumed = started(out, strategy, steps, seed), {"actors": 0, "learners": 0}, 0
    kept = -1
    try:
        while (status := run.poll()) is None or status:
            if time.monotonic() - begun > deadline_s:
                raise SystemExit(f"{out}: not at its end after {deadline_s:g} s; see {out}.log")
            if status is not None:
                resumed += 1
                kept = newest(out)
                if resumed > killed["learners"]:
                    raise SystemExit(f"{out}: the run ended by itself; see {out}.log")
                run = started(out, strategy, steps, seed)
            time.sleep(draw.uniform(*PAUSES_S))
            done = sum(killed.values())
            is_learner = done % EVERY_LEARNER == EVERY_LEARNER - 1
            # a learner that never lives to its next checkpoint would never get anywhere
            if done == kills or (is_learner and newest(out) <= kept):
                continue
            found = victims(run.pid, strategy, learner=is_learner)
            if len(found) >= (1 if is_learner else 4):
                os.kill(draw.choice(found), signal.SIGKILL)
                killed["learners" if is_learner else "actors"] += 1
                kept = newest(out) if is_learner else kept
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    return {"killed": killed, "resumed": resumed, "seconds": time.monotonic() - begun}


def newest(out: Path) -> int:
    steps = [int(path.name.rpartition("-")[2]) for path in (out / "checkpoints").glob("step-*[0-9]")]
    return max([0, *steps])


def measured(strategy: str, kills: int, steps: int, seed: int, deadline_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out, beside = Path(folder, "disturbed"), Path(folder, "undisturbed")
        found = disturbed(out, strategy, kills, steps, seed, deadline_s)
        disturbed(beside, strategy, 0, steps, seed, deadline_s)
        audited = audit_run_tickets(out)
        assert audited is not None, "a run with actors has a log"
        summaries = [json.loads((one / "summary.json").read_text()) for one in (out, beside)]
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    returns, quiet = (one["final"]["return"] for one in summaries)
    return {
        "strategy": strategy,
        "seed": seed,
        "steps": steps,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **found,
        "verdict": audited.verdict,
        "said": [*audited.broken, *audited.missing],
        "batches": sum(log.batches for log in audited.logs),
        "starts": sum(log.starts for log in audited.logs),
        "dropped": sum(log.dropped for log in audited.logs),
        "largest lag": max(max(log.lags) for log in audited.logs),
        "steps in the history": len({row["step"] for row in rows if "loss" in row}),
        "return": returns,
        "return undisturbed": quiet,
        "seconds undisturbed": summaries[1]["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=WORKERS, default="single")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=600, help="for each of the two runs")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train, asked.strategy, asked.steps, asked.seed)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run is ended as well
    found = measured(asked.strategy, asked.kills, asked.steps, asked.seed, asked.deadline_s)
    print(json.dumps(found, indent=1))
    if asked.json is not None:
        known = json.loads(asked.json.read_text()) if asked.json.exists() else []
        asked.json.write_text(json.dumps([*known, found], indent=1) + "\n")


if __name__ == "__main__":
    main()
