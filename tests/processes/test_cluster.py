"""The local cluster with real processes: what it delivers, how each death is told, and that nothing is left.

Functions of this module go to the children by value, so that a child imports no test module.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from descriptors import open_descriptors
from kills import Run, await_that
from manyhands.errors import NonFinite, UserError, WorkerFailed
from manyhands.places.local import template
from manyhands.places.local.control import Finished, RoleContext
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.supervisor import LocalCluster, Role
from manyhands.places.local.template import kept_pid

cloudpickle.register_pickle_by_value(sys.modules[__name__])

Job = Callable[[RoleContext], Mapping[str, Any] | None]


def run(job: Job, num_roles: int = 2, **options: Any) -> list[Finished]:
    roles = [Role(name=f"worker {rank}", target=job) for rank in range(num_roles)]
    with LocalCluster(roles, **options) as cluster:
        return cluster.run()


def descriptors() -> set[str]:
    return open_descriptors()


def state_of(pid: int) -> str:
    """The kernel's letter for what a process does: S asleep, T stopped, Z ended; nothing once it is reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def exists(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def shared_memory() -> set[str]:
    """The inodes of our memory files that this process maps; another test's may wait to be collected."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "manyhands:" in line}


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before, mapped = descriptors(), shared_memory()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert descriptors() == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert shared_memory() <= mapped


def linger(context: RoleContext) -> None:
    """Work until asked to stop."""
    from manyhands.places.local.status import State

    while not context.stop_requested():
        context.mark(3, State.COMPUTING)
        time.sleep(0.005)


def test_results_notes_output_and_inheritance(capfd: pytest.CaptureFixture[str]) -> None:
    shared = os.memfd_create("manyhands:test", os.MFD_CLOEXEC)

    def job(context: RoleContext) -> Mapping[str, Any]:
        print(f"out {context.rank}")
        print(f"err {context.rank}", file=sys.stderr)
        os.pwrite(context.descriptor("shared"), bytes([65 + context.rank]), context.rank)
        for number in range(100):
            context.send({"number": number})
        try:
            context.descriptor("share")
        except UserError as error:
            complaint = str(error)
        return {
            "place": [context.name, context.rank, context.world],
            "threads": os.environ["OMP_NUM_THREADS"],
            "own": os.environ.get("ROLE_OWN"),
            "python_path": os.environ.get("PYTHONPATH"),
            "torch": "torch" in sys.modules,
            "leads_its_session": os.getsid(0) == os.getpid(),
            "complaint": complaint,
        }

    notes: list[tuple[int, int]] = []
    roles = [
        Role(name=f"worker {rank}", target=job, descriptors={"shared": shared}, env={"ROLE_OWN": str(rank)})
        for rank in range(2)
    ]
    with LocalCluster(
        roles, on_note=lambda rank, payload: notes.append((rank, payload["number"]))
    ) as cluster:
        results = cluster.run()
    for rank, result in enumerate(results):
        complaint = result.payload["complaint"]
        assert complaint.endswith("has no descriptor 'share'; allowed: shared; did you mean 'shared'?")
        assert [number for sender, number in notes if sender == rank] == list(range(100))
        assert result.payload["place"] == [f"worker {rank}", rank, 2]
        assert result.payload["threads"] == os.environ.get("OMP_NUM_THREADS", str(threads_per_role(2)))
        assert result.payload["own"] == str(rank)
        assert result.payload["python_path"] == os.environ.get("PYTHONPATH")
        assert result.payload["leads_its_session"]
        assert result.payload["torch"], "which no role has to import itself"
    assert os.pread(shared, 10, 0) == b"AB"
    os.close(shared)
    printed = capfd.readouterr()
    assert sorted(printed.out.split("\n")) == ["", "out 0", "out 1"]
    assert sorted(printed.err.split("\n")) == ["", "err 0", "err 1"]


def test_a_role_that_ends_has_written_everything_and_done_what_it_registered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Roles are forks that end without taking their modules apart."""

    def job(context: RoleContext) -> None:
        import atexit
        import sys

        sys.left_open = (tmp_path / f"open {context.rank}").open("w")  # type: ignore[attr-defined]
        sys.left_open.write("all of it")  # type: ignore[attr-defined]
        atexit.register((tmp_path / f"registered {context.rank}").write_text, "done")
        ctypes.CDLL(None).printf(b"from C\n")

    run(job)
    for rank in range(2):
        assert (tmp_path / f"open {rank}").read_text() == "all of it"
        assert (tmp_path / f"registered {rank}").read_text() == "done"
    assert capfd.readouterr().out.count("from C\n") == 2


