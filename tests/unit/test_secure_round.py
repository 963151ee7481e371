"""Secure rounds: exact sums whoever leaves and when, what the server never has, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from manyhands.strategies.federated.secure.primitives import SHARE_BYTES, ProtocolRefused, combine, public_key
from manyhands.strategies.federated.secure.secure_messages import (
    MaskedInput,
    RoundKeys,
    SurvivorList,
    UnmaskReply,
    UnmaskRequest,
    fewest_clients,
)
from manyhands.strategies.federated.secure.secure_protocol import RoundAbandoned, SecureStage
from manyhands.strategies.federated.update_tally import (
    play_round,
)
from securely import MESSAGES, MODEL, Party, client_bytes, drawing, published_bits

STAGES = [stage for stage in SecureStage if stage < SecureStage.DONE]


def assert_exact(party: Party, survivors: tuple[int, ...]) -> None:
    items, weight = party.terms.fixed.decode(party.server.result())
    assert [*items.tolist(), weight] == party.plain_sum(survivors)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("leaving", [0, 1, 3])
def test_the_sum_is_exact_whoever_leaves_and_when(stage: SecureStage, leaving: int) -> None:
    """0, 10 and 30 % of ten clients, at every stage; those who leave after sending their input are in the sum."""
    party = Party(10, seed=10 * stage + leaving, ring=32)
    gone = list(party.roster)[1::3][:leaving]
    party.play(SecureStage.DONE, dict.fromkeys(gone, stage))
    expected = tuple(k for k in party.roster if k not in gone or stage > SecureStage.MASK)
    assert party.server.lists.survivors == expected
    assert_exact(party, expected)


@pytest.mark.parametrize("clients", [20, 50])
def test_the_sum_is_exact_with_thirty_percent_gone_over_all_stages(clients: int) -> None:
    party = Party(clients, seed=clients)
    gone = dict(zip(list(party.roster)[::2][: clients * 3 // 10], STAGES * clients, strict=False))
    assert len(set(gone.values())) == len(STAGES)
    party.play(SecureStage.DONE, gone)
    survivors = tuple(
        client for client in party.roster if gone.get(client, SecureStage.DONE) > SecureStage.MASK
    )
    assert party.server.lists.survivors == survivors
    assert_exact(party, survivors)


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_a_round_is_abandoned_and_reveals_nothing(stage: SecureStage) -> None:
    party = Party(6, seed=3)
    gone = list(party.roster)[: 6 - party.terms.threshold + 1]
    with pytest.raises(RoundAbandoned, match=rf"4 of 6 clients were left at {stage.name}, but 5 are needed"):
        party.play(SecureStage.DONE, dict.fromkeys(gone, stage))
    assert party.server.stage is SecureStage.ABANDONED
    with pytest.raises(ProtocolRefused, match="no sum"):
        party.server.result()
    with pytest.raises(ProtocolRefused, match="abandoned"):
        party.server.receive(gone[0], b"")
    with pytest.raises(ProtocolRefused, match="abandoned"):
        party.server.advance()
    assert not party.server._sum.any(), "not even the masked sum is kept"
    assert not party.server._seed_shares


def test_every_threshold_gives_the_same_sum() -> None:
    for threshold in range(fewest_clients(5), 6):
        party = Party(5)
        terms = replace(party.terms, threshold=threshold)
        found = play_round(terms, party.identities, party.inputs, MODEL, draw=drawing(1))
        items, weight = terms.fixed.decode(found.words)
        assert [*items.tolist(), weight] == party.plain_sum(found.survivors)


def test_a_late_input_can_never_be_unmasked() -> None:
    """The server has dropped 9, and rebuilt its mask key; then 9's masked input comes after all."""
    party = Party(4, items=400)
    party.play(SecureStage.MASK)
    seed = party.clients[9]._seed
    late = party.answer(9, party.messages[9])
    party.play(SecureStage.UNMASK, {9: SecureStage.MASK})
    with pytest.raises(ProtocolRefused, match="client 9 was not asked at UNMASK: it is unknown or too late"):
        party.server.receive(9, late)
    replies = {k: UnmaskReply.decode(party.answer(k, message)) for k, message in party.messages.items()}
    secret = combine([(k + 1, reply.keys[9]) for k, reply in replies.items()], 3)
    words = MaskedInput.decode(late, party.terms).words
    keys, advertised = RoundKeys(party.terms, MODEL), party.server._advertised
    for other in (3, 5, 7):  # all that the server can take away: 9 has the largest number, and took them
        words = words + keys.shared_mask(secret, advertised[other].mask_key, 9, other)
    assert not (words == party.inputs[9]).any(), "its own seed still hides every word"
    assert chi_square(words) < FAR
    assert all(9 not in reply.seeds for reply in replies.values()), "nobody gave a share of that"
    everybody = SurvivorList(survivors=(3, 5, 7, 9), dropped=())
    request = UnmaskRequest(lists=everybody, signatures={}).encode()
    for client in (3, 5, 7):
        with pytest.raises(ProtocolRefused, match="is at DONE"):
            party.clients[client].unmask(request)
    assert (words - keys.own_mask(seed, 9) == party.inputs[9]).all(), "which is all that hides them"


FAR = 255 + 6 * (2 * 255) ** 0.5
"""Six standard deviations above the mean of chi-square with 255 degrees of freedom."""


def chi_square(words: Any) -> float:
    """Of the bytes of words, against all being as likely."""
    counts = np.bincount(np.frombuffer(words.tobytes(), np.uint8), minlength=256)
    expected = counts.sum() / 256
    return float(((counts - expected) ** 2 / expected).sum())


