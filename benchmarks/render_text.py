"""How fast text becomes tokens, from the committed result."""

from __future__ import annotations

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