def test_the_template_is_kept_when_torch_sets_variables_of_its_own() -> None:
    run(lambda context: None, num_roles=1)
    first = kept_pid()
    import_module("torch._dynamo.convert_frame")  # which sets the folder of its cache
    gc.collect()
    gc.freeze()  # or every test after this one looks through all that came with it, twice
    assert "TORCHINDUCTOR_CACHE_DIR" in os.environ
    run(lambda context: None, num_roles=1)
    assert first is not None
    assert kept_pid() == first


def test_what_is_expected_is_imported_before_the_next_fork_by_the_template_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_there(context: RoleContext) -> dict[str, Any]:
        return {"there": "tabnanny" in sys.modules}

    monkeypatch.setattr(template, "_expected", {})
    assert [one.payload for one in run(is_there, num_roles=1)] == [{"there": False}]
    first = kept_pid()
    template.expect(["tabnanny"])
    assert [one.payload for one in run(is_there)] == [{"there": True}] * 2
    assert kept_pid() == first


def test_what_is_foreseen_is_imported_before_anybody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "foreseen_here.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w').close()")
    monkeypatch.syspath_prepend(tmp_path)
    made = template.Template(template.inherited_environment(), ())
    try:
        made.foresee(["foreseen_here"])
        deadline = time.monotonic() + 180
        while not (tmp_path / "imported").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        made.close()
    made.foresee(["colorsys"])  # of one that is gone: nothing happens


def test_an_exception_is_reported_with_traceback_and_step() -> None:
    def job(context: RoleContext) -> None:
        from manyhands.places.local.status import State

        if context.rank == 1:
            context.mark(17, State.COMPUTING)
            raise KeyError("a misspelt column")
        linger(context)

    alarms: list[int] = []
    with pytest.raises(WorkerFailed) as caught:
        run(job, on_failure=alarms.append, grace_s=30.0)
    text = str(caught.value)
    assert caught.value.worker_rank == 1
    assert alarms == [1]
    assert re.match(
        r"worker 1 \(pid \d+\) raised KeyError at step 17: 'a misspelt column'\n\nTraceback", text
    )
    assert 'raise KeyError("a misspelt column")' in text
    assert "role.py" not in text


def test_the_users_mistake_arrives_as_itself() -> None:
    def job(context: RoleContext) -> None:
        raise NonFinite(f"worker {context.rank}, step 3: the loss is not finite")

    with pytest.raises(NonFinite, match="worker 0, step 3: the loss is not finite"):
        run(job, 1)


def test_leaving_without_a_word_is_reported_with_status_and_last_words(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def job(context: RoleContext) -> None:
        os.write(2, b"word\n" * 1000 + b"the disk is gone\n")
        os._exit(3)

    with pytest.raises(WorkerFailed, match=r"worker 0 \(pid \d+\) exited with status 3 before") as caught:
        run(job, 1)
    words = str(caught.value).split("the end of its stderr:\n")[1]
    assert words.endswith("word\nword\nthe disk is gone")
    assert 4000 < len(words) <= 4096
    assert capfd.readouterr().err == "word\n" * 1000 + "the disk is gone\n"


def test_a_crash_in_c_code_is_reported_with_the_line_that_led_there() -> None:
    def job(context: RoleContext) -> None:
        ctypes.string_at(0)

    with pytest.raises(WorkerFailed, match=r"was killed by SIGSEGV; last seen starting") as caught:
        run(job, 1)
    assert "Fatal Python error: Segmentation fault" in str(caught.value)
    assert "in job" in str(caught.value)


def test_a_killed_role_is_noticed_by_its_end() -> None:
    killed: list[float] = []

    def job(context: RoleContext) -> None:
        context.send({"pid": os.getpid()})
        linger(context)

    def on_note(rank: int, payload: Mapping[str, Any]) -> None:
        if rank == 0:
            os.kill(payload["pid"], signal.SIGKILL)
            killed.append(time.monotonic())

    def on_failure(rank: int) -> None:
        killed.append(time.monotonic())

    with pytest.raises(WorkerFailed, match=r"worker 0 \(pid \d+\) was killed by SIGKILL"):
        run(job, on_note=on_note, on_failure=on_failure)
    assert killed[1] - killed[0] < 10.0, "noticed by its end, not by a deadline"


def test_a_stopped_role_is_noticed_in_time_and_taken_down() -> None:
    pids: list[int] = []
    moments: list[float] = []

    def job(context: RoleContext) -> None:
        from manyhands.places.local.status import State

        context.mark(5, State.EXCHANGING)
        context.send({"pid": os.getpid()})
        linger(context)

    def on_note(rank: int, payload: Mapping[str, Any]) -> None:
        pids.append(payload["pid"])
        if len(pids) == 2:
            os.kill(pids[0], signal.SIGSTOP)
            moments.append(time.monotonic())

    with pytest.raises(WorkerFailed, match=r"fell silent .*; last seen \w+ step [35], \d+\.\d s ago"):
        run(
            job,
            on_note=on_note,
            on_failure=lambda rank: moments.append(time.monotonic()),
            silent_after_s=2.0,
        )
    assert 1.0 < moments[1] - moments[0] < 20.0
    assert not any(exists(pid) for pid in pids)


def test_a_role_that_holds_the_interpreter_lock_is_not_silent() -> None:
    def job(context: RoleContext) -> None:
        ctypes.PyDLL(None).usleep(1_800_000)  # a C function called with the lock held

    assert run(job, 1, silent_after_s=1.0) == [Finished(payload={})]


def test_one_who_does_not_stop_is_killed_after_the_grace() -> None:
    def job(context: RoleContext) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if context.rank == 1:
            raise ValueError("first")
        context.send({"pid": os.getpid()})
        time.sleep(600)

    pids: list[int] = []
    failed: list[float] = []
    with pytest.raises(WorkerFailed, match="first"):
        run(
            job,
            on_note=lambda rank, payload: pids.append(payload["pid"]),
            on_failure=lambda rank: failed.append(time.monotonic()),
            grace_s=0.5,
        )
    assert 0.5 < time.monotonic() - failed[0] < 90.0
    assert not any(exists(pid) for pid in pids)


@pytest.mark.parametrize("ending", ["returns", "raises", "is killed"])
def test_grandchildren_end_with_their_role(ending: str) -> None:
    def job(context: RoleContext) -> None:
        grandchild = subprocess.Popen(["sleep", "600"])
        grandchild.returncode = 0  # this process will not look after it
        context.send({"pid": grandchild.pid})
        if ending == "raises":
            raise ValueError("on purpose")
        if ending == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)

    pids: list[int] = []
    try:
        run(job, 1, on_note=lambda rank, payload: pids.append(payload["pid"]))
    except WorkerFailed:
        assert ending != "returns"
    (pid,) = pids
    await_that(lambda: not exists(pid), "the grandchild has ended", 60.0)


