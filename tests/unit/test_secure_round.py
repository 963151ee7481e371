"""Secure rounds: exact sums whoever leaves and when, what clients and server refuse, and what the server never has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.federated.secure.client import SecureStage
from manyhands.federated.secure.cost import MESSAGES, client_bytes, published_bits
from manyhands.federated.secure.keys import RoundKeys
from manyhands.federated.secure.messages import (
    Advertisement,
    Delivery,
    KeyList,
    MaskedInput,
    SealedShares,
    SurvivorList,
    UnmaskReply,
    UnmaskRequest,
    fewest_clients,
)
from manyhands.federated.secure.primitives import ProtocolRefused, public_key
from manyhands.federated.secure.round import play_round
from manyhands.federated.secure.server import RoundAbandoned
from manyhands.federated.secure.shamir import PRIME, SHARE_BYTES, combine
from securely import MODEL, Party, drawing

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
    assert party.server.survivors == expected
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
    assert party.server.survivors == survivors
    assert_exact(party, survivors)


@pytest.mark.parametrize("stage", STAGES)
def test_below_the_threshold_a_round_is_abandoned_and_reveals_nothing(stage: SecureStage) -> None:
    party = Party(6, seed=3)
    gone = list(party.roster)[: 6 - party.terms.threshold + 1]
    with pytest.raises(RoundAbandoned, match=rf"4 of 6 clients were left at {stage.name}, and it takes 5"):
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


# What clients refuse of a server


def at(stage: SecureStage, clients: int = 4, **more: Any) -> tuple[Party, int, bytes]:
    """A round in which everybody has yet to answer `stage`; its second client, and what that was sent."""
    party = Party(clients, **more)
    party.play(stage)
    number = list(party.roster)[1]
    return party, number, party.letters[number]


def refuses(party: Party, number: int, letter: bytes, why: str) -> None:
    """The client refuses, and answers nothing more, not even what is right."""
    right = party.letters[number]
    with pytest.raises(ProtocolRefused, match=why):
        party.answer(number, letter)
    for step in ("share", "confirm", "unmask"):
        with pytest.raises(ProtocolRefused, match="is at ABANDONED"):
            getattr(party.clients[number], step)(right)


def forged(letter: bytes, other: int, **changed: Any) -> bytes:
    """A list of keys in which one client's advertisement was changed."""
    listed = KeyList.decode(letter).advertisements
    return KeyList(
        advertisements=tuple(replace(one, **changed) if one.client == other else one for one in listed)
    ).encode()


def test_a_client_refuses_a_list_of_keys_that_is_not_as_signed() -> None:
    party, number, letter = at(SecureStage.SHARE)
    refuses(party, number, forged(letter, 3, mask_key=bytes(range(32))), "signature of client 3 .* is wrong")
    party, number, letter = at(SecureStage.SHARE)
    refuses(party, number, forged(letter, 3, signature=bytes(64)), "signature of client 3 .* is wrong")
    party, number, letter = at(SecureStage.SHARE)
    refuses(party, number, forged(letter, 3, terms=bytes(32)), "client 3 has signed keys of another round")
    party, number, letter = at(SecureStage.SHARE)
    refuses(party, number, forged(letter, 3, model=bytes(32)), "client 3 was given another model")
    party, number, letter = at(SecureStage.SHARE)
    refuses(
        party, number, forged(letter, number, mask_key=bytes(range(32))), "has not what client 5 has sent"
    )
    party, number, letter = at(SecureStage.SHARE)
    first = KeyList.decode(letter).advertisements[0]
    refuses(party, number, forged(letter, 7, mask_key=first.mask_key), "public key is on the list twice")
    party, number, letter = at(SecureStage.SHARE)
    fewer = KeyList(advertisements=KeyList.decode(letter).advertisements[:2]).encode()
    refuses(party, number, fewer, "2 clients have keys, and it takes 3")
    party, number, letter = at(SecureStage.SHARE)
    refuses(party, number, letter + letter[4 : 4 + 228], "more bytes than its tables")
    party, number, letter = at(SecureStage.SHARE)
    twice = (5).to_bytes(4, "big") + letter[4:] + letter[-228:]
    refuses(party, number, twice, "client 9 is in a table twice")
    party, number, letter = at(SecureStage.SHARE)
    stranger = Party(4, seed=9)
    stranger.play(SecureStage.SHARE)
    refuses(party, number, stranger.letters[number], "has not what client 5 has sent")


