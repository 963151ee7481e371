"""How fast text becomes tokens, and how well models learn it, from the committed results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from results_read import has, load, markdown, show_ratio


def tokenizing_speed() -> str:
    """Megabytes of text a second beside the `tokenizers` library, by text and tokenizer."""
    result = load("tokenizing")
    names = {
        "manyhands": "`manyhands tokenize`",
        "encode_batch": "`encode_batch`",
        "encode_batch_fast": "`encode_batch_fast`",
    }
    rows = [["text, MB/s", "tokenizer", *names.values(), "to the faster"]]
    for row in result["rows"]:
        rates = [f"{row['mb_per_s'][name]:.1f}" for name in names]
        rows.append([row["text"], row["tokenizer"], *rates, f"**{show_ratio(row['times_library'])}**"])
    about = f"{result['cores']} cores, tokenizers {result['tokenizers']}, median of {result['rounds']}"
    return f"**{about}**\n\n{markdown(rows)}"


def tuning_scores() -> str:
    """Accuracy and macro-F1 of a BERT, pre-trained or not, beside logistic regression."""
    result = load("tuning")
    rows = [["who speaks the line?", "accuracy", "macro-F1", "seconds"]]
    for row in result["rows"]:
        scores = [f"{row[name]:.1%}".replace("%", " %") for name in ("accuracy", "macro_f1")]
        rows.append([row["model"], *scores, f"{row['seconds']:.0f}"])
    before = result["pretraining"]
    lines = f"{result['learned']:,} lines to learn from, {result['held_out']} held out"
    trained = f"{before['steps']} steps of masked word pieces before, {before['seconds']:.0f} s"
    measured = f"{result['cores']} cores, {result['epochs']} epochs, median of {result['seeds']} seeds"
    about = f"**{result['roles']} roles of Shakespeare, {lines}; {measured}; {trained}**"
    return f"{about}\n\n{markdown(rows)}"


def curves() -> str:
    """Loss over tokens of GPT and BERT, by `mh.fit` and by hand, and who speaks a line after that."""
    found = [load(f"curves-{name}") for name in ("gpt", "bert") if has(f"curves-{name}")]
    return "\n\n".join(part for result in found for part in _curves_of(result))


def _curves_of(result: dict[str, Any]) -> Iterator[str]:
    for name, one in result["models"].items():
        rows = [
            [
                "tokens, millions",
                "loss, `mh.fit`",
                "by hand",
                "held out, `mh.fit`",
                "by hand",
            ]
        ]
        for ours, plain in zip(*one["curves"].values(), strict=True):
            losses = [f"{way[key]:.3f}" for key in ("loss", "held_out") for way in (ours, plain)]
            rows.append([f"{ours['tokens'] / 1e6:,.1f}", *losses])
        size = f"{one['parameters'] / 1e6:.0f} million parameters"
        yield f"**`{name}`, {size}, {one['steps']:,} steps, {result['device']}**\n\n{markdown(rows)}"
    if result["tuned"]:
        rows = [["who speaks the line?", "accuracy", "macro-F1"]]
        for row in result["tuned"]:
            rate = f", learning rate {row['learning_rate']:g}" if "learning_rate" in row else ""
            rows.append([row["model"] + rate, f"{row['accuracy']:.1%}", f"{row['macro_f1']:.1%}"])
        yield markdown(rows)
