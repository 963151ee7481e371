"""Readers of checkpoints and what they are made of."""

from __future__ import annotations

from pathlib import Path

from file_reader import Reader


def _tensors(folder: Path) -> None:
    import torch

    from manyhands.data.store.tensorfile import encode_tensors

    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }
    (folder / "sample.safetensors").write_bytes(b"".join(encode_tensors(tensors)))


def _read_tensors(folder: Path) -> object:
    from manyhands.data.store.tensorfile import read_tensors

    return read_tensors(folder / "sample.safetensors")


def _manifest(folder: Path) -> None:
    from manyhands.data.store.atomic import FileDigest
    from manyhands.data.store.checkpoint import CONTENT_FILES, Manifest

    files = {name: FileDigest(num_bytes=9, sha256="0" * 64) for name in CONTENT_FILES}
    (folder / "manifest.json").write_bytes(Manifest(step=50, score=0.5, files=files).render())


def _read_manifest(folder: Path) -> object:
    from manyhands.data.store.checkpoint import Manifest

    return Manifest.parse((folder / "manifest.json").read_bytes())


def _checkpoint(folder: Path) -> None:
    import torch

    from manyhands.data.store.checkpoint import CheckpointStore, Snapshot

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = CheckpointStore(folder / "checkpoints", 3)
    store.save(Snapshot(step=50, model=model.state_dict(), optimizer=optimizer.state_dict()))


def _read_checkpoint(folder: Path) -> object:
    from manyhands.data.store.checkpoint import CheckpointStore

    return CheckpointStore(folder / "checkpoints", 3).load()


def _read_forged(folder: Path) -> object:
    """The same with a manifest that vouches for whatever the files now hold, as somebody who forges one would write."""
    import hashlib

    from manyhands.data.store.atomic import FileDigest
    from manyhands.data.store.checkpoint import CONTENT_FILES, Manifest

    one = folder / "checkpoints" / "step-00000050"
    contents = {name: (one / name).read_bytes() for name in CONTENT_FILES}
    files = {
        name: FileDigest(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    }
    (one / "manifest.json").write_bytes(Manifest(step=50, score=None, files=files).render())
    return _read_checkpoint(folder)


ROWS = (
    Reader(name="tensors", make=_tensors, read=_read_tensors, files=("*.safetensors",), allowed=(ValueError,)),
    Reader(name="manifest", make=_manifest, read=_read_manifest, files=("manifest.json",), allowed=(ValueError,)),
    Reader(name="checkpoint", make=_checkpoint, read=_read_checkpoint,
           files=("checkpoints/*/*.safetensors", "checkpoints/*/*.json")),
    Reader(name="checkpoint-forged", make=_checkpoint, read=_read_forged,
           files=("checkpoints/*/*.safetensors", "checkpoints/*/state.json")),
)  # fmt: skip
