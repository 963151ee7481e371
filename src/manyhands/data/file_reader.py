"""Data files read forward and exactly, gunzipped on the way; every error names the file and the offset.

Images are grey and of one size: a picture, an npy array, an idx file, or a JSON array. All come as (count, side, side)
in single precision, with values from 0 (black) to `white`. Pictures go from 0 to 255 and are scaled; the numbers of all
other files are those that the model was trained on.

Text for models of text is a user's file or the Python standard library, in windows of bytes. Tokens are the bytes of
the UTF-8 text: 256 of them, nothing to fit, every text can be encoded, and the loss in bits per byte compares between
any two models.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import json
import math
import os
import struct
import sysconfig
import tokenize
import zlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import DataError, UserError, check_count, format_bytes
from manyhands.native.closeable import Closeable

_Values = TypeVar("_Values")

IMAGE_FORMATS = ("auto", "picture", "npy", "idx", "json")
VOCABULARY = 256
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_LIMIT_BYTES = 1 << 31  # of a file of images
_MOST_DEEP = 5
_NO_NUMBERS = "rows of different lengths or values that are not numbers"
_PICTURES = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow has others start programs
_GZIP_MAGIC = b"\x1f\x8b"
_CHUNK_BYTES = 1 << 20


class DataFile(Closeable):
    """Reads a file from start to end; memory grows with what it really holds, offsets count uncompressed bytes."""

    def __init__(self, path: Path | str) -> None:
        self.path, self.offset, self.is_gzip = Path(path), 0, False
        self._stack = ExitStack()
        self._stream: io.BufferedReader | gzip.GzipFile | None = None

    def __enter__(self) -> Self:
        try:
            raw = self._stack.enter_context(self.path.open("rb"))
            self.is_gzip = raw.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            raw.seek(0)
        except OSError as error:
            self.close()
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        self._stream = self._stack.enter_context(gzip.GzipFile(fileobj=raw)) if self.is_gzip else raw
        return self

    def close(self) -> None:
        self._stack.close()
        self._stream = None

    def take(self, num_bytes: int, what: str) -> bytearray:
        """Exactly the next `num_bytes`, which hold `what`; a file that ends before that is truncated."""
        start = self.offset
        found = self.up_to(num_bytes)
        if len(found) < num_bytes:
            about = f"{what} at offset {start} should have {num_bytes} bytes, found {len(found)}"
            raise self.error(self.offset, f"the file is truncated: {about}")
        return found

    def rest(self, limit_bytes: int) -> bytearray:
        found = self.up_to(limit_bytes)
        if self.up_to(1):
            raise DataError(f"{self.path} holds more than {format_bytes(limit_bytes)}; give a smaller file")
        return found

    def error(self, offset: int, problem: str) -> DataError:
        unit = "uncompressed byte" if self.is_gzip else "byte"
        return DataError(f"{self.path}, {unit} {offset}: {problem}")

    def up_to(self, num_bytes: int) -> bytearray:
        if self._stream is None:
            raise ValueError(f"{self.path} is closed")
        found = bytearray()
        while len(found) < num_bytes:
            try:
                # read1 gives what is there, so that damage further on does not hide how far the file was good
                piece = self._stream.read1(min(num_bytes - len(found), _CHUNK_BYTES))
            except EOFError as error:
                raise self.error(self.offset, "the file is truncated: gzip ends early") from error
            except (OSError, zlib.error) as error:
                raise self.error(self.offset, f"the file is damaged: {error}") from error
            if not piece:
                break
            found += piece
            self.offset += len(piece)
        return found


_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_DIMS = 8  # no idx file in use has more than four; a larger count is a sign of another format


def read_idx(path: Path | str, *, limit_bytes: int = 2**31) -> NDArray[Any]:
    """The array in an idx file, the format of MNIST, plain or gzip, in the machine's byte order.

        offset 0   0 0          two zero bytes
        offset 2   type code    08 uint8 · 09 int8 · 0B int16 · 0C int32 · 0D float32 · 0E float64
        offset 3   d            number of dimensions
        offset 4   d × uint32   their sizes, big-endian
        then       the items, big-endian, last dimension fastest, and nothing after them

    Anything but one whole idx file raises DataError naming the file and the offset; items of more than
    `limit_bytes` are refused before they are read.
    """
    with DataFile(path) as file:
        dtype, shape = _read_header(file, limit_bytes)
        sizes = "×".join(map(str, shape))
        items, end = (
            file.take(math.prod(shape) * dtype.itemsize, f"{sizes} items of {dtype.name}"),
            file.offset,
        )
        if file.up_to(1):  # for gzip this also checks its checksum
            raise file.error(end, "the file continues after its last item; it should end there")
    array = np.frombuffer(items, dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _read_header(file: DataFile, limit_bytes: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    magic = file.take(4, "the magic number of an idx file")
    if magic[:2] != b"\0\0":
        raise file.error(0, f"not an idx file: it starts with {magic[:2].hex(' ')}, expected 00 00")
    if magic[2] not in _TYPES:
        known = ", ".join(f"{code:02x}" for code in _TYPES)
        raise file.error(2, f"the idx type code is {magic[2]:02x}; allowed: {known}")
    if not 1 <= magic[3] <= _MAX_DIMS:
        raise file.error(3, f"the idx file has {magic[3]} dimensions; allowed: 1 to {_MAX_DIMS}")
    dtype = np.dtype(_TYPES[magic[2]])
    shape = struct.unpack(f">{magic[3]}I", file.take(4 * magic[3], f"the sizes of {magic[3]} dimensions"))
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes > limit_bytes:
        sizes, limit = "×".join(map(str, shape)), format_bytes(limit_bytes)
        made = f"{sizes} items of {dtype.name} make {format_bytes(num_bytes)}"
        raise file.error(4, f"{made}, over the limit of {limit}")
    return dtype, shape


def bundled_file(name: str, what: str) -> Path | None:
    """The file of a table inside scikit-learn, which `what` comes with; None where its version keeps it elsewhere."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"{what} come with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", name)
    return file if file.exists() else None


