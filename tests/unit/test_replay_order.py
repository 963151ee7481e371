"""The order of a replay, on logs made by hand and on logs of a small machine that draws its own order."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest

from manyhands.errors import UserError
from manyhands.strategies.ps.log_rows import RestoredRow, SkippedRow, SlotsRow, StepRow, UpdateRow
from manyhands.strategies.ps.replay_order import (
    Forget,
    ReplayAction,
    ReplayApply,
    ReplayCompute,
    ReplayImpossible,
    ReplayKeep,
    ReplayOrder,
    steps_of,
)
from manyhands.strategies.ps.update_files import ComputedRow


def computed(slot: int, clock: int, *versions: int, batch: int = 0, member: int = 0) -> ComputedRow:
    return ComputedRow(
        process=member or slot + 10,
        slot=slot,
        member=member or slot + 10,
        clock=clock,
        batch=batch,
        part=0,
        parts=1,
        versions=versions,
        rows_versions=(-1,) * len(versions),
        gradients=("",) * len(versions),
    )


def by_process(rows: Iterable[ComputedRow]) -> dict[int, list[ComputedRow]]:
    processes: dict[int, list[ComputedRow]] = {}
    for row in rows:
        processes.setdefault(row.process, []).append(row)
    return processes


def step(shard: int, version: int, *rows: ComputedRow) -> StepRow:
    updates = tuple(
        UpdateRow(
            slot=row.slot, clock=row.clock, batch=row.batch, part=row.part, parts=row.parts, member=row.member,
            read_version=row.versions[shard], staleness=version - 1 - row.versions[shard], weight=1.0, factor=1.0,
        )
        for row in rows
    )  # fmt: skip
    return StepRow(shard=shard, term=0, sequence=version, version=version, rate=1.0, updates=updates)


def log(shard: int, *groups: ComputedRow | tuple[ComputedRow, ...]) -> list[StepRow]:
    return [
        step(shard, version, *((group,) if isinstance(group, ComputedRow) else group))
        for version, group in enumerate(groups, 1)
    ]


def text(actions: Iterable[ReplayAction]) -> list[str]:
    lines = []
    for action in actions:
        match action:
            case ReplayCompute(row=row, shards=shards):
                lines.append(f"compute {row.slot}.{row.clock} for {','.join(map(str, shards))}")
            case ReplayApply(row=row):
                lines.append(f"apply {row.shard}@{row.version}")
            case ReplayKeep(shard=shard, version=version):
                lines.append(f"keep {shard}@{version}")
            case Forget(shard=shard, version=version):
                lines.append(f"forget {shard}@{version}")
    return lines


# Two workers, two shards; shard 1 takes the first updates in the other order.
A0, B0 = computed(0, 0, 0, 0, batch=0), computed(1, 0, 0, 0, batch=1)
A1 = computed(0, 1, 1, 2, batch=2)


def test_a_shard_that_is_still_to_be_read_waits_where_it_can() -> None:
    order = ReplayOrder([log(0, A0, B0, A1), log(1, B0, A0, A1)], by_process([A0, B0, A1]))
    assert text(order) == [
        "compute 0.0 for 0,1",
        "compute 1.0 for 0,1",
        "apply 0@1",
        "apply 1@1",
        "apply 1@2",
        "compute 0.1 for 0,1",
        "apply 0@2",
        "apply 0@3",
        "apply 1@3",
    ]


def test_a_version_that_can_not_wait_is_kept_until_it_was_read() -> None:
    b1 = computed(1, 1, 2, 1, batch=3)  # read shard 0 after B0 ...
    late = computed(0, 1, 1, 2, batch=2)  # ... and shard 1 came to 2 only by that
    order = ReplayOrder([log(0, A0, B0, late), log(1, B0, b1, late)], by_process([A0, late, B0, b1]))
    assert text(order)[2:] == [
        "apply 0@1",
        "apply 1@1",
        "keep 0@1",
        "apply 0@2",
        "compute 1.1 for 1",
        "apply 1@2",
        "compute 0.1 for 0,1",
        "forget 0@1",
        "apply 0@3",
        "apply 1@3",
    ]


def test_until_counts_batches_at_every_shard_and_goes_on_where_another_needs_it() -> None:
    order = ReplayOrder([log(0, A0, A1, B0), log(1, B0, A0, A1)], by_process([A0, A1, B0]), until=2)
    assert order.limits == (2, 2)
    assert "apply 1@3" not in text(order)
    assert text(order)[-1] == "apply 0@2"
    ahead = computed(1, 0, 0, 2, batch=1)  # what shard 0 has first was computed of shard 1's second version
    order = ReplayOrder([log(0, ahead, A0), log(1, A0, computed(2, 0, 0, 0, batch=5))],
                        by_process([A0, ahead, computed(2, 0, 0, 0, batch=5)]), until=1)  # fmt: skip
    assert order.limits == (1, 1)
    assert text(order)[-3:] == ["apply 1@2", "compute 1.0 for 0", "apply 0@1"]


def test_until_goes_by_batches_and_not_by_steps() -> None:
    parts = tuple(computed(slot, 0, 0, batch=0) for slot in range(3))
    pair = (computed(0, 1, 1, batch=1), computed(1, 1, 1, batch=2))
    order = ReplayOrder([log(0, parts, pair)], by_process([*parts, *pair]), until=1)
    assert order.limits == (1,)
    assert ReplayOrder([log(0, parts, pair)], by_process([*parts, *pair]), until=2).limits == (2,)
    for wrong in (-1, 4):
        with pytest.raises(UserError, match=f"until={wrong} must be between 0 and 3"):
            ReplayOrder([log(0, parts, pair)], by_process([*parts, *pair]), until=wrong)


def test_an_update_that_two_members_made_counts_as_each_made_it() -> None:
    first = computed(0, 0, 0, 0)
    again = computed(0, 0, 1, 0, member=30)  # its worker died when shard 0 alone had it
    order = ReplayOrder([log(0, first), log(1, again)], by_process([first, again]))
    assert text(order) == ["compute 0.0 for 0", "apply 0@1", "compute 0.0 for 1", "apply 1@1"]


def test_with_buffers_a_process_also_computes_what_nobody_took() -> None:
    dropped, taken = computed(0, 0, 0), computed(0, 1, 0)
    rows = by_process([dropped, taken])
    assert text(ReplayOrder([log(0, taken)], rows)) == ["compute 0.1 for 0", "apply 0@1"]
    assert text(ReplayOrder([log(0, taken)], rows, stateful=True)) == [
        "compute 0.0 for ",
        "compute 0.1 for 0",
        "apply 0@1",
    ]


def test_with_buffers_what_a_process_had_begun_when_it_lost_its_place_is_undone() -> None:
    """A row of another member says so; nobody can repeat what was read while it changed, and nobody has to."""
    first, torn, later = (
        computed(slot, clock, version, member=member)._replace(process=10)
        for slot, clock, version, member in ((0, 0, 0, 10), (0, 1, 1, 10), (1, 2, 1, 30))
    )
    rows = by_process([first, torn, later])
    order = ReplayOrder([log(0, first, later)], rows, stateful=True)
    assert text(order) == ["compute 0.0 for 0", "apply 0@1", "compute 1.2 for 0", "apply 0@2"]
    assert not any(action.undone for action in order if isinstance(action, ReplayCompute))
    taken = ReplayOrder([log(0, first, (torn, later))], rows, stateful=True)  # it was whole after all
    computes = [action for action in taken if isinstance(action, ReplayCompute)]
    assert [(action.row, action.undone) for action in computes] == [
        (first, False),
        (torn, True),
        (later, False),
    ]


# ── records that contradict each other ────────────────────────────────────────────────────────────────────────────────


def test_a_circle_is_a_sentence_that_names_the_row() -> None:
    one, other = computed(0, 0, 0, 1), computed(1, 0, 1, 0)  # each read what the other made
    order = ReplayOrder([log(0, one), log(1, other)], by_process([one, other]))
    with pytest.raises(
        ReplayImpossible,
        match=r"shard 0, version 1 \(slot 0, clock 0, batch 0\) .* read version 1 of shard 1, .* at version 0",
    ):
        text(order)


@pytest.mark.parametrize(
    ("recorded", "sentence"),
    [
        (computed(0, 0, 0, batch=4), "the shard logged batch 3, its worker recorded 4"),
        (computed(0, 0, 1, batch=3), "the shard logged read_version 0, its worker recorded 1"),
        (computed(0, 0, 0, batch=3, member=77), "no worker recorded"),
    ],
)
def test_a_row_that_its_worker_did_not_record_so_is_named(recorded: ComputedRow, sentence: str) -> None:
    with pytest.raises(
        ReplayImpossible, match=rf"shard 0, version 1 \(slot 0, clock 0, batch 3\): {sentence}"
    ):
        ReplayOrder([log(0, computed(0, 0, 0, batch=3))], by_process([recorded]))


def test_a_read_of_what_never_was_is_named() -> None:
    row = computed(0, 0, 0, 9)
    with pytest.raises(
        ReplayImpossible, match=r"slot 0, clock 0 .* read version 9 of shard 1, but its log ends at version 0"
    ):
        ReplayOrder([log(0, row), []], by_process([row]))


def test_the_files_of_a_shard_make_one_story() -> None:
    rows = log(0, A0, B0, A1)
    slots = SlotsRow(shard=0, term=0, sequence=0, start=0, base=0, slots=(0, 1))
    skipped = SkippedRow(shard=0, term=0, sequence=9, slot=1, clock=1, batch=7, member=11)
    assert steps_of(0, [[slots, *rows[:2]], [slots, *rows[1:], skipped]]) == rows
    with pytest.raises(ReplayImpossible, match="no log has version 2"):
        steps_of(0, [[rows[0]], [rows[2]]])
    with pytest.raises(ReplayImpossible, match="version 2: two servers logged it differently"):
        steps_of(0, [rows, [step(0, 2, A0)]])
    with pytest.raises(UserError, match="shard 0 went back to a snapshot of version 1"):
        steps_of(0, [[*rows, RestoredRow(shard=0, term=1, sequence=1, version=1)]])


# ── a machine that draws its own order ────────────────────────────────────────────────────────────────────────────────


class Machine:
    """Asynchronous workers and shards, on numbers instead of tensors: reads and pushes reach shards in any order."""

    def __init__(self, seed: int, workers: int, shards: int, updates: int) -> None:
        self.draw = random.Random(seed)
        self.values = [[0] for _ in range(shards)]  # by version
        self.steps: list[list[StepRow]] = [[] for _ in range(shards)]
        self.computed: list[ComputedRow] = []
        jobs = [self.worker(slot) for slot in range(workers)]
        while len(self.computed) < updates:
            next(self.draw.choice(jobs))

    def worker(self, slot: int) -> Iterator[None]:
        shards = list(range(len(self.values)))
        clock = 0
        reads = dict.fromkeys(shards, 0)
        while True:
            row = computed(slot, clock, *(reads[shard] for shard in shards), batch=len(self.computed))
            self.computed.append(row)
            gradient = gradient_of(row, [self.values[shard][reads[shard]] for shard in shards])
            for shard in self.draw.sample(shards, len(shards)):
                yield
                self.steps[shard].append(step(shard, len(self.steps[shard]) + 1, row))
                self.values[shard].append(stepped(self.values[shard][-1], gradient))
            for shard in self.draw.sample(shards, len(shards)):
                yield
                reads[shard] = len(self.steps[shard])
            clock += 1


def gradient_of(row: ComputedRow, values: Sequence[int]) -> int:
    return hash((row.batch, *values)) % 1_000_003


def stepped(value: int, gradient: int) -> int:
    return (value * 31 + gradient) % 1_000_003


def run_again(order: ReplayOrder, shards: int) -> tuple[list[int], int, int]:
    """The values at the end, and the most copies of a shard and gradients that were held."""
    values, versions = [0] * shards, [0] * shards
    kept: dict[tuple[int, int], int] = {}
    gradients: dict[tuple[int, tuple[int, int, int]], int] = {}
    most_kept = most_gradients = 0
    for action in order:
        match action:
            case ReplayKeep(shard=shard, version=version):
                assert versions[shard] == version
                kept[shard, version] = values[shard]
            case Forget(shard=shard, version=version):
                del kept[shard, version]
            case ReplayCompute(row=row, shards=users):
                read = [
                    values[shard] if versions[shard] == version else kept[shard, version]
                    for shard, version in enumerate(row.versions)
                ]
                for shard in users:
                    gradients[shard, row.name] = gradient_of(row, read)
            case ReplayApply(row=done):
                (update,) = done.updates
                values[done.shard] = stepped(values[done.shard], gradients.pop((done.shard, update.name)))
                versions[done.shard] = done.version
        most_kept = max(most_kept, *(sum(at == shard for at, _ in kept) for shard in range(shards)))
        most_gradients = max(most_gradients, len({name for _, name in gradients}))
    assert not kept
    assert not gradients
    return values, most_kept, most_gradients


@pytest.mark.parametrize("seed", range(40))
def test_any_order_is_found_again_in_bounded_memory(seed: int) -> None:
    workers, shards = 2 + seed % 5, 1 + seed % 4
    machine = Machine(seed, workers, shards, updates=120)
    processes: Mapping[int, Sequence[ComputedRow]] = by_process(machine.computed)
    order = ReplayOrder(machine.steps, processes, stateful=seed % 2 == 0)
    values, most_kept, most_gradients = run_again(order, shards)
    assert values == [history[-1] for history in machine.values]
    assert most_kept <= workers
    assert most_gradients <= workers


def test_an_update_that_a_shard_applied_twice_is_named() -> None:
    first, second = computed(0, 0, 0), computed(1, 0, 0)
    with pytest.raises(
        ReplayImpossible, match=r"shard 0, version 3 \(slot 0, clock 0, .*already applied as version 1"
    ):
        ReplayOrder([log(0, first, second, first)], by_process([first, second]))
    with pytest.raises(
        ReplayImpossible, match=r"shard 0, version 1 \(slot 0, clock 0, .*already applied as version 1"
    ):
        ReplayOrder([log(0, (first, first))], by_process([first]))


def test_a_version_before_the_first_step_is_named() -> None:
    rows = [step(0, version, computed(0, version, 0)) for version in range(3)]
    with pytest.raises(
        ReplayImpossible, match="shard 0: a log has a step to version 0; the first version is 1"
    ):
        steps_of(0, [rows])
