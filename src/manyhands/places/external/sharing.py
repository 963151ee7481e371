"""What the processes of one host share after their rendezvous: memory with barriers, and links in shared memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.native.segment import Segment
from manyhands.places.local.rendezvous import Rendezvous
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import mesh_kind

__all__ = ["attach_group", "no_group", "share_group", "share_group_files", "share_links"]


def no_group() -> SharedGroup:
    """Raise UserError: workers on several hosts cannot share the memory of a group."""
    raise UserError("workers of several hosts share no memory")


def share_group(rendezvous: Rendezvous, purpose: str, timeout_s: float) -> SharedGroup:
    with share_group_files(rendezvous, purpose, timeout_s) as files:
        return attach_group(files, rendezvous, timeout_s)


def attach_group(files: SharedGroupFiles, rendezvous: Rendezvous, timeout_s: float) -> SharedGroup:
    """Attach this worker to what `share_group_files` shared; the files stay the caller's."""
    return SharedGroup(
        control=os.dup(files.control),
        arena=os.dup(files.arena),
        rank=rendezvous.local_rank,
        world=len(rendezvous.here),
        timeout_s=timeout_s,
        roles=rendezvous.here,
    )


def share_group_files(rendezvous: Rendezvous, purpose: str, timeout_s: float) -> SharedGroupFiles:
    """Collective: shared memory for the workers of this host, whose waits any process can end (`abort`)."""
    world = len(rendezvous.here)
    with ExitStack() as made:

        def make() -> list[tuple[int, int]]:
            return [made.enter_context(SharedGroupFiles.create(world)).descriptors] * world

        control, arena = rendezvous.share(purpose, make, timeout_s)
    return SharedGroupFiles(Segment.attach(control), arena, world)


def share_links(rendezvous: Rendezvous, timeout_s: float, *, network: bool = False) -> Mapping[int, Link]:
    """Collective: a link to every other worker of this host, by rank; over loopback if a `network` is requested."""
    places = range(len(rendezvous.here))
    kind = mesh_kind(network=network)
    with ExitStack() as made:

        def make() -> list[list[int]]:
            mesh = made.enter_context(kind(len(rendezvous.here)))
            return [
                [one for _, link in sorted(mesh.descriptors(place).items()) for one in link]
                for place in places
            ]

        descriptors = rendezvous.share("links", make, timeout_s)
    peers = [rank for rank in rendezvous.here if rank != rendezvous.rank]
    width = len(kind.parts)
    ends = [descriptors[begin : begin + width] for begin in range(0, len(descriptors), width)]
    return kind.attach(rendezvous.rank, dict(zip(peers, ends, strict=True)))
