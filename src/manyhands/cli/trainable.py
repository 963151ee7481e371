"""What `manyhands train` and `manyhands compare` can train: built-in tasks, and those with commands of their own."""

from __future__ import annotations

from manyhands.cli.compare_command import compare_app
from manyhands.cli.density_command import add_sparse
from manyhands.cli.gbdt_command import add_gbdt
from manyhands.cli.glove_command import add_glove
from manyhands.cli.logreg_command import add_logreg
from manyhands.cli.svd_command import add_svd
from manyhands.cli.train_command import train_app

__all__ = ["compare_app", "train_app"]

add_glove(train_app, compare_app)
add_logreg(train_app, compare_app)
add_sparse(compare_app)
add_svd(train_app, compare_app)
add_gbdt(train_app, compare_app)
