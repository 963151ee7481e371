"""The job of `ps` in a loop of the user's own: the script makes model and optimizer, and says when it ends."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any, ClassVar, Final

import torch

from manyhands.data.store.atomic import WriteFailed, write_json
from manyhands.engine.computing import Built, Computer, TrainingPlan
from manyhands.engine.loop_end import GroupStore
from manyhands.errors import DataError, UserError
from manyhands.native.segment import Segment
from manyhands.strategies.common.tables.row_filters import require_filters
from manyhands.strategies.ps.digests import layout_digest
from manyhands.strategies.ps.live.area import SharedParameters
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import RunRecord, read_logs, read_record, write_record
from manyhands.task import Task

_log = logging.getLogger("manyhands")
NO_END: Final = 1 << 50  # a loop of the user's own has as many steps as it takes
_ORDERS: Final = Path("updates", "orders.json")
_SNAPSHOT_EVERY: Final = 100  # steps of a shard, where a run is kept


def _nothing(*_: Any) -> Any:
    raise UserError("a loop of the user's own computes by itself")


def loop_job(strategy: Ps, workers: int, timeout_s: float, **fields: Any) -> LoopJob:
    """What every process of the run is started with; what is trained is known once the script calls `prepare`."""
    task = Task(name="own loop", model=_nothing, loss=_nothing, data=torch.zeros(1), optimizer=_nothing)
    kept = fields.get("run_path") is not None
    plan = TrainingPlan(
        task=task, steps=NO_END, seed=0, evaluate_every=0, checkpoint_every=_SNAPSHOT_EVERY if kept else 0
    )
    return LoopJob(
        plan=plan,
        strategy=strategy,
        fingerprint="a loop of the user's own",
        workers=workers,
        timeout_s=timeout_s,
        **fields,
    )


def begin_record(job: LoopJob, run_path: Path) -> None:
    """Write what an audit needs to know of the run."""
    _, _, layout = job.build()
    record = RunRecord(
        torch=torch.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
        threads=job.threads,
        strategy=str(job.strategy),
        workers=job.workers,
        steps=NO_END,
        seed=0,
        device="cpu",
        autocast=False,
        layout=layout_digest(layout),
    )
    write_record(run_path, record)


def end_record(run_path: Path) -> None:
    """Say in the run's record how many batches there were, which nobody knew before."""
    try:
        record = read_record(run_path)
        rows = [row for files in read_logs(run_path).files.values() for file in files for row in file]
        applied = (update.batch for row in rows if isinstance(row, StepRow) for update in row.updates)
        write_record(run_path, record._replace(steps=max(applied, default=-1) + 1))
    except (DataError, UserError, WriteFailed) as error:
        _log.warning("manyhands: this run cannot be audited: %s", error)


def write_orders(run_path: Path, store: GroupStore, workers: int, loads: int) -> None:
    """Keep what else timing decided: the random numbers behind each order of samples, and rates of schedules."""
    names = (f"order/{number}" for number in count())
    orders = dict(takewhile(lambda one: one[1] is not None, ((name, store.find(name)) for name in names)))
    rates = {name: store.find(name) for name in (f"rates/{rank}" for rank in range(workers))}
    values = {name: value.hex() for name, value in {**orders, **rates}.items() if value is not None}
    write_json(run_path / _ORDERS, {"loads": loads, "values": values})


def read_orders(run_path: Path) -> dict[str, bytes]:
    """What `write_orders` wrote; UserError where the run cannot be executed again."""
    path = run_path / _ORDERS
    try:
        found = json.loads(path.read_bytes())
        orders = {str(name): bytes.fromhex(value) for name, value in found["values"].items()}
        loads = found["loads"]
    except FileNotFoundError:
        raise UserError(
            f"{run_path} has no {_ORDERS}: its loop did not come to its end, so it cannot be replayed"
        ) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    if loads:
        raise UserError(f"{run_path} continued from a checkpoint, so it cannot be replayed; use audit")
    return orders


@dataclass(frozen=True, kw_only=True)
class LoopJob(Job):
    """A job whose model and optimizer the script has made; `copies` gives each caller of `build` its own."""

    taps: ClassVar[bool] = False
    built: Built | None = None
    copies: bool = False

    def build(self, worker_rank: int = 0) -> tuple[Computer, Built, FlatLayout]:
        assert self.built is not None, "prepare comes first"
        built = _twin(self.built) if self.copies else self.built
        strategy = self.strategy
        layout = FlatLayout.of(built.model, built.optimizer, strategy.servers, {}, strategy.facts.stepping)
        require_filters(strategy.filter, built.optimizer, ())
        return Computer(self.plan, worker_rank), built, layout

    def shared_parameters(self, final: Callable[[], Segment], layout: FlatLayout) -> SharedParameters | None:
        """None: the launcher does not know the model's size, and workers have copies."""
        del final, layout
        return None


def _twin(built: Built) -> Built:
    """Model and optimizer once more; a scheduler's hold on the first one's `step` is left out."""
    memo: dict[int, Any] = {}
    model = copy.deepcopy(built.model, memo)
    optimizer = object.__new__(type(built.optimizer))
    mine = {key: value for key, value in vars(built.optimizer).items() if key != "step"}
    optimizer.__dict__.update(copy.deepcopy(mine, memo))
    return Built(model=model, optimizer=optimizer)
