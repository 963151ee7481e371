"""The rows of public tables, read at run time from the reference that lies beside the checkout; none is kept here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = [
    "REFERENCE",
    "Fsdp",
    "Gpt",
    "Grid",
    "Served",
    "bert_nodes",
    "bloom",
    "fsdp",
    "gpipe",
    "korthikanti",
    "megatron_2020",
    "megatron_h100",
    "megatron_sc21",
    "nanotron",
    "series_of",
    "servers",
    "titan_schedules",
    "told_hours",
    "told_minutes",
]

REFERENCE = Path(__file__).resolve().parents[2] / "shared" / "reference" / "planner.md"

_NUMBER = r"\**[\d,]+(?:\.\d+)?\**"
_SERIES = rf"({_NUMBER}(?: \([^)]*\))?(?:/{_NUMBER})+)"


def number(text: str) -> float:
    return float(text.strip(" *").replace(",", ""))


def numbers(text: str) -> list[float]:
    """`1,234/5,678`; what stands in brackets is a remark."""
    return [number(one) for one in re.sub(r" \([^)]*\)", "", text).split("/")]


@cache
def section(name: str) -> str:
    """The text below a heading that begins so, up to the next heading."""
    text = REFERENCE.read_text()
    found = re.search(rf"^### {re.escape(name)} .*?\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(
            f"{REFERENCE} has no section {name}; the reader in {Path(__file__).name} must follow it"
        )
    return found[1]


def series_of(name: str, before: str) -> list[float]:
    """The numbers, separated by slashes, that follow a text in a section."""
    found = re.search(before + r"\s*" + _SERIES, section(name))
    if found is None:
        raise ValueError(f"section {name} of {REFERENCE} has no numbers after {before!r}")
    return numbers(found[1])


def bert_nodes() -> dict[int, tuple[float, float]]:
    """Sequences per second of both phases of BERT-large on DGX-2H, by nodes."""
    rows = re.findall(
        rf"^\| (\d+) \| [\d,]+ \| ({_NUMBER}) \(\d+\) \| ({_NUMBER}) \(", section("4.1"), re.MULTILINE
    )
    return {int(nodes): (number(one), number(two)) for nodes, one, two in rows}


def told_minutes() -> float:
    """How long BERT-large took on 92 nodes, as it was told."""
    found = re.search(r"^\| 92 \| 1,472 \|.*?(\d+) min", section("4.1"), re.MULTILINE)
    assert found is not None, "section 4.1 has the row of 92 nodes"
    return float(found[1])


def told_hours(nodes: int) -> float:
    """How long BERT-large took on fewer nodes, as it was told."""
    found = re.search(rf"^\| {nodes} \|.* ([\d.]+) \|$", section("4.1"), re.MULTILINE)
    assert found is not None, f"section 4.1 has the row of {nodes} nodes"
    return float(found[1])


@dataclass(frozen=True, slots=True)
class Gpt:
    """A GPT that somebody trained, and what was seen."""

    name: str
    hidden: int
    layers: int
    slices: int
    gpus: int
    batch: int
    seen: float  # TFLOP/s of each GPU, or seconds
    stages: int = 1
    sequence: int = 2048
    vocabulary: int = 51200
    micro: int = 1
    chunks: int = 1
    recompute: bool = True

    @property
    def replicas(self) -> int:
        return self.gpus // (self.slices * self.stages)


def megatron_2020() -> dict[str, list[Gpt]]:
    """Milliseconds of an iteration under tensor parallelism alone, by column."""
    pattern = (
        rf"^\| ([\d.]+ B) \| ({_NUMBER}), (\d+), (\d) \| ({_NUMBER}) · [\d.]+ \| ({_NUMBER}) · [\d.]+ "
        rf"\| ({_NUMBER}): ({_NUMBER}) ·"
    )
    found: dict[str, list[Gpt]] = {"V100": [], "A100": [], "A100, 128 replicas": []}
    for name, hidden, layers, t, v100, a100, gpus, many in re.findall(pattern, section("4.2"), re.MULTILINE):
        shape = (name, int(number(hidden)), int(layers), int(t))
        found["V100"].append(Gpt(*shape, int(t), 8, number(v100) / 1e3, sequence=1024, micro=8))
        found["A100"].append(Gpt(*shape, int(t), 16, number(a100) / 1e3, sequence=1024, micro=16))
        found["A100, 128 replicas"].append(
            Gpt(*shape, int(number(gpus)), 2048, number(many) / 1e3, sequence=1024, micro=16)
        )
    return found


def _paragraph(name: str, begin: str) -> str:
    text = section(name)
    return text[text.index(begin) :].partition("\n\n")[0]


def megatron_sc21() -> list[Gpt]:
    """TFLOP/s of each GPU, with everything computed twice counted twice."""
    rows = re.findall(
        r"([\d.,]+)(?: B)?: (\d+), (\d+), (\d+), (\d+), (\d+) → (\d+)", _paragraph("4.2", "*SC'21*")
    )
    found = []
    for name, hidden, layers, parts, gpus, batch, seen in rows:
        slices = min(8, int(parts))
        found.append(
            Gpt(
                f"{name} B", int(hidden), int(layers), slices, int(gpus), int(batch), float(seen),
                stages=int(parts) // slices,
            )
        )  # fmt: skip
    return found


def megatron_h100() -> list[Gpt]:
    rows = re.findall(
        r"([\d.]+)(?: B)?: \d+, (\d+), (\d+), (\d), (\d+), (\d+), (\d+) → (\d+(?:\.\d+)?)",
        _paragraph("4.2", "*H100, 2024*"),
    )
    return [
        Gpt(
            f"{name} B", int(hidden), int(layers), int(t), int(gpus), int(batch), float(seen), stages=int(p),
            sequence=4096, vocabulary=131072, recompute=False,
        )
        for name, hidden, layers, t, p, gpus, batch, seen in rows
    ]  # fmt: skip


# Of the paper (Korthikanti et al. 2022, table 3): hidden, layers.
_KORTHIKANTI = {"22 B": (6144, 48), "175 B": (12288, 96), "530 B": (20480, 105), "1 T": (25600, 128)}


def korthikanti() -> list[Gpt]:
    """Seconds of an iteration, with full recomputation and with sequence parallelism and selective recomputation."""
    pattern = r"^\| (\d+ [BT]) \| (\d+), (\d+), (\d+) \| (\d+), (\d+) \| ([\d.]+) \| ([\d.]+) \|"
    found = []
    for name, *rest in re.findall(pattern, section("4.2"), re.MULTILINE):
        t, p, v, batch, micro = map(int, rest[:5])
        for recompute, seen in ((True, rest[5]), (False, rest[6])):
            found.append(
                Gpt(
                    f"{name}, {'full' if recompute else 'selective'} recomputation", *_KORTHIKANTI[name], t, t * p,
                    batch, float(seen), stages=p, micro=micro, chunks=v, recompute=recompute,
                )
            )  # fmt: skip
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Fsdp:
    """Tokens per second of each GPU of a model under FSDP, by GPUs."""

    name: str
    parameters: int
    micro: int  # sequences of a GPU in a step
    seen: dict[int, float]


def fsdp() -> dict[str, list[Fsdp]]:
    """By table: MPT on H100 and on A100, Llama 8B of torchtitan."""
    text = section("4.3")
    large = [
        Fsdp(name, int(number(many)), int(micro), dict(zip((128, 256, 512), map(number, seen), strict=True)))
        for name, micro, many, *seen in re.findall(
            rf"(\w+) \((\d+); ({_NUMBER})\) ({_NUMBER})/({_NUMBER})/({_NUMBER})", text
        )
    ]
    of_name = {one.name: one for one in large}
    a100 = text[text.index("A100-40G") :].partition("\n")[0]
    small = [
        Fsdp(
            name, of_name[name].parameters if name in of_name else 125_311_488, 8,
            dict(zip((8, 16, 32, 64, 128), numbers(seen), strict=True)),
        )
        for name, seen in re.findall(rf"(\d+[bm]) {_SERIES}", a100)
    ]  # fmt: skip
    titan = text[text.index("**torchtitan**") :].partition("\n")[0]
    few, many = (
        [number(one) for one in re.findall(rf"(?:FSDP|\+compile|\+float8|·|:) ({_NUMBER}), [\d.]+", part)[:3]]
        for part in titan.partition("70B")[0].split("128 GPUs")
    )
    llama = [
        Fsdp(name, 8_030_261_248, 2, {8: at_few, 128: at_many})
        for name, at_few, at_many in zip(("bf16", "compiled", "float8"), few, many, strict=True)
    ]
    return {"MPT, H100": large, "MPT, A100": small, "torchtitan 8B, H100": llama}


def titan_schedules() -> tuple[float, float]:
    """Tokens per second of 405B with 1F1B and interleaved."""
    found = re.search(r"1F1B (\d+), [\d.]+; interleaved (\d+),", section("4.3"))
    assert found is not None, "section 4.3 has the two schedules of 405B"
    return float(found[1]), float(found[2])


@dataclass(frozen=True, slots=True)
class Grid:
    """One run of nanotron: replicas, slices, stages, samples of a micro-batch."""

    data: int
    slices: int
    stages: int
    micro: int
    seconds: float | None  # None: it ran out of memory
    gib: float | None
    starred: bool  # iterations that stall, for a reason that is not known

    @property
    def gpus(self) -> int:
        return self.data * self.slices * self.stages

    @property
    def name(self) -> str:
        return f"{self.data}-{self.slices}-{self.stages}-{self.micro}"


def nanotron() -> list[Grid]:
    cell = r"\| (?:\d+: )?(\d+)-(\d+)-(\d+)-(\d+) \| (OOM|[\d.]+)(\*?) \| (–|[\d.]+) (?=\|)"
    return [
        Grid(
            int(d), int(t), int(p), int(micro), None if seen == "OOM" else float(seen),
            None if gib == "–" else float(gib), bool(star),
        )
        for d, t, p, micro, seen, star, gib in re.findall(cell, section("4.4"))
    ]  # fmt: skip


def gpipe() -> dict[tuple[int, int], tuple[float, float]]:
    """AmoebaNet-D by stages and micro-batches: samples per second of torchgpipe, and GPipe's own relative numbers."""
    rows = re.findall(r"(\d),(\d+) ([\d.]+) \(([\d.]+)\)", section("4.5"))
    return {(int(n), int(m)): (float(ours), float(theirs)) for n, m, ours, theirs in rows}


