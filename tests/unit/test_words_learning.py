"""What cannot work is refused before anything is counted."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.errors import UserError
from manyhands.workloads.glove.learning import GloveOptions, Learning


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"strategy": "tensor"}, "batch=1: tensor works on batches"),
        (
            {"strategy": "hogwild", "glove": GloveOptions(batch=8)},
            "batch=8: hogwild takes one record at a time",
        ),
        (
            {"strategy": "central", "glove": GloveOptions(batch=8)},
            "central does not train glove; allowed: hogwild",
        ),
        (
            {"strategy": "tensor", "workers": 51, "glove": GloveOptions(batch=8)},
            "workers=51: tensor splits dim=50",
        ),
        ({"strategy": "allreduce algorithm=ring", "glove": GloveOptions(batch=8)}, "use allreduce"),
        ({"window": 0}, "window is 0; it must be an integer of at least 1"),
        ({"max_vocab": 1}, "max_vocab is 1; it must be an integer of at least 2"),
    ],
)
def test_what_can_not_work_is_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Learning(**asked)
