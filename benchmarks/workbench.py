"""Every command of the workbench as a new user meets it: with its defaults, on embedded data, in a process of its own.

    python benchmarks/workbench.py                              all of them, into benchmarks/results/workbench.json
    python benchmarks/workbench.py --only "compare glove" serve some of them, to try; nothing is written without --json
    python benchmarks/workbench.py --list

Each runs in a terminal of its own (a pseudo-terminal), as people run it, so that progress is shown as they see it. Told
are the seconds from start to end, the longest time in which nothing was shown, and whether it ended with what to do
next. All begin in an empty folder and with no compiled kernel on the machine, as after a clean clone: the first that
needs a kernel compiles it, and waits for that. What a command needs of others (a trained run) is made before, and not
counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent.parent
RESULTS = HERE / "benchmarks" / "results" / "workbench.json"
LIMIT_S = 60.0
"""What a command may take on two cores."""

_PATIENCE_S = 300.0
_LAST_LINES = 8
_ENV = {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()][A-Z0-9]")
_IMAGES = (
    "import numpy; from sklearn.datasets import load_digits; numpy.save('images', load_digits().images[:100])"
)


@dataclass(frozen=True, slots=True)
class Command:
    """One line to type, in the place of `manyhands`; `needs` are the names of preparations."""

    words: str
    needs: tuple[str, ...] = ()
    report: str = ""
    """What else is done while it runs."""


PREPARATIONS: dict[str, list[str]] = {
    "digits": ["-m", "manyhands", *shlex.split("train digits --epochs 2 --out runs/digits")],
    "gpt": ["-m", "manyhands", *shlex.split("train gpt --steps 40 --out runs/gpt")],
    "images": ["-c", _IMAGES],
}

COMMANDS: dict[str, Command] = {
    "predict": Command("predict runs/digits images.npy", ("digits", "images")),
    "generate": Command('generate runs/gpt --prompt "def "', ("gpt",)),
    "export": Command("export runs/digits", ("digits",)),
    "export torch-export": Command("export runs/digits --format torch-export", ("digits",)),
    "serve": Command("serve runs/digits", ("digits",), "asked once, then ended by Ctrl-C"),
    "bench inference": Command("bench inference"),
    "train svd": Command("train svd"),
    "train gbdt": Command("train gbdt"),
    "train glove": Command("train glove"),
    "train glove, plain": Command("train glove --weighting count --no-diagonal"),
    "compare glove": Command("compare glove"),
    "train line": Command("train line"),
    "simulate": Command('simulate digits --strategy "ps consistency=aware:softsync:30" --workers 30'),
    "sweep": Command("sweep digits --learning-rate 0.001,0.004,0.01"),
    "scaling": Command("scaling digits --workers 1,2,4,8"),
    "compare devices": Command("compare digits --device cpu,cuda"),
    "compare sparse": Command("compare sparse"),
    "tour": Command("tour"),
    "tour 1": Command("tour 1 --yes"),
}
"""By the name that `--only` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one command did."""

    name: str
    command: str
    seconds: float
    silence_s: float
    """The longest time in which nothing was shown."""
    status: int
    ends_with_next: bool
    last: list[str]


def cleaned(output: str) -> list[str]:
    """The lines that a terminal shows in the end, roughly: without colours, blank lines and what was written over."""
    lines = (line.rpartition("\r")[2] for line in _ESCAPES.sub("", output).replace("\r\n", "\n").split("\n"))
    return [line.rstrip() for line in lines if line.strip()]


def ends_with_next(lines: Sequence[str]) -> bool:
    """Whether the last lines name something to type: a line that begins with `next`, or a command of ours."""
    return any(
        re.match(r"next\b", line) or re.search(r"\bmanyhands [a-z]+\b", line) for line in lines[-_LAST_LINES:]
    )


def ask_server(output: str) -> None:
    """Send the request that `serve` printed, as whoever pastes it would."""
    found = re.search(
        r"curl -s (\S+) -H 'Authorization: (Bearer \S+)' -d '(.*?)'", " ".join(cleaned(output)), re.DOTALL
    )
    if found is None:
        raise SystemExit("serve printed no request to paste")
    request = urllib.request.Request(found[1], found[3].encode(), {"Authorization": found[2]})
    with urllib.request.urlopen(request, timeout=30) as answer:
        if "answers" not in json.load(answer):
            raise SystemExit("serve gave no answer")


class Terminal:
    """A process on a pseudo-terminal; `watch` reads all that it shows until it ends."""

    def __init__(self, arguments: Sequence[str], folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self.silence_s = 0.0
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=folder,
            env=environment(folder) | _ENV,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def watch(self, seen: Callable[[Terminal], None]) -> int:
        """Its exit status; `seen` is called whenever it has shown something. It is killed where it takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        heard = time.monotonic()
        try:
            for piece in self._pieces(deadline):
                now = time.monotonic()
                self.silence_s, heard = max(self.silence_s, now - heard), now
                self.shown += piece.decode(errors="replace")
                seen(self)
            return self.process.wait(max(0.1, deadline - time.monotonic()))
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            os.close(self._ours)

    def _pieces(self, deadline: float) -> Iterator[bytes]:
        while time.monotonic() < deadline:
            ready, _, _ = select.select([self._ours], [], [], 0.5)
            if not ready:
                continue
            try:
                piece = os.read(self._ours, 1 << 16)
            except OSError:  # the last who had the terminal has closed it
                return
            if not piece:
                return
            yield piece
        raise SystemExit(f"not over after {_PATIENCE_S:g} s; the last it showed: {cleaned(self.shown)[-3:]}")


