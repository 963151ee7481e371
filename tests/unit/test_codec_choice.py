"""`codec=auto`: when a codec pays, beside the sums done by hand; and that all workers choose alike, over links."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch

from manyhands.engine.exchange import LocalStep
from manyhands.errors import UserError
from manyhands.observe.analyse.remarks import codec_words
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule_collective import (
    CodecChooser,
    ScheduleCollective,
    carrier,
)
from manyhands.strategies.local.local_exchange import LocalExchange
from manyhands.strategy import Strategy
from manyhands.transport.link.simulated_network import SimulatedNetwork
from manyhands.transport.link.wire import codec_of
from manyhands.wire.choice import LOSSY, CodecCost, LinkCost, candidates, codec_sentence, decide, looks_at
from manyhands.wire.codec import as_memory, as_one
from manyhands.wire.names import auto_error, momentum_of, rounds_hops
from manyhands.wire.parcels import Parcel

MB = 1_000_000
INT8 = CodecCost(codec="int8", encode_s=0.001, decode_s=0.001, share=0.25, error=0.008)
BF16 = CodecCost(codec="bf16", encode_s=0.0005, decode_s=0.0005, share=0.5, error=0.002)
TOPK = CodecCost(codec="topk:0.01", encode_s=0.002, decode_s=0.0002, share=0.0127, error=0.9)


def link(bits_per_s: float) -> LinkCost:
    return LinkCost(latency_s=0.0002, seconds_per_byte=8 / bits_per_s)


def chosen(costs: list[CodecCost], bits_per_s: float, error: float, now: str = "raw") -> str:
    decision = decide(
        costs, link(bits_per_s), sample_bytes=MB, num_bytes=2 * MB, world=2, error=error, now=now
    )
    assert decision.why.startswith(f"{decision.codec}: ")
    return decision.codec


# Of 2 workers each sends 2 MB: 160 ms at 100 Mbit/s, 16 ms at 1 Gbit/s, 1.6 ms at 10 Gbit/s. Encoding and decoding 2 MB
# takes int8, which is gathered, 2 · (1 + 2 · 1) = 6 ms and saves 3/4; bf16 takes 3.5 ms and saves half.
@pytest.mark.parametrize(
    ("bits_per_s", "error", "codec"),
    [
        (1e8, 0.0, "raw"),  # no error is allowed
        (1e8, 0.005, "bf16"),  # 80 + 3.5 ms
        (1e8, 0.01, "int8"),  # 40 + 6
        (1e8, 1.0, "topk:0.01"),  # 2 · 2 + 4 · 0.2 = 4.8 ms of work, and next to nothing on the wire
        (1e9, 0.005, "bf16"),  # 8 + 3.5 against 16
        (1e9, 0.01, "int8"),  # 4 + 6 against 16
        (1e10, 0.01, "raw"),  # 1.6 ms, less than either takes to encode
        (1e10, 1.0, "raw"),
    ],
)
def test_a_codec_is_chosen_where_it_saves_more_than_it_takes(
    bits_per_s: float, error: float, codec: str
) -> None:
    assert chosen([INT8, BF16, TOPK], bits_per_s, error) == codec


def test_break_even_is_where_the_saving_equals_the_work() -> None:
    saved_bytes, work_s = 2 * MB * 0.75, 0.006
    even = 8 * saved_bytes / work_s
    assert chosen([INT8], even / 1.2, 0.01) == "int8"
    assert chosen([INT8], even * 1.05, 0.01) == "raw"


def test_the_reason_has_the_numbers_of_both_sides() -> None:
    decision = decide([INT8], link(1e8), sample_bytes=MB, num_bytes=2 * MB, world=2, error=0.01, step=3)
    assert decision.step == 3
    assert decision.why == (
        "int8: an exchange of 2 MB takes 160 ms uncompressed at 12.5 MB/s; in int8 it takes 40.2 ms on the wire and "
        "6 ms to encode and decode"
    )
    refused = decide([TOPK], link(1e8), sample_bytes=MB, num_bytes=MB, world=2, error=0.01).why
    assert refused.endswith("no codec meets the allowed error")


def test_noise_does_not_change_a_choice_back_and_forth() -> None:
    near = CodecCost(codec="fp8", encode_s=0.0008, decode_s=0.0008, share=0.25, error=0.008)
    assert chosen([INT8, near], 1e8, 0.01) == "fp8"
    assert chosen([INT8, near], 1e8, 0.01, now="int8") == "int8"
    assert chosen([BF16, near], 1e8, 0.01, now="bf16") == "fp8", "clearly better"
    assert chosen([INT8], 1e10, 0.01, now="int8") == "raw", "it has begun to cost"
    assert chosen([INT8], 1e8, 0.001, now="int8") == "raw", "its error is no longer allowed"


def test_an_error_that_is_not_finite_is_not_allowed() -> None:
    broken = CodecCost(codec="int8", encode_s=0.0, decode_s=0.0, share=0.1, error=math.nan)
    assert chosen([broken], 1e8, 1.0) == "raw"


def test_double_precision_may_travel_as_single_where_no_error_is_allowed() -> None:
    assert candidates(0.0, double=True) == ("fp32",)
    assert candidates(0.0, double=False) == ()
    assert candidates(0.01, double=False) == LOSSY
    half = CodecCost(codec="fp32", encode_s=0.0, decode_s=0.0, share=0.5, error=1e-8)
    assert chosen([half], 1e8, 0.0) == "fp32"


def looks(steps: Iterable[int]) -> list[int]:
    """Of the steps that end with an exchange, those with a look."""
    found: list[int] = []
    for step in steps:
        if looks_at(step, found[-1] if found else -1):
            found.append(step)
    return found


def test_workers_look_again_at_the_same_steps() -> None:
    assert looks(range(500)) == [3, 200, 400]
    assert looks(range(7, 700, 8)) == [7, 207, 407, 607], "averages of every eight steps"
    assert looks(range(49, 500, 50)) == [49, 249, 449]
    assert looks([0, 1, 2]) == []


@pytest.mark.parametrize(
    ("text", "error"), [("auto", 0.0), ("auto:0.01", 0.01), ("auto:1", 1.0), ("int8", None), ("raw", None)]
)
def test_the_setting_says_how_large_an_error_may_be(text: str, error: float | None) -> None:
    assert auto_error(text) == error
    if error is not None:
        strategy = Strategy.parse(f"allreduce link=tcp codec={text}")
        assert str(strategy) == f"allreduce link=tcp codec={text}"
        assert strategy.facts.kernels == ("codecs",)
        assert not rounds_hops(text)
        assert momentum_of(text) == 0.0


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allreduce link=tcp codec=auto:lossy", ["auto:lossy", "auto:0.01"]),
        ("allreduce link=tcp codec=auto:2", ["auto:2", "at most 1"]),
        ("allreduce link=tcp codec=auto:0", ["auto:0", "above 0"]),
        ("allreduce link=tcp codec=auto+int8", ["auto+int8"]),
        ("allreduce link=tcp algorithm=ring codec=auto", ["algorithm=ring"]),
        ("allreduce link=tcp elastic=yes codec=auto", ["elastic=yes"]),
        ("allreduce link=tcp codec=auto feedback=no", ["feedback=no"]),
        ("ps link=tcp codec=auto", ["ps", "auto", "allreduce"]),
        ("local link=tcp codec=auto feedback=no", ["feedback=no"]),
        ("local link=tcp outer=elastic codec=auto", ["outer=elastic", "leave one out"]),
    ],
)
def test_what_makes_no_sense_is_one_sentence(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Strategy.parse(text)
    assert all(part in str(caught.value) for part in parts), caught.value


# ── at work, over links in virtual time ───────────────────────────────────────────────────────────────────────────────

WORLD, ITEMS = 3, 6000
PARCELS = (
    Parcel.whole(0, ITEMS, torch.float32),
    Parcel.whole(1, ITEMS // 2, torch.float32),
    Parcel.whole(2, 4, torch.float64, exact=True),
)


def given(rank: int, step: int, parcel: Parcel) -> torch.Tensor:
    """Integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + parcel.number)
    return torch.randint(-50, 51, (parcel.count,), generator=generator).to(parcel.dtype)


