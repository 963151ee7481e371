"""Loss over tokens on text: GPT-2 124M and BERT by `mh.fit`, beside plain loops over the same batches, on one GPU.

    python benchmarks/curves.py --data FOLDER --work WORK --minutes 8 --json benchmarks/results/curves.json
    python benchmarks/curves.py --data FOLDER --work WORK --tiny --device cpu

FOLDER has wiki-50mb.txt.gz and tinyshakespeare_by_role.jsonl.gz of shared/data. Each model learns the 50 MB of
Wikipedia, and BERT also the lines of Shakespeare that `tuning.py` does not hold out; the end of the text is held out.
Both loops begin with the same weights and take the same batches with the same optimizer, warm-up and decay, in bfloat16
and compiled on a GPU; the plain one is written by hand (`plain` below). All run at the same time, each in a process of
its own: what is compared is loss against tokens, not speed. How long they are follows from `--minutes`; what has not
ended by then is stopped, and what it has measured stays. WORK/base is the BERT, for `tuning.py`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import manyhands as mh
import tuning
from manyhands.data.randomness import seed_all
from manyhands.data.reading import batch_shares
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.device import BatchCopies
from manyhands.task import Task
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.tasks import build
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizing import TokenizerChoice

TEXT, ROLES = "wiki-50mb.txt.gz", "tinyshakespeare_by_role.jsonl.gz"
POINTS = 12  # of a curve
HELD_OUT = 1 << 18  # tokens
WORDS = 2048  # of a document: the text is one line
SEED, CLIP = 1, 1.0
LOOPS = ("mh.fit", "plain")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How one model is trained."""

    model: str
    sizes: Mapping[str, Any]
    length: int
    batch: int
    steps_a_minute: float  # of the measurement, which several loops share
    peak: float  # of the learning rate
    warm_up: float  # share of the steps
    betas: tuple[float, float]
    weight_decay: float
    tokens: str  # the folder
    loops: Sequence[str] = LOOPS

    def steps(self, minutes: float) -> int:
        return max(2 * POINTS, int(minutes * self.steps_a_minute))


SMALL, BASE = {"context": 128, "layers": 6, "width": 512, "heads": 8}, {"preset": "bert-base", "context": 128}
BERT = Plan(
    model="bert", sizes=SMALL, length=128, batch=128, steps_a_minute=590,
    peak=1e-3, warm_up=0.1, betas=(0.9, 0.98), weight_decay=0.01, tokens="bert",
)  # fmt: skip
PLANS = {
    "gpt": Plan(
        model="gpt", sizes={"preset": "gpt2", "context": 1024}, length=1024, batch=32, steps_a_minute=247,
        peak=6e-4, warm_up=0.05, betas=(0.9, 0.95), weight_decay=0.1, tokens="gpt",
    ),
    "bert": BERT,
}  # fmt: skip
TRIED = {  # which settings let BERT learn, for `--only`
    "6 layers, 1e-3": replace(BERT, steps_a_minute=500, loops=("mh.fit",)),
    "6 layers, 5e-4": replace(BERT, steps_a_minute=500, peak=5e-4, loops=("mh.fit",)),
    "12 layers, 3e-4": replace(
        BERT, sizes=BASE, steps_a_minute=450, peak=3e-4, warm_up=0.05, betas=(0.9, 0.95), weight_decay=0.1,
        loops=("mh.fit",),
    ),
    "12 layers, 2e-4": replace(BERT, sizes=BASE, steps_a_minute=450, peak=2e-4, loops=("mh.fit",)),
}  # fmt: skip
TINY = {
    "sizes": {"preset": "tiny", "context": 32},
    "length": 32,
    "batch": 8,
    "steps_a_minute": 30,
    "peak": 1e-3,
}
CHOICES = {
    "gpt": TokenizerChoice(train="bpe", vocabulary=16384),
    "bert": TokenizerChoice(train="wordpiece", vocabulary=16384),
}


