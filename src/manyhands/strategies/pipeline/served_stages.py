"""A model served in stages: its chain of layers is cut where the largest stage has the fewest bytes of weights."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from manyhands.engine.chain import chain_of
from manyhands.errors import UserError, first_line
from manyhands.strategies.common.served_parts import ServedParts, refuse_others
from manyhands.strategies.pipeline.cuts import LayerCost, check_cuts, parts_of, planned
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategy import Strategy


class ServedStages(ServedParts):
    """Stages of a chain, one process each."""

    part: ClassVar[str] = "stage"
    chained: ClassVar[bool] = True
    precisions: ClassVar[tuple[str, ...]] = ("fp32", "bf16", "int8")

    def __init__(self, strategy: Strategy, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        assert isinstance(strategy, Pipeline), "the registry leads here from its own word"
        refuse_others(strategy, "stages", "cuts")
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
        costs = _costs(model, chain, example[0])
        cuts = strategy.cuts or planned(costs, stages, 1, lambda *_: 0, 0)
        self.modules = tuple(
            nn.Sequential(*(chain[place] for place in part)) for part in parts_of(cuts, len(chain))
        )


def _costs(model: nn.Module, chain: tuple[nn.Module, ...], example: Tensor) -> list[LayerCost]:
    """By the bytes of each layer; UserError where the chain does not compute what the model does."""
    costs: list[LayerCost] = []
    x: Any = example
    with torch.inference_mode():
        whole = model(example)
        try:
            for layer in chain:
                x = layer(x)
                held = sum(one.nbytes for one in (*layer.parameters(), *layer.buffers()))
                costs.append(LayerCost(seconds=float(held + 1), gives_tensor=isinstance(x, Tensor)))
            assert_close(x, whole, equal_nan=True)
        except Exception as error:
            why = f"after {len(costs)} of {len(chain)} layers: {type(error).__name__}: {first_line(error)}"
            raise UserError(
                f"{type(model).__name__}: its chain does not compute what it does ({why})"
            ) from error
    return costs
