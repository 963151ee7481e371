"""What a device keeps: its key, its number, and a run directory with the current model.

identity.key    the Ed25519 secret, in hexadecimal; mode 0600; it never leaves the device
device.json     the server, the run, the client's number, and the public keys of other clients it has met
left.safetensors    what a codec has left out of its updates so far, where it keeps that; mode 0600
config.json, checkpoints/ …    a run directory: `mh.load` reads the model there
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.atomic import (
    make_directory,
    read_json,
    sync_directory,
    write_atomically,
    write_json,
    write_synced,
)
from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.rundir import RunDirectory, fingerprint
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.errors import DataError, UserError
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, ProtocolRefused

__all__ = ["DeviceState"]

_IDENTITY, _ABOUT, _LEFT = "identity.key", "device.json", "left.safetensors"
_OWN = (_IDENTITY, f".{_IDENTITY}.writing", _ABOUT, f".{_ABOUT}.writing")


class DeviceState:
    """A device's folder: its key, its number and its run directory."""

    def __init__(self, path: Path) -> None:
        """Make it, or open it; UserError where it cannot be."""
        self.path = path
        try:
            make_directory(path)
            self.secret = self._identity()
        except OSError as error:
            raise UserError(f"--out {path}: cannot be used: {error.strerror}") from error
        self.about: dict[str, Any] = read_json(path / _ABOUT)
        self._directory: RunDirectory | None = None

    def _identity(self) -> bytes:
        path = self.path / _IDENTITY
        if not path.exists():
            _put_once(path, os.urandom(KEY_BYTES).hex().encode() + b"\n")
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path}: others can read it; chmod 600 {path}, and enrol anew if they may have")
        try:
            secret = bytes.fromhex(path.read_text("ascii").strip())
        except (UnicodeDecodeError, ValueError):
            secret = b""
        if len(secret) != KEY_BYTES:
            raise DataError(f"{path} is damaged; remove the folder and enrol anew")
        return secret

    @property
    def client(self) -> int | None:
        found = self.about.get("client")
        return found if isinstance(found, int) else None

    def remember(self, **facts: Any) -> None:
        self.about = {**self.about, **facts}
        write_json(self.path / _ABOUT, self.about)

    def require_known(self, roster: Mapping[int, bytes]) -> None:
        """Remember who the others are; ProtocolRefused where the server has given a number to another key since."""
        known = dict(self.about.get("known", {}))
        for client, key in roster.items():
            if known.setdefault(str(client), key.hex()) != key.hex():
                raise ProtocolRefused(f"client {client} is said to have another key than before")
        if known != self.about.get("known", {}):
            self.remember(known=known)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start or resume the run directory; UserError where another run, or another process, uses it."""
        if not RunDirectory.is_one(self.path):
            self._directory = RunDirectory.create(
                self.path, config, _OWN, "it is a device of another run; choose another --out"
            )
            return
        self._directory = RunDirectory.open(self.path)
        before, now = fingerprint(self._directory.config), fingerprint({**config, "samples": 0})
        conflict = fingerprint({**self._directory.config, "samples": 0}).conflict(now)
        if conflict is not None:
            self.close()
            raise UserError(f"--out {self.path}: is of another run of {before.task!r}: {conflict}")
        self._directory.update_config(config)

    def save(self, rounds: int, model: Mapping[str, Tensor]) -> None:
        assert self._directory is not None, "begin comes before save"
        store = self._directory.checkpoints(keep=1)
        store.remove_after(rounds)  # of a server that was set back
        store.save(Snapshot(step=rounds, model=model, optimizer={}))

    def load(self) -> Loaded | None:
        assert self._directory is not None, "begin comes before load"
        try:
            return self._directory.checkpoints(keep=1).load()
        except NoCheckpoint:
            return None

    def left(self, require: Callable[[Tensor, str], Tensor]) -> Tensor | None:
        """What `keep_left` had kept, None where it has not; `require` raises DataError where it does not fit."""
        path = self.path / _LEFT
        if not path.exists():
            return None
        try:
            found = read_tensors(path)
        except ValueError as error:
            raise DataError(f"{path} {error}; remove it") from error
        if found.keys() != {"left"}:
            raise DataError(f"{path}: holds other tensors than it should; remove it")
        return require(found["left"], str(path))

    def keep_left(self, left: Tensor) -> None:
        """What a codec has left out of this device's updates so far, to be added to the next."""
        write_atomically(self.path / _LEFT, encode_tensors({"left": left}), mode=0o600)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _put_once(path: Path, secret: bytes) -> None:
    """Write atomically, readable by the owner only; where another process was first, its file stays."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.unlink(missing_ok=True)  # of a process that was killed
    write_synced(temporary, [secret], mode=0o600)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        temporary.replace(path)
    temporary.unlink(missing_ok=True)
    sync_directory(path.parent)
