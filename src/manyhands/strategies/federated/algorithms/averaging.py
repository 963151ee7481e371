"""FedAvg, FedSGD, FedProx, FedNova and FedOpt, whose clients keep nothing; SCAFFOLD and Ditto; robust means."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum, Tensors


class FedAvg(FederatedAlgorithm):
    """Clients train for some epochs; the model becomes the mean of theirs, weighted by their samples."""

    word: ClassVar[str] = "fedavg"
    about: ClassVar[str] = "the mean of the clients' models, weighted by their samples"
    sums_only: ClassVar[bool] = True


class FedSgd(FederatedAlgorithm):
    """One step of each client on all of its data: the synchronous step, on data that stays where it is."""

    word: ClassVar[str] = "fedsgd"
    about: ClassVar[str] = "one step of each client on all of its data"
    whole_batches: ClassVar[bool] = True
    sums_only: ClassVar[bool] = True


class FedProx(FederatedAlgorithm):
    """Each client's loss gets mu/2 times its squared distance from the weights that it began with."""

    word: ClassVar[str] = "fedprox"
    about: ClassVar[str] = "FedAvg whose clients are kept near the weights they started with"
    number: ClassVar[str] = "MU"
    corrects: ClassVar[bool] = True
    sums_only: ClassVar[bool] = True

    def __init__(self, mu: float = 0.01) -> None:
        super().__init__()
        self._mu = mu

    def correct(self, client: int, parameters: Tensors, start: Tensors) -> None:
        del client
        _hold_near(parameters, start, self._mu)


def _hold_near(parameters: Tensors, weights: Tensors, by: float) -> None:
    """Add the gradient of the squared distance from these weights, times by/2."""
    for parameter, other in zip(parameters, weights, strict=False):  # buffers come after the parameters
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - other, alpha=by)


class FedNova(FederatedAlgorithm):
    """FedAvg whose clients count by their samples, however many steps they took; buffers are averaged as they are."""

    word: ClassVar[str] = "fednova"
    about: ClassVar[str] = "FedAvg that divides each update by its number of steps"

    def sent(self, weights: Tensors) -> Tensors:
        return [*weights, torch.zeros(1, dtype=torch.float64)]

    def report(self, client: int, start: Tensors, trained: Tensors, steps: int) -> Tensors:
        change = super().report(client, start, trained, steps)
        parameters = self.facts.parameters
        return [
            *(one / steps for one in change[:parameters]),
            *change[parameters:],
            torch.tensor([steps / self.facts.most_steps], dtype=torch.float64),
        ]

    def step(self, weights: Tensors, mean: Tensors) -> None:
        taken, parameters = float(mean[-1]) * self.facts.most_steps, self.facts.parameters
        scaled = [one * taken for one in mean[:parameters]]
        super().step(weights, [*scaled, *mean[parameters:-1]])


_BETA_1, _BETA_2, _TAU = 0.9, 0.99, 1e-3


class _FedOpt(FederatedAlgorithm):
    """Base of the three algorithms: momentum, and a second moment per parameter."""

    number: ClassVar[str] = "RATE"
    sums_only: ClassVar[bool] = True
    beta_1: ClassVar[float] = _BETA_1

    def __init__(self, rate: float = 0.01) -> None:
        super().__init__()
        if not rate:
            why = f"algorithm={self.word}:0: a server rate of 0 never changes the model; use a number above 0"
            raise UserError(why)
        self._rate = rate
        self._momentum: list[Tensor] = []
        self._second: list[Tensor] = []

    def step(self, weights: Tensors, mean: Tensors) -> None:
        assert self.facts.names, "an algorithm is attached before its first step"
        count = self.facts.parameters
        super().step(weights[count:], mean[count:])
        parameters, changes = weights[:count], mean[:count]
        if not self._momentum:
            self._momentum = [torch.zeros_like(weight) for weight in parameters]
            self._second = [torch.full_like(weight, _TAU**2) for weight in parameters]
        moments = zip(self._momentum, self._second, strict=True)
        for weight, change, (momentum, second) in zip(parameters, changes, moments, strict=True):
            momentum.mul_(self.beta_1).add_(change, alpha=1 - self.beta_1)
            self._grow(second, change.square())
            weight.addcdiv_(momentum, second.sqrt().add_(_TAU), value=self._rate)

    @abstractmethod
    def _grow(self, second: Tensor, square: Tensor) -> None:
        """Take the square of the mean into the second moment, in place."""

    def memory(self) -> Mapping[str, Any]:
        return {"momentum": self._momentum, "second": self._second} if self._momentum else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        self._momentum = list(memory.get("momentum", ()))
        self._second = list(memory.get("second", ()))


