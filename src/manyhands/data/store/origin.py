"""Where a run comes from: the command that began it, the host and the time of day, kept beside its configuration.

A command line may hold what nobody else should read: values of options whose names tell of that, and passwords in
addresses, are kept as `***`. Of a program of the user's own, whose options nobody here knows, its name alone is kept.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["origin", "shown_command"]

_HIDDEN = "***"
_SECRET = re.compile(r"token|secret|passw|passphrase|credential|auth|api-?key|access-?key", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")
_IN_WORD = re.compile(r"((?:token|secret|password|passwd|api_?key|access_?key)=)[^&\s;,]+", re.IGNORECASE)


def origin() -> dict[str, Any]:
    """The origin of a run that begins now, in this process."""
    return {"command": shown_command(sys.argv), "host": socket.gethostname(), "unix_s": time.time()}


def shown_command(arguments: Sequence[str]) -> str:
    """The command line of a process without its secrets; empty where there is none."""
    if not arguments or not arguments[0]:
        return ""
    program = Path(arguments[0])
    if program.name != "manyhands" and program.parent.name != "manyhands":
        return shlex.join(["python", program.name])
    words = list(arguments[1:])
    own = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if words[:1] == ["launch"] and own is not None and own + 1 < len(words):
        words[own + 1 :] = ["..."]  # the options of the user's own program
    return shlex.join(["manyhands", *_without_secrets(words)])


def _without_secrets(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    hides_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_option = word.startswith("-")
        if hides_next and not is_option:
            kept.append(_HIDDEN)
        elif is_option and _SECRET.search(name) and equals:
            kept.append(f"{name}={_HIDDEN}")
        else:
            kept.append(_IN_WORD.sub(rf"\g<1>{_HIDDEN}", _IN_ADDRESS.sub(f"{_HIDDEN}@", word)))
        hides_next = is_option and not equals and _SECRET.search(name) is not None
    return kept
