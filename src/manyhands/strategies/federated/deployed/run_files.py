"""What a server of devices keeps in its run directory, besides what every run has there; and what a device keeps.

    federated/clients.json   a place for each device: the hash of its token, and its public key
    federated/state.json     the course of rounds, saved before any device hears of a new attempt
    checkpoints/             the model, what the algorithm keeps, and the course, after every round that counts

A round counts from the moment its checkpoint is in place. The sum of an open round is in memory alone: on the disk it
could be the update of a single client.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store import atomic
from manyhands.data.store.atomic import read_json, write_atomically, write_json
from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory, fingerprint
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.errors import DataError, UserError
from manyhands.native.closeable import Closeable
from manyhands.strategies.federated.deployed.protocol import MessageRejected, body_hash, enrolment_text
from manyhands.strategies.federated.private_rounds import CLIENTS
from manyhands.strategies.federated.round_core import RoundState, as_json, state_of
from manyhands.strategies.federated.secure import primitives as crypto
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, ProtocolRefused
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import Strategy
from manyhands.wire.parcels import Parcel


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """One device's place: the SHA-256 of its token and, once taken, its public key."""

    token: str
    key: bytes = b""  # Ed25519; empty while the place is free


@dataclass(frozen=True, slots=True)
class Enrolment:
    """All places, by the clients' numbers."""

    places: tuple[DevicePlace, ...] = ()

    def grown(self, places: int) -> tuple[Enrolment, list[str]]:
        tokens = [secrets.token_urlsafe(24) for _ in range(places - len(self.places))]
        added = [DevicePlace(body_hash(token.encode())) for token in tokens]
        return Enrolment((*self.places, *added)), tokens

    def key_of(self, client: int) -> bytes:
        if not 0 <= client < len(self.places) or not self.places[client].key:
            raise MessageRejected(401, "this client is not enrolled")
        return self.places[client].key

    def enrol(self, request: Mapping[str, Any]) -> tuple[Enrolment, int]:
        """With the place of a token taken, and its number; MessageRejected where token, key or signature is wrong."""
        token = request.get("token")
        key = from_hex(request.get("key"), KEY_BYTES)
        signature = from_hex(request.get("signature"), crypto.SIGNATURE_BYTES)
        if not isinstance(token, str) or not token.isascii():
            raise MessageRejected(403, "the enrolment has no token")
        if not crypto.verify(key, signature, enrolment_text(token, key)):
            raise MessageRejected(403, "the enrolment is not signed with the key that it names")
        for number, place in enumerate(self.places):
            if not hmac.compare_digest(place.token, body_hash(token.encode())):
                continue
            if place.key == key:
                return self, number
            if not place.key and all(other.key != key for other in self.places):
                taken = replace(place, key=key)
                return Enrolment((*self.places[:number], taken, *self.places[number + 1 :])), number
        raise MessageRejected(403, "the enrolment token is unknown or was already used; ask for another one")

    @property
    def as_json(self) -> list[dict[str, str]]:
        return [{"token": place.token, "key": place.key.hex()} for place in self.places]

    @classmethod
    def of(cls, value: Any) -> Enrolment:
        try:
            return cls(tuple(DevicePlace(str(one["token"]), bytes.fromhex(one["key"])) for one in value))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the list of enrolled devices is damaged: {error!r}") from error


def from_hex(value: Any, num_bytes: int) -> bytes:
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != num_bytes:
        raise MessageRejected(400, f"a key, hash or signature is not {num_bytes} bytes in hexadecimal")
    return found


TOKENS = "enrolment-tokens.txt"
_FOLDER, _CLIENTS, _STATE = "federated", "clients.json", "state.json"
_KEPT_CHECKPOINTS = 3


