"""Faults at live runs of parameter servers, drawn from a seed: kills, pauses, failures of both ends and the launcher.

    python tests/livefaults.py --faults 300 --processes 8 --seed 7     a campaign; prints each case and what failed
    python tests/livefaults.py --seed 7 --only 12                      case 12 of it again; its folder is kept

A case is one training (consistency, link, replicas), struck by one plan of faults while it trains. What must hold
afterwards, for every fault that the promises cover: the run ends in good order (after the launcher's own death, when it
is resumed); `manyhands audit` finds what it should; each batch is in each shard once; a synchronous run has the weights
of the plain loop; a replay ends with the same bytes; who was paused is fenced; no process, memory or socket is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from assassin import events
from kills import Run, await_that

__all__ = [
    "PLANS",
    "Case",
    "Failed",
    "Report",
    "Verdict",
    "campaign",
    "drawn",
    "execute",
    "moving_seed",
    "verdict",
]

CONSISTENCIES = ("sync", "sync:1", "bounded:2", "async", "softsync:2", "aware:async")
WORKERS, SERVERS = 3, 2
_STEPS = {"sync": 200, "sync:1": 200}
_OTHER_STEPS = 360
_CHECKPOINT_EVERY = 10
_START_S, _EVENT_S, _END_S = 180.0, 60.0, 180.0
_SILENT_S = 5.0  # after which a member that stands still is given up


class Failed(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training and what befalls it."""

    number: int
    seed: int
    consistency: str
    link: str
    replicas: int
    plan: str

    @property
    def strategy(self) -> str:
        return (
            f"ps servers={SERVERS} consistency={self.consistency} link={self.link} replicas={self.replicas}"
        )

    @property
    def steps(self) -> int:
        return _STEPS.get(self.consistency, _OTHER_STEPS)

    def __str__(self) -> str:
        return f"case {self.number}: {self.plan} · {self.strategy}"


