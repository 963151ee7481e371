"""Models of clients' own, layers that stay with them, codecs on their updates, and what they weigh at most."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.strategies.federated.client_data import held_back
from manyhands.strategies.federated.client_states import UpdateCoding, local_names
from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.simulation import fine_tuned, models_kept
from rounds import Played, play_rounds

RATE, HOLD = 0.05, 0.7


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return inputs, inputs.sum(1, keepdim=True) * (1 + seed) + 0.1


PARTIES = {f"party {at}": samples(4 + at, at) for at in range(4)}


def task(data: object = None) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=mh.Parties(PARTIES) if data is None else data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=8,
    )


def same(one: object, other: object, within: float = 1e-12) -> None:
    torch.testing.assert_close(list(one), list(other), rtol=within, atol=within)  # type: ignore[call-overload]


def weights_of(played: Played) -> list[Tensor]:
    return [one.detach() for one in played.model.parameters()]


def own_model(played: Played, client: int) -> list[Tensor]:
    return list(dict(played.exchange.personal_models([client]))[client])


def descend(
    begin: list[Tensor], data: tuple[Tensor, Tensor], epochs: int, near: list[Tensor], hold: float
) -> list[Tensor]:
    """Full-batch gradient descent on a client's loss and its distance from `near`, by autograd on functions."""
    now = [one.clone() for one in begin]
    for _ in range(epochs):
        leaves = [one.clone().requires_grad_() for one in now]
        hidden = data[0] @ leaves[0].T + leaves[1]
        loss = (hidden @ leaves[2].T + leaves[3] - data[1]).square().mean()
        loss = loss + hold / 2 * sum((a - b).square().sum() for a, b in zip(leaves, near, strict=True))
        now = [one - RATE * slope for one, slope in zip(now, torch.autograd.grad(loss, leaves), strict=True)]
    return now


def begun() -> list[Tensor]:
    torch.manual_seed(0)
    return [one.detach().clone() for one in task().model().parameters()]


def mean_of(models: list[list[Tensor]]) -> list[Tensor]:
    sizes = [len(data[0]) for data in PARTIES.values()]
    return [
        sum(size / sum(sizes) * one for size, one in zip(sizes, column, strict=True))  # type: ignore[misc]
        for column in zip(*models, strict=True)
    ]


def test_ditto_is_fedavg_and_each_clients_own_loop_beside_it() -> None:
    words = "federated partition=natural batch=all epochs=3 algorithm="
    common = begun()
    own = [list(common) for _ in PARTIES]
    for _ in range(3):
        own = [descend(mine, data, 3, common, HOLD) for mine, data in zip(own, PARTIES.values(), strict=True)]
        common = mean_of([descend(common, data, 3, common, 0.0) for data in PARTIES.values()])
    ditto = play_rounds(task(), f"{words}ditto:{HOLD}", 3)
    same(weights_of(ditto), common)
    same(weights_of(ditto), weights_of(play_rounds(task(), f"{words}fedavg", 3)), within=0)
    for client, mine in enumerate(own):
        same(own_model(ditto, client), mine)
    assert ditto.traffic.bytes_sent == 3 * 4 * (6 + 2 + 2 + 1) * 8, "nothing of its own is sent"


def test_layers_that_are_kept_are_each_clients_own() -> None:
    """By hand: the second layer stays, the first is averaged."""
    words = "federated partition=natural batch=all epochs=2 keep=1"
    first = begun()
    own = [list(first) for _ in PARTIES]
    for _ in range(3):
        found = [
            descend([*first[:2], *mine[2:]], data, 2, first, 0.0)
            for mine, data in zip(own, PARTIES.values(), strict=True)
        ]
        own, first = found, [*mean_of(found)[:2], *first[2:]]
    kept = play_rounds(task(), words, 3)
    same(weights_of(kept), first)
    same(weights_of(kept)[2:], begun()[2:], within=0)
    for client, mine in enumerate(own):
        same(own_model(kept, client), [*first[:2], *mine[2:]])
    assert kept.traffic.bytes_sent == 3 * 4 * (6 + 2) * 8, "the second layer is not sent"


@pytest.mark.parametrize("algorithm", ["fednova", "fedadam:0.1", "median", "multikrum:0", "fedprox:0.5"])
def test_kept_layers_go_with_other_algorithms(algorithm: str) -> None:
    """The server does not move them, and a fifth of the way is as in two pieces."""
    words = f"federated partition=natural batch=2 keep=*.bias algorithm={algorithm}"
    whole = play_rounds(task(), words, 4)
    parts = play_rounds(task(), words, 2, after=play_rounds(task(), words, 2))
    same(weights_of(whole), weights_of(parts), within=0)
    for at in (1, 3):
        assert torch.equal(weights_of(whole)[at], begun()[at])
        assert not torch.allclose(weights_of(whole)[at - 1], begun()[at - 1])
    for client in range(4):
        same(own_model(whole, client), own_model(parts, client), within=0)
    biases = {round(float(own_model(whole, client)[3]), 9) for client in range(4)}
    assert len(biases) == 4


