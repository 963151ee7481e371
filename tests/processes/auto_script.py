"""One of several processes that torchrun has started: `fit(strategy="auto")`.

auto_script.py FOLDER       writes RANK.json and RANK.pt into it
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import manyhands as mh
from manyhands.engine.dynamo import defer

defer()
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))


def main(folder: Path) -> None:
    from test_auto import AUTO, STEPS, task

    options = mh.Options(progress="none", resume_command="", insecure=True, timeout_s=60.0)
    run = mh.fit(task(), AUTO, workers=2, steps=STEPS, options=options)
    rank = os.environ["RANK"]
    torch.save(run.model.state_dict(), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps(run.summary["auto"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
