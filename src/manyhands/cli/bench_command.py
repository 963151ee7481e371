"""`manyhands bench`: our speed beside that of what people would use instead, in one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyhands.cli import command_options
from manyhands.cli.command_options import AllowOverload, command_group, from_options, json_option, option
from manyhands.errors import UserError
from manyhands.lab.bench import allreduce, bench_server, step
from manyhands.lab.sweep.trials import parse_values
from manyhands.strategy import parse_size

bench_app = command_group()


@dataclass(frozen=True, kw_only=True)
class _CollectiveOptions:
    workers: int = option(2, "Processes on this host.")
    sizes: str | None = option(None, "Sizes to measure, such as 1KiB,64KiB,25MiB.", shown="1KiB and up")
    repeats: int = option(40, "Runs of each contender at each size.")
    allow_overload: AllowOverload = False
    json_file: Path | None = json_option()

    @property
    def sizes_bytes(self) -> list[int] | None:
        return [parse_size(size) for size in parse_values(self.sizes, ",")] if self.sizes else None


@bench_app.command("allreduce")
@from_options
def _allreduce(asked: _CollectiveOptions) -> None:
    """Measure all-reduce: in shared memory, by each schedule over links, and by torch's Gloo."""
    sizes = asked.sizes_bytes or allreduce.DEFAULT_SIZES_BYTES
    result = allreduce.run_bench(asked.workers, sizes, asked.repeats, allow_overload=asked.allow_overload)
    print(allreduce.format_table(result))
    command_options.write_json(asked.json_file, result)


@bench_app.command("backend")
@from_options
def _backend(asked: _CollectiveOptions) -> None:
    """Measure `dist.all_reduce` on the drop-in backend and on torch's Gloo."""
    sizes = asked.sizes_bytes or allreduce.BACKEND_SIZES_BYTES
    overload = asked.allow_overload
    result = allreduce.run_backend_bench(asked.workers, sizes, asked.repeats, allow_overload=overload)
    print(allreduce.format_table(result))
    command_options.write_json(asked.json_file, result)


@dataclass(frozen=True, kw_only=True)
class _StepOptions:
    workers: int = option(2, "Processes on this host.")
    workload: str = option("mlp,cnn,gpt", "Models to train, separated by commas.")
    steps: int = option(step.DEFAULT_STEPS, "Measured steps of each contender.")
    allow_overload: AllowOverload = False
    json_file: Path | None = json_option()


@bench_app.command("step")
@from_options
def _step(asked: _StepOptions) -> None:
    """Measure complete training steps: mirrored, central and torch's DDP on Gloo, with equal losses."""
    workloads = step.named_workloads(asked.workload)
    result = step.run_bench(asked.workers, workloads, asked.steps, allow_overload=asked.allow_overload)
    print(step.format_table(result))
    command_options.write_json(asked.json_file, result)


@dataclass(frozen=True, kw_only=True)
class _ServerOptions:
    rounds: int = option(bench_server.DEFAULT_ROUNDS, "Rounds of each contender at each exchange.")
    memory: bool = option(True, "Also measure the memory of servers.")
    json_file: Path | None = json_option()


@bench_app.command("server")
@from_options
def _server(asked: _ServerOptions) -> None:
    """Measure push and pull of a parameter server: ours by shared memory and TCP, a Ray actor, torch's rpc."""
    memory_bytes = bench_server.MEMORY_BYTES if asked.memory else 0
    result = bench_server.run_bench(rounds=asked.rounds, memory_bytes=memory_bytes)
    print(bench_server.format_table(result))
    command_options.write_json(asked.json_file, result)


@dataclass(frozen=True, kw_only=True)
class _InferenceOptions:
    models: str = option(
        "digits", "Models: digits, gpt, recurrent, or a Task of your own as module:name; with commas."
    )
    precisions: str = option("fp32,bf16,int8", "Precisions: fp32, bf16 and int8, separated by commas.")
    batches: str = option("1,32", "Batch sizes to measure, such as 1,8,64.")
    workers: str = option("1,2", "Numbers of processes to measure, each with the model.")
    seconds: float = option(0.5, "Seconds to measure each combination.")
    json_file: Path | None = json_option()


@bench_app.command("inference")
@from_options
def _inference(asked: _InferenceOptions) -> None:
    """Measure inference by precision, batch size and workers, and whether fewer bits give the same classes."""
    from manyhands.lab.bench import inference

    models, precisions = parse_values(asked.models, ","), parse_values(asked.precisions, ",")
    counts = _integers(asked.batches), _integers(asked.workers)
    result = inference.run_bench(models, precisions, *counts, asked.seconds)
    print(inference.format_table(result))
    command_options.write_json(asked.json_file, result)
    command_options.print_next(
        with_what_is_fastest_here=("serve", "RUN", "--workers", "N", "--batch", "B", "--precision", "P")
    )


def _integers(text: str) -> list[int]:
    try:
        return [int(word) for word in parse_values(text, ",")]
    except ValueError:
        raise UserError(f"{text!r} must be integers separated by commas, such as 1,8,64") from None
