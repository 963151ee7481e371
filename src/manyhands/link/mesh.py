"""The links between all ranks of a group on one host: made by the parent, inherited by the children."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from manyhands.errors import UserError
from manyhands.link.base import DEFAULT_QUEUE_BYTES
from manyhands.link.shared import DEFAULT_CAPACITY_BYTES, LinkDescriptors, SharedLink, SharedLinkFiles

__all__ = ["SharedMesh", "attach_mesh"]


class SharedMesh:
    """One shared-memory link for each pair of `world` ranks, in the process that makes them.

    A context manager. `descriptors(rank)` goes to the child of that rank (`pass_fds`, and the numbers on its
    command line), which calls `attach_mesh`. The parent then closes the mesh: a lifeline it keeps hides a
    death.
    """

    def __init__(self, world: int, files: Mapping[tuple[int, int], SharedLinkFiles]) -> None:
        """Own the files of each pair (lower rank, higher rank); use `create`."""
        self.world = world
        self._files = files

    @classmethod
    def create(cls, world: int, capacity_bytes: int = DEFAULT_CAPACITY_BYTES) -> Self:
        """Reserve all links, or none and raise OutOfSharedMemory."""
        if world < 1:
            raise UserError(f"world={world}: a mesh has at least one rank")
        files: dict[tuple[int, int], SharedLinkFiles] = {}
        try:
            for high in range(world):
                for low in range(high):
                    files[low, high] = SharedLinkFiles.create(capacity_bytes)
        except BaseException:
            for made in files.values():
                made.close()
            raise
        return cls(world, files)

    def descriptors(self, rank: int) -> dict[int, LinkDescriptors]:
        """What `rank` inherits, by peer; the descriptors stay this object's."""
        return {
            high if rank == low else low: files.descriptors(0 if rank == low else 1)
            for (low, high), files in self._files.items()
            if rank in (low, high)
        }

    def close(self) -> None:
        """Close this process's copies; idempotent."""
        for files in self._files.values():
            files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach_mesh(
    rank: int, descriptors: Mapping[int, LinkDescriptors], *, queue_bytes: int = DEFAULT_QUEUE_BYTES
) -> dict[int, SharedLink]:
    """The links of `rank` to every other, from the descriptors that its process inherited and now owns."""
    return {
        peer: SharedLink.attach(
            LinkDescriptors(*files),
            end=0 if rank < peer else 1,
            peer=f"rank {peer}",
            roles=len(descriptors) + 1,
            queue_bytes=queue_bytes,
        )
        for peer, files in descriptors.items()
    }
