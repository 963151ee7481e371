"""Typed messages in notes: what the launcher and the roles of a run say to each other.

REPORTS = TypedNotes(Joined, Left)
REPORTS.write(Joined(member=3))      {"kind": "Joined", "body": its bytes by `transport.messages`, in hexadecimal}
REPORTS.read(…)                      Joined(member=3)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.transport.messages import MessageCoder, ProtocolError

__all__ = ["TypedNotes"]


class TypedNotes:
    """The types of message that one side may say to the other."""

    def __init__(self, *kinds: type) -> None:
        self._coder = MessageCoder(dict(enumerate(kinds, 1)))
        self._numbers = {kind.__name__: number for number, kind in enumerate(kinds, 1)}

    def write(self, message: Any) -> dict[str, Any]:
        """A message as a note has it; UserError for one that is not listed."""
        _, body = self._coder.encode(message)
        return {"kind": type(message).__name__, "body": body.hex()}

    def read(self, payload: Mapping[str, Any]) -> Any:
        """The message that `write` made this of; ProtocolError names what it is not."""
        number = self._numbers.get(str(payload.get("kind")))
        if number is None:
            raise ProtocolError("kind", f"{payload.get('kind')!r} is none of {', '.join(self._numbers)}")
        try:
            body = bytes.fromhex(payload["body"])
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("body", f"of a {payload['kind']} is not hexadecimal") from error
        return self._coder.decode(number, body)
