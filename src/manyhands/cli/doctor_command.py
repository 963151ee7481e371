"""`manyhands doctor`: what is here and what is missing, as a table."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from manyhands.native.warming import prepare
from manyhands.places.doctor import DoctorVerdict, examine

__all__ = ["doctor_command"]


def doctor_command(
    warm: Annotated[
        bool, typer.Option("--warm", help="First compile all kernels, so that no later run has to.")
    ] = False,
) -> None:
    """What this machine has for training, what is missing, and how to get it."""
    if warm:
        prepare("all")
    signs = {
        DoctorVerdict.GOOD: "[green]✓[/]",
        DoctorVerdict.NOTE: "[yellow]·[/]",
        DoctorVerdict.BAD: "[red]✗[/]",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    findings = examine()
    for finding in findings:
        table.add_row(signs[finding.verdict], finding.subject, finding.found, f"[dim]{finding.advice}[/]")
    Console().print(table)
    if any(finding.verdict is DoctorVerdict.BAD for finding in findings):
        raise typer.Exit(1)