def text_of(folder: Path, letters: int | None) -> list[str]:
    """The text in documents of a few thousand words."""
    with gzip.open(folder / TEXT, "rt") as file:
        words = file.read(letters).split()
    return [" ".join(words[begin : begin + WORDS]) for begin in range(0, len(words), WORDS)]


def prepare(asked: argparse.Namespace) -> None:
    """The folders of tokens; Shakespeare comes first, so that what is held out is of Wikipedia for both models."""
    letters = 400_000 if asked.tiny else None
    text = text_of(asked.data, letters)
    lines = tuning.lines_of_roles(asked.data / ROLES)
    spoken = ["\n".join(told) for told in tuning.not_held_out(lines, asked.work).values()]
    texts = {"gpt": text, "bert": spoken + text}
    with ThreadPoolExecutor() as pool:
        needed = {plan.tokens for plan in plans(asked).values()}
        list(pool.map(lambda name: tuning.tokens_of(texts[name], CHOICES[name], asked.work, name), needed))


def task_of(plan: Plan, steps: int, work: Path) -> Task:
    task = build(
        plan.model,
        data=work / plan.tokens,
        **plan.sizes,
        batch_size=plan.batch,
        evaluation_bytes=min(HELD_OUT, 2048 * plan.length),
    )
    return replace(
        task,
        optimizer=partial(torch.optim.AdamW, lr=plan.peak, betas=plan.betas, weight_decay=plan.weight_decay),
        scheduler=partial(tuning.scheduled, steps=steps, warm_up=plan.warm_up),
        clip_norm=CLIP,
        metrics={},  # each would be another forward over what is held out
    )


