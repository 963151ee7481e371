"""A recorded loop of the user's own, executed again: the script computes, in the recorded order, for one process.

    the player (in the place of the servers)          a worker, which runs the script
                                              ◄──       ready      for the recorded batch
      turn       the versions that were read  ──►       forward and backward
      compare with the recorded hash          ◄──       pushed     the gradients, and the optimizer's settings
      refresh    the values of now            ──►       after a step that all take, or before an evaluation
      over       the final values             ──►       the end of the loop

Values and gradients lie in memory that a worker shares with the player; what is said goes over the group's store. What
the script saves is not saved again, and it finds no checkpoint.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import ge
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.computing import Built, Computed
from manyhands.engine.loop_end import GroupStore, LoopEnd, settings_text
from manyhands.engine.reporting import WorkerContext
from manyhands.errors import UserError
from manyhands.places.external.process_place import ProcessPlace
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.loop_job import NO_END, LoopJob, loop_job, read_orders
from manyhands.strategies.ps.live.worker_state import ReplicaModel
from manyhands.strategies.ps.log_rows import StepRow
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.replay_order import (
    LoopTurn,
    ReplayCompute,
    ReplayImpossible,
    ReplayOrder,
    loop_turns,
    steps_of,
)
from manyhands.strategies.ps.replay_player import Difference, Player, ReplayStage
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import ShardLogs, read_computed, read_logs
from manyhands.strategy import Strategy

_CHANGED = "are the script, its arguments and its data what they were?"


def recorded_order(run_path: Path, shards: int) -> tuple[ShardLogs, ReplayOrder]:
    """UserError or ReplayImpossible where the records do not say what happened."""
    logs = read_logs(run_path)
    for shard in range(shards):
        if shard not in logs.files:
            raise UserError(
                f"{run_path} has no log of shard {shard}: it took no step, or its file is missing"
            )
    steps = [steps_of(shard, logs.files[shard]) for shard in range(shards)]
    return logs, ReplayOrder(steps, read_computed(run_path))


class LoopStage(ReplayStage):
    """Stores as the servers had them, made of what the script gave to `prepare`."""

    def __init__(self, job: LoopJob) -> None:
        self._job = job
        self.computer, built, self.layout = job.build()
        self._strategy, self._seed, self._codings = job.strategy, job.plan.seed, {}
        self._built, self._sparse, self._workers, self._held = built, {}, job.workers, {}

    def _build(self) -> Built:
        return self._job.build()[1]


class LoopPlayer(Player):
    """A player whose gradients the workers' scripts compute."""

    def __init__(
        self, stage: ReplayStage, order: ReplayOrder, store: GroupStore, areas: Sequence[WorkerArea]
    ) -> None:
        super().__init__(stage, order)
        shards = range(stage.layout.shards)
        self._store, self._areas = store, [[area.part(shard) for shard in shards] for area in areas]
        self._refreshed = Counter[int]()
        self._texts: dict[tuple[int, int, int], str] = {}

    def begin(self) -> None:
        for slot in range(len(self._areas)):
            self._store.get(f"attached/{slot}", f"worker {slot}")
            self._show(slot)
            self._store.put(f"begun/{slot}", b"-")

    def end(self, difference: Difference | None) -> None:
        """Tell all workers; where nothing differed, their loops may come to their end."""
        if difference is None:
            for slot in range(len(self._areas)):
                self._show(slot)
        self._store.put("over", b"-" if difference is None else b"differs")
        for slot in range(len(self._areas)) if difference is None else ():
            self._store.get(f"left/{slot}", f"worker {slot}", self._serve)

    def _compute(self, compute: ReplayCompute) -> Difference | None:
        row, said = compute.row, f"{compute.row.slot}/{compute.row.clock}"
        parts = self._areas[row.slot]
        serve = partial(self._serve, row.slot)
        self._store.get(f"ready/{said}", f"worker {row.slot}", serve)
        self._read(row, parts)
        self._store.put(f"turn/{said}", b"-")
        pushed = self._store.get(f"pushed/{said}", f"worker {row.slot}", serve)
        self._texts[row.name] = pushed.decode()
        self._computed[row.name] = Computed(loss=0.0, share=0.0, samples=0)
        difference = self._take(compute, parts)
        self._store.put(f"taken/{said}", b"-")
        return difference

    def _settings(self, row: StepRow) -> str:
        return next((text for update in row.updates if (text := self._texts[update.name])), "")

    def _serve(self, awaited: int = -1) -> None:
        """Show the values of now to who asks for them; an awaited worker that has left will not come."""
        for slot in range(len(self._areas)):
            number = self._refreshed[slot]
            wanted = self._store.find(f"refresh/{slot}/{number}")
            if wanted is not None and all(map(ge, self._versions, json.loads(wanted))):
                self._show(slot)
                self._store.put(f"fresh/{slot}/{number}", b"-")
                self._refreshed[slot] += 1
        if awaited >= 0 and self._store.find(f"left/{awaited}") is not None:
            raise ReplayImpossible(
                f"worker {awaited} left its loop earlier than in the recorded run; {_CHANGED}"
            )

    def _show(self, slot: int) -> None:
        coding = self._stage.coding(-1)  # of no process: what carries values keeps nothing of them
        for shard, part in enumerate(self._areas[slot]):
            self._stores[shard].read_into(part.values)
            if coding.codes_values:
                coding.round(shard, self._layout.range_in(part.values, shard))


