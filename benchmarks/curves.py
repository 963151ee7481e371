"""Loss over tokens on text: GPT-2 124M and BERT by `mh.fit`, beside a plain loop over the same batches.

    python benchmarks/curves.py --data FOLDER --only gpt --minutes 2 --json benchmarks/results/curves-gpt.json
    python benchmarks/curves.py --data FOLDER --only bert --minutes 1.5 --json benchmarks/results/curves-bert.json
    python benchmarks/curves.py --data FOLDER --tiny --device cpu

FOLDER has wiki-50mb.txt.gz and tinyshakespeare_by_role.jsonl.gz of shared/data. Each model learns the 50 MB of
Wikipedia; the end of the text is held out. Both loops begin with the same weights and take the same batches with the
same optimizer, warm-up and decay, in bfloat16 and compiled on a GPU; the plain one is written by hand (`plain` below).
`--minutes` are those of one loop at the rate that `--rates` expects. Then the BERT goes on with lines of Shakespeare,
and learns who speaks a line, as `tuning.py` has it: beside logistic regression on the same lines. Where the package
`tokenizers` is missing, the models read bytes, and the BERT is not tuned.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
from language_work import CLIP, SEED, adamw
from manyhands.data.randomness import seed_all
from manyhands.data.reading import batch_shares
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.device import BatchCopies
from manyhands.task import Task
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.tasks import build
from manyhands.workloads.text.documents import Documents
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize
from results_read import load

TEXT, ROLES = "wiki-50mb.txt.gz", "tinyshakespeare_by_role.jsonl.gz"
POINTS = 12  # of a curve
HELD_OUT = 1 << 18  # tokens
WORDS = 2048  # of a document: the text is one line


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is trained."""

    name: str
    sizes: dict[str, Any]
    length: int
    batch: int
    microbatches: int
    rate: float  # tokens per second that are expected
    peak: float  # of the learning rate
    tokenizer: str
    vocabulary: int

    def steps(self, minutes: float) -> int:
        return max(2 * POINTS, int(minutes * 60 * self.rate / (self.batch * self.length)))


PLANS = {
    "gpt": Plan(
        name="gpt", sizes={"preset": "gpt2", "context": 1024}, length=1024, batch=96, microbatches=2, rate=450e3,
        peak=6e-4, tokenizer="bpe", vocabulary=16384,
    ),
    "bert": Plan(
        name="bert", sizes={"preset": "bert-base", "context": 128}, length=128, batch=512, microbatches=1, rate=600e3,
        peak=3e-4, tokenizer="wordpiece", vocabulary=16384,
    ),
}  # fmt: skip
TINY = {
    "sizes": {"preset": "tiny", "context": 32},
    "length": 32,
    "batch": 8,
    "rate": 1.0,
    "peak": 1e-3,
    "vocabulary": 1024,
}


def text_of(folder: Path, letters: int | None) -> list[str]:
    """The text in documents of a few thousand words."""
    with gzip.open(folder / TEXT, "rt") as file:
        words = file.read(letters).split()
    return [" ".join(words[begin : begin + WORDS]) for begin in range(0, len(words), WORDS)]


def tokens_of(texts: list[str], choice: TokenizerChoice, folder: Path, name: str) -> Path:
    source, out = folder / f"{name}.jsonl", folder / name
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenize(Documents(paths=[source]), choice, out, workers=2)
    return out