def drawn(seed: int, number: int) -> Case:
    """Case `number` of a seed. Plans go round, so that every campaign of some size has them all."""
    draw = random.Random(f"{seed} {number}")
    return Case(
        number=number,
        seed=seed,
        consistency=CONSISTENCIES[(number + seed) % len(CONSISTENCIES)],
        link=draw.choice(("shared", "tcp")),
        replicas=draw.choice((1, 1, 0)),
        plan=tuple(PLANS)[(number // len(CONSISTENCIES) + number) % len(PLANS)],
    )


# ── striking ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Scene:
    """A running case: who lives, what was struck, and what may follow from that."""

    case: Case
    folder: Path
    run: Run
    draw: random.Random
    struck: list[str] = field(default_factory=list)
    may_restore: bool = False
    """Whether a shard may have gone back to a snapshot."""
    resumes: bool = False
    """Whether the launcher was struck, and the run has to be resumed."""
    fenced: int = 0
    """How many members must have been told that their slot is another's."""
    segments: set[int] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in events(self.path) if not kinds or event["event"] in kinds]

    def await_that(self, condition: Callable[[], bool], what: str, within_s: float = _EVENT_S) -> None:
        await_that(lambda: condition() or self.run.ended, what, within_s)
        if self.run.ended and not condition():
            raise Failed(f"the run ended (status {self.run.parent.returncode}) before {what}:\n{self.tail()}")

    def await_training(self) -> None:
        metrics = self.path / "metrics.jsonl"
        self.await_that(lambda: metrics.exists() and metrics.stat().st_size > 0, "the first step", _START_S)

    def await_snapshots(self) -> None:
        folders = [self.path / "shards" / str(shard) for shard in range(SERVERS)]
        self.await_that(
            lambda: all(any(folder.glob("step-*")) for folder in folders),
            "a snapshot of each shard",
            _START_S,
        )

    def await_recovery(self, before: int, what: str = "") -> None:
        self.await_that(lambda: self._recoveries(what) > before, f"recovery {before + 1} of {what or 'all'}")

    def recoveries(self, what: str = "") -> int:
        return self._recoveries(what)

    def _recoveries(self, what: str) -> int:
        return sum(what in event["what"] for event in self.events("recovered"))

    def pause(self, seconds: float) -> None:
        """Wait for the drawn moment itself."""
        time.sleep(seconds * self.draw.random())

    def victim(self, role: str, *, but: tuple[str, ...] = ()) -> tuple[str, int]:
        """A living member of a role."""
        living: dict[str, int] = {}
        for event in self.events("started"):
            living[event["name"]] = event["pid"]
        names = sorted(
            name
            for name, pid in living.items()
            if name.startswith(role) and name not in but and Path(f"/proc/{pid}").exists()
        )
        if not names:
            raise Failed(f"nobody is there to strike among {living}")
        name = self.draw.choice(names)
        return name, living[name]

    def strike(self, name: str, pid: int, number: signal.Signals) -> None:
        self._remember()
        self.struck.append(f"{number.name} {name}")
        os.kill(pid, number)
        if name.startswith("server") and number is signal.SIGKILL:
            self.may_restore = self.may_restore or not self.case.replicas

    def kill(self, role: str, *, but: tuple[str, ...] = ()) -> str:
        name, pid = self.victim(role, but=but)
        self.strike(name, pid, signal.SIGKILL)
        return name

    def tail(self) -> str:
        return self.run.text()[-6000:]

    def _remember(self) -> None:
        """Note what memory and which sockets the run has, to look for them when it is over."""
        self.segments |= self.run.segments()
        self.sockets |= {link for pid in self.run.processes() for link in _sockets(pid)}


def _kill_workers(scene: Scene) -> None:
    for _ in range(2):
        before = scene.recoveries()
        scene.pause(1.0)
        scene.kill("worker")
        scene.await_recovery(before)


def _kill_servers(scene: Scene) -> None:
    for _ in range(2):
        before = scene.recoveries("every shard")
        scene.pause(1.0)
        scene.kill("server")
        scene.await_recovery(before, "every shard")


def _wake_a_worker(scene: Scene) -> tuple[str, int]:
    """Stop a worker until another has its slot, and wake it."""
    before = scene.recoveries("slot")
    name, pid = scene.victim("worker")
    scene.strike(name, pid, signal.SIGSTOP)
    scene.await_recovery(before, "slot")
    scene.pause(1.0)
    os.kill(pid, signal.SIGCONT)
    scene.fenced += 1
    return name, pid


def _zombie(scene: Scene) -> None:
    scene.pause(1.0)
    _wake_a_worker(scene)
    scene.await_that(lambda: len(scene.events("fenced")) >= 1, "that the paused worker is fenced")


def _zombie_takes_over(scene: Scene) -> None:
    """Who was fenced stands by, and has the slot of the next who dies."""
    scene.pause(1.0)
    name, zombie = _wake_a_worker(scene)
    scene.await_that(lambda: len(scene.events("fenced")) >= 1, "that the paused worker is fenced")
    time.sleep(0.5)
    for _ in range(2):  # the second finds the zombie at work, or its successor
        before = scene.recoveries("slot")
        living = [event for event in scene.events("started") if event["pid"] != zombie]
        candidates = sorted({e["pid"]: e["name"] for e in living if e["name"].startswith("worker")}.items())
        pid, name = scene.draw.choice([one for one in candidates if Path(f"/proc/{one[0]}").exists()])
        scene.strike(name, pid, signal.SIGKILL)
        scene.await_recovery(before, "slot")
        scene.pause(0.5)


def _paused_server(scene: Scene) -> None:
    """A server that stands still is killed before its shard moves: it never wakes up to serve."""
    before = scene.recoveries("every shard")
    scene.pause(1.0)
    name, pid = scene.victim("server")
    scene.strike(name, pid, signal.SIGSTOP)
    scene.may_restore = scene.may_restore or not scene.case.replicas
    scene.await_recovery(before, "every shard")
    if Path(f"/proc/{pid}/status").exists() and "zombie" not in Path(f"/proc/{pid}/status").read_text():
        raise Failed(f"{name} was stopped and replaced, but its process is there")


def _blinks(scene: Scene) -> None:
    """Short pauses change nothing but the time."""
    for role in scene.draw.sample(["worker", "server", "worker", "server"], 3):
        scene.pause(0.5)
        name, pid = scene.victim(role)
        scene.strike(name, pid, signal.SIGSTOP)
        time.sleep(scene.draw.uniform(0.05, _SILENT_S / 2))
        os.kill(pid, signal.SIGCONT)
    if scene.events("died", "silent"):
        raise Failed(f"somebody was given up for a short pause: {scene.events('died', 'silent')}")


def _server_fails(scene: Scene) -> None:
    """An exception in a server: it is a dead server."""
    before = scene.recoveries("every shard")
    scene.pause(1.0)
    scene._remember()
    (scene.folder / "raise").touch()
    scene.struck.append("raise server")
    scene.may_restore = scene.may_restore or not scene.case.replicas
    scene.await_recovery(before, "every shard")


def _during_recovery(scene: Scene) -> None:
    """A second fault while the first is being made good, of a kind that one replica covers."""
    scene.pause(1.0)
    first = scene.draw.choice(["worker", "server"])
    second = scene.draw.choice(
        ["worker", "successor"] if first == "server" else ["worker", "server", "successor"]
    )
    begun = len(scene.events("started"))
    died = len(scene.events("died"))
    name = scene.kill(first)
    scene.await_that(lambda: len(scene.events("died")) > died, f"that {name} is missed")
    if second == "successor":
        scene.await_that(lambda: len(scene.events("started")) > begun, f"the successor of {name}")
        scene.pause(0.3)
        started = scene.events("started")[begun]
        scene.strike(started["name"], started["pid"], signal.SIGKILL)
    else:
        scene.pause(0.8)
        scene.kill(second, but=(name,))
    deaths = len(scene.events("died")) + 1
    scene.await_that(lambda: len(scene.events("died")) >= min(deaths, died + 2), "that the second is missed")
    scene.await_that(lambda: _is_whole(scene.path), "that everybody is there again")


def _two_servers(scene: Scene) -> None:
    """More than one replica covers: the shards go back to a snapshot, and say what that loses."""
    scene.await_snapshots()
    before = scene.recoveries("every shard")
    scene.kill("server")
    scene.pause(0.5)
    scene.kill("server")
    scene.may_restore = True
    scene.await_recovery(before, "every shard")


def _at_the_end(scene: Scene) -> None:
    """A server dies while the run ends: what it was about to leave has to come from somewhere."""
    scene.pause(1.0)
    (scene.folder / "go").touch()
    ends = {"FINISHED"}
    scene.await_that(
        lambda: _steps_done(scene.path) > scene.case.steps - 12, f"the last steps {ends}", _END_S
    )
    scene.pause(0.4)
    try:
        scene.kill("server")
    except (Failed, ProcessLookupError):  # it was quicker than we
        scene.struck.append("nobody: the run was over")


def _launcher(number: signal.Signals) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        if scene.draw.random() < 0.75:
            scene.await_snapshots()
        scene.pause(1.5)
        scene.strike("launcher", scene.run.parent.pid, number)
        await_that(lambda: scene.run.ended, "the launcher has ended", 20.0)
        scene.resumes = True

    return strike


def _paused_launcher(scene: Scene) -> None:
    """Nobody is blamed for the time in which nobody watched."""
    scene.pause(1.0)
    scene.strike("launcher", scene.run.parent.pid, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.5, 1.5 * _SILENT_S))
    os.kill(scene.run.parent.pid, signal.SIGCONT)
    time.sleep(0.5)
    if scene.events("died", "silent"):
        raise Failed(f"somebody was given up while nobody watched: {scene.events('died', 'silent')}")


