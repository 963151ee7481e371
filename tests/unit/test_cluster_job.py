"""The job file: equal values, one copy in memory, aliasing kept, and no way to change what others see."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.errors import OutOfSharedMemory, UserError
from manyhands.places.local.packed_job import LARGE_BYTES, load, pack

LARGE = LARGE_BYTES // 4 + 5  # float32 items


def through(job: Any) -> Any:
    descriptor = pack(job)
    try:
        return load(descriptor)
    finally:
        os.close(descriptor)


def mapped() -> str:
    return "\n".join(
        line for line in Path("/proc/self/maps").read_text().splitlines() if "manyhands:job" in line
    )


def address_range() -> tuple[int, int]:
    found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+)", mapped(), re.MULTILINE)
    return int(found[0][0], 16), int(found[-1][1], 16)


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
)
def test_tensors_arrive_as_they_were(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randint(0, 2, (count,)).to(dtype)
    arrived = through(tensor)
    assert arrived.dtype == dtype
    assert torch.equal(arrived, tensor)


def test_only_large_content_lies_in_the_mapping() -> None:
    small, large, array = torch.ones(1000), torch.ones(LARGE), np.ones(LARGE, np.float32)
    small, large, array = through((small, large, array))
    first, last = address_range()
    assert first <= large.data_ptr() < last
    assert first <= array.ctypes.data < last
    assert not first <= small.data_ptr() < last
    assert large.data_ptr() % mmap.PAGESIZE == 0
    assert small.data_ptr() % 64 == 0


def test_the_mapping_goes_with_the_last_tensor() -> None:
    tensor = through({"x": torch.ones(LARGE)})["x"][5:]
    gc.collect()
    assert mapped()
    assert tensor.sum().item() == LARGE - 5
    del tensor
    gc.collect()
    assert not mapped()


@pytest.mark.parametrize("count", [100, LARGE])
def test_tensors_on_one_storage_still_share_it(count: int) -> None:
    base = torch.arange(2.0 * count).reshape(2, count)
    whole, part, turned, again = through((base, base[1, 3:9], base.T, base))
    assert whole is again
    assert torch.equal(turned, base.T)
    assert turned.stride() == base.T.stride()
    assert torch.equal(part, base[1, 3:9])
    part.fill_(-1.0)
    assert torch.equal(whole[1, 3:9], torch.full((6,), -1.0))
    assert torch.equal(turned[3:9, 1], torch.full((6,), -1.0))


def test_a_module_keeps_its_ties_and_gradients_flags() -> None:
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    model[1].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    arrived = through(model)
    assert arrived[1].weight is arrived[0].weight
    assert isinstance(arrived[0].weight, nn.Parameter)
    assert arrived[0].weight.requires_grad
    assert not arrived[1].bias.requires_grad
    x = torch.randn(3, 600)
    assert torch.equal(arrived(x), model(x))


def test_tensors_that_are_more_than_their_storage_are_left_to_torch() -> None:
    sparse = torch.eye(4).to_sparse()
    conjugate = torch.tensor([1 + 2j]).conj()
    named = torch.ones(3)
    named.label = "three"  # type: ignore[attr-defined]
    arrived = through((sparse, conjugate, named))
    assert torch.equal(arrived[0].to_dense(), torch.eye(4))
    assert arrived[1].item() == 1 - 2j
    assert arrived[2].label == "three"


def test_one_reader_s_writing_is_nobody_else_s() -> None:
    descriptor = pack((torch.zeros(LARGE), np.zeros(LARGE, np.float32)))
    try:
        mine, theirs = load(descriptor), load(descriptor)
        mine[0].fill_(1.0)
        mine[1][:] = 1.0
        assert theirs[0].sum().item() == 0
        assert theirs[1].sum() == 0
        assert load(descriptor)[0].sum().item() == 0
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, 0)
        with pytest.raises(PermissionError):
            os.pwrite(descriptor, b"x", 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    finally:
        os.close(descriptor)


def test_an_array_that_is_read_only_stays_so() -> None:
    array = np.ones(LARGE, np.float32)
    array.flags.writeable = False
    assert not through(array).flags.writeable


def test_a_data_set_used_by_many_functions_is_written_once() -> None:
    data = torch.ones(4 * LARGE)

    def job(rank: int) -> Callable[[], float]:
        return lambda: data[rank].item() + rank

    descriptor = pack([job(rank) for rank in range(8)])
    try:
        assert os.fstat(descriptor).st_size < data.nbytes * 1.05
        functions = load(descriptor)
    finally:
        os.close(descriptor)
    assert [function() for function in functions] == [1.0 + rank for rank in range(8)]
    assert len(mapped().splitlines()) == 1


def test_what_can_not_be_sent_is_the_user_s_error() -> None:
    with pytest.raises(UserError, match=r"cannot be sent to the workers: .*lock.*no open files, locks"):
        pack({"x": threading.Lock()})


def test_a_job_beyond_the_machine_s_memory_is_refused_with_the_need() -> None:
    sparse = os.memfd_create("sparse", os.MFD_CLOEXEC)
    try:
        os.truncate(sparse, 2**42)
        huge = np.frombuffer(mmap.mmap(sparse, 0, prot=mmap.PROT_READ), np.uint8)
        with pytest.raises(OutOfSharedMemory, match=r"the workers' job and data needs 4096\.0 GiB"):
            pack(huge)
    finally:
        os.close(sparse)


def test_a_file_that_is_no_job_is_refused() -> None:
    descriptor = os.memfd_create("manyhands:test", os.MFD_CLOEXEC)
    try:
        os.truncate(descriptor, 4096)
        with pytest.raises(ValueError, match="not a job file"):
            load(descriptor)
    finally:
        os.close(descriptor)
