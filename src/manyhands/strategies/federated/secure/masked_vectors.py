"""A client's update as the vector that it masks, and the sum of such vectors read back.

A vector is the update, the mean loss and the weight, so that nobody is known alone. The loss is two items, its whole
part and the rest, since the range of updates would not hold it.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, Words

__all__ = ["LOSS_ITEMS", "sum_of", "words_of"]

LOSS_ITEMS: Final = 2


def words_of(fixed: FixedPoint, update: ClientUpdate, weight: float) -> Words:
    """What a client masks; its numbers are finite."""
    if weight != int(weight) or weight < 1:
        raise UserError(
            f"secure=yes: client {update.client} weighs {weight:g}; only whole numbers of at least 1 are summed"
        )
    flat = torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in update.change]).numpy()
    whole = math.floor(update.loss)
    loss = [whole * fixed.step, (update.loss - whole) * fixed.clip]
    return fixed.encode(np.append(flat, loss), int(weight))


def sum_of(fixed: FixedPoint, words: Words) -> tuple[Tensor, float, float]:
    """The sum of weight times update, all tensors in a row in double precision; of weight times loss; of weights."""
    items, weight = fixed.decode(words)
    sums = torch.from_numpy(items.astype(np.float64) * np.float64(fixed.step))
    whole, rest = (float(one) for one in items[-LOSS_ITEMS:])
    return sums[:-LOSS_ITEMS], whole + rest / fixed.most, float(weight)
