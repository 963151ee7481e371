"""Faults at live runs of parameter servers, drawn from a seed: kills, pauses, failures of both ends and the launcher.

    python tests/livefaults.py --faults 300 --processes 8 --seed 7     a campaign; prints each case and what failed
    python tests/livefaults.py --seed 7 --only 12                      case 12 of it again; its folder is kept

A case is one training (consistency, link, replicas), struck by one plan of faults while it trains. What must hold
afterwards, for every fault that the promises cover: the run ends in good order (after the launcher's own death, when it
is resumed); nobody died who was not struck; `manyhands audit` finds what it should; each batch is in each shard once; a
synchronous run has the weights of the plain loop; a replay ends with the same bytes; who was paused is fenced; no
process, memory or socket is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kills import Run, await_that
from livefaults_plans import PLANS, WORKERS, Case, Failed, Scene

CONSISTENCIES = ("sync", "sync:1", "bounded:2", "async", "softsync:2", "aware:async")
_CHECKPOINT_EVERY = 10
_END_S = 240.0


def drawn(seed: int, number: int) -> Case:
    """Case `number` of a seed; the first `len(PLANS) * len(CONSISTENCIES)` have every plan with every consistency."""
    draw = random.Random(f"{seed} {number}")
    passes, plan = divmod(number, len(PLANS))
    return Case(
        number=number,
        seed=seed,
        consistency=CONSISTENCIES[(passes + plan + seed) % len(CONSISTENCIES)],
        link=draw.choice(("shared", "tcp")),
        replicas=draw.choice((1, 1, 0)),
        plan=tuple(PLANS)[plan],
    )


# ── one case ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What became of a case; `problem` is empty where all promises were kept."""

    case: Case
    struck: tuple[str, ...]
    seconds: float
    problem: str = ""
    folder: str = ""


def execute(case: Case, folder: Path, breakage: str = "") -> Report:
    """Run a case in an empty folder, with a broken build if one is named; see whether all that is promised holds."""
    begun = time.monotonic()
    struck: list[str] = []
    problem = ""
    try:
        _execute(case, folder, breakage, struck)
    except AssertionError as error:
        problem = str(error) or traceback.format_exc()
    except Exception:
        problem = traceback.format_exc()
    return Report(
        case=case, struck=tuple(struck), seconds=time.monotonic() - begun, problem=problem, folder=str(folder)
    )


def _execute(case: Case, folder: Path, breakage: str, struck: list[str]) -> None:
    environment = {"LIVEFAULTS_FOLDER": str(folder), "LIVEFAULTS_BREAKAGE": breakage}
    command = [sys.executable, str(Path(__file__)), "--train", json.dumps(asdict(case))]
    draw = random.Random(f"strikes {case.seed} {case.number}")
    with Run.of(command, folder, environment) as run:
        scene = Scene(case=case, folder=folder, run=run, draw=draw, struck=struck)
        scene.await_training()
        PLANS[case.plan](scene)
        (folder / "go").touch()
        _await_end(run)
        run.check_nothing_is_left(scene.segments, 5.0)
        _check_no_socket_is_left(scene)
        if not scene.resumes and run.parent.returncode:
            raise Failed(f"the run ended with status {run.parent.returncode}:\n{scene.tail()}")
    if scene.resumes:
        with Run.of([*command, "--resume"], folder, environment) as again:
            _await_end(again)
            if again.parent.returncode:
                raise Failed(f"resuming ended with status {again.parent.returncode}:\n{again.text()[-6000:]}")
            again.check_nothing_is_left(set(), 5.0)
    _check_members(scene)
    _check_what_is_left(scene, command, environment)


def _await_end(run: Run) -> None:
    try:
        await_that(lambda: run.ended, "the end of the run", _END_S)
    except AssertionError as error:
        raise Failed(f"{error}; it says\n{run.text()[-6000:]}") from None


def _check_no_socket_is_left(scene: Scene) -> None:
    """What was on its way in a message when its process was killed, the kernel closes a moment later."""
    try:
        await_that(lambda: not _open_sockets(scene), "the end of every socket", 60.0)
    except AssertionError:
        raise Failed(f"sockets are still there: inodes {sorted(_open_sockets(scene))}") from None


def _open_sockets(scene: Scene) -> set[str]:
    there = {
        line.split()[column]
        for name, column in (("unix", 6), ("tcp", 9))
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    }
    return there & (scene.sockets - {"0"})