class FedAdam(_FedOpt):
    """The second moment is an exponential moving average."""

    word: ClassVar[str] = "fedadam"
    about: ClassVar[str] = "Adam on the server, with the clients' mean as its gradient"

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.mul_(_BETA_2).add_(square, alpha=1 - _BETA_2)


class FedYogi(_FedOpt):
    """FedYogi: the second moment moves towards the squared update by a step of the square's size."""

    word: ClassVar[str] = "fedyogi"
    about: ClassVar[str] = "Yogi on the server, which lets its steps grow slowly"

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.addcmul_(square, torch.sign(second - square), value=-(1 - _BETA_2))


class FedAdagrad(_FedOpt):
    """FedAdagrad: the second moment is the sum of all squares; there is no momentum."""

    word: ClassVar[str] = "fedadagrad"
    about: ClassVar[str] = "Adagrad on the server"
    beta_1: ClassVar[float] = 0.0

    def _grow(self, second: Tensor, square: Tensor) -> None:
        second.add_(square)


class Scaffold(FederatedAlgorithm):
    """SCAFFOLD: control variates correct for client drift; an update is twice as large."""

    word: ClassVar[str] = "scaffold"
    about: ClassVar[str] = "clients correct each step by how their data differs from all data"
    corrects: ClassVar[bool] = True
    models_kept: ClassVar[int] = 1
    cannot_keep_layers: ClassVar[str] = "its clients correct every layer by what all clients send of it"

    def __init__(self) -> None:
        super().__init__()
        self._server: list[Tensor] = []  # c
        self._before: dict[int, Tensors] = {}  # by client that trains: c_i
        self._met: dict[int, list[Tensor]] = {}  # and the sum of its gradients

    def sent(self, weights: Tensors) -> Tensors:
        return [*weights, *weights[: self.facts.parameters]]

    def kept(self, weights: Tensors) -> Tensors:
        return weights[: self.facts.parameters]

    def given_besides(self, weights: Tensors) -> Tensors:
        self._begin_server(self.kept(weights))
        return self._server

    def take_besides(self, tensors: Tensors) -> None:
        self._server = list(tensors)

    def begin(self, client: int, weights: Tensors) -> Tensors:
        like = self.kept(weights)
        self._begin_server(like)
        self._before[client] = self.states.get(client) or [torch.zeros_like(one) for one in like]
        self._met[client] = [torch.zeros_like(one) for one in like]
        return weights

    def correct(self, client: int, parameters: Tensors, start: Tensors) -> None:
        del start
        noted, before = self._met[client], self._before[client]
        for parameter, met, mine, common in zip(parameters, noted, before, self._server, strict=True):
            if parameter.grad is not None:
                met.add_(parameter.grad)
                parameter.grad.add_(common).sub_(mine)

    def report(self, client: int, start: Tensors, trained: Tensors, steps: int) -> Tensors:
        """How far weights and control variate came; the new one is kept when the round counts."""
        change = super().report(client, start, trained, steps)
        after = [met / steps for met in self._met.pop(client)]
        before = self._before.pop(client)
        self.coming[client] = after
        return [*change, *(new - old for new, old in zip(after, before, strict=True))]

    def refused(self, client: int) -> None:
        self.coming.pop(client, None)  # its control variate stays, since c does not follow

    def mean(self, found: TallySum) -> Tensors:
        """The mean; changes of control variates are averaged over all clients, and those not asked count as zero."""
        mean = super().mean(found)
        tensors = len(mean) - self.facts.parameters
        return [*mean[:tensors], *(one * (found.weight / self.facts.weight) for one in mean[tensors:])]

    def step(self, weights: Tensors, mean: Tensors) -> None:
        super().step(weights, mean[: len(weights)])
        self._begin_server(self.kept(weights))
        for common, change in zip(self._server, mean[len(weights) :], strict=True):
            common.add_(change)
        for client in list(self.coming):
            self.settle(client, counted=True)

    def _begin_server(self, like: Tensors) -> None:
        if not self._server:
            self._server = [torch.zeros_like(one) for one in like]

    def memory(self) -> Mapping[str, Any]:
        return {"server": self._server} if self._server else {}

    def load_state(self, memory: Mapping[str, Any]) -> None:
        self._server = list(memory.get("server", ()))


