"""`manyhands predict RUN INPUT` and `manyhands generate RUN`: what a trained model answers."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

if TYPE_CHECKING:
    from manyhands.workloads.predictor import Predictor, ReadAs

__all__ = ["generate_command", "predict_command"]

_Model = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's directory, or a file of its exported model.")
]


def predict_command(
    run: _Model,
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="A file as the task has them (see below); words for glove; - is stdin for logreg.",
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write there.", show_default="stdout")
    ] = None,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="What INPUT is, where how it begins does not tell: picture, npy, idx, json; libsvm, vw.",
        ),
    ] = "auto",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Of logreg: leave out lines that are wrong and count them.")
    ] = False,
) -> None:
    """Print what a trained model answers for every input, one a line.

    - digits, mnist: a picture (PNG and others, with Pillow), an npy array, an idx file or a JSON array of images; the
      class and its probability.
    - logreg: examples, LIBSVM or Vowpal Wabbit, plain or gzip; the probability of the larger label.
    - gbdt: rows of numbers, LIBSVM, npy or Parquet; the prediction, or the probability of the larger label.
    - svd: rows of numbers, LIBSVM, npy or Parquet; their coordinates along the components.
    - line: a text with a number on each line; y for each.
    - glove: a word, or words as in "king - man + woman"; the nearest words.
    - language, recurrent: see `manyhands generate`.

    `manyhands serve RUN` answers the same over HTTP; `mh.load(RUN)` gives the module, also of a Task of your own.
    """
    # Imported here so that help texts do not wait for torch.
    from manyhands.errors import UserError
    from manyhands.serving.opening import open_predictor
    from manyhands.workloads.predictor import ReadAs

    predictor = open_predictor(run)
    read_as = ReadAs(format=file_format, skip_bad=skip_bad, threads=len(os.sched_getaffinity(0)))
    try:
        if out is None:
            _write_answers(predictor, source, read_as, sys.stdout)
            sys.stdout.flush()
        else:
            with out.open("w", encoding="utf-8") as stream:
                written = _write_answers(predictor, source, read_as, stream)
            print(f"manyhands: wrote {written:,} line{'s' * (written != 1)} to {out}", file=sys.stderr)
    except BrokenPipeError:  # whoever reads has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        raise UserError(f"predictions cannot be written to {out or 'stdout'}: {error.strerror}") from error
    if predictor.left_out:
        print(f"manyhands: {predictor.left_out} bad lines of {source} were left out", file=sys.stderr)
    print(
        f"manyhands: {shlex.join(['manyhands', 'serve', str(run)])} answers the same over HTTP",
        file=sys.stderr,
    )


def _write_answers(predictor: Predictor[Any], source: str, read_as: ReadAs, stream: TextIO) -> int:
    """Returns how many lines that were."""
    from manyhands.observe.draw.bars import Bars

    written = 0
    with Bars() as bars, bars.phase("predicting", None, "lines") as phase:
        for inputs in predictor.blocks(source, read_as):
            lines = [f"{line}\n" for line in predictor.lines(inputs)]
            stream.write("".join(lines))
            phase.advance(len(lines))
            written += len(lines)
    return written


def generate_command(
    run: _Model,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "def ",
    length: Annotated[int, typer.Option(help="Bytes to write.")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest byte each time; 1 draws as the model says.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Fixes what is drawn.")] = 0,
) -> None:
    """Let a trained language model write on after a prompt.

    For runs of `train language` and `train recurrent`; `manyhands serve RUN` answers the same over HTTP.
    """
    from manyhands.errors import UserError
    from manyhands.serving.opening import open_predictor
    from manyhands.serving.torch_predictors import Prompt, TextGenerator

    asked = Prompt(prompt=prompt, length=length, temperature=temperature, seed=seed)
    generator = open_predictor(run)
    if not isinstance(generator, TextGenerator):
        raise UserError(
            f"{run} is of the task {generator.task!r}, which writes no text; manyhands predict {run} INPUT"
        )
    (answer,) = generator.answers([asked])
    print(prompt + answer["text"])
    print(
        f"manyhands: another --seed writes something else; manyhands serve {run} answers over HTTP",
        file=sys.stderr,
    )
