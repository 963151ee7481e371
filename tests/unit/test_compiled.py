"""Where compiled code is kept, and that it can never be that of other sources."""

from __future__ import annotations

import io
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.native import cache_folder, warming
from manyhands.native.cache_folder import ROOT, digest_of, imported_files, module_file
from manyhands.native.warming import job_named, jobs_of
from manyhands.workloads.registry import FAMILIES, WORKLOADS


def _package(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return root


def _two_trees(tmp_path: Path, called: str) -> list[str]:
    """The digest of a kernel's module in a package as it was and in one where the file `called` is another."""
    files = {
        "kernels": "from pack.rates import rate\nimport pack.deep.base\n",
        "rates": "from pack.deep import constants\n",
        "deep__base": "ONE = 1\n",
        "deep__constants": "TWO = 2\n",
        "stranger": "THREE = 3\n",
    }
    before = _package(tmp_path / "before" / "pack", **files)
    after = _package(tmp_path / "after" / "pack", **{**files, called: files[called] + "# changed\n"})
    return [digest_of([root / "kernels.py"], root) for root in (before, after)]


@pytest.mark.parametrize("called", ["kernels", "rates", "deep__base", "deep__constants"])
def test_digest_changes_with_every_file_that_a_kernel_can_reach(tmp_path, called):
    before, after = _two_trees(tmp_path, called)
    assert before != after


def test_digest_stays_when_an_unrelated_file_changes_or_the_tree_moves(tmp_path):
    before, after = _two_trees(tmp_path, "stranger")
    assert before == after


def test_digest_reaches_through_real_modules():
    kernels = ROOT / "workloads" / "logreg" / "logreg_kernels.py"
    files = {str(file.relative_to(ROOT)) for file in imported_files(kernels)}
    assert {"native/group/gate.py", "native/atomics.py", "native/waiting.py", "native/decorators.py"} <= files


def _folder(monkeypatch, **environment: str) -> Path | None:
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return cache_folder.cache_folder.__wrapped__()


def test_cache_goes_where_it_was_asked_to_go_or_to_the_users_caches(tmp_path, monkeypatch):
    assert _folder(monkeypatch, NUMBA_CACHE_DIR=str(tmp_path / "given")) == tmp_path / "given" / "manyhands"
    assert _folder(monkeypatch, XDG_CACHE_HOME=str(tmp_path)) == tmp_path / "manyhands" / "kernels"
    found = _folder(monkeypatch, HOME=str(tmp_path / "home"))
    assert found == tmp_path / "home" / ".cache" / "manyhands" / "kernels"
    assert stat.S_IMODE(found.stat().st_mode) == 0o700


def test_cache_goes_to_a_private_temporary_folder_where_home_is_no_folder(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = _folder(monkeypatch, HOME=str(tmp_path / "file"))
    assert found == tmp_path / f"manyhands-kernels-{os.geteuid()}"


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    """Whoever can write there could have this user run code."""
    shared = tmp_path / f"manyhands-kernels-{os.geteuid()}"
    shared.mkdir()
    shared.chmod(0o777)
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert _folder(monkeypatch, HOME=str(tmp_path / "file")) is None
    shared.rmdir()
    shared.symlink_to(tmp_path)
    assert _folder(monkeypatch, HOME=str(tmp_path / "file")) is None


def test_code_of_old_sources_is_removed_and_that_of_others_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folder, "cache_folder", lambda: tmp_path)
    for name in ("memory.old-0", "memory.new-0"):
        (tmp_path / name).mkdir()
    (tmp_path / "group-0.done").touch()
    for name in ("memory.old-0", "group-0.done"):
        os.utime(tmp_path / name, (0, 0))
    folder = cache_folder.folder_of(ROOT / "native" / "waiting.py")
    assert folder is not None
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(["memory.new-0", folder.name])


def test_every_kernel_is_kept_by_our_own_decorators():
    """One that used numba's own would be kept beside the sources, and go stale."""
    own = ROOT / "native" / "decorators.py"
    stray = re.compile(
        r"import numba$|from numba import .*\b(njit|jit|cfunc|vectorize)\b|numba\.(njit|jit|cfunc)", re.M
    )
    found = [
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        if file != own and stray.search(file.read_text())
    ]
    assert found == [], "import njit, helper, inlined or cfunc from manyhands.native.decorators"


def test_jobs_name_what_is_there_and_cover_every_module_that_compiles_when_imported():
    names = jobs_of("all")
    jobs = [job_named(name) for name in names]
    for job in jobs:
        assert job.after is None or job.after in names
        for call in job.calls:
            module, _, function = call.partition(":")
            file = module_file(module)
            assert file is not None, call
            assert not function or f"def {function}(" in file.read_text(), call
    for family in [*FAMILIES, *WORKLOADS]:
        assert set(jobs_of(family)) <= set(names)
    reached = {
        file
        for job in jobs
        for call in job.calls
        for file in imported_files(module_file(call.partition(":")[0]))
    }
    eager = {file for file in ROOT.rglob("*.py") if re.search(r'^@njit\("', file.read_text(), re.M)}
    assert eager <= reached


_PARALLEL = """
import os, sys, time
from manyhands.native import warming
from manyhands.native.warming import CompileJob
order = sys.argv[1]
def _import(module):
    with open(order, "a") as file: print(module, file=file)
    if module == "bad": raise ValueError("no such kernel")
    time.sleep(0.2 if module == "base" else 0)
warming.import_module = _import
warming.JOBS = {"late": CompileJob(("late",), after="base"), "base": CompileJob(("base",)), "bad": CompileJob(("bad",)),
                "alone": CompileJob(("alone",), after="not asked for")}
assert warming.run_jobs(["late", "base", "bad", "alone"], slots=2) == ["bad"]
"""


def test_jobs_run_side_by_side_but_after_what_they_build_on(tmp_path):
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT.parent)}
    # _mark looks at real jobs: only what has no sources is asked for here
    script = _PARALLEL.replace(
        "assert warming", "warming._mark = lambda job: __import__('pathlib').Path(order)\nassert warming"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "order")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "no such kernel" in done.stderr
    order = (tmp_path / "order").read_text().split()
    assert sorted(order) == ["alone", "bad", "base", "late"]
    assert order.index("base") < order.index("late")


