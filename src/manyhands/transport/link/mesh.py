"""The links between all ranks of a group on one host: made by the parent, inherited by the children."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import ClassVar

from manyhands.errors import check_count
from manyhands.native.closeable import Closeable
from manyhands.transport.link.interface import Link
from manyhands.transport.link.shared_link import LinkDescriptors, SharedLink, SharedLinkFiles
from manyhands.transport.link.tcp import TcpLink, connected


class Mesh(Closeable, ABC):
    """One link for each pair of `world` ranks, in the process that makes them; a context manager.

    `descriptors(rank)` goes to the child of that rank (`pass_fds`, and the numbers on its command line), which calls
    `attach`. The parent then closes the mesh: an end it keeps hides a death.
    """

    parts: ClassVar[tuple[str, ...]]  # what an end of a link is made of: as many names as descriptors

    def __init__(self, world: int) -> None:
        check_count("world", world)
        self.world = world
        self._ends: dict[tuple[int, int], Sequence[int]] = {}  # by rank and peer
        with ExitStack() as stack:
            for high in range(world):
                for low in range(high):
                    self._ends[low, high], self._ends[high, low] = self._make(stack)
            self._stack = stack.pop_all()

    @staticmethod
    @abstractmethod
    def _make(stack: ExitStack) -> tuple[Sequence[int], Sequence[int]]:
        """Make a link, which `stack` closes: the descriptors of its ends, the lower rank's first."""

    def close(self) -> None:
        """Close this process's copies; idempotent."""
        self._stack.close()

    @staticmethod
    @abstractmethod
    def attach(rank: int, descriptors: Mapping[int, Sequence[int]]) -> Mapping[int, Link]:
        """The links of `rank` to every other, from the descriptors that its process inherited and now owns."""

    def descriptors(self, rank: int) -> dict[int, tuple[int, ...]]:
        """What `rank` inherits, by peer; the descriptors stay this object's."""
        return {peer: tuple(self._ends[rank, peer]) for peer in range(self.world) if peer != rank}


class SharedMesh(Mesh):
    """Links through shared memory; OutOfSharedMemory is raised where there is not enough for all of them."""

    parts = LinkDescriptors._fields

    @staticmethod
    def _make(stack: ExitStack) -> tuple[Sequence[int], Sequence[int]]:
        files = stack.enter_context(SharedLinkFiles.create())
        return files.descriptors(0), files.descriptors(1)

    @staticmethod
    def attach(rank: int, descriptors: Mapping[int, Sequence[int]]) -> dict[int, SharedLink]:
        return {
            peer: SharedLink.attach(
                LinkDescriptors(*files), end=int(rank > peer), peer=f"rank {peer}", roles=len(descriptors) + 1
            )
            for peer, files in descriptors.items()
        }


class TcpMesh(Mesh):
    """Connections over loopback: what travels between the ranks can be shaped as a network is."""

    parts = ("connection",)

    @staticmethod
    def _make(stack: ExitStack) -> tuple[Sequence[int], Sequence[int]]:
        first, second = (stack.enter_context(end) for end in connected())
        return (first.fileno(),), (second.fileno(),)

    @staticmethod
    def attach(rank: int, descriptors: Mapping[int, Sequence[int]]) -> dict[int, TcpLink]:
        del rank  # both ends are alike
        return {
            peer: TcpLink(socket.socket(fileno=descriptor), peer=f"rank {peer}")
            for peer, (descriptor,) in descriptors.items()
        }


def mesh_kind(*, network: bool) -> type[Mesh]:
    """What links the ranks of one host: shared memory, or what networks are made of."""
    return TcpMesh if network else SharedMesh
