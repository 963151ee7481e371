"""Consistency as text: `sync`, `sync:1` (one backup worker), `bounded:3`, `async`, `softsync:4`.

Before each of them may stand how rates follow staleness: `aware:async`, `damped:softsync:4`.

`strong`, `weak:3` and `eventual` are other words for `sync`, `bounded:3` and `async`.
"""

from __future__ import annotations

from collections.abc import Callable

from manyhands.errors import UserError, nearest
from manyhands.strategies.common.consistency.asynchronous import Async
from manyhands.strategies.common.consistency.bounded import Bounded
from manyhands.strategies.common.consistency.policy import Policy
from manyhands.strategies.common.consistency.rates import StalenessAware, StalenessDamped, StalenessRate
from manyhands.strategies.common.consistency.softsync import SoftSync
from manyhands.strategies.common.consistency.sync import Sync

__all__ = ["parse_consistency"]


def parse_consistency(text: str) -> Policy:
    """The policy that `text` names; a UserError names what is wrong with it and what is allowed."""
    word, colon, rest = text.partition(":")
    word = _OTHER_WORDS.get(word, word)
    if word not in _FORMS:
        raise UserError(f"consistency={text!r}: {word!r} is not a policy; {nearest(word, _FORMS)}")
    if word == "async" and colon:
        raise UserError(f"consistency={text!r}: async takes no number")
    if colon and not rest:
        raise UserError(f"consistency={text!r}: nothing follows the colon")
    return _FORMS[word](text, rest)


def _sync(text: str, rest: str) -> Policy:
    return Sync(_number(text, rest)) if rest else Sync()


def _bounded(text: str, rest: str) -> Policy:
    bound = _number(text, rest)
    return Bounded(bound) if bound else Sync()


def _async(text: str, rest: str) -> Policy:
    del text, rest
    return Async()


def _softsync(text: str, rest: str) -> Policy:
    return SoftSync(_number(text, rest))


def _rated(text: str, rest: str) -> Policy:
    word = text.partition(":")[0]
    if not rest:
        raise UserError(f"consistency={text!r}: name the policy whose rates it changes, as in {word}:async")
    if rest.partition(":")[0] in _RATES:
        raise UserError(f"consistency={text!r}: one of {', '.join(_RATES)} may be said, and once only")
    return _RATES[word](parse_consistency(rest))


def _number(text: str, rest: str) -> int:
    if not (rest.isascii() and rest.isdigit()) or len(rest) > 9:
        raise UserError(
            f"consistency={text!r}: {rest!r} is not a whole number; write one, as in {_example(text)}"
        )
    return int(rest)


def _example(text: str) -> str:
    return f"{text.partition(':')[0]}:3"


_OTHER_WORDS = {"strong": "sync", "weak": "bounded", "eventual": "async"}
_RATES: dict[str, type[StalenessRate]] = {"aware": StalenessAware, "damped": StalenessDamped}
_FORMS: dict[str, Callable[[str, str], Policy]] = {
    "sync": _sync,
    "bounded": _bounded,
    "async": _async,
    "softsync": _softsync,
    "aware": _rated,
    "damped": _rated,
}
