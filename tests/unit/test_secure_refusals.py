"""What clients refuse of a server that lies, and a server of clients that do, in secure rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint
from manyhands.strategies.federated.secure.primitives import PRIME, SHARE_BYTES, ProtocolRefused, sign
from manyhands.strategies.federated.secure.secure_messages import (
    Advertisement,
    Delivery,
    KeyList,
    SealedShares,
    SurvivorList,
    UnmaskReply,
    UnmaskRequest,
    fewest_clients,
)
from manyhands.strategies.federated.secure.secure_protocol import RoundAbandoned, SecureStage
from securely import Party


def at(stage: SecureStage, clients: int = 4, **more: Any) -> tuple[Party, int, bytes]:
    """A round in which everybody has yet to answer `stage`; its second client, and what that was sent."""
    party = Party(clients, **more)
    party.play(stage)
    number = list(party.roster)[1]
    return party, number, party.messages[number]


def refuses(party: Party, number: int, message: bytes, why: str) -> None:
    """The client refuses, and answers nothing more, not even what is right."""
    right = party.messages[number]
    with pytest.raises(ProtocolRefused, match=why):
        party.answer(number, message)
    for step in ("share", "confirm", "unmask"):
        with pytest.raises(ProtocolRefused, match="is at ABANDONED"):
            getattr(party.clients[number], step)(right)


def forged(message: bytes, other: int, **changed: Any) -> bytes:
    """A list of keys in which one client's advertisement was changed."""
    listed = KeyList.decode(message).advertisements
    return KeyList(
        advertisements=tuple(replace(one, **changed) if one.client == other else one for one in listed)
    ).encode()


def test_a_client_refuses_a_list_of_keys_that_is_not_as_signed() -> None:
    party, number, message = at(SecureStage.SHARE)
    refuses(party, number, forged(message, 3, mask_key=bytes(range(32))), "signature of client 3 .* is wrong")
    party, number, message = at(SecureStage.SHARE)
    refuses(party, number, forged(message, 3, signature=bytes(64)), "signature of client 3 .* is wrong")
    party, number, message = at(SecureStage.SHARE)
    refuses(party, number, forged(message, 3, terms=bytes(32)), "client 3 has signed keys of another round")
    party, number, message = at(SecureStage.SHARE)
    refuses(party, number, forged(message, 3, model=bytes(32)), "client 3 received another model")
    party, number, message = at(SecureStage.SHARE)
    refuses(
        party,
        number,
        forged(message, number, mask_key=bytes(range(32))),
        "does not hold the keys of client 5",
    )
    party, number, message = at(SecureStage.SHARE)
    first = KeyList.decode(message).advertisements[0]
    refuses(party, number, forged(message, 7, mask_key=first.mask_key), "public key is on the list twice")
    party, number, message = at(SecureStage.SHARE)
    fewer = KeyList(advertisements=KeyList.decode(message).advertisements[:2]).encode()
    refuses(party, number, fewer, "2 clients have keys, but 3 are needed")
    party, number, message = at(SecureStage.SHARE)
    refuses(party, number, message + message[4 : 4 + 228], "ends 228 bytes before its body")
    party, number, message = at(SecureStage.SHARE)
    twice = (5).to_bytes(4, "little") + message[4:] + message[-228:]
    refuses(party, number, twice, "client 9 is in a table twice")
    party, number, message = at(SecureStage.SHARE)
    swapped = message[:4] + message[-228:] + message[4:-228]
    refuses(party, number, swapped, "the clients of a KeyList are out of order")
    party, number, message = at(SecureStage.SHARE)
    foreign_row = Party(4, seed=9)
    foreign_row.play(SecureStage.SHARE)
    refuses(party, number, foreign_row.messages[number], "does not hold the keys of client 5")


def test_a_client_with_another_model_or_of_another_round_is_not_taken_in() -> None:
    """A server that gives out different models is found out: neither keys nor shares fit."""
    party = Party(4)
    other = party.client(3, model=bytes(32)).advertise()
    with pytest.raises(ProtocolRefused, match="client 3 received another model"):
        party.server.receive(3, other)
    replayed = party.client(3, terms=replace(party.terms, round_id=bytes(32))).advertise()
    with pytest.raises(ProtocolRefused, match="of another round"):
        party.server.receive(3, replayed)
    for one in (other, replayed):  # a server that lies does not mind, and the clients do
        lying = Party(4)
        lying.play(SecureStage.SHARE)
        listed = KeyList.decode(lying.messages[5]).advertisements
        message = KeyList(advertisements=(Advertisement.decode(one), *listed[1:])).encode()
        with pytest.raises(ProtocolRefused, match="client 3"):
            lying.clients[5].share(message)


