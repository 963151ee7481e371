"""Simulated runs drawn from a seed, and everything that must hold for them; for the unit tests and for the soak."""

from __future__ import annotations

import random
from collections.abc import Callable

from manyhands.errors import ManyhandsError
from manyhands.server.audit import Evidence, Verdict, audit
from manyhands.server.server import ServerCore
from manyhands.simulate import (
    ComputeModel,
    NetworkModel,
    Promise,
    SimulationSpec,
    Timing,
    Witness,
    draw_faults,
    simulate,
)
from manyhands.simulate.models import LedgerStore

STEPS = 30

PROMISES = {
    "sync": Promise(steps=STEPS, bound=0),
    "sync:1": Promise(steps=STEPS, bound=0, whole=False),
    "bounded:1": Promise(steps=STEPS, bound=1),
    "bounded:3": Promise(steps=STEPS, bound=3),
    "async": Promise(steps=STEPS, bound=None),
    "softsync:2": Promise(steps=STEPS, bound=None, own=False),
    "aware:bounded:2": Promise(steps=STEPS, bound=2),
    "aware:softsync:3": Promise(steps=STEPS, bound=None, own=False),
}
"""What each consistency promises, in plain numbers: said here again, so that a policy can not agree with itself."""

MakeServer = Callable[[int, SimulationSpec], ServerCore]


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


def complaints(spec: SimulationSpec, make_server: MakeServer | None = None) -> list[str]:
    """Run `spec` to its end, and say which promises were broken."""
    witness = Witness(PROMISES[str(spec.consistency)])
    try:
        run = simulate(spec, observer=witness, **({"make_server": make_server} if make_server else {}))
    except ManyhandsError as error:
        return [str(error)]
    found = witness.complaints(run)
    ended = {
        shard: len(store.groups) for shard, store in enumerate(run.stores) if isinstance(store, LedgerStore)
    }
    audited = audit(run.written, spec.policy, spec.steps, Evidence(versions=ended))
    found += [f"audit: {violation.sentence}" for violation in audited.violations]
    found += [f"audit: {sentence}" for sentence in audited.missing]
    wanted = Verdict.RESTORED if witness.lost_replicas else Verdict.COMPLETE
    if not found and audited.verdict is not wanted:
        found.append(f"audit: it is {audited.words}, and should be {wanted.value}")
    if spec.replicas and witness.lost_replicas:
        found.append("a shard was lost, although no server died before the last death was made good")
    return found
