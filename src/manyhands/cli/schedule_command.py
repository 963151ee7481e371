"""`manyhands schedule NAME`: a schedule of a pipeline or of an all-reduce, drawn and costed before training."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cli.command_options import argument, from_options, option
from manyhands.errors import UserError, format_bytes, nearest
from manyhands.strategy import parse_size

if TYPE_CHECKING:
    from manyhands.strategies.common.collectives.schedule import Algorithm
    from manyhands.strategies.pipeline.schedules import Schedule

MAX_STAGES, MAX_MICROBATCHES, MAX_CHUNKS = 64, 256, 8
MAX_DRAWN_WORKERS, MAX_WORKERS = 16, 256
RATES = (20e-6, 1 / 2e9, 1 / 10e9)
"""Alpha, beta and gamma: seconds for a message, for a byte sent, for a byte added."""


@dataclass(frozen=True)
class _ScheduleOptions:
    name: str | None = argument(None, "Name of the schedule; without it, list all.", show_default=False)
    stages: int | None = option(None, "Stages of a pipeline.", shown="4")
    microbatches: int | None = option(None, "Micro-batches, or time slices, per step.", shown="8")
    chunks: int | None = option(None, "Parts per stage of `interleaved`.", shown="2")
    workers: str | None = option(None, "Workers of an all-reduce; 2,4,8 gives a table.", shown="4")
    size: str | None = option(None, "Size of a pipeline's message, or of an all-reduce.", shown="1MiB")
    svg: Path | None = option(None, "Also write the picture to this file.", writes=True)

    def refuse(self, kind: str, *others: str) -> None:
        for other in others:
            if getattr(self, other) is not None:
                raise UserError(f"--{other} does not go with {self.name}, which is {kind}")

    def within(self, name: str, default: int, most: int) -> int:
        number = getattr(self, name)
        if number is not None and not 1 <= number <= most:
            raise UserError(f"--{name} {number} is not allowed; 1 to {most} can be drawn")
        return default if number is None else int(number)

    @property
    def num_bytes(self) -> int:
        return parse_size("1MiB" if self.size is None else self.size)


@from_options
def schedule_command(asked: _ScheduleOptions) -> None:
    from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
    from manyhands.strategies.pipeline.schedules import SCHEDULES

    name = asked.name
    if name is None:
        if asked != _ScheduleOptions():
            raise UserError("options need a schedule, such as `manyhands schedule 1f1b --stages 4`")
        wide = max(map(len, [*SCHEDULES, *ALGORITHMS]))
        print("Pipelines, for example `manyhands schedule 1f1b --stages 4 --microbatches 8`:")
        for each, maker in SCHEDULES.items():
            print(f"  {each:<{wide}}  {(maker.__doc__ or '').partition(chr(10))[0]}")
        print("\nAll-reduces, for example `manyhands schedule ring --workers 4`:")
        for each, algorithm in ALGORITHMS.items():
            print(f"  {each:<{wide}}  {algorithm.description[0].upper()}{algorithm.description[1:]}.")
    elif name in SCHEDULES:
        _pipeline(name, asked)
    elif name in ALGORITHMS:
        _allreduce(ALGORITHMS[name], asked)
    else:
        raise UserError(f"there is no schedule {name!r}; {nearest(name, [*SCHEDULES, *ALGORITHMS])}")


def _pipeline(name: str, asked: _ScheduleOptions) -> None:
    from manyhands.strategies.pipeline.schedule_cost import check, cost, equal_times
    from manyhands.strategies.pipeline.schedule_drawing import as_svg, costs_text, heading
    from manyhands.strategies.pipeline.schedules import SCHEDULES, interleaved

    asked.refuse("a pipeline schedule; give --stages and --microbatches", "workers")
    if name != "interleaved":
        asked.refuse("a schedule with one part per stage; only `interleaved` has several", "chunks")
    counts = asked.within("stages", 4, MAX_STAGES), asked.within("microbatches", 8, MAX_MICROBATCHES)
    chunks, num_bytes = asked.within("chunks", 2, MAX_CHUNKS), asked.num_bytes
    table = interleaved(*counts, chunks) if name == "interleaved" else SCHEDULES[name](*counts)
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


def _allreduce(algorithm: Algorithm, asked: _ScheduleOptions) -> None:
    from manyhands.strategies.common.collectives import collective_drawing as drawing

    asked.refuse("an all-reduce schedule; give --workers", "stages", "microbatches", "chunks")
    worlds = _numbers("4" if asked.workers is None else asked.workers)
    num_bytes = asked.num_bytes
    if len(worlds) > 1 and asked.svg is not None:
        raise UserError(f"--svg needs one number of workers, not {asked.workers}")
    if worlds[0] > MAX_DRAWN_WORKERS and len(worlds) == 1:
        raise UserError(
            f"--workers {worlds[0]} is too many for a drawing, which has {MAX_DRAWN_WORKERS} at most; several numbers, "
            "as in 8,16,32, make a table"
        )
    print(f"{asked.name} · {algorithm.description}\nFrom: {algorithm.source}\n")
    if len(worlds) == 1:
        print(
            "`5` is a worker's own number, `(26)` a partial sum, `[37]` the sum of all; `0→1:b` sends b to worker 1."
            f"\n\n{drawing.as_text(drawing.watch(algorithm, drawing.example(worlds[0])))}"
        )
    print(drawing.costs_text(algorithm, worlds, num_bytes, RATES))
    print(
        f"An all-reduce of {format_bytes(num_bytes)}; a message takes 20 µs and its bytes at 2 GB/s, bytes are added "
        "at 10 GB/s.\nA worker sends and receives one message at a time."
    )
    if asked.svg is not None:
        _write_svg(asked.svg, drawing.as_svg(drawing.watch(algorithm, drawing.example(worlds[0]))))


def _numbers(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isascii() and word.isdigit() and 1 <= int(word[:9]) <= MAX_WORKERS):
            raise UserError(
                f"--workers {text}: {word or 'nothing'!r} is not a number of workers; 1 to {MAX_WORKERS} are allowed, "
                "several as 2,4,8"
            )
    return list(map(int, words))


def _write_svg(path: Path, drawing: str) -> None:
    # It brings torch: what is only printed does not wait for that.
    from manyhands.data.store.atomic import write_atomically

    write_atomically(path, [drawing.encode()])
    print(f"picture in {path}")
