"""What befalls a live run of parameter servers: plans of faults, each of which waits until it has been made good."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from assassin import events
from kills import Run, await_that

WORKERS, SERVERS = 3, 2
_STEPS = {"sync": 200, "sync:1": 200}
_OTHER_STEPS = 360
_START_S, _EVENT_S, _END_S = 300.0, 100.0, 240.0
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


@dataclass
class Scene:
    """A running case: who lives, what was struck, and what may follow from that."""

    case: Case
    folder: Path
    run: Run
    draw: random.Random
    struck: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    """The processes that were struck: nobody else may die."""
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

    def tail(self) -> str:
        return self.run.text()[-6000:]

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def await_that(self, condition: Callable[[], bool], what: str, within_s: float = _EVENT_S) -> None:
        try:
            await_that(lambda: condition() or self.run.ended, what, within_s)
        except AssertionError as error:
            raise Failed(f"{error}; the run says\n{self.tail()}") from None
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
        self.await_that(
            lambda: self.recoveries(what) > before, f"recovery {before + 1} of {what or 'anything'}"
        )

    def recoveries(self, what: str = "") -> int:
        return sum(what in event["what"] for event in self.events("recovered"))

    def pause(self, seconds: float) -> None:
        """Wait for the drawn moment itself."""
        time.sleep(seconds * self.draw.random())

    # ── striking ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def victim(self, role: str, *, but: tuple[int, ...] = ()) -> tuple[str, int]:
        """A living member of a role, but not one of these processes."""
        started = [event for event in self.events("started") if event["name"].startswith(role)]
        living = sorted(
            (event["name"], event["pid"])
            for event in started
            if event["pid"] not in but and _is_alive(event["pid"])
        )
        if not living:
            raise Failed(f"nobody is there to strike among {started}")
        return self.draw.choice(living)

    def strike(self, name: str, pid: int, number: signal.Signals) -> None:
        self.remember()
        self.struck.append(f"{number.name} {name}")
        self.pids.add(pid)
        os.kill(pid, number)
        if name.startswith("server") and number is signal.SIGKILL:
            self.may_restore = self.may_restore or not self.case.replicas

    def kill(self, role: str, *, but: tuple[int, ...] = ()) -> tuple[str, int]:
        name, pid = self.victim(role, but=but)
        self.strike(name, pid, signal.SIGKILL)
        return name, pid

    def remember(self) -> None:
        """Note what memory and which sockets the run has, to look for them when it is over."""
        self.segments |= self.run.segments()
        self.sockets |= {inode for pid in self.run.processes() for inode in _sockets(pid)}


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


def _zombie(scene: Scene, *, computes: bool = False) -> None:
    """Stop a worker until another has its slot, and wake it; one that `computes` pushes before it reads."""
    before = scene.recoveries("slot")
    scene.pause(1.0)
    if computes:
        (scene.folder / "stop").touch()
        scene.await_that(lambda: any(scene.folder.glob("stop-*")), "that a worker stops itself")
        [order] = scene.folder.glob("stop-*")
        pid = int(order.name.partition("-")[2])
        [name] = {event["name"] for event in scene.events("started") if event["pid"] == pid}
    else:
        name, pid = scene.victim("worker")
    scene.strike(name, pid, signal.SIGSTOP)
    scene.await_recovery(before, "slot")
    scene.pause(1.0)
    os.kill(pid, signal.SIGCONT)
    scene.fenced += 1
    scene.await_that(lambda: bool(scene.events("fenced")), "that the paused worker is fenced")


def _zombie_takes_over(scene: Scene) -> None:
    """Who was fenced stands by, and has the slot of the next who dies; the one after that has a new process."""
    _zombie(scene)
    zombie = next(iter(scene.pids))
    time.sleep(0.5)  # it hears that nothing is vacant
    for _ in range(2):
        before = scene.recoveries("slot")
        scene.kill("worker", but=(zombie,))
        scene.await_recovery(before, "slot")
        scene.pause(0.5)


def _stopped_server(scene: Scene) -> None:
    """A server that stands still is killed before its shard moves: it never wakes up to serve."""
    before = scene.recoveries("every shard")
    scene.pause(1.0)
    name, pid = scene.victim("server")
    scene.strike(name, pid, signal.SIGSTOP)
    scene.may_restore = scene.may_restore or not scene.case.replicas
    scene.await_recovery(before, "every shard")
    if _is_alive(pid):
        raise Failed(f"{name} was stopped and replaced, but its process {pid} is there")


def _short_pauses(scene: Scene) -> None:
    """They change nothing but the time; nobody may die (which is looked at in the end)."""
    for role in scene.draw.sample(["worker", "server", "worker", "server"], 3):
        scene.pause(0.5)
        name, pid = scene.victim(role)
        scene.strike(name, pid, signal.SIGSTOP)
        time.sleep(scene.draw.uniform(0.05, _SILENT_S / 2))
        os.kill(pid, signal.SIGCONT)
        scene.pids.discard(pid)


def _server_fails(scene: Scene) -> None:
    """An exception in a server: it is a dead server."""
    before = scene.recoveries("every shard")
    scene.pause(1.0)
    scene.remember()
    (scene.folder / "raise").touch()
    scene.struck.append("an error in a server")
    scene.may_restore = scene.may_restore or not scene.case.replicas
    scene.await_recovery(before, "every shard")


def _during_recovery(scene: Scene) -> None:
    """A second fault while the first is being made good, of a kind that one replica covers."""
    scene.pause(1.0)
    first = scene.draw.choice(["worker", "server"])
    seconds = ["worker", "successor"] if first == "server" else ["worker", "server", "successor"]
    second = scene.draw.choice(seconds)
    begun, died = len(scene.events("started")), len(scene.events("died"))
    name, pid = scene.kill(first)
    scene.await_that(lambda: len(scene.events("died")) > died, f"that {name} is missed")
    if second == "successor":
        scene.await_that(lambda: len(scene.events("started")) > begun, f"the successor of {name}")
        scene.pause(0.3)
        started = scene.events("started")[begun]
        scene.strike(started["name"], started["pid"], signal.SIGKILL)
    else:
        scene.pause(0.8)
        scene.kill(second, but=(pid,))
    scene.await_that(lambda: len(scene.events("died")) > died + 1, "that the second is missed")
    scene.await_that(lambda: _is_whole(scene.path), "that everybody is there again")


def _both_servers(scene: Scene) -> None:
    """More than one replica covers: the shards go back to a snapshot, and say what that loses."""
    scene.await_snapshots()
    before = scene.recoveries("every shard")
    first = scene.victim("server")
    second = scene.victim("server", but=(first[1],))
    scene.strike(*first, signal.SIGKILL)
    scene.pause(0.5)
    scene.strike(*second, signal.SIGKILL)
    scene.may_restore = True
    scene.await_recovery(before, "every shard")


def _at_the_end(scene: Scene) -> None:
    """A server dies while the run ends: what it was about to leave has to come from somewhere."""
    scene.pause(1.0)
    scene.may_restore = not scene.case.replicas
    if scene.draw.random() < 0.6:
        scene.remember()
        scene.struck.append("SIGKILL a server that is asked for its shards")
        (scene.folder / "die-leaving").touch()
        return
    (scene.folder / "go").touch()
    scene.await_that(lambda: _steps_done(scene.path) > scene.case.steps - 12, "the last steps", _END_S)
    scene.pause(0.5)
    try:
        scene.kill("server")
    except (Failed, ProcessLookupError):
        scene.struck.append("nobody, for the run was over")


def _launcher(number: signal.Signals) -> Callable[[Scene], None]:
    def strike(scene: Scene) -> None:
        if scene.draw.random() < 0.75:
            scene.await_snapshots()
        scene.pause(1.5)
        scene.strike("the launcher", scene.run.parent.pid, number)
        await_that(lambda: scene.run.ended, "the launcher has ended", 60.0)
        scene.resumes = True

    return strike


def _paused_launcher(scene: Scene) -> None:
    """Nobody is blamed for the time in which nobody watched."""
    scene.pause(1.0)
    scene.strike("the launcher", scene.run.parent.pid, signal.SIGSTOP)
    time.sleep(scene.draw.uniform(0.5, 1.5 * _SILENT_S))
    os.kill(scene.run.parent.pid, signal.SIGCONT)


PLANS: dict[str, Callable[[Scene], None]] = {
    "kill workers": _kill_workers,
    "kill servers": _kill_servers,
    "wake a worker": _zombie,
    "wake a worker that computed": partial(_zombie, computes=True),
    "wake a worker that takes over": _zombie_takes_over,
    "stop a server": _stopped_server,
    "short pauses": _short_pauses,
    "a server fails": _server_fails,
    "fault during recovery": _during_recovery,
    "both servers": _both_servers,
    "kill a server at the end": _at_the_end,
    "kill the launcher": _launcher(signal.SIGKILL),
    "terminate the launcher": _launcher(signal.SIGTERM),
    "pause the launcher": _paused_launcher,
}
"""Each returns when what it did has been made good, or when it is for the end of the run to say."""


def _is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _is_whole(path: Path) -> bool:
    """Whether the newest view has somebody for every shard and slot, and nobody is missed any more."""
    seen = events(path)
    view = [event for event in seen if event["event"] == "view"][-1]
    missing = [one for one in view["shards"] if not one["primary"]]
    missing += [one for one in view["slots"] if not one["member"]]
    last = [event["event"] for event in seen if event["event"] in ("died", "recovered")]
    return not missing and last[-1] == "recovered"


def _steps_done(path: Path) -> int:
    rows = (path / "metrics.jsonl").read_text().split("\n")[:-1]
    return len({json.loads(row)["step"] for row in rows if '"loss"' in row})


def _sockets(pid: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
            if found:
                yield found[1]
    except OSError:  # it ended while we looked
        return
