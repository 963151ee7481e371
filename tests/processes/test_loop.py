"""The user's own script in real processes: alone, launched by us, by torchrun, and by torchrun on two hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import warm
from certificates import HOSTS, folders
from equality import distance
from hosts import Hosts, two_hosts
from manyhands.data.store.rundir import RunDirectory
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events

__all__ = ["two_hosts"]

pytestmark = pytest.mark.usefixtures("compiler_imported")

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).with_name("own_loop_script.py")
LAUNCH = [str(BIN / "manyhands"), "launch"]
TORCHRUN = [str(BIN / "torchrun")]


def run(
    *command: str | Path, starts: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return warm.run(
        command,
        trains=True,
        compiler=True,  # stepping an optimizer imports it
        starts=starts,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


@pytest.fixture(scope="module")
def alone(compiler_imported: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the script in one process."""
    path = tmp_path_factory.mktemp("alone") / "weights.pt"
    done = run(sys.executable, SCRIPT, path)
    assert done.stdout == "single on 1\n", done.stderr
    return torch.load(path)


@pytest.mark.parametrize(
    ("strategy", "said"), [(None, "mirrored"), pytest.param("central", "central", marks=pytest.mark.soak)]
)
def test_launched_workers_end_with_the_weights_of_one_process(
    strategy: str | None, said: str, tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    options = [
        "--workers",
        "3",
        *(["--strategy", strategy] if strategy else []),
        "--out",
        str(tmp_path / "run"),
    ]
    done = run(*LAUNCH, SCRIPT, *options, tmp_path / "weights.pt")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{said} on 3\n"
    assert distance(torch.load(tmp_path / "weights.pt"), alone) < 1e-9
    table = [line.split() for line in done.stderr.splitlines() if re.match(r" +[012] ", line)]
    assert [row[:2] for row in table] == [["0", "12"], ["1", "12"], ["2", "12"]], done.stderr
    kept = read_run_events(tmp_path / "run" / "events").roles
    assert [len(role.of(EventKind.STEP)) for role in kept] == [12, 12, 12]
    summary = RunDirectory.open(tmp_path / "run", lock=False).read_summary()
    assert summary is not None
    assert (summary["task"], summary["strategy"], summary["steps"]) == (SCRIPT.name, said, 12)


def test_torchrun_workers_end_with_the_weights_of_one_process(
    tmp_path: Path, alone: dict[str, torch.Tensor]
) -> None:
    done = run(*TORCHRUN, "--standalone", "--nproc-per-node", "2", SCRIPT, tmp_path / "weights.pt", starts=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "mirrored on 2"
    assert distance(torch.load(tmp_path / "weights.pt"), alone) < 1e-9


@pytest.mark.soak
@pytest.mark.parametrize(
    ("asked", "said_first"), [("", "allreduce algorithm=hierarchical group=2"), ("central", "central")]
)
@pytest.mark.parametrize("tls", [False, True], ids=["gloo", "tls"])
def test_torchrun_on_two_hosts_is_hierarchical_by_itself_and_ends_with_the_same_weights(
    asked: str,
    said_first: str,
    tls: bool,
    tmp_path: Path,
    alone: dict[str, torch.Tensor],
    two_hosts: Hosts,
) -> None:
    wanted = {"OWN_LOOP_STRATEGY": asked} if asked else {}
    if tls:
        wanted["MANYHANDS_TLS"] = str(folders() / HOSTS[0])
    options = [
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "10.231.77.1",
        "--master-port",
        "29517",
    ]
    nodes = []
    for number in range(2):
        command = [*TORCHRUN, *options, "--node-rank", str(number), SCRIPT, tmp_path / "weights.pt"]
        nodes.append(
            subprocess.Popen(
                [*two_hosts.inside(number), *map(str, command)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **wanted, "OMP_NUM_THREADS": "1", "OWN_LOOP_OUT": str(tmp_path / "run")},
            )
        )
    try:
        said = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait(timeout=240)
    assert [node.returncode for node in nodes] == [0, 0], said
    assert said[0][0].strip() == f"{said_first} on 4"
    assert said[1][0].strip() == ""
    warned = [report.count("is neither encrypted nor authenticated") for _, report in said]
    assert warned == ([0, 0] if tls else [1, 0]), said
    kept = read_run_events(tmp_path / "run" / "events").roles
    assert [len(role.of(EventKind.STEP)) for role in kept] == [12, 12, 12, 12]
    assert distance(torch.load(tmp_path / "weights.pt"), alone) < 1e-9


def launch_text(tmp_path: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(text))
    return run(*LAUNCH, script, "--workers", "2", *arguments)


def test_a_script_that_raises_on_one_worker_is_reported_with_its_traceback(tmp_path: Path) -> None:
    done = launch_text(
        tmp_path,
        """
        import manyhands as mh
        with mh.join() as group:
            if group.rank == 1:
                raise ZeroDivisionError("a batch without labels")
            group.barrier()
        """,
    )
    assert done.returncode == 1
    assert re.search(
        r"worker 1 \(pid \d+\) raised ZeroDivisionError at step \d+: a batch without labels", done.stderr
    )
    assert 'raise ZeroDivisionError("a batch without labels")' in done.stderr


def test_a_signal_to_the_launcher_of_a_script_says_what_is_kept_and_how_to_start_again(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    command = [*LAUNCH, "train.py", "--workers", "1", "--out", "events kept"]
    process = warm.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=240)
    assert process.returncode == 143
    assert errors.strip() == (
        "manyhands: ended by SIGTERM; all workers have stopped; the events up to now are in events kept, and "
        "files saved by the script are kept; start again with: "
        "manyhands launch train.py --workers 1"
    )


@pytest.mark.soak
def test_a_mistake_in_using_the_library_is_one_line_and_status_2(tmp_path: Path) -> None:
    done = launch_text(
        tmp_path, "import manyhands as mh\nwith mh.join(strategy='allreduce'): pass", "--strategy", "central"
    )
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "manyhands: the script asks for strategy=allreduce, but the launcher for central; set it in one place"
    )


@pytest.mark.soak
def test_a_script_gets_its_own_arguments_and_folder_and_may_join_twice_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("COLOUR = 'green'")
    done = launch_text(
        tmp_path,
        """
        import sys, beside, manyhands as mh
        for name in sys.argv[1:]:
            with mh.join(name) as group:
                group.print(beside.COLOUR, name, group.gather(__import__("torch").tensor(group.rank)).tolist())
        sys.exit(0)
        """,
        *("a", "--", "--workers", "a"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "green a [0, 1]\ngreen --workers [0, 1]\ngreen a [0, 1]\n"
    silent = launch_text(tmp_path, "print('hello')")
    assert silent.returncode == 0
    assert silent.stdout == "hello\nhello\n"
    assert "some workers did not call mh.join()" in silent.stderr


@pytest.mark.soak
def test_a_worker_of_fit_can_not_join(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, manyhands as mh
            def loss(model, batch):
                mh.join()
            task = mh.Task(model=lambda: torch.nn.Linear(1, 1), loss=loss, data=torch.ones(4, 1),
                           optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
            mh.fit(task, "mirrored", workers=2, steps=1)
            """
        )
    )
    done = run(sys.executable, script)
    assert "this process is a worker of fit, which has its own loop" in done.stderr
