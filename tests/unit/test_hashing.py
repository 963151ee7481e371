"""XXH64 gives its published values, and tells any two memories apart that differ."""

import numpy as np
import pytest

from manyhands.native.hashing import xxh64


def as_bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", 0xEF46DB3751D8E999),
        (b"a", 0xD24EC4F1A98C6E5B),
        (b"abc", 0x44BC2CF5AD770999),
        (b"Nobody inspects the spammish repetition", 0xFBCEA83C8A378BF1),
    ],
)
def test_published_values(text: bytes, expected: int) -> None:
    assert xxh64(as_bytes(text)) == expected


def test_every_bit_and_the_length_and_the_seed_count() -> None:
    data = np.arange(77, dtype=np.uint8)
    hashes = {xxh64(data), xxh64(data, 1), xxh64(data[:76])}
    for place in range(77):
        for bit in range(8):
            changed = data.copy()
            changed[place] ^= 1 << bit
            hashes.add(xxh64(changed))
    assert len(hashes) == 3 + 77 * 8