def test_a_data_set_is_in_memory_once_however_many_read_it() -> None:
    import torch

    data = torch.ones(16 * 2**20 // 4)

    def job(context: RoleContext) -> Mapping[str, Any]:
        total = float(data.sum())  # touches every page
        data[0] = context.rank  # and this copies one
        entry = Path("/proc/self/smaps").read_text().split("manyhands:job")[1].split("VmFlags")[0]
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in entry.splitlines() if "kB" in line}
        return {"total": total, "first": float(data[0]), "threads": torch.get_num_threads(), **sizes}

    for rank, result in enumerate(run(job, 2)):
        assert result.payload["total"] == data.numel()
        assert result.payload["first"] == rank
        assert result.payload["Rss"] >= 16 * 1024
        assert result.payload["Anonymous"] <= 64, "more than the touched page was copied"
        assert result.payload["threads"] == int(os.environ.get("OMP_NUM_THREADS", threads_per_role(2)))
    assert data[0].item() == 1.0


def test_a_role_has_the_threads_that_it_is_given_whoever_started_the_template() -> None:
    def job(context: RoleContext) -> Mapping[str, Any]:
        import torch

        return {"threads": torch.get_num_threads()}

    roles = [
        Role(name=f"worker {rank}", target=job, env={"OMP_NUM_THREADS": str(rank + 3)}) for rank in range(2)
    ]
    with LocalCluster(roles) as cluster:
        assert [result.payload["threads"] for result in cluster.run()] == [3, 4]


def test_it_runs_in_a_thread_that_is_not_the_main_one() -> None:
    results: list[Finished] = []
    thread = threading.Thread(target=lambda: results.extend(run(lambda context: {"rank": context.rank})))
    thread.start()
    thread.join(timeout=240)
    assert results == [Finished(payload={"rank": 0}), Finished(payload={"rank": 1})]


def test_an_error_of_the_application_takes_everyone_down() -> None:
    def job(context: RoleContext) -> None:
        context.send({"pid": os.getpid()})
        linger(context)

    pids: list[int] = []

    def on_note(rank: int, payload: Mapping[str, Any]) -> None:
        pids.append(payload["pid"])
        raise OSError("the metrics file is full")

    with pytest.raises(OSError, match="the metrics file is full"):
        run(job, on_note=on_note)
    assert not any(exists(pid) for pid in pids)


