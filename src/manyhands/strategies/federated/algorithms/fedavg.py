"""FedAvg and FedSGD (McMahan et al., "Communication-Efficient Learning of Deep Networks", AISTATS 2017)."""

from __future__ import annotations

from typing import ClassVar

from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["FedAvg", "FedSgd"]


class FedAvg(FederatedAlgorithm):
    """Clients train for some epochs; the model becomes the mean of theirs, weighted by their samples."""

    word: ClassVar[str] = "fedavg"
    about: ClassVar[str] = "the mean of what clients have trained, by their samples"
    sums_only: ClassVar[bool] = True


class FedSgd(FederatedAlgorithm):
    """One step of each client on all of its data: the synchronous step, on data that stays where it is."""

    word: ClassVar[str] = "fedsgd"
    about: ClassVar[str] = "one step of each client on all of its data"
    whole_batches: ClassVar[bool] = True
    sums_only: ClassVar[bool] = True
