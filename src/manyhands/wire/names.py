"""The codecs by name, and the setting `codec=`: without torch, for strategies are parsed before it is needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from manyhands.errors import UserError
from manyhands.settings import check_choice, setting

__all__ = ["CODECS", "RAW", "Listed", "check_codec", "codec_setting"]

RAW: Final = "raw"
"""The word for parcels that travel as they lie in memory."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A codec's number in events (1 to 15; never reuse one), and where its class is, inside `wire.codecs`."""

    number: int
    home: str


CODECS: Final[dict[str, Listed]] = {
    "bf16": Listed(1, "bf16:Bf16"),
    "fp16": Listed(2, "fp16:Fp16"),
}


def codec_setting() -> Any:
    """`codec=bf16`: how what travels is made smaller."""
    return setting(RAW, str)


def check_codec(word: str, *, link: str) -> None:
    """Raise the UserError that lists what `codec` may be; or, where nothing travels by `link`, says so."""
    check_choice("codec", word, (RAW, *CODECS))
    if word != RAW and link == "shared":
        raise UserError(
            f"codec={word}: with link=shared, memory is shared, and nothing travels that could be made smaller; "
            "add link=tcp"
        )
