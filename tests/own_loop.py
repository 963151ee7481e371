"""Groups whose workers are threads of the test, joined through a real meeting and real shared memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.utils.data import DataLoader, TensorDataset

from equality import Awkward, distance, same_bits
from manyhands.interop.own_loop.join import open_group
from manyhands.interop.own_loop.worker_group import WorkerGroup
from manyhands.places.external.process_place import ProcessPlace

T = TypeVar("T")


def on_workers(
    world: int,
    body: Callable[[WorkerGroup], T],
    *,
    strategy: str | None = None,
    buffers: str = "broadcast",
    check_every: int | None = None,
    timeout_s: float = 30.0,
    errors: bool = False,
    out: Path | None = None,
) -> list[T]:
    """What `body(group)` returned in each worker, by rank; with `errors`, what it raised in its place."""
    store = HashStore()
    results: list[T | BaseException] = [RuntimeError("never ran")] * world

    def work(rank: int) -> None:
        place = ProcessPlace(rank=rank, world=world, open_store=lambda _: store)
        try:
            options: dict[str, Any] = {
                "strategy": strategy,
                "buffers": buffers,
                "check_every": check_every,
                "out": out,
            }
            with open_group(place, "test", timeout_s=timeout_s, **options) as group:
                results[rank] = body(group)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), name=f"worker {rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=240)
        assert not thread.is_alive(), f"{thread.name} hangs"
    if not errors:
        for result in results:
            if isinstance(result, BaseException):
                raise result
    return results  # type: ignore[return-value]


class Nobody:
    """Stands for the group in a loop without manyhands."""

    def prepare(self, model: nn.Module, *others: Any) -> Any:
        self._model = model
        return model, *others

    def no_sync(self) -> Any:
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._model.parameters(), max_norm))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    def step(self, batch: Any, loss: Callable[[nn.Module, Any], torch.Tensor]) -> torch.Tensor:
        value = loss(self._model, batch)
        if value.requires_grad:
            value.backward()  # type: ignore[no-untyped-call]
        return value.detach()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all that the model holds, which outlives the group."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def regression(rows: int = 45) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def shuffled(dataset: TensorDataset, batch_size: int = 13) -> DataLoader[tuple[torch.Tensor, ...]]:
    """The same order in every worker and repetition: 13, 13, 13 and 6 of 45 samples."""
    return DataLoader(
        dataset, batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5)
    )


def mlp() -> nn.Module:
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.4)
    return model


Loop = Callable[[Any], dict[str, torch.Tensor]]


def require_equal(
    loop: Loop, world: int, strategy: str | None, reference: dict[str, torch.Tensor] | None = None
) -> None:
    reference = reference or loop(Nobody())
    found = on_workers(world, loop, strategy=strategy)
    assert distance(found[0], reference) < 1e-9
    for rank, other in enumerate(found):
        assert same_bits(found[0], other), f"worker {rank} ended with other bits than worker 0"


def plain_loop(group: Any, epochs: int = 5) -> dict[str, torch.Tensor]:
    """Tied weights, weights that no or few samples reach, weight decay, an uneven last batch."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 11, (45, 4), generator=generator)
    targets = torch.randint(0, 11, (45,), generator=generator)
    model = Awkward(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer, loader = group.prepare(model, optimizer, shuffled(TensorDataset(tokens, targets)))
    assert len(loader) == 4
    for _ in range(epochs):
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert model.never.grad is None
    return weights(model)


def rich_loop(group: Any, epochs: int = 6) -> dict[str, torch.Tensor]:
    """Accumulation over batches of different sizes, clipping, parameter groups, a schedule per step."""
    model = mlp()
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.02},
            {"params": model[2].parameters(), "weight_decay": 0.3},
        ],
        lr=0.01,
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.02], total_steps=12)
    model, optimizer, loader, scheduler = group.prepare(model, optimizer, shuffled(regression()), scheduler)
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            whole = number % 2 == 1
            with nullcontext() if whole else group.no_sync():
                (nn.functional.mse_loss(model(x), y) / 2).backward()
            if whole:
                assert group.clip_grad_norm_(0.1) > 0.1
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return weights(model)
