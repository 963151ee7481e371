"""`manyhands schedule NAME`: a schedule of a pipeline or of an all-reduce, drawn and costed before training."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.command_options import check_writable
from manyhands.errors import UserError, format_bytes, nearest
from manyhands.strategy import parse_size

if TYPE_CHECKING:
    from manyhands.strategies.pipeline.schedules import Schedule

__all__ = ["schedule_command"]

MAX_STAGES, MAX_MICROBATCHES, MAX_CHUNKS = 64, 256, 8
MAX_DRAWN_WORKERS, MAX_WORKERS = 16, 256
RATES = (20e-6, 1 / 2e9, 1 / 10e9)
"""Alpha, beta and gamma: seconds for a message, for a byte sent, for a byte added."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The options, each None where it was not given."""

    stages: int | None
    microbatches: int | None
    chunks: int | None
    workers: str | None
    size: str | None
    svg: Path | None

    def refuse(self, name: str, kind: str, *others: str) -> None:
        """UserError for an option that this kind of schedule does not have."""
        for other in others:
            if getattr(self, other) is not None:
                raise UserError(f"--{other} does not go with {name}, which is {kind}")


def schedule_command(
    name: Annotated[
        str | None, typer.Argument(help="Which schedule; without a name they are listed.", show_default=False)
    ] = None,
    stages: Annotated[int | None, typer.Option(help="Stages of a pipeline.", show_default="4")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="Micro-batches, or slices of time, in a step.", show_default="8")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(help="Parts that each stage of `interleaved` has.", show_default="2")
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(help="Workers of an all-reduce; several, as in 2,4,8, for a table.", show_default="4"),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            help="Bytes of a message between stages, or of what is all-reduced.", show_default="1MiB"
        ),
    ] = None,
    svg: Annotated[Path | None, typer.Option(help="Write the picture to this file, too.")] = None,
) -> None:
    """Draw a schedule of a pipeline or an all-reduce, and say what it costs."""
    # Imported here so that help texts do not wait for it.
    from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
    from manyhands.strategies.pipeline.schedules import SCHEDULES

    asked = _Asked(stages, microbatches, chunks, workers, size, svg)
    if name is None:
        if asked != _Asked(None, None, None, None, None, None):
            raise UserError("options need the name of a schedule, as in `manyhands schedule 1f1b --stages 4`")
        _list()
    elif name in SCHEDULES:
        _pipeline(name, asked)
    elif name in ALGORITHMS:
        _allreduce(name, asked)
    else:
        raise UserError(f"there is no schedule {name!r}; {nearest(name, [*SCHEDULES, *ALGORITHMS])}")


def _list() -> None:
    from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
    from manyhands.strategies.pipeline.schedules import SCHEDULES

    wide = max(map(len, [*SCHEDULES, *ALGORITHMS]))
    print("Of a pipeline, as in `manyhands schedule 1f1b --stages 4 --microbatches 8`:")
    for name, maker in SCHEDULES.items():
        print(f"  {name:<{wide}}  {(maker.__doc__ or '').partition(chr(10))[0]}")
    print("\nOf an all-reduce, as in `manyhands schedule ring --workers 4`:")
    for name, algorithm in ALGORITHMS.items():
        print(f"  {name:<{wide}}  {algorithm.description[0].upper()}{algorithm.description[1:]}.")


def _pipeline(name: str, asked: _Asked) -> None:
    from manyhands.strategies.pipeline.schedule_cost import check, cost, equal_times
    from manyhands.strategies.pipeline.schedule_drawing import as_svg, costs_text, heading
    from manyhands.strategies.pipeline.schedules import SCHEDULES, interleaved

    asked.refuse(name, "a schedule of a pipeline: say --stages and --microbatches", "workers")
    if name != "interleaved":
        asked.refuse(name, "a schedule with one part on every stage; `interleaved` has several", "chunks")
    stages = _within("stages", asked.stages, 4, MAX_STAGES)
    microbatches = _within("microbatches", asked.microbatches, 8, MAX_MICROBATCHES)
    chunks = _within("chunks", asked.chunks, 2, MAX_CHUNKS)
    num_bytes = _size(asked)
    check_writable(asked.svg, "--svg")
    table = (
        interleaved(stages, microbatches, chunks)
        if name == "interleaved"
        else SCHEDULES[name](stages, microbatches)
    )
    check(table)
    found = cost(table, equal_times(table), [num_bytes] * (table.parts - 1))
    print(f"{heading(table)}\n")
    _print_drawing(table)
    print(f"\n{costs_text(table, found)}")
    print(
        "Stages are equal; forward, the gradient of the input and that of the weights take one unit of time each, and "
        f"messages of {format_bytes(num_bytes)} none.\nActivations are those of one micro-batch in "
        f"{f'one of the {table.chunks} parts of ' if table.chunks > 1 else ''}the stage, held at once. "
        f"The step takes {found.time:g} units."
    )
    if asked.svg is not None:
        _write_svg(asked.svg, as_svg(table))


