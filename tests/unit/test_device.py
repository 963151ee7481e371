from collections import namedtuple

import pytest
import torch

from manyhands.engine.computing import NumberReader
from manyhands.engine.device import check_device, device_of, moved, sharing_sentence
from manyhands.errors import UserError

Pair = namedtuple("Pair", "x y")


def test_a_machine_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check_device("cpu") == "cpu"
    with pytest.raises(UserError, match="no GPU that torch can use"):
        check_device("cuda")
    with pytest.raises(UserError, match="allowed: cpu, cuda"):
        check_device("gpu")


def test_gpus_are_dealt_out_in_turn_and_sharing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(device_of("cuda", rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]
    assert str(device_of("cuda:1", 0)) == "cuda:1"
    with pytest.raises(UserError, match="2 GPUs, numbered from 0"):
        check_device("cuda:2")
    assert sharing_sentence("cuda", 3) == "3 workers share 2 GPUs"
    assert sharing_sentence("cuda:0", 2) == "2 workers share 1 GPU"
    assert sharing_sentence("cuda", 2) is None
    assert sharing_sentence("cpu", 9) is None


def test_every_tensor_of_a_batch_is_moved_and_nothing_else_changes() -> None:
    batch = {"a": (torch.ones(2), [torch.zeros(1), "text"]), "b": Pair(torch.ones(1), 7)}
    there = moved(batch, torch.device("meta"))
    assert there["a"][0].device.type == there["a"][1][0].device.type == there["b"].x.device.type == "meta"
    assert there["a"][1][1] == "text"
    assert there["b"].y == 7
    assert isinstance(there["a"], tuple)
    assert isinstance(there["b"], Pair)


def test_a_number_on_the_cpu_is_read_as_it_is() -> None:
    assert (
        NumberReader(torch.device("cpu")).ask(torch.tensor(0.1, dtype=torch.float64, requires_grad=True))()
        == 0.1
    )
