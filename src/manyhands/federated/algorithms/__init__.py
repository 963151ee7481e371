"""Every algorithm by its word; one line each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from manyhands.errors import UserError, nearest
from manyhands.federated.algorithms.base import ClientUpdate, FederatedAlgorithm
from manyhands.federated.algorithms.opt import FedAdagrad, FedAdam, FedYogi
from manyhands.federated.algorithms.plain import FedAvg, FedSgd
from manyhands.federated.algorithms.prox import FedProx

__all__ = ["ALGORITHMS", "ClientUpdate", "FederatedAlgorithm", "algorithm_named"]

ALGORITHMS: Final[dict[str, Callable[..., FederatedAlgorithm]]] = {
    kind.word: kind for kind in (FedAvg, FedSgd, FedProx, FedAdam, FedYogi, FedAdagrad)
}
_WITHOUT_NUMBER: Final = ("fedavg", "fedsgd")


def algorithm_named(text: str) -> FederatedAlgorithm:
    """`fedprox:0.01` as an algorithm; a UserError lists what there is."""
    word, colon, number = text.partition(":")
    if word not in ALGORITHMS:
        raise UserError(f"algorithm={text}: unknown; {nearest(word, ALGORITHMS)}")
    if not colon:
        return ALGORITHMS[word]()
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if word in _WITHOUT_NUMBER or not 0 <= value < math.inf:
        raise UserError(
            f"algorithm={text}: "
            + (
                f"{word} takes no number"
                if word in _WITHOUT_NUMBER
                else f"{number!r} is no number of at least 0"
            )
        )
    return ALGORITHMS[word](value)