def _check_members(scene: Scene) -> None:
    """Nobody may die or be given up who was not struck, and who was paused must have been told."""
    reported = [*scene.folder.glob("raise-*"), *scene.folder.glob("die-leaving-*")]
    scene.pids |= {int(path.name.rpartition("-")[2]) for path in reported}
    if len(reported) != sum(
        what.startswith(("an error", "SIGKILL a server that is")) for what in scene.struck
    ):
        raise Failed(f"{scene.struck} were to be, and {reported} were")
    for event in scene.events("died", "silent"):
        found = re.search(r"\(pid (\d+)\)", event["sentence"])
        if found is None or int(found[1]) not in scene.pids:
            raise Failed(f"somebody died who was not struck: {event}")
    if len(scene.events("fenced")) < scene.fenced:
        raise Failed(f"{scene.fenced} members were to be fenced, and {len(scene.events('fenced'))} were")


def _check_what_is_left(scene: Scene, command: list[str], environment: dict[str, str]) -> None:
    may = [*(["--restored"] if scene.may_restore else []), *(["--resumed"] if scene.resumes else [])]
    clean = {**os.environ, **environment, "LIVEFAULTS_BREAKAGE": ""}
    done = subprocess.run(
        [*command, "--check", *may],
        env=clean,
        cwd=scene.folder,
        capture_output=True,
        text=True,
        timeout=_END_S,
    )
    if done.returncode:
        raise Failed(f"{done.stdout[-4000:]}{done.stderr[-4000:]}")
    found = Verdict(**json.loads(done.stdout.splitlines()[-1]))
    allowed = {"complete", "restored"} if may else {"complete"}
    if found.word not in allowed:
        raise Failed(f"the audit says {found.word}, where one of {sorted(allowed)} is true:\n{found.text}")


# ── the audit's verdict, in one place ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The audit's word (complete, incomplete, restored or broken), how many updates it says were lost, and its text."""

    word: str
    lost: int
    text: str


def verdict(run: Path) -> Verdict:
    """What `manyhands audit` says of a run; whoever changes its words changes them here."""
    from typer.testing import CliRunner

    from manyhands.cli.main import app

    done = CliRunner().invoke(app, ["audit", str(run)])
    raised = done.exception is not None and not isinstance(done.exception, SystemExit)
    return read_verdict(f"{done.output}{done.exception!r}" if raised else done.output)


def read_verdict(text: str) -> Verdict:
    """The verdict in what the audit prints; what has none is broken."""
    word, lost = "broken", 0
    restored = re.search(r"\brestored, (\d+) lost\b", text)
    other = re.search(r"· (incomplete|complete)\b", text)
    if "every update applied once, nothing broken" in text:
        word = "complete"
    elif restored:
        word, lost = "restored", int(restored[1])
    elif other:
        word = other[1]
    return Verdict(word=word, lost=lost, text=text)


# ── in the process that trains, and in the one that checks ────────────────────────────────────────────────────────────


def _train(case: Case, resume: bool) -> None:
    import manyhands as mh
    from livefaults_task import task

    options = mh.Options(checkpoint_every=_CHECKPOINT_EVERY)
    mh.fit(
        task(case.consistency),
        case.strategy,
        workers=WORKERS,
        steps=case.steps,
        out="run",
        resume=resume,
        options=options,
    )


def _check(case: Case, restored: bool, resumed: bool) -> None:
    """Look at what a run left: weights, and each batch once per shard; AssertionError says what is wrong."""
    import torch

    import manyhands as mh
    from equality import distance, train_plainly
    from livefaults_task import task
    from manyhands.data.store.rundir import RunDirectory
    from manyhands.strategies.ps.log_rows import RestoredRow
    from manyhands.strategies.ps.update_files import read_logs

    path = Path("run")
    weights = RunDirectory.open(path, lock=False).checkpoints().load().model
    assert all(torch.isfinite(value).all() for value in weights.values()), "weights are not finite"
    logs = read_logs(path)
    rows = [row for files in logs.files.values() for file in files for row in file]
    went_back = any(isinstance(row, RestoredRow) for row in rows)
    assert restored or resumed or not went_back, (
        "a shard went back to a snapshot, although a replica was left"
    )
    twice = _made_twice(rows)
    assert not twice or case.consistency != "sync" or case.plan == "fault during recovery" or went_back, (
        "shards took one update from different members, although no worker died together with a server"
    )
    if case.consistency == "sync" and (resumed or not (went_back or twice)):
        far = distance(weights, train_plainly(task("sync"), case.steps))
        assert far < 1e-9, f"the weights are {far:.3g} from those of the plain loop"
    if not went_back and not resumed:
        _check_batches(case, logs.files)
        done = mh.replay(path, task(case.consistency))
        assert done.first_difference is None, f"the replay differs: {done.first_difference}"
        assert done.same_bytes, "the replay ends with other bytes than the run"
    print(json.dumps(asdict(verdict(path))))