PLANS: dict[str, Callable[[Scene], None]] = {
    "kill workers": _kill_workers,
    "kill servers": _kill_servers,
    "wake a worker": _zombie,
    "wake a worker that takes over": _zombie_takes_over,
    "stop a server": _paused_server,
    "short pauses": _blinks,
    "a server fails": _server_fails,
    "fault during recovery": _during_recovery,
    "both servers": _two_servers,
    "kill a server at the end": _at_the_end,
    "kill the launcher": _launcher(signal.SIGKILL),
    "terminate the launcher": _launcher(signal.SIGTERM),
    "pause the launcher": _paused_launcher,
}
"""Each returns when what it did has been made good, or when it is for the end of the run to say."""


def _is_whole(path: Path) -> bool:
    """Whether the newest view has somebody for every shard and slot, and nobody is missed any more."""
    views = [event for event in events(path) if event["event"] == "view"]
    missing = [one for one in views[-1]["shards"] if not one["primary"]]
    missing += [one for one in views[-1]["slots"] if not one["member"]]
    last = [event["event"] for event in events(path) if event["event"] in ("died", "recovered")]
    return not missing and last[-1] == "recovered"


def _steps_done(path: Path) -> int:
    rows = (path / "metrics.jsonl").read_text().split("\n")[:-1]
    return len({json.loads(row)["step"] for row in rows if '"loss"' in row})


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
    """Run a case in an empty folder, and look whether everything that is promised holds."""
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
        await_that(lambda: run.ended, f"the end of the run; it says\n{scene.tail()}", _END_S)
        run.check_nothing_is_left(scene.segments, 5.0)
        _check_no_socket_is_left(scene)
        if not scene.resumes and run.parent.returncode:
            raise Failed(f"the run ended with status {run.parent.returncode}:\n{scene.tail()}")
    if scene.resumes:
        with Run.of([*command, "--resume"], folder, environment) as again:
            await_that(
                lambda: again.ended, f"the end of the resumed run; it says\n{again.text()[-6000:]}", 240.0
            )
            if again.parent.returncode:
                raise Failed(f"resuming ended with status {again.parent.returncode}:\n{again.text()[-6000:]}")
            again.check_nothing_is_left(set(), 5.0)
    check = [*command, "--check", *(["--restored"] if scene.may_restore or scene.resumes else [])]
    done = subprocess.run(
        check, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, timeout=_END_S
    )
    if done.returncode:
        raise Failed(f"{done.stdout[-4000:]}{done.stderr[-4000:]}")
    if len(scene.events("fenced")) < scene.fenced:
        raise Failed(f"{scene.fenced} members were to be fenced, and {len(scene.events('fenced'))} were")
    _check_verdict(scene)


