"""Use a trained model: `manyhands predict RUN INPUT`, `generate RUN`, `export RUN` and `serve RUN`."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyhands.cli.command_options import argument, from_options, json_option, option, write_json
from manyhands.errors import UserError, format_bytes, nearest, num_of

if TYPE_CHECKING:
    from manyhands.serving.model_server import ModelServer
    from manyhands.task import Task
    from manyhands.workloads.exporting import Export
    from manyhands.workloads.predictor import Predictor, ReadAs


@dataclass(frozen=True)
class _Model:
    run: Path = argument(..., "The run's directory, or a file of its exported model.", metavar="RUN")


def _task_option() -> Any:
    return option(
        None, "Your own Task that trained it, such as my_module:task.", metavar="MODULE:NAME", shown=False
    )


def _own_task(text: str | None) -> Task | None:
    from manyhands.workloads.own_task import own_task

    return None if text is None else own_task(text)


def _serve_words(run: Path, task: str | None) -> str:
    return shlex.join(["manyhands", "serve", str(run), *(["--task", task] if task else [])])


@dataclass(frozen=True)
class _PredictOptions(_Model):
    source: str = argument(..., "File as above; words for glove; - is stdin for logreg.", metavar="INPUT")
    out: Path | None = option(None, "Write to this file.", metavar="FILE", shown="stdout")
    file_format: str = option("auto", "Format of INPUT: picture, npy, idx, json, libsvm or vw.", "--format")
    skip_bad: bool = option(
        False, "Of gbdt, logreg, svd and your own Task: skip invalid inputs and count them.", "--skip-bad"
    )
    task: str | None = _task_option()


@from_options
def predict_command(asked: _PredictOptions) -> None:
    """Inputs and outputs by task:

    - digits, mnist: a picture (PNG and others, with Pillow), npy array, idx file or JSON array of images; the class
      and its probability.

    - logreg: a table (CSV, Parquet), LIBSVM or Vowpal Wabbit; the probability of the larger label, or label and all.

    - gbdt: rows as a table (CSV, Parquet), LIBSVM or npy; the prediction, or as logreg.

    - svd: rows as a table (CSV, Parquet), LIBSVM or npy; their coordinates along the components.

    - line: a text with a number on each line; y for each. rl: a JSON array of observations or an npy array; the best
      action, its probability and the value.

    - glove: a word, or words as in "king - man + woman"; the nearest words. gpt, recurrent: see `manyhands generate`.

    - your own Task, by --task: a JSON array of inputs or an npy array; an answer as JSON on each line.

    `manyhands serve RUN` answers the same over HTTP; `mh.load(RUN)` gives the module.
    """
    from manyhands.data.store.atomic import WriteFailed, write_atomically
    from manyhands.serving.opening import open_predictor
    from manyhands.workloads.predictor import ReadAs

    source, out = asked.source, asked.out
    predictor = open_predictor(asked.run, _own_task(asked.task))
    cores = len(os.sched_getaffinity(0))
    read_as = ReadAs(format=asked.file_format, skip_bad=asked.skip_bad, threads=cores)
    written = 0

    def blocks() -> Iterator[str]:
        nonlocal written
        for lines in _answered(predictor, source, read_as):
            written += len(lines)
            yield "".join(lines)

    try:
        if out is None or (out.exists() and not out.is_file()):  # a pipe, say, which cannot be replaced
            with nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8") as stream:
                stream.writelines(blocks())
                stream.flush()
        else:
            write_atomically(out.resolve(), (block.encode() for block in blocks()))
        if out is not None:
            print(f"manyhands: wrote {written:,} line{'s' * (written != 1)} to {out}", file=sys.stderr)
    except WriteFailed as error:
        raise UserError(f"predictions: {error}") from error
    except BrokenPipeError:  # whoever reads has seen enough; what is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:
        raise UserError(f"predictions cannot be written to {out or 'stdout'}: {error.strerror}") from error
    if predictor.left_out:
        print(f"manyhands: {num_of(predictor.left_out, 'bad row')} of {source} left out", file=sys.stderr)
    if predictor.new_texts:
        new = f"{num_of(predictor.new_texts, 'value')} of {source} counted as missing"
        print(f"manyhands: {new}: categories that training did not have", file=sys.stderr)
    print(f"manyhands: {_serve_words(asked.run, asked.task)} answers the same over HTTP", file=sys.stderr)


def _answered(predictor: Predictor[Any], source: str, read_as: ReadAs) -> Iterator[list[str]]:
    from manyhands.observe.draw.bars import Bars

    with Bars() as bars, bars.phase("predicting", None, "lines") as phase:
        for inputs in predictor.blocks(source, read_as):
            lines = [f"{line}\n" for line in predictor.lines(inputs)]
            yield lines
            phase.advance(len(lines))


@dataclass(frozen=True)
class _GenerateOptions:
    run: Path = argument(
        ..., "The run's directory, a file of its exported model, or Hugging Face's directory.", metavar="RUN"
    )
    prompt: str = option("def ", "Text to continue.")
    tokens: int = option(200, "Tokens to write: bytes, where the model has no tokenizer.")
    temperature: float = option(0.0, "0: always the likeliest token; 1: sample as the model predicts.")
    top_k: int = option(0, "Sample among so many of the likeliest tokens; 0: all.")
    top_p: float = option(1.0, "Sample among the likeliest tokens that together have this probability.")
    seed: int = option(0, "Fixes the sampling.")
    device: str = option("cpu", "cpu or cuda, where the model computes.")
    precision: str = option("fp32", "fp32, bf16 or, on the CPU, int8.")


@from_options
def generate_command(asked: _GenerateOptions) -> None:
    """For runs of `train gpt` and `train recurrent`, and for GPT-2 directories of transformers with a tokenizer.json.

    The text appears as it is computed. `manyhands serve RUN` does the same over HTTP.
    """
    from manyhands.serving.opening import open_predictor
    from manyhands.serving.text_generator import Prompt, TextGenerator
    from manyhands.workloads.task_options import narrowed

    run, prompt = asked.run, narrowed(Prompt, asked)
    generator = open_predictor(run)
    if not isinstance(generator, TextGenerator):
        raise UserError(
            f"{run} belongs to task {generator.task!r}, which does not write text; use manyhands predict {run} INPUT"
        )
    _compute_in(generator, asked.precision, asked.device)
    generator.prepare()
    pieces = generator.pieces(prompt)
    print(prompt.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    hint = (
        "another --seed gives another text" if prompt.temperature else "--temperature 0.8 draws other texts"
    )
    print(f"manyhands: {hint}; manyhands serve {run} answers over HTTP", file=sys.stderr)


def _compute_in(predictor: Predictor[Any], precision: str, device: str) -> None:
    predictor.check_precision(precision)
    predictor.precision = precision
    predictor.check_device(device)
    predictor.device = device


@dataclass(frozen=True)
class _ExportOptions:
    run: Path = argument(..., "The run's directory.")
    precision: str = option("fp32", "fp32, bf16 (half the bytes) or int8 (about a quarter, scaled by block).")
    file_format: str = option(
        "safetensors",
        "safetensors: weights; torch-export: a program; huggingface, peft: a directory.",
        "--format",
    )
    out: Path | None = option(
        None,
        "Write to this file, or directory.",
        writes=True,
        metavar="FILE",
        shown="RUN/model-PRECISION.…",
    )
    test: Path | None = option(
        None, "For logreg, which has no evaluation data: examples to test on.", metavar="FILE"
    )
    task: str | None = _task_option()
    json_file: Path | None = json_option("Write the figures as JSON.")


@from_options
def export_command(asked: _ExportOptions) -> None:
    """The size is that of the file; the loss of accuracy is measured on the task's evaluation data, before and after.

    A torch-export program is compared with the module, and the largest difference is printed. Of `gpt` and `bert`,
    huggingface writes config.json and model.safetensors into a directory, as transformers reads them, and peft the
    adapters of a run with LoRA. `mh.load(FILE)` gives the module with the weights of a safetensors file; `manyhands
    predict FILE` and `serve FILE` read it, too.
    """
    from manyhands.serving.opening import workload_of
    from manyhands.workloads.exporting import ExportAsked
    from manyhands.workloads.registry import load
    from manyhands.workloads.task_options import narrowed

    formats = {
        "torch-export": "manyhands.serving.torch_predictors:export_program",
        "huggingface": "manyhands.workloads.language.huggingface:export_huggingface",
        "peft": "manyhands.workloads.language.huggingface:export_adapter",
        "safetensors": "manyhands.workloads.exporting:export_weights"
        if asked.task
        else workload_of(asked.run)[1].exporter,
    }
    if asked.file_format not in formats:
        raise UserError(f"--format {asked.file_format!r}: {nearest(asked.file_format, formats)}")
    wanted = replace(narrowed(ExportAsked, asked), task=_own_task(asked.task))
    export: Export = load(formats[asked.file_format])(wanted)
    write_json(asked.json_file, {**asdict(export), "path": str(export.path)})
    share = export.num_bytes / export.full_bytes if export.full_bytes else 1.0
    size = f"{format_bytes(export.num_bytes)}, {share:.0%} of single precision"
    print(f"{export.precision}, after {export.steps} steps: {size}")
    if asked.file_format in ("huggingface", "peft"):
        reader = {"huggingface": "transformers", "peft": "peft"}[asked.file_format]
        print(f"model  {export.path}, for from_pretrained of {reader}")
    elif export.largest_difference is None:
        _print_cost(export)
        print(f"model  {export.path}")
        print(f"next  {_serve_words(export.path, asked.task)}")
    else:
        print(f"it computes the same as the module; largest difference {export.largest_difference:.2g}")
        print(f"program  {export.path}")
        print(f'next  torch.export.load("{export.path}").module()')


def _print_cost(export: Export) -> None:
    from rich.console import Console

    from manyhands.observe.draw.time_table import plain_table

    if not export.before:
        print("there is no evaluation data, so the cost of the precision was not measured")
        return
    rows = [
        (name, f"{value:.6g}", f"{after:.6g}", f"{after - value:+.2g}")
        for name, value in export.before.items()
        if (after := export.after[name]) is not None
    ]
    Console().print(plain_table(("evaluation", "as trained", "exported", "change"), rows))


@dataclass(frozen=True)
class _ServeOptions(_Model):
    workers: int = option(2, "Processes, each with a copy of the model, or groups of them by --strategy.")
    batch: int = option(64, "Largest batch of inputs computed together.")
    wait: float = option(2.0, "Milliseconds a request waits for others to fill a batch.")
    deadline: float = option(30.0, "Seconds until an unanswered request gets a 503.")
    cache: float = option(2.0, "GiB for keys and values in each worker that writes text.")
    precision: str = option(
        "fp32", "fp32, bf16 or int8; `manyhands bench inference` measures which is fastest here."
    )
    device: str = option("cpu", "cpu, or cuda for a model that writes text: workers take the GPUs in order.")
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 admits other machines, with the token.")
    port: int = option(0, "Port to listen on; 0: any free port.")
    names: str = option("", "Further host names that clients use, separated by commas.", shown=False)
    token: str | None = option(None, "Token that clients send.", envvar="MANYHANDS_TOKEN", shown="a new one")
    task: str | None = _task_option()
    strategy: str | None = option(
        None,
        "Cut the model over the processes of each worker: 'pipeline stages=2' or 'tensor slices=2'.",
        shown="whole",
    )


@from_options
def serve_command(asked: _ServeOptions) -> None:
    """Requests are POST /predict with {"inputs": [...]} and the token that is printed; they are computed in batches.

    A model that writes text answers POST /generate with {"prompt": ...}, too: texts join and leave between two tokens.
    A worker that dies is replaced, and its requests go to another. Needs the web extra: pip install 'manyhands[web]'.
    """
    from manyhands.places.local.signals import ending
    from manyhands.serving.batching import BatchLimits
    from manyhands.serving.model_parts import cut_predictor
    from manyhands.serving.model_server import ModelServer, ServeOptions
    from manyhands.serving.opening import open_predictor
    from manyhands.serving.page_app import require_web
    from manyhands.strategy import Strategy

    require_web()
    batches = BatchLimits(batch=asked.batch, wait_s=asked.wait / 1e3, deadline_s=asked.deadline)
    names = tuple(name.strip() for name in asked.names.split(",") if name.strip())
    options = ServeOptions(
        workers=asked.workers,
        host=asked.host,
        port=asked.port,
        names=names,
        token=asked.token,
        batches=batches,
        cache_bytes=int(asked.cache * 2**30),
    )
    predictor = open_predictor(asked.run, _own_task(asked.task))
    _compute_in(predictor, asked.precision, asked.device)
    if asked.strategy is not None:
        cut_predictor(predictor, Strategy.parse(asked.strategy))
    try:
        with ending(), ModelServer(predictor, str(asked.run), options) as server:
            _announce(server, predictor, asked)
            server.wait()
    except KeyboardInterrupt:
        again = _serve_words(asked.run, asked.task)
        print(f"manyhands: the server has ended; {again} starts it again", file=sys.stderr)


def _announce(server: ModelServer, predictor: Predictor[Any], asked: _ServeOptions) -> None:
    """How to ask, on stderr; a token that was given is not repeated, because logs are kept."""
    from manyhands.serving.text_generator import TextGenerator
    from manyhands.transport.security import is_loopback

    known = predictor.example is not None
    body = shlex.quote(json.dumps({"inputs": [predictor.example]}) if known else '{"inputs": [...]}')
    bearer = "'Authorization: Bearer " + server.token + "'"
    if asked.token is not None:
        bearer = '"Authorization: Bearer $MANYHANDS_TOKEN"'
    print(f"page  {server.url if asked.token is None else server.address}", file=sys.stderr)
    print(f"ask   curl -s {server.address}/predict -H {bearer} -d {body}", file=sys.stderr, flush=True)
    if isinstance(predictor, TextGenerator):
        streamed = shlex.quote(json.dumps({**predictor.example, "stream": True}))
        print(
            f"or    curl -sN {server.address}/generate -H {bearer} -d {streamed}", file=sys.stderr, flush=True
        )
    if not is_loopback(asked.host):
        print(
            f"manyhands: {asked.host} can be reached from other machines; anyone with the token can use it, "
            "and the traffic is not encrypted",
            file=sys.stderr,
        )
    print("Ctrl-C ends it", file=sys.stderr, flush=True)
