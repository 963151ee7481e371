"""Damaged files against every reader: no crash, no hang, memory bounded, and only errors that say what is wrong.

    python tests/fuzz_files.py --files 100000 --processes 16             # all readers, a new seed, which is printed
    python tests/fuzz_files.py --files 2000 --seed 7 --reader libsvm --reader vectors-text
    python tests/fuzz_files.py --seed 7 --reader libsvm --case 1234      # one file again; it is kept and named

Compiled kernels check the bounds of their arrays here (`--no-bounds` to leave that), in a cache of their own. Each
process may take 1 GiB beyond what reading the valid sample took, and a file 60 s. Exit status 1 where anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOM_BYTES = 1 << 30
LIMIT_S = 60.0
_MOST_CRASHES = 20  # of one share of the work, after which the rest of it is left


def main() -> int:
    """Parse the command line, and hand the work out or do a share of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=1000, help="damaged files for each reader")
    parser.add_argument("--seed", type=int, default=None, help="a new one by default")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--reader", action="append", help="its name; all of them by default")
    parser.add_argument("--no-bounds", action="store_true", help="kernels as they are usually compiled")
    parser.add_argument("--here", action="store_true", help="all in this process, one after the other")
    parser.add_argument("--case", type=int, help="only this one, of one reader; its file is kept")
    parser.add_argument(
        "--share", nargs=2, type=int, help=argparse.SUPPRESS
    )  # of a process that this one starts
    parser.add_argument("--place", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.no_bounds:
        os.environ["NUMBA_BOUNDSCHECK"] = "1"
        os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir(), f"manyhands-bounds-{os.getuid()}"))
    if asked.share:
        return work(asked.reader[0], asked.seed, range(*asked.share), Path(asked.place))
    from file_readers import READERS

    seed = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    names = asked.reader or list(READERS)
    unknown = [name for name in names if name not in READERS]
    if unknown:
        parser.error(f"there is no reader {unknown[0]!r}; there are {', '.join(READERS)}")
    if asked.case is not None:
        return work(names[0], seed, range(asked.case, asked.case + 1), None)
    print(
        f"seed {seed} · {asked.files} files for each of {len(names)} readers · {asked.processes} processes",
        flush=True,
    )
    if asked.here:
        with tempfile.TemporaryDirectory(prefix="fuzz-files-") as place:
            return max(work(name, seed, range(asked.files), Path(place)) for name in names)
    return campaign(names, seed, asked.files, asked.processes, ["--no-bounds"] if asked.no_bounds else [])


# ── a share of the work, in a process of its own ──────────────────────────────────────────────────────────────────────


def work(name: str, seed: int, cases: range, place: Path | None) -> int:
    """Read damaged files; each failure is a line of JSON, and so is the count at the end."""
    from file_readers import READERS
    from manyhands.errors import ManyhandsError
    from mutation import mutated

    faulthandler.enable()  # what ends a process says where
    reader = READERS[name]
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-", dir=place))
    reader.make(folder)
    targets = [sorted(folder.glob(pattern)) for pattern in reader.files]
    assert all(targets), f"{name}: no files to damage"
    reader.read(
        folder
    )  # the sample itself is good; and whatever is compiled or imported is there from now on
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    limit = _mapped_bytes() + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    counts: Counter[str] = Counter()
    slowest_s = 0.0
    for case in cases:
        rng = random.Random(f"{seed} {name} {case}")
        path = rng.choice(rng.choice(targets))
        good = path.read_bytes()
        path.write_bytes(mutated(good, path.name, rng))
        if place is not None:
            (place / f"{name}-{cases.start}.at").write_bytes(struct.pack("<q", case))
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        began = time.monotonic()
        try:
            reader.read(folder)
            counts["read"] += 1
        except (ManyhandsError, *reader.allowed) as error:
            counts["refused"] += 1
            problem = _unclear(error)
            if problem:
                _say(reader=name, case=case, error=problem, where=problem)
                counts["failed"] += 1
        except BaseException as error:  # anything else is what is looked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            frames = [
                f"{one.filename.rpartition('/')[2]}:{one.lineno}"
                for one in traceback.extract_tb(error.__traceback__)
            ]
            _say(reader=name, case=case, error=f"{type(error).__name__}: {str(error)[:200]}",
                 where=f"{where.filename.rpartition('/')[2]}:{where.lineno}", frames=frames[-4:])  # fmt: skip
            counts["failed"] += 1
        slowest_s = max(slowest_s, time.monotonic() - began)
        faulthandler.cancel_dump_traceback_later()
        if place is None:
            print(f"{path} is kept; it gave {dict(counts)}")
            return int(counts["failed"] > 0)
        path.write_bytes(good)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1024
    _say(reader=name, done=dict(counts), slowest_s=slowest_s, grown_mb=grown_mb)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shutil.rmtree(folder)
    return int(counts["failed"] > 0)