def read_text(path: Path | str, *, limit_bytes: int = 2**30) -> str:
    """The text of a UTF-8 file, plain or gzip; DataError names the offset of the first byte that is none."""
    with DataFile(path) as file:
        content = file.rest(limit_bytes)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"not UTF-8 text: {error.reason} (0x{content[error.start]:02x})"
            raise file.error(error.start, found) from error


def standard_library_text(max_bytes: int = 4 * 2**20) -> str:
    """The text of this Python's standard library: the same every time, at most `max_bytes` of UTF-8."""
    return python_source_text(Path(sysconfig.get_path("stdlib")), max_bytes)


def python_source_text(root: Path, max_bytes: int) -> str:
    """The text of the Python files under `root`, at most `max_bytes` of UTF-8.

    Modules come first, then packages folder by folder, each sorted by name; tests and installed packages are
    left out, and so is a file that is not UTF-8.
    """
    check_count("max_bytes", max_bytes)
    collected = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            with suppress(OSError, UnicodeDecodeError):  # what cannot be read, or is not UTF-8, is left out
                if name.endswith(".py") and len(collected) < max_bytes:
                    collected += Path(folder, name).read_bytes().decode("utf-8").encode()
        if len(collected) >= max_bytes:
            break
    if not collected:
        raise DataError(f"{root} holds no Python source to learn from; give a text file instead")
    # a character cut in two at the bound is dropped
    return collected[:max_bytes].decode("utf-8", errors="ignore")


def encode(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(text, "utf-8"), np.uint8)


def decode(tokens: NDArray[np.uint8]) -> str:
    """Tokens as text; bytes that are no UTF-8, as a half-trained model writes them, become U+FFFD."""
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def windows(tokens: NDArray[np.uint8], context: int) -> NDArray[np.uint8]:
    """Consecutive windows over a text, one sample per row: `context` tokens and the one that follows them.

    Neighbouring rows share one token, so that each token but the first is predicted exactly once in an epoch;
    a tail that does not fill a row is left out. The rows are a view: nothing is copied.
    """
    check_count("context", context)
    if len(tokens) <= context:
        raise UserError(
            f"a text of {len(tokens)} bytes is too short: context={context} needs at least {context + 1}"
        )
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]


@dataclass(frozen=True, slots=True)
class ImageShape:
    """The image size that a model was trained on."""

    side: int
    white: float

    @property
    def in_words(self) -> str:
        return f"{self.side}×{self.side} numbers from 0 to {self.white:g}"

    def images(self, values: Any) -> NDArray[np.float32]:
        """Numbers as (count, side, side); ValueError says what they are instead."""
        if isinstance(values, list):
            # Looked at before numpy makes an array: one of texts would have room for the longest in every place.
            kinds = set(map(type, np.asarray(values, object).flat))
            if not all(issubclass(kind, (int, float, np.number, np.bool_)) for kind in kinds):
                raise ValueError(f"it holds {_NO_NUMBERS}; an image is {self.in_words}")
        try:
            array = np.asarray(values)
        except ValueError as error:  # rows of different lengths
            raise ValueError(f"its rows have different lengths; an image is {self.in_words}") from error
        if array.dtype.kind not in "buif":
            kind = _NO_NUMBERS if array.dtype.kind in "OUSV" else str(array.dtype)
            raise ValueError(f"it holds {kind}; an image is {self.in_words}")
        side, sizes = self.side, "×".join(map(str, array.shape)) or "that of one number"
        if array.ndim > _MOST_DEEP or array.shape[-2:] != (side, side):
            if array.ndim in (1, 2) and array.shape[-1:] == (side * side,):  # rows of pixels
                array = array.reshape(-1, side, side)
            else:
                raise ValueError(f"its shape is {sizes}; an image is {self.in_words}")
        # a channel of one may stand before the image
        if array.ndim > 3 and array.shape[-3] != 1:
            raise ValueError(f"its shape is {sizes}; an image has one channel: {self.in_words}")
        with np.errstate(over="ignore"):  # what is beyond single precision is beyond white
            images = array.reshape(-1, side, side).astype(np.float32)
        if not len(images):
            raise ValueError("it holds no image")
        if not np.isfinite(images).all() or images.min() < 0 or images.max() > self.white:
            found = f"{float(images.min()):g} to {float(images.max()):g}"
            raise ValueError(f"its values range from {found}; an image is {self.in_words}")
        return images


