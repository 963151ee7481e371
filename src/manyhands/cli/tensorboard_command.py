"""`manyhands tensorboard RUN`: a run's numbers as event files that TensorBoard reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tensorboard_command"]


def tensorboard_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    out: Annotated[
        Path | None, typer.Option(help="Write to this directory; RUN/tensorboard otherwise.")
    ] = None,
) -> None:
    """Write event files for TensorBoard: loss, metrics, speed, where each worker's time goes, staleness."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.observe.draw.tensorboard import write_run

    directory = out or run / "tensorboard"
    steps = write_run(run, directory)
    print(f"{directory} · {steps} steps · tensorboard --logdir {directory}")
