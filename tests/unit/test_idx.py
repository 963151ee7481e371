"""The idx reader gives back what was written, and nothing but one whole idx file gets past it."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from manyhands.data.file_reader import read_idx
from manyhands.errors import DataError

CODES = {"uint8": 0x08, "int8": 0x09, "int16": 0x0B, "int32": 0x0C, "float32": 0x0D, "float64": 0x0E}


def idx_bytes(array: NDArray[Any]) -> bytes:
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.name], array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


SMALL = idx_bytes(np.arange(12, dtype=np.int16).reshape(3, 4))


@pytest.fixture(params=["plain", "gzip"])
def packed(request: pytest.FixtureRequest) -> Any:
    return (lambda content: content) if request.param == "plain" else gzip.compress


@pytest.mark.parametrize("name", CODES)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 5), (0, 4)])
def test_reads_what_was_written(tmp_path: Path, packed: Any, name: str, shape: tuple[int, ...]) -> None:
    low, high = (-100, 100) if name != "uint8" else (0, 256)
    array = np.random.default_rng(0).integers(low, high, shape).astype(name)
    path = tmp_path / "file"
    path.write_bytes(packed(idx_bytes(array)))
    found = read_idx(path)
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype
    assert found.dtype.isnative
    assert found.flags.writeable


def test_a_file_cut_anywhere_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    for length in range(len(SMALL)):
        path.write_bytes(SMALL[:length])
        with pytest.raises(DataError, match=rf"cut, byte {length}: the file is truncated"):
            read_idx(path)


def test_a_gzip_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    compressed = gzip.compress(SMALL)
    path = tmp_path / "cut.gz"
    for length in range(2, len(compressed)):
        path.write_bytes(compressed[:length])
        with pytest.raises(DataError, match=r"cut\.gz, uncompressed byte \d+: the file is truncated"):
            read_idx(path)


def test_the_place_in_a_gzip_file_is_how_far_it_was_good(tmp_path: Path) -> None:
    """Incompressible bytes stored as they are: a file cut at half gives about half of them."""
    noise = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint8)
    compressed = gzip.compress(idx_bytes(noise), compresslevel=0)
    path = tmp_path / "half.gz"
    path.write_bytes(compressed[:50_000])
    with pytest.raises(DataError) as caught:
        read_idx(path)
    place = int(str(caught.value).split("uncompressed byte ")[1].split(":")[0])
    assert 49_900 < place <= 50_000


def test_a_damaged_gzip_file_is_never_taken_for_a_good_one(tmp_path: Path) -> None:
    """Any one byte changed: refused, or (in the header's time, flags and comment) without effect."""
    compressed = gzip.compress(SMALL, mtime=0)
    path = tmp_path / "bad.gz"
    refused = 0
    for place in range(len(compressed)):
        damaged = bytearray(compressed)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            found = read_idx(path)
        except DataError:
            refused += 1
        else:
            np.testing.assert_array_equal(found, np.arange(12, dtype=np.int16).reshape(3, 4))
    assert refused >= len(compressed) - 10


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "byte 0: the file is truncated: the magic number"),
        (b"PK\x03\x04rest", "byte 0: not an idx file: it starts with 50 4b"),
        (b"\0\x01\x08\x01", "byte 0: not an idx file"),
        (b"\0\0\x0a\x01\0\0\0\1\0", "byte 2: the idx type code is 0a; allowed: 08, 09, 0b, 0c, 0d, 0e"),
        (b"\0\0\x08\0\0", "byte 3: the idx file has 0 dimensions"),
        (b"\0\0\x08\xff" + b"\0" * 2000, "byte 3: the idx file has 255 dimensions"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "byte 4: 4294967295×4294967295×4294967295 items .* over the limit"),
        (SMALL + b"\0", f"byte {len(SMALL)}: the file continues after its last item"),
    ],
)
def test_another_format_is_refused_with_the_place(
    tmp_path: Path, packed: Any, content: bytes, message: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(packed(content))
    with pytest.raises(DataError, match=message):
        read_idx(path)


def test_items_beyond_the_limit_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(SMALL)
    assert read_idx(path, limit_bytes=24).shape == (3, 4)
    with pytest.raises(DataError, match="make 24 B, over the limit of 23 B"):
        read_idx(path, limit_bytes=23)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent cannot be read: No such file"):
        read_idx(tmp_path / "absent")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_idx(tmp_path)


def test_mnist_is_mnist(shared_data: Path) -> None:
    """Against what is known of the set: label counts, and the mean and deviation everyone normalises with."""
    images = read_idx(shared_data / "mnist" / "train-images-idx3-ubyte.gz")
    labels = read_idx(shared_data / "mnist" / "train-labels-idx1-ubyte.gz")
    assert (images.shape, images.dtype) == ((60000, 28, 28), np.uint8)
    counts = np.bincount(labels).tolist()
    assert counts == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    histogram = np.bincount(images.ravel(), minlength=256) / images.size
    mean = float((np.arange(256) * histogram).sum()) / 255
    deviation = float(np.sqrt((np.arange(256) ** 2 * histogram).sum() / 255**2 - mean**2))
    assert round(mean, 4) == 0.1307
    assert round(deviation, 4) == 0.3081