class ReplayedLoop(LoopEnd):
    """This process's end: a worker in a slot, or the player."""

    is_replay: ClassVar[bool] = True
    holds_state: ClassVar[bool] = False
    _replica: ReplicaModel
    _area: WorkerArea | None = None

    def __init__(
        self, place: ProcessPlace, strategy: Ps, run_path: Path, store: GroupStore, timeout_s: float
    ) -> None:
        workers = place.world - 1
        super().__init__(place.rank, workers, store)
        assert place.launched is not None, "only launched processes replay"
        self._launched, self._run_path, self._plays = place.launched, run_path, place.role == "ps"
        self._job = loop_job(strategy, workers, timeout_s)
        self.synchronous = strategy.consistency.stepwise
        self._at = self._refreshes = 0
        self._turns: list[LoopTurn] = []

    @classmethod
    def open(
        cls,
        place: ProcessPlace,
        name: str,
        strategy: Strategy,
        timeout_s: float,
        *,
        run_path: Path | None = None,
    ) -> LoopEnd:
        assert isinstance(strategy, Ps), "only its runs are recorded"
        assert run_path is not None, "which the launcher has bound"
        store = GroupStore(PrefixStore(f"{name}/values", place.open_store(timeout_s)), timeout_s)
        return cls(place, strategy, run_path, store, timeout_s)

    def begin(self, model: nn.Module, optimizer: Optimizer, worker_context: WorkerContext) -> None:
        del worker_context
        built = Built(model=model, optimizer=optimizer)
        job = self._job = replace(self._job, built=built, copies=self._plays)
        logs, order = recorded_order(self._run_path, job.strategy.servers)
        for name, value in read_orders(self._run_path).items():
            self.store.first(name, value)
        layout = job.build()[2]
        if self._plays:
            self._play(job, order)
            raise SystemExit(0)
        lead = logs.files[LEAD]
        self._turns = loop_turns(self.rank, order, read_computed(self._run_path), lead)
        self._area = WorkerArea.shared(self._launched.context.descriptor(f"area-{self.rank}"), layout)
        self._replica = ReplicaModel(model, layout, self._area, taps=False)
        self.store.put(f"attached/{self.rank}", b"-")
        self._wait(f"begun/{self.rank}")
        self._take_turn()

    def _play(self, job: LoopJob, order: ReplayOrder) -> None:
        layout = job.build()[2]
        descriptor = self._launched.context.descriptor
        areas = [WorkerArea.shared(descriptor(f"area-{slot}"), layout) for slot in range(self.world)]
        with LoopStage(job) as stage:
            player = LoopPlayer(stage, order, self.store, areas)
            player.begin()
            try:
                difference = player.play()
            except ReplayImpossible as error:
                difference = Difference(LEAD, None, -1, -1, -1, str(error))
            player.end(difference)
            found: dict[str, Any] = {"updates": player.updates, "steps": min(player.batches)}
            found |= {"digests": player.digests(), "difference": difference.sentence if difference else ""}
        self._launched.counts.update(found)

    def enter(self) -> None:
        turn = self._turn
        if turn is not None and turn.applied:
            self.store.put(f"ready/{self.rank}/{turn.clock}", b"-")
            self._wait(f"turn/{self.rank}/{turn.clock}")

    def push(self, weight: float, settings: Mapping[str, Any]) -> None:
        del weight
        turn = self._turn
        if turn is None or not turn.stepped:
            raise UserError(f"the recorded loop took no step with batch {self.batch} here; {_CHANGED}")
        if turn.applied:
            said = f"{self.rank}/{turn.clock}"
            self._replica.begin()
            self._replica.take()
            self._replica.end()
            self.store.put(f"pushed/{said}", settings_text(settings).encode())
            self._wait(f"taken/{said}")
        self._at += 1
        self._take_turn()

    def skip(self) -> None:
        turn = self._turn
        if turn is not None and turn.stepped:
            raise UserError(f"the recorded loop took a step with batch {turn.batch}; {_CHANGED}")
        self._at += 1
        self._take_turn()

    def refresh(self, versions: Sequence[int] = ()) -> None:
        number, self._refreshes = self._refreshes, self._refreshes + 1
        self.store.put(f"refresh/{self.rank}/{number}", json.dumps(versions).encode())
        self._wait(f"fresh/{self.rank}/{number}")

    def clips(self, model: nn.Module, max_norm: float) -> float | None:
        return None if self.synchronous and self.world > 1 else super().clips(model, max_norm)

    def save(self, folder: Path, model: nn.Module) -> None:
        del folder, model

    def load(self, folder: Path, loaded: Loaded, *, again: bool) -> None:
        raise NotImplementedError("a replay finds no checkpoint")

    def leave(self) -> None:
        self.store.put(f"left/{self.rank}", b"-")
        self._wait("over")

    def finish(self) -> None:
        self._launched.counts["samples"] = 0
        self.close()

    def close(self) -> None:
        if self._area is not None:
            for parameter in self._replica.model.parameters():
                parameter.data = parameter.data.clone()
            self._replica.close()
            self._area.close()
            self._area = None

    @property
    def _turn(self) -> LoopTurn | None:
        return self._turns[self._at] if self._at < len(self._turns) else None

    def _take_turn(self) -> None:
        turn = self._turn
        self.clock, self.batch = (turn.clock, turn.batch) if turn is not None else (self.clock + 1, NO_END)
        if self.synchronous and turn is not None and turn.applied:
            self.refresh(turn.versions)
        elif self.synchronous and not any(later.stepped for later in self._turns[self._at :]):
            self._wait("over")

    def _wait(self, name: str) -> None:
        self.store.get(name, "the replay", self._stop_if_over)
        self._stop_if_over()
        self._replica.pulled()

    def _stop_if_over(self) -> None:
        if self.store.find("over") == b"differs":
            self.finish()
            raise SystemExit(0)
