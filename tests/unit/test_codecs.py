"""Codecs: every one of them keeps the contract of parcels, and schedules that encode agree to the bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from manyhands.errors import UserError
from manyhands.facts import Answer
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.transport.link.simulated_network import SimulatedNetwork
from manyhands.transport.link.wire import Wire, codec_of, wire_of
from manyhands.wire.codec import codec_named, encodes, round_trip
from manyhands.wire.names import CODECS, RAW
from manyhands.wire.parcels import Parcel

ROOT = Path(__file__).parents[2]
ROUNDED = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
HALVES = ("bf16", "fp16")
WIDE = (torch.float32, torch.float64)


def rounded(values: torch.Tensor, word: str) -> torch.Tensor:
    """What torch says a number becomes."""
    return values.to(ROUNDED[word]).to(values.dtype)


def random_values(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-6, 4, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * scales).to(dtype)


# ── the contract of a codec ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("word", ROUNDED)
def test_a_round_trip_tells_the_sender_what_receivers_read(word: str, dtype: torch.dtype) -> None:
    codec = codec_named(word)
    assert codec is not None
    for count in (0, 1, 7, 1000):
        parcel = Parcel.whole(3, count, dtype)
        values = random_values(count, dtype)
        expected = rounded(values, word)
        room = torch.zeros(codec.size(parcel), dtype=torch.uint8)
        encoded = round_trip(codec, parcel, values, room)
        assert encoded.nbytes <= codec.size(parcel)
        read = torch.full_like(values, torch.nan)
        codec.decode(parcel, encoded, read)
        assert torch.equal(read, values)
        assert torch.equal(read, expected)


@pytest.mark.parametrize("word", ROUNDED)
def test_what_is_encoded_again_has_the_same_bytes(word: str) -> None:
    codec, parcel, values = codec_named(word), Parcel.whole(0, 500, torch.float32), random_values(500)
    assert codec is not None
    rooms = [torch.zeros(codec.size(parcel), dtype=torch.uint8) for _ in range(2)]
    once, again = (round_trip(codec, parcel, values, room) for room in rooms)
    assert torch.equal(once, again)


def test_what_is_not_finite_stays_so_and_fp16_overflows() -> None:
    for word in ROUNDED:
        codec, parcel = codec_named(word), Parcel.whole(0, 4, torch.float32)
        assert codec is not None
        values = torch.tensor([torch.inf, -torch.inf, torch.nan, 70_000.0])
        round_trip(codec, parcel, values, torch.zeros(16, dtype=torch.uint8))
        assert values[0] == torch.inf
        assert values[1] == -torch.inf
        assert values[2].isnan()
        assert bool(values[3].isinf()) == (word == "fp16")


def test_only_what_gets_smaller_and_may_be_rounded_is_encoded() -> None:
    codec = codec_named("bf16")
    assert encodes(codec, Parcel.whole(0, 10, torch.float32))
    assert not encodes(codec, Parcel.whole(0, 10, torch.float32, exact=True))
    assert not encodes(codec, Parcel.whole(0, 10, torch.bfloat16))
    assert not encodes(codec, Parcel.whole(0, 0, torch.float32))
    assert not encodes(codec_named(RAW), Parcel.whole(0, 10, torch.float32))


def test_a_part_of_a_parcel_has_its_bytes() -> None:
    whole = Parcel.whole(2, 100, torch.float64)
    part = whole.part(10, 30)
    assert (part.begin, part.end, part.count, part.number) == (80, 240, 20, 2)
    assert (part.part(5, 6).begin, part.part(5, 6).num_bytes) == (120, 8)


def test_events_keep_a_codec_beside_its_wire() -> None:
    for word in (RAW, *CODECS, "topk+int8", "dgc+qsgd"):
        both = wire_of(Wire.TCP, word)
        assert (both & 0xFF, codec_of(both >> 8)) == (Wire.TCP, word)
    assert codec_of(wire_of(Wire.TCP, "topk:0.01,sampled+qsgd:3") >> 8) == "topk+qsgd"
    assert wire_of(Wire.TCP, "bf16") >> 8 == 1  # as it was written before there were chains
    for number in (31, 1 << 5, 9 | 31 << 5, 1 << 15 | 9):
        with pytest.raises(ValueError, match=f"{number} is not a codec"):
            codec_of(number)


# ── schedules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def all_reduce(
    algorithm: Algorithm, parts: list[torch.Tensor], word: str
) -> tuple[list[torch.Tensor], list[int]]:
    """Every rank's result, and the bytes that it sent."""
    world = len(parts)
    network = SimulatedNetwork()
    buffers = [part.clone() for part in parts]

    def role(rank: int) -> Callable[[], int]:
        links = {peer: network.link(str(rank), str(peer)) for peer in range(world) if peer != rank}
        executor = ScheduleExecutor(algorithm, rank, world, links, 60.0, codec=codec_named(word))
        parcel = Parcel.whole(0, len(parts[0]), parts[0].dtype)

        def work() -> int:
            executor.all_reduce(buffers[rank], parcel=parcel)
            return executor.mailbox.bytes_sent

        return work

    sent = network.run({str(rank): role(rank) for rank in range(world)})
    return buffers, [sent[str(rank)] for rank in range(world)]


