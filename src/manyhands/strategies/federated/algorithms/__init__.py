"""Registry of the federated algorithms, by the word that selects each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from manyhands.errors import UserError, nearest
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm, FederatedFacts
from manyhands.strategies.federated.algorithms.averaging import AVERAGING
from manyhands.strategies.federated.algorithms.buff import FedBuff

__all__ = ["ALGORITHMS", "FederatedAlgorithm", "FederatedFacts", "algorithm_named"]

_KINDS: Final[tuple[type[FederatedAlgorithm], ...]] = (*AVERAGING, FedBuff)
ALGORITHMS: Final = {kind.word: kind for kind in _KINDS}


def algorithm_named(text: str) -> FederatedAlgorithm:
    """`fedprox:0.01` as an algorithm; a UserError lists what there is."""
    word, colon, number = text.partition(":")
    if word not in ALGORITHMS:
        raise UserError(f"algorithm={text}: unknown; {nearest(word, ALGORITHMS)}")
    kind: Callable[..., FederatedAlgorithm] = ALGORITHMS[word]
    if not colon:
        return kind()
    if not ALGORITHMS[word].number:
        raise UserError(f"algorithm={text}: {word} takes no number")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UserError(f"algorithm={text}: {number!r} is not a number of at least 0")
    return kind(value)
