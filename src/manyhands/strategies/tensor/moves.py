"""Communication between slices in the forward pass, and its counterpart in the backward pass.

An activation is whole (the same bits on every slice) or sliced (each slice has its part). The gradient of a whole
activation is whole, too. So the four moves are pairs:

| move | forward | backward |
|---|---|---|
| `copied` | whole, into sliced work: nothing | each slice's gradient is a part of the sum: all-reduce |
| `summed` | sliced work, into a whole: all-reduce | nothing |
| `gathered` | parts along a dimension: all-gather | this slice's part |
| `scattered` | this slice's part | all-gather |

Each move counts what this slice sends under the name of its layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyhands.engine.exchange import Traffic
from manyhands.strategies.common.grid.grid_group import LinkGroup


@dataclass(slots=True, kw_only=True)
class LayerTraffic:
    """What one slice has sent for one layer while training, so far."""

    how: str
    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)


class SliceState:
    """What all sliced layers of a model share.

    It keeps the random number generators of the slices equal wherever activations are whole: between a layer that
    leaves its output sliced and the layer that takes it, slices of different sizes draw different amounts. So the layer
    that ends sliced work sets the generator to a state derived from the one at its beginning. Where nothing was drawn,
    the generator stays as it is.
    """

    def __init__(self) -> None:
        self.spent_ns = 0  # communicating with the other slices, including waiting
        self.height = 0  # of the whole image that is passing through layers sliced by rows
        self._before: Tensor | None = None

    def enter(self, x: Tensor) -> None:
        self._before = _generator(x).get_state()

    def leave(self, x: Tensor) -> None:
        """Where sliced work ends, reseed from the remembered state if anything was drawn since."""
        before, self._before = self._before, None
        generator = _generator(x)
        if before is not None and not torch.equal(before, generator.get_state()):
            generator.set_state(before)
            seed = torch.randint(2**62, (), generator=generator, device=generator.device)
            generator.manual_seed(int(seed))


def _generator(x: Tensor) -> torch.Generator:
    return torch.cuda.default_generators[x.device.index or 0] if x.is_cuda else torch.default_generator


class Port:
    """The communication endpoint of one layer: connects it to the same layer on the other slices."""

    def __init__(self, group: LinkGroup, name: str, traffic: LayerTraffic, state: SliceState) -> None:
        self.group, self.name, self.traffic, self.state = group, name, traffic, state
        self.index, self.world = group.index, group.world
        self.trains = True

    def sum(self, tensor: Tensor, *, backward: bool = False) -> Tensor:
        own = tensor.clone(memory_format=torch.contiguous_format)
        self.counted(lambda: self.group.all_reduce(own), backward=backward)
        return own

    def gather(self, tensor: Tensor, dim: int, sizes: Sequence[int], *, backward: bool = False) -> Tensor:
        shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim:][1:]) for size in sizes]
        parts = self.counted(lambda: self.group.all_gather(tensor.contiguous(), shapes), backward=backward)
        return torch.cat(parts, dim)

    def counted(self, work: Callable[[], Any], *, backward: bool) -> Any:
        """Run `work` and count what it sends under this layer's name; evaluation is timed but not counted."""
        before, begin = self.group.traffic(), time.monotonic_ns()
        result = work()
        self.state.spent_ns += time.monotonic_ns() - begin
        sent = self.group.traffic() - before
        if backward:
            self.traffic.backward += sent
        elif self.trains:
            self.traffic.forward += sent
        return result


def copied(x: Tensor, port: Port) -> Tensor:
    """Pass a whole tensor into sliced work: the identity forward, an all-reduce of the gradient backward."""
    return _applied(_Copied, port, x)


def summed(x: Tensor, port: Port) -> Tensor:
    """Collective: sum the slices' addends into a whole tensor; the gradient passes unchanged."""
    return _applied(_Summed, port, x)


def gathered(x: Tensor, port: Port, dim: int, sizes: Sequence[int]) -> Tensor:
    """Collective: concatenate the slices' parts along `dim` into a whole tensor; `sizes` are the parts' sizes."""
    return _applied(_Gathered, port, x, dim % x.dim(), tuple(sizes))


def scattered(x: Tensor, port: Port, dim: int, sizes: Sequence[int]) -> Tensor:
    """Take this slice's part of a whole tensor along `dim`; the backward is an all-gather."""
    return _applied(_Scattered, port, x, dim % x.dim(), tuple(sizes))


def _applied(function: Any, port: Port, x: Tensor, *rest: Any) -> Tensor:
    if port.world == 1:
        return x
    port.trains = torch.is_grad_enabled()
    moved: Tensor = function.apply(x, port, *rest)
    return moved


def _part(x: Tensor, port: Port, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.narrow(dim, sum(sizes[: port.index]), sizes[port.index])


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, port: Port) -> Tensor:
        ctx.port = port
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.port.sum(gradient, backward=True), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: Tensor, port: Port) -> Tensor:
        return port.sum(x)

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, port: Port, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.place = port, dim, sizes
        return port.gather(x, dim, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _part(gradient, *ctx.place).contiguous(), None, None, None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, port: Port, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.place = port, dim, sizes
        return _part(x, port, dim, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        port, dim, sizes = ctx.place
        return port.gather(gradient, dim, sizes, backward=True), None, None, None


_AMOUNTS = ("forward_bytes", "backward_bytes", "messages")


def layer_traffic(traffic: Mapping[str, LayerTraffic], steps: int) -> list[dict[str, Any]]:
    """One worker's average traffic per training step, one row per layer, as plain values."""
    steps = max(1, steps)
    return [
        {
            "layer": name,
            "how": one.how,
            "forward_bytes": one.forward.bytes_sent / steps,
            "backward_bytes": one.backward.bytes_sent / steps,
            "messages": (one.forward + one.backward).messages_sent / steps,
        }
        for name, one in traffic.items()
    ]


def sum_layer_traffic(finished: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum the workers' final reports into one row per layer, in their order, under `layers`; {} where none reported."""
    found: dict[str, dict[str, Any]] = {}
    for one in finished:
        for row in one.get("layers", ()):
            total = found.setdefault(row["layer"], {**row, **dict.fromkeys(_AMOUNTS, 0)})
            for name in _AMOUNTS:
                total[name] += row[name]
    return {"layers": list(found.values())} if found else {}