@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_ends_with_the_same_bytes_and_sends_half_of_them(name: str, word: str) -> None:
    for world in (2, 3, 5, 8):
        algorithm = grouped(3) if name == "hierarchical" else ALGORITHMS[name]
        parts = [random_values(50, seed=rank) for rank in range(world)]
        results, sent = all_reduce(algorithm, parts, word)
        assert all(torch.equal(result, results[0]) for result in results), world
        assert torch.equal(results[0], rounded(results[0], word)), world
        exact, plain = all_reduce(algorithm, parts, RAW)
        assert [2 * num_bytes for num_bytes in sent] == plain
        size = torch.stack(parts).abs().sum(0)
        bound = {"bf16": 2.0**-8, "fp16": 2.0**-11}[word] * (world + 1) * size + 1e-6
        assert bool(((results[0] - exact[0]).abs() <= bound).all()), world


@pytest.mark.parametrize("dtype", WIDE, ids=str)
@pytest.mark.parametrize("word", HALVES)
@pytest.mark.parametrize("world", [2, 4, 7])
def test_a_ring_is_what_one_process_gets_that_rounds_at_every_hop(
    world: int, word: str, dtype: torch.dtype
) -> None:
    parts = [random_values(world * 6, dtype, seed=rank) for rank in range(world)]
    results, _ = all_reduce(ALGORITHMS["ring"], parts, word)
    for chunk in range(world):
        span = slice(6 * chunk, 6 * chunk + 6)
        total = parts[chunk][span]
        for hop in range(1, world):  # from the rank that it is named for to that rank's left neighbour
            total = rounded(total, word) + parts[(chunk + hop) % world][span]
        assert torch.equal(results[0][span], rounded(total, word)), chunk


@pytest.mark.parametrize("word", HALVES)
def test_all_to_all_and_master_worker_are_what_one_process_gets(word: str) -> None:
    parts = [random_values(40, seed=rank) for rank in range(3)]
    received = [rounded(part, word) for part in parts]
    results, _ = all_reduce(ALGORITHMS["all-to-all"], parts, word)
    assert torch.equal(results[0], rounded(received[0] + received[1] + received[2], word))
    results, _ = all_reduce(ALGORITHMS["master-worker"], parts, word)
    assert torch.equal(results[0], rounded(parts[0] + received[1] + received[2], word))


# ── settings ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WITH_CODEC = [
    "allreduce algorithm=ring link=tcp codec=bf16",
    "local link=tcp codec=fp16",
    "ps link=tcp codec=bf16",
    "allreduce algorithm=tree link=tcp codec=fp32",
    "allreduce link=tcp codec=topk:0.01+int8",
    "allreduce link=tcp codec=topk:0.01,sampled feedback=no",
    "allreduce link=tcp codec=dgc:0.001,momentum=0.9,clip=1,warmup=64+qsgd:15",
    "allreduce link=tcp codec=powersgd:2",
    "local link=tcp codec=fp8:e5m2",
    "ps link=tcp codec=sign:vote",
    "ps link=tcp codec=ternary",
]


@pytest.mark.parametrize("text", WITH_CODEC)
def test_a_codec_is_a_setting(text: str) -> None:
    strategy = Strategy.parse(text)
    assert str(strategy) == text
    assert strategy.uses_network
    plain = text[: text.index(" codec")]
    assert str(Strategy.parse(f"{plain} codec={RAW}")) == plain


def test_a_codec_is_no_longer_the_numbers_of_the_plain_loop() -> None:
    for text in (
        "allreduce link=tcp codec=bf16",
        "local steps=1 link=tcp codec=bf16",
        "ps link=tcp codec=bf16",
    ):
        assert Strategy.parse(text).facts.promises.same_numbers.answer is Answer.PARTLY
        assert Strategy.parse(text[: text.index(" codec")]).facts.promises.same_numbers.answer is Answer.YES


