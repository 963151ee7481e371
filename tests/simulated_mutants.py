"""Servers that are broken on purpose, one decision each: a judge that does not find them is worth nothing."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from manyhands.foresight.simulate.driver import new_server
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.strategies.common.consistency import Bounded
from manyhands.strategies.ps.actions import Action, Outcome, SendMessage
from manyhands.strategies.ps.pending_steps import ShardConfig, Steps
from manyhands.strategies.ps.ps_messages import Chosen, ChosenKept, Forwarded, Hello, Push, Read, ReadRows
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_primary import ShardPrimary
from manyhands.strategies.ps.shard_replica import ServerCore, ShardReplica
from manyhands.strategies.ps.unconfirmed import Unconfirmed
from manyhands.strategies.ps.work_plan import WorkPlan
from simulated import PROMISES, Draw, MakeServer, complaints, severed, stormy


class _Forgetful(ShardCore):
    def outcome_of(self, slot: int, clock: int) -> Outcome | None:
        del slot, clock
        return None


class _Silent(ShardPrimary):
    def _greet(self, hello: Hello) -> None:
        nothing = self._hellos[hello.slot] = hello._replace(settled=0)
        super()._greet(nothing)


class _Hasty(ShardPrimary):
    def _commit_safe(self) -> None:
        self._forwarded = self.sequence
        super()._commit_safe()


class _Unfenced(ShardPrimary):
    def serve(self, message: Hello | Read | ReadRows | Push, sender: int) -> list[Action]:
        self._known.holders[message.slot] = message.member
        return super().serve(message, sender)


def _is_choice(action: Action) -> bool:
    return (
        isinstance(action, SendMessage)
        and isinstance(action.message, Chosen)
        and bool(action.message.updates)
    )


class _Unreported(ShardPrimary):
    def _greet_shards(self, before: dict[int, tuple[int, int]]) -> None:
        said = len(self._actions)
        super()._greet_shards(before)
        self._actions[said:] = [action for action in self._actions[said:] if not _is_choice(action)]

    def hear_shard(self, message: Chosen | ChosenKept | Forwarded, sender: int) -> list[Action]:
        actions = super().hear_shard(message, sender)
        if isinstance(message, ChosenKept):
            actions = [action for action in actions if not _is_choice(action)]
        return actions


class _Trusting(ShardPrimary):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unconfirmed = Unconfirmed(needed=False)


class _Forsaking(ShardPrimary):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before = dict(self._known.holders)

    def follow(self, *args: Any, **options: Any) -> list[Action]:
        for slot, member in self._known.holders.items():
            if member > self._before.get(slot, 0):
                self._unconfirmed.resolve(slot)
        self._before = dict(self._known.holders)
        return super().follow(*args, **options)

    def serve(self, message: Hello | Read | ReadRows | Push, sender: int) -> list[Action]:
        if message.member > self._before.get(message.slot, 0):
            self._unconfirmed.resolve(message.slot)
            self._before[message.slot] = message.member
        return super().serve(message, sender)


class _LaxBounded(Bounded):
    @property
    def lag(self) -> int:
        return self.bound + 1


def config_of(spec: SimulationSpec) -> ShardConfig:
    slots = tuple(range(spec.workers))
    return ShardConfig(shard=0, num_shards=spec.shards, policy=spec.policy, steps=spec.steps, slots=slots)


def _with(primary: type[ShardPrimary] = ShardPrimary, core: type[ShardCore] = ShardCore) -> MakeServer:
    class Replica(ShardReplica):
        make_primary = primary
        make_core = core

    return lambda member, spec: ServerCore(config_of(spec), member, Replica)


def _lax(member: int, spec: SimulationSpec) -> ServerCore:
    config = config_of(spec)
    if isinstance(spec.policy, Bounded):
        return ServerCore(
            ShardConfig(
                shard=0,
                num_shards=spec.shards,
                policy=_LaxBounded(spec.policy.bound),
                steps=spec.steps,
                slots=config.slots,
            ),
            member,
        )
    return ServerCore(config, member)


@dataclass(frozen=True)
class Mutant:
    """A broken server, and what is wrong with it."""

    what: str
    make_server: MakeServer | None = None
    draw: Draw = stormy
    patch: tuple[type, str, str, str] | None = None
    """A method of the cores, and a part of its source that is replaced in every server of the run."""
    unit_test: tuple[str, str] | None = None
    """The file and the test that fails with the patch, where simulated runs do not show it."""


@contextmanager
def patched(owner: type, method: str, old: str, new: str) -> Iterator[None]:
    """The class with one part of a method's source replaced; a part that is not there once is an error."""
    real = vars(owner)[method]
    source = textwrap.dedent(inspect.getsource(real.fget if isinstance(real, property) else real))
    assert source.count(old) == 1, f"{owner.__name__}.{method} has no single {old!r} any more"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), method, "exec"), vars(sys.modules[owner.__module__]), made)
    setattr(owner, method, made[method])
    try:
        yield
    finally:
        setattr(owner, method, real)


MUTANTS = {
    "hasty": Mutant("acknowledges before the backup has an update", _with(_Hasty)),
    "forgetful": Mutant("does not know an update again by its slot and clock", _with(core=_Forgetful)),
    "unfenced": Mutant("obeys a worker whose slot has passed to another", _with(_Unfenced)),
    "lax": Mutant("lets a read miss one clock more than the bound", _lax),
    "impatient": Mutant(
        "lets workers go before all shards keep the last choice",
        patch=(WorkPlan, "concluded", "not self._config.chosen or", "True or"),
    ),
    "silent": Mutant("does not log what a restored shard has lost", _with(_Silent)),
    "untold": Mutant("tells a new primary nothing of what was chosen before it", _with(_Unreported)),
    "trusting": Mutant("counts a push that other shards may lack", _with(_Trusting), severed),
    "forsaking": Mutant(
        "drops what is unconfirmed once its worker has lost the slot", _with(_Forsaking), severed
    ),
}

