"""`manyhands replay RUN`: a parameter-server run once more, in one process, to the same bytes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manyhands.strategies.ps.replay import Replayed

from manyhands.cli.command_options import check_writable
from manyhands.cli.program import spare_the_compiler

__all__ = ["replay_command"]


def replay_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    until: Annotated[
        int | None, typer.Option(help="Stop where every shard has applied so many global batches.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the weights to this safetensors file.")] = None,
) -> None:
    """Execute the recorded order of a run again: the same weights, or the first update that differs."""
    # Imported here so that help texts do not wait for torch.
    from manyhands.data.store.atomic import write_atomically
    from manyhands.data.store.tensorfile import encode_tensors
    from manyhands.errors import format_bytes
    from manyhands.strategies.ps.replay import replay

    check_writable(save, "--save")
    spare_the_compiler()
    began = time.monotonic()
    done = replay(run, until=until)
    for note in done.notes:
        print(f"manyhands: {note}", file=sys.stderr)
    print(
        f"{done.updates} updates again in {time.monotonic() - began:.1f} s, {done.steps} batches at every shard, "
        f"{format_bytes(done.extra_bytes)} of copies"
    )
    print("  ".join(_beside(done)))
    if save is not None:
        write_atomically(save, encode_tensors(done.model.state_dict()))
        print(f"weights in {save}")
    sentence, is_good = _verdict(done)
    if not is_good:
        print(f"manyhands: {sentence}", file=sys.stderr)
        raise typer.Exit(1)
    print(sentence)


def _beside(done: Replayed) -> list[str]:
    """Loss and metrics, each with what the run itself had."""
    values = ({} if done.loss is None else {"loss": done.loss}) | (done.metrics or {})
    own = ({} if done.run_loss is None else {"loss": done.run_loss}) | done.run_metrics
    return [
        f"{name} {value:.4f}" + (f" (in the run {own[name]:.4f})" if name in own else "")
        for name, value in values.items()
    ]


def _verdict(done: Replayed) -> tuple[str, bool]:
    if done.first_difference is not None:
        return done.first_difference.sentence, False
    if done.same_bytes is None:
        return "every gradient is the recorded one; there are no final weights to compare with here", True
    if done.same_bytes:
        return "every gradient is the recorded one, and the weights are the same bytes", True
    return (
        "every gradient is the recorded one, and yet the weights at the end are not those of the run",
        False,
    )
