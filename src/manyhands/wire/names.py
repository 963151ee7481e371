"""The codecs by name, and the settings `codec=` and `feedback=`: without torch, for strategies are parsed before it is
needed.

    codec   = stage ["+" stage]             topk:0.01+int8: what is kept of topk travels as int8
            | "auto" [":" error]            auto:0.01: chosen while training, of those whose error is at most 1 %
    stage   = word [":" options]            dgc:0.001,momentum=0.9,warmup=64
    options = value {"," (name "=" value | name)}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from manyhands.errors import UserError, nearest
from manyhands.strategy import check_choice, setting, switch_setting

RAW: Final = "raw"  # the word for parcels that travel as they lie in memory
AUTO: Final = "auto"  # the word for a codec that workers choose themselves, by what they measure
MOST_STAGES: Final = 2  # of a chain; events have room for three


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecEntry:
    """A codec as settings and events know it."""

    number: int  # in events: 1 to 31; never reuse one
    location: str  # where its class is, inside `wire.codecs`
    about: str  # what it sends, in a few words
    options: Mapping[str, tuple[Any, Callable[[str], Any]]] = field(default_factory=dict)
    """After its colon, by name: the value where none is given, and how one is read. The first needs no name."""
    biased: bool = False
    """Whether what it sends is wrong on average: then what is left out is kept, and added to the next."""
    remembers: bool = False  # it keeps what it leaves out by itself, and that cannot be turned off
    hops: bool = False  # whether sums may be rounded again at every hop: then any algorithm carries it
    sparse: bool = False
    """It sends a few items: another codec may follow it, for their values, which is not sparse itself."""
    of_matrices: bool = False  # it has no use for a vector, so it may not follow a sparse one
    of_gradients: str = ""
    """Why it makes no sense for changes of parameters, and what would; empty where it does."""


@dataclass(frozen=True, slots=True)
class CodecStage:
    """One codec of a chain, with the value of each of its options."""

    word: str
    options: Mapping[str, Any]


def _reader(fits: Callable[[float], bool], wanted: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        value = math.nan
        with suppress(ValueError):
            value = float(text)
        if not fits(value):
            raise UserError(f"{text!r} must be {wanted}")
        return value

    return read


_fraction = _reader(lambda value: 0 < value <= 1, "a fraction above 0 and at most 1, such as 0.01")
_momentum = _reader(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")
_norm = _reader(lambda value: 0 <= value < 1e9, "a number of at least 0 and below 1e+09")


def _between(least: int, most: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 9 and least <= int(text) <= most):
            raise UserError(f"{text!r} must be an integer between {least} and {most}")
        return int(text)

    return read


def _word(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise UserError(f"{text!r}: {nearest(text, allowed)}")
        return text

    return read


CODECS: Final[dict[str, CodecEntry]] = {
    "fp32": CodecEntry(number=3, location="casts:Fp32", about="double precision sent as single", hops=True),
    "bf16": CodecEntry(number=1, location="casts:Bf16", about="8 significant bits", hops=True),
    "fp16": CodecEntry(number=2, location="casts:Fp16", about="11 significant bits, less range", hops=True),
    "fp8": CodecEntry(
        number=4,
        location="quantized:Fp8",
        about="one byte, scaled per block",
        options={"kind": ("e4m3", _word("e4m3", "e5m2"))},
        biased=True,
    ),
    "int8": CodecEntry(number=5, location="quantized:Int8", about="one byte, even steps", biased=True),
    "qsgd": CodecEntry(
        number=6,
        location="quantized:Qsgd",
        about="a few levels, rounded at random",
        options={"levels": (7, _between(1, 127))},
    ),
    "ternary": CodecEntry(number=7, location="quantized:Ternary", about="-1, 0 or 1, at random"),
    "sign": CodecEntry(
        number=8,
        location="quantized:Sign",
        about="one bit, and the mean size per block",
        options={"kind": ("scaled", _word("scaled", "vote"))},
        biased=True,
    ),
    "topk": CodecEntry(
        number=9,
        location="sparse:TopK",
        about="the largest items",
        options={
            "fraction": (0.01, _fraction),
            "sampled": (False, lambda text: _word("yes", "no")(text) == "yes"),
        },
        biased=True,
        sparse=True,
    ),
    "randomk": CodecEntry(
        number=10,
        location="sparse:RandomK",
        about="random items, scaled up for the others",
        options={"fraction": (0.01, _fraction)},
        sparse=True,
    ),
    "dgc": CodecEntry(
        number=11,
        location="sparse:Dgc",
        about="the largest items of a momentum",
        options={
            "fraction": (0.001, _fraction),
            "momentum": (0.9, _momentum),
            "clip": (0.0, _norm),
            "warmup": (0, _between(0, 10**9 - 1)),
        },
        biased=True,
        remembers=True,
        sparse=True,
        of_gradients="it keeps the momentum of gradients, but {} sends changes of parameters; use topk",
    ),
    "powersgd": CodecEntry(
        number=12,
        location="powersgd:PowerSgd",
        about="matrices as products of two narrow ones",
        options={"rank": (2, _between(1, 1024))},
        biased=True,
        of_matrices=True,
    ),
    "int4": CodecEntry(number=13, location="quantized:Int4", about="half a byte, even steps", biased=True),
}


def parse_codec(text: str) -> tuple[CodecStage, ...]:
    """The stages of a chain, none for `raw`; a UserError names what is wrong and what would be right."""
    if text == RAW:
        return ()
    stages = tuple(_parse_stage(part) for part in text.split("+"))
    first, *rest = (CODECS[stage.word] for stage in stages)
    if len(stages) > MOST_STAGES:
        raise UserError(f"codec={text}: a chain has two codecs, as in topk:0.01+int8")
    if rest and not first.sparse:
        few = ", ".join(word for word, listed in CODECS.items() if listed.sparse)
        raise UserError(f"codec={text}: only a codec that sends few items can come first: {few}")
    if rest and (rest[0].sparse or rest[0].of_matrices):
        raise UserError(
            f"codec={text}: {stages[1].word} cannot come second; use a codec that shrinks values, such as int8"
        )
    if rest and stages[1].options.get("kind") == "vote":
        raise UserError(f"codec={text}: a vote needs all items; write sign after {stages[0].word}")
    return stages


def _parse_stage(text: str) -> CodecStage:
    word, colon, tail = text.partition(":")
    check_choice("codec", word, (RAW, *CODECS))
    if word == RAW:
        raise UserError(f"codec: {RAW} cannot be combined with another codec")
    known = CODECS[word].options
    options = {name: default for name, (default, _) in known.items()}
    if colon and (not known or not tail):
        example = f"a value must follow, as in {word}:{next(iter(options.values()))}" if known else ""
        raise UserError(f"codec {text}: {example or f'write {word} alone'}")
    given = set[str]()
    for number, part in enumerate(tail.split(",") if tail else ()):
        name, equals, value = part.partition("=")
        if not equals and number == 0:
            name, value = next(iter(known)), part
        elif not equals:
            value = "yes"
        if name not in known:
            raise UserError(f"codec {text}: {word} has no {name!r}; {nearest(name, known)}")
        if name in given:
            raise UserError(f"codec {text}: {name} is given twice")
        given.add(name)
        try:
            options[name] = known[name][1](value)
        except UserError as error:
            raise UserError(f"codec {text}: {name} {error}") from None
    return CodecStage(word, options)


def auto_error(text: str) -> float | None:
    """How large an error `codec=auto` may choose, as a share of what is sent; None for a codec that is named."""
    word, colon, tail = text.partition(":")
    if word.partition("+")[0] != AUTO:
        return None
    if word != AUTO:
        raise UserError(f"codec={text}: {AUTO} cannot be combined with another codec")
    if not colon:
        return 0.0
    try:
        return _fraction(tail)
    except UserError as error:
        raise UserError(f"codec={text}: the allowed error {error}; write auto:0.01") from None


def words_of(text: str) -> tuple[str, ...]:
    return tuple(stage.word for stage in parse_codec(text))


def rounds_hops(text: str) -> bool:
    """Whether any algorithm carries it, rounding at every hop; what is chosen while training may be any."""
    return auto_error(text) is None and all(CODECS[word].hops for word in words_of(text))


def has_feedback(text: str) -> bool:
    """Whether what it leaves out is kept for later, unless `feedback=no`."""
    # A vote has no size, so there is nothing that could be left of it.
    return not votes(text) and any(CODECS[word].biased for word in words_of(text))


def remembers(text: str) -> bool:
    """Whether it keeps what it leaves out by itself, with a momentum."""
    return any(CODECS[word].remembers for word in words_of(text))


def has_known_size(text: str) -> bool:
    """Whether what it sends follows from the number of items, neither from their values nor from the step."""
    unknown = ("sampled", "warmup")
    return auto_error(text) is None and not any(
        stage.options.get(name) for stage in parse_codec(text) for name in unknown
    )


def votes(text: str) -> bool:
    return any(stage.options.get("kind") == "vote" for stage in parse_codec(text))


def momentum_of(text: str) -> float:
    """The momentum that a codec keeps by itself, 0 for none: the optimizer must not have it as well."""
    stages = parse_codec(text) if auto_error(text) is None else ()
    return max((float(stage.options.get("momentum", 0.0)) for stage in stages), default=0.0)


def codec_setting() -> Any:  # `codec=bf16`: how what travels is made smaller
    return setting(RAW, str)


def feedback_setting() -> Any:  # `feedback=no`: what a codec leaves out is lost, not kept
    return switch_setting(True)


def check_codec(
    text: str,
    *,
    link: str,
    strategy: str,
    feedback: bool = True,
    algorithm: str = "direct",
    sends_changes: bool = False,
    chooses: bool = False,
    refused: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise the UserError that says what `codec` may be; or why it makes no sense there.

    Where nothing travels by `link`, none does. A strategy `sends_changes` of parameters, or gradients. It `chooses`
    where its workers exchange at the same steps, and may change the codec together. `refused` has the codecs that
    make no sense with it, and why.
    """
    if auto_error(text) is not None:
        if not chooses:
            raise UserError(
                f"{strategy} codec={text}: only workers that exchange at the same steps, such as those of allreduce, "
                "can choose a codec; name one, such as bf16"
            )
        if algorithm != "direct":
            raise UserError(
                f"codec={text}: it may choose codecs that need algorithm=direct, not algorithm={algorithm}; "
                "leave the algorithm out"
            )
        if not feedback:
            raise UserError(f"feedback=no codec={text}: it always uses feedback; leave feedback out")
        return
    stages = parse_codec(text)
    if stages and link == "shared":
        raise UserError(
            f"codec={text}: with link=shared, workers share memory and send nothing; add link=tcp"
        )
    for word in (stage.word for stage in stages):
        why = CODECS[word].of_gradients.format(strategy) if sends_changes else ""
        if word in refused or why:
            raise UserError(f"{strategy} codec={text}: {refused.get(word, why)}")
    if sends_changes and votes(text):
        raise UserError(f"{strategy} codec={text}: a vote has no step size; write sign")
    if not rounds_hops(text) and algorithm != "direct":
        raise UserError(
            f"codec={text}: it would lose precision at every hop of algorithm={algorithm}; leave the algorithm "
            "out"
        )
    check_feedback(text, feedback)


def check_feedback(text: str, feedback: bool) -> None:
    if not feedback and not has_feedback(text):
        raise UserError(f"feedback=no: codec={text} has no feedback to disable")
    if not feedback and remembers(text):
        raise UserError(f"feedback=no: {text} cannot work without feedback; write topk")
