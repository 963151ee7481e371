"""What a process forks (a data loader's workers, say) must not keep its sockets: they would hide its death."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["forget_in_children"]


class Holder(Protocol):
    """Something with sockets."""

    def let_go_in_child(self) -> None:
        """Close them, in a child, without a word to anybody."""


_holders: weakref.WeakSet[Holder] = weakref.WeakSet()


def forget_in_children(holder: Holder) -> None:
    """Have `holder` let go in every child that is forked from now on."""
    _holders.add(holder)


def _let_go() -> None:
    for holder in list(_holders):
        holder.let_go_in_child()


os.register_at_fork(after_in_child=_let_go)
