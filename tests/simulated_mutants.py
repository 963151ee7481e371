"""Servers that are broken on purpose, one decision each: a judge that does not find them is worth nothing."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

from manyhands.foresight.simulate import SimulationSpec
from manyhands.foresight.simulate.driver import new_server
from manyhands.strategies.common.consistency import Bounded
from manyhands.strategies.ps.actions import Action, Outcome, SendMessage
from manyhands.strategies.ps.pending_steps import ShardConfig, Steps
from manyhands.strategies.ps.ps_messages import Chosen, ChosenKept, Hello, Push, Read, ReadRows
from manyhands.strategies.ps.server_core import ServerCore
from manyhands.strategies.ps.shard_core import ShardCore
from manyhands.strategies.ps.shard_replica import ShardReplica
from manyhands.strategies.ps.unconfirmed import Unconfirmed
from simulated import PROMISES, Draw, MakeServer, complaints, severed, stormy


class _Forgetful(ShardCore):
    def outcome_of(self, slot: int, clock: int) -> Outcome | None:
        del slot, clock
        return None


class _Impatient(ShardCore):
    @property
    def concluded(self) -> bool:
        return True


class _Silent(ShardReplica):
    def _greet(self, hello: Hello) -> list[Action]:
        self._hellos[hello.slot] = Hello(shard=hello.shard, slot=hello.slot, member=hello.member, settled=0)
        return self._welcome(hello.slot)


class _Hasty(ShardReplica):
    def _safe_sequence(self) -> int:
        return self.sequence


class _Unfenced(ShardReplica):
    def _serve_worker(self, message: Hello | Read | ReadRows | Push, sender: int) -> list[Action]:
        self._holders[message.slot] = message.member
        return super()._serve_worker(message, sender)


class _Unreported(ShardReplica):
    def _tell_others(self, before: dict[int, tuple[int, int]]) -> list[Action]:
        return [
            action
            for action in super()._tell_others(before)
            if not (
                isinstance(action, SendMessage)
                and isinstance(action.message, Chosen)
                and action.message.updates
            )
        ]

    def _take_kept(self, kept: ChosenKept, sender: int) -> list[Action]:
        return [
            action
            for action in super()._take_kept(kept, sender)
            if not (
                isinstance(action, SendMessage)
                and isinstance(action.message, Chosen)
                and action.message.updates
            )
        ]


class _Trusting(ShardReplica):
    def __init__(self, config: ShardConfig, member: int) -> None:
        super().__init__(config, member)
        self._unconfirmed = Unconfirmed(needed=False)


class _Forsaking(ShardReplica):
    def _know(self, slot: int, member: int) -> None:
        if member > self._holders.get(slot, 0):
            self._unconfirmed.resolve(slot)
        super()._know(slot, member)


class _LaxBounded(Bounded):
    @property
    def lag(self) -> int:
        return self.bound + 1


class _BrokenServer(ServerCore):
    def __init__(
        self,
        config: ShardConfig,
        member: int,
        make_replica: Callable[[ShardConfig, int], ShardReplica],
    ) -> None:
        super().__init__(config, member)
        self._make = make_replica

    def _make_replica(self, config: ShardConfig) -> ShardReplica:
        return self._make(config, self.member)


def config_of(spec: SimulationSpec) -> ShardConfig:
    slots = tuple(range(spec.workers))
    return ShardConfig(shard=0, num_shards=spec.shards, policy=spec.policy, steps=spec.steps, slots=slots)


def _with_replica(broken: type[ShardReplica]) -> MakeServer:
    return lambda member, spec: _BrokenServer(config_of(spec), member, broken)


def _with_core(broken: type[ShardCore]) -> MakeServer:
    class Replica(ShardReplica):
        def _make_core(self, state: dict[str, Any] | None) -> ShardCore:
            return broken(self.config) if state is None else broken.from_state(self.config, state)

    return _with_replica(Replica)


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
    source = textwrap.dedent(inspect.getsource(real))
    assert source.count(old) == 1, f"{owner.__name__}.{method} has no single {old!r} any more"
    made: dict[str, Any] = {}
    exec(compile(source.replace(old, new), method, "exec"), vars(sys.modules[owner.__module__]), made)
    setattr(owner, method, made[method])
    try:
        yield
    finally:
        setattr(owner, method, real)


MUTANTS = {
    "hasty": Mutant("acknowledges before the backup has an update", _with_replica(_Hasty)),
    "forgetful": Mutant("does not know an update again by its slot and clock", _with_core(_Forgetful)),
    "unfenced": Mutant("obeys a worker whose slot has passed to another", _with_replica(_Unfenced)),
    "lax": Mutant("lets a read miss one clock more than the bound", _lax),
    "impatient": Mutant("lets workers go before all shards keep the last choice", _with_core(_Impatient)),
    "silent": Mutant("does not log what a restored shard has lost", _with_replica(_Silent)),
    "untold": Mutant("tells a new primary nothing of what was chosen before it", _with_replica(_Unreported)),
    "trusting": Mutant("counts a push that other shards may lack", _with_replica(_Trusting), severed),
    "forsaking": Mutant(
        "drops what is unconfirmed once its worker has lost the slot", _with_replica(_Forsaking), severed
    ),
}

GUARDS = {
    "uncopied": Mutant(
        "commits at once although there is a backup",
        patch=(ShardReplica, "_append", "not self._backup and not self._in_flight", "not self._in_flight"),
    ),
    "unfenced pulls": Mutant(
        "takes the push and the read of a fenced member",
        patch=(ShardReplica, "_serve_worker", "if member < holder:", "if False:"),
    ),
    "counting twice": Mutant(
        "takes a push that is in flight once more",
        patch=(ShardReplica, "_take_push", "push.clock < self._taken.get(push.slot, 0)", "False"),
    ),
    "confirming": Mutant(
        "counts a push before a Read confirms it",
        patch=(ShardReplica, "_take_push", "self.config.confirms and", "False and"),
        draw=severed,
    ),
    "gullible": Mutant(
        "lets any Read confirm the push that is held",
        patch=(ShardReplica, "_take_read", "push.clock < clock and self._is_open(push)", "True"),
        draw=severed,
    ),
    "unread": Mutant(
        "answers a pull before the push of the same message counts",
        patch=(ShardCore, "answer", "if own < clock:", "if False:"),
    ),
    "alone": Mutant(
        "answers a read without the updates of others that it must include",
        patch=(ShardCore, "_lead_answer", "if self._lacks_others(clock):", "if False:"),
    ),
    "sleepy": Mutant(
        "does not look again at the reads that waited for other slots",
        patch=(
            ShardReplica,
            "_after",
            "(mark := core.mark) != self._mark",
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
        patch=(ShardReplica, "_append", "not self._backup and not self._in_flight", "not self._backup"),
        unit_test=(
            "test_server_replica.py",
            "test_what_was_in_flight_when_the_backup_died_is_committed_in_its_order",
        ),
    ),
    "presuming": Mutant(
        "serves before it has heard what other shards know",
        patch=(
            ShardReplica,
            "_serve_worker",
            "is not ReplicaRole.PRIMARY or self.core.awaiting",
            "is not ReplicaRole.PRIMARY",
        ),
        unit_test=(
            "test_server_replica.py",
            "test_a_lead_that_was_restored_serves_nobody_until_the_others_have_spoken",
        ),
    ),
    "homeless": Mutant(
        "counts an update that has no place in this run",
        patch=(
            ShardCore,
            "_push",
            "self.config.by_clock and self._place(slot, clock).kind is not _TRAIN",
            "False",
        ),
        unit_test=(
            "test_server_core.py",
            "test_an_update_whose_batch_the_slots_of_this_run_have_taken_counts_for_nothing",
        ),
    ),
    "unsure": Mutant(
        "gives work for a clock whose slots another shard may not know",
        patch=(
            ShardCore,
            "_lead_answer",
            "Hold.SHARDS if clock >= self.decisions.unsure_from else work",
            "work",
        ),
        unit_test=("test_server_core.py", "test_slots_change_at_a_clock_that_nobody_has_begun"),
    ),
    "replaced lead": Mutant(
        "follows a lead that was replaced",
        patch=(ShardReplica, "_take_chosen", "(chosen.epoch, sender) < self._lead", "False"),
        unit_test=("test_server_replica.py", "test_a_choice_is_confirmed_to_the_lead_that_serves_now"),
    ),
    "old backup": Mutant(
        "commits by what the backup of an earlier epoch has",
        patch=(ShardReplica, "handle", "or message.epoch != self.epoch", ""),
        unit_test=("test_server_replica.py", "test_a_new_backup_is_given_a_copy_and_waited_for"),
    ),
    "old primary": Mutant(
        "takes forwards of a primary that was replaced",
        patch=(ShardReplica, "_take_forward", "message.epoch < self.epoch", "False"),
        unit_test=("test_server_replica.py", "test_of_two_that_claim_a_shard_the_older_epoch_yields"),
    ),
    "repeating": Mutant(
        "gives a batch to an update that has one",
        patch=(ShardCore, "_assign", "clock in record.recent or ", ""),
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
