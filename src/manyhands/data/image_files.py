"""Grey images of one size from a user's file: a picture, an npy array, an idx file, or a JSON array.

All come as (count, side, side) in single precision, with values from 0 (black) to `white`. Pictures go from 0 to 255
and are scaled; the numbers of all other files are those that the model was trained on.
"""

from __future__ import annotations

import io
import json
import math
import tokenize
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile, read_idx
from manyhands.errors import DataError, UserError, format_bytes

__all__ = ["IMAGE_FORMATS", "ImageShape", "read_images"]

IMAGE_FORMATS = ("auto", "picture", "npy", "idx", "json")
_LIMIT_BYTES = 1 << 31
_MOST_DEEP = 5
_NO_NUMBERS = "rows of different lengths or what is no number"
_PICTURES = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")  # Pillow has others start programs


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
        side = self.side
        if array.ndim > _MOST_DEEP or array.shape[-2:] != (side, side):
            if array.ndim in (1, 2) and array.shape[-1:] == (side * side,):  # rows of pixels
                array = array.reshape(-1, side, side)
            else:
                raise ValueError(f"its shape is {_shape(array)}; an image is {self.in_words}")
        # a channel of one may stand before the image
        if array.ndim > 3 and array.shape[-3] != 1:
            raise ValueError(f"its shape is {_shape(array)}; an image has one channel: {self.in_words}")
        with np.errstate(over="ignore"):  # what is beyond single precision is beyond white
            images = array.reshape(-1, side, side).astype(np.float32)
        if not len(images):
            raise ValueError("it holds no image")
        if not np.isfinite(images).all() or images.min() < 0 or images.max() > self.white:
            found = f"{float(images.min()):g} to {float(images.max()):g}"
            raise ValueError(f"its values go from {found}; an image is {self.in_words}")
        return images


def read_images(path: str, shape: ImageShape, form: str = "auto") -> NDArray[np.float32]:
    """The images in a file; a DataError names the file and what is wrong with it."""
    file = Path(path)
    if form == "auto":
        if file.is_dir():
            raise DataError(f"{file} is a directory; name one file of images")
        with DataFile(file) as opened:
            start = bytes(opened.up_to(8))
        form = "json" if start.lstrip()[:1] in (b"[", b"{") else "picture"
        form = "npy" if start.startswith(b"\x93NUMPY") else "idx" if start.startswith(b"\0\0") else form
    try:
        return _READERS[form](file, shape)
    except UserError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error


def _picture(file: Path, shape: ImageShape) -> NDArray[np.float32]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError(
            f"{file} is neither npy, idx nor JSON, and pictures are read by Pillow, which is not installed: "
            "pip install 'manyhands[images]'"
        ) from None
    try:
        with Image.open(file, formats=_PICTURES) as image:
            if image.size != (shape.side, shape.side):  # before a pixel of it is decoded
                width, height = image.size
                raise DataError(
                    f"{file} has {width}×{height} pixels; the model was trained on {shape.side}×{shape.side}: make it "
                    "that small, white on black"
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
            f"{file} is no picture that Pillow knows, and neither npy, idx nor JSON; --format says which it should be"
        ) from error
    except (OSError, SyntaxError, ValueError, MemoryError, Image.DecompressionBombError) as error:
        raise DataError(f"{file} cannot be read as a picture: {error}") from error
    return shape.images(grey * np.float32(shape.white / 255))


def _npy(file: Path, shape: ImageShape) -> NDArray[np.float32]:
    with DataFile(file) as opened:
        content = opened.rest(_LIMIT_BYTES)
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"its version is {version}; (1, 0) and (2, 0) are read")
        read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
        sizes, by_columns, dtype = read_header(stream)
        # An array of another size than its header says would be read from memory that nobody has written.
        wanted, held = math.prod(sizes) * dtype.itemsize, len(content) - stream.tell()
        if dtype.hasobject or wanted != held:
            promised = f"{format_bytes(wanted)} of {dtype}"
            raise ValueError(f"its header tells of {promised}, and {format_bytes(held)} follow")
        array = np.frombuffer(content, dtype, offset=stream.tell())
        return shape.images(array.reshape(sizes, order="F" if by_columns else "C"))
    except (SyntaxError, TypeError, OverflowError, RecursionError, tokenize.TokenError) as error:
        raise ValueError(f"it is no npy file: {error}") from error


def _json(file: Path, shape: ImageShape) -> NDArray[np.float32]:
    with DataFile(file) as opened:
        content = bytes(opened.rest(_LIMIT_BYTES))
    try:
        value = json.loads(content.decode("utf-8"))
    except (UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if isinstance(value, dict):
        value = value.get("inputs")
    if not isinstance(value, list):
        raise ValueError('it must be an array of images, or {"inputs": [...]}')
    return shape.images(value)


def _shape(array: NDArray[Any]) -> str:
    return "×".join(map(str, array.shape)) or "that of one number"


_READERS: dict[str, Callable[[Path, ImageShape], NDArray[np.float32]]] = {
    "picture": _picture,
    "npy": _npy,
    "idx": lambda file, shape: shape.images(read_idx(file)),
    "json": _json,
}