class Ditto(FederatedAlgorithm):
    """Ditto: FedAvg, plus a personal model for every client that never leaves it."""

    word: ClassVar[str] = "ditto"
    about: ClassVar[str] = "FedAvg in which each client also trains its own model, kept near the common one"
    number: ClassVar[str] = "LAMBDA"
    trains_personal: ClassVar[bool] = True
    models_kept: ClassVar[int] = 1
    cannot_keep_layers: ClassVar[str] = "each client has a complete model of its own"

    def __init__(self, hold: float = 0.1) -> None:
        super().__init__()
        self._hold = hold

    def kept(self, weights: Tensors) -> Tensors:
        return weights

    def personal(self, client: int, weights: Tensors) -> Tensors:
        return self.states.get(client, weights)

    def correct_personal(self, client: int, parameters: Tensors, weights: Tensors) -> None:
        del client
        _hold_near(parameters, weights, self._hold)

    def keep_personal(self, client: int, trained: Tensors) -> None:
        """Not before the round is over: a device that is killed in it trains from the same model again."""
        self.coming[client] = [one.detach().clone() for one in trained]

    def settle(self, client: int, *, counted: bool) -> None:
        del counted  # it is the client's own, whatever the server took
        super().settle(client, counted=True)

    def step(self, weights: Tensors, mean: Tensors) -> None:
        super().step(weights, mean)
        for client in list(self.coming):
            self.settle(client, counted=True)


# Means that a few hostile clients cannot move far. Median and trimmed mean of each item by itself: Yin et al.,
# "Byzantine-Robust Distributed Learning", ICML 2018. Krum: Blanchard et al., "Machine Learning with Adversaries",
# NeurIPS 2017. All must see every update, so none goes with secure aggregation. Every client counts as one, since a
# weight is what a hostile client would lie about first.


class _Robust(FederatedAlgorithm):
    """Base of the robust algorithms: clients train as in FedAvg, and the server uses another mean."""

    single_updates: ClassVar[bool] = True

    def weight(self, update: ClientUpdate) -> float:
        del update
        return 1.0

    def mean(self, found: TallySum) -> Tensors:
        columns = zip(*self._chosen(found), strict=True)
        return [self._middle(torch.stack([one.double() for one in column])) for column in columns]

    def _chosen(self, found: TallySum) -> Sequence[Tensors]:
        return found.updates

    def _middle(self, rows: Tensor) -> Tensor:
        """What is made of one tensor of every chosen client, stacked."""
        return rows.mean(0)