def exchanged(
    setting: str,
    steps: range,
    memories: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
    *,
    bandwidth: float = math.inf,
) -> list[tuple[list[list[torch.Tensor]], CodecChooser, dict[str, torch.Tensor]]]:
    """By rank: the sums of each step, the chooser, and what is kept at the end."""
    network = SimulatedNetwork(latency_s=1e-4, bandwidth_bytes_per_s=bandwidth)

    def work(rank: int):
        links = {peer: network.link(f"{rank}", f"{peer}") for peer in range(WORLD) if peer != rank}
        executor = ScheduleExecutor(ALGORITHMS["direct"], rank, WORLD, links, 60.0)
        make = partial(carrier, feedback=True, seed=7, rank=rank, world=WORLD)
        chooser = CodecChooser(setting, executor, make, lambda: network.clock_s(f"{rank}"))
        collective = ScheduleCollective(executor, links, codec=setting, chooser=chooser)
        buckets = collective.allocate(PARCELS)
        collective.remember((memories or {}).get(rank, {}))
        sums = []
        for step in steps:
            collective.step = step
            for index, (bucket, parcel) in enumerate(zip(buckets, PARCELS, strict=True)):
                bucket.copy_(given(rank, step, parcel))
                collective.launch(index)
            collective.finish()
            sums.append([bucket.clone() for bucket in buckets])
        kept = {name: one.clone() for name, one in collective.memory().items()}
        return sums, chooser, kept

    found = network.run({f"{rank}": partial(work, rank) for rank in range(WORLD)})
    return [found[f"{rank}"] for rank in range(WORLD)]