def every(steps: int) -> int:
    return max(1, steps // POINTS)


Say = Callable[[dict[str, Any]], None]  # hears each point of a curve


def by_fit(task: Task, steps: int, device: str, say: Say) -> nn.Module:
    losses: list[float] = []

    def hear(rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            if "loss" in row:
                losses.append(row["loss"])
            if "metrics" in row:
                held_out = row["metrics"]["evaluation_loss"]
                at = {"step": row["step"], "seconds": row["at_s"]}
                say({**at, "loss": statistics.fmean(losses), "held_out": held_out})
                losses.clear()

    options = mh.Options(
        autocast=device != "cpu",
        progress="none",
        evaluate_every=every(steps),
        checkpoint_every=10**9,
        on_rows=hear,
    )
    return mh.fit(task, "single", steps=steps, seed=SEED, device=device, options=options).model


def plain(task: Task, steps: int, device: str, say: Say) -> nn.Module:
    """Forward, backward, clipping and step by hand, over the batches that a run has."""
    on_gpu = device != "cpu"
    seed_all(SEED)
    model = task.model().to(device)
    settings = task.optimizer.keywords  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), **settings, fused=on_gpu)
    assert task.scheduler is not None
    schedule = task.scheduler(optimizer)
    of_batch = partial(task.loss, model)
    if on_gpu:
        of_batch = torch.compile(of_batch)
    total, since, begun = torch.zeros((), device=device), 0, time.perf_counter()
    for step, batch in enumerate(_batches(task, steps, device), 1):
        with _autocast(device):
            loss = of_batch(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        total += loss.detach()
        since += 1
        if step % every(steps) == 0 or step == steps:
            held_out = _held_out(task, model, device)
            at = {"step": step, "seconds": time.perf_counter() - begun}
            say({**at, "loss": float(total) / since, "held_out": held_out})
            total, since = torch.zeros((), device=device), 0
    return model


def _batches(task: Task, steps: int, device: str) -> Iterator[Any]:
    """The batches of a run, each copied while the one before it is computed."""
    shares = batch_shares(task.data, task.collate, task.batch_size, 1, None, SEED, streams=False)
    copied, ahead = BatchCopies(torch.device(device)), None
    for step in range(steps):
        (piece,) = shares.share(step, 0, 1).pieces
        now, ahead = ahead, copied(piece.fetch())
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


def one_loop(name: str, loop: str, asked: argparse.Namespace) -> None:
    """What a process does: one curve, which it writes point by point, and the BERT that `mh.fit` has trained."""
    plan = plans(asked)[name]
    steps = plan.steps(asked.minutes)
    task = task_of(plan, steps, asked.work)
    found: dict[str, Any] = {
        "rows": len(task.data),
        "steps": steps,
        "tokens_of_a_step": plan.batch * plan.length,
        "settings": {
            key: getattr(plan, key) for key in ("sizes", "peak", "warm_up", "betas", "weight_decay")
        },
        "points": [],
    }

    def say(point: dict[str, Any]) -> None:
        found["points"].append({"tokens": point["step"] * plan.batch * plan.length, **point})
        print(name, loop, found["points"][-1], flush=True)
        write(_part(asked.work, name, loop), found)

    model = (by_fit if loop == "mh.fit" else plain)(task, steps, asked.device, say)
    found["parameters"] = sum(one.numel() for one in model.parameters())
    write(_part(asked.work, name, loop), found)
    if (name, loop) == ("bert", "mh.fit"):
        write_checkpoint(
            model.float().cpu(), asked.work / "base.part", TokenFiles(asked.work / "bert").tokenizer
        )
        (asked.work / "base.part").rename(asked.work / "base")


def _part(work: Path, name: str, loop: str) -> Path:
    return work / f"{name}-{loop}.json"


def collected(asked: argparse.Namespace) -> dict[str, Any]:
    """What all processes have measured so far."""
    gpu = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    result: dict[str, Any] = {"device": gpu, "torch": torch.__version__, "models": {}}
    for name, plan in plans(asked).items():
        parts = {loop: _part(asked.work, name, loop) for loop in plan.loops}
        found = {loop: json.loads(path.read_text()) for loop, path in parts.items() if path.is_file()}
        if found:
            about = {key: value for one in found.values() for key, value in one.items() if key != "points"}
            result["models"][name] = {
                **about,
                "curves": {loop: one["points"] for loop, one in found.items()},
            }
    return result


def plans(asked: argparse.Namespace) -> dict[str, Plan]:
    """Those that are asked for."""
    found = {name: plan for name, plan in (PLANS | TRIED).items() if name in asked.only}
    return {name: replace(plan, **TINY) if asked.tiny else plan for name, plan in found.items()}


def write(path: Path, result: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def supervise(asked: argparse.Namespace) -> None:
    """Start all loops, and collect what they measure until all have ended, or the time."""
    ends = time.monotonic() + 60 * asked.minutes
    prepare(asked)
    asked_for = plans(asked).items()
    loops = [(name, loop) for name, plan in asked_for for loop in plan.loops if loop in asked.loops]
    running = [subprocess.Popen([sys.executable, *sys.argv, "--one", name, loop]) for name, loop in loops]
    try:
        while any(one.poll() is None for one in running) and time.monotonic() < ends:
            time.sleep(1)
            if asked.json is not None:
                write(asked.json, collected(asked))
    finally:
        for one in running:
            one.terminate()
        for one in running:
            one.wait()
    if failed := [one.args for one in running if one.returncode > 0]:
        raise SystemExit(f"these failed: {failed}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder with the two files of shared/data")
    parser.add_argument("--work", type=Path, required=True, help="a new folder for tokens and the BERT")
    parser.add_argument("--minutes", type=float, default=8.5, help="when what has not ended is stopped")
    parser.add_argument("--only", nargs="+", choices=(*PLANS, *TRIED), default=tuple(PLANS))
    parser.add_argument("--loops", nargs="+", choices=LOOPS, default=LOOPS)
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "LOOP"), help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this with")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for name in (TEXT, ROLES):
        if not (asked.data / name).is_file():
            parser.error(
                f"--data {asked.data} has no {name}; give the folder shared/data, or a copy of its two files"
            )
    asked.work.mkdir(parents=True, exist_ok=True)
    if asked.one is not None:
        one_loop(*asked.one, asked)
    else:
        supervise(asked)


if __name__ == "__main__":
    main()
