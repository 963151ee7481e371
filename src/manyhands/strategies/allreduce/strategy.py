"""`allreduce` and its preset `mirrored` as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from manyhands.errors import UserError
from manyhands.facts import (
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    StepCosts,
    Stepping,
    TaskProfile,
    Truth,
)
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.usual_promises import ELASTIC, IN_STEP, ROUNDED
from manyhands.strategy import (
    MIB,
    Searched,
    Strategy,
    WorkerMemory,
    buckets_setting,
    check_buckets,
    check_choice,
    check_link,
    integer,
    link_setting,
    setting,
    settings_of,
    switch_setting,
)
from manyhands.wire.names import RAW, check_codec, codec_setting, feedback_setting, rounds_hops

NCCL = "nccl"


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Every worker holds the model; gradients are summed by the algorithm you name.

    `direct` runs in place in shared memory on one host; every other algorithm runs its schedule over links.
    `group` is the number of ranks that `hierarchical` takes as one host (0: as the cluster found them), `link` how
    processes of one host talk: through `shared` memory, or every algorithm by `tcp` on loopback. There, or between
    hosts, `codec` makes gradients smaller on their way. Where every worker has a GPU of its own, and no setting asks
    for another way, NCCL sums on the GPUs: `link=nccl` insists on that, and `link=tcp` does without. With `elastic=yes`
    the run continues without a worker that is lost, and workers may join and leave. `helpers=2` adds two processes
    that only sum, over links.
    """

    word: ClassVar[str] = "allreduce"
    about: ClassVar[str] = "every worker holds the model; gradients are summed by a chosen algorithm"
    truth: ClassVar[Truth] = Truth.EVERYONE
    searched: ClassVar[Searched] = {
        "algorithm": lambda machines: [
            name for name in ALGORITHMS if machines.hosts == 1 or name != "direct"
        ],
        "buckets": lambda _: [size * MIB // 4 for size in (1, 4, 16, 100)],
    }
    streams: ClassVar[int] = 2
    algorithm: str = setting("direct", str)
    """How gradients are summed: `direct` in shared memory, or a schedule over links such as `ring`."""
    buckets: int = buckets_setting()
    group: int = setting(0, integer)
    """Ranks that `hierarchical` takes as one host; 0: as the cluster found them."""
    link: str = link_setting()
    """How processes of one host talk: by `shared` memory or `tcp`; `nccl` insists that gradients are summed on GPUs."""
    codec: str = codec_setting()
    """How gradients are made smaller on their way: `raw`, or a codec such as `bf16` or `topk:0.01+int8`."""
    feedback: bool = feedback_setting()
    """Whether what a codec leaves out is kept and added to the next gradient."""
    elastic: bool = switch_setting()
    """Whether the run continues without a worker that is lost, and workers may join and leave it."""
    helpers: int = setting(0, integer)
    """How many more processes take part that only sum, so that less goes over each worker's own link."""

    def __post_init__(self) -> None:
        check_choice("all-reduce algorithm", self.algorithm, ALGORITHMS)
        check_link(self.link, more=(NCCL,))
        check_codec(
            self.codec,
            link=self.link,
            strategy=self.word,
            feedback=self.feedback,
            algorithm=self.algorithm,
            chooses=True,
        )
        check_buckets(self.buckets)
        if self.link == NCCL and self.instead_of_nccl:
            raise UserError(f"link=nccl {self.instead_of_nccl}; leave one out")
        rounds, out = rounds_hops(self.codec), "leave one out"
        helped, helpers = self.helpers > 0, f"helpers={self.helpers}"
        fixed = helped and self.elastic
        idle_group = self.group and self.algorithm != "hierarchical"
        clashes = {
            f"elastic=yes codec={self.codec}: a repeated step would send its residuals twice; {out}, or use a codec "
            "that only rounds, such as bf16": self.elastic and not rounds,
            f"group={self.group} needs algorithm=hierarchical, not {self.algorithm}": idle_group,
            f"group={self.group} must not be negative; 0 means the hosts of the cluster": self.group < 0,
            f"{helpers} must not be negative; 0 means none": self.helpers < 0,
            f"{helpers} algorithm={self.algorithm}: helpers use their own algorithm; leave the algorithm "
            "out": helped and self.algorithm != "direct",
            f"{helpers} elastic=yes: the number of workers is fixed in a run with helpers; {out}": fixed,
            f"{helpers} codec={self.codec}: it works only between workers, without helpers; {out}, or use a codec that "
            "only rounds, such as bf16": helped and not rounds,
        }
        _refuse_first(clashes)

    @property
    def instead_of_nccl(self) -> str:
        """The setting that asks for another way than NCCL to sum, with the reason; empty where none does."""
        reasons = {
            f"helpers={self.helpers}: helpers sum in the memory of their hosts": self.helpers,
            "elastic=yes: NCCL cannot continue when a worker is lost": self.elastic,
            f"codec={self.codec}: NCCL sums uncompressed gradients": self.codec != RAW,
            f"algorithm={self.algorithm}: NCCL has its own algorithms": self.algorithm != "direct",
            f"link={self.link}: it uses the host's sockets": self.uses_network,
        }
        return next((why for why, holds in reasons.items() if holds), "")

    @property
    def _uses_links(self) -> bool:
        """Every algorithm but `direct` in shared memory, which sums in place; and everything with helpers."""
        return self.algorithm != "direct" or self.uses_network or self.helpers > 0

    def processes(self, workers: int) -> dict[str, int]:
        return {"worker": workers, **({"helper": self.helpers} if self.helpers else {})}

    def role_of(self, rank: int, workers: int) -> tuple[str, int]:
        return ("worker", rank) if rank < workers else ("helper", rank - workers)

    def placed(self, world: int, roles: Mapping[str, int]) -> tuple[Strategy, int]:
        if self.helpers and roles:
            raise UserError(
                f"strategy={self}: a cluster specification has no type for helpers; leave helpers out, or start the "
                "processes with torchrun"
            )
        if self.helpers and world < self.helpers + 2:
            raise UserError(
                f"strategy={self}: with {self.helpers} helpers of {world} processes, fewer than two would train; "
                f"start at least {self.helpers + 2} processes"
            )
        _, count = super().placed(world, roles)
        return self, count - self.helpers

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        rows, bucket = super().needs(model, workers), min(self.buckets, model.gradients)
        if self._uses_links and self.algorithm == "ring" and self.codec == RAW and workers > 1:
            rows = [replace(rows[0], besides=bucket // workers, what="a part of a bucket that comes")]
        if self.codec != RAW:
            from manyhands.strategies.common.coded_times import coded_memory

            coded = coded_memory(self.codec, model.gradients, bucket, workers, feedback=self.feedback)
            rows = [
                replace(
                    rows[0],
                    activations=max(rows[0].activations, coded.working),
                    besides=coded.kept,
                    what="what the codec has left out, and room for what it encodes" if coded.kept else "",
                )
            ]
        if self.helpers:
            rows.append(WorkerMemory(who="helper", count=self.helpers, weights=0, gradients=bucket))
        return rows

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Buckets are summed while backward continues; what the workers of a host sum in place, their cores do."""
        from manyhands.strategies.common.coded_times import coded_all_reduce_s, has_known_time
        from manyhands.strategies.common.step_times import (
            beyond_backward_s,
            buckets_of,
            is_modelled,
            summed_in_memory_s,
        )

        workers = machines.workers
        if self.link == NCCL or not has_known_time(self.codec):
            return None
        exchange_s, buckets = 0.0, buckets_of(profile.layers, self.buckets)
        if machines.hosts == 1 and not self._uses_links:
            exchange_s = sum(summed_in_memory_s(machines, num_bytes) for _, num_bytes in buckets)
        elif workers > 1:
            named = self.algorithm not in ("direct", "hierarchical") or machines.hosts == 1
            algorithm = self.algorithm if named else "hierarchical"
            if rounds_hops(self.codec) and not is_modelled(algorithm, machines, self.helpers):
                return None

            def seconds(num_bytes: float) -> float:
                return coded_all_reduce_s(self.codec, algorithm, machines, num_bytes, self.helpers)

            exchange_s = beyond_backward_s(profile, profile.samples(workers), buckets, seconds)
        return PredictedStep(
            compute_s=profile.compute_s(workers),
            exchange_s=exchange_s,
            waiting_s=profile.waiting_s(workers),
            optimizer_s=profile.optimizer_s,
        )

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """Between hosts, the algorithms; on one, `mirrored` is the same. With `survives`, workers that may leave.

        With `lossy`, codecs between hosts: those that only round hop by hop, the others in their own forms.
        """
        from manyhands.strategies.common.step_times import is_modelled

        names_algorithms = "algorithm" in settings_of(cls)
        elastic = [cls(elastic=True)] if survives and names_algorithms else []
        if machines.hosts == 1 or not names_algorithms:
            return elastic if names_algorithms else [cls()]
        known = [name for name in ALGORITHMS if name != "direct" and is_modelled(name, machines)]
        per_host = machines.per_host
        found = [cls(algorithm=name, group=per_host * (name == "hierarchical")) for name in known]
        if lossy and "hierarchical" in known:
            found.append(cls(algorithm="hierarchical", group=per_host, link="tcp", codec="bf16"))
        if lossy:
            found += [cls(link="tcp", codec=codec) for codec in ("int8", "topk:0.01")]
        return [*found, *elastic]

    def across_hosts(self, hosts: Sequence[Sequence[int]]) -> Strategy:
        """`hierarchical` by itself, with the workers of a host as a group, where hosts hold equally many one by one.

        Elsewhere, where neither algorithm nor group is named, a ring; what is named stays. Codecs that are more than a
        rounding have forms of their own over all workers.
        """
        if self.link == NCCL:
            return replace(self, link="shared").across_hosts(hosts)  # as words travel beside it
        named = self.algorithm not in ("direct", "hierarchical") or self.group
        if named or self.helpers or not rounds_hops(self.codec):
            return self
        if not in_order(hosts):
            return replace(self, algorithm="ring")
        return replace(self, algorithm="hierarchical", group=len(hosts[0]))

    def advice(self, workers: int, *, sparse: bool) -> str:
        if self.helpers and workers == 2:
            return (
                f"helpers={self.helpers}: two workers send as much with helpers as without; use helpers with three "
                "workers or more"
            )
        return super().advice(workers, sparse=sparse)

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        """Compiled steps have no way back, say nothing of what they read, and know of no helpers."""
        super().check(workers, device, compiled=compiled)
        helpers, helped, final = f"helpers={self.helpers}", self.helpers > 0, compiled and self.elastic
        no_gpus = self.link == NCCL and device == "cpu"
        _refuse_first(
            {
                f"link=nccl device={device}: NCCL sums on GPUs; use device=cuda, or leave link=nccl out": no_gpus,
                f"{helpers} workers={workers}: helpers need at least 2 workers; leave helpers out, or use "
                "more workers": helped and workers < 2,
                f"{helpers}: compiled steps do not support helpers; leave it out": compiled and helped,
                "elastic=yes: a compiled step cannot be undone when a worker is lost; leave it out": final,
            }
        )

    @property
    def facts(self) -> Facts:
        promises = ELASTIC if self.elastic else IN_STEP
        refused = {}  # sums inside forward need everybody, and the links to themselves
        if self.elastic:
            refused["synchronize"] = "with elastic=yes a worker may be lost in a forward while others wait"
        # A loop cannot be put back to the beginning of a step, nor say what its forward reads; nobody starts helpers.
        for_fit = {
            f"helpers={self.helpers}": self.helpers > 0,
            "link=nccl": self.link == NCCL,
            "elastic=yes": self.elastic,
        }
        what = next((name for name, asked in for_fit.items() if asked), "")
        return Facts(
            promises=promises if self.codec == RAW else replace(promises, same_numbers=ROUNDED),
            stepping=(Stepping.TOGETHER,),
            can_change_workers=self.elastic,
            continues_with_fewer=self.elastic,
            leaves_steps_out=not self.elastic,
            keeps_gradients=True,  # in buckets
            uses_links=self._uses_links,
            streams=1 if what or self.codec != RAW else self.streams,
            cost_class="allreduce by links" if self._uses_links else "mirrored",
            usual_costs=StepCosts(byte_s=1.5e-10),
            kernels=() if rounds_hops(self.codec) else ("codecs",),
            cannot_cross_hosts="",
            instead_of_own_loop=f"give mh.fit a Task for {what}" if what else "",
            refused_buffers=refused,
        )


@dataclass(frozen=True, kw_only=True)
class Mirrored(AllReduce):
    """Every worker of one host holds the model; gradients are summed in shared memory, in worker order.

    A preset of `allreduce`, which has `buckets` as its only setting. Where every worker has a GPU of its own, NCCL
    sums on the GPUs.
    """

    word: ClassVar[str] = "mirrored"
    about: ClassVar[str] = "all-reduce in the shared memory of one host"
    offers: ClassVar[tuple[str, ...] | None] = ("buckets",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for one in fields(self):
            if one.name != "buckets" and getattr(self, one.name) != one.default:
                raise UserError(f"mirrored has no setting {one.name!r}; use allreduce for it")

    def across_hosts(self, hosts: Sequence[Sequence[int]]) -> Strategy:
        return AllReduce(buckets=self.buckets).across_hosts(hosts)


def _refuse_first(clashes: Mapping[str, object]) -> None:
    for clash, holds in clashes.items():
        if holds:
            raise UserError(clash)


def in_order(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether hosts hold equally many ranks one after the other, the last one perhaps fewer."""
    size = len(hosts[0])
    world = sum(map(len, hosts))
    return [list(ranks) for ranks in hosts] == [
        list(range(begin, min(begin + size, world))) for begin in range(0, world, size)
    ]