def _unclear(error: BaseException) -> str:
    """What is wrong with how a refusal says it; nothing where it is one line that can be printed."""
    text = str(error)
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{type(error).__name__} that cannot be printed"
    return f"{type(error).__name__} without a word" if not text.strip() else ""


def _mapped_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


# ── handing it out ────────────────────────────────────────────────────────────────────────────────────────────────────


def campaign(names: list[str], seed: int, files: int, processes: int, flags: list[str]) -> int:
    """All readers, in several processes; what failed is printed once for each place in the code."""
    each = max(1, min(files, max(500, -(-files // processes))))
    shares = [(name, begin, min(begin + each, files)) for name in names for begin in range(0, files, each)]
    failures: Counter[tuple[str, str]] = Counter()
    totals: dict[str, Counter[str]] = {name: Counter() for name in names}
    worst: dict[str, tuple[float, float]] = dict.fromkeys(names, (0.0, 0.0))
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="fuzz-files-", dir=memory) as place,
        ThreadPoolExecutor(processes) as pool,
    ):
        for (name, _, end), said in zip(
            shares, pool.map(lambda share: _share(*share, seed, Path(place), flags), shares), strict=True
        ):
            for one in said:
                if "done" in one:
                    totals[name].update(one["done"])
                    worst[name] = (
                        max(worst[name][0], one["slowest_s"]),
                        max(worst[name][1], one["grown_mb"]),
                    )
                    continue
                key = (name, one["where"])
                failures[key] += 1
                totals[name]["crashed"] += one.get("crashed", 0)
                if failures[key] == 1:
                    print(
                        f"{name}, case {one['case']}: {one['error']} at {one.get('frames', one['where'])}",
                        flush=True,
                    )
            if end == files:  # the last share of a reader
                _tell(name, totals[name], worst[name])
    print(f"{sum(failures.values())} failures in {len(failures)} places, seed {seed}")
    return int(bool(failures))


def _tell(name: str, total: Counter[str], worst: tuple[float, float]) -> None:
    num_failed = total["failed"] + total["crashed"]
    print(
        f"{name:18} {total['read']} read · {total['refused']} refused · {num_failed} failed · slowest "
        f"{worst[0]:.2f} s · memory +{worst[1]:.0f} MB",
        flush=True,
    )


def _share(name: str, begin: int, end: int, seed: int, place: Path, flags: list[str]) -> list[dict[str, Any]]:
    """One share of a reader's files, gone on with behind every file that ended the process."""
    said: list[dict[str, Any]] = []
    for _ in range(_MOST_CRASHES):
        command = [
            sys.executable,
            __file__,
            "--reader",
            name,
            "--seed",
            str(seed),
            "--place",
            str(place),
            *flags,
        ]
        done = subprocess.run(
            [*command, "--share", str(begin), str(end)], capture_output=True, text=True, check=False
        )
        said += [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        if any("done" in one for one in said):
            break
        mark = place / f"{name}-{begin}.at"
        if not mark.exists():  # nothing was damaged yet: the sample itself cannot be read
            said.append({"case": begin, "error": done.stderr[-2000:], "where": "the sample", "crashed": 1})
            break
        case = struct.unpack("<q", mark.read_bytes())[0]
        words = "hung, or crashed" if "Timeout" in done.stderr else f"crashed with status {done.returncode}"
        said.append({"case": case, "error": f"{words}: {done.stderr[-1500:]}", "where": words, "crashed": 1})
        begin = case + 1
        if begin >= end:
            break
    return said


if __name__ == "__main__":
    sys.exit(main())
