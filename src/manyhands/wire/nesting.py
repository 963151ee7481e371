"""How deep untrusted JSON is nested: `json.loads` reads what `repr` and others then fail on by recursion."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Final

MOST_NESTED: Final = 64
"""Levels that anything of ours is far below; a tensor has no more dimensions than that."""

_TEXT: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(one for one in range(256) if one not in b"[]{}")
_CHANGES: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


def json_depth(text: bytes) -> int:
    """Of arrays and objects within each other in a JSON text; an upper bound where that cannot be above MOST_NESTED."""
    opened = text.count(b"[") + text.count(b"{")
    if opened <= MOST_NESTED:
        return opened
    brackets = _TEXT.sub(b"", text).translate(None, _NOT_BRACKETS)
    return max(accumulate(_CHANGES[one] for one in brackets), default=0)
