"""Servers that are broken on purpose, one decision each: a judge that does not find them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from manyhands.foresight.simulate import SimulationSpec
from manyhands.strategies.common.consistency import Bounded
from manyhands.strategies.ps.actions import Action, SendMessage
from manyhands.strategies.ps.pending_steps import ShardConfig
from manyhands.strategies.ps.ps_messages import Chosen, ChosenKept, Hello, Outcome, Push, Read, ReadRows
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


class _Untold(ShardReplica):
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
    make_server: MakeServer
    draw: Draw = stormy


MUTANTS = {
    "hasty": Mutant("acknowledges before the backup has an update", _with_replica(_Hasty)),
    "forgetful": Mutant("does not know an update again by its slot and clock", _with_core(_Forgetful)),
    "unfenced": Mutant("obeys a worker whose slot has passed to another", _with_replica(_Unfenced)),
    "lax": Mutant("lets a read miss one clock more than the bound", _lax),
    "impatient": Mutant("lets workers go before all shards keep the last choice", _with_core(_Impatient)),
    "silent": Mutant("does not log what a restored shard has lost", _with_replica(_Silent)),
    "untold": Mutant("tells a new primary nothing of what was chosen before it", _with_replica(_Untold)),
    "trusting": Mutant("counts a push that other shards may lack", _with_replica(_Trusting), severed),
    "forsaking": Mutant(
        "drops what is unconfirmed once its worker has lost the slot", _with_replica(_Forsaking), severed
    ),
}


def runs_until_caught(mutant: Mutant, first_seed: int, limit: int) -> tuple[int, list[str]]:
    """How many runs of every consistency and number of replicas it took, and the complaints about the last of them."""
    kinds = [(consistency, replicas) for consistency in PROMISES for replicas in (0, 1)]
    specs = (
        mutant.draw(seed, consistency, replicas)
        for seed in range(first_seed, first_seed + limit)
        for consistency, replicas in kinds
    )
    for number, spec in enumerate(islice(specs, limit), start=1):
        if found := complaints(spec, mutant.make_server):
            return number, found
    return limit, []