def read_images(path: str, shape: ImageShape, form: str = "auto") -> NDArray[np.float32]:
    """The images in a file; a DataError names the file and what is wrong with it."""
    return _read(path, form, lambda file, found: _READERS[found](file, shape))


def read_values(path: str, form: str = "auto") -> Sequence[Any]:
    """The values in a JSON array, or the rows of an npy array; a DataError as above."""

    def read(file: Path, found: str) -> Sequence[Any]:
        if found not in ("json", "npy"):
            raise ValueError("it is neither a JSON array of inputs nor an npy file")
        values = _json(file) if found == "json" else np.atleast_1d(_npy(file))
        if not len(values):
            raise ValueError("it holds no input")
        return values  # type: ignore[return-value] # an array is a sequence of its rows

    return _read(path, form, read)


def _read(path: str, form: str, read: Callable[[Path, str], _Values]) -> _Values:
    file = Path(path)
    if form == "auto":
        if file.is_dir():
            raise DataError(f"{file} is a directory; name one file")
        with DataFile(file) as opened:
            start = bytes(opened.up_to(8))
        form = "json" if start.lstrip()[:1] in (b"[", b"{") else "picture"
        form = "npy" if start.startswith(b"\x93NUMPY") else "idx" if start.startswith(b"\0\0") else form
    try:
        return read(file, form)
    except UserError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _picture(file: Path, shape: ImageShape) -> NDArray[np.float32]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError(
            f"{file} is neither npy, idx nor JSON, and Pillow, which reads images, is not installed: pip install "
            "'manyhands[images]'"
        ) from None
    try:
        with Image.open(file, formats=_PICTURES) as image:
            if image.size != (shape.side, shape.side):  # before a pixel of it is decoded
                width, height = image.size
                raise DataError(
                    f"{file} has {width}×{height} pixels; the model was trained on {shape.side}×{shape.side}: resize "
                    "it, white on black"
                )
            if image.mode[0] in "IF":  # which Pillow would cut off at 255
                raise DataError(
                    f"{file} has pixels of mode {image.mode}; save it with 8 bits a pixel, or as an npy array"
                )
            # what can be seen through is black
            whole = Image.alpha_composite(Image.new("RGBA", image.size, "black"), image.convert("RGBA"))
            grey = np.asarray(whole.convert("L"), np.float32)
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(
            f"{file} is not an image that Pillow can read, and neither npy, idx nor JSON; give its --format"
        ) from error
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as an image: {error}") from error
    return shape.images(grey * np.float32(shape.white / 255))


def _npy(file: Path) -> NDArray[Any]:
    with DataFile(file) as opened:
        content = opened.rest(_LIMIT_BYTES)
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its version is {version}; allowed: (1, 0) and (2, 0)")
        read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        sizes, by_columns, dtype = read_header(stream)
        # An array of another size than its header says would be read from memory that nobody has written.
        wanted, held = math.prod(sizes) * dtype.itemsize, len(content) - stream.tell()
        if dtype.hasobject or wanted != held:
            promised = f"{format_bytes(wanted)} of {dtype}"
            raise ValueError(f"its header announces {promised}, but {format_bytes(held)} follow")
        array = np.frombuffer(content, dtype, offset=stream.tell())
        return array.reshape(sizes, order="F" if by_columns else "C")
    except (SyntaxError, TypeError, OverflowError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(f"it is not an npy file: {error}") from error


def _json(file: Path) -> list[Any]:
    with DataFile(file) as opened:
        content = bytes(opened.rest(_LIMIT_BYTES))
    try:
        value = json.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get("inputs")
    if not isinstance(value, list):
        raise ValueError('it must be an array of inputs, or {"inputs": [...]}')
    return value


_READERS: dict[str, Callable[[Path, ImageShape], NDArray[np.float32]]] = {
    "picture": _picture,
    "npy": lambda file, shape: shape.images(_npy(file)),
    "idx": lambda file, shape: shape.images(read_idx(file)),
    "json": lambda file, shape: shape.images(_json(file)),
}