def bloom() -> dict[tuple[int, int], float]:
    """TFLOP/s of each GPU of BLOOM-176B by global batch and micro-batch."""
    line = next(one for one in section("4.5").splitlines() if one.startswith("BLOOM"))
    rows = re.findall(r"(?:batch |; |: |^)?([\d,]+)( with micro 1)?: ([\d.]+)", line.partition("): ")[2])
    return {(int(number(batch)), 1 if micro else 2): float(seen) for batch, micro, seen in rows}


@dataclass(frozen=True, slots=True)
class Served:
    """Images per second of TensorFlow's parameter servers by GPUs, 8 on each host."""

    name: str
    batch: int  # of a GPU
    seen: dict[int, float]
    servers: int = 0


def servers() -> dict[str, list[Served]]:
    """On hosts with 8 K80, and within one DGX-1."""
    hosts, one_host = section("4.6").split("DGX-1 P100", 1)
    many, last = [], 0
    for name, batch, seen, more in re.findall(
        rf"([A-Z][\w-]+(?: v3)?) \((\d+)(?: a GPU)?\) {_SERIES}(?: \((\d+) servers)?", hosts
    ):
        last = int(more or last)
        many.append(
            Served(
                f"{name}, {batch}",
                int(batch),
                dict(zip((1, 8, 16, 32, 64), numbers(seen), strict=True)),
                last,
            )
        )
    synthetic = re.sub(r"\*?real data\*? [^·]*|real [\d,/]+", "", one_host)
    here = [
        Served(name, int(batch or 64), dict(zip((1, 2, 4, 8), numbers(seen), strict=True)))
        for name, batch, seen in re.findall(
            rf"([A-Z][A-Za-z]+[-\d]*) (?:\((\d+), NCCL\) )?{_SERIES}", synthetic
        )
    ]
    return {"EC2, 8 K80 a host": many, "DGX-1": here}
