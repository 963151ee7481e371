"""`manyhands bench`: our speed beside that of what people would use instead, in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.cli.command_options import AllowOverload, print_next
from manyhands.lab.bench import backend as backend_bench
from manyhands.lab.bench import bench_server as server_bench
from manyhands.lab.bench import step as step_bench
from manyhands.lab.bench.allreduce import DEFAULT_SIZES_BYTES, format_table, run_bench
from manyhands.lab.sweep.trials import parse_values
from manyhands.strategy import parse_size

__all__ = ["bench_app"]

bench_app = typer.Typer(help="Measure, side by side with peers.", no_args_is_help=True)

Workers = Annotated[int, typer.Option(help="Processes on this host.")]
Sizes = Annotated[
    str | None, typer.Option(help="Sizes to measure, as in 1KiB,64KiB,25MiB.", show_default="1KiB and up")
]
Repeats = Annotated[int, typer.Option(help="Runs of each contender at each size.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]


@bench_app.command("allreduce")
def allreduce(
    workers: Workers = 2,
    sizes: Sizes = None,
    repeats: Repeats = 40,
    allow_overload: AllowOverload = False,
    json_file: JsonFile = None,
) -> None:
    """All-reduce: in a shared bucket, by each schedule over links, and torch's Gloo, interleaved."""
    result = run_bench(workers, _parsed(sizes) or DEFAULT_SIZES_BYTES, repeats, allow_overload=allow_overload)
    print(format_table(result))
    _write(result, json_file)


@bench_app.command("backend")
def backend(
    workers: Workers = 2,
    sizes: Sizes = None,
    repeats: Repeats = 40,
    allow_overload: AllowOverload = False,
    json_file: JsonFile = None,
) -> None:
    """`dist.all_reduce` on the drop-in backend and on torch's Gloo, interleaved."""
    result = backend_bench.run_bench(
        workers,
        _parsed(sizes) or backend_bench.DEFAULT_SIZES_BYTES,
        repeats,
        allow_overload=allow_overload,
    )
    print(backend_bench.format_table(result))
    _write(result, json_file)


@bench_app.command("step")
def step(
    workers: Workers = 2,
    workload: Annotated[str, typer.Option(help="What to train, separated by commas.")] = "mlp,cnn,language",
    steps: Annotated[int, typer.Option(help="Measured steps of each contender.")] = step_bench.DEFAULT_STEPS,
    allow_overload: AllowOverload = False,
    json_file: JsonFile = None,
) -> None:
    """Whole training steps: mirrored, central and torch's DDP on Gloo, interleaved, with equal losses."""
    result = step_bench.run_bench(
        workers, step_bench.named_workloads(workload), steps, allow_overload=allow_overload
    )
    print(step_bench.format_table(result))
    _write(result, json_file)


@bench_app.command("server")
def server(
    rounds: Annotated[
        int, typer.Option(help="Turns of each contender at each exchange.")
    ] = server_bench.DEFAULT_ROUNDS,
    memory: Annotated[bool, typer.Option(help="Measure the memory of servers too.")] = True,
    json_file: JsonFile = None,
) -> None:
    """A parameter server's push and pull: ours by shared memory and TCP, a Ray actor, torch's rpc, interleaved."""
    memory_bytes = server_bench.MEMORY_BYTES if memory else 0
    result = server_bench.run_bench(rounds=rounds, memory_bytes=memory_bytes)
    print(server_bench.format_table(result))
    _write(result, json_file)


@bench_app.command("inference")
def inference(
    models: Annotated[  # half precision of language takes minutes on processors that cannot compute in it
        str, typer.Option(help="digits, language and recurrent, separated by commas.")
    ] = "digits",
    precisions: Annotated[str, typer.Option(help="Of fp32, bf16 and int8.")] = "fp32,bf16,int8",
    batches: Annotated[str, typer.Option(help="Inputs in a batch, as in 1,8,64.")] = "1,32",
    workers: Annotated[str, typer.Option(help="Processes that each have the model.")] = "1,2",
    seconds: Annotated[float, typer.Option(help="How long each combination computes.")] = 0.5,
    json_file: JsonFile = None,
) -> None:
    """How fast trained models answer, over precision, batch and workers; and whether fewer bits choose the same."""
    from manyhands.lab.bench import inference as inference_bench

    result = inference_bench.run_bench(
        parse_values(models, ","),
        parse_values(precisions, ","),
        _numbers(batches),
        _numbers(workers),
        seconds,
    )
    print(inference_bench.format_table(result))
    _write(result, json_file)
    print_next(
        with_what_is_fastest_here=("serve", "RUN", "--workers", "N", "--batch", "B", "--precision", "P")
    )


def _numbers(text: str) -> list[int]:
    from manyhands.errors import UserError

    try:
        return [int(word) for word in parse_values(text, ",")]
    except ValueError:
        raise UserError(f"{text!r} must be integers separated by commas, as in 1,8,64") from None


def _parsed(sizes: str | None) -> list[int] | None:
    return [parse_size(size) for size in parse_values(sizes, ",")] if sizes else None


def _write(result: dict[str, Any], json_file: Path | None) -> None:
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1) + "\n")
