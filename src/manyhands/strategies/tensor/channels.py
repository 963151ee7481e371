"""Convolutions sliced by channels, and modules inside sliced work: group and batch normalisation, dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from manyhands.errors import UserError
from manyhands.strategies.common.grid.held import Cut
from manyhands.strategies.tensor.lazy_tensor import settled
from manyhands.strategies.tensor.moves import copied, gathered, summed
from manyhands.strategies.tensor.sliced_layers import SlicedModule, along, whole_attribute
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing, parts_of

__all__ = ["BATCH_NORMS", "CONVOLUTIONS", "DROPOUT", "GROUP_NORM"]


class OutputChannels(SlicedModule, _ConvNd):
    """Convolution that computes some of the output channels from the whole input."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: _ConvNd, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the filters and their biases."""
        parts = parts_of(module.out_channels, how.units, slices)
        return {name: along(0, parts) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        """Return this slice's output channels, or all of them where the plan gathers."""
        x = settled(x)
        dim = -len(self.kernel_size) - 1
        self.expect(x, dim, self.in_channels, "channels")
        if self.sliced.how.leaves_sliced:
            self.sliced.draws.enter(x)
        weight, bias = self.part("weight"), self.part("bias")
        assert weight is not None, "a convolution has a weight"
        y: Tensor = self._conv_forward(copied(x, self.port), weight, bias)
        return gathered(y, self.port, dim, self.sizes("weight")) if self.sliced.how.gather else y


class InputChannels(SlicedModule, _ConvNd):
    """Convolution that takes some of the input channels; the slices' results are summed."""

    weight = whole_attribute("weight")

    @classmethod
    def cuts(cls, module: _ConvNd, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the input channels of all filters; the bias stays whole and is added once, after the sum."""
        return {"weight": along(1, parts_of(module.in_channels, how.units, slices))}

    def forward(self, x: Tensor) -> Tensor:
        """Collective: return the whole output."""
        weight, bias = self.part("weight"), self.part("bias")
        assert weight is not None, "a convolution has a weight"
        self.expect(x, -len(self.kernel_size) - 1, weight.shape[1], "channels")
        y = summed(self._conv_forward(x, weight, None), self.port)
        self.sliced.draws.leave(x)
        return y if bias is None else y + bias.view(-1, *(1,) * len(self.kernel_size))


class _OutputChannels1d(OutputChannels, nn.Conv1d):
    pass


class _OutputChannels2d(OutputChannels, nn.Conv2d):
    pass


class _OutputChannels3d(OutputChannels, nn.Conv3d):
    pass


class _InputChannels1d(InputChannels, nn.Conv1d):
    pass


class _InputChannels2d(InputChannels, nn.Conv2d):
    pass


class _InputChannels3d(InputChannels, nn.Conv3d):
    pass


class ChannelGroupNorm(SlicedModule, nn.GroupNorm):
    """Group normalisation of some groups, each of which lies entirely in one slice."""

    weight = whole_attribute("weight")
    bias = whole_attribute("bias")

    @classmethod
    def cuts(cls, module: nn.GroupNorm, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Cut the parameters by the channels of this slice's groups."""
        units = how.units or module.num_groups
        if module.num_groups % units:
            raise UserError(
                f"tensor_plan: {units} units cut a GroupNorm of {module.num_groups} groups; use "
                f"units={module.num_groups} there, and for the convolutions before and after it"
            )
        parts = parts_of(module.num_channels, units, slices)
        return {name: along(0, parts) for name in ("weight", "bias")}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this slice's channels; the output is sliced as the input is."""
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
        """Cut the parameters and running statistics by channels."""
        parts = parts_of(module.num_features, how.units, slices)
        return {name: along(0, parts) for name in ("weight", "bias", "running_mean", "running_var")}

    def forward(self, x: Tensor) -> Tensor:
        """Normalise this slice's channels; the output is sliced as the input is."""
        self.expect(x, 1, self.sizes("weight")[self.port.index], "channels")
        rate = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            rate = 1 / float(self.num_batches_tracked) if self.momentum is None else rate
        keeps = not self.training or self.track_running_stats
        return F.batch_norm(
            x,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.part("weight"),
            self.part("bias"),
            self.training or self.running_mean is None,
            rate,
            self.eps,
        )


class _ChannelBatchNorm1d(ChannelBatchNorm, nn.BatchNorm1d):
    pass


class _ChannelBatchNorm2d(ChannelBatchNorm, nn.BatchNorm2d):
    pass


class _ChannelBatchNorm3d(ChannelBatchNorm, nn.BatchNorm3d):
    pass


class SlicedDropout(SlicedModule, nn.Dropout):
    """Dropout that draws for the whole activation and takes its part, so every slice draws as much as one process."""

    @classmethod
    def cuts(cls, module: nn.Dropout, how: Slicing, slices: int) -> dict[str, list[Cut]]:
        """Nothing is cut: dropout has no parameters."""
        del module, slices
        if not how.units:
            raise UserError(
                "tensor_plan: dropout inside sliced layers needs to know the whole width: inside units=512"
            )
        return {}

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of this slice's part; the output is sliced as the input is."""
        if not self.training or not self.p:
            return x
        how, dim = self.sliced.how, 1 if self.sliced.how.channels else x.dim() - 1
        parts = parts_of(how.units, 0, self.port.world)
        mine = parts[self.port.index]
        each = x.shape[dim] // len(mine)
        self.expect(x, dim, each * len(mine), "features")
        whole = (*x.shape[:dim], each * how.units, *x.shape[dim + 1 :])
        self.sliced.draws.leave(x)
        kept = F.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), self.p)
        self.sliced.draws.enter(x)  # all slices have drawn the same numbers
        return x * kept.narrow(dim, each * mine.start, x.shape[dim])


CONVOLUTIONS: dict[type[nn.Module], dict[SliceKind, type[SlicedModule]]] = {
    nn.Conv1d: {SliceKind.CHANNELS_OUT: _OutputChannels1d, SliceKind.CHANNELS_IN: _InputChannels1d},
    nn.Conv2d: {SliceKind.CHANNELS_OUT: _OutputChannels2d, SliceKind.CHANNELS_IN: _InputChannels2d},
    nn.Conv3d: {SliceKind.CHANNELS_OUT: _OutputChannels3d, SliceKind.CHANNELS_IN: _InputChannels3d},
}
BATCH_NORMS: dict[type[nn.Module], dict[SliceKind, type[SlicedModule]]] = {
    nn.BatchNorm1d: {SliceKind.INSIDE: _ChannelBatchNorm1d},
    nn.BatchNorm2d: {SliceKind.INSIDE: _ChannelBatchNorm2d},
    nn.BatchNorm3d: {SliceKind.INSIDE: _ChannelBatchNorm3d},
}
GROUP_NORM: dict[SliceKind, type[SlicedModule]] = {SliceKind.INSIDE: ChannelGroupNorm}
DROPOUT: dict[SliceKind, type[SlicedModule]] = {SliceKind.INSIDE: SlicedDropout}
