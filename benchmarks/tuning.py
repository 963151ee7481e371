"""Who speaks a line of Shakespeare: a BERT that was trained here, beside scikit-learn's logistic regression.

    python benchmarks/tuning.py --data FOLDER --work WORK --json benchmarks/results/tuning.json
    python benchmarks/tuning.py --data FOLDER --work WORK --tiny --device cpu

FOLDER is shared/data; WORK is that of `curves.py`, whose BERT in WORK/base this awaits. Two tasks, stated before either
was measured: the speeches of the ten roles that have most, and the same speeches line by line. A fifth of the rows is
held out by a hash of each text, the same for all models; nothing that is held out is read in any training.

The BERT goes on with what all roles say that is not held out, by masked tokens alone or also by whether two spans
follow one another, where each role's speeches are one document; then it learns the roles. From which of these it
begins, the learning rate and the epoch are chosen by a fifth of the rows to learn from; then all of these are learned,
with each of several seeds. Logistic regression is on TF-IDF of words, or of words, pairs of words and characters; its
penalty is chosen by cross-validation on the rows to learn from. Seconds overlap: the models share one GPU.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import multiprocessing
import os
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import manyhands as mh
from manyhands.workloads.language.bert import BERT_LAYOUT
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.tasks import build
from manyhands.workloads.text.documents import Documents
from manyhands.workloads.text.labeled_texts import LabeledTexts
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize

ROLES, SHARE = 10, 0.2
VALIDATED = SHARE + SHARE * (1 - SHARE)  # up to this position of the hash, the rows choose settings
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What a row of a task is, and how long it is learned."""

    name: str
    epochs: int
    batch: int
    seeds: int  # of each setting that is tried


UNITS = (
    Unit(name="speech", epochs=20, batch=32, seeds=2),
    Unit(name="verse", epochs=8, batch=64, seeds=1),
)
RATES = (1e-4, 3e-4)
BASES = {
    "none": "Wikipedia, then Shakespeare",
    "next": "Wikipedia, then Shakespeare by roles",
}  # by `sentences`
LINE_STEPS = 600
PENALTIES = (3.0, 10.0, 30.0, 100.0)  # the inverse, C

Lines = Mapping[str, Sequence[str]]


def lines_of_roles(path: Path) -> dict[str, list[str]]:
    with gzip.open(path, "rt") as file:
        return {one["client"]: one["text"] for one in map(json.loads, file)}


def write_table(folder: Path, lines: Lines, unit: str) -> LabeledTexts:
    roles = sorted(lines, key=lambda role: (-len(lines[role]), role))[:ROLES]
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(text, role) for role in roles for line in lines[role] for text in _texts_of(line, unit)]
    return _written(folder / f"{unit}.csv", rows)


def _texts_of(line: str, unit: str) -> list[str]:
    return [line] if unit == "speech" else [one for one in line.split("\n") if one.strip()]


def _written(path: Path, rows: Sequence[tuple[str, str]]) -> LabeledTexts:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(rows)
    return LabeledTexts(path=path)


def not_held_out(
    lines: Lines, folder: Path, units: Sequence[str] = ("speech", "verse")
) -> dict[str, list[str]]:
    """What each role says without what `units` hold out."""
    kept = {role: list(told) for role, told in lines.items()}
    for unit in units:
        held_out = {row.text for row in write_table(folder, lines, unit).split(SHARE)[1]}
        for role, told in kept.items():
            texts = ("\n".join(one for one in _texts_of(line, unit) if one not in held_out) for line in told)
            kept[role] = [text for text in texts if text]
    return kept


def tokens_of(texts: Sequence[str], choice: TokenizerChoice, folder: Path, name: str) -> Path:
    source, out = folder / f"{name}.jsonl", folder / name
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenize(Documents(paths=[source]), choice, out, workers=2)
    return out


