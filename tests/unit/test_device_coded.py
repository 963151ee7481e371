"""Updates made smaller by a codec, on their way from a device: what comes back, and what no codec has made."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

from manyhands.errors import DataError
from manyhands.strategies.federated.client_states import UpdateCoding
from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.deployed.protocol import MessageRejected, TensorForm, UpdateForm
from manyhands.strategies.federated.deployed.run_files import DeviceState
from manyhands.strategies.federated.strategy import Federated

FORM = TensorForm((("a", "float32", (20, 5)), ("b", "bfloat16", (3,)), ("c", "float32", ())))
ABOUT = {"samples": "3", "steps": "2", "loss": "0.5"}
CODECS = [
    "bf16",
    "fp16",
    "int8",
    "fp8",
    "qsgd",
    "ternary",
    "sign",
    "topk:0.1",
    "topk:0.1+int8",
    "randomk:0.2",
]


def updates(codec: str, form: TensorForm = FORM, **more: Any) -> UpdateForm:
    return UpdateForm(form, Federated(clients=4, codec=codec, **more), seed=7)


def change(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for _, dtype, shape in FORM.rows
    ]


@pytest.mark.parametrize("codec", CODECS)
def test_a_device_sends_what_a_simulated_client_does_round_after_round(codec: str) -> None:
    form, simulated = updates(codec), UpdateCoding(codec, seed=7)
    left = None
    for number in range(3):
        given = change(number)
        body, left = form.encode(given, ABOUT, left, client=2, number=number)
        found, about = form.decode(body, client=2)
        update = ClientUpdate(client=2, change=given, samples=3, steps=2, loss=0.5)
        carried = simulated.encoded(update, number, len(given))
        for mine, theirs in zip(found, carried.change, strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
        assert {name: about[name] for name in ABOUT} == ABOUT
        assert len(load(body)["update"]) == carried.encoded_bytes
        assert len(body) <= form.most_bytes
    assert (left is not None) == form.keeps == bool(simulated.kept(change(0), 3))


@pytest.mark.parametrize("codec", CODECS)
def test_bytes_that_no_codec_has_made_are_refused_or_are_an_update_of_the_models_size(codec: str) -> None:
    form = updates(codec)
    body, _ = form.encode(change(0), ABOUT, None, client=1, number=0)
    data = len(load(body)["update"])
    statuses = set()
    for turn in range(60):
        wrong = body[:-data] + os.urandom(data) if turn % 2 else body[: len(body) - turn] + os.urandom(turn)
        try:
            found, _ = form.decode(wrong, client=1)
        except MessageRejected as error:
            statuses.add(error.status)
        else:
            assert [tuple(one.shape) for one in found] == [shape for _, _, shape in FORM.rows]
    assert statuses <= {400, 422}
    for wrong in (b"", b"x", b"\xff" * 8, body[:-1], body + b"\0", body[:20], FORM.encode(change(0), ABOUT)):
        with pytest.raises(MessageRejected):
            form.decode(wrong, client=1)
    long = TensorForm((("update", "uint8", (100_000,)),)).encode(
        [torch.zeros(100_000, dtype=torch.uint8)], {}
    )
    with pytest.raises(MessageRejected) as report:
        form.decode(long, client=1)
    assert report.value.status == 413


def test_what_would_not_be_smaller_travels_as_it_is() -> None:
    small = TensorForm((("a", "float32", (1,)),))
    for codec in ("raw", "fp32", "int8"):
        form = updates(codec, small)
        body, left = form.encode([torch.tensor([2.5])], ABOUT, None, client=0, number=0)
        assert not form.is_coded
        assert body == small.encode([torch.tensor([2.5])], ABOUT)
        assert (left, form.most_bytes) == (None, small.most_bytes)
    assert not updates("raw").is_coded
    assert not updates("fp32").is_coded
    assert not updates("topk:0.1", feedback=False).keeps


def test_what_was_left_out_must_be_of_this_model(tmp_path: Path) -> None:
    device_state, form = DeviceState(tmp_path / "device"), updates("topk:0.1")
    assert device_state.left(form.parcel) is None
    device_state.keep_left(torch.ones(104))
    assert torch.equal(device_state.left(form.parcel), torch.ones(104))
    path = tmp_path / "device" / "left.safetensors"
    assert path.stat().st_mode & 0o777 == 0o600
    for wrong in (
        {"left": torch.ones(3)},
        {"left": torch.ones(104).double()},
        {"left": torch.full((104,), torch.inf)},
        {"other": torch.ones(104)},
    ):
        save_file(wrong, path)
        with pytest.raises(DataError, match="remove it"):
            device_state.left(form.parcel)
    path.write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match="remove it"):
        device_state.left(form.parcel)