def _made_twice(rows: list[Any]) -> bool:
    """Whether shards took one update from different members: the second read what the first had already changed."""
    from manyhands.strategies.ps.log_rows import StepRow

    makers: dict[tuple[int, int], set[int]] = {}
    for row in rows:
        for one in row.updates if isinstance(row, StepRow) else ():
            makers.setdefault((one.slot, one.clock), set()).add(one.member)
    return any(len(members) > 1 for members in makers.values())


def _check_batches(case: Case, files: dict[int, list[list[Any]]]) -> None:
    """Every part of every batch is in every shard once; a part that came too late (backup workers) may be missing."""
    from manyhands.strategies.ps.log_rows import StepRow

    for shard, of_servers in sorted(files.items()):
        steps = {row.version: row for rows in of_servers for row in rows if isinstance(row, StepRow)}
        taken = Counter((one.batch, one.part) for row in steps.values() for one in row.updates)
        twice = [batch for batch, count in taken.items() if count > 1]
        assert not twice, f"shard {shard} took batches {twice[:5]} twice"
        missing = set(range(case.steps)) - {batch for batch, _ in taken}
        assert not missing, f"shard {shard} never took batches {sorted(missing)[:5]}"
        parts = {"sync": WORKERS, "sync:1": WORKERS - 1}.get(case.consistency, 1)
        assert len(taken) == parts * case.steps, (
            f"shard {shard} took {len(taken)} updates for {case.steps} batches of {parts}"
        )


# ── many cases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def moving_seed() -> int:
    """Another one each time, unless MANYHANDS_SEED says which."""
    return int(os.environ.get("MANYHANDS_SEED") or time.time_ns() // 10**9 % 10**6)


def campaign(
    faults: int, processes: int, seed: int, *, say: Callable[[str], None] = print, first: int = 0
) -> list[Report]:
    """Run cases from number `first` on, `processes` at a time, until so many faults were struck; those that failed."""
    say(f"live faults: seed {seed}, from case {first} on")
    failed: list[Report] = []
    struck, number = 0, first
    top = Path(tempfile.mkdtemp(prefix="livefaults-"))

    def one(case: Case) -> Report:
        folder = top / str(case.number)
        folder.mkdir()
        return execute(case, folder)

    with ThreadPoolExecutor(processes) as pool:
        running: set[Future[Report]] = set()
        while running or struck < faults:
            while len(running) < processes and struck + len(running) < faults:
                running.add(pool.submit(one, drawn(seed, number)))
                number += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for report in (future.result() for future in done):
                struck += max(1, len(report.struck))
                outcome = f"FAILED: {report.problem}\nkept in {report.folder}" if report.problem else "ok"
                say(f"{report.case} · {', '.join(report.struck)} · {report.seconds:.0f} s · {outcome}")
                if report.problem:
                    failed.append(report)
                else:
                    shutil.rmtree(report.folder)
    numbers = [report.case.number for report in failed]
    say(f"seed {seed}: {struck} faults in {number - first} runs, {len(failed)} runs failed {numbers}")
    if not failed:
        shutil.rmtree(top)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None, help="else MANYHANDS_SEED, else another each time")
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, default=None, help="the number of the only case")
    for hidden in ("--check", "--resume", "--restored", "--resumed"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is None:
        seed = given.seed if given.seed is not None else moving_seed()
        faults, first = (1, given.only) if given.only is not None else (given.faults, given.first)
        failed = campaign(
            faults, given.processes, seed, say=lambda line: print(line, flush=True), first=first
        )
        sys.exit(bool(failed))
    case = Case(**json.loads(given.train))
    if given.check:
        _check(case, given.restored, given.resumed)
    else:
        _train(case, given.resume)


if __name__ == "__main__":
    main()
