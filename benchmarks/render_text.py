"""How fast text becomes tokens, and how well models learn it, from the committed results."""

from __future__ import annotations

from typing import Any

from results_read import load, markdown, show_ratio


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
    """Accuracy and macro-F1 of a BERT that was trained here, beside logistic regression."""
    result = load("tuning")
    return "\n\n".join(_tuned(result, name, one) for name, one in result["units"].items())


def _tuned(result: dict[str, Any], name: str, one: dict[str, Any]) -> str:
    rows = [[f"who speaks the {name}?", "accuracy", "macro-F1"]]
    for row in one["rows"]:
        scores = [f"{row[key]:.1%}".replace("%", " %") for key in ("accuracy", "macro_f1")]
        rows.append([row["model"], *scores])
    before = result["base"]
    base = f"{before['tokens'] / 1e6:.0f} million masked tokens before, loss {before['held_out']:.2f}"
    about = f"{result['roles']} roles, {one['learned']:,} rows to learn from, {one['held_out']:,} held out; {base}"
    return f"**{about}**\n\n{markdown(rows)}"


def curves() -> str:
    """Loss over tokens of GPT and BERT, by `mh.fit` and by hand."""
    result = load("curves")
    return "\n\n".join(_curve(result, name, one) for name, one in result["models"].items())


def _curve(result: dict[str, Any], name: str, one: dict[str, Any]) -> str:
    by_fit, by_hand = (one["curves"].get(loop, ()) for loop in ("mh.fit", "plain"))
    names = ["`mh.fit`", "by hand"] if by_hand else ["`mh.fit`"]
    rows = [["tokens, millions", *(f"{what}, {way}" for what in ("loss", "held out") for way in names)]]
    for points in zip(by_fit, by_hand, strict=False) if by_hand else ((one,) for one in by_fit):
        losses = [f"{way[key]:.3f}" for key in ("loss", "held_out") for way in points]
        rows.append([f"{points[0]['tokens'] / 1e6:,.1f}", *losses])
    size = f"{one['parameters'] / 1e6:.0f} million parameters"
    return f"**`{name}`, {size}, {one['steps']:,} steps, {result['device']}**\n\n{markdown(rows)}"


def bert_settings() -> str:
    """Held-out loss over tokens of BERT, by settings of the optimizer: a table for each number of layers."""
    tables: dict[tuple[float, ...], dict[str, list[float]]] = {}
    for name, one in load("curves-settings")["models"].items():
        points = one["curves"]["mh.fit"][1::2]
        at = tuple(point["tokens"] for point in points)
        tables.setdefault(at, {})[name] = [point["held_out"] for point in points]
    return "\n\n".join(
        markdown(
            [
                ["tokens, millions", *losses],
                *(
                    [f"{tokens / 1e6:,.1f}", *(f"{one:.2f}" for one in row)]
                    for tokens, *row in zip(at, *losses.values(), strict=True)
                ),
            ]
        )
        for at, losses in tables.items()
    )