def test_a_client_with_another_model_or_of_another_round_is_not_taken_in() -> None:
    """A server that gives out different models is found out: neither keys nor shares fit."""
    party = Party(4)
    other = party.client(3, model=bytes(32)).advertise()
    with pytest.raises(ProtocolRefused, match="client 3 was given another model"):
        party.server.receive(3, other)
    replayed = party.client(3, terms=replace(party.terms, round_id=bytes(32))).advertise()
    with pytest.raises(ProtocolRefused, match="of another round"):
        party.server.receive(3, replayed)
    for one in (other, replayed):  # a server that lies does not mind, and the clients do
        lying = Party(4)
        lying.play(SecureStage.SHARE)
        listed = KeyList.decode(lying.letters[5]).advertisements
        letter = KeyList(advertisements=(Advertisement.decode(one), *listed[1:])).encode()
        with pytest.raises(ProtocolRefused, match="client 3"):
            lying.clients[5].share(letter)


def test_a_client_refuses_shares_that_were_changed_or_sent_to_another() -> None:
    party, number, letter = at(SecureStage.MASK)
    refuses(party, number, letter[:-1] + bytes([letter[-1] ^ 1]), "does not open")
    party, number, letter = at(SecureStage.MASK)
    refuses(party, number, party.letters[7], "does not open")
    party, number, letter = at(SecureStage.MASK)
    shares = SealedShares.decode(letter).shares
    refuses(party, number, SealedShares(shares={99: shares[3]}).encode(), "client 99, who is not on the list")
    party, number, letter = at(SecureStage.MASK)
    fewer = SealedShares(shares={3: shares[3]}).encode()
    refuses(party, number, fewer, "2 clients have shared their secrets, and it takes 3")
    party, number, letter = at(SecureStage.MASK)
    none = SealedShares(shares={}).encode()
    refuses(party, number, none, "1 clients have shared their secrets, and it takes 3")


def test_a_client_refuses_an_input_beyond_its_bounds() -> None:
    party, number, letter = at(SecureStage.MASK)
    fixed = party.terms.fixed
    good = party.inputs[number]
    for wrong, why in (
        (good[:-1], "6 words of 64 bits"),
        (good.astype(np.uint32), "6 words of 64 bits"),
        (np.array([*good[:-1], fixed.max_weight + 1], np.uint64), "room"),
        (np.array([*good[:-1], 0], np.uint64), "room"),
        (np.array([2 * fixed.most, *good[1:-1], 1], np.uint64), "room"),
    ):
        party.clients[number].stage = SecureStage.MASK
        with pytest.raises(ProtocolRefused, match=why):
            party.clients[number].mask(letter, wrong)


@pytest.mark.parametrize(
    ("survivors", "dropped", "why"),
    [
        ((3, 5, 7, 9), (9,), "client 9 is said to have survived and to have dropped out"),
        ((3, 5), (7, 9), "2 clients have survived, and it takes 3"),
        ((3, 7, 9), (5,), "client 5 is not among the survivors"),
        ((3, 5, 7), (), "not those whose shares"),
        ((3, 5, 7, 9, 11), (), "not those whose shares"),
    ],
)
def test_a_client_refuses_lists_of_survivors_that_do_not_add_up(
    survivors: tuple[int, ...], dropped: tuple[int, ...], why: str
) -> None:
    party, number, _ = at(SecureStage.CONFIRM)
    refuses(party, number, SurvivorList(survivors=survivors, dropped=dropped).encode(), why)


