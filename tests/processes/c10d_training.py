"""Training as PyTorch's own examples write it, on our backend and on Gloo: the gradients and weights are the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from processes.c10d_worker import Ranks


class Net(nn.Module):
    """Several buckets, a buffer that changes, and a branch that not every batch takes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(20, 300)
        self.norm = nn.BatchNorm1d(300)
        self.hidden = nn.Linear(300, 300)
        self.branch = nn.Linear(300, 300)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(300, 2)
        self.to(dtype)

    def forward(self, x: torch.Tensor, branch: bool = False) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = x + torch.tanh(self.hidden(x))
        if branch:
            x = x + torch.tanh(self.branch(x))
        return self.last(x)


def batch(ranks: Ranks, step: int, dtype: torch.dtype = torch.float64, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + ranks.rank)
    return torch.randn(size, 20, generator=generator, dtype=dtype)


def on_both(ranks: Ranks, train: Callable[[Any], list[torch.Tensor]]) -> None:
    """What `train` returns on our group and on Gloo's: the same bits for two ranks; more are added in another order."""
    ours, wanted = train(ranks.ours), train(ranks.gloo)
    assert len(ours) == len(wanted) > 0
    tolerance = 0 if ranks.world == 2 else 1e-9
    for number, (got, want) in enumerate(zip(ours, wanted, strict=True)):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text, n=number: f"{n}: {text}"
        )


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [torch.zeros(1) if p.grad is None else p.grad.clone() for p in model.parameters()]


def check_ddp_with_unused_parameters(ranks: Ranks) -> None:
    def train(group: Any) -> list[torch.Tensor]:
        model = DistributedDataParallel(
            Net(), process_group=group, find_unused_parameters=True, bucket_cap_mb=0.3
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            model(batch(ranks, step), branch=step % 2 == 0 and ranks.rank == 0).square().mean().backward()
            seen += gradients(model)
            optimizer.step()
        assert model.module.never.weight.grad is None
        return [*seen, *model.module.state_dict().values()]

    on_both(ranks, train)


def check_ddp_accumulates_without_synchronising(ranks: Ranks) -> None:
    def train(group: Any) -> list[torch.Tensor]:
        model = DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
        for step in range(3):
            with model.no_sync() if step < 2 else contextlib.nullcontext():
                model(batch(ranks, step)).square().mean().backward()
        return gradients(model)

    on_both(ranks, train)


def check_join_of_uneven_inputs(ranks: Ranks) -> None:
    def train(group: Any) -> list[torch.Tensor]:
        plain = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 2)).double()
        with torch.no_grad():
            for number, parameter in enumerate(plain.parameters()):
                parameter.copy_(torch.linspace(-0.1 * number, 0.1, parameter.numel()).view(parameter.shape))
        model = DistributedDataParallel(plain, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with Join([model]):
            for step in range(2 + 3 * ranks.rank):
                optimizer.zero_grad()
                model(batch(ranks, step)).square().mean().backward()
                optimizer.step()
        return list(model.module.state_dict().values())

    on_both(ranks, train)


def check_communication_hooks(ranks: Ranks) -> None:
    """PowerSGD's makes calls from callbacks of futures; so there is one bucket, or their order is left to chance."""

    def train(hook: Callable[..., Any], state: Callable[[Any], Any]) -> Callable[[Any], list[torch.Tensor]]:
        def run(group: Any) -> list[torch.Tensor]:
            torch.manual_seed(3)
            plain = nn.Sequential(nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 100), nn.Linear(100, 2))
            model = DistributedDataParallel(plain, process_group=group)
            model.register_comm_hook(state(group), hook)
            for step in range(4):
                model.zero_grad()
                model(batch(ranks, step, torch.float32)).square().mean().backward()
            return gradients(model)

        return run

    def power(group: Any) -> Any:
        return powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)

    if ranks.world == 2:  # more ranks sum in another order than Gloo, which float32 shows
        on_both(ranks, train(default_hooks.allreduce_hook, lambda group: group))
        on_both(ranks, train(default_hooks.fp16_compress_hook, lambda group: group))
        if (
            not torch.cuda.is_available()
        ):  # where there are GPUs, the hook of torch 2.11 takes every tensor for one of theirs
            on_both(ranks, train(powerSGD_hook.powerSGD_hook, power))


def check_sharded_training(ranks: Ranks) -> None:
    """FSDP2, and the sharded optimizer."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def shard(group: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)
        ).double()
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(ranks, step)).square().mean().backward()
            optimizer.step()
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    def zero(group: Any) -> list[torch.Tensor]:
        model = DistributedDataParallel(Net(), process_group=group, find_unused_parameters=True)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.01
        )
        for step in range(2):
            optimizer.zero_grad()
            model(batch(ranks, step), branch=True).square().mean().backward()
            optimizer.step()
        return list(model.module.state_dict().values())

    on_both(ranks, shard)
    on_both(ranks, zero)


def check_synchronised_batch_norm_pattern(ranks: Ranks) -> None:
    """Collectives inside forward and backward, through torch's differentiable ones."""
    from torch.distributed.nn.functional import all_gather, all_reduce, reduce_scatter

    def train(group: Any) -> list[torch.Tensor]:
        x = batch(ranks, 1).requires_grad_()
        mean = all_reduce(x.mean(0), group=group) / ranks.world
        everyones = torch.cat(all_gather(x.square(), group=group))
        mine = reduce_scatter(torch.empty_like(x), list(everyones.chunk(ranks.world)), group=group)
        (mean.sum() + everyones.pow(3).sum() + mine.sin().sum()).backward()
        assert x.grad is not None
        return [mean.detach(), mine.detach(), x.grad]

    on_both(ranks, train)


def check_distributed_tensors(ranks: Ranks) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(ranks.ours, "cpu")
    left, right = torch.arange(12.0).view(3, 4), torch.arange(20.0).view(4, 5)
    product = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    assert torch.equal(product.redistribute(mesh, [Replicate()]).to_local(), left @ right)
    assert torch.equal(distribute_tensor(left, mesh, [Shard(0)]).full_tensor(), left)