class ServerFiles(Closeable):
    """A run directory of a server; a context manager, which holds its lock."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._folder = directory.path / _FOLDER
        self._checkpoints = directory.checkpoints(_KEPT_CHECKPOINTS)
        atomic.make_directory(self._folder)

    @classmethod
    def begin(cls, path: Path, config: Mapping[str, Any], *, resume: bool) -> ServerFiles:
        if not resume:
            return cls(RunDirectory.create(path, config, ("certificates",), ON_COMMAND_LINE))
        directory = RunDirectory.open(path)
        try:
            conflict = fingerprint(directory.config).conflict(fingerprint(config))
            if conflict is not None:
                raise UserError(f"{path} cannot be continued: {conflict}")
            directory.update_config({**config, "run": directory.config["run"]})
            return cls(directory)
        except BaseException:
            directory.close()
            raise

    @property
    def run(self) -> str:
        return str(self.directory.config["run"])

    def enrolment(self, places: int) -> tuple[Enrolment, Path | None]:
        found = Enrolment.of(read_json(self._folder / _CLIENTS).get("places", []))
        grown, tokens = found.grown(places)
        if not tokens:
            return found, None
        path = self.directory.path / TOKENS
        hashes = {place.token for place in found.places}
        try:
            before = [one for one in path.read_text("ascii").split() if body_hash(one.encode()) in hashes]
        except FileNotFoundError:
            before = []
        except (OSError, UnicodeDecodeError) as error:
            why = f"{path} cannot be read: {error}; remove it if the tokens were handed out"
            raise DataError(why) from error
        # Tokens first: otherwise a crash in between would leave places whose tokens were never written.
        write_atomically(path, (f"{token}\n".encode() for token in [*before, *tokens]), mode=0o600)
        self.save_enrolment(grown)
        return grown, path

    def save_enrolment(self, enrolment: Enrolment) -> None:
        """Called before a client learns its number."""
        write_json(self._folder / _CLIENTS, {"places": enrolment.as_json})

    def save_state(self, state: RoundState) -> None:
        write_json(self._folder / _STATE, as_json(state))

    def save_round(
        self,
        state: RoundState,
        model: Mapping[str, Tensor],
        kept: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """A round that counts; the rows of the history go with it, and come into the history once."""
        extra = {"rounds": as_json(state), **kept, "rows": [dict(row) for row in rows]}
        self._checkpoints.save(Snapshot(step=state.done, model=model, optimizer={}, extra=extra))
        if rows:
            self.directory.metrics.append(*rows)
        self.save_state(state)

    def load(self) -> tuple[RoundState, Loaded, int] | None:
        """The state to resume from, and how many rounds had counted after it, whose checkpoints are damaged.

        None where nothing was stored yet. The history is cut back to the checkpoint.
        """
        try:
            loaded = self._checkpoints.load()
        except NoCheckpoint:
            return None
        state, undone = state_of(loaded.extra.get("rounds")), 0
        stored = read_json(self._folder / _STATE)
        if stored:
            newer = state_of(stored)
            undone = max(0, newer.done - state.done)
            attempt, abandoned = max(state.attempt, newer.attempt), max(state.abandoned, newer.abandoned)
            state = newer if newer.done == state.done else state
            rejected = max(state.rejected, newer.rejected)
            state = replace(state, attempt=attempt, abandoned=abandoned, rejected=rejected)
        metrics = self.directory.metrics
        metrics.truncate_after(state.done)
        if not any(row["step"] == state.done for row in metrics.read()):
            metrics.append(*loaded.extra.get("rows", []))
        return state, loaded, undone

    def close(self) -> None:
        self.directory.close()


_IDENTITY, _ABOUT, _LEFT = "identity.key", "device.json", "left.safetensors"
_OWN_STATE = "own.safetensors"
_OWN = (_IDENTITY, f".{_IDENTITY}.writing", _ABOUT, f".{_ABOUT}.writing")


class DeviceState:
    """What a device keeps: its key, its number, and a run directory with the current model.

    identity.key        the Ed25519 secret, in hexadecimal; mode 0600; it never leaves the device
    device.json         the server, the run, the client's number, and the public keys of other clients it has met
    own.safetensors     what the algorithm lets it keep, as Ditto's model of its own, by the model's names; mode 0600
    left.safetensors    what a codec has left out of its updates so far, where it keeps that; mode 0600
    config.json, checkpoints/ …    a run directory: `mh.load` reads the model there
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            atomic.make_directory(path)
            self.secret = _identity(path / _IDENTITY)
        except OSError as error:
            raise UserError(f"--out {path}: cannot be used: {error.strerror}") from error
        self.about: dict[str, Any] = read_json(path / _ABOUT)
        self._directory: RunDirectory | None = None

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
                raise ProtocolRefused(f"the server gives client {client} another key than before")
        if known != self.about.get("known", {}):
            self.remember(known=known)

    def begin(self, config: Mapping[str, Any]) -> None:
        """Start or resume the run directory; UserError where another run, or another process, uses it."""
        if not RunDirectory.is_one(self.path):
            self._directory = RunDirectory.create(
                self.path, config, _OWN, "it belongs to a device of another run; choose another --out"
            )
            return
        self._directory = RunDirectory.open(self.path)
        before, now = fingerprint(self._directory.config), fingerprint({**config, "samples": 0})
        conflict = fingerprint({**self._directory.config, "samples": 0}).conflict(now)
        conflict = conflict or _less_private(str(self._directory.config["strategy"]), str(config["strategy"]))
        if conflict is not None:
            self.close()
            raise UserError(f"--out {self.path}: holds another run of {before.task!r}: {conflict}")
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

    def left(self, parcel: Parcel) -> Tensor | None:
        """What `keep_left` had kept of such a parcel, None where it has not; DataError where it does not fit."""
        path = self.path / _LEFT
        if not path.exists():
            return None
        try:
            found = read_tensors(path)
        except ValueError as error:
            raise DataError(f"{path} {error}; remove it") from error
        if found.keys() != {"left"}:
            raise DataError(f"{path}: holds unexpected tensors; remove it")
        left = found["left"]
        if left.shape != (parcel.count,) or left.dtype != parcel.dtype:
            raise DataError(f"{path}: does not hold updates of this model; remove it")
        if not bool(left.isfinite().all()):
            raise DataError(f"{path}: holds a number that is not finite; remove it")
        return left

    def own(self, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What `keep_own` had kept, some of the tensors in `like`; DataError where it does not fit them."""
        path = self.path / _OWN_STATE
        if not path.exists():
            return {}
        try:
            found = read_tensors(path)
        except ValueError as error:
            raise DataError(f"{path} {error}; remove it") from error
        for name, one in found.items():
            if name not in like or (one.shape, one.dtype) != (like[name].shape, like[name].dtype):
                raise DataError(f"{path}: does not hold what this run keeps; remove it")
        return found

    def keep_own(self, tensors: Mapping[str, Tensor]) -> None:
        if not tensors:
            (self.path / _OWN_STATE).unlink(missing_ok=True)
            return
        write_atomically(self.path / _OWN_STATE, encode_tensors(tensors), mode=0o600)

    def keep_left(self, left: Tensor) -> None:
        write_atomically(self.path / _LEFT, encode_tensors({"left": left}), mode=0o600)

    def close(self) -> None:
        if self._directory is not None:
            self._directory.close()
            self._directory = None


def _less_private(before: str, now: str) -> str | None:
    """Why a strategy protects a device from the server less than the one that it began with; None: it does not."""

    def protections(text: str) -> list[str]:
        strategy = Strategy.parse(text)
        if not isinstance(strategy, Federated) or not strategy.secure:
            return []
        noised = strategy.noise > 0 and strategy.noise_by == CLIENTS
        return ["secure=yes", "noise_by=clients"] if noised else ["secure=yes"]

    left = protections(now)
    gone = next((one for one in protections(before) if one not in left), None)
    return (
        gone and f"the server has given up {gone}, which protected this device from it; resume it with that"
    )


def _identity(path: Path) -> bytes:
    """The secret in this file, which is drawn at the first call; where another process was first, its file stays."""
    if not path.exists():
        temporary = path.with_name(f".{path.name}.writing")
        temporary.unlink(missing_ok=True)  # of a process that was killed
        atomic.write_synced(temporary, [os.urandom(KEY_BYTES).hex().encode() + b"\n"], mode=0o600)
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            temporary.replace(path)
        temporary.unlink(missing_ok=True)
        atomic.sync_directory(path.parent)
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read it; chmod 600 {path}, and enrol again if any did")
    try:
        secret = bytes.fromhex(path.read_text("ascii").strip())
    except (UnicodeDecodeError, ValueError):
        secret = b""
    if len(secret) != KEY_BYTES:
        raise DataError(f"{path} is damaged; remove the folder and enrol again")
    return secret
