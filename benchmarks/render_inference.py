"""The table of `manyhands bench inference` in the documents."""

from __future__ import annotations

from results_read import has, load, markdown


def inference_speed() -> str:
    """Inputs a second for each model, workers and batch, a column for each precision."""
    if not has("inference"):
        return (
            "*Not measured yet: `manyhands bench inference --models digits,gpt,recurrent --batches 1,8,64 "
            "--json benchmarks/results/inference.json`.*"
        )
    result = load("inference")
    precisions = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    cells = {
        (row["model"], row["workers"], row["batch"], row["precision"]): (
            f"{row['inputs_per_s']:,.0f}/s, {row['p50_ms']:.1f} ms"
            + ("" if row["agreement"] > 0.9995 else f", {100 * row['agreement']:.1f} %")
        )
        for row in result["rows"]
    }
    rows = [["model, workers × batch", *precisions]]
    for model, workers, batch in dict.fromkeys(key[:3] for key in cells if key[2] != 8):
        found = [cells.get((model, workers, batch, precision), "") for precision in precisions]
        rows.append([f"{model}, {workers} × {batch}", *found])
    title = f"**{result['cores']} cores ({result['machine']}), torch {result['torch']}**"
    return f"{title}\n\n{markdown(rows)}"