def environment(folder: Path) -> dict[str, str]:
    """This tree's package, and kernels of its own."""
    return {**os.environ, "PYTHONPATH": str(HERE / "src"), "NUMBA_CACHE_DIR": str(folder / "kernels")}


def prepare(names: Sequence[str], folder: Path) -> None:
    for name in names:
        print(f"preparing {name}", file=sys.stderr, flush=True)
        subprocess.run(
            [sys.executable, *PREPARATIONS[name]],
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=True,
            timeout=_PATIENCE_S,
        )


def measure(name: str, folder: Path) -> Row:
    """Run one command."""
    command = COMMANDS[name]
    asked = False

    def seen(terminal: Terminal) -> None:
        nonlocal asked
        if name == "serve" and not asked and "Ctrl-C ends it" in terminal.shown:
            asked = True
            ask_server(terminal.shown)
            terminal.process.send_signal(signal.SIGINT)

    began = time.monotonic()
    terminal = Terminal(["-m", "manyhands", *shlex.split(command.words)], folder)
    status = terminal.watch(seen)
    lines = cleaned(terminal.shown)
    return Row(
        name=name,
        command=f"manyhands {command.words}",
        seconds=time.monotonic() - began,
        silence_s=terminal.silence_s,
        status=status,
        ends_with_next=ends_with_next(lines),
        last=lines[-_LAST_LINES:],
    )


def show(rows: Sequence[Row]) -> None:
    table = Table(title=f"{len(os.sched_getaffinity(0))} cores")
    for column in ("command", "seconds", "longest silence", "status", "what to do next"):
        table.add_column(column, justify="left" if column == "command" else "right")
    for row in rows:
        seconds = f"{row.seconds:.1f}" if row.seconds < LIMIT_S else f"{row.seconds:.1f} (!)"
        report = "yes" if row.ends_with_next else "no (!)"
        table.add_row(row.command, seconds, f"{row.silence_s:.1f}", str(row.status), report)
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(COMMANDS), help="some of them")
    parser.add_argument("--list", action="store_true", help="their names, and what is typed")
    parser.add_argument("--json", type=Path, help="where all are run, the committed result by default")
    asked = parser.parse_args()
    if asked.list:
        for name, command in COMMANDS.items():
            print(f"{name:20} manyhands {command.words}")
        return 0
    names = asked.only or list(COMMANDS)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="workbench-") as place:
        folder = Path(place)
        prepare(list(dict.fromkeys(need for name in names for need in COMMANDS[name].needs)), folder)
        for name in names:
            rows.append(measure(name, folder))
            print(f"{name}: {rows[-1].seconds:.1f} s, status {rows[-1].status}", file=sys.stderr, flush=True)
    show(rows)
    file = asked.json or (RESULTS if asked.only is None else None)
    if file is not None:
        about = {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}
        file.write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return int(any(row.status for row in rows))


if __name__ == "__main__":
    sys.exit(main())