def test_nothing_is_prepared_twice_in_a_process(tmp_path, monkeypatch):
    report: list[list[str]] = []
    monkeypatch.setattr(warming, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(warming, "_PREPARED", set())
    monkeypatch.setattr(warming, "_mark", lambda job: tmp_path / f"{job}.done")
    monkeypatch.setattr(warming, "_compile_in_child", lambda names: report.append(list(names)))
    (tmp_path / "waiting.done").touch()
    assert warming.prepare("libsvm", "fit") > 0
    assert warming.prepare("fit") == 0.0
    assert report == [["libsvm", "group", "records", "reductions", "reductions_double", "hashing"]]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_shows_how_far_compiling_is(tmp_path, monkeypatch, on_terminal):
    shown, start = _Terminal() if on_terminal else io.StringIO(), subprocess.Popen
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(warming, "_SHOWN_EVERY_S", 0.02)
    monkeypatch.setattr(warming, "_mark", lambda job: tmp_path / job)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **more: start(["sh", "-c", "sleep 0.3; echo oh >&2; exit 3"], **more)
    )
    (tmp_path / "svd").touch()
    warming._compile_in_child(["svd", "logreg"])
    *lines, cleared = shown.getvalue().split("\r\x1b[K")
    if on_terminal:
        assert "manyhands: compiling: 1 of 2 parts done, 0 s" in lines
        assert cleared == "manyhands: kernels could not be compiled beforehand: oh\n"
    else:
        assert (lines, cleared) == ([], "manyhands: kernels could not be compiled beforehand: oh\n")


def test_what_compiles_too_long_is_ended(monkeypatch, capsys):
    begun, start = [], subprocess.Popen
    monkeypatch.setattr(warming, "_SHOWN_EVERY_S", 0.02)
    monkeypatch.setattr(warming, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(
        subprocess, "Popen", lambda _, **more: begun.append(start(["sleep", "60"], **more)) or begun[0]
    )
    warming._compile_in_child(["svd"])
    assert "kernels were not compiled within 0 s; continuing without them" in capsys.readouterr().err
    assert begun[0].returncode == -signal.SIGKILL
