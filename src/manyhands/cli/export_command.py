"""`manyhands export RUN`: the trained weights as one file to deploy, in as few bits as wanted, with what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.command_options import check_writable

if TYPE_CHECKING:
    from manyhands.workloads.exporting import Export

__all__ = ["export_command"]


def export_command(
    run: Annotated[Path, typer.Argument(help="The run's directory.")],
    precision: Annotated[
        str, typer.Option(help="fp32, bf16 (half the bytes) or int8 (about a quarter, scaled by block).")
    ] = "fp32",
    file_format: Annotated[
        str,
        typer.Option(
            "--format", help="safetensors: the weights; torch-export: a program that needs no source of ours."
        ),
    ] = "safetensors",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write there.", show_default="RUN/model-PRECISION.safetensors, RUN/model.pt2"
        ),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of logreg: examples to measure on; the others have evaluation data."
        ),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")
    ] = None,
) -> None:
    """Write a run's newest weights as one file, and say what its precision costs.

    The size is that of the file; the loss of accuracy is measured on the task's evaluation data, before and after. A
    program of torch-export is asked the same as the module, and the largest difference told. `mh.load(FILE)` gives the
    module with the weights of a safetensors file; `manyhands predict FILE` and `serve FILE` read it, too.
    """
    # Imported here so that help texts do not wait for torch.
    from dataclasses import asdict

    from manyhands.cli.command_options import write_json
    from manyhands.errors import UserError, nearest
    from manyhands.serving.opening import workload_of
    from manyhands.workloads.exporting import ExportAsked
    from manyhands.workloads.registry import load

    check_writable(out, "--out")
    check_writable(json_file)
    asked = ExportAsked(run=run, out=out, precision=precision, test=test)
    formats = {
        "torch-export": "manyhands.serving.exported_program:export_program",
        "safetensors": workload_of(run)[1].exporter,
    }
    if file_format not in formats:
        raise UserError(f"--format {file_format!r}: {nearest(file_format, formats)}")
    export: Export = load(formats[file_format])(asked)
    write_json(json_file, {**asdict(export), "path": str(export.path)})
    _print_end(export)


def _print_end(export: Export) -> None:
    from manyhands.errors import format_bytes

    share = export.num_bytes / export.full_bytes if export.full_bytes else 1.0
    size = f"{format_bytes(export.num_bytes)}, {share:.0%} of single precision"
    print(f"{export.precision}, after {export.steps} steps: {size}")
    if export.largest_difference is None:
        _print_cost(export)
        print(f"model  {export.path}")
        print(f"next  manyhands serve {export.path}")
    else:
        print(f"it computes what the module does: largest difference {export.largest_difference:.2g}")
        print(f"program  {export.path}")
        print(f'next  torch.export.load("{export.path}").module()')


def _print_cost(export: Export) -> None:
    from rich.console import Console
    from rich.table import Table

    if not export.before:
        print("there is no evaluation data: what the precision costs was not measured")
        return
    table = Table(box=None, pad_edge=False)
    table.add_column("evaluation")
    for column in ("as trained", "exported", "change"):
        table.add_column(column, justify="right")
    for name, value in export.before.items():
        after = export.after[name]
        table.add_row(name, f"{value:.6g}", f"{after:.6g}", f"{after - value:+.2g}")
    Console().print(table)