def scheduled(
    optimizer: torch.optim.Optimizer, steps: int, warm_up: float = 0.05
) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up over a share of the steps, then a cosine to a tenth."""
    warm = max(1, int(steps * warm_up))

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return 0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - warm) / max(1, steps - warm)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def gone_on(base: Path, data: Path, sentences: str, steps: int, device: str, out: Path) -> Path:
    """Masked tokens of Shakespeare from the checkpoint `base`; writes another."""
    sizes = {
        "init": base,
        "length": min(128, json.loads((base / "config.json").read_text())["max_position_embeddings"]),
    }
    task = build("bert", data=data, sentences=sentences, dropout=0.1, batch_size=64, **sizes)
    task = _scheduled_task(task, 2e-4, steps)
    options = mh.Options(
        autocast=device != "cpu", compile=False, progress="none", evaluate_every=max(1, steps // 4)
    )
    run = mh.fit(replace(task, metrics={}), "single", steps=steps, seed=0, device=device, options=options)
    found = [row["metrics"]["evaluation_loss"] for row in run.history if "metrics" in row]
    print(out.name, "held-out loss", found, flush=True)
    write_checkpoint(run.model.float().cpu(), out, TokenFiles(data).tokenizer)
    return out


def _scheduled_task(task: mh.Task, rate: float, steps: int) -> mh.Task:
    return replace(
        task,
        optimizer=partial(torch.optim.AdamW, lr=rate, weight_decay=0.01),
        scheduler=partial(scheduled, steps=steps, warm_up=0.1),
        clip_norm=1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """One run that learns the roles, up to an epoch of those that the learning rate's schedule is made for."""

    table: Path
    share: float
    options: Mapping[str, Any]  # of the model
    rate: float
    seed: int
    batch: int
    epochs: int
    until: int
    device: str


class Tuned(dict[str, Any]):
    """Its scores, `accuracies` after each epoch, and `chances` of each label for each row that is held out."""