def test_a_client_unmasks_once_and_only_what_enough_have_signed() -> None:
    party, number, letter = at(SecureStage.UNMASK)
    right = UnmaskRequest.decode(letter)
    other = SurvivorList(survivors=(3, 5, 7), dropped=(9,))
    refuses(
        party, number, UnmaskRequest(lists=other, signatures=right.signatures).encode(), "other survivors"
    )
    party, number, _ = at(SecureStage.UNMASK)
    few = dict(list(right.signatures.items())[:2])
    refuses(party, number, UnmaskRequest(lists=right.lists, signatures=few).encode(), "2 clients signed")
    party, number, _ = at(SecureStage.UNMASK)
    swapped = {**right.signatures, 3: right.signatures[7]}
    refuses(party, number, UnmaskRequest(lists=right.lists, signatures=swapped).encode(), "client 3 did not")
    party, number, _ = at(SecureStage.UNMASK)
    stranger = {**right.signatures, 99: right.signatures[7]}
    refuses(
        party, number, UnmaskRequest(lists=right.lists, signatures=stranger).encode(), "client 99 did not"
    )
    party, number, letter = at(SecureStage.UNMASK)
    client = party.clients[number]
    reply = UnmaskReply.decode(client.unmask(letter))
    assert (tuple(reply.seeds), tuple(reply.keys)) == ((3, 5, 7, 9), ())
    for again in (letter, UnmaskRequest(lists=other, signatures=right.signatures).encode()):
        with pytest.raises(ProtocolRefused, match="is at DONE, and was asked for UNMASK"):
            client.unmask(again)


def test_a_server_that_tells_clients_different_survivors_gets_no_signatures_it_can_use() -> None:
    """Half of the clients are told that 9 dropped out, so as to get at its key as well as at its seed."""
    party, _, _ = at(SecureStage.CONFIRM, clients=7)
    everybody = tuple(party.roster)
    lists = [
        SurvivorList(survivors=everybody, dropped=()),
        SurvivorList(survivors=tuple(k for k in everybody if k != 9), dropped=(9,)),
    ]
    told = {client: lists[turn % 2] for turn, client in enumerate(k for k in everybody if k != 9)}
    signed = {client: party.clients[client].confirm(one.encode()) for client, one in told.items()}
    for client, one in told.items():
        for given in (signed, {k: s for k, s in signed.items() if told[k] is one}):
            number = party.clients[client]
            number.stage = SecureStage.UNMASK
            with pytest.raises(ProtocolRefused, match=r"did not sign|clients signed the survivors"):
                number.unmask(UnmaskRequest(lists=one, signatures=given).encode())


def test_a_server_that_gives_clients_different_lists_of_keys_is_found_out_before_anything_is_unmasked() -> (
    None
):
    """Client 3 was not told of 9, who then leaves: everything fits, but for the signatures."""
    party, _, full = at(SecureStage.SHARE)
    three = [one for one in KeyList.decode(full).advertisements if one.client != 9]
    lists = {3: KeyList(advertisements=tuple(three)).encode(), 5: full, 7: full}
    shared = {k: SealedShares.decode(party.clients[k].share(letter)).shares for k, letter in lists.items()}
    for client in lists:
        mail = {source: sealed[client] for source, sealed in shared.items() if source != client}
        party.clients[client].mask(Delivery(shares=mail).encode(), party.inputs[client])
    survivors = SurvivorList(survivors=(3, 5, 7), dropped=())
    signed = {client: party.clients[client].confirm(survivors.encode()) for client in lists}
    request = UnmaskRequest(lists=survivors, signatures=signed).encode()
    for client, liar in ((3, 5), (5, 3), (7, 3)):
        with pytest.raises(ProtocolRefused, match=f"client {liar} did not sign"):
            party.clients[client].unmask(request)


def test_steps_out_of_order_are_refused() -> None:
    party = Party(4)
    client = party.clients[3]
    with pytest.raises(ProtocolRefused, match="is at ADVERTISE, and was asked for UNMASK"):
        client.unmask(b"")
    client.advertise()
    with pytest.raises(ProtocolRefused, match="asked for ADVERTISE"):
        client.advertise()


def test_keys_are_drawn_anew_for_every_round() -> None:
    party = Party(4)
    seen = set()
    for _ in range(2):
        one = Advertisement.decode(party.client(3).advertise())
        seen |= {one.channel_key, one.mask_key, one.commitment}
    assert len(seen) == 6


# What the server refuses of clients


