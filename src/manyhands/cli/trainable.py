"""Everything that `manyhands train` can train: the built-in tasks, and those with a command of their own."""

from __future__ import annotations

from manyhands.cli.glove import add_train_glove
from manyhands.cli.regression import add_train_logreg
from manyhands.cli.train import train_app

__all__ = ["train_app"]

add_train_glove(train_app)
add_train_logreg(train_app)