@pytest.mark.parametrize(
    ("setting", "bandwidth", "codec"),
    [
        ("auto:0.02", 1e5, "int8"),
        ("auto:1", 1e5, "topk:0.01"),
        ("auto:0.02", math.inf, "raw"),
        ("auto", 1e5, "raw"),
    ],
)
def test_all_workers_choose_alike_by_the_link_they_have(setting: str, bandwidth: float, codec: str) -> None:
    workers = exchanged(setting, range(6), bandwidth=bandwidth)
    first, chooser, _ = workers[0]
    assert [(one.step, one.codec) for one in chooser.decisions] == [(3, codec)]
    assert chooser.codec == codec
    for sums, other, _ in workers[1:]:
        assert other.decisions == chooser.decisions, "the same numbers on all"
        assert all(
            torch.equal(a, b)
            for one, two in zip(sums, first, strict=True)
            for a, b in zip(one, two, strict=True)
        )
    for step in range(6):
        for parcel, total in zip(PARCELS, first[step], strict=True):
            exact = sum(given(rank, step, parcel) for rank in range(WORLD))
            assert torch.equal(total, exact) or (codec != "raw" and step >= 3 and not parcel.exact)


def test_what_was_owed_is_sent_when_the_codec_changes() -> None:
    """In use is `topk`, whose error the setting no longer allows: from step 3 on the sums are all that was given."""
    before = {rank: {"in use:topk:0.01": torch.tensor([0])} for rank in range(WORLD)}
    for sums, chooser, kept in exchanged("auto:0.02", range(5), before):
        assert [(one.step, one.codec) for one in chooser.decisions] == [(0, "topk:0.01"), (3, "raw")]
        assert list(kept) == ["in use:raw"]
        for index, parcel in enumerate(PARCELS):
            got = sum(step[index] for step in sums)
            assert torch.equal(
                got, sum(given(rank, step, parcel) for rank in range(WORLD) for step in range(5))
            )
        assert not torch.equal(sums[0][0], sum(given(rank, 0, PARCELS[0]) for rank in range(WORLD)))