def test_a_client_refuses_shares_that_were_changed_or_sent_to_another() -> None:
    party, number, message = at(SecureStage.MASK)
    refuses(party, number, message[:-1] + bytes([message[-1] ^ 1]), "cannot be opened")
    party, number, message = at(SecureStage.MASK)
    refuses(party, number, party.messages[7], "cannot be opened")
    party, number, message = at(SecureStage.MASK)
    shares = SealedShares.decode(message).shares
    refuses(party, number, SealedShares(shares={99: shares[3]}).encode(), "client 99, not on the list")
    party, number, message = at(SecureStage.MASK)
    fewer = SealedShares(shares={3: shares[3]}).encode()
    refuses(party, number, fewer, "2 clients have shared their secrets, but 3 are needed")
    party, number, message = at(SecureStage.MASK)
    none = SealedShares(shares={}).encode()
    refuses(party, number, none, "1 clients have shared their secrets, but 3 are needed")


def test_a_client_refuses_an_input_beyond_its_bounds() -> None:
    party, number, message = at(SecureStage.MASK)
    fixed = party.terms.fixed
    good = party.inputs[number]
    for wrong, why in (
        (good[:-1], "6 words of 64 bits"),
        (good.astype(np.uint32), "6 words of 64 bits"),
        (np.array([*good[:-1], fixed.max_weight + 1], np.uint64), "range"),
        (np.array([*good[:-1], 0], np.uint64), "range"),
        (np.array([2 * fixed.most, *good[1:-1], 1], np.uint64), "range"),
    ):
        party.clients[number].stage = SecureStage.MASK
        with pytest.raises(ProtocolRefused, match=why):
            party.clients[number].mask(message, wrong)


@pytest.mark.parametrize(
    ("survivors", "dropped", "why"),
    [
        ((3, 5, 7, 9), (9,), "client 9 is listed both as a survivor and as dropped"),
        ((3, 5), (7, 9), "2 clients have survived, but 3 are needed"),
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
    party, number, message = at(SecureStage.UNMASK)
    right = UnmaskRequest.decode(message)
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
    foreign_row = {**right.signatures, 99: right.signatures[7]}
    refuses(
        party, number, UnmaskRequest(lists=right.lists, signatures=foreign_row).encode(), "client 99 did not"
    )
    party, number, message = at(SecureStage.UNMASK)
    client = party.clients[number]
    reply = UnmaskReply.decode(client.unmask(message))
    assert (tuple(reply.seeds), tuple(reply.keys)) == ((3, 5, 7, 9), ())
    for again in (message, UnmaskRequest(lists=other, signatures=right.signatures).encode()):
        with pytest.raises(ProtocolRefused, match="is at DONE, but was asked for UNMASK"):
            client.unmask(again)


def test_a_server_that_tells_clients_different_survivors_gets_no_signatures_it_can_use() -> None:
    """Half of the clients are told that 9 dropped out, so as to get at its key as well as at its seed."""
    party, _, _ = at(SecureStage.CONFIRM, clients=7)
    everybody = tuple(party.roster)
    lists = [
        SurvivorList(survivors=everybody, dropped=()),
        SurvivorList(survivors=tuple(k for k in everybody if k != 9), dropped=(9,)),
    ]
    report = {client: lists[turn % 2] for turn, client in enumerate(k for k in everybody if k != 9)}
    signed = {client: party.clients[client].confirm(one.encode()) for client, one in report.items()}
    for client, one in report.items():
        for given in (signed, {k: s for k, s in signed.items() if report[k] is one}):
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
    shared = {k: SealedShares.decode(party.clients[k].share(message)).shares for k, message in lists.items()}
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
    with pytest.raises(ProtocolRefused, match="is at ADVERTISE, but was asked for UNMASK"):
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
        (99, mine, "client 99 was not asked at ADVERTISE"),
        (5, mine, "client 5 was not asked"),
        (3, mine[:-1], "needs 64 bytes, but 63 are left"),
        (3, mine[:-1] + bytes([mine[-1] ^ 1]), "signature of client 3"),
    ):
        with pytest.raises(ProtocolRefused, match=why):
            party.server.receive(sender, data)
    party.server.receive(3, mine)
    with pytest.raises(ProtocolRefused, match="client 3 has already answered"):
        party.server.receive(3, mine)
    assert party.server.waits_for == {5, 7, 9}

    party, number, message = at(SecureStage.SHARE)
    shares = SealedShares.decode(party.clients[number].share(message)).shares
    with pytest.raises(ProtocolRefused, match="not send a share for each"):
        party.server.receive(number, SealedShares(shares={3: shares[3]}).encode())
    with pytest.raises(ProtocolRefused, match="4294967295 announced"):
        party.server.receive(number, b"\xff\xff\xff\xff")

    party, number, message = at(SecureStage.MASK)
    with pytest.raises(ProtocolRefused, match="48 bytes"):
        party.server.receive(number, bytes(47))

    party, number, message = at(SecureStage.CONFIRM)
    with pytest.raises(ProtocolRefused, match="signature of client 5"):
        party.server.receive(number, bytes(64))

    party, number, message = at(SecureStage.UNMASK)
    reply = UnmaskReply.decode(party.clients[number].unmask(message))
    with pytest.raises(ProtocolRefused, match="not send the shares"):
        party.server.receive(number, UnmaskReply(seeds={}, keys=reply.seeds).encode())


@pytest.mark.parametrize(
    ("of", "added", "why"),
    [
        ("seeds", 1, "client 3's seed do not match its commitment"),
        ("keys", 1 << 10, "client 9's mask key do not match the key it advertised"),
        ("seeds", 1 << 500, "client 3: the shares do not belong to one secret"),
        ("keys", 1 << 500, "client 9: the shares do not belong to one secret"),
    ],
)
def test_wrong_shares_abandon_the_round_and_make_no_wrong_sum(of: str, added: int, why: str) -> None:
    """By one, which moves the secret by a little and leaves it one, and by more than a secret has room for."""
    party = Party(4)
    party.play(SecureStage.UNMASK, {9: SecureStage.MASK})
    for number, message in party.messages.items():
        reply = UnmaskReply.decode(party.answer(number, message))
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
        ({"threshold": 4}, "threshold=4: must be between 5"),
        ({"threshold": 7}, "and the 6 clients"),
        ({"clients": 2, "threshold": 2}, "fewer than 3 clients protects none"),
        ({"round_id": b"1"}, "32 bytes"),
        ({"length": 1}, "length=1"),
        ({"fixed": replace(terms.fixed, ring=16)}, "overflow"),
    ):
        with pytest.raises(UserError, match=why):
            replace(terms, **changed)  # type: ignore[arg-type]
    for clients in range(3, 300):
        assert 3 * fewest_clients(clients) > 2 * clients >= 3 * (fewest_clients(clients) - 1)


