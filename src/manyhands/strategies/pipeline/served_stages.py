"""A model served in stages: its chain of layers is cut where the largest stage has the fewest bytes of weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from manyhands.engine.chain import chain_of
from manyhands.errors import UserError
from manyhands.strategies.common.served_parts import ServedParts
from manyhands.strategies.pipeline.cuts import LayerCost, check_cuts, parts_of, planned
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategy import Strategy

__all__ = ["ServedStages"]


class ServedStages(ServedParts):
    """Stages of a chain, one process each."""

    part: ClassVar[str] = "stage"
    chained: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "int8")

    def __init__(self, strategy: Strategy, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        assert isinstance(strategy, Pipeline), "the registry leads here from its own word"
        for name in ("tensor", "data"):
            if getattr(strategy, name) > 1:
                raise UserError(f"--strategy {strategy}: a served model has stages only; leave {name} out")
        if len(example) != 1:
            raise UserError(
                f"--strategy {strategy}: a model in stages takes one tensor, not {len(example)}; use 'tensor slices="
                f"{strategy.stages}'"
            )
        chain, stages = chain_of(model), strategy.stages
        if stages > len(chain):
            raise UserError(
                f"stages={stages}: {type(model).__name__} is a chain of {len(chain)} layers; use fewer stages"
            )
        if strategy.cuts:
            check_cuts(strategy.cuts, len(chain), stages)
        cuts = strategy.cuts or planned(_costs(chain, example[0]), stages, 1, lambda *_: 0, 0)
        self.modules = tuple(
            nn.Sequential(*(chain[place] for place in part)) for part in parts_of(cuts, len(chain))
        )


def _costs(chain: tuple[nn.Module, ...], x: Any) -> list[LayerCost]:
    costs = []
    with torch.inference_mode():
        for layer in chain:
            x = layer(x)
            held = sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))
            costs.append(LayerCost(seconds=float(held + 1), gives_tensor=isinstance(x, Tensor)))
    return costs
