"""`manyhands certificates DIR --hosts a,b`: what the hosts of a run show each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["certificates_command"]


def certificates_command(
    directory: Annotated[Path, typer.Argument(help="A new folder, for a folder per host.", metavar="DIR")],
    hosts: Annotated[str, typer.Option(help="Names or addresses of the hosts: node1,node2.")],
    days: Annotated[float, typer.Option(help="How long they are valid; longer than the run lasts.")] = 7.0,
    keep_authority: Annotated[
        bool,
        typer.Option("--keep-authority", help="Keep the authority's key in DIR, to add hosts later."),
    ] = False,
) -> None:
    """Make a short-lived authority and a certificate for each host of a run, which know each other by it."""
    from manyhands.transport.certificates import AUTHORITY_KEY, make_certificates

    named = [host.strip() for host in hosts.split(",") if host.strip()]
    made = make_certificates(directory, named, days=days, keep_authority=keep_authority)
    kept = directory / AUTHORITY_KEY
    authority = f"the authority's key is in {kept}" if kept.exists() else "the authority's key was not kept"
    print(f"valid until {made.end:%Y-%m-%d %H:%M} UTC; {authority}")
    for host, folder in zip(named, made.folders, strict=True):
        print(f"{folder}  for {host} and nobody else: it holds a key and the run's token")
    print("start the processes of each host with --tls and its folder, or set MANYHANDS_TLS to it")
