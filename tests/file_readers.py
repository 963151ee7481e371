"""Every reader of a user's file or of a run's directory, with a valid sample made by the project's own writers.

`fuzz_files.py` damages the samples. One row per reader: `make` writes the sample into an empty folder, `files` are
those to damage, `read` reads the folder and does with it what the project does.
"""

from __future__ import annotations

import file_readers_checkpoints
import file_readers_data
import file_readers_runs
import file_readers_words
from file_reader import Reader

_KINDS = (file_readers_data, file_readers_words, file_readers_runs, file_readers_checkpoints)

READERS: dict[str, Reader] = {reader.name: reader for kind in _KINDS for reader in kind.ROWS}