@pytest.mark.parametrize(
    "text",
    [
        *(name for name in STRATEGIES if name != "federated"),  # whose updates are coded, simulated or not
        "allreduce algorithm=ring",
        "local steps=2",
        "ps servers=2",
    ],
)
def test_a_codec_is_refused_with_the_reason_where_there_is_none(text: str) -> None:
    """Nothing travels there; or layers and what passes between them do, as they are."""
    reason = "uncompressed" if text in ("sharded", "pipeline") else "sends? nothing"
    with pytest.raises(UserError, match=rf"codec=bf16: .*{reason}"):
        Strategy.parse(f"{text} codec=bf16")


def test_a_codec_that_there_is_not_is_named() -> None:
    with pytest.raises(UserError, match=r"unknown codec 'bf61'.*did you mean 'bf16'"):
        Strategy.parse("allreduce link=tcp codec=bf61")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("codec=topk:0", "fraction '0' must be a fraction above 0 and at most 1"),
        ("codec=topk:nan", "must be a fraction above 0"),
        ("codec=topk:", "a value must follow, as in topk:0.01"),
        ("codec=int8:4", "write int8 alone"),
        ("codec=qsgd:128", "levels '128' must be an integer between 1 and 127"),
        ("codec=qsgd:1,levels=2", "levels is given twice"),
        ("codec=dgc:0.001,momentun=0.9", "did you mean 'momentum'"),
        ("codec=dgc:0.001,momentum=1", "momentum '1' must be a number of at least 0 and below 1"),
        ("codec=fp8:e4m4", "did you mean 'e4m3'"),
        ("codec=int8+topk:0.1", "only a codec that sends few items can come first: topk, randomk, dgc"),
        ("codec=topk:0.1+randomk", "randomk cannot come second"),
        ("codec=topk:0.1+int8+fp16", "a chain has two codecs"),
        ("codec=topk:0.1+sign:vote", "a vote needs all items"),
        ("codec=topk:0.1+raw", "raw cannot be combined"),
        ("codec=topk:0.1 algorithm=ring", "at every hop of algorithm=ring"),
        ("codec=bf16 feedback=no", "has no feedback to disable"),
        ("codec=qsgd:7 feedback=no", "has no feedback to disable"),
        ("codec=dgc:0.001 feedback=no", "cannot work without feedback; write topk"),
        ("codec=topk:0.1 elastic=yes", "a repeated step would send its residuals twice"),
        ("codec=topk:0.1 feedback=maybe", "unknown value 'maybe'"),
    ],
)
def test_a_setting_that_makes_no_sense_gets_a_sentence(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        Strategy.parse(f"allreduce link=tcp {text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ps link=tcp codec=powersgd:2", "factors are summed over workers"),
        ("local link=tcp codec=powersgd:2", "use allreduce link=tcp"),
        ("local link=tcp codec=dgc:0.01", "it keeps the momentum of gradients"),
        ("local link=tcp codec=sign:vote", "a vote has no step size"),
    ],
)
def test_a_strategy_that_a_codec_makes_no_sense_with_says_why(text: str, said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        Strategy.parse(text)


def test_a_codec_is_a_file_a_line_and_a_row(tmp_path: Path) -> None:
    """The recipe of docs/internals/extending.md, word by word, in a copy of the sources; nothing else is touched."""
    recipe = (ROOT / "docs" / "internals" / "extending.md").read_text().partition("## A codec\n")[2]
    file = recipe.partition("```python\n")[2].partition("```")[0]
    _, line, row = (part.partition("```")[0] for part in recipe.split("```text\n")[:3])
    for folder in ("src", "tests"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "src/manyhands/wire/codecs/coarse.py").write_text(file)
    for path, added in (
        (tmp_path / "src/manyhands/wire/names.py", ('    "fp8": CodecEntry(', line)),
        (tmp_path / "tests/unit/test_codecs.py", ('    "bf16": torch.bfloat16,', row)),
    ):
        before, found, after = path.read_text().partition(added[0])
        path.write_text(f"{before}{added[1]}{found}{after}")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    asked = (
        "import manyhands as mh, manyhands.wire.names as names\n"
        "from manyhands.transport.link.wire import Wire, codec_of, wire_of\n"
        "strategy = mh.Strategy.parse('allreduce link=tcp codec=coarse')\n"
        "number = wire_of(Wire.TCP, 'topk+coarse') >> 8\n"
        "print(names.__file__.startswith('{}'), strategy, codec_of(number))"
    )
    report = subprocess.run(
        [sys.executable, "-c", asked.format(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert report.stdout == "True allreduce link=tcp codec=coarse topk+coarse\n", report.stderr
    rows = [sys.executable, "-m", "pytest", "tests/unit/test_codecs.py", "-n0", "-q", "-k", "coarse"]
    tested = subprocess.run(rows, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
