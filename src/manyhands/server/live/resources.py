"""What a member of a run on parameter servers asks of its host, by name; how it gets there is its starter's matter."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from manyhands.cluster.context import RoleContext
from manyhands.cluster.job import load
from manyhands.memory.segment import Segment
from manyhands.record.ring import EventRing
from manyhands.server.live.job import Job
from manyhands.store.tensorfile import encode_tensors

__all__ = ["MemberResources"]


@dataclass(frozen=True, kw_only=True)
class MemberResources:
    """One member's; whoever asks for the ring or the memory closes it."""

    job: Callable[[], Job]
    """What all members are told."""

    events: Callable[[], EventRing]
    """Where it records what it does."""

    final: Callable[[], Segment]
    """The memory that the parameters end in, one for the host; under lockstep all read them there from the start."""

    leave_buffers: Callable[[Mapping[str, Tensor]], None]
    """Hand over the model's buffers as the run ends; the last who does wins. A worker's alone."""

    @classmethod
    def inherited(cls, context: RoleContext) -> MemberResources:
        """Of a child of the launcher: by the descriptors that it was started with."""

        def leave_buffers(state: Mapping[str, Tensor]) -> None:
            with open(f"/proc/self/fd/{context.descriptor('buffers')}", "wb") as file:
                for chunk in encode_tensors(state):
                    file.write(chunk)

        return cls(
            job=lambda: load(context.descriptor("job")),
            events=lambda: EventRing.attach(context.descriptor("events")),
            final=lambda: Segment.attach(os.dup(context.descriptor("final"))),
            leave_buffers=leave_buffers,
        )