class CoordinateMedian(_Robust):
    """Each item is the median of the clients'; of an even number, the mean of the middle two."""

    word: ClassVar[str] = "median"
    about: ClassVar[str] = "the median of every item: correct if fewer than half of all clients are hostile"

    def _middle(self, rows: Tensor) -> Tensor:
        return _trimmed(rows, (len(rows) - 1) // 2)


class TrimmedMean(_Robust):
    """Trimmed mean: of each item the largest and smallest values are left out, and the others averaged."""

    word: ClassVar[str] = "trimmed"
    about: ClassVar[str] = "the mean of every item without a fraction of its largest and smallest values"
    number: ClassVar[str] = "FRACTION"

    def __init__(self, fraction: float = 0.1) -> None:
        super().__init__()
        if not 0 <= fraction < 0.5:
            raise UserError(
                f"algorithm=trimmed:{fraction:g}: the fraction trimmed at each end must be at least 0 and below 0.5"
            )
        self._fraction = fraction

    def _left_out(self, clients: int) -> int:
        """At either end: rounded up, or of a few clients none would be."""
        return math.ceil(self._fraction * clients - 1e-9)

    def check_round(self, clients: int) -> None:
        if 2 * self._left_out(clients) >= clients:
            raise UserError(
                f"algorithm=trimmed:{self._fraction:g}: trimming leaves none of a round's {clients} clients; use "
                "more clients or a smaller fraction"
            )

    def _middle(self, rows: Tensor) -> Tensor:
        return _trimmed(rows, min(self._left_out(len(rows)), (len(rows) - 1) // 2))


class Krum(_Robust):
    """Krum: selects the one update that is nearest to its neighbours."""

    word: ClassVar[str] = "krum"
    about: ClassVar[str] = "the one update closest to most others; up to HOSTILE clients may send anything"
    number: ClassVar[str] = "HOSTILE"
    takes_all_others: ClassVar[bool] = False  # all but HOSTILE updates, and not one

    def __init__(self, hostile: float = 1) -> None:
        super().__init__()
        if hostile != int(hostile):
            why = f"algorithm={self.word}:{hostile:g}: the number of hostile clients must be an integer"
            raise UserError(why)
        self._hostile = int(hostile)

    def check_round(self, clients: int) -> None:
        if clients < 2 * self._hostile + 3:
            raise UserError(
                f"algorithm={self.word}:{self._hostile}: needs {2 * self._hostile + 3} clients a round (twice the "
                f"number plus 3), but there are {clients}; use more clients or a smaller number"
            )

    def _chosen(self, found: TallySum) -> Sequence[Tensors]:
        hostile = max(0, self._hostile - found.missing)
        rows = [
            torch.cat([one.double().flatten() for one in change[: self.facts.parameters]])
            for change in found.updates
        ]
        best = torch.argsort(krum_scores(torch.stack(rows), hostile), stable=True)
        count = len(rows) - hostile if self.takes_all_others else 1
        return [found.updates[at] for at in sorted(best[:count].tolist())]


class MultiKrum(Krum):
    """Multi-Krum: the mean of all but HOSTILE updates."""

    word: ClassVar[str] = "multikrum"
    about: ClassVar[str] = "the mean of the updates closest to the others, without the HOSTILE farthest"
    takes_all_others: ClassVar[bool] = True


def krum_scores(rows: Tensor, hostile: int) -> Tensor:
    """For each row the sum of its squared distances to the n - hostile - 2 others that are nearest."""
    nearest = max(1, len(rows) - hostile - 2)
    distances = torch.stack([(rows - row).square().sum(1) for row in rows])
    distances.fill_diagonal_(math.inf)
    return distances.sort(1).values[:, : min(nearest, len(rows) - 1)].sum(1)


def _trimmed(rows: Tensor, each: int) -> Tensor:
    return rows.sort(0).values[each : len(rows) - each].mean(0)


AVERAGING: Final[tuple[type[FederatedAlgorithm], ...]] = (
    *(FedAvg, FedSgd, FedProx, FedAdam, FedYogi, FedAdagrad, Scaffold, FedNova),
    *(CoordinateMedian, TrimmedMean, Krum, MultiKrum, Ditto),
)
