"""The first file of the template process: tie its life to the launcher's, and only then import anything.

It is run by its path and not with `-m`, which would import the whole package first: seconds during which the
launcher could die unnoticed.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

__all__ = ["TEMPLATE_VARIABLE", "die_with_parent", "main"]

TEMPLATE_VARIABLE = "MANYHANDS_TEMPLATE"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send `number` when the thread that started this process ends; if it has, leave now."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:
        os.kill(0, signal.SIGKILL)


def main() -> int:
    """Be the template that the environment describes, or one of its forks; the exit status, 2 if run by hand."""
    text = os.environ.pop(TEMPLATE_VARIABLE, None)
    if text is None:
        print("this file is run by the launchers of manyhands.cluster, not by hand", file=sys.stderr)
        return 2
    die_with_parent(json.loads(text)["launcher_pid"], signal.SIGKILL)
    forking = importlib.import_module(
        "manyhands.cluster.forking"
    )  # imports this file in turn, so only now and by name
    status: int = forking.run_template(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
