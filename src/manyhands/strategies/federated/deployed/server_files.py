"""What a server of devices keeps in its run directory, besides what every run has there.

    federated/clients.json   a place for each device: the hash of its token, and its public key
    federated/state.json     the course of rounds, saved before anybody is told of a new attempt
    checkpoints/             the model, what the algorithm keeps, and the course, after every round that counts

A round counts from the moment its checkpoint is in place. The sum of an open round is in memory alone: on the disk it
could be the update of a single client.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.atomic import make_directory, read_json, write_atomically, write_json
from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.fingerprint import fingerprint
from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory
from manyhands.errors import DataError, UserError
from manyhands.native.closeable import Closeable
from manyhands.strategies.federated.deployed.protocol import MessageRejected, enrolment_text
from manyhands.strategies.federated.rounds.round_core import RoundState, as_json, state_of
from manyhands.strategies.federated.secure.primitives import KEY_BYTES, SIGNATURE_BYTES, verify

__all__ = ["ServerFiles", "from_hex", "new_run"]


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """One device's place: its token's hash and, once taken, its public key."""

    token: str
    """The SHA-256 of the token that opens it."""
    key: bytes = b""
    """The Ed25519 public key of the device that has the place; empty while it is free."""


@dataclass(frozen=True, slots=True)
class Enrolment:
    """All places, by the clients' numbers."""

    places: tuple[DevicePlace, ...] = ()

    def grown(self, places: int) -> tuple[Enrolment, list[str]]:
        tokens = [secrets.token_urlsafe(24) for _ in range(places - len(self.places))]
        return Enrolment((*self.places, *(DevicePlace(_hash(token)) for token in tokens))), tokens

    def has(self, token: str) -> bool:
        return any(hmac.compare_digest(place.token, _hash(token)) for place in self.places)

    def key_of(self, client: int) -> bytes:
        """A client's public key; MessageRejected where the place is not taken."""
        if not 0 <= client < len(self.places) or not self.places[client].key:
            raise MessageRejected(401, "this client is not enrolled")
        return self.places[client].key

    def enrol(self, asked: Mapping[str, Any]) -> tuple[Enrolment, int]:
        """With the place of a token taken, and its number; MessageRejected where token, key or signature is wrong."""
        token = asked.get("token")
        key = from_hex(asked.get("key"), KEY_BYTES)
        signature = from_hex(asked.get("signature"), SIGNATURE_BYTES)
        if not isinstance(token, str) or not token.isascii():
            raise MessageRejected(403, "the enrolment has no token")
        if not verify(key, signature, enrolment_text(token, key)):
            raise MessageRejected(403, "the enrolment is not signed with the key that it names")
        hashed = _hash(token)
        for number, place in enumerate(self.places):
            if not hmac.compare_digest(place.token, hashed):
                continue
            if place.key == key:
                return self, number
            if not place.key and all(other.key != key for other in self.places):
                taken = replace(place, key=key)
                return Enrolment((*self.places[:number], taken, *self.places[number + 1 :])), number
        raise MessageRejected(403, "the enrolment token is not known, or was used; ask for another one")

    @property
    def as_json(self) -> list[dict[str, str]]:
        return [{"token": place.token, "key": place.key.hex()} for place in self.places]

    @classmethod
    def of(cls, value: Any) -> Enrolment:
        """What `as_json` gave; DataError where it is not that."""
        try:
            return cls(tuple(DevicePlace(str(one["token"]), bytes.fromhex(one["key"])) for one in value))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the list of enrolled devices is damaged: {error!r}") from error


def from_hex(value: Any, num_bytes: int) -> bytes:
    """So many bytes, or MessageRejected."""
    try:
        found = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        found = b""
    if len(found) != num_bytes:
        raise MessageRejected(400, f"a key, hash or signature is not {num_bytes} bytes in hexadecimal")
    return found


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


TOKENS = "enrolment-tokens.txt"
_FOLDER, _CLIENTS, _STATE = "federated", "clients.json", "state.json"
_KEPT_CHECKPOINTS = 3


class ServerFiles(Closeable):
    """A run directory of a server; a context manager, which holds its lock."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._folder = directory.path / _FOLDER
        self._checkpoints = directory.checkpoints(_KEPT_CHECKPOINTS)
        make_directory(self._folder)

    @classmethod
    def begin(cls, path: Path, config: Mapping[str, Any], *, resume: bool) -> ServerFiles:
        """Start a run in this directory, or resume the one in it; UserError where that is a different run."""
        if not resume:
            return cls(RunDirectory.create(path, config, ("certificates",), ON_COMMAND_LINE))
        directory = RunDirectory.open(path)
        try:
            conflict = fingerprint(directory.config).conflict(fingerprint(config))
            if conflict is not None:
                raise UserError(f"{path} cannot be gone on with: {conflict}")
            directory.update_config({**config, "run": directory.config["run"]})
            return cls(directory)
        except BaseException:
            directory.close()
            raise

    @property
    def run(self) -> str:
        return str(self.directory.config["run"])

    def enrolment(self, places: int) -> tuple[Enrolment, Path | None]:
        """The enrolment with at least so many places, and the file of new tokens, if there are any."""
        found = Enrolment.of(self._read(_CLIENTS).get("places", []))
        grown, tokens = found.grown(places)
        if not tokens:
            return found, None
        path = self.directory.path / TOKENS
        before = [token for token in _lines(path) if found.has(token)]  # others open nothing
        # Tokens first: otherwise a crash in between would leave places whose tokens were never written.
        write_atomically(path, (f"{token}\n".encode() for token in [*before, *tokens]), mode=0o600)
        self.save_enrolment(grown)
        return grown, path

    def save_enrolment(self, enrolment: Enrolment) -> None:
        """Store the enrolment; called before a client is told its number."""
        write_json(self._folder / _CLIENTS, {"places": enrolment.as_json})

    def save_state(self, state: RoundState) -> None:
        write_json(self._folder / _STATE, as_json(state))

    def save_round(
        self, state: RoundState, model: Mapping[str, Tensor], memory: Any, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """A round that counts; the rows of the history go with it, and come into the history once."""
        extra = {"rounds": as_json(state), "algorithm": memory, "rows": [dict(row) for row in rows]}
        self._checkpoints.save(Snapshot(step=state.done, model=model, optimizer={}, extra=extra))
        if rows:
            self.directory.metrics.append(*rows)
        self.save_state(state)

    def load(self) -> tuple[RoundState, Loaded] | None:
        """The state to resume from; None where nothing was stored yet. The history is cut back to the checkpoint."""
        try:
            loaded = self._checkpoints.load()
        except NoCheckpoint:
            return None
        state = state_of(loaded.extra.get("rounds"))
        stored = self._read(_STATE)
        if stored:
            newer = state_of(stored)
            attempt, abandoned = max(state.attempt, newer.attempt), max(state.abandoned, newer.abandoned)
            state = newer if newer.done == state.done else state
            rejected = max(state.rejected, newer.rejected)
            state = replace(state, attempt=attempt, abandoned=abandoned, rejected=rejected)
        metrics = self.directory.metrics
        metrics.truncate_after(state.done)
        if not any(row["step"] == state.done for row in metrics.read()):
            metrics.append(*loaded.extra.get("rows", []))
        return state, loaded

    def close(self) -> None:
        self.directory.close()

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._folder / name)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("ascii").split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it if the tokens were handed out") from error


def new_run() -> str:
    return secrets.token_hex(16)
