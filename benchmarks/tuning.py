"""Who speaks a line of Shakespeare: a small BERT, pre-trained or not, beside scikit-learn's logistic regression.

    python benchmarks/tuning.py [--steps 600] [--epochs 5] [--json benchmarks/results/tuning.json]

Lines of the ten roles that have most; a fifth is held out by a hash of each line, the same for all. The BERT is trained
here: masked word pieces of all lines that are not held out, of every role, then the roles. Beside it are one that
begins from nothing, one that learns adapters (LoRA) alone, logistic regression on TF-IDF of words, with its penalty
chosen by cross-validation on the lines to learn from, and the role that is most frequent. Seconds are those of fitting.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.tasks import build
from manyhands.workloads.text.documents import Documents
from manyhands.workloads.text.labeled_texts import LabeledTexts
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize
from results_read import data_file

ROLES, SHARE, SEEDS = 10, 0.2, (0, 1)
SIZES = {"context": 48, "layers": 2, "width": 128, "heads": 4}


def lines_of_roles() -> dict[str, list[str]]:
    path = data_file("tinyshakespeare_by_role.jsonl.gz")
    if path is None:
        raise SystemExit("shared/data/tinyshakespeare_by_role.jsonl.gz is not beside the checkout")
    with gzip.open(path, "rt") as file:
        return {one["client"]: one["text"] for one in map(json.loads, file)}


def write_table(folder: Path, lines: dict[str, list[str]]) -> LabeledTexts:
    roles = sorted(lines, key=lambda role: (-len(lines[role]), role))[:ROLES]
    table = LabeledTexts(path=folder / "lines.csv")
    with table.path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows((line, role) for role in roles for line in lines[role])
    return table


def pretrained(folder: Path, lines: dict[str, list[str]], held_out: set[str], steps: int) -> dict[str, Any]:
    """Masked word pieces of what is not held out; writes the checkpoint `base`."""
    texts = [line for told in lines.values() for line in told if line not in held_out]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in texts))
    choice = TokenizerChoice(train="wordpiece", vocabulary=2048)
    tokenize(Documents(paths=[folder / "text.jsonl"]), choice, folder / "tokens", workers=1)
    task = build("bert", data=folder / "tokens", **SIZES, batch_size=32)
    begin = time.perf_counter()
    run = mh.fit(task, "mirrored", workers=2, steps=steps, seed=0)
    seconds = time.perf_counter() - begin
    write_checkpoint(run.model, folder / "base", TokenFiles(folder / "tokens").tokenizer)
    return {"seconds": seconds, "steps": steps, **run.summary["final"]}


def fitted(table: LabeledTexts, epochs: int, seed: int, **options: Any) -> dict[str, float]:
    begin = time.perf_counter()
    task = build(
        "bert", task="classification", data=table.path, evaluation_share=SHARE, batch_size=32, **options
    )
    run = mh.fit(task, "mirrored", workers=2, epochs=epochs, seed=seed)
    final = run.summary["final"]
    return {name: final[name] for name in ("accuracy", "macro_f1")} | {"seconds": time.perf_counter() - begin}


def by_regression(table: LabeledTexts) -> dict[str, float]:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.metrics import accuracy_score, f1_score
    from sklearn.pipeline import make_pipeline

    learned, held_out = table.split(SHARE)
    begin = time.perf_counter()
    scale = TfidfVectorizer(sublinear_tf=True)
    model = make_pipeline(
        scale,
        LogisticRegressionCV(
            Cs=(1.0, 10.0),
            l1_ratios=(0,),
            cv=3,
            max_iter=300,
            scoring="accuracy",
            use_legacy_attributes=False,
        ),
    )
    model.fit([row.text for row in learned], [row.label for row in learned])
    seconds, found = time.perf_counter() - begin, model.predict([row.text for row in held_out])
    own = [row.label for row in held_out]
    return {
        "accuracy": accuracy_score(own, found),
        "macro_f1": f1_score(own, found, average="macro"),
        "seconds": seconds,
    }


def by_frequency(table: LabeledTexts) -> dict[str, float]:
    from sklearn.metrics import accuracy_score, f1_score

    learned, held_out = table.split(SHARE)
    ((most, _),) = Counter(row.label for row in learned).most_common(1)
    own = [row.label for row in held_out]
    return {
        "accuracy": accuracy_score(own, [most] * len(own)),
        "macro_f1": f1_score(own, [most] * len(own), average="macro"),
        "seconds": 0.0,
    }


def rows_of(table: LabeledTexts, base: Path, epochs: int) -> Iterator[dict[str, Any]]:
    tokenizer = base / "tokenizer.json"
    cases: dict[str, dict[str, Any]] = {
        "BERT, pre-trained here": {"init": base},
        "the same, LoRA of rank 8": {"init": base, "lora": 8, "learning_rate": 3e-3},
        "BERT, from nothing": {"tokenizer": tokenizer, **SIZES},
    }
    for name, options in cases.items():
        runs = [fitted(table, epochs, seed, **options) for seed in SEEDS]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        spread = [min(run["accuracy"] for run in runs), max(run["accuracy"] for run in runs)]
        yield {"model": name, **medians, "accuracies": spread}
    yield {"model": "logistic regression, TF-IDF", **by_regression(table)}
    yield {"model": "the most frequent role", **by_frequency(table)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = lines_of_roles()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = write_table(folder, lines)
        learned, held_out = table.split(SHARE)
        result: dict[str, Any] = {
            "cores": len(os.sched_getaffinity(0)),
            "torch": version("torch"),
            "scikit_learn": version("scikit-learn"),
            "roles": ROLES,
            "learned": len(learned),
            "held_out": len(held_out),
            "epochs": asked.epochs,
            "seeds": len(SEEDS),
            "pretraining": pretrained(folder, lines, {row.text for row in held_out}, asked.steps),
            "rows": [],
        }
        print(result, flush=True)
        for row in rows_of(table, folder / "base", asked.epochs):
            print(row, flush=True)
            result["rows"].append(row)
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
