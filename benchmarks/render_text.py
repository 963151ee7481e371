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
