"""`auto`: a run begins with `mirrored`; if it is long enough, the other good plans are tried on its next steps.

    mirrored ── some steps ──►  worth a plan?  ── no ──►  mirrored to the end
                                  │ yes: profile, predict, rank
                                  ▼
              the best few, some steps each ──►  the fastest, to the end

Every part continues from the state in which the part before it ended, so that nothing is thrown away: a run of
strategies that keep the numbers of one process has the weights of any of them alone, except for rounding.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from torch import nn

from manyhands.data.store.atomic import WriteFailed, read_json, write_json
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.exchange import SentFor
from manyhands.engine.request import Length, Request
from manyhands.engine.training import Result, SegmentDrive, Segments, Stage, Training, training_class
from manyhands.errors import UserError, format_seconds, num_of
from manyhands.foresight.estimate import estimate
from manyhands.foresight.plan.auto_choice import AutoChoice
from manyhands.foresight.plan.plan_search import PlanRow, worth_trying
from manyhands.foresight.plan.profile_run import Profiling, profile_training
from manyhands.foresight.plan.seen_steps import seen_step_s
from manyhands.foresight.plan.task_profile import TaskProfiles, measure_profile
from manyhands.strategies.auto.strategy import Auto
from manyhands.strategies.common.sharding.layer_units import units_of
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["CHOSEN", "AutoTraining"]

CHOSEN: Final = "chosen.json"
"""In the run's directory: what was chosen, and why; a resumed run keeps it."""

_FIRST = 12  # steps, at least, before anything is decided
_WARM = 4  # of them, which do not count
_TRIAL_SHARE = 0.01  # of the run's time, for each plan that is tried, and for each profile
_START_S = 1.0  # what it takes to end one strategy and to begin with the next
_STARTS_SHARE = 0.03  # of the rest of the run, for that
_SHORTEST_TRIAL_S, _LONGEST_TRIAL_S = 0.5, 5.0
_MANY = 30  # steps that a trial has, where they fit into three times as long

_Order = Mapping[str, Any]


@dataclass(kw_only=True)
class _Segment:
    """Steps of the run by one strategy: to the end, or until `enough` of them were seen, where that is given."""

    strategy: Strategy
    workers: int
    enough: Callable[[_Segment], bool] | None = None
    steps: int | None = None
    """How many steps of the run it ends with, where its strategy cannot be stopped in between."""
    row: PlanRow | None = None  # what was predicted
    rows: list[dict[str, Any]] = field(default_factory=list)  # of its steps, as they come

    @property
    def name(self) -> str:
        return str(self.strategy)

    @property
    def took_s(self) -> float:
        """Of the steps that count."""
        counted = self.rows[_WARM:]
        return counted[-1]["at_s"] - counted[0]["at_s"] if counted else 0.0

    @property
    def seen_s(self) -> float:
        """The median time of its steps; without an end where there were too few."""
        found = seen_step_s(self.rows, self.workers)
        return float("inf") if found is None else found


