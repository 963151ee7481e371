"""A `manyhands` command in a process of its own, on some cores, that does not outlive the one that started it.

python -m manyhands.cli.command_process PARENT CORES COMMAND…
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from manyhands.cli.program import program
from manyhands.places.local.forking import die_with_parent


def child_command(cores: Sequence[int], words: Sequence[str]) -> list[str]:
    """The command line of a process that runs `manyhands WORDS` on these cores, for as long as this one lives."""
    places = ",".join(map(str, cores))
    return [sys.executable, "-m", "manyhands.cli.command_process", str(os.getpid()), places, *words]


def main() -> None:
    parent, places, *words = sys.argv[1:]
    die_with_parent(int(parent), signal.SIGTERM)
    os.sched_setaffinity(0, {int(one) for one in places.split(",")})
    sys.argv = ["manyhands", *words]
    program()


if __name__ == "__main__":
    main()
