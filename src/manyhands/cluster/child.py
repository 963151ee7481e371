"""One child process as the launcher holds it: process, process descriptor, control channel and output."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace

from manyhands.cluster import entry
from manyhands.cluster.context import RoleSpec
from manyhands.cluster.control import Assigned, Channel
from manyhands.cluster.output import Output
from manyhands.cluster.stacks import STACK_SIGNAL

__all__ = ["Child"]

# -P: no folder of ours is searched before the standard library. faulthandler: a crash in C code
# prints where Python was.
_COMMAND = (sys.executable, "-P", "-X", "faulthandler", entry.__file__)
_REAP_S = 5.0


class Child:
    """A running role; `close` kills its process group if need be, reaps it and closes everything."""

    def __init__(self, spec: RoleSpec, environment: Mapping[str, str]) -> None:
        """Start the process; `spec.control` is filled in here.

        The child leads a session of its own: Ctrl-C does not reach it, and one kill reaches all its children.
        """
        self._stacks = os.memfd_create("manyhands:stacks", os.MFD_CLOEXEC)
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            os.close(self._stacks)
            raise
        self.channel = Channel(ours, spec.name)
        self._told_bytes = 0
        self.is_closed = False
        self.rank = spec.rank
        self.line = spec.line
        try:
            with theirs:
                spec = replace(spec, control=theirs.fileno(), stacks=self._stacks)
                self.process = subprocess.Popen(
                    [*_COMMAND, spec.name],  # the name is for those who list processes
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**environment, entry.SPEC_VARIABLE: spec.to_text()},
                    pass_fds=spec.inherited(),
                    start_new_session=True,
                )
        except BaseException:
            self.channel.close()
            os.close(self._stacks)
            raise
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.stdout = Output(self.process.stdout, "stdout")
        self.stderr = Output(self.process.stderr, "stderr")
        self.pidfd = -1
        try:
            self.pidfd = os.pidfd_open(self.process.pid)
        except BaseException:
            self.close()
            raise

    def assign(self, spec: RoleSpec) -> None:
        """Make a process that was started without a job the role `spec`; Aborted if it is gone."""
        passed = (spec.job, *spec.descriptors.values())
        self.channel.hand_over(Assigned(role=spec.to_text()), passed)
        self.channel.peer = spec.name
        self.rank = spec.rank

    def ask_for_stacks(self) -> None:
        """Have it write its stacks, for `read_stacks` a moment later; only once its job has begun."""
        self._told_bytes = os.fstat(self._stacks).st_size
        if self.process.returncode is None:
            os.kill(self.process.pid, STACK_SIGNAL)

    def read_stacks(self) -> str:
        """What it has written since it was asked; nothing if it is stopped."""
        num_bytes = os.fstat(self._stacks).st_size - self._told_bytes
        return os.pread(self._stacks, num_bytes, self._told_bytes).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and all of its group; harmless once it is reaped."""
        if self.process.returncode is None:  # not reaped, so its number still means this process
            os.killpg(self.process.pid, signal.SIGKILL)

    def bury(self) -> int:
        """Kill what is left of the group of an ended process, reap it, and return its status."""
        self.kill()
        return self.process.wait()

    def close(self) -> None:
        """Make sure that the process is gone, and close every descriptor; may be called again."""
        self.kill()
        try:
            self.process.wait(timeout=_REAP_S)
        except subprocess.TimeoutExpired:  # stuck in the kernel; the watch has already said so
            pass
        for output in (self.stdout, self.stderr):
            output.close()
        self.channel.close()
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        stacks, self._stacks = self._stacks, -1
        if stacks >= 0:
            os.close(stacks)
        self.is_closed = True