class AutoTraining(Segments):
    """Trains by several strategies, one after the other, and by the fastest of them to the end."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Auto), "the registry leads here from its own word"
        if request.plan.task.compiled:
            raise UserError(
                "strategy=auto plans tasks of PyTorch; name a strategy for one whose step is compiled"
            )
        self._auto = request.strategy
        self._facts: dict[str, Any] = {}  # what was chosen, and why
        self._resumed: Training | None = None
        self._done = 0  # steps
        self._at_s = 0.0  # how long the segments so far took

    def resume(self, directory: RunDirectory, config: Mapping[str, Any]) -> int | None:
        kept = read_json(directory.path / CHOSEN)
        text, workers = kept.get("strategy"), kept.get("workers")
        if not isinstance(text, str) or not isinstance(workers, int):
            self._done = super().resume(directory, config) or 0
            return self._done or None
        self._facts = dict(kept)
        chosen = _Segment(strategy=Strategy.parse(text), workers=workers)
        self._resumed = self.ordered(self._order(chosen, keeps=True))
        return self._resumed.resume(directory, config)

    # ── parts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_segments(self, stage: Stage, drive: SegmentDrive) -> Result:
        with ExitStack() as stack:
            directory = stage.directory or stack.enter_context(self._temporary())
            results: list[Result] = []
            for segment in self._course(stage, drive):
                results.append(self._run(segment, stage, directory, drive))
                if stage.stop_wanted() or results[-1].steps_done >= self._request.plan.steps:
                    break
            return self._merged(results, segment)

    def ordered(self, order: _Order) -> Training:
        plan = self._request.plan
        if order["parts"]:
            assert isinstance(plan.task, Task), "compiled tasks are refused"
            profiling = Profiling(parts=tuple(order["parts"]), seconds=order["seconds"])
            return profile_training(plan.task, profiling, order["workers"], plan.device)
        strategy, options = Strategy.parse(order["strategy"]), self._request.options
        length = Length(steps=plan.steps)
        made = Request.make(plan.task, strategy, order["workers"], length, plan.seed, options, plan.device)
        steps, checkpoint_every = order["steps"], order["checkpoint_every"]
        made = replace(
            made, plan=replace(made.plan, steps=steps, checkpoint_every=checkpoint_every, pauses=True)
        )
        return training_class(made.strategy)(made, self._model)

    def _order(self, segment: _Segment, *, keeps: bool) -> _Order:
        """What every process makes the segment's training of."""
        plan = self._request.plan
        return {
            "strategy": segment.name,
            "workers": segment.workers,
            "steps": segment.steps or plan.steps,
            "checkpoint_every": plan.checkpoint_every if keeps else 0,
            "parts": [],
        }

    @contextmanager
    def _temporary(self) -> Iterator[RunDirectory]:
        """A directory for what one segment leaves to the next, where the run itself is not kept."""
        config = self._request.config(self._model)
        with (
            tempfile.TemporaryDirectory(prefix="manyhands-auto-") as folder,
            RunDirectory.create(Path(folder) / "run", config) as directory,
        ):
            yield directory

    def _run(self, segment: _Segment, stage: Stage, directory: RunDirectory, drive: SegmentDrive) -> Result:
        keeps = stage.directory is not None
        order = self._order(segment, keeps=keeps)
        training = self._resumed or self.ordered(order)
        request = training.request
        if self._resumed is None:
            self._continue(training, directory)
        directory.update_config({**directory.config, "strategy": segment.name, "workers": segment.workers})
        began_s = self._at_s

        def take_rows(rows: list[dict[str, Any]]) -> None:
            segment.rows += [row for row in rows if "seconds" in row and "at_s" in row]
            stage.take_rows(
                [{**row, "at_s": row["at_s"] + began_s} if "at_s" in row else row for row in rows]
            )

        def stop_wanted() -> bool:
            return stage.stop_wanted() or (segment.enough is not None and segment.enough(segment))

        own_stage = replace(
            stage, request=request, directory=directory, take_rows=take_rows, stop_wanted=stop_wanted
        )
        if not keeps:
            own_stage = replace(own_stage, take_checkpoint=lambda _step, _path: None)
        result = drive.run(training, own_stage, order)
        self._at_s += result.seconds
        self._done = result.steps_done
        return result

    def _continue(self, training: Training, directory: RunDirectory) -> None:
        """Load what the segment before has left; WriteFailed where that is not there, as when the disk was full."""
        before = Strategy.parse(str(directory.config["strategy"]))
        if before != self._auto and before != training.request.strategy:
            training_class(before).hand_over(directory, training.request.plan, before)
        found = training.resume(directory, training.request.config(self._model)) or 0
        if found != self._done:
            raise WriteFailed(
                f"step {self._done} could not be kept in {directory.path}, from which the run goes on"
            )

    def _merged(self, results: Sequence[Result], segment: _Segment) -> Result:
        """Of all segments, of which the last one is `segment`."""
        last = results[-1]
        facts = self._facts or {"strategy": segment.name, "workers": segment.workers, "tried": []}
        return replace(
            last,
            samples=sum(one.samples for one in results),
            seconds=sum(one.seconds for one in results),
            sent=sum((one.sent for one in results), SentFor()),
            observed={
                **last.observed,
                "strategy": facts["strategy"],
                "workers": facts["workers"],
                "auto": facts,
            },
            notes=tuple(note for one in results for note in one.notes),
        )

    # ── which parts ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _course(self, stage: Stage, drive: SegmentDrive) -> Iterator[_Segment]:
        """The segments of the run; each is asked for when the one before it has ended."""
        if self._resumed is not None:
            made = self._resumed.request
            yield _Segment(strategy=made.strategy, workers=made.workers)
            return
        choice = AutoChoice(request=self._request, auto=self._auto, starts_processes=drive.is_here)
        first = _Segment(strategy=choice.first, workers=self._request.workers)
        if choice.why_not:
            stage.say(f"auto: {first.name} trains to the end, as {choice.why_not}")
        else:
            first.enough = self._is_worth_a_plan
        yield first
        rows = self._planned(replace(choice, hosts=drive.hosts), first, drive)
        first.row = next((row for row in rows if row.strategy == first.strategy), None)
        tried = [first]
        # The best comes last: if it is the fastest indeed, it goes on without being started again.
        for row in reversed(others := self._worth_trying(rows, first)):
            tried.append(self._trial(row, self._trial_s(first)))
            if row is others[0]:
                self._go_on(tried, lambda: self._choose(stage, choice, tried))
            yield tried[-1]
        yield self._choose(stage, choice, tried)

    def _worth_trying(self, rows: Sequence[PlanRow], first: _Segment) -> list[PlanRow]:
        """The best plans beside the first, as many as the rest of the run has time for, the best first."""
        most = max(1, round(_STARTS_SHARE * self._left_s(first) / _START_S))
        others = [row for row in worth_trying(rows, self._auto.tries) if row.strategy != first.strategy]
        # Too slow even where the prediction is as wrong as it can be expected to be: not worth a trial.
        may_win = [row for row in others if (row.seconds or 0.0) * (1 - row.error) < first.seen_s]
        return may_win[:most]

    def _left_s(self, segment: _Segment) -> float:
        """How long the rest of the run takes, at the pace of this segment's steps."""
        step_s = statistics.median(row["seconds"] for row in segment.rows[_WARM:])
        return float(step_s * (self._request.plan.steps - segment.rows[-1]["step"]))

    def _is_worth_a_plan(self, first: _Segment) -> bool:
        if len(first.rows) < _FIRST:
            return False
        return self._left_s(first) > self._auto.shortest and first.took_s > self._trial_s(first)

    def _trial_s(self, first: _Segment) -> float:
        return min(_LONGEST_TRIAL_S, max(_SHORTEST_TRIAL_S, _TRIAL_SHARE * self._left_s(first)))

    def _trial(self, row: PlanRow, trial_s: float) -> _Segment:
        """Some steps by a plan."""

        def enough(trial: _Segment) -> bool:
            many = len(trial.rows) >= _MANY or trial.took_s > 3 * trial_s
            return trial.took_s > trial_s and len(trial.rows) >= _FIRST and many

        steps = None
        if row.strategy.facts.cannot_stop:
            most = round(trial_s / (row.seconds or 1.0))
            steps = min(self._request.plan.steps, self._done + max(_FIRST, most))
        return _Segment(strategy=row.strategy, workers=row.workers, enough=enough, steps=steps, row=row)

    def _go_on(self, tried: Sequence[_Segment], choose: Callable[[], object]) -> None:
        """Have the last trial go on to the end of the run if it turns out to be the fastest."""
        last, to_beat_s, chosen = tried[-1], min(one.seen_s for one in tried[:-1]), False
        is_judged = last.enough
        assert is_judged is not None, "it is a trial"

        def enough(trial: _Segment) -> bool:
            nonlocal chosen
            if chosen or not is_judged(trial):
                return False
            if trial.steps is not None or trial.seen_s >= to_beat_s:
                return True
            chosen = True
            choose()
            return False

        last.enough = enough

    def _planned(self, choice: AutoChoice, first: _Segment, drive: SegmentDrive) -> Sequence[PlanRow]:
        task, workers = choice.task, self._request.workers
        found, seconds = estimate(task), min(1.0, self._trial_s(first))
        device, per_host = self._request.plan.device, workers // drive.hosts
        if drive.is_here:
            profiles = TaskProfiles(task, found, device=device, seconds=seconds)
            profiles.of(per_host, per_host)
            return choice.rows(profiles.of, profiles.noise, first.seen_s)
        # The run's processes were started elsewhere, all of them to work: servers would be among them.
        parts = [workers * many for many in (1, 2, 4)] if per_host > 1 else [1]
        order = {"workers": workers, "parts": parts, "seconds": seconds}
        measured = measure_profile(
            task,
            found.footprint,
            units_of(found.model),
            workers,
            parts=parts,
            device=device,
            seconds=seconds,
            drive=lambda training, stage: drive.run(training, stage, order),
        )
        return choice.rows(lambda _count, _processes: measured.profile, measured.noise, first.seen_s)

    def _choose(self, stage: Stage, choice: AutoChoice, tried: Sequence[_Segment]) -> _Segment:
        """The rest of the run, by the fastest: remember what was seen, say what is chosen, and keep it for a resume."""
        chosen = min(tried, key=lambda one: one.seen_s)
        choice.remember([(one.row, one.seen_s) for one in tried if one.row is not None])
        self._facts = {
            "strategy": chosen.name,
            "workers": chosen.workers,
            "after_step": self._done,
            "tried": [
                {
                    "strategy": one.name,
                    "workers": one.workers,
                    "predicted_s": one.row.seconds if one.row is not None else None,
                    "seen_s": one.seen_s,
                }
                for one in tried
            ],
        }
        if stage.directory is not None:
            write_json(stage.directory.path / CHOSEN, self._facts)
        others = [f"{one.name} {format_seconds(one.seen_s)}" for one in tried if one is not chosen]
        beside = f"; {', '.join(others)}" if others else ""
        stage.say(
            f"auto: {chosen.name} is the fastest of {num_of(len(tried), 'plan')} that were tried "
            f"({format_seconds(chosen.seen_s)} a step{beside})"
        )
        return _Segment(strategy=chosen.strategy, workers=chosen.workers)
