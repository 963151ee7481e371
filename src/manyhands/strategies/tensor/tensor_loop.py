"""`tensor` in a loop of the user's own: forward and backward pass activations between slices, whoever runs them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.exchange import CutModel, LocalStep, SharedStep
from manyhands.strategies.common.grid.loop_gradients import LoopGradients
from manyhands.strategies.tensor.exchange import TensorExchange


class TensorLoop(TensorExchange):
    """One worker's slice of one replica; every worker calls the model for the same batch of its replica."""

    cuts_model = True
    hooks: LoopGradients | None = None

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._device = next((one.device for one in model.parameters()), self._device)
        super().attach(model, optimizer)
        self._model, self._open = model, ExitStack()
        self.hooks = LoopGradients([one.local for one in self._held.held])
        for root in model if isinstance(model, nn.ModuleList) else [model]:
            self._open.callback(root.register_forward_pre_hook(self._draw_alike).remove)
        self.cut = CutModel(
            begin_load=self._held.cut_state,
            end_load=lambda: None,
            optimizer_part=self._held.optimizer_part,
            make_whole=self._make_whole,
        )

    def agree(self, local: LocalStep) -> SharedStep:
        assert self.hooks is not None, "set by attach"
        with self.hooks.pending():
            return super().agree(local)

    def close(self) -> None:
        super().close()
        if self.hooks is not None:
            self.hooks.close()
            self._open.close()

    def _draw_alike(self, module: nn.Module, _: Any) -> None:
        """All slices of a replica draw the same numbers in a forward, whatever the script has drawn before."""
        if module.training and self._slices.world > 1:
            own = torch.cuda if self._device.type == "cuda" else torch
            own.set_rng_state(self._slices.broadcast(own.get_rng_state()))

    def _make_whole(self, state: Mapping[str, torch.Tensor]) -> None:
        self._sliced.undo()
        self._held.make_whole(state)
        for name in self._sliced.buffers:
            self._model.get_buffer(name).copy_(state[name])
