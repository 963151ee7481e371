"""Algorithms beside what they must equal: loops in numpy, closed forms on quadratics, one worker, one run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import manyhands as mh
from manyhands.strategies.federated.client_data import selected
from rounds import Played, play_rounds

RATE = 0.05
TRUE = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)
CURVES = {"flat": (0.5, -2.0, 2), "steep": (4.0, 1.0, 4), "large": (1.5, 3.0, 6)}  # a, b, samples


def samples(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    noise = 0.1 * torch.randn(count, 1, dtype=torch.float64, generator=generator)
    return inputs, inputs @ (TRUE + shift) + noise


PARTIES = {f"party {at}": samples(3 + 2 * at, at, 0.5 * at) for at in range(5)}


def regression(data: object = None) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(3, 1, bias=False).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=mh.Parties(PARTIES) if data is None else data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=24,
    )


class Point(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, curves: Tensor) -> Tensor:
        return curves[:, 0] / 2 * (self.at - curves[:, 1]).square()


def quadratics(rate: float = 0.1) -> mh.Task:
    """Client i has a_i/2 (w - b_i)², in as many samples as it weighs."""
    rows = {
        name: (torch.tensor([[a, b]] * count, dtype=torch.float64),) for name, (a, b, count) in CURVES.items()
    }
    return mh.Task(
        model=Point,
        loss=lambda model, batch: model(batch[0]).mean(),
        data=mh.Parties(rows),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        batch_size=24,
    )


A, B, N = (np.array(column) for column in zip(*CURVES.values(), strict=True))
P = N / N.sum()
OPTIMUM = float((P * A * B).sum() / (P * A).sum())


def weight_of(run: Played) -> NDArray[np.float64]:
    return next(iter(run.model.parameters())).detach().numpy().flatten()


def scaffold_by_hand(rounds: int, epochs: int, fraction: float) -> NDArray[np.float64]:
    """Algorithm 1 of the paper with its option II, in numpy, clients by their samples."""
    torch.manual_seed(0)
    weights = next(iter(regression().model().parameters())).detach().numpy().flatten().copy()
    data = [(inputs.numpy(), targets.numpy().flatten()) for inputs, targets in PARTIES.values()]
    everyone = sum(len(targets) for _, targets in data)
    c, own = np.zeros(3), np.zeros((len(data), 3))
    for number in range(rounds):
        chosen = selected(0, number, len(data), round(fraction * len(data)))
        moved, learned, weight = np.zeros(3), np.zeros(3), 0
        for client in chosen:
            inputs, targets = data[client]
            mine = weights.copy()
            for _ in range(epochs):
                gradient = 2 / len(targets) * inputs.T @ (inputs @ mine - targets)
                mine -= RATE * (gradient - own[client] + c)
            after = own[client] - c + (weights - mine) / (epochs * RATE)
            moved += len(targets) * (mine - weights)
            learned += len(targets) * (after - own[client])
            own[client] = after
            weight += len(targets)
        weights = weights + moved / weight
        c = c + learned / everyone
    return weights


@pytest.mark.parametrize("fraction", [1.0, 0.6])
def test_scaffold_is_the_papers_loop(fraction: float) -> None:
    words = f"federated algorithm=scaffold epochs=3 batch=all partition=natural fraction={fraction}"
    run = play_rounds(regression(), words, 5)
    np.testing.assert_allclose(weight_of(run), scaffold_by_hand(5, 3, fraction), rtol=0, atol=1e-9)
    plain = play_rounds(regression(), words.replace("scaffold", "fedavg"), 5)
    assert np.abs(weight_of(run) - weight_of(plain)).max() > 1e-3
    assert run.traffic.bytes_sent == 2 * plain.traffic.bytes_sent, "weights and control variates"


def test_scaffold_finds_the_optimum_where_fedavg_stays_beside_it() -> None:
    """With K steps of a client, FedAvg's fixed point weighs clients by 1 - (1 - rate a)^K."""
    words = "federated epochs=5 batch=all partition=natural"
    gone = P * (1 - (1 - 0.1 * A) ** 5)
    biased = float((gone * B).sum() / gone.sum())
    assert abs(biased - OPTIMUM) > 0.1
    fedavg = weight_of(play_rounds(quadratics(), f"{words} algorithm=fedavg", 30))
    np.testing.assert_allclose(fedavg, biased, rtol=0, atol=1e-9)
    scaffold = weight_of(play_rounds(quadratics(), f"{words} algorithm=scaffold", 45))
    np.testing.assert_allclose(scaffold, OPTIMUM, rtol=0, atol=1e-9)


def test_fednova_takes_off_what_unequal_steps_do_to_fedavg() -> None:
    """Batches of one sample: a client takes as many steps as it has samples, two or six."""
    rate = 0.03
    words, left = "federated batch=1 partition=natural", (1 - rate * A) ** N
    avg, nova = P * (1 - left), P * (1 - left) / N
    at = {"fedavg": float((avg * B).sum() / avg.sum()), "fednova": float((nova * B).sum() / nova.sum())}
    for algorithm, closed in at.items():
        run = play_rounds(quadratics(rate), f"{words} algorithm={algorithm}", 90)
        np.testing.assert_allclose(weight_of(run), closed, rtol=0, atol=1e-9)
    assert abs(at["fedavg"] - OPTIMUM) > 0.1 > 10 * abs(at["fednova"] - OPTIMUM)


