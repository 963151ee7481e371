"""What secure aggregation stands on: published test vectors, secret sharing, and sums in fixed point."""

from __future__ import annotations

import sys
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words
from manyhands.strategies.federated.secure.primitives import (
    PRIME,
    SHARE_BYTES,
    ProtocolRefused,
    agree,
    combine,
    derive,
    digest_of,
    mask_words,
    open_sealed,
    public_identity,
    public_key,
    seal,
    sign,
    split,
    verify,
)
from securely import drawing

h = bytes.fromhex


def mean_of(fixed: FixedPoint, words: Words) -> np.ndarray:
    items, weight = fixed.decode(words)
    return items.astype(np.float64) * (fixed.step / weight)


def test_x25519_is_that_of_rfc_7748() -> None:
    """Section 6.1."""
    alice = h("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    bob = h("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert public_key(alice) == h("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    assert public_key(bob) == h("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    shared = h("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")
    assert agree(alice, public_key(bob)) == agree(bob, public_key(alice)) == shared
    with pytest.raises(ProtocolRefused, match="public key is invalid"):
        agree(alice, bytes(32))  # with zero everybody agrees on zero


def test_hkdf_is_that_of_rfc_5869() -> None:
    """Appendix A.1."""
    found = derive(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert found == h("3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865")


def test_sealing_is_nists_aes_256_gcm() -> None:
    """Test case 16 of the submission to NIST."""
    key = h("feffe9928665731c6d6a8f9467308308") * 2
    nonce = h("cafebabefacedbaddecaf888")
    text = h(
        "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a721c3c0c95956809532fcf0e2449a6b525b16aedf5"
        "aa0de657ba637b39"
    )
    context = h("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    sealed = seal(key, text, context, lambda count: nonce[:count])
    assert sealed == nonce + h(
        "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa8cb08e48590dbb3da7b08b1056828838c5f61e63"
        "93ba7a0abcc9f66276fc6ece0f4e1768cddf8853bb2d551b"
    )
    assert open_sealed(key, sealed, context) == text
    for broken, bound in (
        (sealed, context + b"!"),
        (sealed[:-1] + bytes([sealed[-1] ^ 1]), context),
        (sealed[:20] + bytes([sealed[20] ^ 1]) + sealed[21:], context),
        (b"", context),
    ):
        with pytest.raises(ProtocolRefused, match="cannot be opened"):
            open_sealed(key, broken, bound)


def test_identities_are_those_of_rfc_8032() -> None:
    """Section 7.1, test 1."""
    secret = h("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = public_identity(secret)
    assert public == h("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    signature = sign(secret, b"")
    assert signature == h(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0"
        "595bbe24655141438e7a100b"
    )
    assert verify(public, signature, b"")
    assert not verify(public, signature, b"x")
    assert not verify(public, signature[:-1], b"")


def test_masks_are_nists_aes_256_in_counter_mode() -> None:
    """The zero block under the zero key, as in GCM's test case 14; and the same bytes whatever the words."""
    words = mask_words(bytes(32), 5, np.dtype(np.uint32))
    assert words.tobytes()[:16] == h("dc95c078a2408989ad48a21492842087")
    assert words.dtype == np.uint32
    assert mask_words(bytes(32), 2, np.dtype(np.uint64)).tobytes() == words.tobytes()[:16]


def test_parts_of_a_digest_do_not_run_together() -> None:
    assert (
        len({digest_of(b"ab", b"c"), digest_of(b"a", b"bc"), digest_of(b"abc"), digest_of(b"abc", b"")}) == 4
    )


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[tls\]'"):
        public_key(bytes(32))


SECRET = bytes(range(32))


def test_every_t_shares_give_the_secret_and_no_fewer_do() -> None:
    points = [1, 4, 5, 9, 12, 30]
    for threshold in range(1, len(points) + 1):
        shares = split(SECRET, threshold, points, drawing(threshold))
        for chosen in combinations(shares.items(), threshold):
            assert combine(chosen, threshold) == SECRET
        if threshold > 1:
            fewer = list(shares.items())[: threshold - 1]
            with pytest.raises(ProtocolRefused, match="for a threshold of"):
                combine(fewer, threshold)


@settings(max_examples=20, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), seed=st.integers(0, 10**6))
def test_too_few_shares_fit_every_secret(secret: bytes, seed: int) -> None:
    """For t - 1 shares and any secret there is one polynomial, so that they tell nothing: here it is, by Lagrange."""
    threshold, points = 4, [2, 3, 7, 11]
    shares = split(SECRET, threshold, points, drawing(seed))
    known = {0: int.from_bytes(secret, "big")} | {
        point: int.from_bytes(shares[point], "big") for point in points[:3]
    }
    last = 0
    for mine, value in known.items():
        above, below = 1, 1
        for other in known:
            if other != mine:
                above, below = above * (11 - other), below * (mine - other)
        last += value * above * pow(below, -1, PRIME)
    would_be = (last % PRIME).to_bytes(SHARE_BYTES, "big")
    assert combine([*[(point, shares[point]) for point in points[:3]], (11, would_be)], 4) == secret


def test_one_share_has_the_same_distribution_for_every_secret() -> None:
    """The top byte of a share over many splittings: chi-square with 255 degrees of freedom, of two secrets."""
    for secret in (bytes(32), b"\xff" * 32):
        draw = drawing(5)
        tops = [(split(secret, 2, [1, 2], draw)[1][2]) for _ in range(4096)]
        counts = np.bincount(tops, minlength=256)
        assert ((counts - 16) ** 2 / 16).sum() < 255 + 6 * (2 * 255) ** 0.5


def test_shares_that_were_changed_doubled_or_mixed_are_refused() -> None:
    shares = list(split(SECRET, 3, [1, 2, 3, 4], drawing(0)).items())
    others = list(split(bytes(32), 3, [1, 2, 3, 4], drawing(1)).items())
    point, share = shares[0]
    changed = (point, share[:-1] + bytes([share[-1] ^ 1]))
    for wrong, why in (
        ([changed, *shares[1:]], "do not belong"),
        ([*shares[:3], others[3]], "do not belong"),
        ([others[0], *shares[1:3]], "do not belong"),
        ([shares[0], shares[0], shares[1]], "two shares have the point 1"),
        ([(0, share), *shares[1:3]], "is invalid"),
        ([(point, share[1:]), *shares[1:3]], "is invalid"),
        ([(point, b"\xff" * SHARE_BYTES), *shares[1:3]], "is invalid"),
    ):
        with pytest.raises(ProtocolRefused, match=why):
            combine(wrong, 3)
    assert combine([changed, *shares[1:3]], 3) != SECRET, (
        "none is left over to notice it: a server has a digest"
    )
    for threshold, points in ((3, [1, 2]), (0, [1]), (2, [1, 1]), (2, [0, 1])):
        with pytest.raises(ValueError, match=r"threshold|points"):
            split(SECRET, threshold, points)


def test_a_sum_has_room_for_the_most_clients_and_for_one_more_it_is_refused() -> None:
    for ring in (16, 32, 64):
        fixed = FixedPoint(clip=2.0, bits=8, max_weight=20, ring=ring)
        clients = fixed.most_clients
        assert clients * 20 * 127 < 2 ** (ring - 1) <= (clients + 1) * 20 * 127 + 1
        fixed.check_capacity(clients)
        with pytest.raises(UserError, match=rf"bits=8: {clients + 1} clients .* room for {clients}"):
            fixed.check_capacity(clients + 1)
        for sign_of in (1, -1):
            words = fixed.encode(np.array([sign_of * 2.0]), 20)
            total = (words.astype(object) * clients % 2**ring).astype(
                fixed.dtype
            )  # so many times the largest
            items, weight = fixed.decode(total)
            assert items.tolist() == [sign_of * clients * 20 * 127]
            assert weight == clients * 20
            assert mean_of(fixed, total).tolist() == [sign_of * 2.0]


def test_the_first_client_too_many_would_overflow() -> None:
    """The bound is not a cautious one: with one client more the largest sum is wrong."""
    fixed = FixedPoint(clip=1.0, bits=8, max_weight=1, ring=16)
    clients = fixed.most_clients + 1
    total = (fixed.encode(np.array([1.0]), 1).astype(object) * clients % 2**16).astype(np.uint16)
    assert fixed.decode(total)[0].tolist() != [clients * 127]


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(-3, 3), min_size=1, max_size=8),
    weight=st.integers(1, 50),
    bits=st.integers(2, 32),
)
def test_one_clients_mean_is_its_clipped_update_to_half_a_step(
    values: list[float], weight: int, bits: int
) -> None:
    fixed = FixedPoint(clip=2.0, bits=bits, max_weight=40, ring=64)
    words = fixed.encode(np.array(values), weight)
    error = np.abs(mean_of(fixed, words) - np.clip(values, -2, 2)).max()
    assert error <= fixed.step / 2 * (1 + 1e-9)
    assert fixed.decode(words)[1] == min(weight, 40), "who says more counts for the bound"


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(broken: float) -> None:
    with pytest.raises(UserError, match="item 1 of the update is"):
        FixedPoint().encode(np.array([0.5, broken]), 1)


def test_settings_of_fixed_point_that_make_no_sense_are_refused() -> None:
    for fields, why in (
        ({"clip": 0.0}, "range=0"),
        ({"clip": np.nan}, "range=nan"),
        ({"bits": 1}, "bits=1"),
        ({"bits": 33}, "bits=33"),
        ({"max_weight": 0}, "max_weight=0"),
        ({"ring": 24}, "ring=24"),
    ):
        with pytest.raises(UserError, match=why):
            FixedPoint(**fields)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="weight=0"):
        FixedPoint().encode(np.array([0.5]), 0)
