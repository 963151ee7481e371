"""What processes of one host that met share: memory with barriers, and links in memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from manyhands.cluster.meeting import Meeting
from manyhands.errors import UserError
from manyhands.group.shared import SharedGroup, SharedGroupFiles
from manyhands.link.base import Link
from manyhands.link.mesh import mesh_kind
from manyhands.memory.segment import Segment

__all__ = ["attach_group", "no_group", "share_group", "share_group_files", "share_links"]


def no_group() -> SharedGroup:
    """What workers of several hosts have in place of a group: a UserError."""
    raise UserError("workers of several hosts share no memory")


def share_group(meeting: Meeting, purpose: str, timeout_s: float) -> SharedGroup:
    """Collective: memory that the workers of this host share."""
    with share_group_files(meeting, purpose, timeout_s) as files:
        return attach_group(files, meeting, timeout_s)


def attach_group(files: SharedGroupFiles, meeting: Meeting, timeout_s: float) -> SharedGroup:
    """This worker's end of what `share_group_files` shared, which stays the caller's."""
    return SharedGroup(
        control=os.dup(files.control),
        arena=os.dup(files.arena),
        rank=meeting.local_rank,
        world=len(meeting.here),
        timeout_s=timeout_s,
        roles=meeting.here,
    )


def share_group_files(meeting: Meeting, purpose: str, timeout_s: float) -> SharedGroupFiles:
    """Collective: memory for the workers of this host, by which anybody may end their waits (`abort`)."""
    world = len(meeting.here)
    with ExitStack() as made:

        def make() -> list[tuple[int, int]]:
            return [made.enter_context(SharedGroupFiles.create(world)).descriptors] * world

        control, arena = meeting.share(purpose, make, timeout_s)
    return SharedGroupFiles(Segment.attach(control), arena, world)


def share_links(meeting: Meeting, timeout_s: float, *, network: bool = False) -> Mapping[int, Link]:
    """Collective: a link to every other worker of this host, by rank; over loopback where a `network` is wanted."""
    places = range(len(meeting.here))
    kind = mesh_kind(network=network)
    with ExitStack() as made:

        def make() -> list[list[int]]:
            mesh = made.enter_context(kind(len(meeting.here)))
            return [
                [one for _, link in sorted(mesh.descriptors(place).items()) for one in link]
                for place in places
            ]

        descriptors = meeting.share("links", make, timeout_s)
    peers = [rank for rank in meeting.here if rank != meeting.rank]
    width = len(kind.parts)
    ends = [descriptors[begin : begin + width] for begin in range(0, len(descriptors), width)]
    return kind.attach(meeting.rank, dict(zip(peers, ends, strict=True)))