def _check_no_socket_is_left(scene: Scene) -> None:
    listening = {
        line.split()[column]
        for name, column in (("unix", 6), ("tcp", 9))
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    }
    left = listening & (scene.sockets - {"0"})
    if left:
        raise Failed(f"sockets of the run are still there: inodes {sorted(left)}")


def _sockets(pid: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            if found:
                yield found[1]
    except OSError:  # it ended while we looked
        return


# ── the audit's verdict, in one place ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Verdict:
    """The audit's word (complete, incomplete, restored or broken), how many updates it says were lost, and its text."""

    word: str
    lost: int
    text: str


def verdict(run: Path) -> Verdict:
    """What `manyhands audit` says of a run; whoever changes its words changes them here."""
    done = subprocess.run(
        [sys.executable, "-m", "manyhands", "audit", str(run)], capture_output=True, text=True, timeout=_END_S
    )
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    text = f"{done.stdout}{done.stderr}"
    if "every update applied once, nothing broken" in last:
        return Verdict("complete" if done.returncode == 0 else "broken", 0, text)
    restored = re.search(r"\brestored, (\d+) lost\b", last)
    if restored:
        return Verdict("restored", int(restored[1]), text)
    found = re.search(r"\b(incomplete|complete)\b", last)
    return Verdict(found[1] if found else "broken", 0, text)


def _check_verdict(scene: Scene) -> None:
    allowed = {"complete", "restored"} if scene.may_restore or scene.resumes else {"complete"}
    found = verdict(scene.path)
    if found.word not in allowed:
        raise Failed(f"the audit says {found.word}, where one of {sorted(allowed)} is true:\n{found.text}")


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


def _check(case: Case, restored: bool) -> None:
    """Look at what a run left: weights, and each batch once per shard; AssertionError says what is wrong."""
    import torch

    import manyhands as mh
    from equality import distance, train_plainly
    from livefaults_task import task
    from manyhands.server.updates import read_logs
    from manyhands.store.rundir import RunDirectory

    path = Path("run")
    weights = RunDirectory.open(path, lock=False).checkpoints().load().model
    assert all(torch.isfinite(value).all() for value in weights.values()), "weights that are not finite"
    logs = read_logs(path)
    went_back = any(
        type(row).__name__ == "RestoredRow" for files in logs.files.values() for f in files for row in f
    )
    assert restored or not went_back, "a shard went back to a snapshot, although a replica was left"
    if went_back:
        return
    if case.consistency == "sync":
        far = distance(weights, train_plainly(task("sync"), case.steps))
        assert far < 1e-9, f"the weights are {far:.3g} from those of the plain loop"
    if restored:
        return
    _check_batches(case, logs.files)
    done = mh.replay(path, task(case.consistency))
    assert done.first_difference is None, f"the replay differs: {done.first_difference}"
    assert done.same_bytes, "the replay ends with other bytes than the run"


def _check_batches(case: Case, files: dict[int, list[list[Any]]]) -> None:
    """Every part of every batch is in every shard once; a part that came too late (backup workers) may be missing."""
    for shard, of_servers in sorted(files.items()):
        steps = {row.version: row for rows in of_servers for row in rows if type(row).__name__ == "StepRow"}
        taken = Counter((one.batch, one.slot) for row in steps.values() for one in row.updates)
        twice = [batch for batch, count in taken.items() if count > 1]
        assert not twice, f"shard {shard} took batches {twice[:5]} twice"
        split = case.consistency.startswith("sync")
        missing = set(range(case.steps)) - {batch for batch, _ in taken}
        assert not missing, f"shard {shard} never took batches {sorted(missing)[:5]}"
        parts = len(taken) if case.consistency == "sync" else 0
        assert not parts or parts == WORKERS * case.steps, f"shard {shard} took {parts} parts"
        if not split:
            assert len(taken) == case.steps, (
                f"shard {shard} took {len(taken)} updates for {case.steps} batches"
            )


# ── many cases ────────────────────────────────────────────────────────────────────────────────────────────────────────


def moving_seed() -> int:
    """Another one each time, unless MANYHANDS_SEED says which."""
    return int(os.environ.get("MANYHANDS_SEED") or time.time_ns() // 10**9 % 10**6)


def campaign(
    faults: int, processes: int, seed: int, say: Callable[[str], None] = print, only: int | None = None
) -> list[Report]:
    """Run cases, `processes` at a time, until so many faults were struck; the reports of those that failed."""
    say(f"live faults: seed {seed}")
    failed: list[Report] = []
    struck, number = 0, 0 if only is None else only
    top = Path(tempfile.mkdtemp(prefix="livefaults-"))

    def one(case: Case) -> Report:
        folder = top / str(case.number)
        folder.mkdir()
        return execute(case, folder)

    with ThreadPoolExecutor(processes) as pool:
        while struck < faults and (only is None or number == only):
            count = 1 if only is not None else min(processes, faults - struck)
            cases = [drawn(seed, number + index) for index in range(count)]
            number += count
            for report in pool.map(one, cases):
                struck += len(report.struck)
                outcome = f"FAILED: {report.problem}\n{report.folder}" if report.problem else "ok"
                say(f"{report.case} · {', '.join(report.struck)} · {report.seconds:.0f} s · {outcome}")
                if report.problem:
                    failed.append(report)
                elif only is None:
                    shutil.rmtree(report.folder)
    numbers = [report.case.number for report in failed]
    say(f"seed {seed}: {struck} faults in {number} runs, {len(failed)} runs failed {numbers}")
    if not failed and only is None:
        shutil.rmtree(top)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, default=None, help="the number of one case")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--restored", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is None:
        seed = given.seed if given.seed is not None else moving_seed()
        sys.exit(
            bool(
                campaign(
                    given.faults, given.processes, seed, lambda line: print(line, flush=True), given.only
                )
            )
        )
    case = Case(**json.loads(given.train))
    if given.check:
        _check(case, given.restored)
    else:
        _train(case, given.resume)


if __name__ == "__main__":
    main()
