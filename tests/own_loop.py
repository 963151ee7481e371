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
        thread.join(timeout=60)
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
