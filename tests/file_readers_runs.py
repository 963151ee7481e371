"""Readers of the directories of runs and sweeps, of servers too."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import typer

from file_reader import Reader

_NS = 1_000_000_000


def ended_run(folder: Path) -> None:
    """A run on two servers as its writers leave it, all but the training."""
    from manyhands.data.store.rundir import RunDirectory

    config = {"task": "digits", "strategy": "ps servers=2 consistency=async", "workers": 2, "steps": 40, "seed": 0,
              "batch_size": 8, "samples": 100, "parameters": {"a": [2, 3]}}  # fmt: skip
    with RunDirectory.create(folder / "run", config) as run:
        for role, name in enumerate(("worker-0", "worker-1", "server-0", "server-1")):
            _events(run.events_path, role, name)
        for step in range(1, 21):
            run.metrics.append({"step": step, "at_s": step / 10, "loss": 1 / step})
        run.metrics.append({"step": 20, "at_s": 2.1, "metrics": {"accuracy": 0.75, "loss": 0.5}})
        shards = [{"shard": 0, "primary": 2, "backup": 3}, {"shard": 1, "primary": 3, "backup": 2}]
        slots = [{"slot": 0, "member": 0}, {"slot": 1, "member": 1}]
        names = {"0": "worker 0", "1": "worker 1", "2": "server 0", "3": "server 1"}
        for row in (
            {"event": "layout", "shards": [{"shard": 0, "bytes": 100}, {"shard": 1, "bytes": 200}]},
            {"event": "started", "at_s": 0.1, "member": 0, "name": "worker 0", "pid": 7},
            {"event": "view", "at_s": 0.2, "epoch": 1, "names": names, "shards": shards, "slots": slots},
            {"event": "died", "at_s": 1.0, "member": 1, "sentence": "worker 1 died", "epoch": 2},
            {"event": "recovered", "at_s": 1.5, "member": 1, "sentence": "worker 1 is back", "epoch": 3},
        ):
            run.append_member(row)
        worker = {"steps": 10, "samples": 80, "compute_s": 1.0, "exchange_s": 0.5, "wait_s": 0.25,
                  "wait_for_s": [0.0, 0.25], "bytes_sent": 9, "messages_sent": 3}  # fmt: skip
        run.write_summary(
            {
                "steps": 20,
                "samples": 160,
                "samples_per_s": 80.0,
                "staleness": {"mean": 0.5, "max": 3},
                "per_worker": [{"worker": 0, **worker}, {"worker": 1, **worker}],
                "servers": [{"shard": 0, "sha256": "x"}],
                "notes": [],
            }
        )


def _events(folder: Path, role: int, name: str) -> None:
    from manyhands.observe.record.event_files import EventFileWriter
    from manyhands.observe.record.events import RECORD, EventKind

    is_worker = name.startswith("worker")
    of_worker = (EventKind.INPUT, EventKind.COMPUTE, EventKind.SEND, EventKind.WAIT, EventKind.STEP)
    of_server = (EventKind.RECEIVE, EventKind.APPLY, EventKind.HOLD)
    kinds = [
        EventKind.JOIN,
        *(of_worker if is_worker else of_server) * 10,
        EventKind.EVALUATE,
        EventKind.LEAVE,
    ]
    records = np.zeros(len(kinds), RECORD)
    records["kind"], records["role"] = kinds, role
    records["start_ns"] = _NS + np.arange(len(kinds)) * 10_000_000
    records["duration_ns"] = 9_000_000
    records["peer"] = [-1 if kind == EventKind.COMPUTE else (role + 1) % 4 for kind in kinds]
    records["step"] = np.maximum(-1, np.arange(len(kinds)) // 5 - 1)
    records["id"], records["count"], records["value"] = np.arange(len(kinds)), 4, 0.5
    records["num_bytes"], records["wire"], records["message"] = 100, 1, np.arange(len(kinds))
    writer = EventFileWriter.create(folder, name=name, role=role, max_bytes=1 << 20, wall_offset_ns=5)
    writer.append(records)
    writer.close(0)


def _report(folder: Path) -> object:
    from manyhands.observe.analyse.follow import existing_run
    from manyhands.observe.draw.page import report
    from manyhands.observe.draw.prometheus import metrics_text

    follower = existing_run(folder / "run")
    follower.poll()
    view = follower.poll()
    return report(view).encode(), metrics_text(view).encode()


def _command(name: str) -> Callable[[Path], object]:
    """What a command of the command line does, its words thrown away."""

    def read(folder: Path) -> object:
        from manyhands.cli.look_commands import audit_command, explain_command, show_command

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                match name:
                    case "explain":
                        explain_command(folder / "run", None)
                    case "audit":
                        audit_command(folder / "run")
                    case _:
                        show_command(folder / "run", out=folder / f"timeline.{name}")
            except typer.Exit:
                pass  # its exit status, after it has said all
        return None

    return read


def _tensorboard(folder: Path) -> object:
    from manyhands.observe.draw import tensorboard

    tensorboard._VIEWS = 5  # a hundred are the same code again
    return tensorboard.write_run(folder / "run", folder / "tensorboard")


def _measure(folder: Path) -> object:
    from manyhands.lab.compare.comparison import Trial
    from manyhands.lab.compare.run_comparison import measure
    from manyhands.strategy import Strategy

    return measure(Trial(place=0, repeat=0), folder / "run", Strategy.parse("ps servers=2 consistency=async"))


def _history(folder: Path) -> object:
    from manyhands.data.store.rundir import RunDirectory

    return RunDirectory.open(folder / "run", lock=False).metrics.read()


def _sweep_plan() -> Any:
    from manyhands.lab.sweep.trials import SweepPlan, SweepSetting

    settings = (
        SweepSetting(name="learning_rate", values=("0.1", "0.2")),
        SweepSetting(name="seed", values=("0",)),
    )
    return SweepPlan(task="digits", settings=settings, metric="accuracy", common={"--epochs": "1"})


def _sweep(folder: Path) -> None:
    from manyhands.lab.sweep.run_sweep import open_sweep

    open_sweep(folder / "new", _sweep_plan(), resume=False)
    (folder / "new" / "sweep.json").rename(folder / "sweep.json")
    run = folder / "runs" / "0001"
    run.mkdir(parents=True)
    config = {"format": "manyhands run", "version": 1, "config": {"task": "digits"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text(
        json.dumps({"final": {"accuracy": 0.5, "loss": 1.5}, "seconds": 2.0, "samples_per_s": 100.0})
    )


def _sweep_rows(folder: Path) -> object:
    from manyhands.lab.sweep.run_sweep import open_sweep, read_plan, sweep_rows
    from manyhands.lab.sweep.sweep_report import sentences, sweep_page

    plan = read_plan(folder / "sweep.json")
    rows = sweep_rows(plan, folder)
    page = sweep_page(plan, rows, sentences(plan, rows), "manyhands sweep", {})
    open_sweep(folder, _sweep_plan(), resume=True)
    return page


def _server_run(folder: Path) -> None:
    import manyhands as mh
    from manyhands.workloads.tasks import TASKS

    mh.fit(
        TASKS["digits"].build(),
        "ps servers=2 consistency=async replicas=1",
        workers=2,
        steps=20,
        out=folder / "run",
    )


def _replay(folder: Path) -> object:
    from manyhands.strategies.ps import replay

    replay.available_bytes = lambda: 256 << 20  # as on a small machine
    return replay.replay(folder / "run", until=2)


_RUN_FILES = (
    "run/events/*.bin",
    "run/metrics.jsonl",
    "run/members.jsonl",
    "run/summary.json",
    "run/config.json",
)
_LOG_FILES = ("run/updates/*.jsonl", "run/updates/run.json", "run/config.json", "run/summary.json")

ROWS = (
    Reader(name="sweep", make=_sweep, read=_sweep_rows, files=("sweep.json", "runs/0001/*.json")),
    Reader(name="report", make=ended_run, read=_report, files=_RUN_FILES),
    Reader(name="explain", make=ended_run, read=_command("explain"), files=(_RUN_FILES[0], _RUN_FILES[4])),
    Reader(name="timeline", make=ended_run, read=_command("json"), files=(_RUN_FILES[0], _RUN_FILES[4])),
    Reader(name="picture", make=ended_run, read=_command("svg"), files=(_RUN_FILES[0], _RUN_FILES[4])),
    Reader(name="tensorboard", make=ended_run, read=_tensorboard, files=_RUN_FILES),
    Reader(name="compare", make=ended_run, read=_measure, files=_RUN_FILES),
    Reader(name="history", make=ended_run, read=_history, files=("run/metrics.jsonl", "run/config.json")),
    Reader(name="audit", make=_server_run, read=_command("audit"), files=_LOG_FILES, live=True),
    Reader(name="replay", make=_server_run, read=_replay, files=_LOG_FILES, live=True),
)  # fmt: skip
