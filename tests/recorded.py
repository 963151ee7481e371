"""Recorded runs to hold an auditor against: simulated ones, with all that a live run leaves, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.models import LedgerStore
from manyhands.foresight.simulate.simulated_run import SimulatedHappening, SimulatedRun
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.foresight.simulate.witness import Witness
from manyhands.strategies.common.consistency import Policy, blend
from manyhands.strategies.ps.actions import Ack
from manyhands.strategies.ps.audit import Audit, Evidence, audit
from manyhands.strategies.ps.log_rows import RestoredRow, Row, StepRow
from manyhands.strategies.ps.ps_messages import Message, Push
from manyhands.strategies.ps.update_files import ComputedRow


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The records of one run, as `audit` is given them."""

    policy: Policy
    steps: int
    logs: dict[int, list[list[Row]]]
    computed: dict[int, list[ComputedRow]]
    versions: dict[int, int] | None
    recorded: dict[str, int]
    run: SimulatedRun | None = field(default=None, repr=False)

    def audit(self) -> Audit:
        evidence = Evidence(
            computed=self.computed,
            share=lambda batch, part, parts: 1.0 / parts,
            versions=self.versions,
            recorded=self.recorded,
            found=self.lengths(),
        )
        return audit(self.logs, self.policy, self.steps, evidence)

    def lengths(self) -> dict[str, int]:
        found = {_name(s, n): len(file) for s, files in self.logs.items() for n, file in enumerate(files)}
        return found | {f"worker.process-{p}.jsonl": len(rows) for p, rows in self.computed.items()}

    def forged(self) -> Recorded:
        """The same, with a summary that was made to fit what the logs say now."""
        ends = {s: max(map(_version, files)) for s, files in self.logs.items()}
        return replace(self, versions=ends, recorded=self.lengths())

    def with_rows(
        self,
        change: Callable[[list[Row]], list[Row]],
        shards: Iterable[int] = (-1,),
        files: slice = slice(None),
    ) -> Recorded:
        """With some files of some shards (-1: the last) changed; those that nothing was ever applied in stay."""
        wanted = {shard % len(self.logs) for shard in shards}
        logs = {}
        for shard, kept in self.logs.items():
            chosen = range(len(kept))[files] if shard in wanted else ()
            logs[shard] = [change(list(f)) if n in chosen else list(f) for n, f in enumerate(kept)]
        assert logs != self.logs, "nothing was changed"
        return replace(self, logs=logs)


def record(spec: SimulationSpec, witness: Witness | None = None) -> Recorded:
    """Run `spec`, and keep what its servers and workers would have written."""
    scribe = _Scribe(spec.shards, witness)
    run = simulate(spec, observer=scribe)
    logs = {shard: [list(file) for file in files if file] for shard, files in run.written.items()}
    found = Recorded(
        policy=spec.policy,
        steps=spec.steps,
        logs=logs,
        computed=scribe.pushed,
        versions={
            s: len(store.groups) for s, store in enumerate(run.stores) if isinstance(store, LedgerStore)
        },
        recorded={},
        run=run,
    )
    return found if spec.faults else replace(found, recorded=found.lengths())


def changed(version: int, policy: Policy, **fields: Any) -> Callable[[list[Row]], list[Row]]:
    """Another value in the first update of one step, with a rate that fits; a function is given the old one."""

    def change(rows: list[Row]) -> list[Row]:
        return [_changed(row, policy, fields) if _version([row]) == version else row for row in rows]

    return change


def _changed(row: Row, policy: Policy, fields: dict[str, Any]) -> StepRow:
    assert isinstance(row, StepRow)
    first = row.updates[0]
    values = {
        name: value(getattr(first, name)) if callable(value) else value for name, value in fields.items()
    }
    updates = (first._replace(**values), *row.updates[1:])
    staleness = [update.staleness for update in updates]
    factors, rate = blend(policy, [update.weight for update in updates], staleness, updates[0].parts)
    fitting = tuple(update._replace(factor=factor) for update, factor in zip(updates, factors, strict=True))
    return row._replace(updates=fitting, rate=rate)


def _version(rows: Iterable[Row]) -> int:
    return max((row.version for row in rows if isinstance(row, StepRow | RestoredRow)), default=0)


def _name(shard: int, number: int) -> str:
    return f"shard-{shard}.member-{number + 1}.jsonl"


class _Scribe(Witness):
    """Writes down what workers push, as their own records do before; and sees on, as a witness."""

    def __init__(self, shards: int, witness: Witness | None) -> None:
        self._witness = witness
        self._shards = shards
        self.pushed: dict[int, list[ComputedRow]] = {}

    def computes(self, *arguments: Any) -> None:
        if self._witness is not None:
            self._witness.computes(*arguments)

    def serves(self, *arguments: Any) -> None:
        if self._witness is not None:
            self._witness.serves(*arguments)

    def restores(self, *arguments: Any) -> None:
        if self._witness is not None:
            self._witness.restores(*arguments)

    def over(self, *arguments: Any) -> None:
        if self._witness is not None:
            self._witness.over(*arguments)

    def happens(self, happening: SimulatedHappening) -> None:
        if self._witness is not None:
            self._witness.happens(happening)

    def acknowledges(self, ack: Ack) -> None:
        if self._witness is not None:
            self._witness.acknowledges(ack)

    def sends(self, source: int, to: int, message: Message, now_s: float) -> None:
        if not isinstance(message, Push) or message.skip:
            return
        rows = self.pushed.setdefault(message.member, [])
        name = (message.slot, message.clock, message.member)
        at = next((n for n, row in enumerate(rows) if row.name == name), len(rows))
        if at == len(rows):
            rows.append(_computed(message, self._shards))
        versions = list(rows[at].versions)
        versions[message.shard] = message.read_version
        rows[at] = rows[at]._replace(versions=tuple(versions))


def _computed(push: Push, shards: int) -> ComputedRow:
    return ComputedRow(
        process=push.member,
        slot=push.slot,
        member=push.member,
        clock=push.clock,
        batch=push.batch,
        part=push.part,
        parts=push.parts,
        versions=(0,) * shards,
        rows_versions=(-1,) * shards,
        gradients=("",) * shards,
    )
