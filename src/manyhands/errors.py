"""What can go wrong, as types: each error is one sentence that says what, where and what next.

`UserError` and its children are mistakes in what was asked for (the command line prints the sentence and exits with 2);
every other `ManyhandsError` is something that happened while running (exit status 1).
"""

from __future__ import annotations

import difflib
import errno
import functools
import inspect
import math
import os
import resource
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

__all__ = [
    "Aborted",
    "BadArguments",
    "CorruptCheckpoint",
    "DataError",
    "Desync",
    "Hang",
    "ManyhandsError",
    "NonFinite",
    "OutOfSharedMemory",
    "Overload",
    "PeerTimeout",
    "UserError",
    "WorkerFailed",
    "check_count",
    "first_line",
    "format_bytes",
    "format_seconds",
    "limits_named",
    "named_arguments",
    "nearest",
    "num_of",
    "printable",
    "require_parameters",
]


class ManyhandsError(Exception):
    """Anything this library raises on purpose."""

    blamed: str = ""
    """Whom it happened to, as reports call it: `server 0`; empty where it was nobody in particular."""


class UserError(ManyhandsError, ValueError):
    """What was asked for makes no sense; the message names the field, the value and what is allowed."""


class DataError(UserError):
    """A data file is missing, truncated or of the wrong format; the message names the file and the offset."""


class CorruptCheckpoint(UserError):
    """A checkpoint cannot be trusted; the message names the damaged file."""


class OutOfSharedMemory(UserError):
    """Shared memory does not suffice; the message says the need and the room."""

    def __init__(self, purpose: str, needed_bytes: int, room_bytes: int) -> None:
        super().__init__(
            f"shared memory for {purpose} needs {format_bytes(needed_bytes)}, but only {format_bytes(room_bytes)} is "
            "available; use fewer workers or a smaller model, or free some memory"
        )
        self.needed_bytes, self.room_bytes = needed_bytes, room_bytes


class Overload(UserError):
    """The host has no room for so many workers; `most_workers` is how many fit, 0 for none."""

    def __init__(self, message: str, most_workers: int) -> None:
        super().__init__(message)
        self.most_workers = most_workers


class NonFinite(ManyhandsError):
    """Training diverged: the loss became NaN or infinite; the message names worker, step, the cause and what to try."""


class WorkerFailed(ManyhandsError):
    """A worker raised, died or fell silent; `worker_rank` is the first that did, -1 for a server."""

    def __init__(self, message: str, worker_rank: int) -> None:
        super().__init__(message)
        self.worker_rank = worker_rank


class Hang(WorkerFailed):
    """Nobody made progress; the message begins with who holds the run up, and goes on with who waits for whom."""

    def __init__(self, message: str, worker_rank: int, details: str = "") -> None:
        super().__init__(message, worker_rank)
        self.details = details
        """The stacks and last events of every role."""


class Desync(ManyhandsError):
    """Workers that should hold the same parameters do not; the message names the first parameter, ranks and step."""


class PeerTimeout(ManyhandsError):
    """A wait passed its deadline; `peer` is the one waited for. Every message has the words "timed out" in it.

    Programs written for torch's own backends look for these words to tell a timeout from another failure.
    """

    def __init__(self, message: str, peer: int) -> None:
        super().__init__(message if "timed out" in message else f"timed out: {message}")
        self.peer = peer


class Aborted(ManyhandsError):
    """The run is being taken down because another role failed first."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The tail of an error: what is allowed, and the nearest of it to `word`."""
    names = list(allowed)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"allowed: {', '.join(names)}{hint}"


def num_of(count: int, noun: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(num_bytes: float) -> str:
    """`26214400` as `25.0 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024 or unit == "GiB":
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """A duration in words: `4.71 ms`, `12 s`, `3 min 5 s`, `2 h 10 min`, `3 days 4 h`; a dash for one without end."""
    if not math.isfinite(seconds):
        return "–"
    for unit, size in (("µs", 1e-6), ("ms", 1e-3)):
        if 0 < seconds < 999.5 * size:
            return f"{seconds / size:.3g} {unit}"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


def first_line(error: BaseException) -> str:
    """What somebody else's error says first, without a full stop, to be a part of a sentence; else its type."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__


@contextmanager
def limits_named() -> Iterator[None]:
    """Turn the OSError of a limit on this process into a UserError that names the limit; a decorator, too."""
    try:
        yield
    except (OSError, ImportError) as error:
        if sentence := _limit_of(error):
            raise UserError(sentence) from error
        raise


def _limit_of(error: OSError | ImportError) -> str:
    """Which limit an error is of, and how to raise it; empty where it is none."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and os.strerror(errno.EMFILE) in str(error):  # of a library that could not be opened
        number = errno.EMFILE
    where = f" ({printable(str(error.filename))})" if isinstance(error, OSError) and error.filename else ""
    if number == errno.EMFILE:
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return f"this process may open {most:,} files at once but needs more{where}; raise the limit: ulimit -n 4096"
    if number == errno.ENFILE:
        return f"this host has reached its limit of open files{where}; close some, or raise fs.file-max with sysctl"
    if number == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        return (
            f"a file or shared memory of this process would exceed the limit of {format_bytes(most)}{where}; "
            "raise the limit: ulimit -f unlimited"
        )
    return ""


def printable(text: str, at_most: int = 400) -> str:
    r"""What somebody else said, as one line that a terminal, a file and a page can show: `\x1b[2J` for escapes.

    Control characters, line breaks, marks of direction and lone surrogates are escaped; what is longer is cut.
    """
    short = text if len(text) <= at_most else f"{text[:at_most]}…"
    if short.isprintable():
        return short
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in short)


def check_count(name: str, value: object, least: int = 1) -> None:
    """UserError unless `value` is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UserError(f"{name}={value!r} must be an integer of at least {least}")


Called = TypeVar("Called", bound=Callable[..., Any])


class BadArguments(UserError, TypeError):
    """A call with an argument that does not exist, or without its name."""


def named_arguments(called: Called) -> Called:
    """Have a function, or a class with fields by name only, refuse unknown arguments by the nearest known name."""
    inner = called.__init__ if inspect.isclass(called) else called
    name = called.__name__
    known = [one for one in inspect.signature(inner).parameters.values() if one.name != "self"]
    names = [one.name for one in known]
    by_place = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in known)

    @functools.wraps(inner)
    def checked(*args: Any, **given: Any) -> Any:
        unknown = next((one for one in given if one not in names), None)
        if unknown is not None:
            close = difflib.get_close_matches(unknown, names, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(names)}"
            raise BadArguments(f"{name} has no argument {unknown!r}; {hint}")
        placed = args[1:] if inspect.isclass(called) else args
        if len(placed) > by_place:
            free = next((one for one in names[by_place:] if one not in given), names[-1])
            example = f"{name}({free}={placed[by_place]!r:.100})"
            raise BadArguments(f"{name} takes its arguments by name; write {example}")
        return inner(*args, **given)

    if not inspect.isclass(called):
        return checked  # type: ignore[return-value]
    called.__init__ = checked  # type: ignore[method-assign]
    return called


def require_parameters(field: str, function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    """UserError unless `function` can be called with these arguments by place; what does not tell is let through."""
    try:
        # what a decorator put around another function is called, and not that function
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*parameters)
    except TypeError:
        given = ", ".join(str(one).partition(":")[0] for one in signature.parameters.values())
        raise UserError(
            f"{field} takes ({given}), but it is called with ({', '.join(parameters)}); unpack the batch "
            "inside it, as in: x, y = batch"
        ) from None
