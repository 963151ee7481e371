"""`ps` as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.errors import UserError, check_count, num_of
from manyhands.facts import (
    Answer,
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    Promise,
    Promises,
    StepCosts,
    Stepping,
    TaskProfile,
    Truth,
    Waits,
)
from manyhands.strategies.common.consistency import Policy, Sync, parse_consistency
from manyhands.strategies.common.tables.filter_setting import RowFilters, parse_filters
from manyhands.strategies.common.usual_promises import BY_CHANCE, ROUNDED, TO_ROUNDING
from manyhands.strategy import (
    Searched,
    Strategy,
    WorkerMemory,
    check_choice,
    check_link,
    integer,
    link_setting,
    setting,
)
from manyhands.wire.names import RAW, check_codec, codec_setting, feedback_setting, rounds_hops, votes

_PUSHED = ("gradients", "parameters")
_KEYS = ("named", "listed")
FILTERED = Promise(
    answer=Answer.PARTLY,
    words="near those of one process, as a filter keeps parts of gradients for later; the same in every run",
)
MEANS_OF_STEPS = Promise(
    answer=Answer.PARTLY,
    words="those of one process if steps are proportional to the gradient, as in plain SGD; the same in every run",
)


@dataclass(frozen=True, kw_only=True)
class Ps(Strategy):
    """Parameter servers hold the truth, each a shard of it; workers pull, compute and push.

    `consistency` says when replicas must agree, `replicas=1` that every shard is kept by two servers, `link` how
    processes of one host talk: `shared` memory or `tcp` on loopback; there `codec` makes gradients and parameters
    smaller on their way between workers and servers. With `push=parameters` each worker takes a step of its own with
    what it has pulled, by an optimizer of its own, and pushes the parameters that come of it; servers average them.
    """

    word: ClassVar[str] = "ps"
    about: ClassVar[str] = "parameter servers, each with a shard; sync, bounded, async or softsync"
    truth: ClassVar[Truth] = Truth.SERVERS

    searched: ClassVar[Searched] = {
        "servers": lambda machines: [count for count in (1, 2, 4, 8, 16) if count <= machines.workers],
    }
    servers: int = setting(1, integer)
    """How many processes hold the parameters, a shard each."""
    consistency: Policy = setting(Sync(), parse_consistency)  # noqa: RUF009 - a value without state
    """When replicas must agree: `sync`, `bounded:s`, `async` or `softsync:n`."""
    replicas: int = setting(0, integer)
    """How many other servers keep a copy of each shard: 0 or 1."""
    link: str = link_setting()
    codec: str = codec_setting()
    """How what travels is made smaller: `raw`, or a codec such as `bf16` or `topk:0.01+int8`."""
    feedback: bool = feedback_setting()
    """Whether what a codec leaves out is kept and added to what is sent next."""
    push: str = setting("gradients", str)
    """What workers push: `gradients`, by which servers step, or `parameters`, which servers average."""
    keys: str = setting("named", str)
    """How the rows of a sparse table are told: `named` by a hash once a server has the list, or `listed` every time."""
    filter: RowFilters = setting(RowFilters(), parse_filters)  # noqa: RUF009 - a value without state
    """Which rows of a sparse table's gradient stay with the worker: `kkt`, `significant:0.001`, both with a `+`."""

    def __post_init__(self) -> None:
        if isinstance(self.consistency, str):  # as in a text
            object.__setattr__(self, "consistency", parse_consistency(self.consistency))
        if isinstance(self.filter, str):
            object.__setattr__(self, "filter", parse_filters(self.filter))
        check_count("servers", self.servers)
        if self.replicas not in (0, 1):
            raise UserError(f"replicas={self.replicas} must be 0 or 1; 1 keeps every shard on two servers")
        check_link(self.link)
        no_sum = "factors are summed over workers, but a server receives one worker's at a time; use allreduce link=tcp"
        check_codec(
            self.codec,
            link=self.link,
            strategy=self.word,
            feedback=self.feedback,
            refused={"powersgd": no_sum},
        )
        check_choice("push", self.push, _PUSHED)
        check_choice("keys", self.keys, _KEYS)
        if self.averages and self.codec != RAW:
            raise UserError(
                f"ps push={self.push} codec={self.codec}: a codec would round away a step, which is small compared "
                "to the parameters; leave one of the two out"
            )

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        """A run begins with the workers that its consistency counts on."""
        super().check(workers, device, compiled=compiled)
        fewest = self.consistency.fewest_workers
        if workers < fewest:
            raise UserError(
                f"consistency={self.consistency} workers={workers}: it needs at least {fewest} workers; start more, or "
                f"give a smaller number in consistency="
            )

    @property
    def averages(self) -> bool:
        """Whether servers average parameters, and workers have the optimizers."""
        return self.push == "parameters"

    @property
    def reads_in_place(self) -> bool:
        """Whether workers read a copy of the parameters in memory that all share: no server writes while any reads."""
        return self.consistency.lockstep and self.link == "shared" and not self.averages

    @property
    def adds_up(self) -> bool:
        """Whether gradients of one host may be added up before they are pushed, and be fetched for as one."""
        return self.consistency.lockstep and self.codec == RAW and not self.averages

    @property
    def votes(self) -> bool:
        """Whether a step goes by the signs of the sum."""
        return votes(self.codec)

    @property
    def num_server_processes(self) -> int:
        """One per shard, and at least two where each shard is kept twice."""
        return max(self.servers, self.replicas + 1)

    def processes(self, workers: int) -> dict[str, int]:
        return {"worker": workers, "server": self.num_server_processes}

    def placed(self, world: int, roles: Mapping[str, int]) -> tuple[Ps, int]:
        """Under torchrun the first processes serve; of a specification, the roles of type ps, all of them.

        A chief leads and does not train.
        """
        if not roles:
            servers = self.num_server_processes
            if world <= servers:
                raise UserError(
                    f"strategy={self}: world size {world} leaves no worker besides {num_of(servers, 'server')}; start "
                    f"at least {servers + 1} processes"
                )
            return self, world - servers
        servers, workers = roles.get("ps", 0), roles.get("worker", 0)
        if not servers:
            raise UserError(f"strategy={self}: the cluster lists no ps; add one, or use allreduce")
        if not workers:
            raise UserError(
                f"strategy={self}: the cluster lists no worker, and a chief does not train; add a worker"
            )
        if self.servers not in (1, servers):
            raise UserError(
                f"strategy={self}: servers={self.servers}, but the cluster lists {servers} of type ps; leave servers= "
                "out, or make them equal"
            )
        placed = replace(self, servers=servers)
        if placed.num_server_processes > servers:
            raise UserError(
                f"strategy={self}: replicas={self.replicas} needs {placed.num_server_processes} servers, but the "
                f"cluster lists {servers} of type ps; add one, or leave replicas out"
            )
        return placed, workers

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """One server, and up to one for each worker; in step and not.

        With `survives`, a second server for each shard; with `lossy`, a bound on staleness, and codecs between hosts.
        """
        counts = [count for count in (1, 2, 4, 8, 16) if count <= machines.workers]
        policies = [parse_consistency(text) for text in ("sync", "async")]
        found = [cls(servers=count, consistency=policy) for policy in policies for count in counts]
        if lossy:
            found += [cls(servers=counts[-1], consistency=parse_consistency(f"bounded:{k}")) for k in (1, 4)]
        if lossy and machines.hosts > 1:
            found += [cls(servers=counts[-1], link="tcp", codec=codec) for codec in ("bf16", "int8")]
        return [*found, *(cls(servers=count, replicas=1) for count in counts if survives and count > 1)]

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        """Servers keep shards and step them, by a sum where many push for one step; a worker has its parameters, or all
        read one copy.
        """
        from manyhands.strategies.common.coded_times import pushing_memory

        servers = self.num_server_processes
        adds = self.consistency.stepwise and workers > 1
        left_out = pushing_memory(self.codec, model.gradients, feedback=self.feedback)
        in_place = self.reads_in_place
        worker = WorkerMemory(
            who="worker",
            count=workers,
            weights=model.buffers if in_place else model.weights,
            gradients=model.gradients,
            state=model.state if self.averages else 0,
            activations=model.working(
                workers if self.consistency.stepwise else 1,
                keeps_gradients=True,
                share=float(self.averages),
            ),
            besides=left_out,
            what="what the codec has left out" if left_out else "",
        )
        server = WorkerMemory(
            who="server",
            count=servers,
            weights=model.parameters * (1 + self.replicas) // servers,
            gradients=model.gradients * (1 + self.replicas) // servers if adds else 0,
            state=0 if self.averages else model.state * (1 + self.replicas) // servers,
        )
        read = WorkerMemory(who="shared by all", weights=model.parameters)
        return [worker, server, *([read] if in_place else [])]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """In step, all push and pull at once: a server's link carries the shards of all workers, or of all hosts.

        Otherwise each worker computes whole batches; together they cannot push more than the servers' links and
        optimizers get through.
        """
        from manyhands.strategies.common.coded_times import (
            carries_values,
            has_known_time,
            left_by,
            pushed_and_pulled_s,
        )

        if self.averages or self.replicas or not has_known_time(self.codec):
            return None
        workers, shards = machines.workers, self.servers
        rate = (
            machines.between
            if machines.hosts > 1
            else machines.inside
            if self.uses_network
            else machines.memory
        )
        whole, step_s = profile.model.gradients, profile.served_s(shards, workers)
        pushed = left_by(self.codec, whole)
        pulled = pushed if carries_values(self.codec) else whole
        # What one worker pushes to one shard, and pulls from it, and what it takes the shard's server.
        sizes = (pushed, pulled)
        if self.consistency.lockstep:
            # Between hosts, workers of one host push as one: they add up in memory, and copy what was fetched.
            as_one = self.adds_up and machines.hosts > 1
            ends = machines.hosts if as_one else workers
            moved_s = sum(max(rate.seconds(size), ends * rate.seconds(size / shards)) for size in sizes)
            moved_s += sum(map(machines.memory.seconds, sizes)) if ends < workers else 0.0
            moved_s += pushed_and_pulled_s(self.codec, machines, whole, shards, ends)
            return PredictedStep(
                compute_s=profile.compute_s(workers),
                exchange_s=moved_s,
                waiting_s=profile.waiting_s(workers),
                optimizer_s=step_s,
            )
        compute_s, moved_s = profile.compute_s(), sum(map(rate.seconds, sizes))
        moved_s += pushed_and_pulled_s(self.codec, machines, whole, shards, 1)
        alone_s = compute_s + moved_s + step_s
        served_s = max(rate.seconds(size / shards) for size in sizes)
        most_s = workers * max(step_s, served_s)
        waiting_s = max(0.0, most_s - alone_s)
        return PredictedStep(
            compute_s=compute_s, exchange_s=moved_s, waiting_s=waiting_s, optimizer_s=step_s, batches=workers
        )

    @property
    def _stepping(self) -> tuple[Stepping, ...]:
        """Each server steps its shard, unless there is one, or workers step and servers average."""
        together = self.servers == 1 or self.averages
        return (Stepping.TOGETHER,) if together else (Stepping.IN_PIECES, Stepping.APART)

    @property
    def facts(self) -> Facts:
        """Nothing ends with a worker; what is left of a server depends on `replicas`."""
        policy = self.consistency
        same = BY_CHANCE
        if policy.lockstep:
            same = MEANS_OF_STEPS if self.averages else TO_ROUNDING if self.codec == RAW else ROUNDED
            same = FILTERED if self.filter else same
        advice = {
            Waits.ALL: "a bound on staleness would not hide a lasting straggler, consistency=async would",
            Waits.LAGGARDS: "a larger bound would not hide a lasting straggler, consistency=async would",
            Waits.NOBODY: "",
        }
        anew = ", but its optimizer starts without state" if self.averages else ""
        successor = f"the others continue; a successor takes its place, and no update is applied twice{anew}"
        promises = Promises(
            worker_dies=Promise(answer=Answer.YES, words=successor),
            server_dies=Promise(
                answer=Answer.YES, words="its shards are kept by a second server, which takes over"
            )
            if self.replicas
            else Promise(
                answer=Answer.PARTLY,
                words="in a run with a directory a new server continues from the last snapshot; later updates are lost",
            ),
            workers_join=Promise(answer=Answer.YES, words="they may join and leave while it runs (mh.start)"),
            same_numbers=same,
        )
        return Facts(
            promises=promises,
            stepping=self._stepping,
            waits_for=policy.waits_for,
            stepwise=policy.stepwise,
            splits_batches=policy.stepwise,  # parts of one batch make one step, or each batch is a step of its own
            meets_to_evaluate=policy.stepwise,
            can_change_workers=True,
            can_skip_updates=True,
            moves_rows=True,
            logs_updates=True,
            kept_copies=1 + self.replicas,
            usual_costs=StepCosts(step_s=5e-4, byte_s=6e-10),
            cost_class=f"ps{'' if policy.stepwise else ' not in step'}{' by tcp' if self.uses_network else ''}",
            kernels=() if rounds_hops(self.codec) else ("codecs",),
            straggler_advice=advice[policy.waits_for],
            cannot_clip="the servers of ps apply their shards of a gradient separately, and no process has all of it "
            "to clip",
            cannot_log="the servers of ps take the steps, each of its shard",
            cannot_stream="a batch of ps may be computed again by a successor or a replay, but a stream can be "
            "read only once",
            cannot_read_apart="a batch of ps may be computed again by a successor or a replay, which does not have "
            "the first worker's data",
            cannot_heed_evaluations="workers of ps take turns evaluating while the others train, so no "
            "worker sees every evaluation",
            cannot_stop="the servers of ps assign work up to the requested last step, so the run ends here at once",
            cannot_cross_hosts="",
            instead_of_own_loop="give mh.fit a Task for push=parameters" if self.averages else "",
            refused_buffers={
                "synchronize": "its workers do not compute on parts of the same batch at the same time",
                "mean": "its workers end one by one, and the model has the buffers of the last one",
            },
        )
