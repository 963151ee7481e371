"""Clients trained at once beside the same clients one after another, and the rule that chooses between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.strategies.federated.algorithms import ALGORITHMS, FederatedFacts, algorithm_named
from manyhands.strategies.federated.client_data import Samples, columns_of
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate
from manyhands.strategies.federated.clients import LocalWork, held, held_names, plain_products
from manyhands.strategies.federated.simulation import ClientSimulation, client_runner_for
from manyhands.strategies.federated.stacked import steps_of
from manyhands.strategies.federated.strategy import ALL, AUTO

SIZES = (7, 4, 11, 4, 1)
Optimizers = Callable[..., torch.optim.Optimizer]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.Linear(5, 3),
    ).double()


def a_task(**fields: object) -> mh.Task:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(SIZES), 1, 6, 6, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (sum(SIZES),), generator=generator)
    defaults: dict[str, object] = {
        "model": network,
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "data": (images, labels),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch_size": 4,
    }
    return mh.Task(**{**defaults, **fields})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _any_number_of_steps_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.strategies.federated.simulation._FEW_STEPS", 0)


def test_for_a_round_of_few_steps_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    _, simulation = played(a_task(), AUTO)
    assert simulation.together > 1
    monkeypatch.setattr("manyhands.strategies.federated.simulation._FEW_STEPS", 10**6)
    _, simulation = played(a_task(), AUTO)
    assert str(simulation) == "clients were trained one after another: a round has few steps"


def split() -> list[np.ndarray]:
    return np.split(np.arange(sum(SIZES)), np.cumsum(SIZES)[:-1])


def played(
    task: mh.Task, together: int, algorithm: str = "fedavg", batch: int = 3, model: nn.Module | None = None
) -> tuple[list[ClientUpdate], ClientSimulation]:
    """Two rounds of all clients, the second from other weights; updates of both."""
    model = model if model is not None else task.model()
    assert isinstance(model, nn.Module)
    work = LocalWork(epochs=2, batch=batch)
    by = algorithm_named(algorithm)
    by.facts = FederatedFacts(
            names=held_names(model), parameters=len(list(model.parameters())), clients=len(SIZES),
            per_round=len(SIZES), weight=float(sum(SIZES)), seed=5,
    )  # fmt: skip
    client_runner, simulation = client_runner_for(
        task, model, by, work, 5, sizes=SIZES, each_round=len(SIZES), wanted=together
    )
    like = task.optimizer(model.parameters())
    found: list[ClientUpdate] = []
    for number, scale in enumerate((1.0, 0.5)):
        weights = [one * scale for one in held(model)]
        assigned = [
            ClientAssignment(client=client, samples=samples, weights=weights, number=number)
            for client, samples in enumerate(split())
        ]
        found += client_runner.play(assigned, like)
    return found, simulation


def assert_alike(some: Sequence[ClientUpdate], others: Sequence[ClientUpdate]) -> None:
    for one, other in zip(some, others, strict=True):
        assert (one.client, one.samples, one.steps) == (other.client, other.samples, other.steps)
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        for mine, theirs in zip(one.change, other.change, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(
        parameters, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "dampening": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "groups by shape": lambda parameters: torch.optim.SGD(
        [
            {"params": list(matrices), "lr": 0.1} if decays else {"params": matrices, "lr": 0.02}
            for decays, matrices in _by_dimensions(parameters).items()
        ]
    ),
}


def _by_dimensions(parameters: Sequence[Tensor]) -> dict[bool, list[Tensor]]:
    listed = list(parameters)
    return {large: [one for one in listed if (one.dim() > 1) == large] for large in (True, False)}


@pytest.mark.parametrize("together", [2, 5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_clients_at_once_send_what_they_send_one_after_another(optimizer: Optimizers, together: int) -> None:
    """Clients of 1 to 11 samples: other numbers of steps, last batches of other sizes."""
    task = a_task(optimizer=optimizer)
    alone, _ = played(task, 1)
    both, simulation = played(task, together)
    assert simulation.together == together
    assert_alike(both, alone)
    assert {update.steps for update in alone} == {2, 4, 6, 8}


@pytest.mark.parametrize("algorithm", ["fedprox:0.5", *(name for name in ALGORITHMS if name != "fedprox")])
def test_what_an_algorithm_does_on_a_client_it_does_to_each_of_many(algorithm: str) -> None:
    alone, _ = played(a_task(), 1, algorithm)
    both, simulation = played(a_task(), 5, algorithm)
    assert simulation.together == 5
    assert_alike(both, alone)
    if algorithm == "fedprox:0.5":  # its updates have the shapes of plain ones, and are others
        with pytest.raises(AssertionError):
            assert_alike(both, played(a_task(), 1)[0])


@pytest.mark.parametrize("clip", [{"clip_norm": 0.3}, {"clip_value": 0.05}], ids=str)
def test_each_client_clips_its_own_gradient(clip: dict[str, float]) -> None:
    task = a_task(**clip)
    alone, _ = played(task, 1)
    assert_alike(played(task, 5)[0], alone)
    with pytest.raises(AssertionError):
        assert_alike(alone, played(a_task(), 1)[0])


def test_a_frozen_layer_and_a_constant_buffer_stay_as_they_are() -> None:
    model = network()
    model[0].requires_grad_(False)  # type: ignore[index]
    model.register_buffer("scale", torch.ones(2, dtype=torch.float64))
    task = a_task(model=lambda: model)
    alone, _ = played(task, 1, model=model)
    both, simulation = played(task, 5, model=model)
    assert simulation.together == 5
    assert_alike(both, alone)
    assert not both[0].change[0].any()
    assert not both[0].change[-1].any()


def test_a_step_takes_together_what_has_batches_of_one_size() -> None:
    own = [[np.array([1, 2]), np.array([3, 4])], [np.array([5, 6]), np.array([7])], [np.array([8])]]
    first, second = steps_of(own)
    assert first[0] == 3
    assert [(positions.tolist(), indices.tolist()) for positions, indices in first[1]] == [
        ([0, 1], [[1, 2], [5, 6]]),
        ([2], [[8]]),
    ]
    assert second[0] == 2
    assert [indices.tolist() for _, indices in second[1]] == [[[3, 4]], [[7]]]


class Counted(nn.Linear):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__(36, 3, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.calls: Tensor

    def forward(self, input: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(input)


def flat(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *modules).double()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"model": lambda: flat(nn.Linear(36, 3), nn.Dropout(0.5))}, "vmap cannot follow"),
        (
            {"model": lambda: nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(36, 3)).double()},
            "changes its buffers",
        ),
        ({"model": lambda: flat(Counted())}, "changes its buffers"),
        (
            {
                "model": lambda: flat(nn.Linear(36, 3)),
                "loss": lambda model, batch: (
                    model(batch[0]).square().mean() * float(model(batch[0]).sum() > 0)
                ),
            },
            "vmap cannot follow",
        ),
        (
            {
                "model": lambda: nn.LSTM(6, 3, batch_first=True),
                "loss": lambda model, batch: model(batch[0].squeeze(1).float())[0].square().mean(),
            },
            "no rule for aten::",
        ),
        ({"optimizer": lambda parameters: torch.optim.Rprop(parameters)}, "Rprop is not known"),
        ({"collate": torch.utils.data.default_collate}, "a collate of its own"),
        (
            {"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3), _Unused()).double()},
            "some parameter has no gradient",
        ),
        (
            {"model": lambda: nn.Sequential(nn.Conv2d(1, 500, 6), nn.Flatten(), nn.Linear(500, 3)).double()},
            "slower on a CPU",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_cannot_be_stacked_or_should_not_is_trained_one_after_another(
    fields: dict[str, object], why: str
) -> None:
    task = a_task(**fields)
    found, simulation = played(task, AUTO)
    assert simulation.together == 1
    assert why in str(simulation)
    assert len(found) == 2 * len(SIZES)
    if "slower" not in why:
        with pytest.raises(UserError, match=r"together=3: .*; use together=auto, or together=1"):
            played(task, 3)


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_whole_batches_of_different_sizes_are_not_stacked_unless_asked_for() -> None:
    _, simulation = played(a_task(), AUTO, batch=ALL)
    assert simulation.together == 1
    assert "few clients have" in simulation.why
    alone, _ = played(a_task(), 1, batch=ALL)
    assert_alike(played(a_task(), 5, batch=ALL)[0], alone)


def test_the_data_of_parties_become_columns_with_the_samples_where_they_were() -> None:
    inputs, labels = np.arange(12.0).reshape(6, 2), torch.arange(6)
    parties = mh.Parties.by((inputs, labels), ["b", "a", "b", "a", "c", "a"])
    task = mh.Task(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).sum(),
        data=parties,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    samples = Samples(task, torch.device("cpu"))
    assert samples.resident
    found = samples.fetch(np.arange(6))
    expected = [parties[index] for index in range(6)]
    assert found[0].tolist() == [one[0].tolist() for one in expected]
    assert found[1].tolist() == [int(one[1]) for one in expected]
    assert columns_of(mh.Parties({"a": (inputs, labels), "b": {"x": inputs}})) is None
    assert columns_of([("text", 1)]) is None


def test_products_are_plain_while_a_model_of_linear_layers_is_trained_and_not_afterwards() -> None:
    before = torch.backends.mkldnn.enabled
    with plain_products(flat(nn.Linear(36, 3))):
        assert not torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), plain_products(flat(nn.Linear(36, 3))):
        raise KeyError
    assert torch.backends.mkldnn.enabled == before
    with plain_products(network()):
        assert torch.backends.mkldnn.enabled == before, "convolutions are oneDNN's"
