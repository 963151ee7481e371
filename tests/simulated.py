"""Simulated runs drawn from a seed, and everything that must hold for them; for the unit tests and for the soak."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from manyhands.errors import ManyhandsError
from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.faults import FaultRole, Kill, Pause, draw_faults, draw_storm
from manyhands.foresight.simulate.models import LedgerStore
from manyhands.foresight.simulate.simulated_spec import ComputeModel, NetworkModel, SimulationSpec, Timing
from manyhands.foresight.simulate.witness import Witness, WitnessedPromise
from manyhands.strategies.common.membership import MAX_DEATHS
from manyhands.strategies.ps.audit import Evidence, Verdict, audit
from manyhands.strategies.ps.shard_replica import ServerCore

STEPS = 30

PROMISES = {
    "sync": WitnessedPromise(steps=STEPS, bound=0),
    "sync:1": WitnessedPromise(steps=STEPS, bound=0, late=1),
    "bounded:1": WitnessedPromise(steps=STEPS, bound=1),
    "bounded:3": WitnessedPromise(steps=STEPS, bound=3),
    "async": WitnessedPromise(steps=STEPS, bound=None),
    "softsync:2": WitnessedPromise(steps=STEPS, bound=None, own=False),
    "aware:bounded:2": WitnessedPromise(steps=STEPS, bound=2),
    "aware:softsync:3": WitnessedPromise(steps=STEPS, bound=None, own=False),
    "sync:2": WitnessedPromise(steps=STEPS, bound=0, late=2),
    "softsync:1": WitnessedPromise(steps=STEPS, bound=None, own=False),
}
"""What each consistency promises, in plain numbers: said here again, so that a policy cannot agree with itself."""

MakeServer = Callable[[int, SimulationSpec], ServerCore]
Draw = Callable[[int, str, int], SimulationSpec]


def drawn(seed: int, consistency: str, replicas: int) -> SimulationSpec:
    """A run with faults. With replicas one death at a time: more is not promised; without, anything goes."""
    draw = random.Random(f"{seed} {consistency} {replicas}")
    return SimulationSpec(
        workers=draw.randint(2, 6),
        steps=STEPS,
        consistency=consistency,
        shards=draw.randint(1, 3),
        replicas=replicas,
        seed=seed,
        compute=ComputeModel(
            step_s=0.1,
            factors={0: draw.choice([1.0, 1.0, 3.0])},
            delay_probability=0.1,
            spread=draw.choice([0.0, 0.5]),
        ),
        network=NetworkModel(latency_s=1e-3, jitter_s=draw.choice([0.0, 5e-3, 5e-2])),
        timing=Timing(
            apply_s=draw.choice([0.0, 1e-3]),
            start_s=0.2,
            silent_after_s=0.3,
            snapshot_every_s=0.5,
            limit_s=600.0,
        ),
        faults=draw_faults(seed, draw.randint(0, 8), 2.5, resize=draw.random() < 0.3),
        one_at_a_time=replicas == 1,
    )


def stormy(seed: int, consistency: str, replicas: int) -> SimulationSpec:
    """A run with worse faults: they overlap, workers come and go, links are slowed up to 300 times, stopped ones wake.

    What a seed means never changes, here or in `drawn`: seeds that failed once are tests. Draw in a new way under a new
    name.
    """
    draw = random.Random(f"stormy {seed} {consistency} {replicas}")
    return SimulationSpec(
        workers=draw.randint(1, 6),
        steps=STEPS,
        consistency=consistency,
        shards=draw.randint(1, 4),
        replicas=replicas,
        seed=seed,
        compute=ComputeModel(
            step_s=0.1,
            factors={draw.randrange(8): draw.choice([0.3, 1.0, 3.0])},
            delay_probability=0.1,
            spread=draw.choice([0.0, 0.5, 1.0]),
        ),
        network=NetworkModel(latency_s=1e-3, jitter_s=draw.choice([0.0, 5e-3, 5e-2])),
        timing=Timing(
            apply_s=draw.choice([0.0, 1e-3, 1e-2]),
            start_s=draw.choice([0.05, 0.2, 0.5]),
            silent_after_s=0.3,
            snapshot_every_s=draw.choice([0.1, 0.5]),
            limit_s=600.0,
        ),
        faults=draw_storm(seed, 2.5, resize=draw.random() < 0.7),
        one_at_a_time=replicas == 1 and draw.random() < 0.3,
    )


def ending(seed: int, consistency: str, replicas: int) -> SimulationSpec:
    """A run whose servers die and stop around its end: with the last steps, while they leave their shards, while some
    have left theirs and others come back.
    """
    draw = random.Random(f"ending {seed} {consistency} {replicas}")
    timing = Timing(
        start_s=draw.choice([0.05, 0.2]),
        silent_after_s=0.3,
        snapshot_every_s=draw.choice([0.1, 0.5]),
        leave_s=draw.choice([0.02, 0.2]),
        limit_s=600.0,
    )
    spec = SimulationSpec(
        workers=draw.randint(1, 4),
        steps=STEPS,
        consistency=consistency,
        shards=draw.randint(1, 4),
        replicas=replicas,
        seed=seed,
        compute=ComputeModel(step_s=0.02, spread=draw.choice([0.0, 1.0])),
        network=NetworkModel(latency_s=1e-3, jitter_s=draw.choice([0.0, 5e-3, 5e-2])),
        timing=timing,
        one_at_a_time=replicas == 1 and draw.random() < 0.3,
    )
    plain = simulate(spec)
    over_s = plain.seconds - plain.began_s
    faults: list[Kill | Pause] = []
    at_s = over_s + draw.uniform(-0.1, timing.leave_s)
    for _ in range(draw.randint(1, 5)):
        role = FaultRole.SERVER if draw.random() < 0.8 else FaultRole.WORKER
        strike = {"at_s": max(at_s, 0.0), "role": role, "pick": draw.randrange(2**16)}
        slept_s = draw.uniform(0.01, 0.6)
        faults.append(Kill(**strike) if draw.random() < 0.8 else Pause(seconds=slept_s, **strike))
        at_s += draw.choice([0.005, 0.05, 0.3]) * draw.random()
    return replace(spec, faults=tuple(faults))


def severed(seed: int, consistency: str, replicas: int) -> SimulationSpec:
    """A run whose workers die and stop in the middle of what they tell several shards; now and then a server stops.

    Computing takes less time than messages do: that is where faults strike.
    """
    draw = random.Random(f"severed {seed} {consistency} {replicas}")
    faults: list[Kill | Pause] = []
    for at_s in sorted(draw.uniform(0.0, 2.5) for _ in range(draw.randint(3, 8))):
        role = FaultRole.WORKER if draw.random() < 0.8 else FaultRole.SERVER
        strike = {"at_s": at_s, "role": role, "pick": draw.randrange(2**16)}
        slept_s = draw.uniform(0.01, 0.25 if role is FaultRole.SERVER else 0.6)
        kills = role is FaultRole.WORKER and draw.random() < 0.6
        faults.append(Kill(**strike) if kills else Pause(seconds=slept_s, **strike))
    return SimulationSpec(
        workers=draw.randint(1, 4),
        steps=STEPS,
        consistency=consistency,
        shards=draw.randint(2, 4),
        replicas=replicas,
        seed=seed,
        compute=ComputeModel(step_s=0.01, spread=draw.choice([0.0, 1.0])),
        network=NetworkModel(latency_s=1e-3, jitter_s=draw.choice([5e-3, 5e-2])),
        timing=Timing(
            start_s=draw.choice([0.05, 0.2]), silent_after_s=0.3, snapshot_every_s=0.5, limit_s=600.0
        ),
        faults=tuple(faults),
    )


def complaints(spec: SimulationSpec, make_server: MakeServer | None = None) -> list[str]:
    """Run `spec` to its end, and say which promises were broken."""
    witness = Witness(PROMISES[str(spec.consistency)])
    try:
        run = simulate(spec, observer=witness, **({"make_server": make_server} if make_server else {}))
    except ManyhandsError as error:
        return [] if _ends_by_design(str(error), witness, spec) else [str(error)]
    found = witness.complaints(run)
    ended = {
        shard: len(store.groups) for shard, store in enumerate(run.stores) if isinstance(store, LedgerStore)
    }
    audited = audit(run.written, spec.policy, spec.steps, Evidence(versions=ended))
    found += [f"audit: {violation.sentence}" for violation in audited.violations]
    found += [f"audit: {sentence}" for sentence in audited.missing]
    wanted = Verdict.RESTORED if witness.at_risk else Verdict.COMPLETE
    if not found and audited.verdict is not wanted:
        found.append(f"audit: it is {audited.words}, and should be {wanted.value}")
    return found + (_needless_restores(witness, spec.timing.death_noticed_s) if spec.replicas else [])


def _ends_by_design(sentence: str, witness: Witness, spec: SimulationSpec) -> bool:
    """Whether a run gave up as it should: so many deaths of one slot's workers, or of servers, did happen."""
    if "times in a row without getting past clock" in sentence:
        return _struck(witness, FaultRole.WORKER) >= MAX_DEATHS
    if "times in a row without all shards being complete in between" in sentence:
        return _struck(witness, FaultRole.SERVER) >= MAX_DEATHS * max(spec.shards, spec.replicas + 1)
    return False


def _struck(witness: Witness, role: FaultRole) -> int:
    """Return how often processes of this role were killed or stopped; for workers, the maximum over slots."""
    strikes = [
        happening.slot
        for happening in witness.happenings
        if happening.what.startswith((f"{role.value} killed", f"{role.value} paused"))
    ]
    if role is FaultRole.SERVER:
        return len(strikes)
    return max(Counter(slot for slot in strikes if slot >= 0).values(), default=0)


def _needless_restores(witness: Witness, noticed_s: float) -> list[str]:
    """With replicas: every return to a snapshot without two deaths of servers before all copies were there.

    A death is known `noticed_s` later: that all copies are there may be said in between.
    """
    found = []
    deaths_s = [0.0]  # the first copies are in transit
    for happening in witness.happenings:
        whole = happening.what == "recovered every shard"
        if whole or (happening.what == "first copies" and len(deaths_s) == 1):
            deaths_s = [at_s for at_s in deaths_s if at_s >= happening.at_s - noticed_s]
        elif happening.what == "server killed":
            deaths_s.append(happening.at_s)
        elif happening.what.endswith("restored") and len(deaths_s) < 2:
            found.append(f"{happening.what} at {happening.at_s:g} s, although a copy of it was left")
    return found