def test_the_server_refuses_a_key_with_which_nobody_could_agree() -> None:
    """One of the points of small order (RFC 7748, section 6.1): every other client would leave the round."""
    party = Party(4)
    for low in (bytes(32), (1).to_bytes(32, "little")):
        mine = Advertisement.decode(party.client(3).advertise())
        for field in ("mask_key", "channel_key"):
            wrong = replace(mine, **{field: low})
            wrong = replace(wrong, signature=sign(party.identities[3], wrong.signed))
            with pytest.raises(ProtocolRefused, match="public key is invalid"):
                party.server.receive(3, wrong.encode())
    assert party.server.waits_for == {3, 5, 7, 9}


@pytest.mark.parametrize("ring", [64, 32])
def test_a_client_that_masks_wrongly_ends_the_round_and_not_the_model(ring: int) -> None:
    """The sum is random then, and moved the model to anywhere; a weight of nought would be divided by."""
    party = Party(4, ring=ring, bits=8)
    party.play(SecureStage.MASK)
    for number, message in party.messages.items():
        answer = party.answer(number, message)
        party.server.receive(number, answer if number != 7 else party.draw(len(answer)))
    party.messages = party.server.advance()
    with pytest.raises(RoundAbandoned, match="broke the terms"):
        party.play(SecureStage.DONE)
    assert not party.server._sum.any()
    with pytest.raises(ProtocolRefused, match="there is no sum"):
        party.server.result()


def test_a_sum_is_one_that_clients_within_the_bounds_can_have_sent() -> None:
    fixed = FixedPoint(clip=1.0, bits=8, max_weight=10)
    most = 3 * 10 * fixed.most
    for items, weight, may in (
        ((most, -most), 30, True),
        ((0, 0), 3, True),
        ((0, 0), 2, False),  # each weighs one at least
        ((0, 0), 31, False),
        ((0, 0), 0, False),
        ((0, 0), -3, False),
        ((most + 1, 0), 30, False),
        ((0, -most - 1), 30, False),
        ((-(2**63), 0), 30, False),
    ):
        words = np.array([*items, weight], np.int64).view(np.uint64)
        assert fixed.may_be_sum(words, 3) is may, (items, weight)


def test_who_is_dropped_is_not_waited_for_and_may_not_come_back() -> None:
    party = Party(4)
    party.server.drop(9)
    assert party.server.waits_for == {3, 5, 7}
    with pytest.raises(ProtocolRefused, match="client 9 was not asked"):
        party.server.receive(9, party.clients[9].advertise())
    party.server.receive(3, party.clients[3].advertise())
    party.server.drop(3)  # it has answered, and that counts
    for number in (5, 7):
        party.server.receive(number, party.clients[number].advertise())
    assert not party.server.waits_for
    assert party.server.advance().keys() == {3, 5, 7}
