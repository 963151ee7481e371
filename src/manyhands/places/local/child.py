"""One child process as the launcher holds it: process, process descriptor, control channel and output."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace

from manyhands.places.local.child_descriptors import RoleSpec
from manyhands.places.local.control import Channel
from manyhands.places.local.foreign_process import StillRunning
from manyhands.places.local.output import Output
from manyhands.places.local.stacks import STACK_SIGNAL
from manyhands.places.local.template import Template

__all__ = ["Child"]

_REAP_S = 5.0


class Child:
    """A running role; `close` kills its process group if need be, reaps it and closes everything."""

    def __init__(self, spec: RoleSpec, environment: Mapping[str, str], template: Template) -> None:
        """Have it forked; `spec.control` and `spec.stacks` are filled in here.

        The child leads a session of its own: Ctrl-C does not reach it, and one kill reaches all its children.
        """
        self.rank = spec.rank
        self.line = spec.line
        self.is_closed = False
        self._told_bytes = 0
        with ExitStack() as stack:
            self._stacks = os.memfd_create("manyhands:stacks", os.MFD_CLOEXEC)
            stack.callback(os.close, self._stacks)
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours, spec.name)
            stack.callback(self.channel.close)
            (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
            self.stdout = Output(os.fdopen(out, "rb", 0), "stdout")
            self.stderr = Output(os.fdopen(errors, "rb", 0), "stderr")
            stack.callback(self.stdout.close)
            stack.callback(self.stderr.close)
            try:
                spec = replace(spec, control=theirs.fileno(), stacks=self._stacks)
                self.process = template.fork(spec, (out_end, errors_end), environment)
            finally:
                theirs.close()
                os.close(out_end)
                os.close(errors_end)
            stack.pop_all()

    @property
    def pidfd(self) -> int:
        """Readable when the process has ended."""
        return self.process.pidfd

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
            self.process.wait(_REAP_S)
        except StillRunning:  # stuck in the kernel; the watch has already said so
            pass
        for output in (self.stdout, self.stderr):
            output.close()
        self.channel.close()
        self.process.close()
        stacks, self._stacks = self._stacks, -1
        if stacks >= 0:
            os.close(stacks)
        self.is_closed = True
