"""Activation checkpointing (Chen et al., 2016): a block's activations are computed again in backward, and not kept.

The blocks of a model are what its outermost `nn.ModuleList` and `nn.Sequential` hold, as far as that has layers itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn

from manyhands.errors import UserError


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """While this is open, each block of `model` keeps its inputs alone; a UserError where there is no block.

    Random numbers that a block draws, as for dropout, are drawn alike both times.
    """
    from torch.utils.checkpoint import checkpoint

    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            "recompute: the model has no nn.ModuleList or nn.Sequential of blocks with layers in them; leave it out, "
            "or put the blocks into one"
        )
    own = [vars(block).get("forward") for block in blocks]  # mostly none: it is that of the class
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    try:
        yield
    finally:
        for block, forward in zip(blocks, own, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward


def blocks_of(model: nn.Module) -> list[nn.Module]:
    if isinstance(model, nn.ModuleList | nn.Sequential):
        return [one for one in dict.fromkeys(model) if any(True for _ in one.children())]
    return [block for child in model.children() for block in blocks_of(child)]
