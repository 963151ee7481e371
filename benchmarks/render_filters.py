"""The documents' table of `filter=` and `keys=`: bytes and objective."""

from __future__ import annotations

from manyhands.errors import format_bytes
from results_read import load, markdown


def filters() -> str:
    """Bytes per epoch and how far above the minimum, of each setting alone and of all; then online, by FTRL."""
    result = load("filters")
    about = (
        f"**The minimum**: {result['examples']:,} examples, {result['features']:,} features, proximal gradient "
        f"descent, {result['steps']} epochs of one step. LIBLINEAR uses {result['least_weights']} weights."
    )
    rows = [["", "to servers", "from servers", "objective above the minimum", "weights"]]
    for row in result["minimum"]:
        sizes = [format_bytes(row[name]) for name in ("pushed", "pulled")]
        rows.append([row["case"], *sizes, f"{row['above']:.0e}", str(row["weights_used"])])
    online = [["", "to servers", "from servers", "log loss of unseen texts", "weights"]]
    for row in result["online"]:
        sizes = [format_bytes(row[name]) for name in ("pushed", "pulled")]
        online.append([row["case"], *sizes, f"{row['test_log_loss']:.4f}", str(row["weights_used"])])
    then = f"**Online**: the same examples by FTRL in batches of 100, {result['passes']} epochs."
    return f"{about}\n\n{markdown(rows)}\n\n{then}\n\n{markdown(online)}"