@pytest.mark.parametrize(
    "words", ["algorithm=scaffold", "algorithm=ditto", "keep=0", "algorithm=fednova codec=sign"]
)
def test_clients_that_are_trained_at_once_keep_what_is_their_own(words: str) -> None:
    words = f"federated partition=natural batch=2 epochs=2 {words}"
    apart, together = (play_rounds(task(), f"{words} together={count}", 3) for count in (1, 4))
    same(weights_of(apart), weights_of(together))
    for client in range(4):
        same(own_model(apart, client), own_model(together, client))


def test_names_are_found_by_tensor_and_by_module() -> None:
    names = ["body.0.weight", "body.0.bias", "body.1.weight", "head.weight", "head.bias"]
    assert local_names(names, "head") == {3, 4}
    assert local_names(names, "body.*") == {0, 1, 2}
    assert local_names(names, "*.bias,body.1") == {1, 2, 4}
    assert local_names(names, "none") == frozenset()
    with pytest.raises(UserError, match=r"keep=tail: no part of the model is named 'tail'; there are body.0"):
        local_names(names, "tail")
    with pytest.raises(UserError, match=r"keep=\*: this is the complete model"):
        local_names(names, "*")


@pytest.mark.parametrize("algorithm", ["ditto", "scaffold"])
def test_a_resumed_run_has_every_clients_own(algorithm: str) -> None:
    words = f"federated partition=natural batch=3 fraction=0.5 codec=topk:0.3 algorithm={algorithm}"
    whole = play_rounds(task(), words, 6)
    parts = play_rounds(task(), words, 3, after=play_rounds(task(), words, 3))
    same(weights_of(whole), weights_of(parts), within=0)
    for client in range(4):
        same(own_model(whole, client), own_model(parts, client), within=0)


def update(client: int, number: int) -> ClientUpdate:
    generator = torch.Generator().manual_seed(100 * client + number)
    shapes = ((40, 25), (25,), (40, 25), (25,), (1,))
    change = [torch.randn(shape, generator=generator) for shape in shapes]
    return ClientUpdate(client=client, change=change, samples=1, steps=1, loss=0.0)


@pytest.mark.parametrize("codec", ["topk:0.05", "sign", "int8", "topk:0.05+int8", "fp8"])
def test_what_is_sent_and_what_is_kept_is_all_there_was_client_by_client(codec: str) -> None:
    """Two tensors of a model and two that an algorithm adds to them; the single number is exact."""
    coding = UpdateCoding(codec)
    given = {client: torch.zeros(2050) for client in (3, 7)}
    sent = {client: torch.zeros(2050) for client in (3, 7)}
    for number, client in enumerate((3, 7, 3, 3, 7)):
        one = update(client, number)
        carried = coding.encoded(one, number, 2)
        assert torch.equal(carried.change[4], one.change[4])
        assert carried.num_bytes < one.num_bytes / 2
        given[client] += torch.cat([part.flatten() for part in one.change[:4]])
        sent[client] += torch.cat([part.flatten() for part in carried.change[:4]])
    for client in (3, 7):
        kept = torch.cat(list(coding.states[client]))
        torch.testing.assert_close(sent[client] + kept, given[client], rtol=1e-5, atol=1e-5)
        assert kept.abs().max() > 0
    assert [one.shape for one in coding.kept(update(1, 1).change, 2)] == [(1025,), (1025,)]


def test_codecs_that_leave_nothing_out_keep_nothing_and_raw_is_raw() -> None:
    one = update(1, 1)
    assert UpdateCoding().encoded(one, 1, 2) is one
    half = UpdateCoding("bf16").encoded(one, 1, 2)
    assert half.num_bytes == 2050 * 2 + 4
    assert torch.equal(half.change[0], one.change[0].bfloat16().float())
    lost = UpdateCoding("topk:0.05", feedback=False)
    lost.encoded(one, 1, 2)
    assert not lost.states
    assert not lost.kept(one.change, 2)


def test_a_codec_reaches_the_same_place_with_fewer_bytes() -> None:
    words = "federated partition=natural batch=all"
    data = mh.Parties({name: samples(4 + at, 1) for at, name in enumerate(PARTIES)})
    raw, coded = (play_rounds(task(data), f"{words} codec={one}", 60) for one in ("raw", "topk:0.3"))
    assert raw.losses[-1] < 1e-4 > coded.losses[-1]
    assert coded.traffic.bytes_sent < 0.6 * raw.traffic.bytes_sent
    assert coded.traffic.messages_sent == raw.traffic.messages_sent


