"""Communication hooks on plain DistributedDataParallel over Gloo: what is exchanged is what the codecs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import warm
from manyhands.errors import UserError
from manyhands.interop import hooks

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import manyhands.interop.hooks
from manyhands.wire.codec import codec_named
from manyhands.wire.parcels import Parcel

rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)

def gradient_of(model, inputs):
    model.zero_grad()
    model(inputs).square().mean().backward()
    return torch.cat([one.grad.reshape(-1) for one in model.parameters()])

def inputs_of(step, worker):
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(10 * step + worker))

for text in ("topk:0.1+int8", "sign", "qsgd:7", "powersgd:1"):
    torch.manual_seed(1)
    net = nn.Linear(30, 20, bias=False)
    model = DistributedDataParallel(net)
    hook = manyhands.interop.hooks.compressed(text, seed=3)
    model.register_comm_hook(None, hook)
    codecs = [codec_named(text, seed=3, worker=worker) for worker in range(2)]
    parcel = Parcel.whole(0, 600, torch.float32)
    for step in range(9):
        if step == 5:  # another process goes on, and has its first two steps go as they are
            assert len(hook.memory()) == 1 + (text != "qsgd:7") + text.startswith("powersgd")
            memory = {name: one.clone() for name, one in hook.memory().items()}
            model = DistributedDataParallel(net)
            hook = manyhands.interop.hooks.compressed(text, seed=3)
            hook.remember(memory)
            model.register_comm_hook(None, hook)
        got = gradient_of(model, inputs_of(step, rank)).clone()
        with model.no_sync():
            parts = [gradient_of(net, inputs_of(step, worker)).clone() / 2 for worker in range(2)]
        if step % 5 < 2:
            expected = parts[0] + parts[1]
        elif text.startswith("powersgd"):
            both = [torch.empty_like(got) for _ in range(2)]
            dist.all_gather(both, got)
            assert torch.equal(both[0], both[1])
            assert torch.linalg.matrix_rank(got.view(20, 30), rtol=1e-4) == 1
            continue
        else:
            expected = torch.zeros(600)
            for codec, part in zip(codecs, parts):
                codec.at(step)
                room = torch.empty(codec.size(parcel), dtype=torch.uint8)
                codec.add(parcel, room[: codec.encode(parcel, part, room)], expected)
        assert torch.allclose(got, expected, rtol=1e-6, atol=1e-7), (text, step)
    assert int(hook.memory()["step"]) == 9
dist.barrier()
dist.destroy_process_group()
print("good")
"""


@pytest.mark.usefixtures("compiler_imported")
def test_buckets_are_exchanged_as_the_codec_says(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    commands = [[sys.executable, str(script), str(rank), str(tmp_path / "meet")] for rank in range(2)]
    workers = [
        warm.Popen(command, compiler=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    try:
        said = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [one.strip().splitlines()[-1] for one in said] == ["good", "good"], "\\n".join(said)


def test_a_hook_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="this hook would change nothing"):
        hooks.compressed("raw")
    with pytest.raises(UserError, match="start=1 must be at least 2"):
        hooks.compressed("topk:0.01", start=1)
    with pytest.raises(UserError, match="did you mean 'topk'"):
        hooks.compressed("topl:0.01")
    with pytest.raises(UserError, match=r"feedback=no: dgc:0.001 cannot work without feedback"):
        hooks.compressed("dgc:0.001", feedback=False)
    with pytest.raises(UserError, match="feedback=no: codec=qsgd:7 has no feedback to disable"):
        hooks.compressed("qsgd:7", feedback=False)
    with pytest.raises(UserError, match="memory has no 'step'; give a dict that memory"):
        hooks.compressed("qsgd:7").remember({})  # type: ignore[attr-defined]
