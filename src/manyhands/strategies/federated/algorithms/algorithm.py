"""What an algorithm says: how a client's steps differ from plain ones, and what the server makes of the updates.

server ── weights ──►  client: `begin`, then steps on its own data, each gradient by way of `correct`
       ◄── ClientUpdate ───  `report`: how far it came, and what else the algorithm lets it send
a tally collects the updates, each by its `weight`; `mean` makes one of them, and `step` moves the model by it
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from manyhands.strategies.federated.client_states import ClientStates, LocalLayers
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate, TallySum, Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedFacts:
    """What an algorithm is given to know of the run before its first round."""

    names: Sequence[str] = ()  # of the model's tensors, in their order
    parameters: int = 0  # how many of them are parameters; the others are buffers
    clients: int = 0
    per_round: int = 0  # how many clients take part in a round
    weight: float = 0.0  # of all clients together, whether they take part or not
    most_steps: int = 1  # that any client takes in a round
    seed: int = 0


class FederatedAlgorithm(ABC):
    """Federated averaging; others change the parts that they name. Tensors come in the order of `held`."""

    word: ClassVar[str]
    about: ClassVar[str]
    number: ClassVar[str] = ""  # what stands after the colon, as `MU` of `fedprox:MU`; "": nothing
    whole_batches: ClassVar[bool] = False  # whether a client takes one step on all of its data
    corrects: ClassVar[bool] = False  # whether `correct` changes gradients
    single_updates: ClassVar[bool] = False  # whether the server must see each update, and not only their sum
    sums_only: ClassVar[bool] = False  # checked: nothing is learnt of a client but its update in a sum
    trains_personal: ClassVar[bool] = False
    """Whether a client then trains one of its own: from `personal`, with `correct_personal`, to `keep_personal`."""
    # For an estimate of memory: tensors of a model's size that each client keeps, and whether the server keeps the
    # models that clients under way began with.
    models_kept: ClassVar[int] = 0
    keeps_versions: ClassVar[bool] = False
    # Why not; none: it can.
    cannot_sum_securely: ClassVar[str] = ""  # unless it needs `single_updates`
    cannot_keep_layers: ClassVar[str] = ""  # with the clients (`keep=`)
    cannot_drop_clients: ClassVar[str] = ""  # out of a round, or ask for more than it needs

    def __init__(self) -> None:
        self.states: ClientStates = {}
        """What each client keeps between rounds, of the shapes that `kept` gives. A real device has one entry."""
        self.coming: ClientStates = {}
        """Likewise of clients that have reported: what each keeps once its report counts."""
        self.facts = FederatedFacts()  # set before the first round
        self.layers = LocalLayers()  # which of the model's tensors stay with each client, and those

    def check_round(self, clients: int) -> None:  # noqa: B027 - most take what comes
        """UserError where a round of so many clients is too small for it."""

    def updates_in_round(self, cohort: int) -> int:
        """How many updates make a round, where a synchronous one has so many clients."""
        return cohort

    def sent(self, weights: Tensors) -> Tensors:
        """Tensors of the shapes and types of those in an update; more than the model's, where `report` adds some."""
        return weights

    def given_besides(self, weights: Tensors) -> Tensors:
        """What a real device is given with the model, like `weights`, and puts where it belongs by `take_besides`."""
        del weights
        return ()

    def take_besides(self, tensors: Tensors) -> None:  # noqa: B027 - most are given nothing
        """On a device: what the server gave besides the model."""

    def settle(self, client: int, *, counted: bool) -> None:
        """On a device that has learnt whether its last report counted: keep what it was to keep then, or drop it."""
        after = self.coming.pop(client, None)
        if counted and after is not None:
            self.keep(client, after)

    def kept(self, weights: Tensors) -> Tensors:
        """Tensors of the shapes and types of what a client keeps in `states`; none: it keeps nothing."""
        del weights
        return ()

    def keep(self, client: int, tensors: Tensors) -> None:
        """A copy of these is what a client keeps from now on; it keeps what it had where a number is not finite."""
        if all(bool(one.isfinite().all()) for one in tensors):
            self.states[client] = [one.detach().clone() for one in tensors]

    def reported(self, client: int, start: Tensors, trained: Tensors, steps: int) -> Tensors:
        """On a client, after its steps: what it sends, without what it keeps."""
        change = self.layers.shared(self.report(client, start, trained, steps))
        self.layers.keep(client, trained)
        return change

    def given(self, number: int, chosen: Sequence[int], weights: Tensors) -> Sequence[ClientAssignment]:
        """On the server: whose updates make round `number`, and what each began with; the same on every worker."""
        return [ClientAssignment(client=client, weights=weights, number=number) for client in chosen]

    def summary(self) -> Mapping[str, Any]:
        """What is worth a place in the summary of the run."""
        return {}

    def begin(self, client: int, weights: Tensors) -> Tensors:
        """On a client: what its training begins with. Others may begin before it reports: keep them apart."""
        del client
        return weights

    def correct(self, client: int, parameters: Tensors, start: Tensors) -> None:  # noqa: B027
        """On a client, between backward and its optimizer's step: change the gradients in place."""

    def report(self, client: int, start: Tensors, trained: Tensors, steps: int) -> Tensors:
        """On a client, after its steps: what it sends, of the shapes that `sent` says; `trained` are not its own."""
        del client, steps
        return [mine - begun for mine, begun in zip(trained, start, strict=True)]

    def refused(self, client: int) -> None:  # noqa: B027 - most keep nothing
        """On a client whose report was not counted in this round: it restores what it had before."""

    def personal(self, client: int, weights: Tensors) -> Tensors:
        """The model that a client itself uses, where the server's is `weights`."""
        del client
        return weights

    def correct_personal(  # noqa: B027
        self, client: int, parameters: Tensors, weights: Tensors
    ) -> None:
        """Like `correct`, while a client trains its personal model; `weights` are the server's."""

    def keep_personal(self, client: int, trained: Tensors) -> None:  # noqa: B027
        """On a client: store its trained personal model; the tensors are reused by the caller and must be copied."""

    def weight(self, update: ClientUpdate) -> float:
        """What an update weighs in the mean."""
        return float(update.samples)

    def mean(self, found: TallySum) -> Tensors:
        """On the server: one update of all, in double precision, of the shapes that `sent` says."""
        return [one / found.weight for one in found.sums]

    def step(self, weights: Tensors, mean: Tensors) -> None:
        """On the server: move the weights by the mean of the updates, in place."""
        for weight, change in zip(weights, mean, strict=True):
            weight.add_(change)

    def memory(self) -> Mapping[str, Any]:
        """What the server keeps from round to round, for a checkpoint."""
        return {}

    def load_state(self, memory: Mapping[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """Continue with what `memory` gave."""
