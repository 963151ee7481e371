"""A model served in slices: every process has its slice of every layer that can be sliced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from manyhands.errors import UserError
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.served_parts import ServedParts, refuse_others
from manyhands.strategies.tensor.lazy_tensor import as_whole
from manyhands.strategies.tensor.slicing import check_plan, slice_modules
from manyhands.strategies.tensor.strategy import Tensor as TensorStrategy
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link

_KIND = 0x68  # of messages between slices
_TIMEOUT_S = 30.0


class ServedSlices(ServedParts):
    """Slices of all layers, one process each; they are cut where they are used, from one copy in memory."""

    part: ClassVar[str] = "slice"
    chained: ClassVar[bool] = False
    precisions: ClassVar[tuple[str, ...]] = ("fp32",)

    def __init__(self, strategy: Strategy, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        del example
        assert isinstance(strategy, TensorStrategy), "the registry leads here from its own word"
        refuse_others(strategy, "slices")
        if strategy.slices < 1:
            raise UserError(
                f"--strategy {strategy}: say how many slices a served model has, as in 'tensor slices=2'"
            )
        check_plan(model, strategy.slices)
        self.modules = (model,) * strategy.slices

    @staticmethod
    def attach(module: nn.Module, rank: int, links: Mapping[int, Link]) -> nn.Module:
        members = range(len(links) + 1)
        group = LinkGroup(rank, members, links, _TIMEOUT_S, kind=_KIND, name="the slices of a layer")
        slice_modules(module, group)
        # Scores may be sliced, and gathering them takes all slices.
        module.register_forward_hook(lambda _module, _inputs, output: tree_map(as_whole, output))
        return module
