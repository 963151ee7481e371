"""`manyhands serve RUN`: a trained model behind HTTP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from manyhands.serving.model_server import ModelServer

__all__ = ["serve_command"]


def serve_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's directory, or a file of its exported model.")
    ],
    workers: Annotated[int, typer.Option(help="Processes that each have the model.")] = 2,
    batch: Annotated[int, typer.Option(help="Inputs that are computed at once, at most.")] = 64,
    wait: Annotated[
        float, typer.Option(help="Milliseconds that a request waits for others to fill a batch.")
    ] = 2.0,
    deadline: Annotated[
        float, typer.Option(help="Seconds within which a request has its answer, or a 503.")
    ] = 30.0,
    precision: Annotated[
        str,
        typer.Option(
            help="Compute in fp32, bf16 or int8; `manyhands bench inference` says what is fastest here."
        ),
    ] = "fp32",
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, who need the token, too."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
) -> None:
    """Serve a trained model over HTTP, by several processes, with a page of its latency and throughput.

    Requests are POST /predict with {"inputs": [...]} and the token that is printed; they are computed in batches. A
    worker that dies is replaced, and what it had goes to another. Needs the web extra: pip install 'manyhands[web]'.
    """
    # Imported here so that help texts do not wait for torch.
    from manyhands.places.local.signals import ending
    from manyhands.serving.batching import BatchLimits
    from manyhands.serving.model_server import ModelServer, ServeOptions
    from manyhands.serving.opening import open_predictor
    from manyhands.serving.page_app import require_web

    require_web()
    options = ServeOptions(
        workers=workers,
        host=host,
        port=port,
        batches=BatchLimits(batch=batch, wait_s=wait / 1e3, deadline_s=deadline),
    )
    predictor = open_predictor(run)
    predictor.check_precision(precision)
    predictor.precision = precision
    try:
        with ending(), ModelServer(predictor, str(run), options) as server:
            _say_how(server, predictor.example, host)
            server.wait()
    except KeyboardInterrupt:
        print(f"manyhands: the server has ended; manyhands serve {run} starts it again", file=sys.stderr)


def _say_how(server: ModelServer, example: object, host: str) -> None:
    """Where the page is, a request to paste into a shell, and who else can ask."""
    from manyhands.transport.security import is_loopback

    print(f"page  {server.url}", file=sys.stderr)
    print(_how(server.address, server.token, example), file=sys.stderr, flush=True)
    if not is_loopback(host):
        print(
            f"manyhands: {host} can be reached from other machines; whoever has the token can ask, and what is "
            "sent is not encrypted",
            file=sys.stderr,
        )
    print("Ctrl-C ends it", file=sys.stderr, flush=True)


def _how(address: str, token: str, example: object) -> str:
    """A request to paste into a shell."""
    import json
    import shlex

    body = shlex.quote(json.dumps({"inputs": [example]}))
    return f"ask   curl -s {address}/predict -H 'Authorization: Bearer {token}' -d {body}"