def _print_drawing(table: Schedule) -> None:
    """In colours and as wide as the window in a terminal; in one piece where it goes elsewhere."""
    from manyhands.strategies.pipeline.schedule_drawing import LETTERS, as_text

    whole = (
        "B backward · W weight gradient" if table.splits_backward else "B backward with the weight gradient"
    )
    print(f"F forward · {whole} · elsewhere the stage waits\n")
    if not sys.stdout.isatty():
        print(as_text(table), end="")
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(as_text(table, shutil.get_terminal_size().columns), end="")
    for letter, style in zip(LETTERS.values(), ("bold blue", "bold green", "bold yellow"), strict=True):
        text.highlight_regex(rf"\b{letter}\d+[a-z]?\b", style)
    Console().print(text, soft_wrap=True)


def _allreduce(name: str, asked: _Asked) -> None:
    from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
    from manyhands.strategies.common.collectives.collective_drawing import (
        as_svg,
        as_text,
        costs_text,
        example,
        watch,
    )

    asked.refuse(name, "a schedule of an all-reduce: say --workers", "stages", "microbatches", "chunks")
    worlds = _numbers("4" if asked.workers is None else asked.workers)
    num_bytes = _size(asked)
    check_writable(asked.svg, "--svg")
    if len(worlds) > 1 and asked.svg is not None:
        raise UserError(f"--svg draws one number of workers, not {asked.workers}")
    if worlds[0] > MAX_DRAWN_WORKERS and len(worlds) == 1:
        raise UserError(
            f"--workers {worlds[0]} is too many for a drawing, which has {MAX_DRAWN_WORKERS} at most; several numbers, "
            "as in 8,16,32, make a table"
        )
    algorithm = ALGORITHMS[name]
    print(f"{name} · {algorithm.description}\nFrom: {algorithm.source}\n")
    if len(worlds) == 1:
        print(
            "`5` is a worker's own number, `(26)` a partial sum, `[37]` the sum of all; `0→1:b` sends b to worker 1."
            f"\n\n{as_text(watch(algorithm, example(worlds[0])))}"
        )
    print(costs_text(algorithm, worlds, num_bytes, RATES))
    print(
        f"An all-reduce of {format_bytes(num_bytes)}; a message takes 20 µs and its bytes at 2 GB/s, bytes are added "
        "at 10 GB/s.\nA worker sends and receives one message at a time."
    )
    if asked.svg is not None:
        _write_svg(asked.svg, as_svg(watch(algorithm, example(worlds[0]))))


def _within(option: str, number: int | None, default: int, most: int) -> int:
    if number is None:
        return default
    if not 1 <= number <= most:
        raise UserError(f"--{option} {number} is not allowed; 1 to {most} can be drawn")
    return number


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MAX_WORKERS):
            raise UserError(
                f"--workers {text}: {word or 'nothing'!r} is not a number of workers; 1 to {MAX_WORKERS} are allowed, "
                "several as in 2,4,8"
            )
    return list(map(int, words))


def _size(asked: _Asked) -> int:
    return parse_size("1MiB" if asked.size is None else asked.size)


def _write_svg(path: Path, drawing: str) -> None:
    from manyhands.data.store.atomic import (
        write_atomically,
    )  # it brings torch: what is only printed does not wait for that

    write_atomically(path, [drawing.encode()])
    print(f"picture in {path}")
