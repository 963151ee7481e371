"""Backward in two pieces: the gradient of a part's input at once, those of its parameters later.

The input's gradient is what the stage before waits for. It needs the gradient at every operation between output and
input, and those of the parameters need nothing else: so these are kept where the way to a parameter leaves the way to
the input, and a parameter's gradient goes on from there. Nothing is computed twice, and the gradients are those of one
backward (Qi et al., "Zero Bubble Pipeline Parallelism", 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["PutOff"]


class PutOff:
    """One micro-batch's backward of one part, from `root` and the gradient of it (None: of one number, 1).

    First `input_gradient`, then `weight_gradients`, each once.
    """

    def __init__(
        self, root: Tensor, gradient: Tensor | None, x: Tensor | None, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._root = root
        self._gradient = gradient
        self._x = x
        self._parameters = [one for one in parameters if one.requires_grad]

    def input_gradient(self) -> None:
        """The gradient of the input, into its `grad`."""
        if self._x is None:
            return
        torch.autograd.backward(self._root, self._gradient, retain_graph=True, inputs=[self._x])

    def weight_gradients(self) -> None:
        """Those of the parameters, added to their `grad`."""
        if self._parameters:
            torch.autograd.backward(self._root, self._gradient, inputs=self._parameters)
