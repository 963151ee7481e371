"""Private rounds: what clients send, what the server learns, and which settings are refused."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.observe.analyse.remarks import privacy_words
from manyhands.strategies.federated.algorithms import ALGORITHMS, algorithm_named
from manyhands.strategies.federated.client_updates import ClientUpdate, RoundPlace
from manyhands.strategies.federated.exchange import private_rounds
from manyhands.strategies.federated.private_rounds import PrivateRounds
from manyhands.strategies.federated.secure.secure_messages import SecureTerms, fewest_clients
from manyhands.strategies.federated.secure.secure_protocol import SecureStage
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategies.federated.update_tally import (
    PlainTally,
    PrivateTally,
    SecureTally,
    play_round,
    tally_for,
)
from manyhands.strategy import Strategy

WEIGHTS = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.float64)]
CLIENTS = list(range(9))


def alone(values: Tensor) -> Tensor:
    return values


def place(number: int = 0, clients: Sequence[int] = CLIENTS) -> RoundPlace:
    return RoundPlace(number=number, clients=clients, rank=0, total=alone)


def update(client: int, size: float, samples: int = 5) -> ClientUpdate:
    generator = torch.Generator().manual_seed(client)
    change = [torch.randn(one.shape, generator=generator, dtype=torch.float64) for one in WEIGHTS]
    norm = math.sqrt(sum(float(one.square().sum()) for one in change))
    sized = [(one * (size / norm)).to(like.dtype) for one, like in zip(change, WEIGHTS, strict=True)]
    return ClientUpdate(client=client, change=sized, samples=samples, steps=1, loss=1.0)


def of(text: str) -> Federated:
    found = Strategy.parse(f"federated {text}")
    assert isinstance(found, Federated)
    return found


def rounds_of(text: str, clients: int = 9) -> tuple[Federated, PrivateRounds]:
    strategy = of(f"clients={clients} {text}")
    found = private_rounds(strategy, clients, seed=7)
    assert found is not None
    return strategy, found


def played(
    text: str, updates: Sequence[ClientUpdate], number: int = 0
) -> tuple[Tensor, float, PrivateRounds]:
    """The sum of a round in one row, what it is divided by, and what is kept of it."""
    strategy, rounds = rounds_of(text)
    tally = tally_for(strategy, algorithm_named("fedavg"), place(number), WEIGHTS, WEIGHTS, rounds)
    assert isinstance(tally, PrivateTally)
    for one in updates:
        tally.add(one, 99.0)
    found = tally.total()
    assert [one.shape for one in found.sums] == [one.shape for one in WEIGHTS]
    assert math.isnan(found.loss), "losses are not told"
    return torch.cat([one.flatten() for one in found.sums]), found.weight, rounds


def row(one: ClientUpdate) -> Tensor:
    return torch.cat([change.double().flatten() for change in one.change])


def test_clipped_updates_are_summed_with_equal_weights_and_divided_by_the_cohort() -> None:
    updates = [update(client, 0.3 * client, samples=1 + client) for client in CLIENTS]
    found, by, rounds = played("clip=1.0", updates)
    expected = sum(row(one) * min(1.0, 1.0 / max(1e-12, float(row(one).norm()))) for one in updates)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert by == 9
    assert rounds.spending is None
    _, by, _ = played("clip=1.0", updates[:5])
    assert by == 9, "who is missing is not made up for"


def test_an_update_that_is_not_finite_is_nought() -> None:
    bad = ClientUpdate(
        client=3, change=[torch.full_like(one, math.nan) for one in WEIGHTS], samples=5, steps=1, loss=1.0
    )
    good = [update(client, 0.5) for client in CLIENTS if client != 3]
    whole, by, _ = played("clip=1.0", [*good, bad])
    without, _, _ = played("clip=1.0", good)
    assert torch.equal(whole, without)
    assert by == 9


def test_the_servers_noise_is_added_to_the_clipped_sum_once() -> None:
    """From the seed, so that the noise is that of rounds without updates; from the system, another every time."""
    text = "clip=2.0 noise=0.5 delta=1e-4 randomness={}"
    updates = [update(client, 3.0) for client in CLIENTS]
    clean, _, _ = played("clip=2.0", updates)
    noise, _, _ = played(text.format("seed"), [])
    noisy, by, rounds = played(text.format("seed"), updates)
    torch.testing.assert_close(noisy - clean, noise, rtol=0, atol=1e-6)  # the grid's step is 6e-8
    assert 0.05 < float(noise.std()) / (0.5 * 2.0) < 3
    assert by == 9
    assert rounds.spending is not None
    assert rounds.spending.rounds == 1
    other, _, _ = played(text.format("seed"), [], number=1)
    assert not torch.equal(other, noise)
    assert not torch.equal(played(text.format("system"), [])[0], played(text.format("system"), [])[0])


def test_worker_0_draws_the_noise_for_all() -> None:
    """Two workers in lock step: each gives its part to a sum, and both have the same noisy total."""
    strategy, one = rounds_of("clip=1.0 noise=1.0 delta=1e-4")
    _, other = rounds_of("clip=1.0 noise=1.0 delta=1e-4")
    report: list[Tensor] = []

    def first(values: Tensor) -> Tensor:
        report.append(values.clone())
        return values

    def second(values: Tensor) -> Tensor:
        assert not values.any(), "it has played nobody, and draws nothing"
        return report.pop(0)

    sums = []
    for rank, rounds, total in ((0, one, first), (1, other, second)):
        where = RoundPlace(number=0, clients=CLIENTS, rank=rank, total=total)
        tally = tally_for(strategy, algorithm_named("fedavg"), where, WEIGHTS, WEIGHTS, rounds)
        sums.append(tally.total().sums)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*sums, strict=True))
    assert float(sums[0][0].abs().max()) > 0


def test_a_secure_sum_with_the_clients_noise_is_the_sum_in_whole_steps_plus_their_noise() -> None:
    text = "clip=1.0 noise=0.7 noise_by=clients delta=1e-4 secure=yes randomness=seed"
    updates = [update(client, 2.0) for client in CLIENTS]
    found, by, rounds = played(text, updates)
    step = rounds.step
    expected = np.zeros(10, dtype=np.int64)
    for one in updates:
        draws = rounds.draws(0, one.client)
        clipped = (row(one) / row(one).norm()).numpy()
        noise = rounds.noise.in_steps(torch.zeros(10, dtype=torch.float64), step, rounds.fewest, draws)
        expected += np.trunc(clipped / step).astype(np.int64) + noise
    assert (found / step).round().long().tolist() == expected.tolist()
    assert torch.equal(found, torch.from_numpy(expected * step))
    assert by == 9


@pytest.mark.parametrize("stage", [SecureStage.SHARE, SecureStage.MASK, SecureStage.CONFIRM])
def test_noise_survives_the_clients_that_leave(stage: SecureStage) -> None:
    """As many leave as may: those whose words count have brought at least the noise that was promised."""
    strategy, rounds = rounds_of("clip=1.0 noise=1.0 noise_by=clients delta=1e-4 secure=yes")
    items, step = 3000, rounds.step
    going = dict.fromkeys(CLIENTS[: 9 - fewest_clients(9)], stage)
    words = {
        client: strategy.fixed_point.encode(
            rounds.noise.in_steps(
                torch.zeros(items, dtype=torch.float64), step, rounds.fewest, rounds.draws(0, client)
            )
            * step,
            1,
        )
        for client in CLIENTS
    }
    found = play_round(
        SecureTerms(
            round_id=os.urandom(32),
            clients=9,
            threshold=fewest_clients(9),
            length=items + 1,
            fixed=strategy.fixed_point,
        ),
        {client: bytes([client + 1] * 32) for client in CLIENTS},
        words,
        b"m" * 32,
        leaves=going,
    )
    values, weight = strategy.fixed_point.decode(found.words)
    count = 9 if stage is SecureStage.CONFIRM else 7
    assert weight == count == len(found.survivors)
    assert (values * step).var() == pytest.approx(count / 7, rel=0.15)


def test_an_adaptive_clip_grows_towards_the_norms_by_what_clients_say() -> None:
    _, _, rounds = played("clip=adaptive:0.5", [update(client, 5.0) for client in CLIENTS])
    assert rounds.bound == pytest.approx(0.1 * math.exp(0.2 * 0.5)), "nobody was within"
    _, _, rounds = played("clip=adaptive:0.5", [update(client, 0.01) for client in CLIENTS])
    assert rounds.bound == pytest.approx(0.1 * math.exp(-0.2 * 0.5)), "everybody was"
    text = "clip=adaptive:0.5 noise=0.01 noise_by=clients delta=1e-4 secure=yes"
    _, _, secure = played(text, [update(client, 0.01) for client in CLIENTS])
    assert secure.bound == pytest.approx(0.1 * math.exp(-0.2 * 0.5), rel=0.05)


def test_clients_are_drawn_each_by_itself_and_not_by_the_runs_seed() -> None:
    text = "fraction=0.3 sampling=poisson clip=1.0 noise=1.0 delta=1e-4"
    _, rounds = rounds_of(text, clients=2000)
    _, again = rounds_of(text, clients=2000)
    first, second = (one.drawn(0, alone, 0) for one in (rounds, again))
    assert first != second
    counts = [len(rounds.drawn(number, alone, 0)) for number in range(50)]
    assert len(set(counts)) > 10, "their number is random, too"
    assert abs(np.mean(counts) - 600) < 5 * math.sqrt(2000 * 0.3 * 0.7 / 50)
    assert rounds.cohort == 600
    _, seeded = rounds_of(f"{text} randomness=seed", clients=2000)
    assert seeded.drawn(3, alone, 0) == seeded.drawn(3, alone, 0) != seeded.drawn(4, alone, 0)


def test_what_is_kept_goes_on_where_it_was() -> None:
    text = "clip=adaptive:0.3 noise=1.0 delta=1e-4 epsilon=50"
    _, _, rounds = played(text, [update(client, 5.0) for client in CLIENTS])
    _, resumed = rounds_of(text)
    resumed.restore(rounds.state())
    assert (resumed.bound, resumed.summary()) == (rounds.bound, rounds.summary())
    assert privacy_words({"privacy": rounds.summary()})[0].startswith("Privacy of each client, against")
    for other in ({}, {"privacy": 3}, {"privacy": {"sentence": None}}):
        assert privacy_words(other) == []
    assert rounds.summary()["epsilon"] > 0
    with pytest.raises(UserError, match="without noise, so no epsilon would hold"):
        rounds_of(text)[1].restore(None)
    with pytest.raises(UserError, match="without noise, so no epsilon would hold"):
        rounds_of(text)[1].restore(rounds_of("clip=1.0")[1].state())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("noise=1 delta=1e-5", "noise=1: without clip= an update may have any norm"),
        ("clip=1 noise=-1", "noise=-1: must be 0, or a number from 0.001"),
        ("clip=1 noise=nan delta=1e-5", "noise=nan: must be 0, or a number from 0.001"),
        ("clip=1 noise=1e-9 delta=1e-5", "noise=1e-09: must be 0, or a number from 0.001"),
        ("clip=1 noise=1e99 delta=1e-5", "noise=1e+99: must be 0, or a number from 0.001"),
        ("clip=1 noise=1", "delta=0: with noise it must be above 0"),
        ("clip=1 noise=1 delta=2", "delta=2: with noise it must be above 0 and below 1"),
        ("clip=1 noise=1 epsilon=3", "epsilon=3: needs delta"),
        ("clip=1 noise=1 delta=1e-5 epsilon=-3", "epsilon=-3: must be a number above 0"),
        ("clip=1 epsilon=inf delta=1e-5", "epsilon=inf: must be a number above 0"),
        ("epsilon=3 delta=2", "delta=2: with noise it must be above 0 and below 1"),
        ("delta=1e-5", "delta=1e-05: needs noise; add epsilon=8"),
        ("clip=1 sampling=poisson", "sampling=poisson: needs noise"),
        ("randomness=seed", "randomness=seed: needs noise"),
        ("clip=1 noise=1 delta=0.1 clients=10", "delta=0.1: must be below 1/"),
        ("clip=1 noise=1 delta=1e-5 fraction=0.5 sampling=fixed", "use sampling=poisson"),
        ("epsilon=8 fraction=0.5 sampling=fixed", "use sampling=poisson"),
        ("clip=1 noise=1 delta=1e-5 noise_by=clients", "noise_by=clients: the server would see each update"),
        ("clip=1 noise=1 delta=1e-5 secure=yes fraction=0.5 sampling=poisson", "use sampling=fixed"),
        ("clip=9 secure=yes", "clip=9: with range=8 updates and their noise fit"),
        ("clip=4 noise=2 delta=1e-5 noise_by=clients secure=yes", "use a larger range"),
        ("clip=1 noise=0.1 delta=1e-5 noise_by=clients secure=yes bits=8", "use more bits"),
        ("clip=1 noise=1 delta=1e-5 noise_by=nobody", "unknown noise_by 'nobody'"),
        ("clip=1 noise=1 delta=1e-5 sampling=some", "unknown sampling 'some'"),
        ("clip=1 noise=1 delta=1e-5 randomness=dice", "unknown randomness 'dice'"),
        ("epsilon=8 algorithm=median", "federated epsilon=8: algorithm=median uses more of a client"),
        ("epsilon=8 algorithm=krum:1", "federated epsilon=8: algorithm=krum:1 uses more of a client"),
        ("epsilon=8 dropout=0.1", "dropout=0.1: not with epsilon=8 yet"),
        ("epsilon=8 held_out=0.2", "held_out=0.2: with noise nothing is reported about single clients"),
        ("epsilon=8 norm_ratio=50", "norm_ratio=50: not with epsilon=8, which bounds every"),
        ("clip=often", "clip=often: must be a number above 0"),
        ("noise=much", "'much' is not a number"),
    ],
)
def test_a_setting_that_promises_less_than_it_seems_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError) as caught:
        of(text)
    assert words in str(caught.value)
    assert str(caught.value).startswith("federated ")


def test_draws_that_take_everybody_make_nothing_cheaper() -> None:
    """With fraction=1 sampling=poisson is fixed; a smaller fraction is what takes less noise."""
    noises = [
        of(f"clients=100 epsilon=8 {more}").privacy.with_noise(100, 20).noise
        for more in ("sampling=poisson", "sampling=fixed", "", "fraction=0.5")
    ]
    assert noises[0] == noises[1] == noises[2] > noises[3]


def test_settings_print_as_they_are_read() -> None:
    text = "federated fraction=0.1 clip=adaptive:0.5 noise=1 epsilon=8 delta=1e-05 sampling=poisson"
    assert str(Strategy.parse(text)) == text


def test_which_algorithms_tell_no_more_than_a_sum() -> None:
    """A list to be changed by hand: an algorithm is on it when somebody has looked at all that leaves a client."""
    found = {word for word in ALGORITHMS if algorithm_named(word).sums_only}
    assert found == {"fedavg", "fedsgd", "fedprox", "fedadam", "fedyogi", "fedadagrad"}
    for word in ALGORITHMS.keys() - found:
        with pytest.raises(UserError, match=f"algorithm={word} uses more of a client"):
            of(f"clip=1.0 algorithm={word}")


def test_without_a_clip_a_tally_is_plain() -> None:
    strategy = of("clients=9")
    assert private_rounds(strategy, 9, seed=0) is None
    assert isinstance(tally_for(strategy, algorithm_named("fedavg"), place(), WEIGHTS, WEIGHTS), PlainTally)
    secure = of("clients=9 secure=yes")
    assert isinstance(tally_for(secure, algorithm_named("fedavg"), place(), WEIGHTS, WEIGHTS), SecureTally)
