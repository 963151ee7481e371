"""Which messages a server and a worker accept; any other is a protocol error that ends its connection only."""

from __future__ import annotations

from typing import Any

from manyhands.strategies.ps.ps_messages import (
    Chosen,
    ChosenKept,
    Fenced,
    Forward,
    Forwarded,
    Hello,
    Install,
    NotPrimary,
    Parameters,
    Push,
    Read,
    ReadRows,
    Refused,
    RowsUnknown,
    RowValues,
    Welcome,
    Yield,
)
from manyhands.transport.messages import ProtocolError

__all__ = ["FOR_WORKERS", "require_sense", "require_shard"]

FOR_WORKERS = (Welcome, Parameters, RowValues, RowsUnknown, Refused, NotPrimary, Fenced)

_FROM_WORKERS = (Hello, Read, ReadRows, Push)
_FROM_SERVERS = (Forward, Forwarded, Install, Yield, Chosen, ChosenKept)


def require_sense(message: Any, role: str, num_shards: int) -> None:
    """ProtocolError for a message that a server does not accept from `role`, or of an unknown shard."""
    from_server = isinstance(message, _FROM_SERVERS) and role == "server"
    if not from_server and not isinstance(message, _FROM_WORKERS):
        raise ProtocolError("message", f"a {type(message).__name__} of a {role} is not for a server to hear")
    require_shard(message.shard, num_shards)


def require_shard(shard: int, num_shards: int) -> None:
    """ProtocolError for an unknown shard."""
    if not 0 <= shard < num_shards:
        raise ProtocolError("shard", f"{shard} is none of {num_shards}")