def test_what_can_not_run_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match="roles=\\[\\] must have"):
        LocalCluster([])
    with pytest.raises(UserError, match=r"silent_after_s=0\.1 must be at least 1"):
        run(linger, silent_after_s=0.1)
    with pytest.raises(UserError, match="grace_s=-1 must be at least 0"):
        run(linger, grace_s=-1)
    with pytest.raises(UserError, match="must not be empty"):
        Role(name="", target=linger)
    with pytest.raises(UserError, match="must be a function"):
        Role(name="worker 0", target=3)  # type: ignore[arg-type]
    lock = threading.Lock()
    with pytest.raises(UserError, match="cannot be sent"):
        run(lambda context: {"locked": lock.locked()})
    with pytest.raises(RuntimeError, match="as a context manager"):
        LocalCluster([Role(name="worker 0", target=linger)]).run()


def test_a_job_that_can_not_be_loaded_or_returned_is_reported() -> None:
    class Sly:
        def __reduce__(self) -> Any:
            return os.listdir, ("/there/is/no/such/folder",)

    sly = Sly()
    with pytest.raises(WorkerFailed, match=r"raised FileNotFoundError at step 0: .*no/such/folder"):
        run(lambda context: {"x": sly}, 1)
    with pytest.raises(WorkerFailed, match="the job of worker 0 returned a int, not a dict or None"):
        run(lambda context: 3, 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="a Finished cannot be sent: it has a set"):
        run(lambda context: {"x": {1}}, 1)


SCRIPT = """
import ctypes, os, signal, subprocess, sys, time
from manyhands.places.local.supervisor import LocalCluster, Role

factor = 3

class Model:  # of __main__: goes by value
    def value(self):
        return factor

def job(context):
    {job}

def note(rank, payload):
    print("note", rank, payload, flush=True)

if __name__ == "__main__":
    roles = [Role(name=f"worker {{rank}}", target=job) for rank in range(2)]
    with LocalCluster(roles, on_note=note, grace_s=20.0) as cluster:
        try:
            print([result.payload for result in cluster.run()], flush=True)
        finally:
            print("left", sys.exc_info()[0], flush=True)
"""


def script(folder: Path, *lines: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(SCRIPT.format(job="\n    ".join(lines)))
    return [sys.executable, str(path)]


def test_what_a_script_defines_runs_in_its_children(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    command = script(tmp_path, "import beside", "return {'x': beside.double(Model().value() + context.rank)}")
    with Run.of(command, tmp_path / "..") as started:
        assert started.parent.wait(timeout=240) == 0
        assert "[{'x': 6}, {'x': 8}]" in started.text()


@pytest.mark.parametrize(
    ("line", "state"),
    [
        pytest.param("time.sleep(600)", "S", id="asleep"),
        pytest.param("os.kill(os.getpid(), signal.SIGSTOP)", "T", id="stopped"),
        pytest.param("ctypes.PyDLL(None).sleep(600)", "S", id="holding the lock of the interpreter"),
        pytest.param("import atexit; atexit.register(time.sleep, 600)", "S", id="leaving"),
    ],
)
def test_the_launchers_death_ends_everyone(line: str, state: str, tmp_path: Path) -> None:
    grandchild = "grandchild = subprocess.Popen(['sleep', '600'])"
    command = script(tmp_path, grandchild, "context.send({'pid': os.getpid()})", line)
    with Run.of(command, tmp_path) as started:
        await_that(lambda: started.text().count("note") == 2 or started.ended, "both work", 180.0)
        await_that(
            lambda: [state_of(pid) for pid in started.roles()] == [state] * 2, f"both are {state}", 60.0
        )
        segments = started.segments()
        assert len(started.processes()) == 6, "launcher, template, two roles and their children"
        started.parent.kill()
        started.parent.wait()
        started.check_nothing_is_left(segments)


@pytest.mark.parametrize(
    ("number", "status", "kind"),
    [(signal.SIGINT, -signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, 143, "SystemExit")],
)
def test_an_interrupted_launcher_takes_all_down_in_order(
    number: signal.Signals, status: int, kind: str, tmp_path: Path
) -> None:
    wait = "while not context.stop_requested(): time.sleep(0.005)"
    command = script(tmp_path, "context.send({'at': 'work'})", wait, "context.send({'leaving': 1})")
    with Run.of(command, tmp_path) as started:
        await_that(lambda: started.text().count("work") == 2 or started.ended, "both work", 180.0)
        segments = started.segments()
        started.parent.send_signal(number)
        assert started.parent.wait(timeout=240) == status
        started.check_nothing_is_left(segments)
        assert started.text().count("leaving") == 2
        assert f"left <class '{kind}'>" in started.text()


def test_a_second_interruption_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with Run.of(script(tmp_path, "context.send({'at': 'work'})", "time.sleep(600)"), tmp_path) as started:
        await_that(lambda: started.text().count("work") == 2 or started.ended, "both work", 180.0)
        segments = started.segments()
        start = time.monotonic()
        while not started.ended and time.monotonic() < start + 15.0:
            started.parent.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert time.monotonic() - start < 10.0
        started.check_nothing_is_left(segments)