def test_a_client_counts_for_so_many_samples_whatever_it_says() -> None:
    words = "federated partition=natural batch=all epochs=1"
    common = begun()
    trained = [descend(common, data, 1, common, 0.0) for data in PARTIES.values()]
    weights = [min(len(data[0]), 5) for data in PARTIES.values()]
    assert weights == [4, 5, 5, 5]
    exact = [
        sum(weight / 19 * one for weight, one in zip(weights, column, strict=True))
        for column in zip(*trained, strict=True)
    ]
    same(weights_of(play_rounds(task(), f"{words} max_samples=5", 1)), exact)
    unbounded = weights_of(play_rounds(task(), words, 1))
    assert not torch.allclose(unbounded[0], exact[0], atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("federated max_samples=0", "max_samples=0: must be an integer of at least 1"),
        (
            "federated keep=head algorithm=ditto",
            "keep=head: not with algorithm=ditto: each client has a complete",
        ),
        ("federated keep=head algorithm=scaffold", "keep=head: not with algorithm=scaffold"),
        ("federated codec=topkk", "topk"),
        ("federated codec=dgc", "it keeps the momentum of gradients, but federated sends changes"),
        ("federated codec=powersgd", "federated codec=powersgd: factors are summed"),
        ("federated codec=sign:vote", "federated codec=sign:vote: a vote has no step size"),
        (
            "federated codec=auto",
            "only workers that exchange at the same steps, such as those of allreduce, can choose",
        ),
        ("federated codec=bf16 feedback=no", "feedback=no: codec=bf16 has no feedback"),
        ("federated codec=bf16 secure=yes", "codec=bf16: masked words .* use fewer bits="),
        ("federated algorithm=ditto:-1", "at least 0"),
        ("federated personal=finetun:1", "personal=finetun:1: unknown; .*did you mean 'finetune'"),
        ("federated personal=finetune:0", "personal=finetune:0: '0' is not a number of epochs"),
        ("federated personal=finetune:", "'' is not a number of epochs"),
        (
            "federated personal=finetune:1 algorithm=ditto",
            "finetune:1: not with algorithm=ditto: each client has",
        ),
        (
            "federated personal=finetune clip=1 noise=1 delta=1e-5",
            "personal=finetune: with noise nothing is reported about single",
        ),
        ("federated held_out=0.2 clip=1 noise=1 delta=1e-5", "held_out=0.2: with noise nothing is reported"),
        ("federated held_out=1", "held_out=1: must be a number from 0 to below 1"),
        ("federated held_out=some", "'some' is not a number from 0 to below 1"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        play_rounds(task(), words, 1)


def test_an_update_that_a_codec_makes_infinite_is_not_counted() -> None:
    huge = (torch.full((4, 3), 1e4, dtype=torch.float64), torch.full((4, 1), 1e7, dtype=torch.float64))
    words = "federated partition=natural batch=all codec=fp16"
    both = play_rounds(task(mh.Parties({**PARTIES, "huge": huge})), words, 1)
    same(weights_of(both), weights_of(play_rounds(task(), words, 1)))
    assert both.exchange.summary()["updates_refused"] == 1
    assert math.isfinite(both.losses[0])


@pytest.mark.parametrize("codec", ["raw", "fp16", "topk:0.5+fp16"])
def test_a_client_whose_update_is_refused_keeps_what_it_had(codec: str) -> None:
    huge = (torch.full((4, 3), 1e4, dtype=torch.float64), torch.full((4, 1), 1e7, dtype=torch.float64))
    infinite = (huge[0], torch.full((4, 1), math.inf, dtype=torch.float64))
    words = f"federated partition=natural batch=all algorithm=scaffold codec={codec}"
    parties = {**PARTIES, "refused": infinite if codec == "raw" else huge}
    both = play_rounds(task(mh.Parties(parties)), words, 1)
    assert both.exchange.summary()["updates_refused"] == 1
    assert sorted(both.exchange._algorithm.states) == [0, 1, 2, 3]
    assert sorted(both.exchange._coding.states) == ([0, 1, 2, 3] if "topk" in codec else [])


def test_fine_tuning_is_each_clients_own_descent_from_the_common_model() -> None:
    common = play_rounds(task(), "federated partition=natural batch=all", 2)
    strategy = mh.Federated(partition="natural", batch=0)
    before = [one.clone() for one in weights_of(common)]
    found = dict(fine_tuned(task(), strategy, common.model, epochs=3))
    assert sorted(found) == [0, 1, 2, 3]
    for client, data in enumerate(PARTIES.values()):
        same(found[client], descend(before, data, 3, before, 0.0))
    same(weights_of(common), before, within=0)
    with pytest.raises(UserError, match="epochs=0"):
        list(fine_tuned(task(), strategy, common.model, epochs=0))


def error_of(weights: list[Tensor], data: tuple[Tensor, Tensor]) -> float:
    hidden = data[0] @ weights[0].T + weights[1]
    return float((hidden @ weights[2].T + weights[3] - data[1]).square().mean())


def reported_errors(played: Played, kind: str) -> list[float]:
    report = played.exchange.summary()[kind]
    return [report[client]["evaluation_loss"] for client in sorted(report, key=int)]


def test_fine_tuning_is_a_setting_that_is_measured_beside_the_common_model() -> None:
    words = "federated partition=natural batch=all epochs=2 keep=1"
    plain = play_rounds(task(), words, 2)
    tuned = play_rounds(task(), f"{words} personal=finetune:3", 2)
    same(weights_of(tuned), weights_of(plain), within=0)
    common, own = [], []
    for client, data in enumerate(PARTIES.values()):
        mine = list(own_model(plain, client))
        common.append(error_of(weights_of(plain), data))
        own.append(error_of(descend(mine, data, 3, mine, 0.0), data))
    assert reported_errors(tuned, "measured") == pytest.approx(own, rel=1e-9)
    assert reported_errors(tuned, "measured_common") == pytest.approx(common, rel=1e-9)
    for client in range(4):  # what a client keeps from round to round is as it was
        same(own_model(tuned, client), own_model(plain, client), within=0)
    assert "measured_common" not in play_rounds(task(), "federated partition=natural", 1).exchange.summary()


def test_the_function_gives_the_models_that_a_run_has_measured() -> None:
    words = "federated partition=natural batch=2 keep=1 personal=finetune:2 held_out=0.3"
    run = play_rounds(task(), words, 2)
    strategy = mh.Federated.parse(words)
    assert isinstance(strategy, mh.Federated)
    layers = models_kept(run.exchange.kept.gather(), "layers")
    found = dict(fine_tuned(task(), strategy, run.model, kept=layers))
    _, held = held_back(mh.Parties(PARTIES).split(), 0.3, 0)
    begins = mh.Parties(PARTIES).split()
    errors = []
    for client, data in enumerate(PARTIES.values()):
        at = held[client] - begins[client][0]
        errors.append(error_of(found[client], (data[0][at], data[1][at])))
    assert reported_errors(run, "measured") == pytest.approx(errors, rel=1e-9)


def test_clients_that_are_tuned_at_once_come_to_what_each_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.strategies.federated.simulation._FEW_STEPS", 0)
    model = task().model()
    both = []
    for together in (1, 0):
        strategy = mh.Federated(partition="natural", batch=3, personal="finetune:2", together=together)
        both.append(dict(fine_tuned(task(), strategy, model)))
    for client in range(4):
        same(both[0][client], both[1][client])
        assert not torch.equal(both[0][client][0], model[0].weight)


def test_what_is_held_out_is_not_trained_on_and_measures() -> None:
    """By hand: each client's descent on what is left to it, weighed by that."""
    trained, held = held_back(mh.Parties(PARTIES).split(), 0.4, 0)
    everything = mh.Parties(PARTIES)
    common, models, errors = begun(), [], []

    def samples_at(indices: object) -> tuple[Tensor, Tensor]:
        pairs = [everything[at] for at in indices]  # type: ignore[attr-defined]
        return torch.stack([one for one, _ in pairs]), torch.stack([one for _, one in pairs])

    for mine in trained:
        models.append(descend(common, samples_at(mine), 2, common, 0.0))
    sizes = [len(mine) for mine in trained]
    assert sizes == [2, 3, 4, 4]
    mean = [
        sum(size / sum(sizes) * one for size, one in zip(sizes, column, strict=True))
        for column in zip(*models, strict=True)
    ]
    run = play_rounds(task(), "federated partition=natural batch=all epochs=2 held_out=0.4", 1)
    same(weights_of(run), mean)
    for tested in held:
        errors.append(error_of(mean, samples_at(tested)))  # type: ignore[arg-type]
    assert reported_errors(run, "measured") == pytest.approx(errors, rel=1e-9)


def test_what_clients_had_kept_is_read_from_a_checkpoint() -> None:
    ditto = play_rounds(task(), "federated partition=natural batch=all algorithm=ditto", 2)
    models = models_kept(ditto.exchange.kept.gather())
    for client in range(4):
        same(models[client], own_model(ditto, client), within=0)
    heads = play_rounds(task(), "federated partition=natural batch=all keep=1", 2)
    assert [one.shape for one in models_kept(heads.exchange.kept.gather(), "layers")[2]] == [(1, 2), (1,)]
