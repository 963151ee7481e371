"""Warm processes of tests are processes like those that `subprocess` starts; see `warm`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import warm
from manyhands.places.local.control import RoleContext
from manyhands.places.local.supervisor import LocalCluster, Role
from manyhands.places.local.template import end_kept

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# On some processors torch leaves open what it has read of them under /sys: that is not ours to close.
PROBE = """
import json, os, sys
from pathlib import Path
print("asked", file=sys.stderr)
ends = {one: Path("/proc/self/fd", one) for one in os.listdir("/proc/self/fd")}
ends = [one for one, end in ends.items() if end.exists() and not os.readlink(end).startswith("/sys/devices/")]
print(json.dumps({
    "argv": sys.argv, "original": sys.orig_argv, "path": sys.path, "main": __name__,
    "module": sys.modules["__main__"].__dict__ is globals(), "file": globals().get("__file__"),
    "folder": os.getcwd(), "parent": os.getppid(), "umask": os.umask(0),
    "environment": dict(os.environ), "shown": Path("/proc/self/environ").read_text().split("\\0")[:-1],
    "command": Path("/proc/self/comm").read_text(), "stdin": sys.stdin.read(), "warnings": sys.warnoptions,
    "streams": [[s.encoding, s.errors, s.line_buffering, s.write_through] for s in (sys.stdout, sys.stderr)],
    "passed": os.read(int(os.environ["PASSED"]), 5).decode(), "open": sorted(ends),
    "int": repr(__import__("signal").getsignal(2)), "cores": sorted(os.sched_getaffinity(0)),
}))
"""


@pytest.mark.usefixtures("compiler_imported")
@pytest.mark.parametrize(("way", "compiler"), [("-c", False), ("script", False), ("-m", False), ("-m", True)])
def test_a_warm_process_sees_what_a_cold_one_sees(way: str, compiler: bool, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    words = {"-c": ["-c", PROBE], "script": [str(tmp_path / "probe.py")], "-m": ["-m", "probe"]}[way]

    def seen(popen: Callable[..., subprocess.Popen[str]]) -> dict[str, Any]:
        reading, writing = os.pipe()
        os.write(writing, b"hello")
        os.close(writing)
        environment = {
            **os.environ,
            "PASSED": str(reading),
            "PYTHONWARNINGS": "error",
            "PYTHONPATH": "/nowhere",
            "PYTHONUNBUFFERED": "" if way == "script" else "1",
        }
        process = popen(
            [sys.executable, *words, "a", "b c"], pass_fds=[reading], cwd=tmp_path, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        output, errors = process.communicate("typed", timeout=240)
        os.close(reading)
        assert (process.returncode, errors) == (0, "asked\n"), errors
        report: dict[str, Any] = json.loads(output)
        assert set(report.pop("shown")) >= {f"{name}={value}" for name, value in environment.items()}
        report["environment"].pop("PASSED")
        return report

    warm_one, cold_one = seen(partial(warm.Popen, compiler=compiler)), seen(subprocess.Popen)
    assert warm_one.pop("parent") == cold_one.pop("parent") == os.getpid()
    assert warm_one == cold_one


@pytest.mark.parametrize(
    ("code", "status", "output"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no')", 1, ""),
        ("1 / 0", 1, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT); __import__('time').sleep(60)", -2, ""),
        ("import os; os.abort()", -6, ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n"),
        ("import threading, time; threading.Timer(0.2, print, ['late']).start()", 0, "late\n"),
    ],
)
def test_it_ends_as_a_cold_one_does(code: str, status: int, output: str) -> None:
    done = warm.run([sys.executable, "-c", code], timeout=240, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, output), done.stderr
    if code == "1 / 0":
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    if "'no'" in code:
        assert done.stderr == "no\n"


def test_its_template_is_a_child_of_its_own_and_ends_with_it() -> None:
    code = """
import time
from manyhands.places.local import template
template.warm()
print(template.kept_pid(), flush=True)
time.sleep(600)
"""
    with warm.Popen([sys.executable, "-c", code], trains=True, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split() == [str(child)]
        watched = os.pidfd_open(child)
        process.send_signal(signal.SIGKILL)
        assert process.wait(240) == -signal.SIGKILL
        assert select.select([watched], [], [], 10.0)[0], "it outlives its launcher"
        os.close(watched)


def test_python_processes_that_it_starts_are_warm_too_and_its_own_children() -> None:
    code = """
import os, subprocess, sys
asked = "import os, sys; print(os.getppid(), os.getsid(0) == os.getpid(), 'torch' in sys.modules, os.getcwd())"
for sessions in (True, False):
    done = subprocess.run([sys.executable, "-u", "-c", asked], cwd="/", start_new_session=sessions, capture_output=True)
    parent, *others = done.stdout.decode().split()
    print(int(parent) == os.getpid(), *others, done.stderr.decode())
"""
    done = warm.run([sys.executable, "-c", code], starts=1, timeout=240, capture_output=True, text=True)
    report = [line.split() for line in done.stdout.splitlines()]
    assert report == [["True", "True", "True", "/"], ["True", "False", "False", "/"]], done.stderr


@pytest.mark.usefixtures("compiler_imported")
def test_it_has_the_compiler_where_that_is_asked_for_and_all_that_is_to_be_called_at_its_end() -> None:
    code = """
import atexit, sys
print("torch._dynamo" in sys.modules, atexit._ncallbacks())
atexit.register(print, "last")
"""
    report = []
    for compiler in (False, True):
        command = [sys.executable, "-c", code]
        done = warm.run(command, compiler=compiler, timeout=240, capture_output=True, text=True, check=True)
        report.append(done.stdout.split())
    (plain, fewest, _), (with_it, count, last) = report
    assert (plain, with_it, last) == ("False", "True", "last")
    assert int(count) >= int(fewest)


def test_a_template_that_the_tests_own_process_starts_is_warm_too() -> None:
    def is_warm(_: RoleContext) -> dict[str, bool]:
        return {"warm": "warm_modules" in sys.modules}

    end_kept()
    with LocalCluster([Role(name="one", target=is_warm)]) as cluster:
        assert [one.payload for one in cluster.run()] == [{"warm": True}]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="is not this interpreter"):
        warm.Popen(["/bin/true"])
    with pytest.raises(ValueError, match="read while importing"):
        warm.Popen([sys.executable, "-c", ""], env={**os.environ, "NUMBA_DISABLE_JIT": "1"})
    with pytest.raises(ValueError, match="preexec_fn"):
        warm.Popen([sys.executable, "-c", ""], preexec_fn=lambda: None)
