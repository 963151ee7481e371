"""CUDA tensors in a group of our backend go to NCCL fallback, beside CPU tensors in shared memory."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from processes.c10d_worker import Ranks

CUDA = torch.device("cuda", 0)


def check_each_device_has_its_backend(ranks: Ranks) -> None:
    assert {device.type for device in ranks.ours._device_types} == {"cpu", "cuda"}
    assert type(ranks.ours._get_backend(CUDA)).__name__ == "ProcessGroupNCCL"


def check_collectives(ranks: Ranks) -> None:
    for device in (torch.device("cpu"), CUDA):
        mine = torch.full((1000,), float(ranks.rank + 1), device=device)
        dist.all_reduce(mine)
        assert mine.eq(sum(range(1, ranks.world + 1))).all()
        everyones = torch.empty(ranks.world * 4, device=device)
        dist.all_gather_into_tensor(everyones, torch.full((4,), float(ranks.rank), device=device))
        assert everyones.tolist() == [float(rank) for rank in range(ranks.world) for _ in range(4)]
        dist.broadcast(mine, 0)
        work = dist.all_reduce(mine, async_op=True)
        work.wait()
    with dist._coalescing_manager(device=CUDA):
        one, two = torch.ones(3, device=CUDA), torch.ones(3, device=CUDA)
        dist.all_reduce(one)
        dist.all_reduce(two)
    assert one.eq(ranks.world).all()
    assert two.eq(ranks.world).all()
    dist.barrier()
    dist.barrier(device_ids=[0])


def check_ddp(ranks: Ranks) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 2)).to(CUDA)
    model = DistributedDataParallel(plain, process_group=ranks.ours, device_ids=[0])
    x = torch.randn(8, 20, device=CUDA)
    model(x).sum().backward()
    reduced = [parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None]
    plain.zero_grad()
    plain(x).sum().backward()
    if ranks.world == 1:
        for got, parameter in zip(reduced, plain.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)
