"""What the children run, as one sealed file in memory: packed once, mapped by all, copied by none.

    | magic, number of parts | offset and length of each part | part 0: the pickle | part 1.. : large buffers |

The launcher writes the file and its children inherit it; it never comes over a network or from a disk, which is what
makes pickle acceptable here. Functions that a child could not import go by value: that is cloudpickle's work.

Large buffers (numpy arrays and CPU tensors from `LARGE_BYTES` up) lie beside the pickle, each on pages of its own (PEP
574), and a child maps the file privately: reading shares one copy in memory, writing copies the touched pages for that
child alone. Tensors that share a storage still share it after loading, as do several references to one array.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle

from manyhands.errors import UserError

if TYPE_CHECKING:  # a child imports torch only if its job holds tensors
    import torch

LARGE_BYTES = 2**20

_MAGIC = b"manyhandsjob\x00\x00\x00\x01"
_HEAD = struct.Struct("<16sQ")
_PART = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def pack(job: object) -> int:
    """A new sealed file that holds `job`, for the caller to close; UserError if something in it cannot be pickled."""
    from manyhands.native.segment import PAGE, reserve, round_up  # imports torch: the launcher's side only

    large: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, large.append).dump(job)
    except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError) as error:
        raise UserError(
            f"the task cannot be sent to the workers: {error}; it may use functions, closures, tensors "
            "and plain objects, but no open files, locks, sockets or generators"
        ) from error
    parts = [stream.getbuffer(), *(buffer.raw() for buffer in large)]
    offsets, end = [], _HEAD.size + _PART.size * len(parts)
    for part in parts:
        offsets.append(round_up(end, PAGE))
        end = offsets[-1] + part.nbytes
    table = [_PART.pack(offset, part.nbytes) for offset, part in zip(offsets, parts, strict=True)]
    descriptor = os.memfd_create("manyhands:job", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        reserve(descriptor, end, "the workers' job and data")
        _write(descriptor, 0, memoryview(_HEAD.pack(_MAGIC, len(parts)) + b"".join(table)))
        for offset, part in zip(offsets, parts, strict=True):
            _write(descriptor, offset, part)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def load(descriptor: int) -> Any:
    """The job in a file made by `pack`; its large buffers are views of a private mapping, which they keep."""
    mapped = mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    magic, count = _HEAD.unpack_from(mapped)
    if magic != _MAGIC:
        raise ValueError("not a job file of this version")
    view = memoryview(mapped)
    places = [_PART.unpack_from(mapped, _HEAD.size + _PART.size * number) for number in range(count)]
    pickled, *large = [view[offset : offset + length] for offset, length in places]
    return pickle.loads(pickled, buffers=large)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with the bytes of large arrays and tensors set aside."""

    def __init__(self, stream: io.BytesIO, set_aside: Callable[[pickle.PickleBuffer], None]) -> None:
        def in_band(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < LARGE_BYTES:
                return True
            set_aside(buffer)
            return False

        super().__init__(stream, protocol=5, buffer_callback=in_band)
        self._storages: dict[tuple[int, int], _Storage] = {}

    def reducer_override(self, obj: Any) -> Any:
        """Tensors by their storage; everything else as cloudpickle does it."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(obj, _Storage):
            content = torch.empty(0, dtype=torch.uint8).set_(obj.storage)
            return _storage, (pickle.PickleBuffer(content.numpy().data),)
        if torch is not None and type(obj) is torch.Tensor and _is_plain(obj):
            storage = obj.untyped_storage()
            key = (storage.data_ptr(), storage.nbytes())
            shared = self._storages.setdefault(key, _Storage(storage))
            place = (obj.storage_offset(), tuple(obj.size()), tuple(obj.stride()))
            return _tensor, (shared, obj.dtype, place, obj.requires_grad)
        return super().reducer_override(obj)


@dataclass(slots=True, eq=False)
class _Storage:
    """One storage of the job: one object for all tensors on it, so that the pickler writes it once."""

    storage: torch.UntypedStorage


def _is_plain(tensor: torch.Tensor) -> bool:
    # Its storage and strides and no more; torch knows how to pickle the others.
    return (
        tensor.device.type == "cpu"
        and str(tensor.layout) == "torch.strided"
        and tensor.is_leaf
        and not (tensor.is_quantized or tensor.is_neg() or tensor.is_conj())
        and not tensor.__dict__
        and not tensor._backward_hooks
        and tensor.untyped_storage().nbytes() > 0
    )


def _storage(content: memoryview | bytearray) -> torch.UntypedStorage:
    import torch

    whole = torch.frombuffer(content, dtype=torch.uint8)
    if whole.nbytes < LARGE_BYTES:
        whole = whole.clone()  # from the pickle's own bytes to memory aligned as torch aligns it
    return whole.untyped_storage()


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    place: tuple[int, Sequence[int], Sequence[int]],
    requires_grad: bool,
) -> torch.Tensor:
    import torch

    offset, size, stride = place
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, size, stride)
    return tensor.requires_grad_(requires_grad)


def _write(descriptor: int, offset: int, content: memoryview) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written
