"""How a role's failure is reported: an exception becomes text, and the text an exception again.

Only errors of `KINDS` keep their type on the way (so that a mistake of the user stays a `UserError`); every other one
becomes a `WorkerFailed`. Nothing is unpickled: a kind is a word, the rest is text and plain numbers.
"""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass

from manyhands.errors import (
    Aborted,
    CorruptCheckpoint,
    DataError,
    Desync,
    Hang,
    ManyhandsError,
    NonFinite,
    OutOfSharedMemory,
    PeerTimeout,
    UserError,
    WorkerFailed,
)
from manyhands.places.local.control import Failed
from manyhands.places.local.status import StatusRow

KINDS: dict[str, type[ManyhandsError]] = {
    kind.__name__: kind
    for kind in (
        UserError,
        DataError,
        CorruptCheckpoint,
        OutOfSharedMemory,
        NonFinite,
        Desync,
        Aborted,
        PeerTimeout,
    )
}
_KEPT = (UserError, Desync, NonFinite)
"""Errors that the launcher raises with their type; any other becomes a WorkerFailed."""

_CONSEQUENCES = frozenset({Aborted.__name__, PeerTimeout.__name__})
_MAX_MESSAGE, _MAX_TRACEBACK = 8 * 2**10, 64 * 2**10


def report(error: BaseException, step: int) -> Failed:
    """A role's report of the error that ended it; long texts lose their middle or their beginning."""
    kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in KINDS), "")
    # The first frame is the role's own call of the job: it says nothing.
    outer = error.__traceback__
    inner = outer.tb_next or outer if outer is not None else None
    message = str(error)
    if len(message) > _MAX_MESSAGE:
        message = f"{message[: _MAX_MESSAGE // 2]} [...] {message[-_MAX_MESSAGE // 2 :]}"
    trace = "".join(traceback.format_exception(type(error), error, inner))
    return Failed(
        kind=kind,
        error=type(error).__name__,
        message=_utf8(message),
        traceback=_utf8(trace[-_MAX_TRACEBACK:]),
        step=step,
        details={name: value for name, value in vars(error).items() if type(value) in (int, float, bool)},
    )


def _utf8(text: str) -> str:
    """With lone surrogates spelled out, such as those of a file's name: UTF-8 has none, and this must be sent."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One role's failure: what happened in one sentence, what the role reported, and its last words."""

    rank: int
    sentence: str
    name: str = ""  # of the role, in reports
    reported: Failed | None = None
    last_words: str = ""
    page: str = ""  # of a hang: who waits for whom
    details: str = ""  # of a hang: all stacks and events

    @property
    def is_consequence(self) -> bool:
        """Whether the role failed only because another one did, or seems to have."""
        reported = self.reported
        if reported is None:
            return False
        lost = reported.details.get("worker_rank") if reported.error == WorkerFailed.__name__ else None
        return reported.kind in _CONSEQUENCES or lost not in (None, self.rank)

    def error(self) -> ManyhandsError:
        """The exception for the launcher's caller: of the reported type where that is one of `_KEPT`."""
        error: ManyhandsError
        reported = self.reported
        if self.page:
            error = Hang(f"{self.sentence}\n\n{self.page}", worker_rank=self.rank, details=self.details)
        elif reported is not None and issubclass(KINDS.get(reported.kind, ManyhandsError), _KEPT):
            kind = KINDS[reported.kind]
            # Not by its constructor, which differs from kind to kind: message and attributes are all there is.
            error = kind.__new__(kind, reported.message)
            vars(error).update(reported.details)
            error.add_note(f"{self.sentence}\n{reported.traceback}")
        else:
            parts = [self.sentence]
            if reported is not None:
                parts.append(reported.traceback.rstrip())
            elif self.last_words.strip():
                parts.append(f"the end of its stderr:\n{self.last_words.strip()}")
            error = WorkerFailed("\n\n".join(parts), worker_rank=self.rank)
        error.blamed = self.name
        return error


def describe_exit(status: int) -> str:
    """`exited with status 3` or `was killed by SIGSEGV`, from the return code of a process."""
    if status >= 0:
        return f"exited with status {status} before it reported a result"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = " (by a user, or by the kernel because memory ran out)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def describe_status(row: StatusRow, now_ns: int) -> str:
    """`last seen computing step 17, 5.2 s ago`."""
    if row.seen_ns == 0:
        return "never seen"
    return f"last seen {row.doing()}, {max(0, now_ns - row.seen_ns) / 1e9:.1f} s ago"