def scheduled(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up over a twentieth of the steps, then a cosine to a tenth."""
    warm = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def task_of(plan: Plan, steps: int, **source: Any) -> Task:
    held_out = min(HELD_OUT, 64 * plan.length) if plan.rate == 1 else HELD_OUT
    task = build(plan.name, **plan.sizes, batch_size=plan.batch, evaluation_bytes=held_out, **source)
    return replace(
        task,
        optimizer=partial(adamw, lr=plan.peak),
        scheduler=partial(scheduled, steps=steps),
        microbatches=plan.microbatches,
        clip_norm=CLIP,
        metrics={},  # each would be another forward over what is held out
    )


def every(steps: int) -> int:
    return max(1, steps // POINTS)


def ours(task: Task, steps: int, device: str, tokens: int) -> tuple[list[dict[str, Any]], nn.Module]:
    options = mh.Options(
        autocast=device != "cpu", progress="none", evaluate_every=every(steps), checkpoint_every=10**9
    )
    run = mh.fit(task, "single", steps=steps, seed=SEED, device=device, options=options)
    losses: list[float] = []
    points = []
    for row in run.history:
        if "loss" in row:
            losses.append(row["loss"])
        if "metrics" in row:
            at = {"tokens": row["step"] * tokens, "seconds": row["at_s"]}
            points.append(
                {**at, "loss": statistics.fmean(losses), "held_out": row["metrics"]["evaluation_loss"]}
            )
            losses = []
    return points, run.model


def plain(task: Task, steps: int, device: str, tokens: int) -> list[dict[str, Any]]:
    """Forward, backward, clipping and step by hand, over the batches that a run has."""
    on_gpu = device != "cpu"
    seed_all(SEED)
    model = task.model().to(device)
    optimizer = adamw(model.parameters(), lr=task.optimizer.keywords["lr"], fused=on_gpu)  # type: ignore[attr-defined]
    assert task.scheduler is not None
    schedule = task.scheduler(optimizer)
    of_batch = partial(task.loss, model)
    if on_gpu:
        of_batch = torch.compile(of_batch)
    pieces, total, points = _pieces(task, steps, device), torch.zeros((), device=device), []
    begun, since = time.perf_counter(), 0
    for step in range(1, steps + 1):
        for _ in range(task.microbatches):
            batch, weight = next(pieces)
            with _autocast(device):
                loss = of_batch(batch)
            (loss * weight).backward()
            total += loss.detach() * weight
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        since += 1
        if step % every(steps) == 0 or step == steps:
            found = {
                "tokens": step * tokens,
                "loss": float(total) / since,
                "held_out": _held_out(task, model, device),
            }
            points.append({**found, "seconds": time.perf_counter() - begun})
            total, since = torch.zeros((), device=device), 0
    return points


def _pieces(task: Task, steps: int, device: str) -> Iterator[tuple[Any, float]]:
    """The micro-batches of a run with their weights, each copied while the one before it is computed."""
    shares = batch_shares(
        task.data, task.collate, task.batch_size, task.microbatches, None, SEED, streams=False
    )
    copied, ahead = BatchCopies(torch.device(device)), None
    for step in range(steps):
        for piece in shares.share(step, 0, 1).pieces:
            now, ahead = ahead, (copied(piece.fetch()), piece.weight)
            if now is not None:
                yield now
    assert ahead is not None
    yield ahead


def _held_out(task: Task, model: nn.Module, device: str) -> float:
    computer = Computer(TrainingPlan(task=task, steps=1, seed=SEED, evaluate_every=0, checkpoint_every=0), 0)
    copied, total, count = BatchCopies(torch.device(device)), 0.0, 0
    model.eval()
    with torch.no_grad(), _autocast(device):
        for piece in computer.evaluation_batches():
            total += float(task.loss(model, copied(piece.fetch()))) * piece.samples
            count += piece.samples
    model.train()
    return total / count


def _autocast(device: str) -> torch.autocast:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16, enabled=device != "cpu")


def curve(plan: Plan, folder: Path, asked: argparse.Namespace) -> tuple[dict[str, Any], nn.Module]:
    """Both curves of one model; the one of `mh.fit` is returned."""
    choice = TokenizerChoice(train=plan.tokenizer, vocabulary=plan.vocabulary)
    if importlib.util.find_spec("tokenizers"):
        source: dict[str, Any] = {
            "data": tokens_of(text_of(asked.data, asked.letters), choice, folder, plan.name)
        }
    else:
        print("the package tokenizers is missing: the text is read byte by byte")
        source = {"path": asked.data / TEXT}
    steps = plan.steps(asked.minutes)
    task, tokens = task_of(plan, steps, **source), plan.batch * plan.length
    print(
        f"{plan.name}: {len(task.data):,} rows of {plan.length} tokens, {steps} steps of {tokens:,}",
        flush=True,
    )
    by_fit, model = ours(task, steps, asked.device, tokens)
    print(plan.name, "mh.fit", by_fit[-1], flush=True)
    by_hand = plain(task, steps, asked.device, tokens)
    print(plan.name, "plain ", by_hand[-1], flush=True)
    found = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "rows": len(task.data),
        "steps": steps,
        "tokens_of_a_step": tokens,
        "tokenizer": plan.tokenizer if "data" in source else "bytes",
        "curves": {"mh.fit": by_fit, "plain": by_hand},
        "largest_difference": max(
            abs(one["held_out"] / other["held_out"] - 1) for one, other in zip(by_fit, by_hand, strict=True)
        ),
    }
    return found, model


def tuned(model: nn.Module, folder: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Who speaks a line: by the BERT as it is, by one that has gone on with other lines, and by logistic regression."""
    import tuning

    with gzip.open(asked.data / ROLES, "rt") as file:
        lines = {one["client"]: one["text"] for one in map(json.loads, file)}
    table = tuning.write_table(folder, lines)
    apart = {row.text for row in table.split(tuning.SHARE)[1]}
    tokenizer = TokenFiles(folder / "bert").tokenizer
    write_checkpoint(model.float().cpu(), folder / "base", tokenizer)
    texts = [line for told in lines.values() for line in told if line not in apart]
    choice = TokenizerChoice(path=folder / "base" / "tokenizer.json")
    data = tokens_of(texts, choice, folder, "lines")
    steps = 20 if asked.tiny else asked.line_steps
    plan = replace(PLANS["bert"], batch=8 if asked.tiny else 128, peak=1e-4, sizes={"init": folder / "base"})
    task = task_of(plan, steps, data=data, length=32 if asked.tiny else 128)
    _, more = ours(task, steps, asked.device, 1)
    write_checkpoint(more.float().cpu(), folder / "more", tokenizer)
    rows = []
    rates = (5e-5,) if asked.tiny else (2e-5, 5e-5)
    for name, base in (("BERT, Wikipedia", "base"), ("BERT, Wikipedia, then lines", "more")):
        for rate in rates:
            runs = [_classified(table, folder / base, rate, seed, asked) for seed in tuning.SEEDS]
            shown = {key: statistics.fmean(run[key] for run in runs) for key in runs[0]}
            rows.append({"model": name, "learning_rate": rate, **shown})
            print(rows[-1], flush=True)
    if importlib.util.find_spec("sklearn"):
        rows.append({"model": "logistic regression, TF-IDF", **tuning.by_regression(table)})
        rows.append({"model": "the most frequent role", **tuning.by_frequency(table)})
    else:  # these draw nothing, and the lines are the same
        rows += load("tuning")["rows"][-2:]
    return rows


def _classified(
    table: Any, base: Path, rate: float, seed: int, asked: argparse.Namespace
) -> dict[str, float]:
    epochs, batch = (1, 32) if asked.tiny else (asked.epochs, 32)
    task = build(
        "bert",
        task="classification",
        data=table.path,
        evaluation_share=0.2,
        batch_size=batch,
        init=base,
        dropout=0.1,
    )
    steps = epochs * -(-len(task.data["labels"]) // batch)
    task = replace(
        task,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.01),
        scheduler=partial(scheduled, steps=steps),
        clip_norm=CLIP,
    )
    options = mh.Options(autocast=asked.device != "cpu", compile=False, progress="none")
    begun = time.perf_counter()
    run = mh.fit(task, "single", steps=steps, seed=seed, device=asked.device, options=options)
    final = run.summary["final"]
    return {
        **{name: final[name] for name in ("accuracy", "macro_f1")},
        "seconds": time.perf_counter() - begun,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder with the two files of shared/data")
    parser.add_argument("--minutes", type=float, default=2.0, help="of one loop of one model, about")
    parser.add_argument("--only", choices=tuple(PLANS))
    parser.add_argument(
        "--rates", type=float, nargs=2, help="tokens per second that gpt and bert are expected to learn"
    )
    parser.add_argument("--line-steps", type=int, default=400, help="of the BERT with lines of Shakespeare")
    parser.add_argument("--epochs", type=int, default=12, help="of learning who speaks a line")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this with")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for name in (TEXT, ROLES):
        if not (asked.data / name).is_file():
            parser.error(
                f"--data {asked.data} has no {name}; give the folder shared/data, or a copy of its two files"
            )
    asked.letters = 400_000 if asked.tiny else None
    plans = {name: replace(plan, **TINY) if asked.tiny else plan for name, plan in PLANS.items()}
    if asked.rates:
        plans = {
            name: replace(one, rate=rate)
            for (name, one), rate in zip(plans.items(), asked.rates, strict=True)
        }
    gpu = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    result: dict[str, Any] = {"device": gpu, "torch": torch.__version__, "models": {}, "tuned": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model, plan in plans.items():
            if asked.only in (None, model):
                result["models"][model], trained = curve(plan, folder, asked)
                _write(asked.json, result)  # what is measured stays, whatever comes
                if model == "bert" and result["models"][model]["tokenizer"] != "bytes":
                    result["tuned"] = tuned(trained, folder, asked)
                    _write(asked.json, result)
                del trained


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
