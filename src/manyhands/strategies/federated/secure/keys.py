"""Key derivation for both ends of a secure round: a client masks with these keys, the server removes the masks."""

from __future__ import annotations

import struct
from typing import Final

from manyhands.strategies.federated.secure.fixedpoint import Words
from manyhands.strategies.federated.secure.primitives import agree, derive, digest_of, mask_words
from manyhands.strategies.federated.secure.secure_messages import LABEL, SecureTerms

__all__ = ["RoundKeys", "point_of"]

_PAIR: Final = struct.Struct(">II")


def point_of(client: int) -> int:
    """Where a client's shares are taken: above 0, which is where the secret is."""
    return client + 1


class RoundKeys:
    """Derives the keys of one round, bound to its id, its terms and the model that was downloaded."""

    def __init__(self, terms: SecureTerms, model: bytes) -> None:
        self._terms = terms
        self._bound = digest_of(terms.digest, model)

    def shared_mask(self, secret: bytes, theirs: bytes, mine: int, other: int) -> Words:
        """The mask that two clients share; the same from either end, and from the server with one's secret."""
        pair = _PAIR.pack(min(mine, other), max(mine, other))
        key = derive(agree(secret, theirs), self._terms.round_id, LABEL + b" mask " + pair + self._bound)
        return mask_words(key, self._terms.length, self._terms.fixed.dtype)

    def own_mask(self, seed: bytes, client: int) -> Words:
        """The mask of a client's own seed."""
        info = LABEL + b" own " + _PAIR.pack(client, client) + self._bound
        return mask_words(
            derive(seed, self._terms.round_id, info), self._terms.length, self._terms.fixed.dtype
        )

    def channel(self, agreed: bytes, source: int, destination: int) -> bytes:
        """The key that seals the one message from `source` to `destination`."""
        info = LABEL + b" share " + _PAIR.pack(source, destination) + self._bound
        return derive(agreed, self._terms.round_id, info)

    def context(self, source: int, destination: int) -> bytes:
        """What that message is bound to."""
        return self._terms.round_id + _PAIR.pack(source, destination)
