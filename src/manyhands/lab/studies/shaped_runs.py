"""A `manyhands` run on a loopback of a bandwidth, in a network namespace of its own, and how long its steps took."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError
from manyhands.lab.compare.bandwidth import Rate, shaped_command, tool_path
from manyhands.lab.studies.reached_target import mean_step_s
from manyhands.lab.sweep.run_sweep import end_processes, last_said

_LIMIT_S = 900.0


def shaped_step_s(rate: Rate, words: Sequence[str], steps: int) -> float:
    """Seconds of a step of `manyhands WORDS`, which is a `train`; ManyhandsError where it fails."""
    with tempfile.TemporaryDirectory(prefix="manyhands-study-") as folder:
        out, log = Path(folder) / "run", Path(folder) / "log"
        common = [f"--{name}={steps}" for name in ("steps", "evaluate-every", "checkpoint-every")]
        command = [sys.executable, "-m", "manyhands", *words, *common, "--progress=none", f"--out={out}"]
        with log.open("wb") as said:
            process = subprocess.Popen(
                shaped_command(rate, command, as_root=os.geteuid() == 0),
                env={**os.environ, "PATH": tool_path()},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the study, which ends its runs itself
            )
        try:
            status = process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ManyhandsError(f"the run at {rate} did not end within {_LIMIT_S:.0f} s") from None
        finally:
            end_processes([process])
        if status:
            raise ManyhandsError(f"the run at {rate} ended with status {status}: {last_said(log)}")
        step_s = mean_step_s(RunDirectory.open(out, lock=False).metrics.read())
        if not step_s:
            raise ManyhandsError(f"the run at {rate} was too short to time a step")
        return step_s
