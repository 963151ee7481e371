"""Layers of images: sliced by channels, and modules inside such work (normalisation, dropout); or sliced by rows.

By rows each slice has some rows of every channel and fetches neighbouring rows (the halo). An output row needs only a
few input rows, so only the halo is sent: for a 3×3 convolution one row from above and one from below, whatever the
image's height.

    slice 0   rows 0..3   ┐ row 3 ▼        fetched: 0..4      output rows 0..3
    slice 1   rows 4..6   ┘ row 4 ▲        fetched: 3..6      output rows 4..6
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from manyhands.errors import UserError
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor import sliced_layers
from manyhands.strategies.tensor.lazy_tensor import as_whole
from manyhands.strategies.tensor.moves import Port, copied, gathered, scattered, summed
from manyhands.strategies.tensor.sliced_layers import SlicedModule, along, whole_attribute
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing, parts_of


class OutputChannels(SlicedModule, _ConvNd):
    """Convolution that computes some of the output channels from the whole input."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: _ConvNd, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        parts = parts_of(module.out_channels, how.units, slices)
        return {name: along(0, parts) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        x = as_whole(x)
        dim = -len(self.kernel_size) - 1
        self.expect(x, dim, self.in_channels, "channels")
        if self.sliced.how.leaves_sliced:
            self.port.state.enter(x)
        weight, bias = self.part("weight"), self.part("bias")
        y: Tensor = self._conv_forward(copied(x, self.port), weight, bias)
        return gathered(y, self.port, dim, self.sizes("weight")) if self.sliced.how.gather else y


class InputChannels(SlicedModule, _ConvNd):
    """Convolution that takes some of the input channels; the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: _ConvNd, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        return {"weight": along(1, parts_of(module.in_channels, how.units, slices))}

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.part("weight"), self.part("bias")
        self.expect(x, -len(self.kernel_size) - 1, weight.shape[1], "channels")
        y = summed(self._conv_forward(x, weight, None), self.port)
        self.port.state.leave(x)
        return y if bias is None else y + bias.view(-1, *(1,) * len(self.kernel_size))


class ChannelGroupNorm(SlicedModule, nn.GroupNorm):
    """Group normalisation of some groups, each of which lies entirely in one slice."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: nn.GroupNorm, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        units = how.units or module.num_groups
        if module.num_groups % units:
            raise UserError(
                f"tensor_plan: {units} units do not fit a GroupNorm of {module.num_groups} groups; use "
                f"units={module.num_groups} there, and for the convolutions before and after it"
            )
        parts = parts_of(module.num_channels, units, slices)
        return {name: along(0, parts) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        channels = self.sizes("weight")[self.port.index]
        self.expect(x, 1, channels, "channels")
        groups = self.num_groups * channels // self.num_channels
        return F.group_norm(x, groups, self.part("weight"), self.part("bias"), self.eps)


class ChannelBatchNorm(SlicedModule, _BatchNorm):
    """Batch normalisation of some channels; channels are independent, so running statistics are cut, too."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: _BatchNorm, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        parts = parts_of(module.num_features, how.units, slices)
        return {name: along(0, parts) for name in ("weight", "bias", "running_mean", "running_var")}

    def forward(self, x: Tensor) -> Tensor:
        self.expect(x, 1, self.sizes("weight")[self.port.index], "channels")
        rate = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            rate = 1 / float(self.num_batches_tracked) if self.momentum is None else rate
        keeps = not self.training or self.track_running_stats
        mean, variance = (self.running_mean, self.running_var) if keeps else (None, None)
        by_batch = self.training or self.running_mean is None
        weight, bias = self.part("weight"), self.part("bias")
        return F.batch_norm(x, mean, variance, weight, bias, by_batch, rate, self.eps)


class SlicedDropout(SlicedModule, nn.Dropout):
    """Dropout that draws for the whole activation and takes its part, so every slice draws as much as one process."""

    @classmethod
    def cuts(cls, _module: nn.Dropout, how: Slicing, _slices: int) -> dict[str, list[Cut]]:
        if not how.units:
            raise UserError(
                "tensor_plan: dropout inside sliced layers needs the complete width, such as: inside units=512"
            )
        return {}

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        how, dim = self.sliced.how, 1 if self.sliced.how.channels else x.dim() - 1
        parts = parts_of(how.units, 0, self.port.world)
        mine = parts[self.port.index]
        each = x.shape[dim] // len(mine)
        self.expect(x, dim, each * len(mine), "features")
        whole = (*x.shape[:dim], each * how.units, *x.shape[dim + 1 :])
        self.port.state.leave(x)
        kept = F.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), self.p)
        self.port.state.enter(x)  # all slices have drawn the same numbers
        return x * kept.narrow(dim, each * mine.start, x.shape[dim])


def _of(base: type[SlicedModule], kind: type[nn.Module]) -> type[SlicedModule]:
    return type(f"{base.__name__}Of{kind.__name__}", (base, kind), {"__doc__": base.__doc__})


_ROWS = -2  # the dimension of rows in (…, channels, rows, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWindow:
    """Which input rows an output row needs."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    top: int = 0  # rows of padding above
    bottom: int = 0

    def height(self, height: int) -> int:
        return (height + self.top + self.bottom - self.dilation * (self.kernel - 1) - 1) // self.stride + 1

    def needs(self, rows: range, height: int) -> tuple[range, int, int]:
        """The input rows for these output rows, and how many rows of padding belong above and below them."""
        if not rows:
            return range(0), 0, 0
        first = rows.start * self.stride - self.top
        end = (rows.stop - 1) * self.stride - self.top + self.dilation * (self.kernel - 1) + 1
        inside = range(min(max(first, 0), height), max(min(end, height), 0))
        if not inside:  # these output rows see padding only
            return range(0), end - first, 0
        return inside, inside.start - first, end - inside.stop


def fetched(x: Tensor, port: Port, has: Sequence[range], needs: Sequence[range]) -> Tensor:
    """Collective: the rows `needs[port.index]`, of which each slice `has` some; slices hold rows in rank order."""
    if port.world == 1:
        return x[..., needs[0].start : needs[0].stop, :]
    port.trains = torch.is_grad_enabled()
    rows: Tensor = _Fetched.apply(x, port, tuple(has), tuple(needs))  # type: ignore[no-untyped-call]
    return rows


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, port: Port, has: Sequence[range], needs: Sequence[range]) -> Tensor:
        ctx.place = port, has, needs
        me, own = port.index, has[port.index]
        to = {other: _rows(x, own, _common(own, needs[other])) for other in range(port.world) if other != me}
        shapes = {other: _sized(x, len(_common(has[other], needs[me]))) for other in to}
        came = _passed(port, to, shapes, x, backward=False)
        came[me] = _rows(x, own, _common(own, needs[me]))
        return torch.cat([came[index] for index in sorted(came)], _ROWS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        port, has, needs = ctx.place
        me, wanted = port.index, needs[port.index]
        others = (other for other in range(port.world) if other != me)
        to = {other: _rows(gradient, wanted, _common(has[other], wanted)) for other in others}
        shapes = {other: _sized(gradient, len(_common(has[me], needs[other]))) for other in to}
        came = _passed(port, to, shapes, gradient, backward=True)
        came[me] = _rows(gradient, wanted, _common(has[me], wanted))
        total = gradient.new_zeros(_sized(gradient, len(has[me])))
        for index in sorted(came):
            _rows(total, has[me], _common(has[me], needs[index])).add_(came[index])
        return total, None, None, None


def _common(one: range, other: range) -> range:
    begin = max(one.start, other.start)
    return range(begin, max(begin, min(one.stop, other.stop)))


def _rows(x: Tensor, has: range, wanted: range) -> Tensor:
    return x[..., wanted.start - has.start : wanted.stop - has.start, :] if wanted else x[..., :0, :]


def _sized(x: Tensor, rows: int) -> tuple[int, ...]:
    return (*x.shape[:_ROWS], rows, x.shape[-1])


def _passed(
    port: Port, to: Mapping[int, Tensor], shapes: Mapping[int, Sequence[int]], like: Tensor, *, backward: bool
) -> dict[int, Tensor]:
    sends = {other: rows.detach().cpu().contiguous().view(-1) for other, rows in to.items() if rows.numel()}
    rooms = {other: torch.empty(tuple(shape), dtype=like.dtype) for other, shape in shapes.items()}
    receives = {other: room.view(-1) for other, room in rooms.items() if room.numel()}
    port.counted(lambda: port.group.exchange(sends, receives), backward=backward)
    return {other: room.to(like.device) for other, room in rooms.items()}


class SpatialModule(SlicedModule):
    """Base class of layers that work on some rows of the image."""

    @classmethod
    def cuts(cls, _module: nn.Module, _how: Slicing, _slices: int) -> dict[str, list[Cut]]:
        return {}

    def entered(self, x: Tensor) -> Tensor:
        """Return this slice's rows; takes them from the whole image where the plan scatters it here."""
        if not self.sliced.how.scatter:
            return x
        x = as_whole(x)
        self.port.state.height = height = x.shape[_ROWS]
        self.port.state.enter(x)
        return scattered(x, self.port, _ROWS, [len(one) for one in self.shares(height)])

    def left(self, y: Tensor) -> Tensor:
        """Return the output; collective, and the whole image, where the plan gathers it here."""
        if not self.sliced.how.gather:
            return y
        sizes = [len(one) for one in self.shares(self.port.state.height)]
        self.port.state.leave(y)
        return gathered(y, self.port, _ROWS, sizes)

    def shares(self, height: int) -> list[range]:
        """Which rows each slice has of an image of this height; UserError where there are fewer rows than slices."""
        if height < self.port.world:
            raise UserError(
                f"strategy tensor: module {self.port.name!r} has an image of {height} rows, too few for "
                f"{self.port.world} slices; use fewer slices, or slice it by channels"
            )
        return parts_of(height, 0, self.port.world)

    def windowed(self, x: Tensor, window: RowWindow, value: float) -> Tensor:
        """Fetch the rows that this slice's output rows need, padded with `value`; record the output's height."""
        state = self.port.state
        has, height = self.shares(state.height), window.height(state.height)
        self.expect(x, _ROWS, len(has[self.port.index]), "rows")
        needs = [window.needs(out, state.height) for out in self.shares(height)]
        state.height = height
        x = fetched(x, self.port, has, [one for one, _, _ in needs])
        _, above, below = needs[self.port.index]
        return F.pad(x, (0, 0, above, below), value=value) if above or below else x


class SpatialConv2d(SpatialModule, nn.Conv2d):
    """Convolution of some rows; all slices have its weights, whose gradient is summed over the slices."""

    def forward(self, x: Tensor) -> Tensor:
        left, right, top, bottom = self._reversed_padding_repeated_twice
        kernel, stride, dilation = self.kernel_size[0], self.stride[0], self.dilation[0]
        window = RowWindow(kernel=kernel, stride=stride, dilation=dilation, top=top, bottom=bottom)
        x = F.pad(self.windowed(self.entered(x), window, 0.0), (left, right))
        bias = copied(self.bias, self.port) if self.bias is not None else None
        y = F.conv2d(x, copied(self.weight, self.port), bias, self.stride, 0, self.dilation, self.groups)
        return self.left(y)


class SpatialMaxPool2d(SpatialModule, nn.MaxPool2d):
    """Max pooling of some rows."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, across), (stride, sideways) = _pair(self.kernel_size), _pair(self.stride)
        (above, beside), (dilation, along) = _pair(self.padding), _pair(self.dilation)
        window = RowWindow(kernel=kernel, stride=stride, dilation=dilation, top=above, bottom=above)
        x = self.windowed(self.entered(x), window, -torch.inf)
        y = F.max_pool2d(x, (kernel, across), (stride, sideways), (0, beside), (dilation, along))
        return self.left(y)


class SpatialAvgPool2d(SpatialModule, nn.AvgPool2d):
    """Average pooling of some rows."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel, across), (stride, sideways) = _pair(self.kernel_size), _pair(self.stride)
        above, beside = _pair(self.padding)
        window = RowWindow(kernel=kernel, stride=stride, top=above, bottom=above)
        x = F.pad(self.windowed(self.entered(x), window, 0.0), (beside, beside))
        y = F.avg_pool2d(x, (kernel, across), (stride, sideways), divisor_override=self.divisor_override)
        return self.left(y)


class SpatialGroupNorm(SpatialModule, nn.GroupNorm):
    """Group normalisation with statistics over all slices' rows: two numbers per group and sample are sent."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.entered(x)
        self.expect(x, _ROWS, len(self.shares(self.port.state.height)[self.port.index]), "rows")
        groups = x.reshape(x.shape[0], self.num_groups, -1)
        count = groups.shape[2] // x.shape[_ROWS] * self.port.state.height
        total = copied(summed(groups.sum(2, keepdim=True), self.port), self.port)
        centred = groups - total / count
        squares = copied(summed(centred.square().sum(2, keepdim=True), self.port), self.port)
        y = (centred * torch.rsqrt(squares / count + self.eps)).view(x.shape)
        if self.affine:
            shape = (-1, *(1,) * (x.dim() - 2))
            y = y * copied(self.weight, self.port).view(shape) + copied(self.bias, self.port).view(shape)
        return self.left(y)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


def why_not(module: nn.Module) -> str:
    """Why this module cannot be sliced by rows; empty where it can."""
    if isinstance(module, nn.Conv2d) and module.padding_mode != "zeros":
        return f"padding_mode={module.padding_mode} needs rows from the opposite edge"
    if isinstance(module, nn.MaxPool2d) and module.return_indices:
        return "return_indices would count from each slice's first row"
    if isinstance(module, nn.MaxPool2d | nn.AvgPool2d) and module.ceil_mode:
        return "ceil_mode=True reaches beyond the last row"
    if isinstance(module, nn.AvgPool2d) and not module.count_include_pad and _pair(module.padding)[0]:
        return "count_include_pad=False needs the position of the edge"
    return ""


_LINEAR: dict[SliceKind, type[SlicedModule]] = {
    SliceKind.COLUMN: sliced_layers.ColumnLinear,
    SliceKind.HEADS: sliced_layers.ColumnLinear,
    SliceKind.ROW: sliced_layers.RowLinear,
    SliceKind.VOCABULARY: sliced_layers.VocabularyLinear,
}
KINDS: dict[type[nn.Module], dict[SliceKind, type[SlicedModule]]] = {
    nn.Linear: _LINEAR,
    NonDynamicallyQuantizableLinear: _LINEAR,  # what torch's attention has for its output
    nn.Embedding: {SliceKind.VOCABULARY: sliced_layers.VocabularyEmbedding},
    nn.MultiheadAttention: {SliceKind.HEADS: sliced_layers.HeadsAttention},
    nn.Dropout: {SliceKind.INSIDE: SlicedDropout},
    nn.GroupNorm: {SliceKind.INSIDE: ChannelGroupNorm, SliceKind.SPATIAL: SpatialGroupNorm},
    nn.MaxPool2d: {SliceKind.SPATIAL: SpatialMaxPool2d},
    nn.AvgPool2d: {SliceKind.SPATIAL: SpatialAvgPool2d},
}
"""The sliced class of each module type, for each way to slice it."""

for _norm in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
    KINDS[_norm] = {SliceKind.INSIDE: _of(ChannelBatchNorm, _norm)}
for _conv in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    KINDS[_conv] = {
        SliceKind.CHANNELS_OUT: _of(OutputChannels, _conv),
        SliceKind.CHANNELS_IN: _of(InputChannels, _conv),
    }
KINDS[nn.Conv2d][SliceKind.SPATIAL] = SpatialConv2d
