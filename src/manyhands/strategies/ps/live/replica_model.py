"""A worker's replica of the model: parameters are views of memory that the shards write, with the gradients
beside it.

On a GPU the model has separate parameters, which are filled from that memory after every pull.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.wire.tap import GradientTap, put

__all__ = ["ReplicaModel"]


class ReplicaModel:
    """Connects `model` to `area`; hooks move each gradient there as soon as backward has it."""

    def __init__(self, model: nn.Module, layout: FlatLayout, area: WorkerArea) -> None:
        self.model = model
        self._layout = layout
        named = dict(model.named_parameters())
        self._tied = {name: named[name] for name in layout.views(area.values)}
        self._on_gpu = any(parameter.device.type == "cuda" for parameter in self._tied.values())
        self._share = 1.0
        self._reached: set[str] = set()
        self._buffers = list(model.buffers())
        self._buffers_before = [buffer.clone() for buffer in self._buffers]
        self.tie(area)
        self._names = list(self._tied)
        self._tap = GradientTap(list(self._tied.values()), self._taken)

    def close(self) -> None:
        """Remove the hooks; autograd holds them, and with them the memory of the parameters."""
        self._tap.close()

    def tie(self, area: WorkerArea) -> None:
        """Use this area from now on; the contents of the previous one stay as they are."""
        values = self._layout.views(area.values)
        self._values = {self._tied[name]: view for name, view in values.items()}
        self._gradients = self._layout.views(area.gradients)
        self._flags = [area.flags(shard) for shard in range(self._layout.shards)]
        for parameter, view in self._values.items():
            if not area.is_in_place:  # else the shards have long written something better there
                view.copy_(parameter.detach())
            if not self._on_gpu:
                parameter.data = view

    def pulled(self) -> None:
        """Call after every shard has written its range: copies it to the GPU, or bumps the autograd versions on
        the CPU.
        """
        if not self._on_gpu:
            torch.autograd.graph.increment_version(list(self._values))
            return
        with torch.no_grad():
            for parameter, value in self._values.items():
                parameter.copy_(value, non_blocking=True)

    def backward(self, loss: Tensor, share: float) -> None:
        """Run backward, accumulating `share` times the gradient in the area since `begin`."""
        self._share = share
        loss.backward()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """Clear the set of reached parameters, and save the buffers for `undo`."""
        self._reached.clear()
        if self._buffers:
            _copy(self._buffers_before, self._buffers)

    def undo(self) -> None:
        """Restore the buffers from before the last forward."""
        if self._buffers:
            _copy(self._buffers, self._buffers_before)

    def end(self) -> None:
        """Write to the area's flags what this backward reached."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for shard, flags in enumerate(self._flags):
            flags.copy_(self._layout.flags(shard, self._reached))

    @torch.no_grad()
    def step(self, optimizer: Optimizer, share: float) -> None:
        """After `end`: take the worker's local step, and store `share` times the parameters in place of the
        gradient.

        The gradient there is scaled by its share of the batch; the step uses the unscaled one. With a share of 0
        there is no step.
        """
        moved = {one for group in optimizer.param_groups for one in group["params"]}
        names = {name for name, parameter in self._tied.items() if parameter in moved}
        if share:
            for name in self._reached & names:
                self._tied[name].grad = self._gradients[name].to(self._tied[name].device) / share
            with torch.enable_grad():
                optimizer.step()
            optimizer.zero_grad()
        for name in names:
            torch.mul(self._tied[name].detach().cpu(), share, out=self._gradients[name])
        for shard, flags in enumerate(self._flags):
            flags.copy_(self._layout.flags(shard, names))

    def is_finite(self, gradients: Tensor) -> bool:
        """Whether all reached gradients are finite; `gradients` is the area's whole buffer."""
        views = self._layout.views(gradients)
        return all(
            bool(torch.isfinite(views[name].sum())) or _all_finite(views[name]) for name in self._reached
        )

    @torch.no_grad()
    def _taken(self, number: int, parameter: Tensor) -> None:
        """Move a parameter's gradient into the area."""
        gradient, name = parameter.grad, self._names[number]
        assert gradient is not None, "the hook comes after the gradient"
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        put(self._gradients[name], dense, self._share, add=name in self._reached)
        parameter.grad = None
        self._reached.add(name)


@torch.no_grad()
def _copy(into: list[Tensor], values: list[Tensor]) -> None:
    torch._foreach_copy_(into, values)


def _all_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())
