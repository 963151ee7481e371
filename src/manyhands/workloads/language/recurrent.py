"""A recurrent network, LSTM layers one above the other, that predicts the next byte of a text.

Each layer is an LSTM (Hochreiter & Schmidhuber 1997) whose forget gates begin open, with a bias of 1 (Gers et al.
2000). The model is a chain, and every layer can be run over slices of time: layer l at slice t needs layer l − 1 at t
and its own state after t − 1, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from manyhands.data.file_reader import VOCABULARY
from manyhands.engine.chain import State
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.language.next_token import TextOptions, text_task
from manyhands.workloads.task_options import option


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentOptions(TextOptions):
    """What may be chosen about the recurrent task."""

    context: int = option(64, "context length in bytes", at_least=1)
    layers: int = option(2, "stacked LSTM layers", at_least=1, at_most=4)
    width: int = option(128, "features per position and layer", at_least=1)
    learning_rate: float = option(4e-3, "learning rate of AdamW", above=0)


def recurrent(options: RecurrentOptions | None = None) -> Task:
    """Predict the next byte of a text with LSTMs; each window begins with a state of zeros."""
    options = options or RecurrentOptions()
    return text_task("recurrent", partial(_model, options), options, options.context)


def _model(options: RecurrentOptions) -> RecurrentNetwork:
    return RecurrentNetwork(layers=options.layers, width=options.width)


RECURRENT = BuiltinTask(
    name="recurrent",
    help="the next byte of a text, layers of LSTM",
    options_type=RecurrentOptions,
    make=recurrent,
    model=_model,
    steps=500,
)


class RecurrentNetwork(nn.Module):
    """Scores of the next token at every position: an embedding, LSTM layers, a linear head."""

    def __init__(self, *, layers: int, width: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(RecurrentLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def chain(self) -> Sequence[nn.Module]:
        return [self.tokens, *self.layers, self.head]

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for module in self.chain():
            x = module(x)
        return x


class RecurrentLayer(nn.Module):
    """One LSTM layer, as wide as its input; dimension 0 is the batch, 1 is time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        with torch.no_grad():  # the gates lie one after another: input, forget, cell, output
            for name, parameter in self.lstm.named_parameters():
                if name.startswith("bias"):
                    parameter.zero_()
                if name.startswith("bias_ih"):
                    parameter[width : 2 * width] = 1

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) to the same, from a state of zeros."""
        output, _ = self.over_time(x)
        return output

    def over_time(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The outputs of a slice of time, and the state after it, given that before it (None: zeros)."""
        output, after = self.lstm(x, state)
        return output, after
