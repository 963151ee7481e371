"""What a server of devices keeps in its run directory, besides what every run has there.

    federated/clients.json   a place for each device: the hash of its token, and its public key
    federated/state.json     the course of rounds, saved before anybody is told of a new attempt
    checkpoints/             the model, what the algorithm keeps, and the course, after every round that counts

A round counts from the moment its checkpoint is in place. The sum of an open round is in memory alone: on the disk it
could be the update of a single client.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.data.store.atomic import make_directory, read_json, write_atomically, write_json
from manyhands.data.store.checkpoint import Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.fingerprint import fingerprint
from manyhands.data.store.rundir import ON_COMMAND_LINE, RunDirectory
from manyhands.errors import DataError, UserError
from manyhands.native.closeable import Closeable
from manyhands.strategies.federated.deployed.enrolment import Enrolment
from manyhands.strategies.federated.rounds.round_core import RoundState, as_json, state_of

__all__ = ["TOKENS", "ServerFiles", "new_run"]

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
        """What no other run is called."""
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
        """Before anybody is asked."""
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
        told = self._read(_STATE)
        if told:
            newer = state_of(told)
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
        """Let others have the directory."""
        self.directory.close()

    def _read(self, name: str) -> dict[str, Any]:
        return read_json(self._folder / name)


def _lines(path: Path) -> list[str]:
    """The lines of a file that its owner may have removed."""
    try:
        return path.read_text("ascii").split()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}; remove it if the tokens were handed out") from error


def new_run() -> str:
    """What no other run is called."""
    return secrets.token_hex(16)