def test_the_server_refuses_strangers_doubles_and_what_is_not_as_it_should_be() -> None:
    party = Party(4)
    mine = party.clients[3].advertise()
    for sender, data, why in (
        (99, mine, "client 99 is not asked at ADVERTISE"),
        (5, mine, "client 5 is not one of those"),
        (3, mine[:-1], "228 bytes"),
        (3, mine[:-1] + bytes([mine[-1] ^ 1]), "signature of client 3"),
    ):
        with pytest.raises(ProtocolRefused, match=why):
            party.server.receive(sender, data)
    party.server.receive(3, mine)
    with pytest.raises(ProtocolRefused, match="client 3 has answered already"):
        party.server.receive(3, mine)
    assert party.server.waits_for == {5, 7, 9}

    party, number, letter = at(SecureStage.SHARE)
    shares = SealedShares.decode(party.clients[number].share(letter)).shares
    with pytest.raises(ProtocolRefused, match="not a share for each"):
        party.server.receive(number, SealedShares(shares={3: shares[3]}).encode())
    with pytest.raises(ProtocolRefused, match=r"needs .* bytes"):
        party.server.receive(number, b"\xff\xff\xff\xff")

    party, number, letter = at(SecureStage.MASK)
    with pytest.raises(ProtocolRefused, match="48 bytes"):
        party.server.receive(number, bytes(47))

    party, number, letter = at(SecureStage.CONFIRM)
    with pytest.raises(ProtocolRefused, match="signature of client 5"):
        party.server.receive(number, bytes(64))

    party, number, letter = at(SecureStage.UNMASK)
    reply = UnmaskReply.decode(party.clients[number].unmask(letter))
    with pytest.raises(ProtocolRefused, match="not sent the shares"):
        party.server.receive(number, UnmaskReply(seeds={}, keys=reply.seeds).encode())


@pytest.mark.parametrize(
    ("of", "added", "why"),
    [
        ("seeds", 1, "client 3's seed are not of what it had committed to"),
        ("keys", 1 << 10, "client 9's mask key are not of the one it had advertised"),
        ("seeds", 1 << 500, "client 3: shares do not belong to one secret"),
        ("keys", 1 << 500, "client 9: shares do not belong to one secret"),
    ],
)
def test_wrong_shares_abandon_the_round_and_make_no_wrong_sum(of: str, added: int, why: str) -> None:
    """By one, which moves the secret by a little and leaves it one, and by more than a secret has room for."""
    party = Party(4)
    party.play(SecureStage.UNMASK, {9: SecureStage.MASK})
    for number, letter in party.letters.items():
        reply = UnmaskReply.decode(party.answer(number, letter))
        if number == 3:
            wrong = {
                client: ((int.from_bytes(share, "big") + added) % PRIME).to_bytes(SHARE_BYTES, "big")
                for client, share in getattr(reply, of).items()
            }
            reply = replace(reply, **{of: wrong})
        party.server.receive(number, reply.encode())
    with pytest.raises(RoundAbandoned, match=why):
        party.server.advance()
    with pytest.raises(ProtocolRefused, match="no sum"):
        party.server.result()


def test_terms_that_are_not_safe_are_refused() -> None:
    terms = Party(6).terms
    for changed, why in (
        ({"threshold": 4}, "threshold=4: must be from 5"),
        ({"threshold": 7}, "to all 6 clients"),
        ({"clients": 2, "threshold": 2}, "fewer than 3 clients hides none"),
        ({"round_id": b"1"}, "32 bytes"),
        ({"length": 1}, "length=1"),
        ({"fixed": replace(terms.fixed, ring=16)}, "overflow"),
    ):
        with pytest.raises(UserError, match=why):
            replace(terms, **changed)  # type: ignore[arg-type]
    for clients in range(3, 300):
        assert 3 * fewest_clients(clients) > 2 * clients >= 3 * (fewest_clients(clients) - 1)


# What the server sees


def test_a_late_input_can_never_be_unmasked() -> None:
    """The server has dropped 9, and rebuilt its mask key; then 9's masked input comes after all."""
    party = Party(4, items=400)
    party.play(SecureStage.MASK)
    seed = party.clients[9]._seed
    late = party.answer(9, party.letters[9])
    party.play(SecureStage.UNMASK, {9: SecureStage.MASK})
    with pytest.raises(ProtocolRefused, match="client 9 is not asked at UNMASK: it is unknown or too late"):
        party.server.receive(9, late)
    replies = {k: UnmaskReply.decode(party.answer(k, letter)) for k, letter in party.letters.items()}
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
        for number, letter in party.letters.items():
            words = MaskedInput.decode(party.answer(number, letter), party.terms).words
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


# What it costs


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
