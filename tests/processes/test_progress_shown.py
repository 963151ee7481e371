"""What somebody who calls `fit` in a terminal sees."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import warm

SCRIPT = """
import time, torch
import manyhands as mh

def loss(model, batch):
    time.sleep(0.3)
    return model(batch).square().mean()

task = mh.Task(model=lambda: torch.nn.Linear(2, 1), loss=loss, data=torch.ones(40, 2), batch_size=5,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
mh.fit(task, "single", steps=6)
"""


def test_a_terminal_has_a_bar_for_runs_of_more_than_a_second() -> None:
    master, terminal = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    environment |= {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with warm.Popen(
        [sys.executable, "-c", SCRIPT], stderr=terminal, stdout=subprocess.PIPE, env=environment
    ) as process:
        os.close(terminal)
        seen = _read(master)
        assert process.wait(240) == 0, seen
        assert process.stdout is not None
        assert process.stdout.read() == b"", "progress goes to stderr"
    after = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"step \d/6  loss 0\.\d+", after)
    assert "step 6/6" in after.splitlines()[-2], "the last picture is of the end"
    assert seen.count("\x1b[?25l") == seen.count("\x1b[?25h") == 1, "the cursor is back"


def _read(master: int) -> str:
    """Everything until the other end is closed, which a pseudo-terminal tells by an error."""
    seen = b""
    try:
        while part := os.read(master, 1 << 16):
            seen += part
    except OSError:
        pass
    finally:
        os.close(master)
    return seen.decode()
