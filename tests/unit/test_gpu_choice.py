"""Whether NCCL sums: a table of what workers tell and what follows; and what link=nccl refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from manyhands.errors import ManyhandsError, UserError
from manyhands.strategies.allreduce.gpu_sums import GpuSeat, choose_sums, seat_of, sums_sentence
from manyhands.strategies.allreduce.strategy import AllReduce, Mirrored
from manyhands.strategy import Strategy

SEATS = [GpuSeat(host="a", gpu="GPU-0", nccl="2.27.5"), GpuSeat(host="a", gpu="GPU-1", nccl="2.27.5")]
FAR = [SEATS[0], replace(SEATS[1], host="b")]
SHARED = [SEATS[0], replace(SEATS[1], gpu="GPU-0")]
SHARED_AFAR = [SEATS[0], replace(FAR[1], gpu="GPU-0")]
DISGUISED = [replace(seat, nccl_host=str(rank)) for rank, seat in enumerate(SHARED)]


@pytest.mark.parametrize(
    ("seats", "why"),
    [
        (SHARED, "workers 0 and 1 share one GPU"),
        (SHARED_AFAR, "workers 0 and 1 share one GPU"),  # two containers of one machine
        ([SEATS[0], replace(SEATS[1], gpu="")], "worker 1 computes on the CPU"),
        ([SEATS[0], replace(SEATS[1], nccl="")], "the torch of worker 1 has no NCCL"),
        (
            [SEATS[0], replace(SEATS[1], nccl="2.26.2")],
            "worker 0 has NCCL 2.27.5, but worker 1 has NCCL 2.26.2",
        ),
        (FAR, "workers are on 2 hosts, and NCCL does not encrypt"),
    ],
)
def test_what_is_in_the_way_is_said_and_link_nccl_is_refused_with_it(seats: list[GpuSeat], why: str) -> None:
    for strategy in (Mirrored(), AllReduce()):
        choice = choose_sums(strategy, seats, in_the_clear=False)
        assert not choice.nccl
        assert why in choice.why
        assert f"not by NCCL: {choice.why}" in sums_sentence(choice.summary()["sums"])
    with pytest.raises(UserError, match=f"^link=nccl: {why}.*; .*leave link=nccl out"):
        choose_sums(AllReduce(link="nccl"), seats, in_the_clear=False)


@pytest.mark.parametrize(("seats", "in_the_clear"), [(SEATS, False), (SEATS, True), (FAR, True)])
def test_nccl_sums_where_every_worker_has_a_gpu_and_nothing_leaves_that_should_not(
    seats: list[GpuSeat], in_the_clear: bool
) -> None:
    for strategy in (Mirrored(), AllReduce(), AllReduce(link="nccl")):
        choice = choose_sums(strategy, seats, in_the_clear=in_the_clear)
        assert choice.nccl
        assert choice.why == "each of 2 workers has its own GPU"
        assert choice.summary() == {"sums": {"by": "nccl", "why": choice.why}}
        assert sums_sentence(choice.summary()["sums"]).startswith(
            "gradients are summed on the GPUs by NCCL: each"
        )


def test_workers_that_nccl_takes_for_others_hosts_may_share_a_gpu_where_it_is_asked_for() -> None:
    assert choose_sums(AllReduce(link="nccl"), DISGUISED, in_the_clear=False).nccl
    assert not choose_sums(AllReduce(), DISGUISED, in_the_clear=False).nccl


@pytest.mark.parametrize(
    "setting",
    [
        "codec=bf16 link=tcp",
        "algorithm=ring",
        "elastic=yes",
        "helpers=1",
        "link=tcp",
    ],
)
def test_settings_that_ask_for_another_way_have_it(setting: str) -> None:
    strategy = Strategy.parse(f"allreduce {setting}")
    assert isinstance(strategy, AllReduce)
    choice = choose_sums(strategy, SEATS, in_the_clear=True)
    assert not choice.nccl
    assert choice.why.split(":")[0] in str(strategy)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("codec=bf16", "codec=bf16: NCCL sums uncompressed gradients"),
        ("algorithm=ring", "algorithm=ring: NCCL has its own algorithms"),
        ("elastic=yes", "elastic=yes: NCCL cannot continue"),
        ("helpers=1", "helpers=1: helpers sum in the memory"),
    ],
)
def test_link_nccl_and_another_way_are_refused_in_a_sentence(setting: str, why: str) -> None:
    with pytest.raises(UserError, match=f"^link=nccl {why}.*; leave one out$"):
        Strategy.parse(f"allreduce link=nccl {setting}")


def test_link_nccl_is_text_that_reads_back_and_is_for_gpus_and_for_fit() -> None:
    strategy = Strategy.parse("allreduce link=nccl")
    assert str(strategy) == "allreduce link=nccl"
    assert "link=nccl" in strategy.facts.instead_of_own_loop
    strategy.check(2, "cuda")
    with pytest.raises(UserError, match="link=nccl device=cpu: NCCL sums on GPUs; use device=cuda"):
        strategy.check(2, "cpu")
    with pytest.raises(UserError, match="unknown link 'nccl'"):
        Strategy.parse("local link=nccl")
    assert str(strategy.across_hosts([[0, 1], [2, 3]])) == "allreduce algorithm=hierarchical group=2"


def test_what_workers_tell_is_text_and_anything_else_is_refused() -> None:
    here = seat_of(torch.device("cpu"))
    assert here.host
    assert not here.gpu
    for seat in (*DISGUISED, here):
        assert GpuSeat.from_text(seat.to_text()) == seat
    for text in ("", "[]", '["a", "b", "c", 4]', '{"host": 1}', "7"):
        with pytest.raises(ManyhandsError, match="instead of a worker's GPU"):
            GpuSeat.from_text(text)
