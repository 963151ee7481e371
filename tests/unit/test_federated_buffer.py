"""FedBuff beside what it must equal: a loop by hand over the same arrivals, FedAvg where nobody is late, one run."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.strategies.common.consistency import blend
from manyhands.strategies.federated.algorithms.algorithm import FederatedFacts
from manyhands.strategies.federated.algorithms.buff import FedBuff, duration_s, next_client
from manyhands.strategies.federated.client_updates import ClientUpdate
from rounds import Played, play_rounds

RATE = 0.1


def samples(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(5, 2, dtype=torch.float64, generator=generator)
    return inputs, inputs @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.3 * seed


PARTIES = {f"party {at}": samples(at) for at in range(9)}


def task() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(2, 1, bias=False).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=mh.Parties(PARTIES),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=8,
    )


def weight_of(played: Played) -> np.ndarray:
    return next(iter(played.model.parameters())).detach().numpy().flatten()


def schedule(rounds: int, clients: int, per_round: int, size: int) -> list[list[tuple[int, int]]]:
    """(client, version) of each round's updates, by a loop over events of its own.

    It shares with the algorithm how long a client takes and who goes next, and no line of the loop.
    """
    events: list[tuple[float, int, int]] = []  # when, who, with which model
    trips, now = itertools.count(), 0.0

    def send(version: int, resting: set[int]) -> None:
        remote = {client for _, client, _ in events}
        trip = next(trips)
        client = next_client(0, trip, [one for one in range(clients) if one not in remote | resting])
        heapq.heappush(events, (now + duration_s(0, client, trip), client, version))

    for _ in range(per_round):
        send(0, set())
    found: list[list[tuple[int, int]]] = []
    for version in range(rounds):
        buffer: list[tuple[int, int]] = []
        while len(buffer) < size:
            now, client, began = heapq.heappop(events)
            buffer.append((client, began))
            send(version, {one for one, _ in buffer})
        found.append(buffer)
    return found


def test_a_step_is_the_mean_of_the_buffer_each_update_from_the_model_it_began_with() -> None:
    torch.manual_seed(0)
    versions = [next(iter(task().model().parameters())).detach().numpy().flatten().copy()]
    late = 0
    for number, round_of in enumerate(schedule(12, 9, 6, 2)):
        step = np.zeros(2)
        for client, version in round_of:
            inputs, targets = (one.numpy() for one in list(PARTIES.values())[client])
            mine = versions[version].copy()
            for _ in range(2):
                mine -= RATE * 2 / 5 * inputs.T @ (inputs @ mine - targets.flatten())
            step += (mine - versions[version]) / np.sqrt(1 + number - version) / 2
            late += number - version
        versions.append(versions[-1] + step)
    words = "federated partition=natural batch=all epochs=2 fraction=0.67 algorithm=fedbuff:2"
    run = play_rounds(task(), words, 12)
    np.testing.assert_allclose(weight_of(run), versions[-1], rtol=0, atol=1e-9)
    report = run.exchange.summary()["algorithm"]
    assert report["staleness"]["mean"] == pytest.approx(late / 24)
    assert report["staleness"]["mean"] > 1, "six are under way, and two make a step"


def test_staleness_counts_as_under_parameter_servers() -> None:
    """What `blend` makes of gradients of one step, which is what a server of `ps` does with them."""
    staleness = [0, 3, 1, 8]
    made = FedBuff(len(staleness))
    updates = [
        ClientUpdate(client=at, change=[], samples=at + 1, steps=1, loss=0.0, staleness=tau)
        for at, tau in enumerate(staleness)
    ]
    factors, rate = blend(made.policy, [1.0] * 4, staleness, parts=1)
    counted = [made.weight(one) / 4 for one in updates]
    assert counted == pytest.approx([rate * factor for factor in factors], rel=1e-15)
    assert counted == pytest.approx([1 / 4, 1 / 8, 1 / (4 * 2**0.5), 1 / 12], rel=1e-15)
    assert str(made.policy) == "damped:buffered:4"


def test_where_a_step_waits_for_everybody_it_is_fedavg() -> None:
    words = "federated partition=natural batch=2 algorithm="
    buffered, average = (play_rounds(task(), words + one, 3) for one in ("fedbuff:9", "fedavg"))
    np.testing.assert_allclose(weight_of(buffered), weight_of(average), rtol=0, atol=1e-12)
    assert buffered.exchange.summary()["algorithm"]["staleness"] == {"mean": 0.0, "max": 0}


def test_arrivals_are_in_the_order_of_time_and_nobody_is_under_way_twice() -> None:
    made = FedBuff(3)
    made.facts = FederatedFacts(clients=20, per_round=8, seed=5)
    counts, before = np.zeros(20), 0.0
    for number in range(300):
        back = made.given(number, (), [torch.full((1,), float(number))])
        assert len({one.client for one in back}) == 3
        for one in back:
            assert float(one.weights[0]) == one.number == number - one.staleness
            counts[one.client] += 1
        memory = made.memory()
        remote = [client for _, client, _ in memory["underway"]]
        assert len(set(remote)) == len(remote) == 8
        assert memory["clock_s"] >= before
        before = memory["clock_s"]
        assert {version for version, _ in memory["versions"]} == {
            version for _, _, version in memory["underway"]
        }
    speeds = [np.mean([duration_s(5, client, trip) for trip in range(50)]) for client in range(20)]
    slow, fast = int(np.argmax(speeds)), int(np.argmin(speeds))
    assert counts[fast] > counts[slow] > 0
    waiting = sum(max(duration_s(5, client, trip) for client in range(8)) for trip in range(112))
    assert before < waiting / 2, "as many updates in synchronous rounds of eight, each as long as its slowest"


def test_a_resumed_run_goes_on_with_those_under_way() -> None:
    words = "federated partition=natural batch=2 fraction=0.7 algorithm=fedbuff:2"
    whole = play_rounds(task(), words, 9)
    parts = play_rounds(task(), words, 5, after=play_rounds(task(), words, 4))
    np.testing.assert_array_equal(weight_of(whole), weight_of(parts))
    assert whole.exchange.summary()["algorithm"] == parts.exchange.summary()["algorithm"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("algorithm=fedbuff:0", "fedbuff:0: .* an integer of at least 1"),
        ("algorithm=fedbuff:2.5", "fedbuff:2.5: .* an integer"),
        ("clients=10 fraction=0.3 algorithm=fedbuff:4", "needs 4 updates, but only 3 clients train at once"),
        ("algorithm=fedbuff:4 secure=yes", "not with algorithm=fedbuff:4: its clients start from different"),
        ("algorithm=fedbuff:4 clip=1", "uses more of a client than its summed update"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        mh.Federated.parse(f"federated {words}")
