"""`local` as a value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from manyhands.errors import UserError
from manyhands.facts import (
    Answer,
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    Promise,
    StepCosts,
    TaskProfile,
    Truth,
)
from manyhands.strategies.common.usual_promises import IN_STEP, ROUNDED, TO_ROUNDING
from manyhands.strategies.local.fragments import FragmentPlan
from manyhands.strategies.local.outer import MEAN, outer_step
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    check_link,
    integer,
    link_setting,
    setting,
    switch_setting,
)
from manyhands.wire.names import RAW, auto_error, check_codec, codec_setting, feedback_setting, rounds_hops


def _read_steps(text: str) -> float:
    if text == "inf":
        return math.inf
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"local steps={text}: must be an integer of at least 1, or inf")
    return int(text)


def _read_share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number") from None


@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """Every worker takes its own steps on its part of each batch; every `steps` of them all replicas are averaged.

    `steps=1` with plain SGD is the synchronous step; `steps=inf` averages once, at the end. The `first` steps end with
    an average each, as in post-local SGD. `outer` is what becomes of the mean, `gossip` what is done between two.
    `fragments` and `overlap` are for links that are slow or far: the model is averaged a part at a time, and what is
    sent travels beside the next steps. `link` is how processes of one host talk: through `shared` memory, or in a ring
    by `tcp` on loopback; there `codec` makes what travels smaller: how far each worker has come since the last average.
    """

    word: ClassVar[str] = "local"
    about: ClassVar[str] = "each worker takes its own steps; parameters are averaged every few of them"
    truth: ClassVar[Truth] = Truth.EVERYONE
    steps: float = setting(8, _read_steps)
    """How many steps of its own a worker takes between two averages."""
    first: int = setting(0, integer)
    """How many steps at the beginning of the run end with an average each, which is then the plain mean."""
    outer: str = setting(MEAN, str)
    """What becomes of the mean: `mean`, `nesterov:RATE:MOMENTUM` (DiLoCo) or `elastic:PULL` (elastic averaging)."""
    fragments: int = setting(1, integer)
    """Into how many fragments the model is cut, each of which is averaged once in `steps` steps, in turn."""
    overlap: int = setting(0, integer)
    """How many steps pass between sending a fragment and merging what came back; meanwhile it travels."""
    keep: float = setting(0.5, _read_share)
    """The share of its own parameters that a worker keeps as a fragment is merged, where `overlap` is above 0."""
    gossip: bool = switch_setting()
    """Whether each worker averages its parameters with one other after every step between two averages."""
    link: str = link_setting()
    codec: str = codec_setting()
    """How what travels is made smaller: `raw`, or a codec such as `bf16` or `topk:0.01+int8`."""
    feedback: bool = feedback_setting()
    """Whether what a codec leaves out is kept and added to what is sent next."""

    def __post_init__(self) -> None:
        check_link(self.link)
        more = "optimizer state is not only matrices of gradients; use allreduce link=tcp"
        given: Any = {"link": self.link, "strategy": self.word, "feedback": self.feedback}
        check_codec(self.codec, **given, sends_changes=True, chooses=True, refused={"powersgd": more})
        outer_step(self.outer, 1)  # refuses what it cannot read
        if self.first < 0 or self.first != int(self.first):
            raise UserError(f"local first={self.first}: must be an integer of at least 0")
        if self._is_elastic and self.codec != RAW:
            raise UserError(
                f"local outer={self.outer} codec={self.codec}: a codec sends the change since all replicas were equal, "
                "and here they never are; leave one out"
            )
        if self._is_elastic and self.gossip:
            raise UserError(f"local outer={self.outer} gossip=yes: both average the replicas; leave one out")
        if self.steps != math.inf and (self.steps < 1 or self.steps != int(self.steps)):
            raise UserError(f"local steps={self.steps}: must be an integer of at least 1, or inf")
        self._check_streaming()

    def _check_streaming(self) -> None:
        if self.fragments < 1 or self.fragments != int(self.fragments):
            raise UserError(f"local fragments={self.fragments}: must be an integer of at least 1")
        if self.overlap < 0 or self.overlap != int(self.overlap):
            raise UserError(f"local overlap={self.overlap}: must be an integer of at least 0")
        if not 0 <= self.keep < 1:
            raise UserError(f"local keep={self.keep:g}: must be at least 0 and below 1; 0.5 is usual")
        if self.keep != 0.5 and not self.overlap:
            raise UserError(
                f"local keep={self.keep:g}: without overlap nothing is mixed; add overlap=1, or leave keep out"
            )
        if not self.streams:
            return
        what = f"fragments={self.fragments}" if self.fragments > 1 else f"overlap={self.overlap}"
        for other, why in {
            "gossip=yes": "both average the replicas" if self.gossip else "",
            f"outer={self.outer}": "both have a centre" if self._is_elastic else "",
            f"codec={self.codec}": "codecs are compared on a whole model"
            if auto_error(self.codec) is not None
            else "",
            "steps=inf": "fragments take turns within a number of steps" if self.steps == math.inf else "",
        }.items():
            if why:
                raise UserError(f"local {what} {other}: {why}; leave one out")
        if self.fragments > self.steps:
            raise UserError(
                f"local fragments={self.fragments} steps={self.steps:g}: no two are averaged after one step; give "
                "as many steps at least"
            )
        if self.overlap > self.plan.most_overlap:
            raise UserError(
                f"local overlap={self.overlap}: a fragment must be back before the next is sent; use at most "
                f"{self.plan.most_overlap}, more steps or fewer fragments"
            )

    @property
    def streams(self) -> bool:
        """Whether the model is averaged in fragments, or beside the next steps."""
        return self.fragments > 1 or self.overlap > 0

    @property
    def plan(self) -> FragmentPlan:
        """When each fragment is sent and merged, if it `streams`."""
        return FragmentPlan(steps=int(self.steps), fragments=self.fragments, overlap=self.overlap)

    @property
    def _is_elastic(self) -> bool:
        return self.outer.startswith("elastic")

    @property
    def keeps_apart(self) -> bool:
        """Whether replicas, and with them the optimizer states, differ after an average."""
        return self.streams or self._is_elastic

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        [worker] = super().needs(model, workers)
        if workers == 1:
            return [worker]
        if self.keeps_apart:
            what = "space to average replicas, and their center"
            momentum = model.weights if self.outer.startswith("nesterov") else 0
            return [replace(worker, besides=2 * model.weights + momentum, what=what)]
        besides, what = model.weights + model.state, "space to average replicas"
        if self.codec != RAW and not rounds_hops(self.codec):  # changes of parameters travel
            from manyhands.strategies.common.coded_times import coded_memory

            size = model.parameters
            coded = coded_memory(self.codec, size, size, workers, feedback=self.feedback)
            besides += size + sum(coded)
            what += ", the last average, and what the codec has left out"
        if self.outer != MEAN:
            besides, what = besides + 2 * model.weights, f"{what}, and the outer step's momentum"
        return [replace(worker, besides=besides, what=what)]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Parameters and optimizer state are averaged every few steps, after which computing continues."""
        from manyhands.strategies.common.coded_times import coded_all_reduce_s, has_known_time
        from manyhands.strategies.common.step_times import summed_in_memory_s

        if not has_known_time(self.codec) or self.gossip or self._is_elastic:
            return None
        state = 0 if self.streams else profile.model.state
        averaged = (profile.model.parameters + state) / self.fragments
        compute_s = profile.compute_s(machines.workers)
        if machines.hosts == 1 and not self.uses_network:
            mean_s = summed_in_memory_s(machines, averaged)
        else:
            way = "hierarchical" if machines.hosts > 1 and machines.per_host > 1 else "ring"
            mean_s = coded_all_reduce_s(self.codec, way, machines, averaged)
            mean_s = max(0.0, mean_s - self.overlap * compute_s)  # it travels beside the next steps
        return PredictedStep(
            compute_s=compute_s,
            exchange_s=self.fragments * mean_s / self.steps,
            # Of many steps between two averages, slow and fast ones cancel out.
            waiting_s=profile.waiting_s(machines.workers) / math.sqrt(self.steps),
            optimizer_s=profile.optimizer_s,
        )

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """An average every 8 steps; with `lossy`, every 32 as well."""
        del machines, survives
        return [cls(), *([cls(steps=32)] if lossy else [])]

    @property
    def facts(self) -> Facts:
        apart = "replicas diverge between averages; the same in every repetition"
        drifts = Promise(answer=Answer.NO, words=apart)
        in_step = TO_ROUNDING if self.codec == RAW else ROUNDED
        same = in_step if self.steps == 1 and self.outer == MEAN else drifts
        instead = ""  # a loop may leave a step out in which its partner waits for it
        if self.keeps_apart or self.gossip:
            what = (
                f"outer={self.outer}"
                if self._is_elastic
                else "gossip"
                if self.gossip
                else "fragments and overlap"
            )
            instead = f"give mh.fit a Task for {what}"
        return Facts(
            usual_costs=StepCosts(step_s=4e-4, byte_s=3e-10),
            promises=replace(IN_STEP, same_numbers=same),
            stepwise=self.steps == 1,
            uses_links=self.uses_network or self.gossip,  # memory is averaged in place
            kernels=() if rounds_hops(self.codec) else ("codecs",),
            when_evaluating="Under local, evaluations wait for the next average.",
            cannot_cross_hosts="",
            instead_of_own_loop=instead,
        )