GUARDS = {
    "uncopied": Mutant(
        "commits at once although there is a backup",
        patch=(ShardPrimary, "_append", "not self._backup and not self._in_flight", "not self._in_flight"),
    ),
    "unfenced pulls": Mutant(
        "takes the push and the read of a fenced member",
        patch=(ShardPrimary, "serve", "if member < holder:", "if False:"),
    ),
    "counting twice": Mutant(
        "takes a push that is in flight once more",
        patch=(ShardPrimary, "serve", "message.clock < self._taken.get(slot, 0)", "False"),
    ),
    "confirming": Mutant(
        "counts a push before a Read confirms it",
        patch=(ShardPrimary, "serve", "elif confirms and", "elif False and"),
        draw=severed,
    ),
    "gullible": Mutant(
        "lets any Read confirm the push that is held",
        patch=(ShardPrimary, "_confirm", "push.clock < clock and self._is_open(push)", "True"),
        draw=severed,
    ),
    "unread": Mutant(
        "answers a pull before the push of the same message counts",
        patch=(WorkPlan, "answer", "if own < clock:", "if False:"),
    ),
    "alone": Mutant(
        "answers a read without the updates of others that it must include",
        patch=(
            WorkPlan,
            "_lead_answer",
            "config.lag is not None and self.mark < clock - config.lag",
            "False",
        ),
    ),
    "sleepy": Mutant(
        "does not look again at the reads that waited for other slots",
        patch=(
            ShardPrimary,
            "_commit",
            "(mark := core.work.mark) != self._mark",
            "(mark := self._mark) != self._mark",
        ),
    ),
    "stepless": Mutant(
        "makes no step of updates that the policy takes together",
        patch=(Steps, "next_group", "self.step in self._arrived", "self.step + 1 in self._arrived"),
    ),
}
"""The guards of the path that every push-pull takes, each left out."""

UNSEEN = {
    "overtaking": Mutant(
        "commits at once although entries before it are in flight",
        patch=(ShardPrimary, "_append", "not self._backup and not self._in_flight", "not self._backup"),
        unit_test=(
            "test_server_replica.py",
            "test_what_was_in_flight_when_the_backup_died_is_committed_in_its_order",
        ),
    ),
    "presuming": Mutant(
        "serves before it has heard what other shards know",
        patch=(
            ShardReplica,
            "handle",
            "serving is not None and not self.core.awaiting",
            "serving is not None",
        ),
        unit_test=(
            "test_server_replica.py",
            "test_a_lead_that_was_restored_serves_nobody_until_the_others_have_spoken",
        ),
    ),
    "homeless": Mutant(
        "counts an update that has no place in this run",
        patch=(ShardCore, "_push", "self.work.has_place(push)", "True"),
        unit_test=(
            "test_server_core.py",
            "test_an_update_whose_batch_the_slots_of_this_run_have_taken_counts_for_nothing",
        ),
    ),
    "unsure": Mutant(
        "gives work for a clock whose slots another shard may not know",
        patch=(
            WorkPlan,
            "_lead_answer",
            "Hold.SHARDS if clock >= self._decisions.unsure_from else work",
            "work",
        ),
        unit_test=("test_server_core.py", "test_slots_change_at_a_clock_that_nobody_has_begun"),
    ),
    "replaced lead": Mutant(
        "follows a lead that was replaced",
        patch=(ShardPrimary, "hear_shard", "and (message.epoch, sender) >= known.lead", ""),
        unit_test=("test_server_replica.py", "test_a_choice_is_confirmed_to_the_lead_that_serves_now"),
    ),
    "old backup": Mutant(
        "commits by what the backup of an earlier epoch has",
        patch=(ShardPrimary, "hear_shard", "if message.epoch == known.epoch:", "if True:"),
        unit_test=("test_server_replica.py", "test_a_new_backup_is_given_a_copy_and_waited_for"),
    ),
    "old primary": Mutant(
        "takes forwards of a primary that was replaced",
        patch=(ShardReplica, "handle", "message.epoch < self.epoch", "False"),
        unit_test=("test_server_replica.py", "test_of_two_that_claim_a_shard_the_older_epoch_yields"),
    ),
    "repeating": Mutant(
        "gives a batch to an update that has one",
        patch=(WorkPlan, "assign", "clock in record.recent or ", ""),
        unit_test=(
            "test_server_core.py",
            "test_async_gives_batches_out_in_the_order_of_asking_and_the_same_again",
        ),
    ),
}
"""Guards whose loss a thousand simulated runs do not show: each has a unit test that does."""


def runs_until_caught(mutant: Mutant, first_seed: int, limit: int) -> tuple[int, list[str]]:
    """How many runs of every consistency and number of replicas it took, and the complaints about the last of them."""
    kinds = [(consistency, replicas) for consistency in PROMISES for replicas in (0, 1)]
    specs = (
        mutant.draw(seed, consistency, replicas)
        for seed in range(first_seed, first_seed + limit)
        for consistency, replicas in kinds
    )
    with patched(*mutant.patch) if mutant.patch is not None else nullcontext():
        for number, spec in enumerate(islice(specs, limit), start=1):
            try:
                found = complaints(spec, mutant.make_server or new_server)
            except (LookupError, AssertionError) as error:  # a driver was asked for what it does not hold
                found = [repr(error)]
            if found:
                return number, found
    return limit, []