def test_fednova_is_fedavg_where_all_take_as_many_steps() -> None:
    words = "federated epochs=3 batch=all partition=natural algorithm="
    nova, avg = (play_rounds(regression(), words + one, 3) for one in ("fednova", "fedavg"))
    np.testing.assert_allclose(weight_of(nova), weight_of(avg), rtol=0, atol=1e-12)


HOSTILE = samples(6, 77, -400.0)
"""Who has learned from lies is as bad as who lies: its targets are those of other weights, far away."""


@cache
def beside_the_truth(algorithm: str) -> float:
    """How far from it five honest clients and two hostile ones come, by the algorithm alone."""
    honest = {f"honest {at}": samples(30, at) for at in range(5)}
    both = {"hostile 1": HOSTILE, "hostile 2": (HOSTILE[0] * 2, HOSTILE[1] * 2)}
    words = f"federated batch=all partition=natural norm_ratio=0 algorithm={algorithm}"
    run = play_rounds(regression(mh.Parties({**honest, **both})), words, 60)
    return float(np.abs(weight_of(run) - TRUE.numpy().flatten()).max())


@pytest.mark.parametrize("algorithm", ["median", "trimmed:0.3", "krum:2", "multikrum:2"])
def test_two_hostile_clients_of_seven_do_not_move_a_robust_mean(algorithm: str) -> None:
    assert beside_the_truth(algorithm) < 0.1
    assert beside_the_truth("fedavg") > 10


def test_a_client_with_broken_data_spoils_neither_its_state_nor_the_others() -> None:
    broken = (torch.full((4, 3), float("nan"), dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    data = {**PARTIES, "broken": broken}
    for algorithm in ("fednova", "median", "multikrum:1"):
        words = f"federated batch=all partition=natural algorithm={algorithm}"
        run, without = (play_rounds(regression(mh.Parties(one)), words, 2) for one in (data, PARTIES))
        if algorithm == "multikrum:1":  # who sent nothing was the hostile one: the mean of all others is left
            without = play_rounds(regression(), words.replace("krum:1", "krum:0"), 2)
        np.testing.assert_allclose(weight_of(run), weight_of(without), rtol=0, atol=1e-12)


def test_scaffold_and_fednova_go_with_a_secure_sum() -> None:
    for algorithm in ("scaffold", "fednova"):
        words = f"federated epochs=2 batch=3 partition=natural algorithm={algorithm}"
        plain = play_rounds(regression(), words, 2)
        secure = play_rounds(regression(), f"{words} secure=yes range=16 bits=30", 2)
        np.testing.assert_allclose(weight_of(secure), weight_of(plain), rtol=0, atol=1e-6)


def test_fednovas_number_of_steps_has_room_in_a_secure_sum_however_many_there_are() -> None:
    """Up to eleven steps of a client, and items of at most 2."""
    words = "federated batch=1 partition=natural algorithm=fednova"
    plain = play_rounds(regression(), words, 1)
    secure = play_rounds(regression(), f"{words} secure=yes range=2 bits=30", 1)
    np.testing.assert_allclose(weight_of(secure), weight_of(plain), rtol=0, atol=1e-6)


@pytest.mark.parametrize("algorithm", ["fedadam", "fedyogi", "fedadagrad", "fednova"])
def test_running_statistics_are_averaged_whatever_the_servers_optimizer(algorithm: str) -> None:
    """A step of Adam could make a variance negative; after a round they are those of FedAvg."""
    task = replace(
        regression(),
        model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1, bias=False)).double(),
    )
    words = "federated batch=all epochs=2 partition=natural algorithm="
    fedavg, other = (play_rounds(task, words + one, 1) for one in ("fedavg", algorithm))
    for name, buffer in fedavg.model.named_buffers():
        torch.testing.assert_close(dict(other.model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)
    begun = nn.BatchNorm1d(3).double().running_var
    assert not torch.allclose(fedavg.model.get_buffer("0.running_var"), begun, atol=1e-3)  # type: ignore[arg-type]


def test_clients_compute_in_the_precision_of_the_run() -> None:
    words = "federated batch=all partition=natural together="
    single = {name: (one.float(), other.float()) for name, (one, other) in PARTIES.items()}
    task = replace(regression(mh.Parties(single)), model=lambda: nn.Linear(3, 1, bias=False))
    torch.manual_seed(0)
    by_hand = task.model().weight.detach().clone()
    step = torch.zeros_like(by_hand)
    for inputs, targets in single.values():
        model = nn.Linear(3, 1, bias=False)
        model.weight.data.copy_(by_hand)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (model(inputs) - targets).square().mean()
        loss.backward()
        step -= RATE * len(inputs) / 35 * model.weight.grad
    plain = play_rounds(task, words + "1", 1)
    for together in ("1", "auto"):
        rounded = play_rounds(task, words + together, 1, autocast=True)
        torch.testing.assert_close(rounded.model.weight.detach(), by_hand + step, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(rounded.model.weight, plain.model.weight, rtol=1e-5, atol=1e-6)