def test_masked_words_look_uniform_whatever_is_under_them() -> None:
    for value in (0.0, 1.0):
        party = Party(3, items=4000)
        party.inputs = {k: party.terms.fixed.encode(np.full(4000, value), 1) for k in party.roster}
        assert chi_square(party.inputs[3]) > 100 * FAR, "the test would see it"
        party.play(SecureStage.MASK)
        for number, message in party.messages.items():
            words = MaskedInput.decode(party.answer(number, message), party.terms).words
            assert chi_square(words) < FAR
            assert abs(np.corrcoef(words[:-1:2], words[1::2])[0, 1]) < 6 / 2000**0.5


def test_a_mask_is_of_its_two_clients_their_keys_the_round_its_terms_and_the_model_alone() -> None:
    terms = Party(4).terms
    one, other, third = (drawing(seed)(32) for seed in range(3))

    def mask(
        mine: int = 3, theirs: int = 5, secret: bytes = one, model: bytes = MODEL, **changed: Any
    ) -> bytes:
        keys = RoundKeys(replace(terms, **changed), model)
        return keys.shared_mask(secret, public_key(other), mine, theirs).tobytes()

    assert mask() == RoundKeys(terms, MODEL).shared_mask(other, public_key(one), 5, 3).tobytes(), "either end"
    different = [mask(), mask(theirs=7), mask(mine=4), mask(secret=third), mask(model=bytes(32))]
    different += [
        mask(round_id=bytes(32)),
        mask(threshold=4),
        RoundKeys(terms, MODEL).own_mask(one, 3).tobytes(),
    ]
    different += [RoundKeys(terms, MODEL).own_mask(one, 5).tobytes()]
    assert len(set(different)) == len(different)


def reachable(thing: object, seen: set[int] | None = None) -> Iterator[bytes]:
    """The bytes of everything that can be reached from an object."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, bytes | bytearray | memoryview):
        yield bytes(thing)
    elif isinstance(thing, np.ndarray):
        yield thing.tobytes()
        yield from reachable(thing.base, seen)
    elif isinstance(thing, int):
        yield thing.to_bytes(max(8, thing.bit_length() // 8 + 1), "little", signed=True)
    elif isinstance(thing, float):
        yield np.float64(thing).tobytes()
    elif isinstance(thing, dict):
        for key, value in thing.items():
            yield from reachable(key, seen)
            yield from reachable(value, seen)
    elif isinstance(thing, list | tuple | set | frozenset):
        for one in thing:
            yield from reachable(one, seen)
    elif is_dataclass(thing):
        for field in fields(thing):
            yield from reachable(getattr(thing, field.name), seen)
    elif hasattr(thing, "__dict__"):
        yield from reachable(vars(thing), seen)


def traces(party: Party, client: int) -> list[bytes]:
    """A client's update as anybody might write it: any two neighbours, in any of the usual numbers."""
    words, update = party.inputs[client], party.updates[client]
    whole = np.rint(np.clip(update, -1, 1) / party.terms.fixed.step)
    found = [words, words.byteswap(), whole.astype(np.int64), whole.astype(np.int32), whole]
    found += [update, update.astype(np.float32), update.byteswap()]
    found += [np.append(update * party.weights[client], party.weights[client])]
    return [
        rows[k : k + 2].tobytes() for rows in found for k in range(len(rows) - 1) if rows[k : k + 2].all()
    ]


def test_the_server_never_has_anybodys_update_in_its_memory_or_its_messages() -> None:
    party = Party(10, items=16, seed=4)
    gone = {5: SecureStage.SHARE, 9: SecureStage.MASK, 13: SecureStage.CONFIRM}
    needles = [one for client in party.roster for one in traces(party, client)]
    assert len(needles) > 1000
    for stage in (*STAGES[1:], SecureStage.DONE):
        party.play(stage, gone)
        memory = b"|".join(reachable(party.server))
        assert not [one for one in needles if one in memory], f"at {stage.name}"
        masked = [one for one in party.transcript if len(one) == party.terms.length * 8]
        assert not [one for one in masked if one in memory], "nor as it came, under its masks"
    assert len(masked) == 8, "of all but those that left before"
    spoken = b"|".join(party.transcript)
    assert not [one for one in needles if one in spoken]
    assert party.server._sum.tobytes() in memory, "the search sees what is there"
    vars(party.server)["kept"] = {"by mistake": [party.inputs[7]]}
    memory = b"|".join(reachable(party.server))
    assert [one for one in needles if one in memory], "and would find an update"


def test_the_cost_is_the_published_formula_and_what_we_say_comes_on_top() -> None:
    """The paper's own figures first: 1.73 times the plain input for 2¹⁰ users with 2²⁰ items, 1.98 for 2¹⁴, 2²⁴."""
    for users, items, ring, expansion in ((10, 20, 26, 1.73), (14, 24, 30, 1.98)):
        found = published_bits(2**users, 2**items, ring) / (2**items * 16)
        assert round(found, 2) == expansion
    for clients, items in ((3, 7), (8, 40)):
        party = Party(clients, items, ring=32)
        cost = play_round(party.terms, party.identities, party.inputs, MODEL)
        assert cost.messages == MESSAGES * clients
        for client in party.roster:
            assert cost.sent[client] + cost.received[client] == client_bytes(party.terms)
    published = published_bits(8, 41, 32, 8 * 32, 8 * SHARE_BYTES) // 8
    assert published < client_bytes(party.terms)


def test_vectors_dominate_for_models_of_any_size() -> None:
    """A million items in words of 32 bits, a hundred clients: less than 2 % on top of the vector itself."""
    party = Party(3)
    terms = replace(
        party.terms,
        clients=100,
        threshold=67,
        length=10**6,
        fixed=replace(party.terms.fixed, ring=32, max_weight=600),
    )
    assert client_bytes(terms) < 1.02 * 4 * 10**6