def tuned(one: Tuning) -> Tuned:
    torch.set_num_threads(1)
    task = build(
        "bert",
        task="classification",
        data=one.table,
        evaluation_share=one.share,
        batch_size=one.batch,
        dropout=0.1,
        **one.options,
    )
    of_epoch = -(-len(task.data["labels"]) // one.batch)
    task = _scheduled_task(task, one.rate, one.epochs * of_epoch)
    options = mh.Options(
        autocast=one.device != "cpu",
        compile=False,
        progress="none",
        evaluate_every=of_epoch,
        checkpoint_every=10**9,
    )
    begun = time.perf_counter()
    run = mh.fit(
        task, "single", steps=one.until * of_epoch, seed=one.seed, device=one.device, options=options
    )
    seconds, model = time.perf_counter() - begun, run.model.float().cpu().eval()
    with torch.no_grad():
        parts = [model(rows).softmax(1) for rows in task.evaluation["tokens"].split(64)]
    found = [row["metrics"]["accuracy"] for row in run.history if "metrics" in row]
    return Tuned(
        accuracy=run.summary["final"]["accuracy"],
        macro_f1=run.summary["final"]["macro_f1"],
        seconds=seconds,
        accuracies=found,
        chances=torch.cat(parts).numpy(),
    )


def scores(found: Sequence[str], own: Sequence[str]) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    return {"accuracy": accuracy_score(own, found), "macro_f1": f1_score(own, found, average="macro")}


def by_regression(table: LabeledTexts, penalties: Sequence[float]) -> list[dict[str, Any]]:
    """Logistic regression on words, and on words, pairs of them and characters."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline, make_union

    learned, held_out = table.split(SHARE)
    words = partial(TfidfVectorizer, sublinear_tf=True)
    features = {
        "words": words(),
        "words, pairs and characters": make_union(
            words(ngram_range=(1, 2)), words(analyzer="char_wb", ngram_range=(2, 5), min_df=2)
        ),
    }
    rows = []
    for name, kind in features.items():
        begin = time.perf_counter()
        search = GridSearchCV(
            make_pipeline(kind, LogisticRegression(max_iter=300)),
            {"logisticregression__C": penalties},
            cv=StratifiedKFold(3, shuffle=True, random_state=0),
            n_jobs=len(os.sched_getaffinity(0)) // 2,
        )
        search.fit([row.text for row in learned], [row.label for row in learned])
        found = list(search.predict([row.text for row in held_out]))
        rows.append(
            {
                "model": f"logistic regression: {name}",
                **scores(found, [row.label for row in held_out]),
                "seconds": time.perf_counter() - begin,
                "validated": search.best_score_,
                "penalty": search.best_params_,
            }
        )
    return rows


def by_frequency(table: LabeledTexts) -> dict[str, Any]:
    learned, held_out = table.split(SHARE)
    ((most, _),) = Counter(row.label for row in learned).most_common(1)
    found = scores([most] * len(held_out), [row.label for row in held_out])
    return {"model": "the most frequent role", **found, "seconds": 0.0}


class Measured:
    """One task: which settings are tried, which is chosen, and what is found with it."""

    def __init__(
        self, unit: Unit, table: LabeledTexts, bases: Mapping[str, Path], asked: argparse.Namespace
    ) -> None:
        self.unit, self.table, self.bases, self.asked = unit, table, bases, asked
        learned, held_out = table.split(SHARE)
        self.own = [row.label for row in held_out]
        self.labels = sorted({row.label for row in learned})
        self.learned = _written(
            table.path.with_suffix(".learned.csv"), [(row.text, row.label) for row in learned]
        )
        self._finals: list[tuple[str, list[Future[Tuned]]]] = []
        self.result: dict[str, Any] = {
            "learned": len(learned),
            "held_out": len(held_out),
            "tried": [],
            "rows": [],
        }

    def tuning(self, path: Path, share: float, **settings: Any) -> Tuning:
        epochs = 1 if self.asked.tiny else self.unit.epochs
        common = {"batch": self.unit.batch, "epochs": epochs, "device": self.asked.device}
        return Tuning(table=path, share=share, **{"until": epochs, **common, **settings})

    def tries(self, pool: ProcessPoolExecutor) -> None:
        """Start a run for each setting and seed, on the rows to learn from alone, unless that was measured before."""
        found = {} if self.asked.chosen is None else json.loads(self.asked.chosen.read_text())["units"]
        if self.unit.name in found:
            self.result |= {key: found[self.unit.name][key] for key in ("tried", "chosen")}
        settings = () if found else product(self.bases, RATES, range(self.unit.seeds))
        self._tries = [
            (
                (base, rate),
                pool.submit(
                    tuned,
                    self.tuning(
                        self.learned.path, VALIDATED, options={"init": self.bases[base]}, rate=rate, seed=seed
                    ),
                ),
            )
            for base, rate, seed in settings
        ]

    def choose(self) -> None:
        """Take the setting and the epoch that are best for the rows which choose."""
        runs: dict[tuple[str, float], list[list[float]]] = {}
        for key, future in self._tries:
            runs.setdefault(key, []).append(future.result()["accuracies"])
        for (base, rate), found in runs.items():
            means = np.mean(found, axis=0)
            best = {"epoch": int(means.argmax()) + 1, "accuracy": float(means.max())}
            self.result["tried"].append({"base": base, "rate": rate, **best})
        self.result["chosen"] = max(self.result["tried"], key=lambda one: one["accuracy"])

    def learn(self, pool: ProcessPoolExecutor, others: bool) -> None:
        """Start the runs on all rows to learn from: those of the setting that was chosen, or the others."""
        base, rate, epoch = (self.result["chosen"][key] for key in ("base", "rate", "epoch"))
        init = self.bases[base]
        sizes, names = json.loads((init / "config.json").read_text()), BERT_LAYOUT.sizes
        own = {key: sizes[names[key]] for key in ("layers", "width", "heads", "context")}
        cases: dict[str, tuple[Mapping[str, Any], float]] = {
            "the same, LoRA of rank 8": ({"init": init, "lora": 8}, 3e-3),
            "BERT from nothing": ({"tokenizer": init / "tokenizer.json", **own}, rate),
        }
        if not others:
            cases = {f"BERT: {base}": ({"init": init}, rate)}
        self._finals += [
            (
                name,
                [
                    pool.submit(
                        tuned,
                        self.tuning(self.table.path, SHARE, options=options, rate=by, seed=seed, until=epoch),
                    )
                    for seed in (SEEDS[:2] if others else SEEDS)
                ],
            )
            for name, (options, by) in cases.items()
        ]

    def finish(self, count: int) -> None:
        """The scores of the next `count` models."""
        rows = self.result["rows"]
        for name, futures in self._finals[:count]:
            runs = [future.result() for future in futures]
            means = {
                key: statistics.fmean(run[key] for run in runs) for key in ("accuracy", "macro_f1", "seconds")
            }
            rows.append({"model": name, **means, "accuracies": [run["accuracy"] for run in runs]})
            if len(runs) == len(SEEDS):
                together: NDArray[Any] = np.mean([run["chances"] for run in runs], axis=0)
                found = [self.labels[one] for one in together.argmax(1)]
                about = f"the mean of these {len(runs)}"
                seconds = means["seconds"] * len(runs)
                rows.append({"model": about, **scores(found, self.own), "seconds": seconds})
        del self._finals[:count]

    def compare(self) -> None:
        """The same for what is no BERT."""
        penalties = (10.0,) if self.asked.tiny else PENALTIES
        self.result["rows"] += [*by_regression(self.table, penalties), by_frequency(self.table)]


def bases_of(unit: str, lines: Lines, pool: ProcessPoolExecutor, asked: argparse.Namespace) -> dict[str, Any]:
    """The checkpoints that a task may begin from; those that go on with Shakespeare are under way."""
    base, folder = asked.work / "base", asked.work / unit
    spoken = ["\n".join(told) for told in not_held_out(lines, folder, (unit,)).values() if told]
    data = tokens_of(spoken, TokenizerChoice(path=base / "tokenizer.json"), folder, "lines")
    steps = 4 if asked.tiny else LINE_STEPS
    found: dict[str, Any] = {"Wikipedia": base}
    for sentences, name in BASES.items():
        found[name] = pool.submit(gone_on, base, data, sentences, steps, asked.device, folder / sentences)
    return found


def measured(asked: argparse.Namespace) -> None:
    gpu = torch.cuda.get_device_name() if asked.device != "cpu" else "CPU"
    result: dict[str, Any] = {
        "device": gpu,
        "torch": torch.__version__,
        "roles": ROLES,
        "seeds": len(SEEDS),
        "units": {},
    }
    lines = lines_of_roles(asked.data / "tinyshakespeare_by_role.jsonl.gz")
    until = time.monotonic() + 60 * asked.wait_minutes
    while not (asked.work / "base").is_dir():
        if time.monotonic() > until:
            raise SystemExit(f"{asked.work / 'base'} is not there: curves.py has not written its BERT")
        time.sleep(1)
    result["base"] = json.loads((asked.work / "bert-mh.fit.json").read_text())["points"][-1]
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.processes, mp_context=spawning) as pool:
        under_way = {unit.name: bases_of(unit.name, lines, pool, asked) for unit in UNITS}
        tasks = []
        for unit in UNITS:
            table = write_table(asked.work / unit.name, lines, unit.name)
            bases = {
                name: one.result() if isinstance(one, Future) else one
                for name, one in under_way[unit.name].items()
            }
            tasks.append(Measured(unit, table, bases, asked))
            tasks[-1].tries(pool)
            result["units"][unit.name] = tasks[-1].result
        steps = (
            Measured.choose,
            partial(Measured.learn, pool=pool, others=False),
            partial(Measured.learn, pool=pool, others=True),
            partial(Measured.finish, count=1),
            partial(Measured.finish, count=2),
            *(() if asked.no_peers else (Measured.compare,)),
        )
        for step in steps:
            for one in tasks:
                step(one)
                print(one.unit.name, json.dumps(one.result), flush=True)
                if asked.json is not None:
                    asked.json.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="a folder with the roles of shared/data")
    parser.add_argument("--work", type=Path, required=True, help="the folder of curves.py")
    parser.add_argument("--chosen", type=Path, help="an earlier --json, whose choices are taken untried")
    parser.add_argument("--no-peers", action="store_true", help="leave out what is no BERT")
    parser.add_argument("--wait-minutes", type=float, default=8.0, help="for the BERT of curves.py")
    parser.add_argument("--processes", type=int, default=8, help="that share the device")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes to try this with")
    parser.add_argument("--json", type=Path)
    measured(parser.parse_args())


if __name__ == "__main__":
    main()
