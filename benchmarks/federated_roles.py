"""FedAvg on the roles of Shakespeare: each role a client with its own lines, beside the same lines dealt at random.

    python benchmarks/federated_roles.py [--device cuda] [--data FILE] [--only natural|iid] [--rounds 40] [--fresh]

The second table of the paper on FedAvg (McMahan et al., AISTATS 2017) on the text that there is: a tenth of the clients
in a round, 5 epochs of batches of 10 windows of 80 characters, the built-in recurrent network (two layers of LSTM of
128), plain SGD with clipped gradients. Of each role the first four fifths of the lines are trained on, the rest of all
roles is the evaluation; roles with less than one window of either are left out. Told are the rounds to a share of next
characters foreseen, and the spread over the roles at the end. The result is written after each run, and what it has
already is not run again, unless --fresh.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.file_reader import encode, windows
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.language.recurrent import RecurrentNetwork
from results_read import ROOT, data_file

RESULT = Path(__file__).parent / "results" / "federated-roles.json"
FILE = "tinyshakespeare_by_role.jsonl.gz"
CONTEXT, LAYERS, WIDTH = 80, 2, 128
FRACTION, EPOCHS, BATCH = 0.1, 5, 10
RATE, CLIP = 1.0, 5.0
MARKS, ROUNDS, EVERY = (0.35, 0.40, 0.45), 40, 2
WAYS = ("natural", "iid")
PAPER = {"natural": 41, "iid": 192}  # to 54 %, on all of Shakespeare's plays


def roles(file: Path) -> tuple[dict[str, NDArray[np.uint8]], NDArray[np.uint8]]:
    """The windows of each role that are trained on, and those of all roles that are held out."""
    train, held_out = {}, []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            role = json.loads(line)
            spoken = role["text"]
            cut = len(spoken) * 4 // 5
            mine, other = (encode("\n".join(part)) for part in (spoken[:cut], spoken[cut:]))
            if min(len(mine), len(other)) > CONTEXT:
                train[role["client"]] = windows(mine, CONTEXT)
                held_out.append(windows(other, CONTEXT))
    return train, np.concatenate(held_out)


def network() -> RecurrentNetwork:
    """The built-in recurrent network."""
    from torch.backends import mkldnn  # as a global it could not be sent to workers

    # oneDNN's LSTM takes 1.6 times as long as torch's own on processors without its kernels (aarch64)
    mkldnn.enabled = platform.machine() == "x86_64"
    return RecurrentNetwork(layers=LAYERS, width=WIDTH)


def foreseen(model: nn.Module, batch: Tensor) -> Tensor:
    """The share of characters that were the likeliest to the model."""
    tokens = batch.long()
    return (model(tokens[:, :-1]).argmax(2) == tokens[:, 1:]).float().mean()


def a_task(file: Path) -> mh.Task:
    train, held_out = roles(file)
    return mh.Task(
        name="roles",
        model=network,
        loss=next_byte_loss,
        data=mh.Parties(train),
        optimizer=partial(torch.optim.SGD, lr=RATE),
        batch_size=100,  # of the evaluation
        evaluation=held_out,
        metrics={"foreseen": foreseen},
        clip_norm=CLIP,
    )


def words(way: str, clients: int) -> str:
    return f"federated clients={clients} fraction={FRACTION} epochs={EPOCHS} batch={BATCH} partition={way}"


class AtLastMark(mh.Callback):
    """Ends a run that has come to the last mark."""

    def on_evaluate(self, row: Mapping[str, Any]) -> bool | None:
        print(f"  round {row['step']}: {row['metrics']['foreseen']:.4f}", flush=True)
        return bool(row["metrics"]["foreseen"] >= MARKS[-1])


def one_run(task: mh.Task, way: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """From nothing to the last mark, or to the last round."""
    clients = len(task.data.names)
    run = mh.fit(
        task,
        words(way, clients),
        rounds=arguments.rounds,
        workers=arguments.workers,
        device=arguments.device,
        options=mh.Options(
            evaluate_every=EVERY, progress="none", callbacks=[AtLastMark()], watchdog_s=0, timeout_s=3600
        ),
    )
    curve = [(row["step"], round(row["metrics"]["foreseen"], 4)) for row in run.history.evaluations]
    seconds = [row["seconds"] for row in run.history.steps]
    return {
        "clients": clients,
        "rounds": {str(mark): next((step for step, found in curve if found >= mark), None) for mark in MARKS},
        "rounds_run": len(seconds),
        "best": max(found for _, found in curve),
        "clients_per_s": round(FRACTION * clients / statistics.median(seconds), 2),
        "played": [note for note in run.summary["notes"] if "clients" in note],
        "fairness": run.summary.get("fairness"),
        "curve": curve,
    }


def rendered(result: Mapping[str, Any]) -> str:
    """The table as text."""
    titles = {"natural": "each role its own lines", "iid": "lines dealt at random"}
    return "\n".join(
        f"{titles[way]}: rounds to a share foreseen {one['rounds']} of {one['rounds_run']} run (best "
        f"{one['best']:.1%}; the paper, to 54 % on all plays: {PAPER[way]}), {one['clients_per_s']} clients/s"
        for way, one in result["runs"].items()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    default = data_file(FILE) or ROOT / "shared" / "data" / FILE
    parser.add_argument("--data", type=Path, default=default, help="roles as lines of JSON, gzip")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"runs": {}}
    if arguments.result.exists() and not arguments.fresh:
        result = json.loads(arguments.result.read_text())
    task = a_task(arguments.data)
    for way in [arguments.only] if arguments.only else WAYS:
        if way in result["runs"]:
            continue
        print(way, flush=True)
        result["runs"][way] = one_run(task, way, arguments)
        result |= {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "device": arguments.device,
            "workers": arguments.workers,
            "rate": RATE,
            "clip_norm": CLIP,
            "marks": MARKS,
            "paper": PAPER,
        }
        arguments.result.parent.mkdir(parents=True, exist_ok=True)
        arguments.result.write_text(json.dumps(result, indent=1) + "\n")
    print(rendered(result))


if __name__ == "__main__":
    main()