def test_a_resumed_run_goes_on_with_the_codec_and_what_it_owes() -> None:
    whole = exchanged("auto:1", range(8), bandwidth=1e5)
    begun = exchanged("auto:1", range(5), bandwidth=1e5)
    memories = {rank: as_memory(as_one(kept)) for rank, (_, _, kept) in enumerate(begun)}
    assert "in use:topk:0.01" in memories[0]
    resumed = exchanged("auto:1", range(5, 8), memories, bandwidth=1e5)
    for (sums, _, kept), (later, _, same) in zip(whole, resumed, strict=True):
        for one, two in zip(sums[5:], later, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
        assert all(torch.equal(kept[name], same[name]) for name in kept)


def test_the_sentence_at_the_end_has_the_last_choice() -> None:
    assert "share memory" in codec_sentence(None)
    assert "too short" in codec_sentence([])
    rows = [{"step": 3, "codec": "raw", "why": "raw: a"}, {"step": 200, "codec": "int8", "why": "int8: b"}]
    assert codec_sentence(rows[:1]) == "codec=auto chose raw: a (at step 4)"
    assert (
        codec_sentence(rows)
        == "codec=auto chose int8: b (at step 201, the last of 2 measurements, with 1 change)"
    )
    assert codec_words({"codec_choices": rows}) == [f"{codec_sentence(rows)}."]
    assert codec_words({"codec_choices": None}) == [f"{codec_sentence(None)}."]
    assert codec_words({}) == []
    assert codec_words({"codec_choices": [3, {"step": "x"}]}) == [f"{codec_sentence([])}."]


def averaged(setting: str, bandwidth: float) -> list[tuple[list[torch.Tensor], dict[str, Any]]]:
    """By rank: the parameters after each of three averages of two steps, and what was told of codecs."""
    network = SimulatedNetwork(latency_s=1e-4, bandwidth_bytes_per_s=bandwidth)

    def work(rank: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
        links = {peer: network.link(f"{rank}", f"{peer}") for peer in range(WORLD) if peer != rank}
        executor = ScheduleExecutor(ALGORITHMS["ring"], rank, WORLD, links, 60.0)
        make = partial(carrier, feedback=True, seed=7, rank=rank, world=WORLD)
        chooser = (
            CodecChooser(setting, executor, make, lambda: network.clock_s(f"{rank}"))
            if setting != "raw"
            else None
        )
        exchange = LocalExchange(ScheduleCollective(executor, links, codec=setting, chooser=chooser), 2)
        model = torch.nn.Linear(100, 60)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        exchange.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for step in range(6):
            x = torch.randn(100, generator=torch.Generator().manual_seed(10 * step + rank))
            exchange.backward(model(x).sin().sum(), 1 / WORLD)
            exchange.agree(LocalStep(loss=0.0, share=1 / WORLD, step=step))
            exchange.apply()
            if exchange.average is not None and exchange.average(False):
                found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
        report = {**exchange.summary(), "codec": codec_of(exchange.wire >> 8)}
        exchange.close()
        return found, report

    found = network.run({f"{rank}": partial(work, rank) for rank in range(WORLD)})
    return [found[f"{rank}"] for rank in range(WORLD)]


@pytest.mark.parametrize(("bandwidth", "codec"), [(1e5, "int8"), (math.inf, "raw")])
def test_local_weighs_codecs_by_the_changes_that_it_averages(bandwidth: float, codec: str) -> None:
    plain, _ = averaged("raw", bandwidth)[0]
    workers = averaged("auto:0.02", bandwidth)
    for found, report in workers:
        assert [(one["step"], one["codec"]) for one in report["codec_choices"]] == [(3, codec)]
        assert report["codec"] == codec, "events say what travelled"
        assert all(torch.equal(one, same) for one, same in zip(found, workers[0][0], strict=True))
    first, *later = workers[0][0]
    torch.testing.assert_close(first, plain[0], rtol=0, atol=1e-6)
    change = float((plain[2] - plain[0]).norm())
    for one, exact in zip(later, plain[1:], strict=True):
        error = float((one - exact).norm()) / change
        assert error < (0.02 if codec == "int8" else 1e-5)
        assert (error > 1e-4) == (codec == "int8"), "what was chosen is what was sent"
