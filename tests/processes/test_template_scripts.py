"""The template that workers are forked from, in scripts of their own: begun early, and by a thread."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import warm
from kills import await_that
from processes.test_cluster import nothing_stays_open

__all__ = ["nothing_stays_open"]  # for every test here, too


_TASK = """
import subprocess, sys, threading, torch
import manyhands as mh
task = mh.Task(
    model=lambda: torch.nn.Linear(2, 1),
    loss=lambda model, batch: model(batch).square().mean(),
    data=torch.ones(8, 2),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
def fit(strategy="mirrored"):
    return mh.fit(task, strategy, workers=2, steps=2).summary["steps"]
"""
_WARM = """
import sys
import manyhands as mh
mh.warm()
from manyhands.places.local.template import kept_pid
assert "torch" not in sys.modules, "it returns at once"
first = kept_pid()
print(first)
"""
_FIT = """
for strategy in ("mirrored", "ps", "central"):
    assert fit(strategy) == 2
    assert "torch._dynamo" not in sys.modules, f"{strategy} imports torch's compiler here, which nobody uses"
assert kept_pid() == first, "fit takes what is there"
"""


@pytest.mark.parametrize("fits", [True, False])
def test_a_script_may_start_the_template_before_it_imports_torch(fits: bool) -> None:
    script = _WARM + _TASK + _FIT if fits else _WARM
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    template = Path(f"/proc/{int(done.stdout.split()[0])}")
    await_that(lambda: not template.exists(), "the end of the template", 60.0)


_IN_THE_BACKGROUND = """
with mh.start(task, "ps", workers=1, steps=3) as running:
    running.result(240)
print(fit())
"""
_IN_A_THREAD = """
from manyhands.places.local.template import end_kept
end_kept()  # the thread is to start one itself, and no fork of this process's beginning may stand in for it
spared, subprocess.Popen._execute_child = subprocess.Popen._execute_child, subprocess.Popen._execute_child.__wrapped__
thread = threading.Thread(target=fit)
thread.start()
thread.join()
subprocess.Popen._execute_child = spared
print(fit())
"""


def test_a_run_may_follow_one_of_another_thread() -> None:
    """What a thread starts ends with it: the next run must not count on it."""
    script = _TASK + _IN_THE_BACKGROUND + _IN_A_THREAD
    done = warm.run([sys.executable, "-c", script], trains=3, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
