"""How the launcher tells a child which descriptors are which: plain text, read before anything heavy is imported."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

__all__ = ["LoaderSpec", "RoleSpec", "die_with_parent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One child's place in the run, its inherited descriptors, and the launcher's search path for modules."""

    name: str
    rank: int
    world: int
    parent_pid: int
    lifeline: int
    status_table: int
    row: int
    """Its row of the status table."""
    descriptors: Mapping[str, int]
    path: tuple[str, ...]
    python_path: str | None
    """PYTHONPATH as the user set it; the launcher borrows the variable to start the child."""
    job: int = -1
    """The file of its job."""
    stacks: int = -1
    """Where it writes its stacks when it is asked to."""
    control: int = -1
    """The child's end of its control channel; known when the child is started."""

    def inherited(self) -> tuple[int, ...]:
        return (
            self.control,
            self.lifeline,
            self.status_table,
            self.stacks,
            self.job,
            *self.descriptors.values(),
        )

    def received(self, passed: Sequence[int]) -> RoleSpec:
        """This, with the numbers that `inherited` got on their way to another process."""
        control, lifeline, status_table, stacks, job, *others = passed
        return replace(
            self,
            control=control,
            lifeline=lifeline,
            status_table=status_table,
            stacks=stacks,
            job=job,
            descriptors=dict(zip(self.descriptors, others, strict=True)),
        )

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RoleSpec:
        fields = json.loads(text)
        return cls(**{**fields, "path": tuple(fields["path"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec:
    """A loader process of a worker: it has no place in the run, and one descriptor, its socket (see `loader`)."""

    name: str
    parent_pid: int

    def to_text(self) -> str:
        return json.dumps({"loader": asdict(self)})

    @classmethod
    def from_text(cls, text: str) -> LoaderSpec | None:
        """Read what `to_text` wrote; None where it is the text of a `RoleSpec`."""
        fields = json.loads(text).get("loader")
        return cls(**fields) if fields is not None else None


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send `number` when the thread that started this process ends; if it has, leave now."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:
        os.kill(0, signal.SIGKILL)
